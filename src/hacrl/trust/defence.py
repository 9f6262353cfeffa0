"""What a learner does against its peers' samples before it trains on them: quarantine and caps.

In this order: sources in quarantine are left out, then samples over `max_ratio` or below
`min_own_quantile`, then samples over `max_source_fraction`. After credit, advantages are scaled to
`max_source_weight` and `max_source_norm`. Samples of late batches follow under the same rules: caps
count them together with the step's samples, and only late ones are left out or scaled for it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from hacrl.config import Config
from hacrl.store.journal import LearnerJournal
from hacrl.store.pool import Pool
from hacrl.trust.caps import (
    cap_ratios,
    cap_samples,
    cap_unlikely,
    cap_weights,
    gradient_size,
    log_ratio,
)
from hacrl.trust.quarantine import (
    COPY_WINDOW,
    STATISTICS,
    Standing,
    count_copies,
    long_texts,
    rate_evidence,
    ratio_evidence,
    threshold,
)
from hacrl.trust.view import LateStep, Seen
from hacrl.types import Sample, Snapshot

KIND = "quarantine"  # of the journal's files

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
        self._logprobs: dict[tuple[str, str, int], tuple[float, ...]] = {}  # of the step's peers
        self._texts: dict[int, dict[tuple[str, str], set[str]]] = {}

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
        self.metrics, self.notes = {}, []
        self.left_out.clear()
        self._out = set()
        scored = [s for s in score(samples) if not s.is_own] if self.trust.scores_peers else []
        self._logprobs = {
            (s.source, s.problem_id, s.index): s.old_logprobs for s in scored if s.old_logprobs
        }
        self._report_ratios(scored)
        if self.trust.quarantine:
            parts = [(seen.snapshot, scored)]
            parts += [(_late_rows(late, self.name), late.samples) for late in came_late]
            standings = self._standings(step, seen, parts)
            self._out = {name for name, standing in standings.items() if standing.since is not None}
        kept, left_out = self._admitted(step, samples, scored)
        self.left_out.update(left_out)
        return self._without_quarantined(seen.snapshot), kept

    def admit_late(
        self, step: int, late: LateStep, used: Sequence[Sample]
    ) -> tuple[Snapshot, list[Sample]]:
        """The same for a batch that came late, after `admit`. `used` are the samples that are admitted
        already."""
        kept, _ = self._admitted(step, late.samples, late.samples, used)
        return self._without_quarantined(late.seen.snapshot), kept

    def scaled(self, samples: list[Sample], used: Sequence[Sample] | None = None) -> list[Sample]:
        """The credited samples, with at most `max_source_weight` of the weight and `max_source_norm` of
        the estimated gradient norms by one source. `used` are the step's samples, if these came late."""
        name, trust = "trust/factor" if used is None else "late/factor", self.trust
        found: list[dict[str, float]] = []
        if trust.max_source_weight < 1:
            samples, factors = cap_weights(samples, trust.max_source_weight, used or ())
            found.append(factors)
        if trust.max_source_norm < 1:
            samples, factors = cap_weights(samples, trust.max_source_norm, used or (), self._size)
            found.append(factors)
        for source in sorted(set().union(*found)):
            self.metrics[f"{name}/{source}"] = prod(factors.get(source, 1.0) for factors in found)
        return samples

    def _size(self, sample: Sample) -> float:
        key = (sample.source, sample.problem_id, sample.index)
        return gradient_size(sample.old_logprobs or self._logprobs.get(key, ()))

    def _admitted(
        self, step: int, samples: list[Sample], scored: list[Sample], used: Sequence[Sample] = ()
    ) -> tuple[list[Sample], Counter[tuple[str, str]]]:
        """The samples to use, and the number of the others by source and reason."""
        out, trust = self._out, self.trust
        left_out = Counter((s.source, "quarantined") for s in samples if s.source in out)
        samples = [s for s in samples if s.source not in out]
        if trust.max_ratio is not None:
            samples, over = cap_ratios(samples, scored, trust.max_ratio)
            left_out.update({(name, "ratio"): n for name, n in over.items()})
        if trust.min_own_quantile is not None:
            samples, unlikely = cap_unlikely(samples, scored, trust.min_own_quantile, used)
            left_out.update({(name, "unlikely"): n for name, n in unlikely.items()})
        if trust.max_source_fraction < 1:
            samples, surplus = cap_samples(
                samples, trust.max_source_fraction, self.seed, step, used
            )
            left_out.update({(name, "capped"): n for name, n in surplus.items()})
        return samples, left_out

    def _without_quarantined(self, snapshot: Snapshot) -> Snapshot:
        out = self._out
        return snapshot.mapped(lambda t: None if t.agent in out else t) if out else snapshot

    def _standings(
        self, step: int, seen: Seen, parts: Sequence[tuple[Snapshot, Sequence[Sample]]]
    ) -> dict[str, Standing]:
        """The standing of every peer after this step, from the journal or computed and journalled."""
        digest = self.pool.digest(step)
        stored = self.journal.read(KIND, step, digest)
        before = self._before(step)
        if stored is None:
            standings = dict(before)
            limit = threshold(self.trust.false_alarm_steps)
            for name, evidence in self._evidence(seen, parts).items():
                old = before.get(name, Standing())
                standings[name] = old.after(step, evidence, limit, self.trust.quarantine_steps)
            plain = {name: standing.plain() for name, standing in sorted(standings.items())}
            self.journal.write(KIND, step, digest, {"sources": plain})
        else:
            standings = {name: Standing(**plain) for name, plain in stored["sources"].items()}
        for name, standing in standings.items():
            self._report(step, name, before.get(name, Standing()), standing)
        return standings

    def _before(self, step: int) -> dict[str, Standing]:
        """The standings after the last step that this agent learned."""
        last = self.journal.newest(KIND, step)
        stored = self.journal.read(KIND, last, self.pool.digest(last)) if last is not None else None
        sources = stored["sources"] if stored else {}
        return {name: Standing(**plain) for name, plain in sources.items()}

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
        found = {}
        for name in sorted({*published, *invalid, *seen.missing, *seen.compared}):
            bad = invalid[name] + seen.missing[name]
            found[name] = {
                "claims": rate_evidence(seen.disagree[name], seen.compared[name], "claims"),
                "invalid": rate_evidence(bad, published[name] + bad, "invalid"),
                "copies": rate_evidence(copies[name], long[name], "copies"),
                "ratio": ratio_evidence(log_rhos[name]),
            }
        return found

    def _long_texts(self, step: int) -> dict[tuple[str, str], set[str]]:
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
            self.notes.append(
                f"agent {self.name!r} leaves out the replies of {name!r} from step {step + 1} on "
                f"(quarantine). Reason: {_reasons(new)}. For an honest peer this happens at most once "
                f"in {self.trust.false_alarm_steps} steps on average."
            )
        elif old.since is not None and new.since is None:
            self.notes.append(
                f"agent {self.name!r} uses the replies of {name!r} again from step {step + 1} on: "
                f"{self.trust.quarantine_steps} steps in a row were unsuspicious."
            )


def _late_rows(late: LateStep, learner: str) -> Snapshot:
    """The rows that came late, and the learner's own of that step."""
    names = {*late.sources, learner}
    return late.seen.snapshot.mapped(lambda t: t if t.agent in names else None)


def _reasons(standing: Standing) -> str:
    texts = {
        "claims": "its verdicts differ from those of this agent's verifier",
        "invalid": "it publishes impossible values, or fewer replies than required",
        "copies": "it publishes texts that others wrote before",
        "ratio": "its published log-probabilities are too low",
    }
    return "; ".join(texts[name] for name in standing.reason.split(", "))
