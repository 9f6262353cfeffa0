"""A closed step as one learner sees it: valid rows, its own replies, its own verdicts.

The pool's snapshot is the same for all agents. A learner leaves invalid rows out (validate.py), puts its
own complete replies in the place of what it published, hides texts that reciprocity does not give it,
and, with `trust.judge_again`, judges every text of its peers itself. Its verdicts are journalled before
they are used, so a resumed step is not judged again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hacrl.config import AgentConfig, Config
from hacrl.store.journal import LearnerJournal
from hacrl.store.pool import Pool
from hacrl.trust.publish import received
from hacrl.trust.validate import Checker, Invalid
from hacrl.types import Finish, Problem, Sample, Snapshot, Status, Trajectory, Verdict, make_groups
from hacrl.verify import VerifierPool

Key = tuple[Any, ...]  # `Trajectory.key`: step, agent, problem and index
UNJUDGED = Verdict(0.0, Status.ERROR)


@dataclass(frozen=True)
class Seen:
    """A step as a learner sees it.

    Example: seen.disagree["finch"] / seen.compared["finch"] is the fraction of false claims
    """

    snapshot: Snapshot
    invalid: list[Invalid] = field(default_factory=list)  # rows that were left out
    missing: Counter[str] = field(default_factory=Counter)
    """Rows that a peer had to publish and did not."""
    judged: Counter[str] = field(default_factory=Counter)
    """Texts that the learner judged, by source."""
    unjudged: Counter[str] = field(default_factory=Counter)  # texts that it could not judge
    compared: Counter[str] = field(default_factory=Counter)
    """Texts that both author and learner judged."""
    disagree: Counter[str] = field(default_factory=Counter)  # those of them with another verdict

    def include(self, late: Seen) -> None:
        """Add the counts of rows that came late: they are evidence like any other."""
        for name in ("judged", "unjudged", "compared", "disagree"):
            getattr(self, name).update(getattr(late, name))
        self.invalid.extend(late.invalid)

    def metrics(self) -> dict[str, float]:
        counts = {
            "judged": self.judged,
            "unjudged": self.unjudged,
            "disagree": self.disagree,
            "missing": self.missing,
        }
        sources = sorted({*self.judged, *self.unjudged, *self.missing})
        return {f"trust/{k}/{s}": float(n[s]) for s in sources for k, n in counts.items()}


@dataclass(frozen=True)
class LateStep:
    """An earlier step with the rows that came late.

    Example: LateStep(seen, frozenset({"bee"}), problems, age=2)
    """

    seen: Seen
    sources: frozenset[str]  # whose rows came late
    problems: Mapping[str, Problem]
    age: int  # steps between the step and its use
    samples: list[Sample] = field(default_factory=list)  # of these rows, scored if needed


class View:
    """What one learner sees of closed steps.

    Example: View(agent, config, pool, checker, verifier, journal, own_rows).at(3, problems).snapshot
    """

    def __init__(
        self,
        agent: AgentConfig,
        config: Config,
        pool: Pool,
        checker: Checker,
        verifier: VerifierPool,
        journal: LearnerJournal,
        own_rows: Callable[[int], Sequence[Trajectory]],
        *,
        judges: bool,
        replaces_own: bool,
    ) -> None:
        """`own_rows` returns the learner's complete rows of a step. `judges`: with trust.judge_again,
        judge peers' texts. `replaces_own`: what the learner published is not what it sampled."""
        self.name, self.trust = agent.name, config.trust
        self.pool, self.checker, self.verifier, self.journal = pool, checker, verifier, journal
        self.own_rows, self.replaces_own = own_rows, replaces_own
        self.judges = judges and config.trust.judge_again
        self.config = config

    def at(self, step: int, problems: Mapping[str, Problem], older: bool = False) -> Seen:
        """Read a closed step. Texts are judged if no verdicts of the step are journalled. `older`: the
        step is of an earlier config (validate.py)."""
        team = self.pool.team(self.config, step)
        self.checker.expect(team, older)
        snapshot, invalid = self.checker.check(self.pool.snapshot(step), problems)
        # A step that was closed without this agent has no replies of it, whatever it publishes.
        if self.replaces_own and self.name in snapshot.members:
            peers = [t for t in snapshot.rows if t.agent != self.name]
            snapshot = replace(snapshot, groups=make_groups([*peers, *self.own_rows(step)]))
        if self.trust.reciprocity:
            levels = {a.name: a.publish for a in team.agents}
            snapshot = received(snapshot, self.name, levels)
        if not self.judges:
            return Seen(snapshot, invalid)
        verdicts = self._verdicts(step, snapshot, problems)
        missing = self.checker.missing(snapshot, problems, invalid)
        seen = Seen(snapshot.mapped(lambda t: self._judged(t, verdicts)), invalid, missing)
        for claim in self._texts(snapshot):
            _compare(seen, claim, verdicts[claim.key])
        return seen

    def with_late(
        self,
        step: int,
        problems: Mapping[str, Problem],
        rows: Sequence[Trajectory],
        verdicts: Mapping[Key, Verdict],
        unreadable: Sequence[tuple[str, str]] = (),
    ) -> Seen:
        """A closed step with further rows, which came late. The counts are of these rows, and of those
        that cannot be read: sources and reasons."""
        seen = self.at(step, problems).snapshot
        found_late = Snapshot(step, (), make_groups(rows), tuple(unreadable))
        late, invalid = self.checker.check(found_late, problems)
        judged = late.mapped(lambda t: self._judged(t, verdicts)) if self.judges else late
        found = Seen(replace(seen, groups=make_groups(seen.rows + judged.rows)), invalid)
        for claim in self._texts(late) if self.judges else ():
            _compare(found, claim, verdicts.get(claim.key, UNJUDGED))
        return found

    def judge(
        self, texts: Sequence[Trajectory], problems: Mapping[str, Problem]
    ) -> list[list[Any]]:
        """The learner's verdicts on texts, as the journal has them: key, reward and status."""
        items = [(t.reply_start + t.text, problems[t.problem_id]) for t in texts]
        verdicts = zip(texts, self.verifier.judge_all(items), strict=True)
        return [[*t.key, v.reward if v.judged else None, v.status] for t, v in verdicts]

    def _texts(self, snapshot: Snapshot) -> list[Trajectory]:
        """The peers' rows with a text."""
        return [t for t in snapshot.rows if t.agent != self.name and t.turns]

    def _verdicts(
        self, step: int, snapshot: Snapshot, problems: Mapping[str, Problem]
    ) -> dict[Key, Verdict]:
        """The learner's verdict on every peer's text of a step, from the journal or judged now."""
        digest, texts = self.pool.digest(step), self._texts(snapshot)
        stored = self.journal.read("verdicts", step, digest)
        if stored is None:
            stored = {"rows": [row[1:] for row in self.judge(texts, problems)]}  # without the step
            self.journal.write("verdicts", step, digest, stored)
        known = read_verdicts([step, *row] for row in stored["rows"])
        return {t.key: known.get(t.key, UNJUDGED) for t in texts}

    def _judged(self, t: Trajectory, verdicts: Mapping[Key, Verdict]) -> Trajectory:
        """A row with the learner's verdict. The claim on a text that is withheld counts if its source is
        trusted."""
        if t.key in verdicts and t.agent != self.name:
            return replace(t, verdict=verdicts[t.key])
        hidden = t.finish is Finish.WITHHELD and t.agent != self.name
        return replace(t, verdict=None) if hidden and not self.trust.trusts(t.agent) else t


def read_verdicts(rows: Iterable[Sequence[Any]]) -> dict[Key, Verdict]:
    """The verdicts of `View.judge` by key of the row."""
    return {tuple(key): Verdict(reward or 0.0, Status(s)) for *key, reward, s in rows}


def _compare(seen: Seen, claim: Trajectory, own: Verdict) -> None:
    """Count one text."""
    (seen.judged if own.judged else seen.unjudged)[claim.agent] += 1
    if own.judged and claim.verdict is not None and claim.verdict.judged:
        other = claim.verdict.reward != own.reward
        other |= (claim.verdict.status is Status.OK) != (own.status is Status.OK)
        seen.compared[claim.agent] += 1
        seen.disagree[claim.agent] += other
