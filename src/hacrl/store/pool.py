"""The pool: the files through which the agents of a team exchange their replies.

    RUN/pool/step-000003/
      ant/SHA256.jsonl.gz   the batch of agent "ant": one trajectory per line, as JSON
      bee/SHA256.jsonl.gz
      snapshot.json         {"schema": 1, "step": 3, "batches": {"ant": SHA256, "bee": SHA256}, ...}

A *batch* is everything one agent publishes for one step. It is named by the sha256 of its
uncompressed lines; `zcat RUN/pool/step-000003/ant/*` prints them. A *snapshot* lists the batches that
count in a step. It is written once, when the step is closed, and every agent learns from it. Every read
verifies the digests; damaged files are written again from the journals by `hacrl resume RUN`.

All writes are atomic and none needs a file lock, so the agents may run on different machines that
share the run directory. Reading writes nothing. Steps count from 0 here, as in the journals.
"""

import errno
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hacrl.config import Config
from hacrl.errors import UserError
from hacrl.store.codec import TRAJECTORY, CodecError
from hacrl.store.files import RESTORE, changed, steps_in, whole_folder
from hacrl.store.rows import Row, read_object, write_object
from hacrl.types import SCHEMA, Snapshot, Trajectory, make_groups

_BATCH = re.compile(r"([0-9a-f]{64})\.jsonl\.gz")
_LEVEL = 1  # of gzip: level 6 takes six times as long and saves another quarter


class Pool:
    """The batches and snapshots of one run.

    Several processes may publish, close and read at the same time.

    Example: pool = Pool(Path("runs/team/pool")); pool.publish(0, "ant", trajectories)
    """

    waited = 0.0  # seconds spent waiting for other owners since they were last read

    def __init__(self, folder: Path, read_only: bool = False) -> None:
        self.folder = folder
        self._way = f"`hacrl resume {folder.parent}` writes it again from the journals"
        if read_only and not folder.is_dir():
            raise UserError(
                f"{folder} does not exist: the run has not published any trajectory yet, or the "
                "folder was deleted"
            )

    def publish(self, step: int, agent: str, trajectories: Sequence[Trajectory]) -> str:
        """Store the batch of one agent and step, all of it or nothing; return its digest.

        Publishing the same batch again replaces a damaged one. Another batch is a UserError. A batch
        published after the step was closed is kept, but is not part of the snapshot.
        """
        return self.store_lines(step, agent, _encode(step, agent, trajectories))

    def store_lines(self, step: int, agent: str, lines: bytes) -> str:
        """Like `publish`, for the lines of a batch that another process encoded."""
        digest = hashlib.sha256(lines).hexdigest()
        place = self._step(step) / agent
        exists = place.exists()
        if not (exists and self.whole(step, agent)):
            counted = self._record(step)["batches"] if self.closed(step) else {}
            if counted.get(agent, digest) != digest:  # every resume would find it damaged again
                reason = "the batch is damaged, and the inputs of the run have changed since"
                raise changed(place, reason, RESTORE)
            try:
                with whole_folder(place, replace=exists) as new:
                    compressed = gzip.compress(lines, _LEVEL, mtime=0)
                    (new / f"{digest}.jsonl.gz").write_bytes(compressed)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster
                    raise
        if (stored := self._digest(step, agent)) != digest:
            raise UserError(
                f"{place} already holds another batch of agent {agent!r} for this step (stored: "
                f"sha256 {stored}, new: {digest}). Two processes publish as this agent: stop one "
                f"of them. If the stored batch is not this agent's, delete {place} and resume"
            )
        return digest

    def arrived(self, step: int) -> tuple[str, ...]:
        """Return the agents that have published their batch of the step, sorted."""
        return tuple(sorted(path.name for path in self._step(step).glob("[!.]*/")))

    def close(self, step: int, members: Sequence[str]) -> None:
        """Write the step's snapshot: the batches of `members` that are published now. The first call
        for a step writes it, in whichever process; later calls change nothing."""
        if self.closed(step):
            return
        # Names are looked up one by one: a listing may be stale on a network file system.
        folder = self._step(step)
        published = [agent for agent in members if (folder / agent).is_dir()]
        if members and not published:
            raise ValueError(f"closing step {step + 1}: none of {members!r} has published")
        digests = {agent: self._digest(step, agent) for agent in published}
        record = {"schema": SCHEMA, "step": step, "batches": digests}
        with suppress(FileExistsError):  # another process was faster
            write_object(folder / "snapshot.json", record, indent=1, replace=False)

    def is_away(self, step: int) -> bool:
        """Return whether the run takes no part in the step; only the pool of a hub decides that."""
        return False

    def late(self, step: int) -> dict[str, list[Trajectory]]:
        """Return the batches that arrived after the step was closed, by agent. Only a hub has them."""
        return {}

    def team(self, config: Config, step: int) -> Config:
        """Return the config with all agents of the step. The pool of a hub adds other owners'."""
        return config

    def closed(self, step: int) -> bool:
        """Return whether the step has a snapshot."""
        return (self._step(step) / "snapshot.json").is_file()

    def whole(self, step: int, agent: str) -> bool:
        """Return whether the agent's batch of the step exists and has the sha256 of its name."""
        try:
            self._lines(step, agent, self._digest(step, agent))
        except UserError:
            return False
        return True

    def damaged(self, step: int) -> UserError | None:
        """Read the step's snapshot file, not its batches. Return the error; None if there is none."""
        try:
            self._record(step)
        except UserError as error:
            return error
        return None

    def reopen(self, step: int) -> None:
        """Remove the snapshot of a step, so that it can be closed again."""
        (self._step(step) / "snapshot.json").unlink(missing_ok=True)

    def members(self, step: int) -> tuple[str, ...]:
        """Return the members of a closed step, without reading their batches."""
        return tuple(self._record(step)["batches"])

    def digest(self, step: int) -> str:
        """Return the sha256 of a closed step's record: its step, members and batches."""
        text = json.dumps(self._record(step), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def snapshot(self, step: int) -> Snapshot:
        """Read a closed step and verify every batch. Groups are ordered by problem id, their
        trajectories by agent and index. Rows in another form are left out and listed in `unreadable`."""
        batches = self._record(step)["batches"]
        rows: list[Trajectory] = []
        unreadable: list[tuple[str, str]] = []
        for agent, digest in batches.items():
            found, reasons = self._read(step, agent, digest)
            rows += found
            unreadable += [(agent, reason) for reason in reasons]
        return Snapshot(step, tuple(batches), make_groups(rows), tuple(unreadable))

    def rows(
        self,
        agent: str | None = None,
        step: int | None = None,
        report: Callable[[str], None] = lambda reason: None,
    ) -> Iterator[Trajectory]:
        """Yield everything published, of all steps and agents unless one is given, also outside of
        snapshots, ordered by step, agent, problem id and index. `report` is called with the reason for
        each row that cannot be read."""
        for at in steps_in(self.folder) if step is None else [step]:
            for name in self.arrived(at):
                if agent in (None, name):
                    found, reasons = self._read(at, name, self._digest(at, name))
                    for reason in reasons:
                        report(reason)
                    yield from found

    def _step(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _record(self, step: int) -> Row:
        """Content of snapshot.json; "batches" has the digests by agent, in the order of the team."""
        path = self._step(step) / "snapshot.json"
        record = read_object(path, self._way)
        batches = record.get("batches")
        if (record.get("schema"), record.get("step")) != (SCHEMA, step):
            raise changed(path, "it is of another step or version", self._way)
        if not isinstance(batches, dict) or not all(isinstance(v, str) for v in batches.values()):
            raise changed(path, "it has no digests of batches", self._way)
        return record

    def _read(self, step: int, agent: str, digest: str) -> tuple[list[Trajectory], list[str]]:
        """Verify the digest of a batch. Return its trajectories, and one reason for each row that cannot
        be read. Such a row is no error: it must not stop the other agents."""
        rows, unreadable = [], []
        lines = self._lines(step, agent, digest).split(b"\n")[:-1]  # \r is no end of a line
        for number, line in enumerate(lines, start=1):
            try:
                row = TRAJECTORY.decode(line)
                if (row.step, row.agent) != (step, agent):
                    raise CodecError(f"is of step {row.step + 1} and agent {row.agent!r}")
                rows.append(row)
            except CodecError as error:
                unreadable.append(f"line {number}: {error}"[:200])
        return rows, unreadable

    def _lines(self, step: int, agent: str, digest: str) -> bytes:
        """Verify the digest of a batch and return its lines."""
        path = self._step(step) / agent / f"{digest}.jsonl.gz"
        try:
            lines = gzip.decompress(path.read_bytes())
        except FileNotFoundError as error:
            raise changed(path, "the file is missing", self._way) from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise changed(path, f"not a complete gzip file ({error})", self._way) from error
        if (found := hashlib.sha256(lines).hexdigest()) != digest:
            raise changed(path, f"the sha256 of its lines is {found}", self._way)
        return lines

    def _digest(self, step: int, agent: str) -> str:
        """Return the digest of an agent's batch, from the file's name."""
        place = self._step(step) / agent
        entries = place.iterdir() if place.is_dir() else ()
        names = [_BATCH.fullmatch(entry.name) for entry in entries]
        if len(names) != 1 or names[0] is None:
            raise changed(place, "must hold one file SHA256.jsonl.gz", self._way)
        return names[0][1]


def _encode(step: int, agent: str, trajectories: Sequence[Trajectory]) -> bytes:
    """Return the lines of a batch, ordered by problem id and index."""
    lines: list[bytes] = []
    last = None
    for row in sorted(trajectories, key=lambda t: (t.problem_id, t.index)):
        where = f"agent {agent!r}, step {step + 1}, problem {row.problem_id!r}, index {row.index}"
        if (row.step, row.agent) != (step, agent):
            raise ValueError(f"{where}: is of step {row.step + 1} and agent {row.agent!r}")
        if row.key == last:
            raise ValueError(f"{where}: is in the batch twice")
        last = row.key
        try:
            lines.append(TRAJECTORY.encode(row) + b"\n")
        except CodecError as error:
            raise UserError(f"{where}: cannot be published: {error}") from error
    return b"".join(lines)
