"""From a step's cut to one learner's samples, by the rendering law.

Own samples are the ids exactly as sampled. A peer's reply is its text, read by the learner's own
tokenizer as a continuation of the learner's own prompt; the learner's end token follows if and only
if the peer stopped by itself. What cannot be shown to the learner unchanged is dropped from the
view and counted by source and reason; its reward still counts in the group.

For an algorithm that needs a peer's tokens a view has the peer's ids as they are, with their
log-probabilities, instead: only where the trajectory carries them in the learner's vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from hacrl.types import Finish, Group, Problem, Rollout, Sample, Tokens, Trajectory

if TYPE_CHECKING:
    from hacrl.text.literal import Ids
    from hacrl.text.render import Renderer


class DropReason(StrEnum):
    """Why a trajectory of the cut became no sample."""

    NOT_ATTEMPTED = "not_attempted"  # its source could not take the prompt
    NOT_JUDGED = "not_judged"  # the verifier timed out or failed: there is no reward
    TRUNCATED = "truncated"  # ended by the token limit, and the setting masks those
    NOT_SHAREABLE = "not_shareable"  # the peer's text does not carry its ids
    NO_LOGPROB = "no_logprob"  # no behaviour log-probability, which the algorithm needs
    BEGUN_REPLY = "begun_reply"  # does not start with the learner's begun reply
    OTHER_VOCABULARY = "other_vocabulary"  # its tokens are needed and are not of the learner
    NOT_RENDERABLE = "not_renderable"  # the learner's tokenizer cannot keep the text
    TOO_LONG = "too_long"  # prompt or reply over the learner's limits
    EMPTY = "empty"  # no token to learn from


@dataclass(frozen=True)
class ViewLimits:
    """What a learner can take.

    Example: ViewLimits(max_prompt_tokens=1024, max_response_tokens=4096, too_long="drop")
    """

    max_prompt_tokens: int
    max_response_tokens: int
    too_long: Literal["drop", "truncate"] = "drop"
    """A peer's reply over the limit: dropped, or truncated to the limit without an end token."""


@dataclass
class ViewReport:
    """What a view kept and lost.

    Example: report.drops[("bee", DropReason.TOO_LONG)] == 3
    """

    end_token: int
    """The id put after peers' finished replies."""
    kept: Counter[str] = field(default_factory=Counter)
    """Samples by source."""
    drops: Counter[tuple[str, DropReason]] = field(default_factory=Counter)
    truncated: Counter[str] = field(default_factory=Counter)
    """Kept samples shortened to the learner's limit, by source."""
    learner_tokens: Counter[str] = field(default_factory=Counter)
    """Reply tokens of kept peers' samples in the learner's tokenizer, before any cut."""
    source_tokens: Counter[str] = field(default_factory=Counter)
    """The same replies in their source's tokenizer."""
    compared: Counter[str] = field(default_factory=Counter)
    """Kept samples whose source has the learner's tokenizer."""
    other_split: Counter[str] = field(default_factory=Counter)
    """Those of them that read back as other ids: by the ids where the trajectory carries them,
    else by the number of tokens (then a lower bound)."""

    def token_ratio(self, source: str) -> float:
        """Learner's tokens per token of the source, over kept samples; nan when there are none."""
        spent = self.source_tokens[source]
        return self.learner_tokens[source] / spent if spent else float("nan")

    def metrics(self) -> dict[str, float]:
        """Flat and complete: every reason is there, 0 when it did not occur."""
        result = {"view/kept": float(self.kept.total()), "view/cut": float(self.truncated.total())}
        for reason in DropReason:
            lost = sum(n for (_, why), n in self.drops.items() if why is reason)
            result[f"view/drop/{reason}"] = float(lost)
        for source in sorted({*self.kept, *(s for s, _ in self.drops)}):
            result[f"view/kept/{source}"] = float(self.kept[source])
            lost = sum(n for (who, _), n in self.drops.items() if who == source)
            result[f"view/dropped/{source}"] = float(lost)
        for source in sorted(s for s, n in self.source_tokens.items() if n):
            result[f"view/token_ratio/{source}"] = self.token_ratio(source)
        for source in sorted(self.compared):
            result[f"view/same_tokenizer/{source}"] = float(self.compared[source])
            result[f"view/other_split/{source}"] = float(self.other_split[source])
        result["view/end_token"] = float(self.end_token)
        return result


@dataclass(frozen=True)
class _Candidate:
    """A peer's trajectory on its way into the view: its text after the learner's prompt, or its
    tokens where the algorithm needs them."""

    trajectory: Trajectory
    prompt_ids: Ids
    text: str
    tokens: Tokens | None


def learner_view(
    cut_groups: Sequence[Group],
    rollouts: Sequence[Rollout],
    problems: Mapping[str, Problem],
    renderer: Renderer,
    learner: str,
    limits: ViewLimits,
    *,
    peers: bool,
    needs_behaviour: bool,
    needs_tokens: bool = False,
    mask_truncated: bool = False,
) -> tuple[list[Sample], ViewReport]:
    """The learner's samples of one step: groups in the cut's order, in each the own ones first,
    then by source and index.
    """
    report = ViewReport(end_token=renderer.end_token(rollouts))
    own_rollouts = {(r.step, r.problem_id, r.index): r for r in rollouts}
    places: list[Sample | _Candidate] = []  # in order; candidates are rendered all at once
    for group in cut_groups:
        own = [t for t in group.trajectories if t.agent == learner]
        others = [t for t in group.trajectories if t.agent != learner] if peers else []
        for t in sorted(own, key=lambda t: t.index):
            rollout = own_rollouts.get((t.step, t.problem_id, t.index))
            made = _own_sample(t, rollout, needs_tokens, mask_truncated)
            if isinstance(made, DropReason):
                report.drops[learner, made] += 1
            else:
                report.kept[learner] += 1
                places.append(made)
        for t in sorted(others, key=lambda t: (t.agent, t.index)):
            found = _candidate(
                t, problems, renderer, limits, needs_behaviour, needs_tokens, mask_truncated
            )
            if isinstance(found, DropReason):
                report.drops[t.agent, found] += 1
            else:
                places.append(found)

    waiting = [p for p in places if isinstance(p, _Candidate) and p.tokens is None]
    encoded = iter(renderer.continuations((c.prompt_ids, c.text) for c in waiting))
    samples: list[Sample] = []
    for place in places:
        if isinstance(place, Sample):
            samples.append(place)
            continue
        source = place.trajectory.agent
        reply = place.tokens.ids if place.tokens else _reply(place, next(encoded), report)
        shown = _peer_sample(place, reply, renderer, report, limits, mask_truncated)
        if isinstance(shown, DropReason):
            report.drops[source, shown] += 1
        else:
            report.kept[source] += 1
            samples.append(shown)
    return samples, report


def _why_not(t: Trajectory, *, needs_behaviour: bool, mask_truncated: bool) -> DropReason | None:
    """Reasons that hold for anybody's trajectory."""
    if t.finish is Finish.NOT_ATTEMPTED:
        return DropReason.NOT_ATTEMPTED
    if not t.judged:
        return DropReason.NOT_JUDGED
    if mask_truncated and t.finish is Finish.LENGTH:
        return DropReason.TRUNCATED
    if needs_behaviour and t.mean_logprob is None:
        return DropReason.NO_LOGPROB
    return None


def _own_sample(
    t: Trajectory, rollout: Rollout | None, needs_tokens: bool, mask_truncated: bool
) -> Sample | DropReason:
    """The ids exactly as sampled, never encoded again."""
    reason = _why_not(t, needs_behaviour=False, mask_truncated=mask_truncated)
    if reason is not None:
        return reason
    if rollout is None:
        raise ValueError(f"own trajectory {t.key} is in the cut but not in the journal")
    prompt, reply = rollout.prompt_ids, rollout.completion.token_ids
    if not reply:
        return DropReason.EMPTY
    return Sample(
        problem_id=rollout.problem_id,
        index=rollout.index,
        source=t.agent,
        is_own=True,
        token_ids=prompt + reply,
        loss_mask=(0,) * len(prompt) + (1,) * len(reply),
        behaviour=rollout.mean_logprob,
        old_logprobs=rollout.completion.logprobs,
        source_logprobs=rollout.completion.logprobs if needs_tokens else None,
        finish=rollout.completion.finish,
    )


def _candidate(
    t: Trajectory,
    problems: Mapping[str, Problem],
    renderer: Renderer,
    limits: ViewLimits,
    needs_behaviour: bool,
    needs_tokens: bool,
    mask_truncated: bool,
) -> _Candidate | DropReason:
    """Everything that can be said of a peer's trajectory before it is encoded."""
    reason = _why_not(t, needs_behaviour=needs_behaviour, mask_truncated=mask_truncated)
    if reason is not None:
        return reason
    if not t.shareable:
        return DropReason.NOT_SHAREABLE
    if needs_tokens and (lost := _why_no_tokens(t, renderer)) is not None:
        return lost
    begun = renderer.settings.reply_start
    if t.begun == begun:
        text = t.text
    elif (t.begun + t.text).startswith(begun):
        text = (t.begun + t.text).removeprefix(begun)
    else:
        return DropReason.BEGUN_REPLY
    prompt_ids = renderer.prompt(problems[t.problem_id].messages)
    if len(prompt_ids) > limits.max_prompt_tokens:
        return DropReason.TOO_LONG
    return _Candidate(t, prompt_ids, text, t.tokens if needs_tokens else None)


def _why_no_tokens(t: Trajectory, renderer: Renderer) -> DropReason | None:
    """Why the trajectory's tokens cannot serve this learner as they are."""
    carried = t.tokens.tokenizer if t.tokens else t.tokenizer
    if carried != renderer.vocabulary_hash:
        return DropReason.OTHER_VOCABULARY
    if t.tokens is None:
        return DropReason.NO_LOGPROB
    if t.begun != renderer.settings.reply_start:
        return DropReason.BEGUN_REPLY  # text could be cut where the begun reply ends; ids cannot
    words = len(renderer.tokenizer)
    return None if all(0 <= i < words for i in t.tokens.ids) else DropReason.NOT_RENDERABLE


def _reply(candidate: _Candidate, ids: Ids | None, report: ViewReport) -> Ids | None:
    """An encoded text with the learner's end token, if the peer stopped by itself."""
    if ids is None or candidate.trajectory.finish is not Finish.STOP:
        return ids
    return (*ids, report.end_token)


def _peer_sample(
    candidate: _Candidate,
    whole: Ids | None,
    renderer: Renderer,
    report: ViewReport,
    limits: ViewLimits,
    mask_truncated: bool,
) -> Sample | DropReason:
    """A peer's whole reply in the learner's ids, brought within the limits."""
    t, prompt, tokens = candidate.trajectory, candidate.prompt_ids, candidate.tokens
    if whole is None:
        return DropReason.NOT_RENDERABLE
    if not whole:
        return DropReason.EMPTY
    finish, reply = t.finish, whole
    if len(reply) > limits.max_response_tokens:
        # Where truncated replies are masked, nothing is left of a shortened one.
        if limits.too_long == "drop" or mask_truncated:
            return DropReason.TOO_LONG
        body = whole[:-1] if finish is Finish.STOP else whole
        finish = Finish.LENGTH
        reply = renderer.shorten(prompt, body, limits.max_response_tokens)
        if not reply:
            return DropReason.TOO_LONG
        report.truncated[t.agent] += 1
    report.learner_tokens[t.agent] += len(whole)
    report.source_tokens[t.agent] += t.num_tokens
    if t.begun == renderer.settings.reply_start:
        _compare_split(t, whole, renderer, report)
    return Sample(
        problem_id=t.problem_id,
        index=t.index,
        source=t.agent,
        is_own=False,
        token_ids=prompt + reply,
        loss_mask=(0,) * len(prompt) + (1,) * len(reply),
        behaviour=t.mean_logprob,
        source_logprobs=tokens.logprobs[: len(reply)] if tokens else None,
        finish=finish,
        truncated=len(reply) < len(whole),
    )


def _compare_split(
    t: Trajectory,
    reply: Ids,
    renderer: Renderer,
    report: ViewReport,
) -> None:
    """Count replies of the same tokenizer that read back as other ids (end tokens aside)."""
    if t.tokens is not None and t.tokens.tokenizer == renderer.vocabulary_hash:
        stop = t.finish is Finish.STOP
        mine, theirs = (reply[:-1], t.tokens.ids[:-1]) if stop else (reply, t.tokens.ids)
        other = mine != tuple(theirs)
    elif t.tokens is None and t.tokenizer == renderer.vocabulary_hash:
        other = len(reply) != t.num_tokens
    else:
        return
    report.compared[t.agent] += 1
    report.other_split[t.agent] += other
