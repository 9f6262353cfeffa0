"""report.md, report.html, results.json and the tables for the terminal, all from the same Results.

The text is in report.md.j2. report.html is the page of `hacrl view` as one file; it shows the
numbers of results.json as figures, and the text.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import rich.table

from hacrl.logs.warnings import NEARLY_NONE
from hacrl.safe_text import mask, mask_override, plural
from hacrl.statistics import LEVEL
from hacrl.store.files import write_atomic
from hacrl.study.compare.benchmarks import table_lines
from hacrl.study.compare.exchange import Exchange, Parity
from hacrl.study.compare.results import Difference, Results, Row
from hacrl.study.compare.suite import Suite
from hacrl.study.tables import duration, percent, plain_table, points_text
from hacrl.study.templates import render as render_template
from hacrl.study.templates import toml
from hacrl.view.suite import report_page

Line = dict[str, str]  # one row of a table: column -> text
NOT_PRINTED = ("seeds", "seeds above/below", "p (Holm)", "alone (fitted)")
"""Columns of report.md that the terminal does not show."""
VERDICTS = "better", "worse", "open"
DIAGNOSTICS = {
    "peers/used": "used",
    "peers/below_floor": "below floor",
    "peers/above_one": "above 1",
    "peers/effective_fraction": "effective",
    "own/clipped": "clipped",
    "own/advantage_zero": "A = 0",
    "grad_norm": "norm",
    "reply_tokens": "reply tokens",
}


def write_report(results: Results, out: Path, below: str = "") -> None:
    """Write results.json, report.md and report.html into the suite's folder, or a folder `below`."""
    folder, up = out / below, "../" * len(Path(below).parts)
    write_atomic(folder / "results.json", json.dumps(as_json(results), indent=1) + "\n")
    write_atomic(folder / "report.md", render(results, up))
    write_atomic(folder / "report.html", render_page(results, up))


def as_json(results: Results) -> dict[str, Any]:
    """Every number of the report. Infinite ends of intervals (one seed) are null."""
    suite = results.suite
    values = {
        "suite": suite.path.name,
        "changes": [*map(mask_override, results.changes)],
        "reference": results.reference,
        "score": results.score,
        "seeds": suite.seeds,
        "comparisons": results.comparisons,
        "correction": "holm",
        "problems": results.problems,
        "replies": results.replies,
        "environment": results.environment,
        "missing": results.missing,
        "verdicts": list(verdicts(results)),
        "benchmarks": [asdict(row) for row in results.benchmarks],
        "rows": [
            asdict(row)
            | ({"difference": _difference_json(row.difference)} if row.difference else {})
            | {"verdict": row.difference.verdict if row.difference else None}
            | ({"exchange": _exchange_json(row.exchange)} if row.exchange else {})
            for row in results.rows
        ],
    }
    return json.loads(json.dumps(values), parse_constant=lambda name: None)


def render(results: Results, up: str = "") -> str:
    """The text of the report as Markdown. `up` leads to the suite's folder."""
    text = render_template(
        "compare/report.md.j2",
        results=results,
        suite=results.suite,
        level=LEVEL,
        unit=_unit(results),
        verdicts=list(verdicts(results)),
        scores=_scores(results),
        accuracies=[_accuracy_line(results, row) for row in results.rows],
        exchange=[_exchange_line(row, row.exchange) for row in results.rows if row.exchange],
        parity=_parity_counts(results),
        benchmarks=table_lines(results.suite, results.benchmarks),
        diagnostics=[_diagnostics_line(row) for row in results.rows],
        command=_command(results),
        settings=list(_settings(results.suite)),
        unused=[row for row in results.rows if row.diagnostics.get("peers/used", 1) < NEARLY_NONE],
        up=up,
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def render_page(results: Results, up: str = "") -> str:
    """The report as one HTML file: the figures of results.json and the text."""
    title = f"Comparison: {results.suite.path.stem}"
    return report_page(title, as_json(results), render(results, up), up)


def tables(results: Results) -> Iterator[rich.table.Table]:
    """The main numbers for the terminal: held-out scores, exchange rates and benchmarks."""
    seeds = len({seed for row in results.rows for seed in row.seeds})
    scores = (
        f"{results.problems} problems x {results.replies} replies, mean over "
        f"{plural(seeds, 'seed')} with 95 % interval\n"
        f"minus {results.reference}: difference paired by seed and problem"
        + ("" if seeds > 1 else "\nOne seed allows no verdict: the interval covers problems only.")
    )
    if results.missing:
        scores += f"\nNot finished and left out: {plural(len(results.missing), 'run')}"
    published = "in brackets: published figures" if results.suite.published else None
    accuracies = [_accuracy_line(results, row) for row in results.rows]
    exchange = [_exchange_line(row, row.exchange) for row in results.rows if row.exchange]
    name = results.suite.path.stem
    yield from _table(f"{name}: held-out {results.score} {_unit(results)}", accuracies, scores)
    yield from _table("exchange rate f", exchange, "n: rollouts of the team for one own rollout")
    benchmarks = table_lines(results.suite, results.benchmarks)
    yield from _table("benchmarks in percent, mean over seeds", benchmarks, published)


def _table(title: str, lines: Sequence[Line], caption: str | None) -> Iterator[rich.table.Table]:
    if lines:
        agent, arm, *numbers = (name for name in lines[0] if name not in NOT_PRINTED)
        table = plain_table(f"\n{title}", [agent, arm], numbers, caption)
        for line in lines:
            table.add_row(*(text for name, text in line.items() if name not in NOT_PRINTED))
        yield table


# ---------------------------------------------------------------- verdicts


def verdicts(results: Results) -> Iterator[str]:
    """One sentence for each agent of each team: the arms that are better, worse and open."""
    agents: dict[str, dict[str, list[str]]] = {}
    for row in results.rows:
        arms = agents.setdefault(f"{row.agent} ({row.team})", {})
        if row.arm != results.reference:
            verdict = row.difference.verdict if row.difference else "not compared"
            arms.setdefault(verdict, []).append(_arm_points(row))
    for agent, arms in agents.items():
        parts = [f"{v}: {', '.join(arms[v])}" for v in (*VERDICTS, "not compared") if v in arms]
        yield f"{agent} against {results.reference}: {'; '.join(parts) or 'no other arm yet'}."


def _arm_points(row: Row) -> str:
    """An arm with its difference in points, e.g. "naive +2.8". A star: the interval excludes
    zero, but not after the correction."""
    if (found := row.difference) is None:
        return row.arm
    star = "*" if found.testable and found.verdict == "open" and found.side != "open" else ""
    return f"{row.arm} {100 * found.interval.mean:+.1f}{star}"


def _scores(results: Results) -> list[Line]:
    """Per arm: for how many agents it is better, worse or open."""
    found = _by_arm((row.arm, row.difference.verdict) for row in results.rows if row.difference)
    return [{"arm": arm} | {v: str(counts[v]) for v in VERDICTS} for arm, counts in found.items()]


def _parity_counts(results: Results) -> list[str]:
    """Per arm: for how many agents f >= n is shown, open, refuted and not identifiable."""
    found = _by_arm((row.arm, row.exchange.parity) for row in results.rows if row.exchange)
    return [
        f"{arm}: f >= n is "
        + ", ".join(f"{verdict} for {counts[verdict]}" for verdict in get_args(Parity))
        + f" of {plural(counts.total(), 'agent')}."
        for arm, counts in found.items()
    ]


def _by_arm(verdicts: Iterable[tuple[str, str]]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for arm, verdict in verdicts:
        found.setdefault(arm, Counter())[verdict] += 1
    return found


# ---------------------------------------------------------------- lines of the tables


def _command(results: Results) -> str:
    """The command that makes this report, quoted for a shell, without secrets."""
    suite, changes = results.suite, map(mask_override, results.changes)
    parts = ["hacrl", "compare", str(suite.path), *changes, *results.options]
    against = results.reference != suite.reference
    return shlex.join([*parts, *(["--against", results.reference] if against else ())])


def _settings(suite: Suite) -> Iterator[str]:
    """What the suite, its teams and its arms change in the base config, without secrets."""
    changes = {"All runs": suite.overrides}
    for team in suite.teams:
        agents = [a if isinstance(a, str) else toml(mask(a)) for a in team.agents or ()]
        changes[f"Team {team.name}"] = [*agents, *team.overrides]
    for arm in suite.arms:
        tables = [f"agents.{name}={toml(mask(table))}" for name, table in arm.agents.items()]
        changes[f"Arm {arm.name}"] = [*arm.overrides, *tables]
    for name, given in changes.items():
        yield f"{name}: {' '.join(map(mask_override, given)) or 'the base config'}"


def _unit(results: Results) -> str:
    return "x 100" if results.partial else "in percent"


def _accuracy_line(results: Results, row: Row) -> Line:
    found = row.difference
    return {
        "team / agent": row.name,
        "arm": row.arm,
        "own rollouts": f"{row.rollouts:,.0f}" + (f" (x{row.factor:g})" if row.factor != 1 else ""),
        "updates": f"{row.updates:,.0f}",
        "training time": "" if row.borrowed else duration(row.seconds),
        "seeds": str(len(row.seeds)),
        "before": percent(row.before) + row.judged[0],
        "after": percent(row.after) + row.judged[1],
        f"minus {results.reference}": points_text(found.interval) if found else "",
        "seeds above/below": f"{found.above}/{found.below}" if found else "",
        "p (Holm)": f"{found.p:.2g} ({found.corrected:.2g})" if found and found.testable else "",
        "verdict": "reference" if row.arm == results.reference else found.verdict if found else "",
    }


def _difference_json(found: Difference) -> dict[str, Any]:
    return asdict(found) | {"interval": asdict(found.interval)}


def _exchange_json(found: Exchange) -> dict[str, Any]:
    return asdict(found) | {"text": found.text, "parity": found.parity}


def _exchange_line(row: Row, found: Exchange) -> Line:
    points = zip(found.multiples, found.curve, strict=True)
    return {
        "team / agent": row.name,
        "arm": row.arm,
        "seeds": str(found.seeds),
        "alone (fitted)": ", ".join(f"x{m:.3g}: {100 * height:.1f}" for m, height in points),
        "after": percent(row.after),
        "f": found.text,
        "n": f"{found.n:.3g}",
        "f >= n": found.parity,
    }


def _diagnostics_line(row: Row) -> Line:
    found = row.diagnostics
    ratios = (
        f"{source} {found[key]:.3f} (w {found.get(f'weight/{source}', 1.0):.2f})"
        for key in found
        if (source := key.removeprefix("ratio/")) != key
    )
    line = {"team / agent": row.name, "arm": row.arm, "ratio by source": ", ".join(ratios)}
    return line | {v: f"{found[k]:.3f}" if k in found else "" for k, v in DIAGNOSTICS.items()}
