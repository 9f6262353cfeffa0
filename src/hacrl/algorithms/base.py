"""The interface of an algorithm: what it needs from a step, `credit` and `loss`.

A new algorithm is one file: a subclass of `Algorithm`. docs/extending.md lists the entries of a built-in
one in other files. The trainer never checks an algorithm's name.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from hacrl.algorithms.capability import Capability
from hacrl.algorithms.functional import advantage, mean
from hacrl.types import Group, LossOutput, MicroBatch, Sample, Trajectory, Update

Peers = Literal["none", "outcomes", "text", "logprob", "tokens"]
ScorePeers = Literal["never", "before_credit", "after_credit"]
PeerFilter = Literal["all", "successes", "failures", "where_i_failed"]
Updates = Literal["own_first", "peers_first", "mixed", "with_own"]


@dataclass(frozen=True)
class Needs:
    """What an algorithm needs from a step.

    Example: Needs("logprob", "before_credit", "mixed")
    """

    peers: Peers = "none"
    """What it uses of peers' replies. outcomes: their rewards only. text: samples of them. logprob:
    samples whose source published a mean log-probability. tokens: samples with the source's token
    log-probabilities, from peers with the learner's vocabulary only."""
    score_peers: ScorePeers = "never"
    """When the learner scores peers' samples, i.e. computes their `Sample.old_logprobs`. Own samples
    always have them. before_credit: all peers' samples, then `credit` runs. after_credit: `credit` runs,
    the samples that it returns are scored, and `credit` runs again on these."""
    updates: Updates = "own_first"
    """How samples become updates. own_first, peers_first: separate updates for own and peers' samples.
    mixed: own and peers' samples of a problem in one update. with_own: the learner makes as many updates
    as alone, and peers' samples join the update of their problem. Problems that have only peers' samples
    come last."""

    def include(self, what: Peers) -> bool:
        """Whether peers' replies are needed at this level: Needs("logprob").include("text") is True."""
        levels = get_args(Peers)
        return levels.index(self.peers) >= levels.index(what)

    @property
    def peers_add_updates(self) -> bool:
        """Whether the learner makes more updates with peers' samples than alone."""
        return self.include("text") and self.updates != "with_own"


@dataclass(frozen=True)
class Step:
    """A closed step as one learner sees it: the input of `credit`."""

    learner: str
    samples: Sequence[Sample]
    groups: Sequence[Group]
    """All problems with the replies of all agents, including replies that became no sample."""
    capability: Capability
    trusted: Collection[str] | None = None
    """Peers whose log-probabilities are believed; None: all (trust.judge_again is off)."""

    @cached_property
    def _groups(self) -> dict[str, Group]:
        return {g.problem_id: g for g in self.groups}

    @cached_property
    def _replies(self) -> dict[tuple[str, str, int], Trajectory]:
        return {(t.problem_id, t.agent, t.index): t for g in self.groups for t in g.judged}

    def trusts(self, source: str) -> bool:
        return self.trusted is None or source in self.trusted

    def group(self, sample: Sample) -> Group:
        """All replies to the sample's problem."""
        return self._groups[sample.problem_id]

    def reply(self, sample: Sample) -> Trajectory:
        """The judged reply that the sample was made from."""
        return self._replies[sample.problem_id, sample.source, sample.index]

    def reward(self, sample: Sample) -> float:
        return self.reply(sample).reward


class AlgorithmSettings(BaseModel):
    """The `[algorithm]` table: these fields, and those of the algorithm's `Settings`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    name: str = "hacpo"
    """hacpo, gspo, grpo, naive, sgt, graft, f-tis, overlap, xgrpo, sapo, luffy, sft-success,
    gspo-dynamic, or an import path `package.module:Class`."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL term to the start weights, own samples only (the paper's runs: 0.001)."""


class DynamicSettings(AlgorithmSettings):
    """For algorithms with dynamic sampling (training/dynamic.py)."""

    list_factor: int = Field(4, ge=2)
    """The list of problems of a step has this many times prompts_per_step problems."""


class SharingSettings(AlgorithmSettings):
    """For algorithms that train on peers' samples."""

    peers: PeerFilter = "all"
    """The peers' replies to train on. successes: verdict OK. failures: the others. where_i_failed: those
    to problems where all own replies failed. Baselines and capability use the rewards of all replies."""


class PeerSettings(SharingSettings):
    """For algorithms in which peers' samples can have updates of their own."""

    order: Literal["auto", "own_first", "peers_first", "mixed"] = "auto"
    """Order of a step's updates; published codes differ. auto: mixed for overlap and luffy, own_first
    for the others."""


class FreeSettings(PeerSettings):
    """For an algorithm given by import path that has no `Settings` class."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Free settings of the algorithm."""


class Algorithm(ABC):
    """Base class of all algorithms.

    A row with advantage 0 does not go through the model, unless there is a KL term. So a loss must add
    nothing for such a row (except the KL term), and other rows must not depend on it.
    """

    Settings: ClassVar[type[AlgorithmSettings]] = FreeSettings
    """The algorithm's fields of the `[algorithm]` table."""
    needs = Needs()
    settings: Any  # an instance of `Settings`
    peer_filter: PeerFilter = "all"
    """`SharingSettings.peers`: the peers' replies that become samples."""

    def __init__(self, settings: AlgorithmSettings, reward_range: tuple[float, float]) -> None:
        """`reward_range` is the range that the verifier declares."""
        self.settings = settings
        if isinstance(settings, PeerSettings) and settings.order != "auto":
            self.needs = replace(self.needs, updates=settings.order)
        if isinstance(settings, SharingSettings):
            self.peer_filter = settings.peers

    def rewards(self, step: Step, sample: Sample) -> list[float]:
        """The rewards that `credit` compares a sample with: those of its author's replies."""
        return step.group(sample).rewards(sample.source)

    def advantage(self, reward: float, rewards: list[float]) -> float:
        """A = (R - mean) / (std + 1e-6) of a reward among the rewards that it is compared with."""
        return advantage(reward, mean(rewards), rewards)

    def credit(self, step: Step) -> list[Sample]:
        """Return the samples to train on, with advantage and weight, in the order of `step.samples`.
        By default all of them, with `advantage` over `rewards` and weight 1."""
        credited = []
        for sample in step.samples:
            a = self.advantage(step.reward(sample), self.rewards(step, sample))
            credited.append(replace(sample, advantage=a, weight=1.0))
        return credited

    @abstractmethod
    def loss(self, batch: MicroBatch, update: Update) -> LossOutput:
        """Return the micro-batch's part of the minibatch's loss. Divide by the counts of the whole
        minibatch (`batch.num_samples` etc.), not by the rows of this micro-batch."""
