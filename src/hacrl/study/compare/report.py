"""report.md, report.html, results.json and the table for the terminal, all from the same Results.

The text is in report.md.j2. report.html is the page of `hacrl view` as one file; it shows the
numbers of results.json as figures, and the text.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, get_args

import rich.table

from hacrl.logs.warnings import NEARLY_NONE
from hacrl.safe_text import mask_override, plural
from hacrl.statistics import LEVEL, Estimate
from hacrl.store.files import write_atomic
from hacrl.study.compare.benchmarks import table_lines
from hacrl.study.compare.budget import RULES
from hacrl.study.compare.checks import TheoryChecks
from hacrl.study.compare.exchange import Exchange, Parity
from hacrl.study.compare.results import Reach, Results, Row
from hacrl.study.diagnostics.baseline import BASELINES
from hacrl.study.tables import duration, percent, plain_table, points_text
from hacrl.study.templates import render as render_template
from hacrl.view.suite import report_page

Line = dict[str, str]  # one row of a table: column -> text


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
        "budget": suite.budget,
        "rule": RULES[suite.budget],
        "reference": results.reference,
        "score": results.score,
        "seeds": suite.seeds,
        "comparisons": results.comparisons,
        "correction": "holm",
        "problems": results.problems,
        "replies": results.replies,
        "start_gap": results.start_gap,
        "environment": results.environment,
        "missing": results.missing,
        "unequal": results.unequal,
        "targets": [
            {"team": team, "agent": agent, "accuracy": accuracy}
            for (team, agent), accuracy in results.targets.items()
        ],
        "verdicts": list(verdicts(results)),
        "benchmarks": [asdict(row) for row in results.benchmarks],
        "rows": [
            asdict(row)
            | {"verdict": row.difference.verdict if row.difference else None}
            | {"exchange": _exchange_json(row.exchange)}
            for row in results.rows
        ],
    }
    return json.loads(json.dumps(values), parse_constant=lambda name: None)


def render(results: Results, up: str = "") -> str:
    """The text of the report as Markdown. `up` leads to the suite's folder."""
    checked = [(row, row.theory) for row in results.rows if row.theory]
    text = render_template(
        "compare/report.md.j2",
        title_text=f"Comparison: {results.suite.path.stem}",
        results=results,
        suite=results.suite,
        rule=RULES[results.suite.budget],
        level=LEVEL,
        unit=_unit(results),
        verdicts=list(verdicts(results)),
        scores=_scores(results),
        accuracies=[_accuracy_line(results, row) for row in results.rows],
        curves=[_curve_line(results, row) for row in results.rows],
        exchange=[_exchange_line(row, row.exchange) for row in results.rows if row.exchange],
        parity=_parity_counts(results),
        benchmarks=table_lines(results.suite, results.benchmarks),
        diagnostics=_diagnostics_lines(results.rows),
        unused=[row for row in results.rows if row.diagnostics.get("peers/used", 1) < NEARLY_NONE],
        baselines=[_baseline_line(row, found) for row, found in checked],
        sources=[
            _source_line(row, found, source)
            for row, found in checked
            for source in found.sources(row.agent)
        ],
        links=_links(results, up),
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def render_page(results: Results, up: str = "") -> str:
    """The report as one HTML file: the figures of results.json and the text."""
    title = f"Comparison: {results.suite.path.stem}"
    return report_page(title, as_json(results), render(results, up), up)


def results_table(results: Results) -> rich.table.Table:
    """The main numbers for the terminal, one line per agent and arm."""
    several = len(results.suite.all_teams) > 1
    seeds = len({seed for row in results.rows for seed in row.seeds})
    title = f"\n{results.suite.path.stem}: held-out {results.score} {_unit(results)}"
    caption = (
        f"{results.problems} problems x {results.replies} replies, mean over "
        f"{plural(seeds, 'seed')}\n"
        f"minus {results.reference}: difference paired by seed and problem, with 95 % interval"
        + ("" if seeds > 1 else "\nOne seed allows no verdict: the interval covers problems only.")
        + "".join(f"\n{text}" for text in results.unequal)
    )
    numbers = ("rollouts", "updates", "time", "before", "after", f"minus {results.reference}")
    table = plain_table(title, ["agent", "arm"], numbers, caption)
    table.add_column("verdict")
    if results.suite.alone:
        table.add_column("exchange rate f", justify="right")
        table.add_column("f >= n", no_wrap=True)
    for row in results.rows:
        found, rate = row.difference, row.exchange
        table.add_row(
            row.name if several else row.agent,
            row.arm,
            f"{row.rollouts:,.0f}",
            f"{row.updates:,.0f}",
            duration(row.seconds),
            f"{100 * row.before.mean:.1f}{row.judged[0]}",
            f"{100 * row.after.mean:.1f}{row.judged[1]}",
            points_text(found.interval) if found else "",
            found.verdict if found else "",
            *([rate.text, f"{rate.parity} (n = {rate.n:.3g})"] if rate else []),
        )
    return table


def benchmark_table(results: Results) -> rich.table.Table | None:
    """The benchmarks for the terminal; None without benchmarks."""
    lines = table_lines(results.suite, results.benchmarks)
    if not lines:
        return None
    title, (agent, arm, *numbers) = "\nbenchmarks in percent, mean over seeds", lines[0]
    caption = "in brackets: published figures" if results.suite.published else None
    table = plain_table(title, [agent, arm], numbers, caption)
    for line in lines:
        table.add_row(*line.values())
    return table


# ---------------------------------------------------------------- verdicts


def verdicts(results: Results) -> Iterator[str]:
    """One sentence for each agent of each team."""
    reference = results.reference
    for (team, agent), rows in results.by_agent().items():
        groups: dict[str, list[str]] = {}
        for row in rows:
            if row.arm != reference:
                groups.setdefault(_verdict(row, results), []).append(_named(row))
        parts = [
            f"{' and '.join(filter(None, (', '.join(arms[:-1]), arms[-1])))} "
            f"{'is' if len(arms) == 1 else 'are'} {text}"
            for text, arms in sorted(groups.items(), key=lambda group: _ORDER[group[0].split()[0]])
        ]
        yield f"{agent} ({team}), against {reference}: {'; '.join(parts) or 'no other arm yet'}."


_ORDER = {"better": 0, "worse": 1, "open:": 2, "not": 3}


def _verdict(row: Row, results: Results) -> str:
    found = row.difference
    if found is None:
        return f"not compared yet: no finished seed of {results.reference}"
    if found.verdict != "open":
        return f"{found.verdict} than {results.reference}"
    if not found.testable:
        return "open: one seed allows no verdict (the interval covers problems only)"
    if found.side == "open":
        return "open: the interval contains zero"
    return (
        "open: the interval excludes zero, but not after the correction for "
        f"{results.comparisons} comparisons"
    )


def _named(row: Row) -> str:
    if row.difference is None:
        return row.arm
    e = row.difference.interval
    return f"{row.arm} ({points_text(e)}, {plural(e.count, 'seed')})"


def _scores(results: Results) -> list[Line]:
    """Per arm: for how many agents it is better, open or worse."""
    found: dict[str, Counter[str]] = {}
    agents: dict[str, list[str]] = {}
    for row in results.rows:
        if row.difference:
            verdict = row.difference.verdict
            found.setdefault(row.arm, Counter())[verdict] += 1
            agents.setdefault(row.arm, []).append(f"{row.team}/{row.agent} {verdict}")
    return [
        {"arm": arm, "agents": ", ".join(agents[arm])}
        | {verdict: str(counts[verdict]) for verdict in ("better", "open", "worse")}
        for arm, counts in found.items()
    ]


# ---------------------------------------------------------------- lines of the tables


def _unit(results: Results) -> str:
    return "x 100" if results.partial else "in percent"


def _accuracy_line(results: Results, row: Row) -> Line:
    found = row.difference
    return {
        "team / agent": row.name,
        "arm": row.arm,
        "own rollouts": f"{row.rollouts:,.0f}" + (f" (x{row.factor:g})" if row.factor != 1 else ""),
        "updates": f"{row.updates:,.0f}",
        "training time": duration(row.seconds),
        "seeds": str(len(row.seeds)),
        "before": percent(row.before) + row.judged[0],
        "after": percent(row.after) + row.judged[1],
        f"minus {results.reference}": points_text(found.interval) if found else "",
        "seeds above/below": f"{found.above}/{found.below}" if found else "",
        "p (Holm)": f"{found.p:.2g} ({found.corrected:.2g})" if found and found.testable else "",
        "verdict": "reference" if row.arm == results.reference else found.verdict if found else "",
    }


def _curve_line(results: Results, row: Row) -> Line:
    target = results.targets.get((row.team, row.agent))
    return {
        "team / agent": row.name,
        "arm": row.arm,
        "mean of the curve": percent(row.area) if row.area else "",
        "target": f"{100 * target:.1f}" if target else "",
        "rollouts to target": _reach(row.rollouts_to_target, "{:,.0f}".format) if target else "",
        "time to target": _reach(row.seconds_to_target, duration) if target else "",
        f"{results.score} by own rollouts": ", ".join(
            f"{b.rollouts:,.0f}: {100 * b.mean:.1f}" for b in row.curve
        ),
    }


def _reach(reach: Reach, text: Callable[[float], str]) -> str:
    if reach.mean is None:
        return f"0 of {reach.seeds}"
    partial = f" ({reach.reached} of {reach.seeds})" if reach.reached < reach.seeds else ""
    return text(reach.mean) + partial


def _exchange_json(found: Exchange | None) -> dict[str, Any] | None:
    return asdict(found) | {"text": found.text, "parity": found.parity} if found else None


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


def _parity_counts(results: Results) -> list[str]:
    """Per arm: for how many agents f >= n is shown, open, refuted and not identifiable."""
    found: dict[str, Counter[str]] = {}
    for row in results.rows:
        if row.exchange:
            found.setdefault(row.arm, Counter())[row.exchange.parity] += 1
    return [
        f"{arm}: f >= n is "
        + ", ".join(f"{verdict} for {counts[verdict]}" for verdict in get_args(Parity))
        + f" of {plural(counts.total(), 'agent')}."
        for arm, counts in found.items()
    ]


def _diagnostics_lines(rows: Sequence[Row]) -> list[Line]:
    names = {
        "peers/used": "used",
        "peers/below_floor": "below floor",
        "peers/above_one": "above 1",
        "peers/effective_fraction": "effective",
        "own/clipped": "clipped",
        "own/advantage_zero": "A = 0",
        "grad_norm": "norm",
        "reply_tokens": "reply tokens",
    }
    custom = sorted({k for row in rows for k in row.diagnostics if k.startswith("diagnostics/")})
    names |= {key: key.removeprefix("diagnostics/") for key in custom}
    lines = []
    for row in rows:
        found = row.diagnostics
        sources = [key.removeprefix("ratio/") for key in found if key.startswith("ratio/")]
        ratios = (
            f"{s} {found[f'ratio/{s}']:.3f} (w {found.get(f'weight/{s}', 1.0):.2f})"
            for s in sources
        )
        line = {"team / agent": row.name, "arm": row.arm, "ratio by source": ", ".join(ratios)}
        values = {name: f"{found[k]:.3f}" if k in found else "" for k, name in names.items()}
        lines.append(line | values)
    return lines


def _baseline_line(row: Row, found: TheoryChecks) -> Line:
    return {
        "team / agent": row.name,
        "arm": row.arm,
        "checks": f"{found.checks:g}",
        "rollouts": f"{found.rollouts:,.0f}",
        "time": duration(found.seconds),
        **{f"bias: {b}": _fine_points(found.figures.get(f"bias/{b}")) for b in BASELINES},
        **{f"noise: {b}": _root(found.figures.get(f"variance/{b}")) for b in BASELINES},
        **{f"off: {b}": _root(found.figures.get(f"spread_squared/{b}")) for b in BASELINES},
    }


def _source_line(row: Row, found: TheoryChecks, source: str) -> Line:
    def number(key: str) -> str:
        e = found.figures.get(f"{key}/{source}")
        return f"{e.mean:.3g}" if e else ""

    def fraction(key: str) -> str:
        value = row.diagnostics.get(f"peers/{key}/{source}")
        return "" if value is None else f"{value:.0%}"

    own = source == row.agent
    return {
        "team / agent": row.name,
        "arm": row.arm,
        "source": f"{source} (own)" if own else source,
        "cosine": number("cosine"),
        "gradient": number("gradient_norm"),
        "update": number("update_norm"),
        "used": fraction("used"),
        "effective": fraction("effective"),
        "gain per step": _fine_points(found.figures.get(f"gain/{source}")),
    }


def _fine_points(e: Estimate | None) -> str:
    """E.g. +1.25 [+0.40, +2.10]; without the interval for one seed."""
    if e is None:
        return ""
    interval = f" [{100 * e.low:+.2f}, {100 * e.high:+.2f}]" if isfinite(e.low) else ""
    return f"{100 * e.mean:+.2f}{interval}"


def _root(e: Estimate | None) -> str:
    """Root of a mean square in points; an estimate below zero counts as zero."""
    return "" if e is None else f"{100 * sqrt(max(0.0, e.mean)):.1f}"


def _links(results: Results, up: str) -> dict[str, list[tuple[str, str]]]:
    """TEAM / ARM -> (text, relative path) of its runs."""
    return {
        f"{row.team} / {row.arm}": [
            (f"seed {seed}", f"{up}runs/{row.team}/{row.arm}/seed-{seed}") for seed in row.seeds
        ]
        for row in results.rows
    }
