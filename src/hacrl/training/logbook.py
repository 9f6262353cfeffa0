"""Who has reported what: the metrics of all members, written in the order of a run in one process.

Members that run side by side report in any order. A row waits until those before it are written, so
that equal runs have equal files; only a member that the others did not wait for comes out of turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hacrl.store.rundir import RunDirectory
from hacrl.study.diagnostics.harm import HarmWatch
from hacrl.study.diagnostics.unused import UnusedWatch
from hacrl.training.loggers import Logger
from hacrl.training.observer import Observer

Row = Mapping[str, Any]


@dataclass
class _Page:
    """Rows of one kind and step, on their way to the file."""

    names: tuple[str, ...]
    """Whose rows it waits for, in the order in which they are written."""
    rows: dict[str, Row] = field(default_factory=dict)


class Logbook:
    """Example: book.expect("train", 0, ["wren"]); book.add("train", 0, "wren", {"reward": 0.4})"""

    def __init__(self, run: RunDirectory, observer: Observer, loggers: Sequence[Logger]) -> None:
        self.run, self.observer, self.loggers = run, observer, loggers
        self._pages: dict[tuple[str, int], _Page] = {}
        self._known = {(row["kind"], row["step"], row["agent"]) for row in run.metrics()}
        self._idle: set[str] = set()
        """Learners of which it was told that a step brought them no update."""
        self._watches = (HarmWatch(run), UnusedWatch(run))

    def expect(self, kind: str, step: int, names: Iterable[str]) -> None:
        """Open the next page. One that a resumed run has written already stays as it is."""
        missing = tuple(n for n in names if (kind, step, n) not in self._known)
        if missing:
            self._pages[kind, step] = _Page(missing)

    def add(self, kind: str, step: int, name: str, row: Row) -> None:
        """Take a member's row; one that is here already, of before the member was lost, stays."""
        if self.has(kind, step, name):
            return
        self._known.add((kind, step, name))
        full = {"kind": kind, "step": step, "agent": name, **row}
        page = self._pages.get((kind, step))
        if page is None or name not in page.names:
            return self._write([full])
        page.rows[name] = full
        self._write_whole_pages()

    def has(self, kind: str, step: int, name: str) -> bool:
        return (kind, step, name) in self._known

    def release(self, names: Iterable[str]) -> None:
        """Wait for these no more: should they report, it is written then."""
        gone = set(names)
        for page in self._pages.values():
            page.names = tuple(n for n in page.names if n not in gone or n in page.rows)
        self._write_whole_pages()

    def _write_whole_pages(self) -> None:
        while self._pages:
            (kind, step), page = next(iter(self._pages.items()))
            if len(page.rows) < len(page.names):
                return
            del self._pages[kind, step]
            rows = [page.rows[name] for name in page.names]
            if not rows:
                continue
            self._write(rows)
            if kind == "evaluation":
                self.observer.evaluated(step, rows)
                continue
            self.observer.stepped(step, rows)
            for row in rows:
                self._tell_if_idle(row)

    def _write(self, rows: Sequence[Row]) -> None:
        self.run.add_metrics(rows)
        for logger in self.loggers:
            for row in rows:
                logger.log(row)
        for watch in self._watches:
            for sentence in watch.look(rows):
                self.observer.note(sentence)

    def _tell_if_idle(self, row: Row) -> None:
        """Once for each learner: a step in which it could learn nothing."""
        if row.get("updates") == 0 and row["agent"] not in self._idle and not row.get("absent"):
            self._idle.add(row["agent"])
            unjudged = row["verdict/timeout"] + row["verdict/error"]
            self.observer.note(
                f"step {row['step']}: agent {row['agent']!r} made no update: {row['rollouts']} "
                f"rollouts, {unjudged} of them not judged, {row['not_attempted']} problems not "
                f"attempted, {row['updates_skipped']} updates skipped as not finite."
            )
