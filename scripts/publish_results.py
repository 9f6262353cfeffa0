"""Write the generated part of docs/results/NAME.md and the figures of docs/results.md.

    python scripts/publish_results.py page teams      # from docs/results/teams.jsonl
    python scripts/publish_results.py figures

`page` builds the report of a suite from its kept runs and puts its tables behind the line MARK; what
stands before it is written by hand. `figures` draws docs/images/forest.svg and exchange.svg.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

from hacrl.study.compare import compare
from hacrl.study.compare.results import Results

DOCS = Path(__file__).resolve().parents[1] / "docs"
MARK = "<!-- scripts/publish_results.py wrote the rest -->"
LEFT_OUT = ("Learning curves", "Runs")
COLOURS = {"hacpo": "C3", "naive": "C0", "overlap": "C2", "overlap-open": "C1", "hacpo-open": "C4"}
CELL = re.compile(r"([+-]\d+\.\d) \[([+-]\d+\.\d), ([+-]\d+\.\d)\]")


def report(name: str) -> tuple[str, Results]:
    """report.md and the results of a suite, from the kept runs."""
    suite = DOCS.parent / "configs" / "suites" / f"{name}.toml"
    with tempfile.TemporaryDirectory() as folder:
        kept = DOCS / "results" / f"{name}.jsonl"
        results = compare(suite, Path(folder), report_only=True, kept=kept)
        return (Path(folder) / "report.md").read_text(), results


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


def tuned() -> list[tuple[str, str, str, tuple[float, float, float]]]:
    """(agent, rule, reference, (mean, low, high)) of the tables of pocket-tuned.md."""
    found, header = [], []
    for line in (DOCS / "results" / "pocket-tuned.md").read_text().splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if cells[0] == "team / agent":
            header = cells
        elif header and len(cells) == len(header):
            for name, cell in zip(header, cells, strict=True):
                rule, _, against = name.partition(" − ")
                if rule in COLOURS and (match := CELL.search(cell)):
                    mean, low, high = map(float, match.groups())
                    found.append((cells[0], rule, against, (mean, low, high)))
    return found


def draw_forest() -> None:
    """Differences by agent and rule; the pretrained pair from three seeds on."""
    panels = {"gspo-half": "minus GSPO, equal rollouts", "gspo_x2": "minus GSPO, double rollouts"}
    rows = tuned()
    if (DOCS / "results" / "real-pair.jsonl").is_file():
        for row in report("real-pair")[1].rows:
            if row.arm in COLOURS and row.difference and len(row.seeds) > 2:
                e = row.difference.interval
                interval = (100 * e.mean, 100 * e.low, 100 * e.high)
                rows.append((f"pretrained / {row.agent}", row.arm, "gspo_x2", interval))
    agents = list(dict.fromkeys(agent for agent, *_ in rows))
    figure, axes = plt.subplots(1, 2, figsize=(9, 0.42 * len(agents) + 1), sharey=True)
    for axis, (against, title) in zip(axes, panels.items(), strict=True):
        for agent, rule, reference, (mean, low, high) in rows:
            if reference == against:
                y = -agents.index(agent) - 0.18 * (list(COLOURS).index(rule) - 1.5)
                axis.plot([low, high], [y, y], color=COLOURS[rule], linewidth=1.2)
                axis.plot(mean, y, "o", color=COLOURS[rule], markersize=3)
        axis.axvline(0, color="grey", linewidth=0.8)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("points of held-out accuracy, 95 % interval", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0].set_yticks([-i for i in range(len(agents))], agents)
    _legend(figure, {rule for _, rule, *_ in rows})
    _save(figure, "forest.svg")


def draw_exchange() -> None:
    figure, axis = plt.subplots(figsize=(6.5, 3.6))
    seen = set()
    drawn: Counter[tuple[float, str]] = Counter()
    for row in report("teams")[1].rows:
        found = row.exchange
        if found is None or found.flat or row.arm not in COLOURS:
            continue
        top = 1.1 * found.multiples[-1]  # where censored values are drawn
        f, low, high = (min(v, top) for v in (found.f, found.low, found.high))
        count = drawn[found.n, row.arm]  # agents of one rule stand side by side
        drawn[found.n, row.arm] += 1
        x = found.n + 0.2 * (list(COLOURS).index(row.arm) - 2) + 0.05 * count
        axis.plot([x, x], [low, high], color=COLOURS[row.arm], linewidth=1, alpha=0.6)
        axis.plot(x, f, "o", color=COLOURS[row.arm], markersize=4)
        seen.add(row.arm)
    axis.plot([1, 5], [1, 5], "--", color="grey", linewidth=0.8)
    axis.axhline(4, color="grey", linewidth=0.5)
    axis.set(xlabel="agents in the team, n", ylabel="exchange rate f", xlim=(0.8, 5.2))
    axis.set_xticks(range(1, 6))
    axis.set_title(
        "one line per agent; dashed: f = n; above 4 and below 1: only bounded", fontsize=8
    )
    _legend(figure, seen)
    _save(figure, "exchange.svg")


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
    else:
        draw_forest()
        if (DOCS / "results" / "teams.jsonl").is_file():
            draw_exchange()
