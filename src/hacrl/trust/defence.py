"""What a learner does against its peers' samples before it trains on them: quarantine and caps.

In this order: sources in quarantine are left out, then samples over `max_ratio` or below
`min_own_quantile`, then samples over `max_source_fraction`. After credit, advantages are scaled to
`max_source_weight`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hacrl.config import Config
from hacrl.store.journal import LearnerJournal
from hacrl.store.pool import Pool
from hacrl.trust.caps import cap_ratios, cap_samples, cap_unlikely, cap_weights, log_ratio
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
from hacrl.trust.view import Seen
from hacrl.types import Sample, Snapshot

KIND = "quarantine"  # of the journal's files

Score = Callable[[Sequence[Sample]], list[Sample]]
"""Fills in the log-probabilities that the learner's weights give to peers' samples."""


class Defence:
    """The defences of one learner. With the default settings it changes nothing.

    Example: snapshot, samples = defence.admit(3, seen, samples, agent._score_peers)
    """

    def __init__(self, name: str, config: Config, pool: Pool, journal: LearnerJournal) -> None:
        self.name, self.seed, self.trust = name, config.seed, config.trust
        self.pool, self.journal = pool, journal
        self.metrics: dict[str, Any] = {}  # of the step
        self.notes: list[str] = []
        self.left_out: Counter[tuple[str, str]] = Counter()
        """Samples that the step does not use, by source and reason: "quarantined", "ratio",
        "unlikely" or "capped"."""
        self._texts: dict[int, dict[tuple[str, str], set[str]]] = {}

    def admit(
        self, step: int, seen: Seen, samples: list[Sample], score: Score
    ) -> tuple[Snapshot, list[Sample]]:
        """Return the step's rows without sources in quarantine, and the samples to use."""
        self.metrics, self.notes, snapshot = {}, [], seen.snapshot
        self.left_out.clear()
        scored = [s for s in score(samples) if not s.is_own] if self.trust.scores_peers else []
        self._report_ratios(scored)
        if self.trust.quarantine:
            standings = self._standings(step, seen, scored)
            out = {name for name, standing in standings.items() if standing.since is not None}
            snapshot = snapshot.mapped(lambda t: None if t.agent in out else t) if out else snapshot
            self.left_out.update((s.source, "quarantined") for s in samples if s.source in out)
            samples = [s for s in samples if s.source not in out]
        if self.trust.max_ratio is not None:
            samples, over = cap_ratios(samples, scored, self.trust.max_ratio)
            self.left_out.update({(name, "ratio"): n for name, n in over.items()})
        if self.trust.min_own_quantile is not None:
            samples, unlikely = cap_unlikely(samples, scored, self.trust.min_own_quantile)
            self.left_out.update({(name, "unlikely"): n for name, n in unlikely.items()})
        if self.trust.max_source_fraction < 1:
            samples, surplus = cap_samples(samples, self.trust.max_source_fraction, self.seed, step)
            self.left_out.update({(name, "capped"): n for name, n in surplus.items()})
        return snapshot, samples

    def quarantined(self, source: str) -> bool:
        """Whether the source is in quarantine in the step that `admit` saw last."""
        return bool(self.metrics.get(f"trust/quarantined/{source}"))

    def scaled(self, samples: list[Sample]) -> list[Sample]:
        """The credited samples, with at most `max_source_weight` of the weight by one source."""
        if self.trust.max_source_weight < 1:
            samples, factors = cap_weights(samples, self.trust.max_source_weight)
            self.metrics |= {f"trust/factor/{name}": factor for name, factor in factors.items()}
        return samples

    def _standings(self, step: int, seen: Seen, scored: Sequence[Sample]) -> dict[str, Standing]:
        """The standing of every peer after this step, from the journal or computed and journalled."""
        digest = self.pool.digest(step)
        stored = self.journal.read(KIND, step, digest)
        before = self._before(step)
        if stored is None:
            standings = dict(before)
            limit = threshold(self.trust.false_alarm_steps)
            for name, evidence in self._evidence(step, seen, scored).items():
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
        self, step: int, seen: Seen, scored: Sequence[Sample]
    ) -> dict[str, dict[str, float]]:
        """Evidence against each peer that published rows."""
        groups = seen.snapshot.groups
        rows = {t.key: t for g in groups for t in g.trajectories if t.agent != self.name}
        published = Counter(t.agent for t in rows.values())
        invalid = Counter(row.agent for row in seen.invalid if row.agent != self.name)
        earlier = [self._long_texts(s) for s in range(max(0, step - COPY_WINDOW), step)]
        long, copies = count_copies(seen.snapshot, self.name, earlier)
        log_rhos: dict[str, list[float]] = defaultdict(list)
        for s in scored:
            if not s.truncated and s.behaviour is not None and s.old_logprobs:
                row = rows[step, s.source, s.problem_id, s.index]
                claimed = s.behaviour * row.num_tokens
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
                f"(quarantine). The reason: {_reasons(new)}. An honest peer gets there at most once in "
                f"{self.trust.false_alarm_steps} steps on average."
            )
        elif old.since is not None and new.since is None:
            self.notes.append(
                f"agent {self.name!r} uses the replies of {name!r} again from step {step + 1} on: "
                f"{self.trust.quarantine_steps} steps in a row were unsuspicious."
            )


def _reasons(standing: Standing) -> str:
    texts = {
        "claims": "its verdicts are not those of this agent's verifier",
        "invalid": "it publishes impossible values, or fewer replies than it has to",
        "copies": "it publishes texts that others wrote before",
        "ratio": "the log-probabilities that it claims are too low",
    }
    return "; ".join(texts[name] for name in standing.reason.split(", "))
