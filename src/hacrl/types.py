"""The nouns of hacrl. Plain frozen dataclasses; nothing here imports torch.

What crosses the pool is a `Trajectory`: text and a few numbers, as JSON. What stays with the agent
that sampled it is a `Rollout`: token ids and log-probabilities. A learner trains on `Sample`s, made
from both (see views.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
"""Version of stored trajectories; the pool refuses others."""

STORED = {"extra": "forbid", "allow_inf_nan": False, "revalidate_instances": "always"}
"""Pydantic settings for stored types (store/codec.py); nested types inherit them."""


class Finish(StrEnum):
    """How a completion ended."""

    STOP = "stop"  # the model wrote an end token
    LENGTH = "length"  # the reply reached the token limit
    NOT_ATTEMPTED = "not_attempted"  # the prompt is too long for this agent; nothing was sampled


class Status(StrEnum):
    """What a verifier found."""

    OK = "ok"
    WRONG = "wrong"
    UNPARSED = "unparsed"  # no answer found in the reply: judged, reward 0
    TIMEOUT = "timeout"  # the verifier ran out of time: not judged
    ERROR = "error"  # the verifier raised or died: not judged


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

    id: str
    """Unique in its task; the same problem has the same id for every agent."""
    messages: tuple[Message, ...]
    """The conversation up to the reply, without any agent's system text."""
    answer: str
    """The gold answer, as text."""
    task: str
    """Which task it belongs to, for capability by task and for tables."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the data row, for verifiers that want them."""


@dataclass(frozen=True)
class Verdict:
    """What the verifier says of one reply.

    Example: Verdict(reward=1.0, status=Status.OK, detail="42")
    """

    reward: float
    """Meaningless unless judged."""
    status: Status
    detail: str = ""
    """The extracted answer, or what went wrong."""

    @property
    def judged(self) -> bool:
        """False for TIMEOUT and ERROR: a broken verifier must not look like a weak model."""
        return self.status not in (Status.TIMEOUT, Status.ERROR)


@dataclass(frozen=True)
class Completion:
    """What a sampler wrote after a prompt. Stays with the agent that sampled it.

    Example: Completion(text="42", token_ids=(7, 5, 2), logprobs=(-0.1, -0.3, -0.01), finish=STOP)
    """

    text: str
    """Decoded reply without the end token (and without a begun reply, which is prompt)."""
    token_ids: tuple[int, ...]
    """Exactly as sampled, the end token included when finish is STOP."""
    logprobs: tuple[float, ...]
    """One for each token, of logits / temperature."""
    finish: Finish


@dataclass(frozen=True)
class Rollout:
    """One own attempt at a problem: a journal row. Never leaves the agent.

    Example: Rollout(problem_id="add-17-25", index=0, step=3, prompt_ids=(1, 9), completion=...,
             verdict=Verdict(1.0, Status.OK), shareable=True)
    """

    __pydantic_config__ = STORED

    problem_id: str
    index: int
    """0 .. samples_per_prompt - 1."""
    step: int
    prompt_ids: tuple[int, ...]
    completion: Completion
    """Its logprobs are the behaviour log-probabilities: the trainer's, at the sampling weights."""
    verdict: Verdict | None = None
    """None until verified."""
    shareable: bool = True
    """False when the text does not carry the ids (rendering law)."""

    @property
    def mean_logprob(self) -> float:
        return sum(self.completion.logprobs) / len(self.completion.logprobs)


@dataclass(frozen=True)
class Turn:
    """One piece of a reply. `generated` is False for a begun reply, which the sampler did not write.

    Example: Turn(role="assistant", text=" 42.", generated=True)
    """

    __pydantic_config__ = STORED

    role: str
    text: str
    generated: bool


@dataclass(frozen=True)
class Sampling:
    """How a trajectory was drawn.

    Example: Sampling(temperature=1.0, limit=32)
    """

    __pydantic_config__ = STORED

    temperature: float
    limit: int
    """Most new tokens allowed."""


@dataclass(frozen=True)
class Tokens:
    """Token detail of a trajectory, for algorithms that ask for it and equal vocabularies.

    Example: Tokens(tokenizer="sha256:ab..", ids=(7, 5, 2), logprobs=(-0.1, -0.3, -0.01))
    """

    __pydantic_config__ = STORED

    tokenizer: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Trajectory:
    """What the pool holds of one attempt; peers see nothing else. Stored as JSON.

    Example: Trajectory(problem_id="add-17-25", task="add", agent="ant", index=0, step=3,
             policy_version=3, turns=(Turn("assistant", "42", True),), finish=Finish.STOP,
             mean_logprob=-0.14, num_tokens=3, verdict=Verdict(1.0, Status.OK), verifier="number/1",
             sampling=Sampling(1.0, 32), shareable=True)
    """

    __pydantic_config__ = STORED

    problem_id: str
    task: str
    agent: str
    index: int
    step: int
    policy_version: int
    """Number of steps learned by the weights that sampled."""
    turns: tuple[Turn, ...]
    """One generated turn today; a begun reply comes before it. Empty when not attempted."""
    finish: Finish
    mean_logprob: float | None
    """Mean over the source's own tokens; None for a member without log-probabilities."""
    num_tokens: int
    verdict: Verdict | None
    """None when not attempted."""
    verifier: str
    """Name and version of the verifier that judged it."""
    sampling: Sampling
    shareable: bool
    tokenizer: str = ""
    """Fingerprint of the source's tokenizer: tells a learner when it is its own."""
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
        """Only for judged trajectories."""
        assert self.verdict is not None and self.verdict.judged
        return self.verdict.reward

    @property
    def text(self) -> str:
        """What the source generated."""
        return "".join(t.text for t in self.turns if t.generated)

    @property
    def begun(self) -> str:
        """The begun reply that the source's text continues; usually empty."""
        return "".join(t.text for t in self.turns if not t.generated)


@dataclass(frozen=True)
class Group:
    """A problem and all its trajectories of a step's snapshot, ordered by agent and index.

    Example: Group(problem_id="add-17-25", task="add", trajectories=(t_ant_0, t_ant_1, t_bee_0))
    """

    problem_id: str
    task: str
    trajectories: tuple[Trajectory, ...]

    @cached_property
    def judged(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if t.judged)

    def rewards(self, agent: str | None = None) -> list[float]:
        """Judged rewards of one agent, or of all."""
        return [t.reward for t in self.judged if agent is None or t.agent == agent]


@dataclass(frozen=True)
class Snapshot:
    """The committed fact of a step: who took part and which rows count. Written once.

    Example: Snapshot(step=3, members=("ant", "bee"), groups=(Group(...), ...))
    """

    step: int
    members: tuple[str, ...]
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Sample:
    """One row of a learner's training data, in the learner's own tokens.

    Example: Sample(problem_id="add-17-25", index=0, source="bee", is_own=False,
             token_ids=(1, 9, 7, 5, 2), loss_mask=(0, 0, 1, 1, 1), behaviour=-0.14,
             advantage=0.9, weight=1.2)
    """

    problem_id: str
    index: int
    source: str
    """Name of the agent that wrote it."""
    is_own: bool
    token_ids: tuple[int, ...]
    """Prompt and reply."""
    loss_mask: tuple[int, ...]
    """1 where a token belongs to the reply."""
    behaviour: float | None
    """Mean log-probability of the source over its own tokens, at the weights that sampled."""
    old_logprobs: tuple[float, ...] | None = None
    """The learner's log-probabilities of the reply's tokens before the first update of the step:
    own samples always have them, peers' samples if the algorithm needs them (Needs.score_peers)."""
    source_logprobs: tuple[float, ...] | None = None
    """The source's log-probabilities of the reply's tokens, where its tokens are the learner's own;
    only for algorithms with Needs("tokens")."""
    advantage: float = 0.0
    weight: float = 1.0
    """A peer's sample by its source: w(source, learner) for hacpo, v for overlap; 1 for an own one."""
    finish: Finish = Finish.STOP
    truncated: bool = False
    """Only the beginning of a peer's reply that is too long for the learner."""

    @property
    def num_reply_tokens(self) -> int:
        return sum(self.loss_mask)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """What stands before the reply."""
        return self.token_ids[: self.loss_mask.index(1)] if 1 in self.loss_mask else ()


Order = Literal["own_first", "peers_first", "mixed"]
"""In which order a step's updates take own and peers' samples; mixed: both in each."""


@dataclass(frozen=True)
class Update:
    """One planned parameter update of a step (plan.py).

    Example: Update(index=2, count=4, floor=0.85, part="peers", problems=("add-17-25", ...))
    """

    index: int
    """m of the paper: updates planned before this one in the step."""
    count: int
    """U: updates planned in the step."""
    floor: float
    """Lower end of the peers' trust interval at this update."""
    part: str
    """own, peers or mixed."""
    problems: tuple[str, ...]
    """Whole groups, in seeded order."""


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one micro-batch: B sequences, T reply tokens (padded right), and the divisors of
    the whole minibatch, so that the losses of its micro-batches add up to the minibatch's loss.

    Example: see tests/algorithms/test_losses.py, which builds some by hand.
    """

    logprobs_BT: Tensor
    """The learner's current log-probabilities, with gradient; 0 where padded."""
    mask_BT: Tensor
    """1.0 for a reply token, 0.0 for padding."""
    behaviour_B: Tensor
    """nan where the source had none."""
    old_logprobs_BT: Tensor | None
    """nan in the rows of samples without; None where no sample of the micro-batch has any."""
    ref_logprobs_BT: Tensor | None
    """At the start weights; None unless the KL term is on and the minibatch has own samples."""
    advantage_B: Tensor
    weight_B: Tensor
    is_own_B: Tensor
    """bool"""
    num_samples: int
    """Samples in the whole minibatch."""
    num_own: int
    """Own samples in the whole minibatch."""
    num_tokens: int
    """Reply tokens in the whole minibatch."""
    num_own_tokens: int = 0
    """Reply tokens of its own samples."""
    source_logprobs_BT: Tensor | None = None
    """The source's log-probabilities of the same tokens; None unless the algorithm has
    Needs("tokens")."""

    @property
    def mean_logprob_B(self) -> Tensor:
        """Mean over each row's own tokens: log pi_k(y) / |y|."""
        return (self.logprobs_BT * self.mask_BT).sum(1) / self.mask_BT.sum(1)


@dataclass(frozen=True)
class LossOutput:
    """What a loss returns: a scalar with gradient and facts about it without. Tensors all of them: who
    reads a value waits for the GPU, and the update does that once, at its end.

    Example: LossOutput(loss=tensor(0.12), ratio_B=tensor([1.0, 0.9]), used_B=tensor([True, False]))
    """

    loss: Tensor
    ratio_B: Tensor
    """s of every row, detached: kept for metrics and `hacrl samples`."""
    used_B: Tensor
    """bool: rows whose gradient is not exactly zero because of a clip (advantage aside)."""
    kl: Tensor | float = 0.0
    """This micro-batch's share of the KL term's mean, before beta."""
