"""Write the generated part of docs/results/NAME.md, and the forest plot of docs/results.md.

    python scripts/publish_results.py page teams      # from docs/results/teams.jsonl
    python scripts/publish_results.py figures
    python scripts/publish_results.py baselines ablations
    python scripts/publish_results.py cosines ablations
    python scripts/publish_results.py curves stability
    python scripts/publish_results.py stored
    python scripts/publish_results.py sizes
    python scripts/publish_results.py exchange equal-updates-three

`page` builds the report of a suite from its kept runs and puts its tables behind the line MARK; what
stands before it is written by hand. `figures` draws docs/images/forest.svg. The others print a table:

    baselines, cosines    the checks in docs/results/theory.md
    curves                accuracy at every evaluation
    stored                what live and stored peers add
    sizes                 what a fourth and a fifth agent add
    exchange              exchange rates of suites at equal updates beside those of teams.toml
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from math import sqrt
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

from hacrl.statistics import LEVEL, Estimate, holm, t_interval
from hacrl.study.compare import compare
from hacrl.study.compare.finished import FinishedRuns
from hacrl.study.compare.reading import AgentRun
from hacrl.study.compare.results import Difference, Results, difference
from hacrl.study.compare.suite import load_suite, make_runs

DOCS = Path(__file__).resolve().parents[1] / "docs"
MARK = "<!-- scripts/publish_results.py wrote the rest -->"
LEFT_OUT = ("Runs",)
KEPT_BY = {f"equal-updates{size}": ("teams", "equal-updates") for size in ("", "-three", "-four")}
"""The files of kept runs of a suite that uses runs of another one (default: its own file)."""
FEWEST_SEEDS = 3  # of an interval in the forest plot
COLOURS = {
    "hacpo": "C3",
    "naive": "C0",
    "overlap": "C2",
    "overlap-open": "C1",
    "hacpo-open": "C4",
    "open-level": "C5",
}


def report(name: str, against: str = "") -> tuple[str, Results]:
    """report.md and the results of a suite, from the kept runs; `against` is another reference arm."""
    suite = DOCS.parent / "configs" / "suites" / f"{name}.toml"
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kept.jsonl"
        files = [DOCS / "results" / f"{file}.jsonl" for file in KEPT_BY.get(name, (name,))]
        for file in (suite, *files):
            if not file.is_file():
                raise SystemExit(f"{name}: there is no file {file}")
        kept.write_text("".join(file.read_text() for file in files))
        results = compare(suite, Path(folder), report_only=True, kept=kept, against=against)
        text = (Path(folder) / "report.md").read_text()
        return text.replace(f" --out {folder} --kept {kept}", ""), results


def write_page(name: str) -> None:
    text, _ = report(name)
    _, *sections = re.split(r"^## ", text, flags=re.M)
    kept = [f"## {s.strip()}\n" for s in sections if not s.startswith(LEFT_OUT)]
    body = (
        "\n".join(kept)
        .replace(str(DOCS.parent) + "/", "")
        .replace("[results.json](results.json)", "")
    )
    page = DOCS / "results" / f"{name}.md"
    by_hand = page.read_text().partition(MARK)[0]
    page.write_text(f"{by_hand}{MARK}\n\n{body}")


def baselines(name: str) -> str:
    """Errors of the capability-aware baseline by step and arm, from kept runs with checks."""
    checks: dict[tuple[str, int, str], list[dict[str, float]]] = defaultdict(list)
    for line in (DOCS / "results" / f"{name}.jsonl").read_text().splitlines():
        kept = json.loads(line)
        for agent, run in kept.get("agents", {}).items():
            for check in run["checks"]:
                checks[agent, check["step"] + 1, kept["run"].split("/")[1]].append(check)
    lines = [
        "| learner | step | arm | seeds | bias on the mean"
        " | off on one problem | noise | both | both, own mean |",
        "|---" * 9 + "|",
    ]
    for key, rows in sorted(checks.items()):
        bias = t_interval([100 * row["diagnostics/bias/capability"] for row in rows])
        names = ("spread_squared/capability", "variance/capability", "square_error/capability")
        squares = [[row[f"diagnostics/{n}"] for row in rows] for n in (*names, "square_error/own")]
        cells = (*key, len(rows), _points(bias), *(_root(t_interval(s)) for s in squares))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def cosines(name: str) -> str:
    """Cosines of own and peers' gradients over seeds, and what noise leaves of 1, from kept runs."""
    lines = [
        "| team / learner | arm | seeds | source | cosine with own | two halves of own |",
        "|---|---|---|---|---|---|",
    ]
    for row in report(name)[1].rows:
        own = row.theory.get(f"cosine/{row.agent}")
        for key, found in row.theory.items():
            kind, _, source = key.partition("/")
            if kind != "cosine" or source == row.agent:
                continue
            cells = (
                row.name,
                row.arm,
                found.count,
                source,
                *map(_two, (found, own)),
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def curves(name: str) -> str:
    """Held-out accuracy at every evaluation: mean over seeds, lowest and highest seed."""
    rows = report(name)[1].rows
    steps = [band.step for band in rows[0].curve]
    lines = [
        f"| team / agent | arm | seeds | {' | '.join(f'step {step}' for step in steps)} |",
        "|---|---|---|" + "---|" * len(steps),
    ]
    for row in rows:
        bands = [f"{100 * b.mean:.1f} ({100 * b.low:.1f} to {100 * b.high:.1f})" for b in row.curve]
        lines.append(f"| {' | '.join((row.name, row.arm, str(len(row.seeds)), *bands))} |")
    return "\n".join(lines)


def stored() -> str:
    """What a live peer and a stored one add to GSPO alone, paired by seed."""
    rows = {(row.team, row.agent, row.arm): row for row in report("stored")[1].rows}
    lines = [
        "| learner | rule | seeds | live − GSPO | stored − GSPO | stored − live | stored / live |",
        "|---|---|---|---|---|---|---|",
    ]
    for (team, agent, arm), row in rows.items():
        if team == "live" or arm.startswith("gspo"):
            continue
        after = [
            dict(zip(r.seeds, r.accuracies, strict=True))
            for r in (row, rows["live", agent, arm], rows["live", agent, "gspo"])
        ]
        seeds = sorted(set.intersection(*map(set, after)))
        beside, live, alone = ([100 * by_seed[s] for s in seeds] for by_seed in after)
        pairs = ((live, alone), (beside, alone), (beside, live))
        differences = [t_interval([a - b for a, b in zip(*p, strict=True)]) for p in pairs]
        part = differences[1].mean / differences[0].mean
        cells = (agent, arm, len(seeds), *map(_points, differences), f"{part:.0%}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def sizes() -> str:
    """Agents in teams of four and five minus the same agents in the team of three, paired by seed and
    problem; bold: significant after Holm's correction for all comparisons of the table."""
    suite = load_suite(DOCS.parent / "configs" / "suites" / "teams.toml")
    found: dict[tuple[str, str, str], list[AgentRun]] = defaultdict(list)
    kept = FinishedRuns(DOCS / "results" / "teams.jsonl")
    for run in kept.with_results(make_runs(suite, Path("runs"))):
        for agent in run.stored or ():
            found[run.team, agent.agent, run.arm].append(agent)
    rules = ("naive", "overlap", "hacpo", "open-level")
    agents = sorted({agent for team, agent, _ in found if team == "three"})
    rows = [(team, agent) for team in ("four", "five") for agent in agents]
    pairs = [
        difference(found[team, agent, rule], found["three", agent, rule])
        for team, agent in rows
        for rule in rules
    ]
    cells = [_cell(pair, p) for pair, p in zip(pairs, holm([d.p for d in pairs]), strict=True)]
    lines = [f"| team / agent | {' | '.join(rules)} |", "|---" * 5 + "|"]
    for i, (team, agent) in enumerate(rows):
        lines.append(f"| {team} / {agent} | {' | '.join(cells[4 * i : 4 * i + 4])} |")
    return "\n".join(lines)


def exchange(*names: str) -> str:
    """Exchange rates and differences to double rollouts at equal updates, beside the rates at equal
    steps; counts; and the accuracies alone."""
    at_steps = {(r.team, r.agent, r.arm): r.exchange for r in report("teams")[1].rows}
    lines = [
        "| team / agent | rule | % | minus double rollouts"
        " | f at equal updates | f >= n | f at equal steps | f >= n |",
        "|---" * 8 + "|",
    ]
    counts: Counter[str] = Counter()
    alone: dict[tuple[str, str], list[str]] = defaultdict(list)
    rows = [(name, row) for name in names for row in report(name)[1].rows]
    rated = {(name, row.name) for name, row in rows if row.exchange}
    for name, row in rows:
        if row.arm.startswith("gspo") and (name, row.name) in rated:
            alone[name, row.name].append(f"{100 * row.after.mean:.1f}")
        if not row.exchange:
            continue
        rates = {"updates": row.exchange, "steps": at_steps[row.team, row.agent, row.arm]}
        minus = _cell(row.difference, row.difference.corrected)
        cells = [row.name, row.arm, f"{100 * row.after.mean:.1f}", minus]
        for equal, rate in rates.items():
            cells += [rate.text, rate.parity]
            counts[f"{row.team}, equal {equal}: f >= n {rate.parity}"] += 1
            counts[f"{row.team}, equal {equal}: f > 1 shown"] += rate.low >= 1 and not rate.flat
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {key} for {count}" for key, count in sorted(counts.items()))]
    lines += ["", "| team / agent alone | x1 | x2 | x4 |", "|---" * 4 + "|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for (_, name), cells in alone.items()]
    return "\n".join(lines)


def _cell(found: Difference, corrected: float) -> str:
    """A difference in points, bold if it is significant after a correction."""
    e = found.interval
    text = _points(Estimate(100 * e.mean, 100 * e.low, 100 * e.high, e.count))
    return f"**{text}**" if corrected <= LEVEL and found.side != "open" else text


def _two(e: Estimate | None) -> str:
    return f"{e.mean:.2f} [{e.low:.2f}, {e.high:.2f}]" if e else ""


def _root(e: Estimate) -> str:
    """Points from squares of rewards; a negative estimate of a square counts as 0."""
    mean, low, high = (100 * sqrt(max(v, 0)) for v in (e.mean, e.low, e.high))
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def _points(e: Estimate) -> str:
    return f"{e.mean:+.1f} [{e.low:+.1f}, {e.high:+.1f}]"


def draw_forest() -> None:
    """Differences by agent and rule: tiny models, and the pretrained pair."""
    panels = {"gspo": "minus GSPO, equal rollouts", "gspo_x2": "minus GSPO, double rollouts"}
    shown = [  # tiny models are compared with equally many updates at equal rollouts
        ("pocket-tuned", "gspo-half", "gspo"),
        ("pocket-tuned", "gspo_x2", "gspo_x2"),
        ("real-pair", "gspo", "gspo"),
        ("real-pair", "gspo_x2", "gspo_x2"),
    ]
    rows = []
    for suite, against, panel in shown:
        for row in report(suite, against)[1].rows:
            if row.arm in COLOURS and row.difference:
                if len(row.seeds) < FEWEST_SEEDS:
                    raise SystemExit(
                        f"{suite}, {row.name}, {row.arm}: {len(row.seeds)} seeds are kept"
                    )
                e = row.difference.interval
                label = f"pretrained / {row.agent}" if suite == "real-pair" else row.name
                rows.append((label, row.arm, panel, (100 * e.mean, 100 * e.low, 100 * e.high)))
    agents = list(dict.fromkeys(agent for agent, *_ in rows))
    rules = [rule for rule in COLOURS if rule in {rule for _, rule, *_ in rows}]
    apart = 0.6 / len(rules)
    figure, axes = plt.subplots(1, 2, figsize=(9, 0.17 * len(agents) + 1), sharey=True)
    for axis, (against, title) in zip(axes, panels.items(), strict=True):
        for agent, rule, reference, (mean, low, high) in rows:
            if reference == against:
                y = -agents.index(agent) - apart * (rules.index(rule) - (len(rules) - 1) / 2)
                axis.plot([low, high], [y, y], color=COLOURS[rule], linewidth=1.2)
                axis.plot(mean, y, "o", color=COLOURS[rule], markersize=3)
        axis.axvline(0, color="grey", linewidth=0.8)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("points of held-out accuracy, 95 % interval", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0].set_yticks([-i for i in range(len(agents))], agents)
    _legend(figure, set(rules))
    _save(figure, "forest.svg")


def _legend(figure: Any, rules: set[str]) -> None:
    shown = [rule for rule in COLOURS if rule in rules]
    handles = [plt.Line2D([], [], color=COLOURS[rule], marker="o", markersize=3) for rule in shown]
    figure.legend(handles, shown, loc="lower center", ncol=len(shown), fontsize=8, frameon=False)


def _save(figure: Any, name: str) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "hacrl"
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(DOCS / "images" / name, metadata={"Date": None})


if __name__ == "__main__":
    if sys.argv[1:2] == ["page"]:
        for given in sys.argv[2:]:
            write_page(given)
    elif sys.argv[1:2] in (
        [table.__name__] for table in (baselines, cosines, curves, stored, sizes, exchange)
    ):
        print(globals()[sys.argv[1]](*sys.argv[2:]))
    elif sys.argv[1:] == ["figures"]:
        draw_forest()
    else:
        raise SystemExit(__doc__)
