"""Quarantine: sequential tests of whether a peer's batches are those of an honest peer.

Every step gives each source evidence X against honesty, four numbers with E[exp(X)] <= 1 if it is
honest:

    claims    log-likelihood ratio of false verdicts: 10 % of its claims against 1 %
    invalid   the same of rows with impossible values
    copies    the same of long texts that others wrote before: 50 % against 5 %
    ratio     sum over its replies of log(1 + BET (min(rho, MAX_RHO) - 1)),
              rho = pi_learner(text) / claimed pi_source(text), of whole texts

The last one needs no knowledge of the source's model: if a text is drawn from pi_source, the mean of
q(text) / pi_source(text) is at most 1 for every distribution q over texts. Claims that are too low on
average are noticed. Claims that are too high lower the ratio, and with it the sample's weight in hacpo,
naive and overlap.

A score is a CUSUM, S = max(0, S + X). A source whose score exceeds log(4 x FALSE_ALARM_STEPS) is put
into quarantine. By Lorden's bound an honest source gets there at most once in FALSE_ALARM_STEPS steps on
average. Scores continue during quarantine; a source leaves it after CALM_STEPS steps in a row with all
scores below half of the threshold.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log

from hacrl.types import Snapshot, Trajectory

RATES = {"claims": (0.01, 0.1), "invalid": (0.01, 0.1), "copies": (0.05, 0.5)}
"""Rates of an honest and of a suspicious source."""
STATISTICS = (*RATES, "ratio")
BET = 0.1
MAX_RHO = 100.0
LONG_TEXT = 200  # bytes. Shorter texts are often equal by chance and are not compared.
COPY_WINDOW = 10  # steps in which copied texts are looked for
FALSE_ALARM_STEPS = 10_000
CALM_STEPS = 20
THRESHOLD = log(len(STATISTICS) * FALSE_ALARM_STEPS)


def rate_evidence(hits: int, rows: int, statistic: str) -> float:
    """Log-likelihood ratio of `hits` among `rows`.

    Example: rate_evidence(1, 11, "claims") == log(10) + 10 * log(0.9 / 0.99)
    """
    honest, suspicious = RATES[statistic]
    missed = (rows - hits) * log((1 - suspicious) / (1 - honest))
    return hits * log(suspicious / honest) + missed


def ratio_evidence(log_rhos: Iterable[float]) -> float:
    """Evidence of claimed log-probabilities, from the log of rho of each reply."""
    return sum(log(1 + BET * (exp(min(x, log(MAX_RHO))) - 1)) for x in log_rhos)


@dataclass(frozen=True)
class Standing:
    """A source's scores, and whether it is in quarantine.

    Example: Standing({"claims": 13.8}, since=11, reason="claims")
    """

    scores: Mapping[str, float] = field(default_factory=dict)
    since: int | None = None  # the step in which the quarantine began; None: not in quarantine
    calm: int = 0  # unsuspicious steps in a row since then
    reason: str = ""  # the statistics that exceeded the threshold

    def after(
        self, step: int, evidence: Mapping[str, float], threshold: float = THRESHOLD
    ) -> Standing:
        """The standing after a step with this evidence."""
        scores = {
            name: min(max(0.0, self.scores.get(name, 0.0) + evidence.get(name, 0.0)), 2 * threshold)
            for name in STATISTICS
        }
        if self.since is None:
            alarms = ", ".join(name for name, score in scores.items() if score > threshold)
            return Standing(scores, step if alarms else None, 0, alarms)
        calm = self.calm + 1 if max(scores.values()) < threshold / 2 else 0
        if calm >= CALM_STEPS:
            return Standing()
        return replace(self, scores=scores, calm=calm)


# ---------------------------------------------------------------- copies

LongText = tuple[str, str]  # problem and sha256
Texts = Mapping[LongText, set[str]]  # with their authors


def long_texts(snapshot: Snapshot) -> Texts:
    """The long texts of a step."""
    found = defaultdict[LongText, set[str]](set)
    for t in snapshot.rows:
        if key := _long_text(t):
            found[key].add(t.agent)
    return found


def count_copies(
    snapshot: Snapshot, learner: str, earlier: Sequence[Texts]
) -> tuple[Counter[str], Counter[str]]:
    """The number of long texts by source, and of those among them that another agent wrote in an earlier
    step, or the learner in this step, for the same problem. The learner's own reply_start makes no text
    long: honest peers may have the same one."""
    long, copies = Counter[str](), Counter[str]()
    start = next((t.reply_start for t in snapshot.rows if t.agent == learner), "")
    texts = [(t.agent, key) for t in snapshot.rows if (key := _long_text(t, start))]
    own = {key for agent, key in texts if agent == learner}
    for agent, key in texts:
        if agent != learner:
            long[agent] += 1
            before = any(known.get(key, set()) - {agent} for known in earlier)
            copies[agent] += before or key in own
    return long, copies


def _long_text(t: Trajectory, start: str = "") -> LongText | None:
    """The key of a text that is long without `start`."""
    text = (t.reply_start + t.text).encode("utf-8", "surrogatepass")
    rest = text.removeprefix(start.encode("utf-8", "surrogatepass"))
    return (t.problem_id, hashlib.sha256(text).hexdigest()) if len(rest) >= LONG_TEXT else None
