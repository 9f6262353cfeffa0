"""An SQLite index of all replies of a run, built in the background, newest steps first.

It holds what the filters need, the beginning of each text, and a full-text index. Whole texts,
advantages and weights stay in the run's files (replies.py). The file lies in the user's cache folder,
named by the run's path; where that is not writable the index is kept in memory. A step whose files have
changed since it was indexed is indexed again, so resumed and replaced runs need no special handling.
"""

import hashlib
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from hacrl.errors import UserError, describe, explain
from hacrl.store.files import steps_in
from hacrl.store.pool import Pool
from hacrl.types import Trajectory
from hacrl.view.live import LiveRun

VERSION = 1  # version of the tables; an index of another version is built anew
BEGINNING = 200  # characters of a text that the list shows
NONE, ZERO, CLIPPED, USED = "-", "0", "c", "u"
"""What a learner did with a reply: no sample; advantage 0; a sample without a gradient; used."""

_TABLES = """
CREATE TABLE steps (step INTEGER PRIMARY KEY, stamp TEXT, next INTEGER, error TEXT);
CREATE TABLE replies (
  id INTEGER PRIMARY KEY, step INTEGER, problem TEXT, author TEXT, number INTEGER, reward REAL,
  status TEXT, finish TEXT, tokens INTEGER, uses TEXT, text TEXT);
CREATE TABLE counts (step INTEGER, learner TEXT, author TEXT, uses TEXT, count INTEGER);
CREATE INDEX by_step ON counts (step);
"""


class Index:
    """The index of one run. `start` begins a thread that completes it and then follows the run.

    Example: index = Index(run); index.start(); index.progress()
    """

    def __init__(self, run: LiveRun) -> None:
        self.run = run
        self.learners = [agent.name for agent in run.config().agents if agent.learns]
        self._writing = threading.RLock()
        self._place, self._memory = _open(_file(run.path))
        self.searchable = "fts5" in self._definition("texts")
        self._total: int | None = None  # steps of the run, once they are counted
        self._failed = ""
        self._thread: threading.Thread | None = None

    @property
    def in_memory(self) -> bool:
        return self._memory is not None

    def start(self) -> None:
        """Begin to index in the background, once."""
        with self._writing:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="index")
                self._thread.start()

    def progress(self) -> dict[str, Any]:
        """Steps that are indexed, all steps, and the reason if one cannot be read."""
        with self.reading() as db:
            done = db.execute("SELECT count(*) FROM steps").fetchone()[0]
            newest = "SELECT error FROM steps WHERE error != '' ORDER BY step DESC LIMIT 1"
            failed = db.execute(newest).fetchone()
        error = self._failed or (failed[0] if failed else "")
        total = max(self._total or 0, done)
        complete = self._total is not None and done >= self._total
        return {"done": done, "total": total, "complete": complete, "error": error}

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for queries."""
        if self._memory is not None:
            with self._writing:
                yield self._memory
        else:
            with closing(_connect(self._place)) as db:
                yield db

    def ensure(self, step: int) -> None:
        """Index one step now, if it is not, or not as its files are now."""
        with self.reading() as db:
            known = dict(db.execute("SELECT step, stamp FROM steps WHERE step = ?", (step,)))
        stamp = self._stamp(step)
        if stamp and known.get(step) != stamp:
            with self._changing() as db:
                self._add(db, step, stamp)

    def refresh(self) -> int:
        """Index every step that is new or has changed; return their number."""
        with self.reading() as db:
            known = dict(db.execute("SELECT step, stamp FROM steps"))
        stamps = {step: self._stamp(step) for step in steps_in(self.run.pool_path)}
        present = {step: stamp for step, stamp in stamps.items() if stamp}
        self._total = len(present)
        todo = sorted((s for s, stamp in present.items() if known.get(s) != stamp), reverse=True)
        gone = known.keys() - present.keys()
        if gone:
            with self._changing() as db:
                for step in gone:
                    self._forget(db, step)
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
        stamps = [_mark(self.run.pool_path / name / "snapshot.json")]
        stamps += [_mark(self.run.samples_folder(a) / f"{name}.jsonl") for a in self.learners]
        return " ".join(stamps) if stamps[0] else ""

    def _forget(self, db: sqlite3.Connection, step: int) -> int:
        """Remove a step; return the first number that no reply of the step ever had. Its words stay in
        the full-text index, where they point to no reply."""
        found = db.execute("SELECT next FROM steps WHERE step = ?", (step,)).fetchone()
        for table in ("steps", "replies", "counts"):
            db.execute(f"DELETE FROM {table} WHERE step = ?", (step,))
        return found[0] if found else step << 24

    def _add(self, db: sqlite3.Connection, step: int, stamp: str) -> None:
        known = db.execute("SELECT stamp FROM steps WHERE step = ?", (step,)).fetchone()
        if known and known[0] == stamp:  # another process was faster
            return
        first = self._forget(db, step)
        rows: list[tuple[Any, ...]] = []
        texts: list[tuple[int, str]] = []
        counts: Counter[tuple[str, str, str]] = Counter()
        error = ""
        try:
            groups = Pool(self.run.pool_path, read_only=True).snapshot(step).groups
            uses = self._uses(step)
            for number, t in enumerate((t for g in groups for t in g.trajectories), start=first):
                use = "".join(found.get((t.problem_id, t.agent, t.index), NONE) for found in uses)
                text = t.reply_start + t.text
                rows.append((number, step, *_row(t), use, text[:BEGINNING]))
                texts.append((number, f"{text} {t.verdict.detail}" if t.verdict else text))
                counts.update((a, t.agent, u) for a, u in zip(self.learners, use, strict=True))
        except Exception as problem:
            if (message := explain(problem)) is None:
                raise
            error = message
        db.executemany(f"INSERT INTO replies VALUES ({','.join('?' * 11)})", rows)
        db.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", texts)
        listed = [(step, *key, n) for key, n in counts.items()]
        db.executemany("INSERT INTO counts VALUES (?, ?, ?, ?, ?)", listed)
        db.execute("INSERT INTO steps VALUES (?, ?, ?, ?)", (step, stamp, first + len(rows), error))

    def _uses(self, step: int) -> list[dict[tuple[str, str, int], str]]:
        """For each learner: (problem, author, index) -> what it did with the reply."""
        return [
            {
                (r["problem"], r["source"], r["index"]): use_of(r)
                for r in self.run.sample_rows(step, learner)
            }
            for learner in self.learners
        ]

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """A connection for one transaction. Other processes may write the same file: they wait."""
        with self._writing, self.reading() as db, db:
            db.execute("BEGIN IMMEDIATE")
            yield db

    def _definition(self, table: str) -> str:
        with self.reading() as db:
            found = db.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        return str(found[0])


def use_of(row: dict[str, Any]) -> str:
    """What a learner did with a reply, from the row of its sample."""
    if not row["advantage"]:
        return ZERO
    return USED if row["used"] else CLIPPED


def _row(t: Trajectory) -> tuple[Any, ...]:
    reward = t.reward if t.judged else None
    status = t.verdict.status.value if t.verdict else ""
    return (t.problem_id, t.agent, t.index, reward, status, t.finish.value, t.num_tokens)


def _mark(path: Path) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_ino}.{found.st_size}.{found.st_mtime_ns}"


def cache_folder() -> Path:
    """The user's folder for indexes."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hacrl" / "view"


def _file(run: Path) -> Path:
    digest = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:24]
    return cache_folder() / f"{digest}.sqlite"


def _open(path: Path) -> tuple[Path, sqlite3.Connection | None]:
    """The index file with its tables, or a connection in memory if it cannot be written."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with closing(_connect(path)) as db:
            if db.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                for suffix in ("", "-wal", "-shm"):
                    Path(f"{path}{suffix}").unlink(missing_ok=True)
        with closing(_connect(path)) as db:
            _prepare(db)
            db.execute("BEGIN IMMEDIATE")  # an error if it is read-only
            db.rollback()
        return path, None
    except (OSError, sqlite3.Error):
        memory = sqlite3.connect(":memory:", check_same_thread=False)
        _prepare(memory)
        return path, memory


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=20, check_same_thread=False)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = OFF")  # a lost index is built again
    return db


def _prepare(db: sqlite3.Connection) -> None:
    """Make the tables, if they are not there."""
    if db.execute("PRAGMA user_version").fetchone()[0] == VERSION:
        return
    db.executescript(_TABLES)
    try:
        db.execute("CREATE VIRTUAL TABLE texts USING fts5(text, content='')")
    except sqlite3.OperationalError:  # SQLite without FTS5: a slower search
        db.execute("CREATE TABLE texts (text TEXT)")
    db.execute(f"PRAGMA user_version = {VERSION}")
    db.commit()
