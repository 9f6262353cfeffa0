"""A pool inside one process: for tests and runs that need no trace of what was shared."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from hacrl.store.pool import Key, as_snapshot, check_members, not_closed, other_content
from hacrl.store.pool.wire import WireError, to_json
from hacrl.types import Snapshot, Trajectory

_NAME = "memory://"


class MemoryPool:
    """See `hacrl.store.pool.Pool`. Refuses exactly what a stored pool refuses."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[int, dict[Key, Trajectory]] = {}  # by step
        self._late: dict[int, set[Key]] = {}
        self._arrived: dict[int, set[str]] = {}
        self._cuts: dict[int, Snapshot] = {}

    def publish(self, trajectories: Sequence[Trajectory]) -> None:
        new: dict[Key, Trajectory] = {}
        for trajectory in trajectories:
            key = trajectory.key
            try:
                to_json(trajectory)  # what could not cross a stored pool does not cross this one
            except WireError as error:
                raise WireError("", f"pool {_NAME}, {key}: {error}") from error
            if new.setdefault(key, trajectory) != trajectory:
                raise other_content(_NAME, key)
        with self._lock:
            for key, trajectory in new.items():
                if self._rows.get(key[0], {}).get(key, trajectory) != trajectory:
                    raise other_content(_NAME, key)
            for key, trajectory in new.items():
                rows = self._rows.setdefault(key[0], {})
                if key not in rows:
                    rows[key] = trajectory
                    if key[0] in self._cuts:
                        self._late.setdefault(key[0], set()).add(key)

    def arrive(self, step: int, agent: str) -> None:
        with self._lock:
            self._arrived.setdefault(step, set()).add(agent)

    def arrived(self, step: int) -> tuple[str, ...]:
        with self._lock:
            return tuple(sorted(self._arrived.get(step, ())))

    def close(self, step: int, members: Sequence[str]) -> None:
        check_members(step, members)
        with self._lock:
            if step not in self._cuts:
                rows = self._rows.get(step, {}).values()
                self._cuts[step] = as_snapshot(
                    step, members, (t for t in rows if t.agent in members)
                )

    def closed(self, step: int) -> bool:
        with self._lock:
            return step in self._cuts

    def gather(self, step: int) -> Snapshot:
        with self._lock:
            if step not in self._cuts:
                raise not_closed(_NAME, step)
            return self._cuts[step]

    def rows(self, agent: str | None = None, step: int | None = None) -> Iterator[Trajectory]:
        with self._lock:
            found = [
                trajectory
                for at, rows in self._rows.items()
                for trajectory in rows.values()
                if (step is None or at == step) and (agent is None or trajectory.agent == agent)
            ]
        return iter(sorted(found, key=lambda t: t.key))

    def late(self, step: int) -> int:
        with self._lock:
            return len(self._late.get(step, ()))

    def dispose(self) -> None:
        pass
