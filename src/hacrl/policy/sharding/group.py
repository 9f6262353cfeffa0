"""The ranks of one agent: a group of processes that hold its weights together.

Rank 0 leads: it says what to do, every rank does its share, and rank 0 gathers the results. Two
channels: `tensors` carries weights and gradients (nccl between GPUs, gloo between CPUs), `words`
carries commands and small results (always gloo).

Nobody waits for ever. A process that ends closes its connections, and whoever waits for it over gloo
hears of it at once; in a collective between GPUs, and where a machine vanishes, the time limits
below end the wait. A rank that fails leaves the reason in the store, so that rank 0 can tell it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hacrl.errors import RunStopped, UserError, describe, first_line

LOOPBACK = "127.0.0.1"
JOIN = timedelta(minutes=5)
"""Longest wait for all ranks to be there."""
WORK = timedelta(minutes=30)
"""Longest wait in a collective of weights or gradients, where ranks keep step; loading included."""
IDLE = timedelta(hours=24)
"""Longest wait for a command, or for another rank's share of the sampling."""


def open_store(host: str = LOOPBACK, port: int = 0) -> dist.TCPStore:
    """The place where a group meets, in the process of rank 0; port 0 takes a free one. Others join
    at `host:store.port`. On loopback nothing outside this machine can connect: torch itself would
    listen on all interfaces, and the commands of rank 0 are pickles."""
    listening = None
    if host == LOOPBACK:
        listener = socket.create_server((host, port))
        port, listening = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=JOIN,
        master_listen_fd=listening,
    )


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """Gloo and nccl use the loopback interface, for ranks that are all on this machine."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    keys = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if names else ()
    before = {key: os.environ.get(key) for key in keys}
    os.environ.update(dict.fromkeys(keys, names[0] if names else ""))
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key)
            if value is not None:
                os.environ[key] = value


def join_group(
    rank: int,
    world: int,
    address: str,
    *,
    device: str = "cpu",
    agent: str = "",
    store: dist.TCPStore | None = None,
) -> Group:
    """Meet the other ranks at `address` (host:port). Returns when all are there.

    `device` is of what the agent's weights are kept on: cpu or cuda. Rank 0 passes the `store` it
    opened with `open_store`; without one it opens it at `address`.
    """
    return make_group(
        join_world(rank, world, address, device=device, store=store), range(world), agent
    )


def join_world(
    rank: int,
    world: int,
    address: str,
    *,
    device: str,
    store: dist.TCPStore | None = None,
    ending: Callable[[], str] = lambda: "",
) -> dist.TCPStore:
    """Make this process one of `world`, in which groups can be made (`make_group`). Rank 0 does not
    wait for processes of which `ending` says that they ended."""
    if dist.is_initialized():
        raise UserError(
            "ranks > 1: this process already belongs to a group of torch.distributed. Start hacrl "
            "without torchrun; it starts the other ranks itself."
        )
    host, _, port = address.rpartition(":")
    if store is None:
        store = (
            open_store(host, int(port))
            if rank == 0
            else dist.TCPStore(host, int(port), is_master=False, timeout=JOIN)
        )
    if rank:
        store.set(f"here/{rank}", "")
    else:
        _wait_for_all(store, world, ending)
    backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=WORK)
    return store


def _wait_for_all(store: dist.TCPStore, world: int, ending: Callable[[], str]) -> None:
    deadline = time.monotonic() + JOIN.total_seconds()
    while missing := [r for r in range(1, world) if not store.check([f"here/{r}"])]:
        if ended := ending():
            raise RunStopped(f"a rank ended before it joined its group: {ended}")
        if time.monotonic() > deadline:
            raise RunStopped(
                f"{len(missing)} of {world} ranks did not come within {JOIN.seconds // 60} minutes. Is "
                "there room for all of them, and can they reach this machine?"
            )
        time.sleep(0.05)


def leave_world(*groups: Group) -> None:
    """Close this process's connections, those of `groups` among them: who waits at the other end
    hears of it. After this the process can join another world."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for group in groups:
        group.broken = True
        del group.words, group.tensors  # the last that keep their connections open


def make_group(store: dist.TCPStore, ranks: Sequence[int], agent: str = "") -> Group:
    """A group within the world. Every rank of the world must call it, for the same groups in the
    same order, also those that are not in it."""
    members = list(ranks)
    tensors = dist.new_group(members, timeout=WORK)
    words = dist.new_group(members, backend="gloo", timeout=IDLE)
    mine = dist.get_rank()
    rank = members.index(mine) if mine in members else -1
    return Group(agent, rank, len(members), members[0], tensors, words, store)


@dataclass
class Group:
    """One process's seat in an agent's group.

    Example: a leader says `group.tell(("score", sequences))`, a follower hears it from `hear()`.
    """

    agent: str
    rank: int
    """0 leads; -1 in a process that is not a member."""
    size: int
    leader: int
    """Rank 0's number in the world."""
    tensors: dist.ProcessGroup
    words: dist.ProcessGroup
    store: dist.TCPStore
    ending: Callable[[], str] = field(default=lambda: "")
    """How followers ended, in words, where the starter of the processes can tell."""
    broken: bool = False
    """A share failed half-way: ranks are out of step, and the group is of no more use."""

    def mesh(self, device: torch.device) -> DeviceMesh:
        return DeviceMesh.from_group(self.tensors, device.type)

    # ------------------------------------------------------------ words

    def tell(self, command: Any) -> None:
        """Rank 0 to all others."""
        dist.broadcast_object_list([command], src=self.leader, group=self.words)

    def hear(self) -> Any:
        """What rank 0 tells next."""
        box = [None]
        dist.broadcast_object_list(box, src=self.leader, group=self.words)
        return box[0]

    def collect(self, value: Any) -> list[Any]:
        """Every rank's value in the order of ranks, on rank 0; nothing elsewhere."""
        values = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=self.leader, group=self.words)
        return values or []

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value in the order of ranks, on every rank."""
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.words)
        return values

    # ------------------------------------------------------------ failures

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A share of rank 0's work that others wait for. Whatever ends it early breaks the group;
        if that is another rank's end, the error says whose and why."""
        if self.broken:
            raise RunStopped(f"agent {self.agent!r}: its group of ranks has failed before.")
        self.broken = True
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RunStopped) or not (reason := self._reason(error)):
                raise
            raise RunStopped(
                f"agent {self.agent!r}: a rank of its group is gone, and its shards with it "
                f"({reason}). `hacrl resume` goes on from the newest checkpoint."
            ) from error
        self.broken = False

    def leave_reason(self, error: BaseException) -> None:
        """For rank 0 to find, if its process still lives."""
        text = f"rank {self.rank}: {describe(error)}"
        with contextlib.suppress(RuntimeError):
            self.store.compare_set(self._key, "", text[:2000])  # the first failure is the cause

    def _reason(self, error: RuntimeError) -> str:
        """Why another rank ended; empty where the error is this rank's own."""
        deadline = time.monotonic() + 2.0  # a connection may close before the reason is there
        while time.monotonic() < deadline:
            if self.store.check([self._key]):
                return self.store.get(self._key).decode()
            time.sleep(0.05)
        if ending := self.ending():
            return ending
        lost = isinstance(error, dist.DistError) or "gloo" in str(error)
        return first_line(error) if lost else ""

    @property
    def _key(self) -> str:
        return f"failure/{self.agent}"
