"""Check the rows of a step's snapshot before a learner uses them.

A batch may come from another process, another machine or a stored run. Its rewards, log-probabilities
and lengths enter the learner's loss, so each must be possible. A row that fails a check is left out of
the step, as if it had not been published, and reported. All learners leave out the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hacrl.config import Config
from hacrl.config_agent import MAX_REPLY_START
from hacrl.types import Finish, Group, Problem, Snapshot, Trajectory

if TYPE_CHECKING:
    from hacrl.text.render import Renderer

MIN_LOGPROB = -100.0
"""Smallest plausible log-probability of a sampled token. A uniform choice from a million tokens has
-13.8, and float32 noise never draws a token below -104."""
MAX_LOGPROB = 1e-3  # rounding can lift the log-probability of a certain token slightly above 0
MAX_TOKEN_BYTES = 256  # longest plausible token of any vocabulary, in bytes of text
EXTRA_TOKENS = 2
"""Tokens without text: the end token, and the mark of a beginning that some tokenizers add."""


@dataclass(frozen=True)
class Invalid:
    """A row that was left out.

    Example: Invalid("bee", "reward", "reward 7 is outside the verifier's range 0 to 1")
    """

    agent: str  # the agent that published it
    kind: str
    """For metrics: unreadable, agent, problem, index, verdict, verifier, temperature, turns, length,
    logprob, reward or tokens."""
    detail: str


class Checker:
    """Checks snapshots against the config and the verifier of a run.

    Example: snapshot, invalid = Checker(config, "number/1", (0, 1)).check(snapshot, problems)
    """

    def __init__(
        self,
        config: Config,
        verifier: str,
        reward_range: tuple[float, float],
        renderer: Renderer | None = None,
    ) -> None:
        """`renderer` is the learner's, if its algorithm uses the tokens of peers."""
        self.verifier, self.renderer = verifier, renderer
        self.low, self.high = reward_range
        self.temperature = config.temperature
        self.plausible = config.trust.judge_again
        self.expect(config)

    def expect(self, config: Config, older: bool = False) -> None:
        """Take numbers and limits of samples from the agents of this config. `older`: for a step of an
        earlier config. Its rows name their own limits; their number is not checked."""
        self.older = older
        self.samples = {a.name: config.samples_of(a) for a in config.agents}
        dynamic = config.problems_per_step > config.prompts_per_step
        publishing = {a.name for a in config.agents if a.publish != "nothing" and not a.replay}
        self.complete = set() if dynamic else publishing
        """Agents that publish all samples of all problems of a step."""
        # A stored run has its own limit, which its rows name.
        self.limits = {a.name: config.response_limit(a) for a in config.agents if not a.replay}

    def check(
        self, snapshot: Snapshot, problems: Mapping[str, Problem]
    ) -> tuple[Snapshot, list[Invalid]]:
        """Return the snapshot with the valid rows only, and the rows that were left out."""
        invalid = [Invalid(agent, "unreadable", why) for agent, why in snapshot.unreadable]
        groups: list[Group] = []
        for group in snapshot.groups:
            problem = problems.get(group.problem_id)
            faults = [self._fault(t, problem) for t in group.trajectories]
            for i, t in enumerate(group.trajectories[1:], start=1):
                last = group.trajectories[i - 1]  # sorted by agent and index
                if t.index == last.index and t.agent == last.agent:
                    faults[i] = ("index", f"index {t.index} occurs twice")
            if self.renderer and problem:
                self._check_tokens(self.renderer, group.trajectories, problem, faults)
            if not any(faults):
                groups.append(group)
                continue
            kept = []
            for t, fault in zip(group.trajectories, faults, strict=True):
                if fault:
                    where = f" (problem {t.problem_id!r}, index {t.index})"
                    invalid.append(Invalid(t.agent, fault[0], (fault[1] + where)[:200]))
                else:
                    kept.append(t)
            if kept and problem:
                groups.append(Group(problem.id, problem.task, tuple(kept)))
        return (replace(snapshot, groups=tuple(groups)) if invalid else snapshot), invalid

    def missing(
        self, snapshot: Snapshot, problems: Mapping[str, Problem], invalid: Iterable[Invalid]
    ) -> Counter[str]:
        """The rows that members had to publish and did not: `samples_per_prompt` for each problem, one
        if it was not attempted. Rows that were left out as invalid are not missing."""
        found = Counter[tuple[str, str]]()
        for group in snapshot.groups:
            for t in group.trajectories:
                whole = t.finish is Finish.NOT_ATTEMPTED
                found[t.agent, group.problem_id] += self.samples[t.agent] if whole else 1
        left_out = Counter(row.agent for row in invalid)
        missing = Counter[str]()
        for name in self.complete & {*snapshot.members}:
            owed = sum(max(0, self.samples[name] - found[name, problem]) for problem in problems)
            missing[name] = max(0, owed - left_out[name])
        return +missing

    def _fault(self, t: Trajectory, problem: Problem | None) -> tuple[str, str] | None:
        """What is wrong with a row by itself: kind and detail."""
        if t.agent not in self.samples:  # it left the team after this step
            return "agent", f"the team has no agent {t.agent!r}"
        if problem is None or t.task != problem.task:
            what = "is not in this step" if problem is None else f"is not of task {t.task!r}"
            return "problem", f"its problem {what}"
        if t.index >= self.samples[t.agent] and not self.older:
            return "index", f"index {t.index}, but {self.samples[t.agent]} samples per prompt"
        if t.finish is Finish.NOT_ATTEMPTED:
            return ("verdict", "not attempted, but with a verdict") if t.verdict else None
        if t.verifier != self.verifier:
            return "verifier", f"judged by {t.verifier!r}, this run uses {self.verifier!r}"
        if t.sampling.temperature != self.temperature:
            found = f"{t.sampling.temperature:g}, this run uses {self.temperature:g}"
            return "temperature", f"sampled at temperature {found}"
        if t.finish is Finish.WITHHELD:
            if t.turns or t.tokens or t.num_tokens or t.mean_logprob is not None or not t.verdict:
                return "verdict", "withheld, but with a text, or without a verdict"
        elif fault := self._text_fault(t):
            return fault
        if t.judged and not self.low <= t.reward <= self.high:
            allowed = f"{self.low:g} to {self.high:g}"
            return "reward", f"reward {t.reward:g} is outside the verifier's range {allowed}"
        return None

    def _text_fault(self, t: Trajectory) -> tuple[str, str] | None:
        """What is wrong with turns, length and log-probability of a row with a text."""
        if [turn.generated for turn in t.turns] not in ([True], [False, True]):
            return "turns", "must be one generated text, after reply_start if it has one"
        if len(t.reply_start) > MAX_REPLY_START:
            return "length", f"reply_start has {len(t.reply_start)} characters"
        limit = t.sampling.limit if self.older else self.limits.get(t.agent, t.sampling.limit)
        if not 0 < t.num_tokens <= limit:
            return "length", f"{t.num_tokens} tokens, but its limit is {limit}"
        if t.mean_logprob is not None and not MIN_LOGPROB <= t.mean_logprob <= MAX_LOGPROB:
            return "logprob", f"mean log-probability {t.mean_logprob:g}"
        if self.plausible and t.shareable:
            size = len(t.text.encode("utf-8", "surrogatepass"))
            if not size / MAX_TOKEN_BYTES <= t.num_tokens <= size + EXTRA_TOKENS:
                return "length", f"{t.num_tokens} tokens for a text of {size} bytes"
        return None

    def _check_tokens(
        self,
        renderer: Renderer,
        rows: Iterable[Trajectory],
        problem: Problem,
        faults: list[tuple[str, str] | None],
    ) -> None:
        """Compare token ids with the text that was judged. Fills `faults` in."""
        chosen = []
        for i, t in enumerate(rows):
            known = t.tokens and t.tokens.tokenizer == renderer.vocabulary_hash
            if faults[i] or not t.tokens or not known or not t.shareable:
                continue  # such a row makes no sample with these ids
            ids, logprobs = t.tokens.ids, t.tokens.logprobs
            size = len(renderer.tokenizer)
            if len(ids) != t.num_tokens or not all(0 <= j < size for j in ids):
                faults[i] = ("tokens", "token ids of another length or vocabulary")
            elif not all(MIN_LOGPROB <= x <= MAX_LOGPROB for x in logprobs):
                faults[i] = ("logprob", f"a token's log-probability is {min(logprobs):g}")
            elif abs(sum(logprobs) / len(ids) - (t.mean_logprob or 0.0)) > 1e-6:
                faults[i] = ("logprob", "the tokens' log-probabilities have another mean")
            else:
                chosen.append((i, t, ids))
        prompt = renderer.prompt(problem.messages)
        bodies = (ids[:-1] if t.finish is Finish.STOP else ids for _, t, ids in chosen)
        texts = renderer.whole_texts((prompt, body) for body in bodies)
        for (i, t, ids), (text, plain) in zip(chosen, texts, strict=True):
            ended = t.finish is not Finish.STOP or renderer.is_control(ids[-1])
            if text != t.text or not plain or not ended:
                faults[i] = ("tokens", "its token ids are not the text that was judged")
