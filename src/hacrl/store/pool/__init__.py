"""Where agents meet: the verified trajectories of every step, and the committed cut of closed ones.

A pool is chosen by URL. To add one: write a class with the methods of `Pool` and give its scheme an
entry in POOLS, or name it by import path: pool.url = "package.module:Class://ADDRESS".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from hacrl.errors import UserError
from hacrl.importing import import_object
from hacrl.types import Group, Snapshot, Trajectory

Key = tuple[int, str, str, int]
"""(step, agent, problem id, index): what identifies a row."""


class Pool(Protocol):
    """What every pool can do. All of it may be called from several threads, and, where the pool
    outlives a process, from several processes at the same time."""

    def publish(self, trajectories: Sequence[Trajectory]) -> None:
        """Store rows, all or none. A row stored before is harmless; its key with other content is
        a UserError. Rows of a closed step are kept, marked late and never gathered."""

    def arrive(self, step: int, agent: str) -> None:
        """Note that `agent` has published all its rows of the step. Again is harmless."""

    def arrived(self, step: int) -> tuple[str, ...]:
        """The agents that have arrived, sorted."""

    def close(self, step: int, members: Sequence[str]) -> None:
        """Commit the step's cut: the members, and those of their rows that are here now. The first
        call wins for ever, whoever makes it; later ones change nothing."""

    def closed(self, step: int) -> bool: ...

    def gather(self, step: int) -> Snapshot:
        """The committed cut: groups by problem id, their trajectories by (agent, index). A
        UserError when the step is not closed."""

    def rows(self, agent: str | None = None, step: int | None = None) -> Iterator[Trajectory]:
        """Everything stored, late rows too, ordered by (step, agent, problem id, index)."""

    def late(self, step: int) -> int:
        """How many rows came after the step was closed."""

    def dispose(self) -> None:
        """Let go of files and connections; the pool is not used afterwards."""


def open_pool(url: str, base: Path, create: bool = True) -> Pool:
    """Open the pool at `url`. A relative SQLite path starts at `base`, the run directory.

    `create=False` is for readers of a stored run: a pool that is not there is a UserError instead
    of a new empty one.

    Example: open_pool("sqlite:///pool.db", Path("runs/team"))
    """
    scheme, separator, _ = url.partition("://")
    factory = POOLS.get(scheme.partition("+")[0]) if separator else None
    if factory is None and ":" in scheme and separator:
        factory = import_object(scheme, "pool.url")
    if factory is None:
        known = ", ".join(f"{name}://" for name in POOLS)
        raise UserError(
            f"pool.url = {shown(url)!r}: no such kind of pool; there are {known}, or your own as "
            "package.module:Class://ADDRESS"
        )
    return factory(url, base, create)


def shown(url: str) -> str:
    """An address as it may be told: without its password.

    Example: shown("postgresql://me:secret@db/pool") == "postgresql://me:***@db/pool"
    """
    url = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", url)
    return re.sub(r"(password=)[^&]*", r"\1***", url)


def members_of(pool: Pool, step: int) -> tuple[str, ...]:
    """The members of a closed step. A pool that can tell without reading all rows has a method
    `members(step)` for it."""
    tell = getattr(pool, "members", None)
    found: Sequence[str] = tell(step) if tell else pool.gather(step).members
    return tuple(found)


def as_snapshot(step: int, members: Sequence[str], trajectories: Iterable[Trajectory]) -> Snapshot:
    """Group a cut's rows, in an order that does not depend on the order in which they came."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in sorted(trajectories, key=lambda t: (t.problem_id, t.agent, t.index)):
        groups.setdefault(trajectory.problem_id, []).append(trajectory)
    return Snapshot(
        step=step,
        members=tuple(members),
        groups=tuple(Group(name, rows[0].task, tuple(rows)) for name, rows in groups.items()),
    )


def check_members(step: int, members: Sequence[str]) -> None:
    """A cut without members, or with one named twice, is a mistake of the caller."""
    if not members or len(set(members)) != len(members):
        raise ValueError(f"closing step {step}: members must be different names, not {members!r}")


def other_content(pool: str, key: Key) -> UserError:
    """The error for a key that is already stored with something else."""
    step, agent, problem_id, index = key
    return UserError(
        f"pool {pool}: step {step}, agent {agent!r}, problem {problem_id!r}, index {index} is "
        "already stored with other content. Two runs, or two agents of one name, use this pool: "
        "give each run its own pool.url, or resume the run that wrote it"
    )


def not_closed(pool: str, step: int) -> UserError:
    return UserError(f"pool {pool}: step {step} is not closed, so there is no cut to gather")


def _memory(url: str, base: Path, create: bool) -> Pool:
    from hacrl.store.pool.memory import MemoryPool

    if url != "memory://":
        raise UserError(f"pool.url = {shown(url)!r}: a memory pool has no address; write memory://")
    return MemoryPool()


def _sql(url: str, base: Path, create: bool) -> Pool:
    from hacrl.store.pool.sql import SqlPool  # SQLAlchemy is only imported where it is used

    return SqlPool(url, base, create)


POOLS: dict[str, Callable[[str, Path, bool], Pool]] = {
    "memory": _memory,
    "sqlite": _sql,
    "postgresql": _sql,
}
"""Scheme of pool.url (without a "+driver") -> what opens it."""
