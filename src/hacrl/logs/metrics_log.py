"""Writes metrics to disk, to the loggers and to the screen, in the order of the team.

Agents that run in parallel report in any order. A row waits until the rows before it are written,
so that equal runs have equal files. Only a straggler's rows are written out of order.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from hacrl.config import Config
from hacrl.errors import first_line
from hacrl.logs.loggers import Logger, open_loggers, some_replies
from hacrl.logs.observer import Observer
from hacrl.store.rundir import RunDirectory

Row = Mapping[str, Any]


class Watch(Protocol):
    """Looks at metrics rows as they are written and returns warnings."""

    def look(self, rows: Sequence[Row]) -> list[str]: ...


class MetricsLog:
    """Example: log.expect("train", 0, ["wren"]); log.add("train", 0, "wren", {"reward": 0.4})"""

    def __init__(
        self,
        run: RunDirectory,
        observer: Observer,
        watches: Sequence[Callable[[RunDirectory], Watch]] = (),
    ) -> None:
        self.run, self.observer, self._make_watches = run, observer, watches
        self.loggers: list[Logger] = []
        self.watches: list[Watch] = []
        self._table_rows = 0
        self._pages: dict[tuple[str, int], dict[str, Row | None]] = {}
        """(kind, step) -> agent -> its row, None while it is missing; all in writing order."""
        self._known: set[tuple[str, int, str]] = set()

    def open(self, config: Config) -> None:
        """Open the loggers and read which rows a resumed run has already."""
        self.loggers, self._table_rows = open_loggers(self.run, config), config.log.table_rows
        self.watches = [make(self.run) for make in self._make_watches]
        self._known = {(row["kind"], row["step"], row["agent"]) for row in self.run.metric_rows()}

    def close(self) -> None:
        for logger in [*self.loggers]:
            self._try(logger, logger.close)

    def expect(self, kind: str, step: int, names: Iterable[str]) -> None:
        """Announce the next rows. Rows that a resumed run has already are not expected again."""
        if missing := [name for name in names if not self.has(kind, step, name)]:
            self._pages[kind, step] = dict.fromkeys(missing)

    def add(self, kind: str, step: int, name: str, row: Row) -> None:
        """Take an agent's row. A second row of the same kind, step and agent is ignored."""
        if self.has(kind, step, name):
            return
        self._known.add((kind, step, name))
        full = {"kind": kind, "step": step, "agent": name, **row}
        page = self._pages.get((kind, step), {})
        if name not in page:
            return self._write([full])
        page[name] = full
        self._write_complete_pages()

    def has(self, kind: str, step: int, name: str) -> bool:
        return (kind, step, name) in self._known

    def release(self, names: Collection[str]) -> None:
        """Stop waiting for these agents. Their rows are written when they arrive."""
        for key, page in self._pages.items():
            self._pages[key] = {n: row for n, row in page.items() if row or n not in names}
        self._write_complete_pages()

    def _write_complete_pages(self) -> None:
        while self._pages:
            (kind, step), page = next(iter(self._pages.items()))
            rows = [row for row in page.values() if row]
            if len(rows) < len(page):
                return
            del self._pages[kind, step]
            if rows:
                self._write(rows)
                show = self.observer.evaluated if kind == "evaluation" else self.observer.stepped
                show(step, rows)

    def _write(self, rows: Sequence[Row]) -> None:
        self.run.add_metrics(rows)
        for row in rows if self.loggers else ():
            replies = some_replies(self.run, row, self._table_rows)
            for logger in [*self.loggers]:
                self._try(logger, partial(logger.log, row, replies))
        for watch in self.watches:
            for warning in watch.look(rows):
                self.observer.note(warning)

    def _try(self, logger: Logger, work: Callable[[], None]) -> None:
        """Switch off a logger that fails: it must not end a run. metrics.jsonl has every row."""
        try:
            work()
        except Exception as error:  # a full disk, a lost connection, an error of the package
            self.loggers.remove(logger)
            self.observer.note(
                f"log.{logger.name} failed and is off until the run is resumed ({first_line(error)}). "
                "Training continues; metrics.jsonl has every row."
            )
