"""Tables for the terminal."""

from collections.abc import Iterable
from copy import copy
from datetime import timedelta
from itertools import takewhile
from math import isclose, isfinite

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import measure_renderables
from rich.table import Column, Table
from rich.text import Text

from hacrl.plain_console import PlainConsole
from hacrl.replies import judged_text, score_name
from hacrl.statistics import Estimate
from hacrl.study.inspect.summary import AgentSummary, RunSummary

NARROWEST = 120  # columns assumed where the output is no terminal (a file, a pipe)
NOTES = 10  # notes of a run that `hacrl show` prints
TEXT_WIDTH = 20  # a column of text keeps at least this width


def console() -> Console:
    """Standard output for tables."""
    made = PlainConsole()
    return made if made.is_terminal else PlainConsole(width=max(made.width, NARROWEST))


class PlainTable(Table):
    """A table without borders that never shortens numbers.

    The leading no_wrap columns name the row. Columns that do not fit the width go into a further block
    of rows below, which repeats the names. Right-aligned and no_wrap columns keep their full width, but
    long names are folded; the remaining width is divided between the other columns, which hold text.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        named = list(takewhile(_is_name, self.columns[:-1][:2])) or self.columns[:1]
        limit = max(1, options.max_width // 2 // len(named) - 1)

        def width(column: Column) -> int:
            cells = [console.render_str(str(cell)) for cell in (column.header, *column.cells)]
            natural = measure_renderables(console, options, cells).maximum
            most = limit if column in named else TEXT_WIDTH if _is_text(column) else natural
            return 1 + min(natural, most)

        blocks = [list(named)]
        for column in self.columns[len(named) :]:
            block = [*blocks[-1], column]
            if len(blocks[-1]) > len(named) and sum(map(width, block)) - 1 > options.max_width:
                blocks.append([*named, column])
            else:
                blocks[-1] = block
        if self.title:
            yield console.render_str(str(self.title), style="bold")
        for block in blocks:
            spare = options.max_width + 1 - sum(map(width, block))
            part = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True)
            part.columns, part.rows = [copy(column) for column in block], self.rows
            texts = sum(_is_text(column) and column not in named for column in block)
            for i, (column, source) in enumerate(zip(part.columns, block, strict=True)):
                column._index = i
                if source in named:
                    column.no_wrap, column.overflow, column.max_width = False, "fold", limit
                elif _is_text(column):
                    column.max_width = max(1, width(source) - 1 + spare // texts)
                else:
                    column.no_wrap = True
            yield part
        if self.caption:
            yield console.render_str(str(self.caption), style="dim italic")


def _is_name(column: Column) -> bool:
    return column.justify == "left" and column.no_wrap and column.ratio is None


def _is_text(column: Column) -> bool:
    return column.justify == "left" and (column.ratio is not None or not column.no_wrap)


def plain_table(
    title: str, names: Iterable[str] = (), numbers: Iterable[str] = (), caption: str | None = None
) -> PlainTable:
    """A table without rows in the style of all tables, with columns of names and then of numbers."""
    table = PlainTable(title=title, caption=caption)
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def summary_table(summary: RunSummary) -> Table:
    """One row per agent: held-out accuracy before, after and at best; rewards; cost."""
    config = summary.config
    name, unit = score_name(config.verifier.kind)
    edge = max((agent.edge for agent in summary.agents), default=1)
    caption = [
        f"before, after, best: {name}{' in percent' if unit else ''}, with 95 % interval",
        "gain: after minus before, paired by problem",
        f"reward: mean of the first and last {'step' if edge == 1 else f'{edge} steps'}",
        "peers used: of peers' samples with an advantage other than 0, the fraction with a gradient "
        "after clipping",
        "time: sum of the agent's phases, from sampling to saving; loading is not counted",
    ]
    caption += [
        f"{a.name}: {a.too_long} of {a.prompts} prompts were left out, because they are longer than "
        f"max_prompt_tokens = {config.prompt_limit(config.agent(a.name))}"
        for a in summary.agents
        if a.too_long
    ]
    steps = f"step {summary.steps_done} of {config.steps}"
    title = f"{summary.path}: {config.algorithm.name}, {steps}, {summary.state}"
    columns = ["before", "after", "gain", "best (step)", "reward", "rollouts", "updates"]
    columns += ["peers used", "time"]
    table = plain_table(title, ["agent"], columns, "\n".join(caption))
    for agent in summary.agents:
        table.add_row(*_agent_row(agent))
    return table


def _agent_row(agent: AgentSummary) -> list[str]:
    best, edges = agent.best, agent.reward_edges
    return [
        agent.name if agent.learns else f"{agent.name} (frozen)",
        *(
            percent(s.accuracy) + judged_text(*s.judged) if s else "-"
            for s in (agent.before, agent.after)
        ),
        points_text(agent.gain),
        f"{100 * best.accuracy.mean:.1f} ({best.step}){judged_text(*best.judged)}" if best else "-",
        f"{edges[0]:.2f}→{edges[1]:.2f}" if edges else "-",
        f"{agent.rollouts:,}",
        f"{agent.updates:,}",
        f"{agent.peers_used:.0%}" if agent.peers_used is not None else "-",
        duration(agent.seconds),
    ]


def notes_text(summary: RunSummary) -> Text:
    """The last notes of the run, one per line; empty without notes."""
    last, count = summary.notes[-NOTES:], len(summary.notes)
    if not last:
        return Text(end="")
    more = f" (the last {NOTES} of {count}; {summary.path}/notes.jsonl has all)"
    lines = [f"notes{more if count > NOTES else ''}:"]
    for step, text in last:
        clean = "".join(c if c.isprintable() else " " for c in text)
        lines.append(f"- {f'after step {step}' if step else 'at the start'}: {clean}")
    return Text("\n".join(lines))


def percent(e: Estimate) -> str:
    """e.g. 61.0±3.8, or 61.0 [55.0, 64.1] where the interval is not symmetric"""
    return f"{100 * e.mean:.1f}{_interval(e, '')}"


def points_text(e: Estimate | None) -> str:
    """A difference in percentage points, e.g. +12.3±4.2"""
    return "-" if e is None else f"{100 * e.mean:+.1f}{_interval(e, '+')}"


def _interval(e: Estimate, sign: str) -> str:
    if not isfinite(e.low):
        return ""  # one seed has no interval
    if e.method == "normal" and isclose(e.high - e.mean, e.mean - e.low, abs_tol=1e-9):
        return f"±{50 * (e.high - e.low):.1f}"
    return f" [{100 * e.low:{sign}.1f}, {100 * e.high:{sign}.1f}]"


def duration(seconds: float) -> str:
    """e.g. 8.3 s, 2:05, 1:02:05"""
    return (
        f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds))).lstrip("0:")
    )
