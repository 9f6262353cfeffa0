"""From a step's snapshot, with peers' text, to the training samples of one learner.

Own samples keep the token ids exactly as sampled. A peer's reply is tokenised with the learner's
tokenizer as a continuation of the learner's own prompt; the learner's end token follows if and only
if the peer stopped by itself (`SampleMaker._tokenise` below, `text/render.py`). A reply that cannot be
reproduced exactly is dropped and counted by source and reason; its reward still counts in the group.

If the algorithm needs a peer's tokens, the sample has the peer's ids and log-probabilities instead.
That works only between agents with the same vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, TypeVar

from hacrl.algorithms.base import Needs, PeerFilter
from hacrl.algorithms.functional import filter_reason
from hacrl.errors import UserError
from hacrl.types import Finish, Group, Problem, Rollout, Sample, Trajectory

if TYPE_CHECKING:
    from hacrl.config import AgentConfig, Config
    from hacrl.text.literal import Ids
    from hacrl.text.render import Renderer

T = TypeVar("T")


class DropReason(StrEnum):
    """Why a trajectory of the snapshot became no sample."""

    NOT_ATTEMPTED = "not_attempted"  # the prompt was too long for its source
    WITHHELD = "withheld"  # its source published the outcome only, or reciprocity hides the text
    NOT_JUDGED = "not_judged"  # the verifier timed out or failed: there is no reward
    TRUNCATED = "truncated"  # ended by the token limit, and mask_truncated is set
    NOT_SHAREABLE = "not_shareable"  # the peer's text does not reproduce its ids
    NO_LOGPROB = "no_logprob"  # the source published no log-probability, but it is needed
    BEGUN_REPLY = "begun_reply"  # does not start with the learner's reply_start
    OTHER_VOCABULARY = "other_vocabulary"  # tokens are needed, but the vocabularies differ
    NOT_RENDERABLE = "not_renderable"  # the learner's tokenizer cannot reproduce the text
    TOO_LONG = "too_long"  # prompt or reply over the learner's limits
    EMPTY = "empty"  # no token to learn from
    QUARANTINED = "quarantined"  # its source is quarantined (trust/quarantine.py)
    RATIO = "ratio"  # its ratio s is over trust.max_ratio
    UNLIKELY = "unlikely"  # less likely for the learner than trust.min_own_quantile allows
    CAPPED = "capped"  # over trust.max_source_fraction
    INVALID = "invalid"  # an impossible value; not in the group either (trust/validate.py)


def check_context(agent: AgentConfig, config: Config, context: int | None) -> None:
    """UserError if the agent's token limits are more than its model reads; None: not known."""
    longest = config.prompt_limit(agent) + config.response_limit(agent)
    if context and longest > context:
        raise UserError(
            f"agent {agent.name!r}: max_prompt_tokens + max_response_tokens = {longest}, but its "
            f"model reads at most {context} tokens. Lower one of the two, for the run or for "
            "this agent."
        )


@dataclass
class SampleReport:
    """Counts of kept and dropped trajectories.

    Example: report.drops[("bee", DropReason.TOO_LONG)] == 3
    """

    end_token: int  # the id appended to peers' finished replies
    kept: Counter[str] = field(default_factory=Counter)  # samples by source
    drops: Counter[tuple[str, DropReason]] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)
    """Usable peers' replies that `algorithm.peers` leaves out, by reason
    (algorithms/functional.py:filter_reason)."""
    truncated: int = 0  # kept samples shortened to the learner's limit
    learner_tokens: Counter[str] = field(default_factory=Counter)
    """Reply tokens of kept peers' samples in the learner's tokenizer, before truncation."""
    source_tokens: Counter[str] = field(default_factory=Counter)
    """The same replies in their source's tokenizer."""

    def take(self, t: Trajectory, made: T | DropReason) -> list[T]:
        """A list with what was made of a trajectory; [] for a DropReason, which is counted."""
        if isinstance(made, DropReason):
            self.drops[t.agent, made] += 1
            return []
        return [made]

    def leave_out(self, samples: Mapping[tuple[str, str], int]) -> None:
        """Count samples that were made and are not used, by source and reason."""
        for (source, reason), number in samples.items():
            self.kept[source] -= number
            self.drops[source, DropReason(reason)] += number

    def metrics(self) -> dict[str, float]:
        """All counts as flat metrics. A reason that did not occur is 0; by source it is missing."""
        result = {"samples/kept": self.kept.total(), "samples/truncated": self.truncated}
        for why in DropReason:
            lost = sum(n for (_, reason), n in self.drops.items() if reason is why)
            result[f"samples/drop/{why}"] = lost
        for (source, why), lost in sorted(self.drops.items()):
            result[f"samples/drop/{why}/{source}"] = lost
        for reason, number in sorted(self.filtered.items()):
            result[f"samples/filtered/{reason}"] = number
        for source in sorted({*self.kept, *(s for s, _ in self.drops)}):
            result[f"samples/kept/{source}"] = self.kept[source]
            lost = sum(n for (name, _), n in self.drops.items() if name == source)
            result[f"samples/dropped/{source}"] = lost
        ratios = {
            f"samples/token_ratio/{source}": self.learner_tokens[source] / spent
            for source, spent in sorted(self.source_tokens.items())
            if spent
        }
        counts = {name: float(number) for name, number in result.items()}
        return {**counts, **ratios, "samples/end_token": float(self.end_token)}


@dataclass(frozen=True)
class _Candidate:
    """A peer's trajectory before tokenisation."""

    trajectory: Trajectory
    prompt_ids: Ids
    text: str  # of the reply, after the learner's reply_start


@dataclass(frozen=True)
class SampleMaker:
    """Makes one learner's samples. `needs` and `peer_filter` are those of the algorithm.

    Example: SampleMaker(renderer, "wren", Needs("logprob"), 1024, 4096)
    """

    renderer: Renderer
    learner: str
    needs: Needs
    max_prompt_tokens: int
    max_response_tokens: int
    too_long: Literal["drop", "truncate"] = "drop"
    """A peer's reply over the limit: dropped, or truncated to the limit without an end token."""
    mask_truncated: bool = False
    peer_filter: PeerFilter = "all"

    def make(
        self,
        groups: Sequence[Group],
        rollouts: Sequence[Rollout],
        problems: Mapping[str, Problem],
        only: Collection[str] | None = None,
    ) -> tuple[list[Sample], SampleReport]:
        """The samples of one step: groups in the snapshot's order, in each group the own samples first,
        then the peers' by source and index. With `only`, of the replies of these agents alone."""
        report = SampleReport(self.renderer.end_token(rollouts))
        own = {(r.step, r.problem_id, r.index): r for r in rollouts}
        made: list[Sample | _Candidate] = []  # candidates are tokenised all at once, below
        for group in groups:
            rows = (t for t in group.trajectories if only is None or t.agent in only)
            for t in sorted(rows, key=lambda t: (t.agent != self.learner, t.agent, t.index)):
                if t.agent == self.learner:
                    made += report.take(t, self._own(t, own.get((t.step, t.problem_id, t.index))))
                elif self.needs.include("text"):
                    found = report.take(t, self._candidate(t, problems[t.problem_id]))
                    if found and (
                        reason := filter_reason(t, group, self.learner, self.peer_filter)
                    ):
                        report.filtered[reason] += 1
                    else:
                        made += found
        replies = self._tokenise([c for c in made if isinstance(c, _Candidate)], report.end_token)
        samples: list[Sample] = []
        for item in made:
            if isinstance(item, Sample):
                samples.append(item)
            else:
                samples += report.take(item.trajectory, self._peer(item, next(replies), report))
        report.kept.update(s.source for s in samples)
        return samples, report

    def _own(self, t: Trajectory, rollout: Rollout | None) -> Sample | DropReason:
        """The ids exactly as sampled; they are never tokenised again."""
        if reason := self._unusable(t):
            return reason
        if rollout is None:  # another process published under the learner's name
            return DropReason.INVALID
        prompt, reply = rollout.prompt_ids, rollout.completion.token_ids
        if not reply:
            return DropReason.EMPTY
        logprobs = rollout.completion.logprobs
        return Sample(
            problem_id=rollout.problem_id,
            index=rollout.index,
            source=t.agent,
            is_own=True,
            token_ids=prompt + reply,
            loss_mask=(0,) * len(prompt) + (1,) * len(reply),
            behaviour=rollout.mean_logprob,
            old_logprobs=logprobs,
            source_logprobs=logprobs if self.needs.include("tokens") else None,
        )

    def _candidate(self, t: Trajectory, problem: Problem) -> _Candidate | DropReason:
        """Everything that can be checked before the text is tokenised."""
        if reason := self._unusable(t):
            return reason
        if self.needs.include("logprob") and t.mean_logprob is None:
            return DropReason.NO_LOGPROB
        if not t.shareable:
            return DropReason.NOT_SHAREABLE
        start, reply = self.renderer.settings.reply_start, t.reply_start + t.text
        if self.needs.include("tokens"):
            vocabulary = t.tokens.tokenizer if t.tokens else t.tokenizer
            if vocabulary != self.renderer.vocabulary_hash:
                return DropReason.OTHER_VOCABULARY
            if t.tokens is None:
                return DropReason.NO_LOGPROB
            if t.reply_start != start:  # text can be split where reply_start ends, ids cannot
                return DropReason.BEGUN_REPLY
        if not reply.startswith(start):
            return DropReason.BEGUN_REPLY
        prompt_ids = self.renderer.prompt(problem.messages)
        if len(prompt_ids) > self.max_prompt_tokens:
            return DropReason.TOO_LONG
        return _Candidate(t, prompt_ids, reply.removeprefix(start))

    def _tokenise(self, candidates: Sequence[_Candidate], end_token: int) -> Iterator[Ids | None]:
        """The reply of each candidate in the learner's ids, with the learner's end token if the
        peer stopped by itself; None if the text cannot be reproduced. If the algorithm needs the
        peer's tokens, those as they are."""
        if self.needs.include("tokens"):
            yield from (c.trajectory.tokens.ids for c in candidates if c.trajectory.tokens)
            return
        texts = ((c.prompt_ids, c.text) for c in candidates)
        for c, ids in zip(candidates, self.renderer.continuations(texts), strict=True):
            stopped = c.trajectory.finish is Finish.STOP
            yield (*ids, end_token) if ids is not None and stopped else ids

    def _peer(
        self, candidate: _Candidate, whole: Ids | None, report: SampleReport
    ) -> Sample | DropReason:
        """The sample of a peer's whole reply, within the learner's limits."""
        t, prompt, limit = candidate.trajectory, candidate.prompt_ids, self.max_response_tokens
        if not whole:
            return DropReason.NOT_RENDERABLE if whole is None else DropReason.EMPTY
        reply = whole
        if len(whole) > limit:
            # With mask_truncated a truncated reply is not trained on, so it is dropped here.
            if self.too_long == "drop" or self.mask_truncated:
                return DropReason.TOO_LONG
            body = whole[:-1] if t.finish is Finish.STOP else whole
            reply = self.renderer.shorten(prompt, body, limit)
            if not reply:
                return DropReason.TOO_LONG
            report.truncated += 1
        report.learner_tokens[t.agent] += len(whole)
        report.source_tokens[t.agent] += t.num_tokens
        tokens = t.tokens if self.needs.include("tokens") else None
        return Sample(
            problem_id=t.problem_id,
            index=t.index,
            source=t.agent,
            is_own=False,
            token_ids=prompt + reply,
            loss_mask=(0,) * len(prompt) + (1,) * len(reply),
            behaviour=t.mean_logprob,
            source_logprobs=tokens.logprobs[: len(reply)] if tokens else None,
            truncated=len(reply) < len(whole),
        )

    def _unusable(self, t: Trajectory) -> DropReason | None:
        """Reasons that hold for own and peers' trajectories."""
        if t.finish is Finish.NOT_ATTEMPTED:
            return DropReason.NOT_ATTEMPTED
        if t.finish is Finish.WITHHELD:
            return DropReason.WITHHELD
        if not t.judged:
            return DropReason.NOT_JUDGED
        if self.mask_truncated and t.finish is Finish.LENGTH:
            return DropReason.TRUNCATED
        return None
