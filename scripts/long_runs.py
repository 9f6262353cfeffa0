"""How many own rollouts an agent needs alone and with peers, from the kept runs of a suite.

    python scripts/long_runs.py              # the tables of docs/results/long.md, and its figure
    python scripts/long_runs.py real-pair    # the table of docs/results/real-pair.md, and its figure
    python scripts/long_runs.py long --against gspo-64x4

Both draw docs/images/exchange.svg, too.

A cell has the own rollouts at which held-out accuracy first reaches a target, and how many times as many
the agent needs alone (arm gspo): 1.2 means that the team saves a sixth. The last table has own rollouts
as a fraction of those of another arm, by default double rollouts. Means are geometric, over the seeds
that reach the target in both arms; at most one seed of each arm may miss it. Intervals are Student's t
over seeds.
"""

import argparse
import json
from collections import defaultdict
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

from hacrl.statistics import Estimate, t_interval
from hacrl.study.compare.exchange import isotonic

DOCS = Path(__file__).resolve().parents[1] / "docs"
TARGETS = {"long": (60, 70, 75, 80, 85), "real-pair": (25, 30, 35, 40, 45)}
PAIR = {"long": "two", "real-pair": "team"}
"""The team of the figure."""
SHOWN = {
    "wren": ("long", "two", 75),
    "finch": ("long", "two", 75),
    "SmolLM2": ("real-pair", "team", 40),
    "Gemma": ("real-pair", "team", 35),
    "wren ": ("long", "three", 75),
    "finch ": ("long", "three", 75),
    "heron": ("long", "three", 75),
}
"""Exchange rates in docs/images/exchange.svg: agent -> suite, team and target in percent."""
LINES = {
    "gspo": ("black", "-"),
    "gspo-half": ("black", ":"),
    "gspo_x2": ("grey", "--"),
    "hacpo": ("C3", "-"),
    "naive": ("C0", "-"),
    "overlap": ("C2", "-"),
    "overlap-64x4": ("C2", "--"),
}

Curve = list[dict[str, Any]]  # evaluations with own rollouts and accuracy


def read_curves(suite: str) -> dict[tuple[str, str, str], dict[str, Curve]]:
    """Learning curves: (agent, team, arm) -> seed -> curve."""
    found: dict[tuple[str, str, str], dict[str, Curve]] = defaultdict(dict)
    for line in (DOCS / "results" / f"{suite}.jsonl").read_text().splitlines():
        if "run" in (kept := json.loads(line)):
            team, arm, seed = kept["run"].split("/")
            for agent, run in kept["agents"].items():
                found[agent, team, arm][seed] = run["curve"]
    return found


def first(curve: Curve, target: float) -> float | None:
    """Own rollouts at which the isotonic fit of a learning curve first reaches the target.

    Example: first([{"rollouts": 0, "accuracy": 0.2}, {"rollouts": 256, "accuracy": 0.6}], 0.4) == 128
    """
    [heights] = isotonic([[point["accuracy"] for point in curve]])
    points = [(p["rollouts"], h) for p, h in zip(curve, heights, strict=True)]
    for (n0, h0), (n1, h1) in pairwise(points):
        if h0 < target <= h1:
            return n0 + (n1 - n0) * (target - h0) / (h1 - h0)
    return None


def reached(runs: dict[str, Curve], target: float) -> dict[str, float]:
    """Own rollouts at the target, of the seeds that reach it."""
    return {seed: n for seed, curve in runs.items() if (n := first(curve, target))}


def too_few(found: dict[str, float], runs: dict[str, Curve]) -> bool:
    """Whether more than one seed misses the target, or fewer than two reach it."""
    return len(found) < max(2, len(runs) - 1)


def exchange_rate(
    runs: dict[str, Curve], alone: dict[str, Curve], target: float
) -> Estimate | None:
    """How many times as many own rollouts the agent needs alone; None if too few seeds reach the
    target."""
    mine, theirs = reached(runs, target), reached(alone, target)
    if too_few(mine, runs) or too_few(theirs, alone):
        return None
    both = [log(theirs[seed] / n) for seed, n in mine.items() if seed in theirs]
    if len(both) < 2:
        return None
    e = t_interval(both)
    return Estimate(exp(e.mean), exp(e.low), exp(e.high), e.count)


def cell(runs: dict[str, Curve], alone: dict[str, Curve], target: float) -> str:
    """Own rollouts, and the factor to learning alone. One seed may miss the target."""
    mine = reached(runs, target)
    if too_few(mine, runs):
        return f"{len(mine)} of {len(runs)} seeds" if runs else ""
    text = f"{exp(fmean(map(log, mine.values()))):,.0f}"
    if runs is not alone and (f := exchange_rate(runs, alone, target)):
        text += f", {f.mean:.2f} [{f.low:.2f}, {f.high:.2f}]"
    return text


def label(team: str, arm: str) -> str:
    """An arm as a row is called: the team is named where it is not the pair."""
    return arm + {"three": " in three", "useless": " beside a useless partner"}.get(team, "")


def table(found: dict[tuple[str, str, str], dict[str, Curve]], targets: tuple[int, ...]) -> str:
    """Own rollouts until each target, and the factor to learning alone, by agent and arm."""
    lines = []
    for name in dict.fromkeys(agent for agent, *_ in found):
        arms = {(team, arm): runs for (agent, team, arm), runs in found.items() if agent == name}
        alone = next((runs for (_, arm), runs in arms.items() if arm == "gspo"), None)
        if alone is None:  # only a partner
            continue
        lines += ["", f"| {name}, percent | {' | '.join(map(str, targets))} |"]
        lines.append("|---" * (1 + len(targets)) + "|")
        for place, runs in arms.items():
            cells = [cell(runs, alone, target / 100) for target in targets]
            lines.append(f"| {label(*place)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def against(
    reference: str, found: dict[tuple[str, str, str], dict[str, Curve]], targets: tuple[int, ...]
) -> str:
    """Own rollouts until a target as a fraction of those of another arm, of the same team if there."""
    lines = [
        "",
        f"| agent, arm; fraction of {reference} | {' | '.join(map(str, targets))} |",
        "|---" * (1 + len(targets)) + "|",
    ]
    for (name, team, arm), runs in found.items():
        others = {t: r for (n, t, a), r in found.items() if (n, a) == (name, reference)}
        other = others.get(team) or next(iter(others.values()), None)
        if other is None or other is runs:
            continue
        cells = []
        for target in targets:
            f = exchange_rate(other, runs, target / 100)
            cells.append(f"{f.mean:.2f} [{f.low:.2f}, {f.high:.2f}]" if f else "")
        lines.append(f"| {name}, {label(team, arm)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: dict[tuple[str, str, str], dict[str, Curve]], suite: str) -> None:
    """Learning curves of a pair over own rollouts, means over seeds."""
    names = list(dict.fromkeys(name for name, team, _ in found if team == PAIR[suite]))
    figure, axes = plt.subplots(1, len(names), figsize=(9, 3.4))
    for axis, agent in zip(axes, names, strict=True):
        end = 0.0
        for arm, (colour, style) in LINES.items():
            curves = list(found.get((agent, PAIR[suite], arm), {}).values())
            if not curves:
                continue
            points = zip(*curves, strict=True)  # the same evaluation of all seeds
            heights = [100 * fmean(p["accuracy"] for p in same) for same in points]
            rollouts = [p["rollouts"] for p in curves[0]]
            end = rollouts[-1] if arm == "gspo" else end
            axis.plot(rollouts, heights, style, color=colour, linewidth=1.2, label=arm)
        axis.set(title=agent, xlabel="own rollouts", xlim=(0, end))
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("held-out accuracy, percent")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncol=len(names), fontsize=8, frameon=False)
    _save(figure, suite)


def draw_exchange() -> None:
    """Exchange rates at equal accuracy, by agent and rule."""
    found = {suite: read_curves(suite) for suite in PAIR}
    stored = {"SmolLM2": "smollm2", "Gemma": "gemma3"}
    rules = ("hacpo", "naive", "overlap", "overlap-64x4")
    filled = {rule: "none" if rule == "overlap-64x4" else "full" for rule in rules}
    figure, axis = plt.subplots(figsize=(9, 2.2))
    for x, (label, (suite, team, target)) in enumerate(SHOWN.items()):
        agent = stored.get(label, label.strip())
        [alone] = [
            r for (name, _, arm), r in found[suite].items() if (name, arm) == (agent, "gspo")
        ]
        for i, rule in enumerate(rules):
            runs = found[suite].get((agent, team, rule), {})
            if runs and (f := exchange_rate(runs, alone, target / 100)):
                place, colour = x + 0.15 * (i - 1.5), LINES[rule][0]
                axis.plot([place, place], [f.low, f.high], color=colour, linewidth=1.2)
                axis.plot(place, f.mean, "o", color=colour, markersize=4, fillstyle=filled[rule])
        n = 3 if team == "three" else 2
        axis.plot([x - 0.4, x + 0.4], [n, n], "--", color="grey", linewidth=0.8)
    axis.axhline(1, color="grey", linewidth=0.8)
    names = [
        f"{label}\n{'three' if team == 'three' else 'pair'}, {target} %"
        for label, (_, team, target) in SHOWN.items()
    ]
    axis.set_xticks(range(len(names)), names)
    axis.set(ylabel="exchange rate f", ylim=(0.4, 4))
    axis.tick_params(labelsize=8)
    handles = [
        plt.Line2D([], [], color=LINES[r][0], marker="o", markersize=4, fillstyle=filled[r])
        for r in rules
    ]
    figure.legend(handles, rules, loc="lower center", ncol=4, fontsize=8, frameon=False)
    _save(figure, "exchange")


def _save(figure: Any, name: str) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "hacrl"
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(DOCS / "images" / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Own rollouts until an accuracy is reached.")
    parser.add_argument("suite", nargs="?", default="long", choices=TARGETS)
    parser.add_argument("--against", default="gspo_x2", help="arm of the last table")
    arguments = parser.parse_args()
    suite = arguments.suite
    curves = read_curves(suite)
    print(table(curves, TARGETS[suite]))
    print(against(arguments.against, curves, TARGETS[suite]))
    draw(curves, suite)
    draw_exchange()
