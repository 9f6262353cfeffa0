"""Late batches: what a peer published after its step was closed. A learner uses each of them once.

A late batch of step t is used in one of the `hub.staleness` steps after t, as a block of updates behind
the step's own (plan.py). Its texts are judged like all others, and the rewards of step t, with those of
the late batch, set the baseline. Capability is that of the step of use and does not count late rows. Own
replies of step t are not trained again. Choice and verdicts are journalled before use. Quarantine and
caps hold for late samples as for those of the step, together with them (trust/defence.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

from hacrl.config import Config
from hacrl.store.files import changed
from hacrl.store.journal import LearnerJournal
from hacrl.store.pool import Pool
from hacrl.trust.defence import Defence
from hacrl.trust.view import LateStep, View, read_verdicts
from hacrl.types import Problem, Rollout, Sample, Snapshot, Trajectory

if TYPE_CHECKING:
    from hacrl.training.samples import SampleMaker

KIND = "late"  # of the journal's files

Problems = Mapping[str, Problem]


class LateBatches:
    """Chooses late batches for one learner.

    Example: LateBatches(config, pool, view, journal, problems_of).at(7, maker, rollouts)
    """

    def __init__(
        self,
        config: Config,
        pool: Pool,
        view: View,
        journal: LearnerJournal,
        problems_of: Callable[[int], Problems],
    ) -> None:
        self.staleness = config.hub.staleness if config.hub else 0
        self.most = config.late_samples
        self.pool, self.view, self.journal, self.problems_of = pool, view, journal, problems_of

    def at(self, step: int, maker: SampleMaker, own: Sequence[Rollout]) -> list[LateStep]:
        """The late batches to use in a step, from the journal or chosen, judged and journalled now.
        `own` are the learner's rollouts of the step: late replies get the end token of these."""
        if not self.staleness:
            return []
        digest = self.pool.digest(step)
        stored = self.journal.read(KIND, step, digest)
        if stored is None:
            stored = self._choose(step)
            self.journal.write(KIND, step, digest, stored)
        sources: dict[int, set[str]] = defaultdict(set)
        for at, agent in stored["batches"]:
            sources[at].add(agent)
        verdicts = read_verdicts(stored["rows"])
        found = []
        for at, names in sorted(sources.items()):
            problems = self.problems_of(at)
            unreadable: list[tuple[str, str]] = []
            rows = [t for name in sorted(names) for t in self._rows(at, name, unreadable)]
            seen = self.view.with_late(at, problems, rows, verdicts, unreadable)
            samples, _ = maker.make(seen.snapshot.groups, own, problems, only=names)
            found.append(LateStep(seen, frozenset(names), problems, step - at, samples))
        return found

    def _rows(self, at: int, name: str, unreadable: list[tuple[str, str]]) -> list[Trajectory]:
        """The rows of a late batch; copied again if its file is damaged or gone. Adds the source and the
        reason of each row that cannot be read to `unreadable`."""
        if not self.pool.whole(at, name) and name not in self.pool.late(at):
            what = f"the batch of {name!r} of step {at + 1}, which came late, is missing"
            raise changed(self.pool.folder, what)
        return list(self.pool.rows(name, at, lambda reason: unreadable.append((name, reason))))

    def _choose(self, step: int) -> dict[str, Any]:
        """New late batches, oldest first, up to the configured number of rows, and verdicts on them."""
        window = range(max(0, step - self.staleness), step)
        used = {
            (at, agent)
            for earlier in window
            for at, agent in (
                self.journal.read(KIND, earlier, self.pool.digest(earlier)) or {"batches": []}
            )["batches"]
        }
        batches, rows, left = [], list[list[Any]](), self.most
        for at in (s for s in window if not self.pool.is_away(s)):
            for agent, late in sorted(self.pool.late(at).items()):
                if (at, agent) not in used and len(late) <= left:
                    left -= len(late)
                    batches.append([at, agent])
                    problems = self.problems_of(at)
                    texts = [t for t in late if t.turns and t.problem_id in problems]
                    rows += self.view.judge(texts, problems) if self.view.judges else []
        return {"batches": batches, "rows": rows}


def credit_late(
    step: int,
    steps: Iterable[LateStep],
    defence: Defence,
    credit: Callable[[Sequence[Sample], Snapshot], list[Sample]],
    used: Sequence[Sample],
) -> list[list[Sample]]:
    """The credited samples of late batches, by step and problem, within the limits of `[trust]`. `used`
    are the samples of the step itself."""
    groups: dict[tuple[int, str], list[Sample]] = {}
    for late in steps:
        snapshot, samples = defence.admit_late(step, late, used)
        samples = defence.scaled(credit(samples, snapshot), used)
        used = [*used, *samples]
        for s in samples:
            groups.setdefault((snapshot.step, s.problem_id), []).append(s)
    return list(groups.values())


def late_metrics(steps: Sequence[LateStep], groups: Iterable[Sized]) -> dict[str, float]:
    """Counts of late batches and samples that a step used."""
    used = sum(map(len, groups))
    return {
        "late/batches": float(sum(len(late.sources) for late in steps)),
        "late/samples": float(used),
        "late/left_out": float(sum(len(late.samples) for late in steps) - used),
        "late/age": float(max((late.age for late in steps), default=0)),
    }
