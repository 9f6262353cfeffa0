"""What the report says, block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite

from hacrl.logs.warnings import NEARLY_NONE
from hacrl.statistics import LEVEL, Estimate
from hacrl.study.compare.blocks import Block, Chart, Grid, Heading, Listing, Paragraph
from hacrl.study.compare.budget import RULES
from hacrl.study.compare.results import Difference, Reach, Results, Row
from hacrl.study.compare.theory_blocks import theory_blocks
from hacrl.study.tables import duration


def contents(results: Results) -> Iterator[Block]:
    yield Heading("Verdicts")
    yield Paragraph(_rule_of_the_verdict(results))
    yield Listing(tuple(verdicts(results)))
    yield _score_sheet(results)
    yield Heading("Held-out accuracy")
    yield Paragraph(_budget_text(results))
    yield _main_grid(results)
    yield Paragraph(_intervals_text(results))
    yield Heading("Learning curves")
    yield from _charts(results)
    yield _curve_grid(results)
    yield Heading("Diagnostics")
    yield Paragraph(
        "Means over steps and seeds, from metrics.jsonl. used: share of peers' samples with a "
        "gradient; effective: (sum w)^2 / sum w^2 of their weights over their number; ratio: mean s "
        "of a source's samples under the learner; clipped: share of own samples without a gradient; "
        "A = 0: share of own samples without a signal; norm: of the gradient before it is scaled."
    )
    yield _diagnostics_grid(results)
    if empty := tuple(_nearly_unshared(results)):
        yield Listing(empty)
    yield from theory_blocks(results)
    yield Heading("How it was made")
    yield Listing(tuple(_facts(results)))
    yield Heading("Files")
    yield Paragraph(
        "Accuracies are counted from replies.jsonl in these folders, beside result.json; everything "
        "else from metrics.jsonl and times.jsonl of the same cells; all figures: results.json."
    )
    yield Listing(tuple(f"{r.team} {r.agent} {r.arm}: {', '.join(r.files)}" for r in results.rows))


# ---------------------------------------------------------------- verdicts


def verdicts(results: Results) -> Iterator[str]:
    """One sentence for each agent of each team."""
    reference = results.loaded.suite.reference
    for team, agent in dict.fromkeys((r.team, r.agent) for r in results.rows):
        rows = [r for r in results.rows if (r.team, r.agent) == (team, agent)]
        parts = []
        for verdict in ("better", "worse"):
            if named := [
                _named(r) for r in rows if r.difference and r.difference.verdict == verdict
            ]:
                parts.append(f"{_and(named)} {_is(named)} {verdict} than {reference}")
        undecided = [(r, r.difference) for r in rows if r.difference]
        undecided = [(r, d) for r, d in undecided if d.verdict == "open"]
        if named := [_named(r) for r, d in undecided if d.testable and d.side != "open"]:
            parts.append(
                f"{_and(named)} {_is(named)} open: an interval without zero, but not after the "
                f"correction for {results.comparisons} comparisons"
            )
        if named := [_named(r) for r, d in undecided if d.testable and d.side == "open"]:
            parts.append(f"{_and(named)} {_is(named)} open: the interval contains zero")
        if named := [_named(r) for r, d in undecided if not d.testable]:
            parts.append(f"{_and(named)} {_is(named)} open: one seed has no interval")
        if absent := [r.arm for r in rows if r.difference is None and r.arm != reference]:
            parts.append(f"{_and(absent)} cannot be compared yet: no finished seed of {reference}")
        yield f"{agent} ({team}), against {reference}: {'; '.join(parts) or 'no other arm yet'}."


def _named(row: Row) -> str:
    assert row.difference is not None
    e = row.difference.interval
    return f"{row.arm} ({points(e)}, {_seeds(e.count)})"


def _score_sheet(results: Results) -> Grid:
    """Wins, ties and losses of every arm over the agents."""
    counts: dict[str, Counter[str]] = {}
    agents: dict[str, list[str]] = {}
    for row in results.rows:
        if row.difference:
            counts.setdefault(row.arm, Counter())[row.difference.verdict] += 1
            mark = {"better": "+", "worse": "−", "open": "="}[row.difference.verdict]
            agents.setdefault(row.arm, []).append(f"{row.team}/{row.agent} {mark}")
    lines = tuple(
        (arm, ", ".join(agents[arm]), str(c["better"]), str(c["open"]), str(c["worse"]))
        for arm, c in counts.items()
    )
    return Grid(("arm", "agents: + win, = tie, − loss", "wins", "ties", "losses"), lines)


def _rule_of_the_verdict(results: Results) -> str:
    return (
        f"Better or worse only if the 95 % interval of the paired difference excludes zero and p stays "
        f"at or below {LEVEL} after Holm's correction for all {results.comparisons} comparisons of "
        "this suite. Everything else is open (a tie), whichever way the mean lies."
        + _other(results)
    )


def _other(results: Results) -> str:
    """Of a report whose reference is not the suite's: it is one look more."""
    if not results.loaded.instead_of:
        return ""
    return (
        f" The suite's own reference is {results.loaded.instead_of}; who reads both reports has made "
        "more comparisons than either of them corrects for."
    )


# ---------------------------------------------------------------- tables


def _budget_text(results: Results) -> str:
    suite = results.loaded.suite
    return (
        f"Budget rule: {suite.budget}. {RULES[suite.budget].capitalize()}. {results.problems} problems "
        f"that are never trained on x {results.replies} replies, percent, mean over seeds."
    )


def _main_grid(results: Results) -> Grid:
    rows = []
    for row in results.rows:
        d = row.difference
        rows.append(
            (
                f"{row.team} / {row.agent}",
                row.arm,
                f"{row.rollouts:,.0f}" + (f" (x{row.factor:g})" if row.factor != 1 else ""),
                f"{row.updates:,.0f}",
                duration(row.seconds),
                str(len(row.seeds)),
                percent(row.before),
                percent(row.after),
                points(d.interval) if d else "",
                f"{d.above}/{d.below}" if d else "",
                _chances(d) if d else "",
                d.verdict if d else "reference" if row.arm == _reference(results) else "",
            )
        )
    columns = (
        "team / agent",
        "arm",
        "own rollouts",
        "updates",
        "training time",
        "seeds",
        "before",
        "after",
        f"minus {_reference(results)}",
        "seeds +/−",
        "p (Holm)",
        "verdict",
    )
    return Grid(columns, tuple(rows))


def _intervals_text(results: Results) -> str:
    return (
        "before and after: mean with its 95 % interval over seeds (t distribution). The difference is "
        "paired by seed and problem; its interval holds both the one over seeds (t) and the one of a "
        "bootstrap that draws seeds and problems again. p: t test over seeds. seeds +/−: in how many "
        "seeds the arm was above and below. training time: seconds of all agents of the team, side by "
        "side with other cells, without evaluation."
    )


def _charts(results: Results) -> Iterator[Chart]:
    for team, agent in dict.fromkeys((r.team, r.agent) for r in results.rows):
        rows = [r for r in results.rows if (r.team, r.agent) == (team, agent)]
        yield Chart(f"{team} / {agent}", tuple((r.arm, r.curve) for r in rows))


def _curve_grid(results: Results) -> Grid:
    columns = (
        "team / agent",
        "arm",
        "mean on the way",
        "target",
        "rollouts to target",
        "time to target",
        "accuracy by own rollouts",
    )
    rows = []
    for row in results.rows:
        target = results.targets.get((row.team, row.agent))
        curve = ", ".join(f"{b.rollouts:,.0f}: {100 * b.mean:.1f}" for b in row.curve)
        rows.append(
            (
                f"{row.team} / {row.agent}",
                row.arm,
                percent(row.area) if row.area else "",
                f"{100 * target:.1f}" if target else "",
                _reached(row.rollouts_to_target, "{:,.0f}".format) if target else "",
                _reached(row.seconds_to_target, duration) if target else "",
                curve,
            )
        )
    return Grid(columns, tuple(rows))


def _diagnostics_grid(results: Results) -> Grid:
    names = {
        "peers/used": "used",
        "peers/below_floor": "below floor",
        "peers/above_one": "above 1",
        "peers/effective_share": "effective",
        "own/clipped": "clipped",
        "own/advantage_zero": "A = 0",
        "grad_norm": "norm",
    }
    more = sorted({key for row in results.rows for key in row.diagnostics})
    extra = [key for key in more if key.startswith("diagnostics/")]
    rows = []
    for row in results.rows:
        found = row.diagnostics
        sources = [key.removeprefix("ratio/") for key in found if key.startswith("ratio/")]
        ratios = ", ".join(
            f"{s} {found[f'ratio/{s}']:.3f} (w {found.get(f'weight/{s}', 1.0):.2f})"
            for s in sources
        )
        figures = [f"{found[key]:.3f}" if key in found else "" for key in (*names, *extra)]
        rows.append((f"{row.team} / {row.agent}", row.arm, ratios, *figures))
    labels = (*names.values(), *(key.removeprefix("diagnostics/") for key in extra))
    return Grid(
        ("team / agent", "arm", "ratio s by source (weight)", *labels), tuple(rows), words=3
    )


def _nearly_unshared(results: Results) -> Iterator[str]:
    """Where an arm's sharing cannot be what it gained by."""
    for row in results.rows:
        used = row.diagnostics.get("peers/used")
        if used is not None and used < NEARLY_NONE:
            yield (
                f"{row.agent} ({row.team}) under {row.arm} used {100 * used:.1f} % of its peers' "
                f"samples: what its {row.updates:.0f} updates gained, sharing did not. AdamW moves on "
                "by its momentum in an update without gradients; compare with an arm of as many."
            )


# ---------------------------------------------------------------- how it was made


def _facts(results: Results) -> Iterator[str]:
    suite = results.loaded.suite
    changed = "".join(f" {change}" for change in results.changes)
    against = f" --against {suite.reference}" if results.loaded.instead_of else ""
    yield f"hacrl compare {results.loaded.path}{changed}{against}"
    yield (
        f"seeds {', '.join(map(str, suite.seeds))}; the same seed is the same problems, start "
        + (
            "weights and noise in every arm (largest difference between two arms before training: "
            f"{100 * results.start_gap:.2f} points)"
        )
    )
    yield "; ".join(f"{key} {value}" for key, value in results.environment.items() if value)
    if suite.chosen_on:
        yield f"settings were chosen on other seeds: {', '.join(map(str, suite.chosen_on))}"
    for arm in suite.arms:
        yield f"arm {arm.name}: {' '.join(arm.overrides) or 'the base as it is'}"
    if results.missing:
        yield f"not finished, and not counted: {', '.join(results.missing)}"


# ---------------------------------------------------------------- figures as text


def percent(e: Estimate) -> str:
    """61.0 [57.2, 64.8], or 61.0 alone where one seed has no interval"""
    return f"{100 * e.mean:.1f} {interval(e)}".strip()


def points(e: Estimate) -> str:
    return f"{100 * e.mean:+.1f} {interval(e, '+')}".strip()


def interval(e: Estimate, sign: str = "") -> str:
    if not isfinite(e.low):
        return ""
    return f"[{100 * e.low:{sign}.1f}, {100 * e.high:{sign}.1f}]"


def _chances(d: Difference) -> str:
    return f"{d.p:.2g} ({d.corrected:.2g})" if d.testable else ""


def _reached(reach: Reach, text: object) -> str:
    assert callable(text)
    if reach.mean is None:
        return f"0 of {reach.seeds}"
    every = reach.reached == reach.seeds
    return text(reach.mean) + ("" if every else f" ({reach.reached} of {reach.seeds})")


def _reference(results: Results) -> str:
    return results.loaded.suite.reference


def _seeds(count: int) -> str:
    return f"{count} seeds" if count > 1 else "1 seed"


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
