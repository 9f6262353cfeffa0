"""Who teaches whom: for each learner and source, what became of the source's samples, over time.

Counts come from the index where it has the step, else from the metrics. Rates, weights and gains come
from the metrics.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

from hacrl.store.rows import Row
from hacrl.view.curves import by_agent, column, short
from hacrl.view.index import CLIPPED, NONE, USED, ZERO, Index
from hacrl.view.live import LiveRun

DROP = "samples/drop/"
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

Counts = Mapping[tuple[str, str], Mapping[str, int]]
"""(learner, author) -> use -> number of replies."""


def teaching(run: LiveRun, index: Index) -> dict[str, Any]:
    """The matrix of learners and sources, and each pair by step."""
    config = run.config()
    train = run.metric_rows("train")
    steps = sorted({row["step"] for row in train})
    table = by_agent(train, config)
    counts = _counts(index)
    sources = [agent.name for agent in config.agents]
    pairs = [
        _pair(learner, source, table.get(learner, {}), steps, counts.get((learner, source), {}))
        for learner in index.learners
        for source in sources
    ]
    return {
        "learners": index.learners,
        "sources": sources,
        "x": [step + 1 for step in steps],
        "pairs": pairs,
        "drops": {name: _drops(table.get(name, {}).values()) for name in index.learners},
        "index": index.progress(),
    }


def _counts(index: Index) -> Counts:
    found: dict[tuple[str, str], Counter[str]] = {}
    with index.reading() as db:
        rows = db.execute("SELECT learner, author, uses, sum(count) FROM counts GROUP BY 1, 2, 3")
        for learner, author, use, count in rows:
            found.setdefault((learner, author), Counter())[use] += count
    return found


def _pair(
    learner: str,
    source: str,
    rows: Mapping[int, Row],
    steps: Sequence[int],
    uses: Mapping[str, int],
) -> dict[str, Any]:
    series = {name: column(rows, steps, key.format(source)) for name, key in SERIES.items()}
    if learner == source:
        series["used"] = [None if v is None else 1 - v for v in column(rows, steps, "own/clipped")]
        series["ratio"] = column(rows, steps, "own/ratio")
    kept, dropped = (sum(v or 0 for v in series[name]) for name in ("kept", "dropped"))
    return {
        "learner": learner,
        "source": source,
        "offered": sum(uses.values()) or kept + dropped,
        "dropped": dropped,
        "left_out": uses.get(NONE, 0) or dropped,
        "zero": uses.get(ZERO, 0),
        "clipped": uses.get(CLIPPED, 0),
        "used": uses.get(USED, 0),
        "counted": bool(uses),
        "reasons": _drops(rows.values(), source),
        "fraction": _mean(series["used"]),
        "effective": _mean(series["effective"]),
        "weight": _mean(series["weight"]),
        "ratio": _mean(series["ratio"]),
        "quarantined": series["quarantined"][-1:] == [1.0],
        "gain": _gain(series["gain"], series["gain_se"]),
        "series": {name: values for name, values in series.items() if _any(values)},
    }


def _drops(rows: Any, source: str = "") -> dict[str, int]:
    """Reason -> replies that a learner dropped, of one source where given."""
    found: Counter[str] = Counter()
    for row in rows:
        for key, count in row.items():
            if key.startswith(DROP) and count:
                reason, _, author = key.removeprefix(DROP).partition("/")
                if author == source:
                    found[reason] += int(count)
    return dict(found)


def _gain(gains: Sequence[float | None], errors: Sequence[float | None]) -> dict[str, Any] | None:
    """Mean over checks, its standard error and their number."""
    found = [(g, e) for g, e in zip(gains, errors, strict=True) if g is not None and e is not None]
    if not found:
        return None
    error = sqrt(sum(e * e for _, e in found)) / len(found)
    return {"mean": _mean([g for g, _ in found]), "se": short(error), "checks": len(found)}


def _mean(values: Sequence[float | None]) -> float | None:
    found = [v for v in values if v is not None]
    return short(sum(found) / len(found)) if found else None


def _any(values: Sequence[float | None]) -> bool:
    return any(v is not None for v in values)
