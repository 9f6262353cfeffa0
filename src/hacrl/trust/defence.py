"""What a learner does against its peers' samples before it trains on them: quarantine and caps.

In this order: sources in quarantine are left out, then samples over `max_ratio` or below
`min_own_quantile`, then samples over `max_source_fraction`. After credit, advantages are scaled to
`max_source_weight`. Samples of late batches follow under the same rules: caps count them together with
the step's samples, and only late ones are left out or scaled for it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from hacrl.config import Config
from hacrl.store.journal import LearnerJournal
from hacrl.store.pool import Pool
from hacrl.trust.caps import Key, cap_weights, key_of, log_ratio, over_ratio, surplus, unlikely
from hacrl.trust.quarantine import (
    CALM_STEPS,
    COPY_WINDOW,
    FALSE_ALARM_STEPS,
    STATISTICS,
    Standing,
    Texts,
    count_copies,
    long_texts,
    rate_evidence,
    ratio_evidence,
)
from hacrl.trust.view import LateStep, Seen
from hacrl.types import Sample, Snapshot

KIND = "quarantine"  # of the journal's files

REASONS = {
    "claims": "its verdicts differ from those of this agent's verifier",
    "invalid": "it publishes impossible values, or fewer replies than required",
    "copies": "it publishes texts that others wrote before",
    "ratio": "its published log-probabilities are too low",
}

Score = Callable[[Sequence[Sample]], list[Sample]]
"""Fills in the log-probabilities that the learner's weights give to peers' samples."""


class Defence:
    """The defences of one learner. With the default settings it changes nothing.

    Example: snapshot, samples = defence.admit(3, seen, samples, score)
    """

    def __init__(self, name: str, config: Config, pool: Pool, journal: LearnerJournal) -> None:
        self.name, self.seed, self.trust = name, config.seed, config.trust
        self.pool, self.journal = pool, journal
        self.metrics: dict[str, Any] = {}  # of the step
        self.notes: list[str] = []
        self.left_out: Counter[tuple[str, str]] = Counter()
        """Samples that the step does not use, by source and reason: "quarantined", "ratio",
        "unlikely" or "capped"."""
        self._out: set[str] = set()  # sources in quarantine
        self._texts: dict[int, Texts] = {}

    def admit(
        self,
        step: int,
        seen: Seen,
        samples: list[Sample],
        score: Score,
        came_late: Sequence[LateStep] = (),
    ) -> tuple[Snapshot, list[Sample]]:
        """Return the step's rows without sources in quarantine, and the samples to use. Batches that
        came late are evidence, too."""
        self.metrics, self.notes, self._out = {}, [], set()
        scored = [s for s in score(samples) if not s.is_own] if self.trust.scores_peers else []
        self._report_ratios(scored)
        if self.trust.quarantine:
            parts = [(seen.snapshot, scored)]
            parts += [(_late_rows(late, self.name), late.samples) for late in came_late]
            standings = self._standings(step, seen, parts)
            self._out = {name for name, standing in standings.items() if standing.since is not None}
        kept, self.left_out = self._admitted(step, samples, scored)
        return self._without_quarantined(seen.snapshot), kept

    def admit_late(
        self, step: int, late: LateStep, used: Sequence[Sample]
    ) -> tuple[Snapshot, list[Sample]]:
        """The same for a batch that came late, after `admit`. `used` are the samples that are admitted
        already."""
        kept, _ = self._admitted(step, late.samples, late.samples, used)
        return self._without_quarantined(late.seen.snapshot), kept

    def scaled(self, samples: list[Sample], used: Sequence[Sample] | None = None) -> list[Sample]:
        """The credited samples, with at most `max_source_weight` of the weight by one source. `used` are
        the step's samples, if these came late."""
        if self.trust.max_source_weight == 1:
            return samples
        samples, factors = cap_weights(samples, self.trust.max_source_weight, used or ())
        name = "trust/factor" if used is None else "late/factor"
        self.metrics |= {f"{name}/{source}": factor for source, factor in factors.items()}
        return samples

    def _admitted(
        self,
        step: int,
        samples: list[Sample],
        scored: Sequence[Sample],
        used: Sequence[Sample] = (),
    ) -> tuple[list[Sample], Counter[tuple[str, str]]]:
        """The samples to use, and the number of the others by source and reason."""
        trust, left_out = self.trust, Counter[tuple[str, str]]()

        def leave_out(reason: str, gone: set[Key]) -> None:
            nonlocal samples
            left_out.update((s.source, reason) for s in samples if key_of(s) in gone)
            samples = [s for s in samples if key_of(s) not in gone]

        leave_out("quarantined", {key_of(s) for s in samples if s.source in self._out})
        if trust.max_ratio is not None:
            leave_out("ratio", over_ratio(scored, trust.max_ratio))
        if trust.min_own_quantile is not None:
            own = [s for s in (*used, *samples) if s.is_own]
            leave_out("unlikely", unlikely(own, scored, trust.min_own_quantile))
        if trust.max_source_fraction < 1:
            gone = surplus(samples, trust.max_source_fraction, self.seed, step, used)
            leave_out("capped", gone)
        return samples, left_out

    def _without_quarantined(self, snapshot: Snapshot) -> Snapshot:
        out = self._out
        return snapshot.mapped(lambda t: None if t.agent in out else t) if out else snapshot

    def _standings(
        self, step: int, seen: Seen, parts: Sequence[tuple[Snapshot, Sequence[Sample]]]
    ) -> dict[str, Standing]:
        """The standing of every peer after this step, from the journal or computed and journalled."""
        last = self.journal.newest(KIND, step)
        before = (self._stored(last) if last is not None else None) or {}
        standings = self._stored(step)
        if standings is None:
            standings = {**before}
            for name, evidence in self._evidence(seen, parts).items():
                standings[name] = before.get(name, Standing()).after(step, evidence)
            plain = {name: asdict(standing) for name, standing in sorted(standings.items())}
            self.journal.write(KIND, step, self.pool.digest(step), {"sources": plain})
        for name, standing in standings.items():
            self._report(step, name, before.get(name, Standing()), standing)
        return standings

    def _stored(self, step: int) -> dict[str, Standing] | None:
        """The journalled standings after a step."""
        stored = self.journal.read(KIND, step, self.pool.digest(step))
        return stored and {name: Standing(**plain) for name, plain in stored["sources"].items()}

    def _evidence(
        self, seen: Seen, parts: Sequence[tuple[Snapshot, Sequence[Sample]]]
    ) -> dict[str, dict[str, float]]:
        """Evidence against each peer that published rows. `seen` has the counts of all of them; `parts`
        are the rows of the step and those that came late, with scored samples."""
        published, long, copies = Counter[str](), Counter[str](), Counter[str]()
        invalid = Counter(row.agent for row in seen.invalid if row.agent != self.name)
        log_rhos: dict[str, list[float]] = defaultdict(list)
        for snapshot, scored in parts:
            rows = {t.key: t for t in snapshot.rows if t.agent != self.name}
            published.update(t.agent for t in rows.values())
            step = snapshot.step
            earlier = [self._long_texts(s) for s in range(max(0, step - COPY_WINDOW), step)]
            compared, copied = count_copies(snapshot, self.name, earlier)
            long, copies = long + compared, copies + copied
            for s in scored:
                if not s.truncated and s.behaviour is not None and s.old_logprobs:
                    claimed = s.behaviour * rows[step, s.source, s.problem_id, s.index].num_tokens
                    log_rhos[s.source].append(sum(s.old_logprobs) - claimed)
        bad = invalid + seen.missing
        return {
            name: {
                "claims": rate_evidence(seen.disagree[name], seen.compared[name], "claims"),
                "invalid": rate_evidence(bad[name], published[name] + bad[name], "invalid"),
                "copies": rate_evidence(copies[name], long[name], "copies"),
                "ratio": ratio_evidence(log_rhos[name]),
            }
            for name in sorted({*published, *bad, *seen.compared})
        }

    def _long_texts(self, step: int) -> Texts:
        if step not in self._texts:
            self._texts = {s: t for s, t in self._texts.items() if s >= step - COPY_WINDOW}
            self._texts[step] = long_texts(self.pool.snapshot(step))
        return self._texts[step]

    def _report_ratios(self, scored: Iterable[Sample]) -> None:
        """Deciles 1, 5 and 9 of log s by source."""
        by_source: dict[str, list[float]] = defaultdict(list)
        for s in scored:
            if (x := log_ratio(s)) is not None:
                by_source[s.source].append(x)
        for source, values in sorted(by_source.items()):
            values.sort()
            for name, decile in (("p10", 1), ("p50", 5), ("p90", 9)):
                found = values[decile * (len(values) - 1) // 10]
                self.metrics[f"trust/log_ratio/{name}/{source}"] = found

    def _report(self, step: int, name: str, old: Standing, new: Standing) -> None:
        self.metrics[f"trust/quarantined/{name}"] = float(new.since is not None)
        for statistic in STATISTICS:
            self.metrics[f"trust/score/{statistic}/{name}"] = new.scores.get(statistic, 0.0)
        if old.since is None and new.since is not None:
            reasons = "; ".join(REASONS[reason] for reason in new.reason.split(", "))
            self.notes.append(
                f"agent {self.name!r} leaves out the replies of {name!r} from step {step + 1} on "
                f"(quarantine). Reason: {reasons}. For an honest peer this happens at most once "
                f"in {FALSE_ALARM_STEPS} steps on average."
            )
        elif old.since is not None and new.since is None:
            self.notes.append(
                f"agent {self.name!r} uses the replies of {name!r} again from step {step + 1} on: "
                f"{CALM_STEPS} steps in a row were unsuspicious."
            )


def _late_rows(late: LateStep, learner: str) -> Snapshot:
    """The rows that came late, and the learner's own of that step."""
    names = {*late.sources, learner}
    return late.seen.snapshot.mapped(lambda t: t if t.agent in names else None)
