"""The pool of a Ray cluster: one small actor in front of the SQLite file.

SQLite's locks cannot be trusted on the file systems that machines share, so one process alone opens
the file: an actor on the driver's machine, which lives as long as the driver does, whatever becomes of
the agents' machines. Rows travel as text. Making and reading that text is the agents' work, and a cut
is put once into Ray's object store, from which every machine fetches it once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.store.pool.sql import SqlPool
from hacrl.store.pool.text import Packed, RowText, pack, unpack
from hacrl.types import Snapshot, Trajectory

KEPT = 8
"""Cuts held ready for agents that gather them, or come back and catch up."""


class PoolKeeper:
    """The actor. Whatever Ray calls again after a hiccup is harmless, as it is in every pool."""

    def __init__(self, url: str, base: str) -> None:
        self.pool = SqlPool(url, Path(base))
        self.cuts: dict[int, Any] = {}
        self.lock = threading.Lock()

    def name(self) -> str:
        return self.pool.text.pool

    def call(self, method: str, *args: Any) -> Any:
        """A method of the pool; a UserError comes back as the sentence it holds."""
        try:
            return _Said(getattr(self.pool, method)(*args))
        except UserError as error:
            return _Refused(str(error))

    def put(self, rows: Packed) -> Any:
        return self.call("put", unpack(rows))

    def rows(self, agent: str | None, step: int | None) -> Any:
        try:
            return _Said(list(self.pool.rows(agent, step)))
        except UserError as error:
            return _Refused(str(error))

    def cut(self, step: int) -> Any:
        """A reference to the cut's record and rows."""
        import ray

        with self.lock:
            if step not in self.cuts:
                stored = self.call("stored", step)
                if isinstance(stored, _Refused):
                    return stored
                record, rows = stored.value
                while len(self.cuts) >= KEPT:
                    del self.cuts[next(iter(self.cuts))]
                self.cuts[step] = ray.put((record, pack((row[:4], row[4]) for row in rows)))
            return _Said(
                [self.cuts[step]]
            )  # in a list, so that Ray hands over the reference itself


class _Said:
    def __init__(self, value: Any) -> None:
        self.value = value


class _Refused:
    def __init__(self, reason: str) -> None:
        self.reason = reason


class RayPool:
    """See `hacrl.store.pool.Pool`; `keeper` is the actor's handle."""

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper
        self._text: RowText | None = None

    @property
    def text(self) -> RowText:
        if self._text is None:
            self._text = RowText(_get(self._keeper.name.remote()))
        return self._text

    def publish(self, trajectories: Sequence[Trajectory]) -> None:
        if bodies := self.text.encode(trajectories):
            _value(_get(self._keeper.put.remote(pack(bodies.items()))))

    def arrive(self, step: int, agent: str) -> None:
        self._ask("arrive", step, agent)

    def arrived(self, step: int) -> tuple[str, ...]:
        found: tuple[str, ...] = self._ask("arrived", step)
        return found

    def close(self, step: int, members: Sequence[str]) -> None:
        self._ask("close", step, list(members))

    def closed(self, step: int) -> bool:
        return bool(self._ask("closed", step))

    def gather(self, step: int) -> Snapshot:
        (reference,) = _value(_get(self._keeper.cut.remote(step)))
        record, packed = _get(reference)
        rows = ((*key, body) for key, body in unpack(packed).items())
        return self.text.decode(step, record, rows)

    def members(self, step: int) -> tuple[str, ...]:
        found: tuple[str, ...] = self._ask("members", step)
        return found

    def rows(self, agent: str | None = None, step: int | None = None) -> Iterator[Trajectory]:
        found: list[Trajectory] = _value(_get(self._keeper.rows.remote(agent, step)))
        return iter(found)

    def late(self, step: int) -> int:
        return int(self._ask("late", step))

    def dispose(self) -> None:
        """The actor belongs to the driver."""

    def _ask(self, method: str, *args: Any) -> Any:
        return _value(_get(self._keeper.call.remote(method, *args)))


def _get(reference: Any) -> Any:
    import ray

    return ray.get(reference)


def _value(answer: _Said | _Refused) -> Any:
    if isinstance(answer, _Refused):
        raise UserError(answer.reason)
    return answer.value
