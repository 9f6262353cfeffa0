"""An SQLite index of all replies of a run, built in the background, newest steps first.

It holds what the filters need, the beginning of each text, and a full-text index. Whole texts,
advantages and weights stay in the run's files (replies.py). The file lies in the user's cache folder,
named by the run's path and its learners; where that is not writable the index is kept in memory. A step
whose files have changed since it was indexed is indexed again, so resumed and replaced runs need no
special handling.
"""

import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from hacrl.errors import UserError, describe, explain
from hacrl.store.files import steps_in
from hacrl.store.pool import Pool
from hacrl.store.rows import Row
from hacrl.view.live import LiveRun, stamp

VERSION = 3  # version of the tables; an index of another version is built anew
BEGINNING = 200  # characters of a text that the list shows
NONE, ZERO, CLIPPED, USED = "-", "0", "c", "u"
"""What a learner did with a reply: no sample; advantage 0; a sample without a gradient; used. `uses` has
a letter for each learner; it is empty if the samples of the step are not stored."""

_TABLES = f"""
CREATE TABLE steps (step INTEGER PRIMARY KEY, stamp TEXT, error TEXT);
CREATE TABLE replies (
  id INTEGER PRIMARY KEY, step INTEGER, problem TEXT, author TEXT, number INTEGER, reward REAL,
  status TEXT, finish TEXT, tokens INTEGER, uses TEXT, text TEXT);
CREATE INDEX by_step ON replies (step);
CREATE INDEX by_use ON replies (author, uses);
CREATE VIRTUAL TABLE texts USING fts5(text, content='');
PRAGMA user_version = {VERSION};
"""


class Index:
    """The index of one run. `start` begins a thread that completes it and then follows the run.

    Example: index = Index(run); index.start(); index.progress()
    """

    def __init__(self, run: LiveRun) -> None:
        self.run = run
        self.learners = [agent.name for agent in run.config().agents if agent.learns]
        self._writing = threading.RLock()
        self._place = _file(run.path, self.learners)
        self._memory = _open(self._place)
        self._total: int | None = None  # steps of the run, once they are counted
        self._failed = ""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to index in the background, once."""
        with self._writing:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="index")
                self._thread.start()

    def progress(self) -> dict[str, Any]:
        """Steps that are indexed, all steps, and the reason if one cannot be read."""
        with self.reading() as db:
            done, error = db.execute("SELECT count(*), max(error) FROM steps").fetchone()
        total = max(self._total or 0, done)
        complete = self._total is not None and done >= self._total
        failed = self._failed or error or ""
        return {"done": done, "total": total, "complete": complete, "error": failed}

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for queries."""
        if self._memory is not None:
            with self._writing:
                yield self._memory
        else:
            with closing(_connect(self._place)) as db:
                yield db

    def refresh(self) -> int:
        """Index every step that is new or has changed; return their number."""
        with self.reading() as db:
            known = dict(db.execute("SELECT step, stamp FROM steps"))
        stamps = {step: self._stamp(step) for step in steps_in(self.run.pool_path)}
        present = {step: found for step, found in stamps.items() if found}
        self._total = len(present)
        todo = sorted((s for s, found in present.items() if known.get(s) != found), reverse=True)
        if gone := known.keys() - present.keys():
            with self._changing() as db:
                for step in gone:
                    _forget(db, step)
        for first in range(0, len(todo), 8):
            with self._changing() as db:
                for step in todo[first : first + 8]:
                    self._add(db, step, present[step])
        return len(todo)

    def _work(self) -> None:
        while True:
            try:
                changed = self.refresh()
                self._failed = ""
            except (OSError, sqlite3.Error, UserError) as error:  # shown on the page; tried again
                changed, self._failed = 0, explain(error) or describe(error)
            time.sleep(1.0 if changed or self.run.running() else 5.0)

    def _stamp(self, step: int) -> str:
        """Changes with the files of a step; "" if it is not closed yet."""
        name = f"step-{step:06d}"
        snapshot = self.run.pool_path / name / "snapshot.json"
        samples = [self.run.samples_folder(a) / f"{name}.jsonl" for a in self.learners]
        return str([stamp(path) for path in (snapshot, *samples)]) if snapshot.exists() else ""

    def _add(self, db: sqlite3.Connection, step: int, found: str) -> None:
        known = db.execute("SELECT stamp FROM steps WHERE step = ?", (step,)).fetchone()
        if known == (found,):  # another process was faster
            return
        _forget(db, step)
        last = db.execute("SELECT rowid FROM texts ORDER BY rowid DESC LIMIT 1").fetchone() or [0]
        rows: list[tuple[Any, ...]] = []
        texts: list[tuple[int, str]] = []
        error = ""
        try:
            groups = Pool(self.run.pool_path, read_only=True).snapshot(step).groups
            learners = self.learners if self.run.has_samples(step) else ()
            tables = [self.run.samples(step, learner) for learner in learners]
            for id, t in enumerate((t for g in groups for t in g.trajectories), start=last[0] + 1):
                key = (t.problem_id, t.agent, t.index)
                uses = "".join(use_of(samples.get(key)) for samples in tables)
                text, status, detail = t.reply_start + t.text, "", ""
                if t.verdict:
                    status, detail = t.verdict.status.value, t.verdict.detail
                verdict = (t.reward if t.judged else None, status, t.finish.value, t.num_tokens)
                rows.append((id, step, *key, *verdict, uses, text[:BEGINNING]))
                texts.append((id, f"{text} {detail}"))
        except Exception as problem:
            if (message := explain(problem)) is None:
                raise
            error = message
        db.executemany(f"INSERT INTO replies VALUES ({','.join('?' * 11)})", rows)
        db.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", texts)
        db.execute("INSERT INTO steps VALUES (?, ?, ?)", (step, found, error))

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """A connection for one transaction. Other processes may write the same file: they wait."""
        with self._writing, self.reading() as db, db:
            db.execute("BEGIN IMMEDIATE")
            yield db


def use_of(row: Row | None) -> str:
    """What a learner did with a reply, from the row of its sample."""
    if row is None:
        return NONE
    if not row["advantage"]:
        return ZERO
    return USED if row["used"] else CLIPPED


def _forget(db: sqlite3.Connection, step: int) -> None:
    """Remove a step. Its words stay in the full-text index, where they point to no reply."""
    for table in ("steps", "replies"):
        db.execute(f"DELETE FROM {table} WHERE step = ?", (step,))


def _file(run: Path, learners: Sequence[str]) -> Path:
    """The index of a run in the user's cache folder. Its column `uses` has a letter for each learner, so
    a run with other learners has another index."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    key = b"\0".join([os.fsencode(run.resolve()), *(name.encode() for name in learners)])
    digest = hashlib.sha256(key).hexdigest()[:24]
    return Path(base) / "hacrl" / "view" / f"{digest}.sqlite"


def _open(path: Path) -> sqlite3.Connection | None:
    """Prepare the index file. A connection in memory if it cannot be written."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with closing(_connect(path)) as db:
            if not _prepared(db):
                for suffix in ("", "-wal", "-shm"):
                    Path(f"{path}{suffix}").unlink(missing_ok=True)
        with closing(_connect(path)) as db:
            if not _prepared(db):
                db.executescript(_TABLES)
            db.execute("BEGIN IMMEDIATE")  # an error if it is read-only
            db.rollback()
        return None
    except (OSError, sqlite3.Error):
        memory = sqlite3.connect(":memory:", check_same_thread=False)
        memory.executescript(_TABLES)
        return memory


def _prepared(db: sqlite3.Connection) -> bool:
    return bool(db.execute("PRAGMA user_version").fetchone()[0] == VERSION)


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=20, check_same_thread=False)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = OFF")  # a lost index is built again
    return db
