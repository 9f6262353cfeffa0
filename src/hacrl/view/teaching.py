"""Who teaches whom: for each learner and source, what became of the source's samples, over time.

Counts come from the index where it has the step, else from the metrics. Rates, weights and gains come
from the metrics.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import hypot
from statistics import fmean
from typing import Any

from hacrl.store.rows import Row
from hacrl.view.curves import Values, column, short, train_table
from hacrl.view.index import CLIPPED, NONE, USED, ZERO, Index
from hacrl.view.live import LiveRun

SERIES = {
    "used": "peers/used/{}",
    "effective": "peers/effective/{}",
    "weight": "weight/{}",
    "ratio": "ratio/{}",
    "kept": "samples/kept/{}",
    "dropped": "samples/dropped/{}",
    "quarantined": "trust/quarantined/{}",
    "gain": "diagnostics/gain/{}",
    "gain_se": "diagnostics/gain_se/{}",
}
"""Name on the page -> metric of a learner, with the source for {}."""


def teaching(run: LiveRun, index: Index) -> dict[str, Any]:
    """The matrix of learners and sources, and each pair by step."""
    steps, table = train_table(run)
    counts = _counts(index)
    sources = [agent.name for agent in run.config().agents]
    return {
        "learners": index.learners,
        "sources": sources,
        "x": [step + 1 for step in steps],
        "pairs": [
            _pair(learner, source, table[learner], steps, counts[learner, source])
            for learner in index.learners
            for source in sources
        ],
        "index": index.progress(),
    }


def _counts(index: Index) -> Mapping[tuple[str, str], Counter[str]]:
    """(learner, author) -> use -> number of replies, of the steps whose samples are stored."""
    found = defaultdict[tuple[str, str], Counter[str]](Counter)
    with index.reading() as db:
        for author, uses, count in db.execute(
            "SELECT author, uses, count(*) FROM replies GROUP BY 1, 2"
        ):
            for learner, use in zip(index.learners, uses, strict=False):
                found[learner, author][use] += count
    return found


def _pair(
    learner: str, source: str, rows: Mapping[int, Row], steps: Sequence[int], uses: Counter[str]
) -> dict[str, Any]:
    series = {name: column(rows, steps, key.format(source)) for name, key in SERIES.items()}
    if learner == source:
        series["used"] = [None if v is None else 1 - v for v in column(rows, steps, "own/clipped")]
        series["ratio"] = column(rows, steps, "own/ratio")
    kept, dropped = (sum(v or 0 for v in series[name]) for name in ("kept", "dropped"))
    return {
        "learner": learner,
        "source": source,
        "offered": uses.total() or kept + dropped,
        "dropped": dropped,
        "left_out": uses[NONE] or dropped,
        "zero": uses[ZERO],
        "clipped": uses[CLIPPED],
        "used": uses[USED],
        "counted": bool(uses),
        "reasons": _reasons(rows, source),
        "fraction": _mean(series["used"]),
        **{name: _mean(series[name]) for name in ("effective", "weight", "ratio")},
        "quarantined": series["quarantined"][-1:] == [1.0],
        "gain": _gain(series["gain"], series["gain_se"]),
        "series": {name: values for name, values in series.items() if _mean(values) is not None},
    }


def _reasons(rows: Mapping[int, Row], source: str) -> dict[str, int]:
    """Reason -> replies of the source that the learner dropped."""
    found: Counter[str] = Counter()
    for row in rows.values():
        for key, count in row.items():
            if key.startswith("samples/drop/") and key.endswith(f"/{source}"):
                found[key.split("/")[2]] += int(count)
    return found


def _gain(gains: Values, errors: Values) -> dict[str, Any] | None:
    """Mean over checks and its standard error."""
    found = [e for g, e in zip(gains, errors, strict=True) if g is not None and e is not None]
    return {"mean": _mean(gains), "se": short(hypot(*found) / len(found))} if found else None


def _mean(values: Values) -> float | None:
    found = [v for v in values if v is not None]
    return short(fmean(found)) if found else None
