"""The types that modules exchange: plain frozen dataclasses, without torch.

An agent keeps its `Rollout`s, with token ids and log-probabilities, and publishes `Trajectory`s: text
and a few numbers. A learner trains on `Sample`s, made from both (training/samples.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1  # version of the stored form of a trajectory; the pool refuses other versions

STORED = {"extra": "forbid", "allow_inf_nan": False, "revalidate_instances": "always"}
"""How pydantic validates stored values (store/codec.py); nested dataclasses inherit it."""


class Finish(StrEnum):
    """How a completion ended."""

    STOP = "stop"  # the model wrote an end token
    LENGTH = "length"  # the reply reached the token limit
    NOT_ATTEMPTED = "not_attempted"  # the prompt is too long for this agent; nothing was sampled
    WITHHELD = "withheld"  # only the outcome was published (agents.*.publish)


class Status(StrEnum):
    """The result of a verifier."""

    OK = "ok"
    WRONG = "wrong"
    UNPARSED = "unparsed"  # no answer found in the reply: judged, reward 0
    TIMEOUT = "timeout"  # the verifier ran out of time: not judged
    ERROR = "error"  # the verifier raised or died: not judged


NOT_JUDGED = (Status.TIMEOUT, Status.ERROR)


@dataclass(frozen=True)
class Message:
    """One turn of a prompt.

    Example: Message(role="user", content="What is 17 + 25?")
    """

    role: str
    content: str


@dataclass(frozen=True)
class Problem:
    """A question with its known answer.

    Example: Problem(id="add-17-25", messages=(Message("user", "17+25"),), answer="42", task="add")
    """

    id: str  # unique in its task; the same problem has the same id for every agent
    messages: tuple[Message, ...]
    """The conversation up to the reply, without any agent's system text."""
    answer: str  # the reference answer, as text
    task: str  # its name, for capability by task and for tables
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the data row, for verifiers that want them."""
    asked: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The columns of question, answer and id under their names in the file, for reward functions."""


@dataclass(frozen=True)
class Verdict:
    """The verifier's judgement of one reply.

    Example: Verdict(reward=1.0, status=Status.OK, detail="42")
    """

    reward: float  # defined only if judged
    status: Status
    detail: str = ""  # the extracted answer, or the error
    parts: tuple[tuple[str, float], ...] = ()
    """Name and reward of each part of a sum, before its weight. Not published."""

    @property
    def judged(self) -> bool:
        """False for TIMEOUT and ERROR: a failing verifier says nothing about the reply."""
        return self.status not in NOT_JUDGED


@dataclass(frozen=True)
class Completion:
    """A sampled reply. It is not published.

    Example: Completion(text="42", token_ids=(7, 5, 2), logprobs=(-0.1, -0.3, -0.01), finish=STOP)
    """

    text: str
    """Decoded reply without the end token and without `reply_start`, which is part of the prompt."""
    token_ids: tuple[int, ...]  # exactly as sampled, including the end token if finish is STOP
    logprobs: tuple[float, ...]  # one per token, of logits / temperature
    finish: Finish


@dataclass(frozen=True)
class Rollout:
    """One reply of an agent to a problem, as stored in its journal. It is not published.

    Example: Rollout(problem_id="add-17-25", index=0, step=3, prompt_ids=(1, 9), completion=...,
             verdict=Verdict(1.0, Status.OK), shareable=True)
    """

    __pydantic_config__ = STORED

    problem_id: str
    index: int  # 0 .. samples_per_prompt - 1.
    step: int
    prompt_ids: tuple[int, ...]
    completion: Completion  # its logprobs are the trainer's, at the weights that sampled
    verdict: Verdict | None = None  # None until verified
    shareable: bool = True  # False if the text does not determine the ids (rendering law)

    @property
    def mean_logprob(self) -> float:
        return sum(self.completion.logprobs) / len(self.completion.logprobs)


@dataclass(frozen=True)
class Turn:
    """One piece of a reply. `generated` is False for `reply_start`, which was not sampled.

    Example: Turn(role="assistant", text=" 42.", generated=True)
    """

    role: str
    text: str
    generated: bool


@dataclass(frozen=True)
class Sampling:
    """How a trajectory was sampled.

    Example: Sampling(temperature=1.0, limit=32)
    """

    temperature: float
    limit: int  # token limit of the reply


@dataclass(frozen=True)
class Tokens:
    """Token ids and log-probabilities of a trajectory, for algorithms with Needs("tokens").

    Example: Tokens(tokenizer="sha256:ab..", ids=(7, 5, 2), logprobs=(-0.1, -0.3, -0.01))
    """

    tokenizer: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Trajectory:
    """What an agent publishes of one reply; stored as JSON.

    Example: Trajectory(problem_id="add-17-25", agent="ant", index=0, step=3, mean_logprob=-0.14,
             num_tokens=3, turns=(Turn("assistant", "42", True),), finish=Finish.STOP, ...)
    """

    __pydantic_config__ = STORED

    problem_id: str
    task: str
    agent: str
    index: int
    step: int
    policy_version: int  # number of steps that the sampling weights had learned
    turns: tuple[Turn, ...]
    """One generated turn, after `reply_start` if the agent has one. Empty without a text."""
    finish: Finish
    mean_logprob: float | None
    """Mean over the source's tokens; None for a source without log-probabilities, or if withheld."""
    num_tokens: int
    verdict: Verdict | None  # None if not attempted
    verifier: str  # name and version of the verifier
    sampling: Sampling
    shareable: bool
    tokenizer: str = ""  # hash of the source's vocabulary
    tokens: Tokens | None = None
    schema: int = SCHEMA

    @property
    def key(self) -> tuple[int, str, str, int]:
        """What identifies a row of the pool."""
        return (self.step, self.agent, self.problem_id, self.index)

    @property
    def judged(self) -> bool:
        return self.verdict is not None and self.verdict.judged

    @property
    def reward(self) -> float:
        """Defined only for judged trajectories."""
        assert self.verdict is not None and self.verdict.judged
        return self.verdict.reward

    @property
    def is_right(self) -> bool:
        """Whether the verdict is OK."""
        return self.verdict is not None and self.verdict.status is Status.OK

    @property
    def text(self) -> str:
        """The sampled text."""
        return "".join(t.text for t in self.turns if t.generated)

    @property
    def reply_start(self) -> str:
        """The source's `reply_start`, which its text continues; usually empty."""
        return "".join(t.text for t in self.turns if not t.generated)


@dataclass(frozen=True)
class Group:
    """All replies to one problem in a step's snapshot, ordered by agent and index.

    Example: Group(problem_id="add-17-25", task="add", trajectories=(t_ant_0, t_ant_1, t_bee_0))
    """

    problem_id: str
    task: str
    trajectories: tuple[Trajectory, ...]

    @cached_property
    def judged(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if t.judged)

    @cached_property
    def _rewards(self) -> dict[str | None, list[float]]:
        """Judged rewards of each agent; of all under None. Cached, because `credit` asks per sample."""
        found: dict[str | None, list[float]] = {None: [t.reward for t in self.judged]}
        for t in self.judged:
            found.setdefault(t.agent, []).append(t.reward)
        return found

    def rewards(self, agent: str | None = None) -> list[float]:
        """Judged rewards of one agent, or of all."""
        return list(self._rewards.get(agent, ()))


def make_groups(rows: Iterable[Trajectory]) -> tuple[Group, ...]:
    """The rows by problem id, in each group by agent and index."""
    groups: dict[str, list[Trajectory]] = {}
    for row in sorted(rows, key=attrgetter("problem_id", "agent", "index")):
        groups.setdefault(row.problem_id, []).append(row)
    return tuple(Group(name, group[0].task, tuple(group)) for name, group in groups.items())


@dataclass(frozen=True)
class Snapshot:
    """The immutable record of a closed step: its members and their trajectories.

    Example: Snapshot(step=3, members=("ant", "bee"), groups=(Group(...), ...))
    """

    step: int
    members: tuple[str, ...]
    groups: tuple[Group, ...]
    unreadable: tuple[tuple[str, str], ...] = ()
    """(agent, reason) of every published row that is no trajectory of this agent and step."""

    @property
    def rows(self) -> list[Trajectory]:
        """All trajectories."""
        return [t for group in self.groups for t in group.trajectories]

    def mapped(self, change: Callable[[Trajectory], Trajectory | None]) -> Snapshot:
        """The snapshot with changed rows. None leaves a row out."""
        groups = []
        for group in self.groups:
            rows = tuple(t for row in group.trajectories if (t := change(row)) is not None)
            if rows:
                groups.append(Group(group.problem_id, group.task, rows))
        return replace(self, groups=tuple(groups))


@dataclass(frozen=True)
class Sample:
    """One training sample of a learner, in the learner's tokens.

    Example: Sample(problem_id="add-17-25", index=0, source="bee", is_own=False,
             token_ids=(1, 9, 7, 5, 2), loss_mask=(0, 0, 1, 1, 1), behaviour=-0.14)
    """

    problem_id: str
    index: int
    source: str  # the agent that wrote it
    is_own: bool
    token_ids: tuple[int, ...]  # prompt and reply
    loss_mask: tuple[int, ...]  # 1 for tokens of the reply
    behaviour: float | None
    """The source's mean log-probability over its tokens, at the weights that sampled."""
    old_logprobs: tuple[float, ...] | None = None
    """The learner's log-probabilities of the reply's tokens before the first update of the step. Own
    samples always have them, peers' samples if the algorithm needs them (Needs.score_peers)."""
    source_logprobs: tuple[float, ...] | None = None
    """The source's log-probabilities of the same tokens; only for algorithms with Needs("tokens")."""
    advantage: float = 0.0
    weight: float = 1.0  # 1 for own samples; for peers' w(source, learner) in hacpo, v in overlap
    truncated: bool = False  # only the beginning of a peer's reply that is too long for the learner

    @property
    def num_reply_tokens(self) -> int:
        return sum(self.loss_mask)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.token_ids[: self.loss_mask.index(1)] if 1 in self.loss_mask else ()


@dataclass(frozen=True)
class Update:
    """One planned optimizer update of a step (training/plan.py).

    Example: Update(index=2, floor=0.85, part="peers", problems=("add-17-25", ...))
    """

    index: int  # m of the paper: the number of updates planned before this one in the step
    floor: float
    """Smallest ratio at which hacpo learns from a peer's sample in this update; 0 for others."""
    part: str  # own, peers or mixed
    problems: tuple[str, ...]  # in seeded order; an update takes whole groups
    rate: float = 1.0  # factor of the learning rate (training/schedule.py)


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one micro-batch: B sequences, T reply tokens (padded right). The counts are of the
    whole minibatch, so that the losses of its micro-batches add up to the minibatch's loss.

    Example: tests/algorithms/by_hand.py builds some by hand.
    """

    logprobs_BT: Tensor  # the learner's current log-probabilities, with gradient; 0 where padded
    mask_BT: Tensor  # 1.0 for a reply token, 0.0 for padding
    behaviour_B: Tensor  # the source's mean log-probability; nan where it published none
    old_logprobs_BT: Tensor | None  # nan in rows of samples without them; None if no row has any
    ref_logprobs_BT: Tensor | None
    """At the start weights; None without KL term or without own samples in the minibatch."""
    advantage_B: Tensor
    weight_B: Tensor
    is_own_B: Tensor  # Boolean
    num_samples: int  # of the whole minibatch, like the counts below
    num_own: int
    num_tokens: int  # reply tokens
    num_own_tokens: int = 0
    source_logprobs_BT: Tensor | None = None
    """The source's log-probabilities of the same tokens; None without Needs("tokens")."""

    @property
    def mean_logprob_B(self) -> Tensor:
        """Mean over each row's tokens: log pi_k(y) / |y|."""
        return (self.logprobs_BT * self.mask_BT).sum(1) / self.mask_BT.sum(1)


@dataclass(frozen=True)
class LossOutput:
    """The result of a loss. Values stay tensors: reading one waits for the GPU, and the update reads
    all of them once, at its end.

    Example: LossOutput(loss=tensor(0.12), ratio_B=tensor([1.0, 0.9]), weight_B=tensor([1.0, 0.0]))
    """

    loss: Tensor  # a scalar with gradient; the other fields have none
    ratio_B: Tensor  # s of every row, for metrics and `hacrl samples`
    weight_B: Tensor
    """The factor of each row's gradient without its advantage; for token-wise losses a mean over tokens.
    Exactly 0 if a clip removes the gradient."""
    kl: Tensor | float = 0.0  # this micro-batch's part of the KL, before beta
