"""The process group of one agent: the ranks that hold its weights together.

Rank 0 broadcasts commands, every rank does its part, and rank 0 gathers the results. There are two
channels: `data` for weights and gradients (nccl between GPUs, gloo between CPUs) and `control` for
commands and small results (always gloo).

Every wait ends. When a process ends, its gloo connections close, and ranks that wait for it fail at
once. If a machine disappears, or in a collective between GPUs, the timeouts below apply. A rank that
fails writes the reason to the store, and rank 0 reports it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hacrl.errors import RunStopped, UserError, describe, first_line

LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT = timedelta(minutes=5)  # until all ranks have connected
DATA_TIMEOUT = timedelta(minutes=30)
"""Of a collective of weights or gradients; ranks reach it at about the same time, or load models."""
CONTROL_TIMEOUT = timedelta(hours=24)
"""Until the next command, or until another rank has sampled its replies."""


def open_store(host: str = LOOPBACK) -> dist.TCPStore:
    """The store through which ranks find each other, in the process of rank 0. The others connect to
    `host:store.port`. On loopback only this machine can connect: torch itself would listen on all
    interfaces, and the commands of rank 0 are pickles."""
    port, listening = 0, None
    if host == LOOPBACK:
        listener = socket.create_server((host, 0))
        port, listening = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=JOIN_TIMEOUT,
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
    size: int,
    address: str,
    *,
    device: str = "cpu",
    agent: str = "",
    store: dist.TCPStore | None = None,
) -> RankGroup:
    """Join the process group of a single agent; see `join_world`."""
    store = join_world(rank, size, address, device=device, store=store)
    return make_group(store, range(size), agent)


def join_world(
    rank: int,
    size: int,
    address: str,
    *,
    device: str,
    store: dist.TCPStore | None = None,
    exits: Callable[[], str] = lambda: "",
) -> dist.TCPStore:
    """Initialise torch.distributed in this process and return the store, for `make_group`. Returns when
    all `size` processes have connected to the store at `address` (host:port).

    `device` is "cuda" if any agent's weights are on GPUs. Rank 0 passes the `store` that it opened, and
    stops waiting when `exits` describes a process that has ended.
    """
    if dist.is_initialized():
        raise UserError(
            "ranks > 1: torch.distributed is already initialised in this process. Start hacrl without "
            "torchrun; it starts the other ranks itself."
        )
    if store is None:
        host, _, port = address.rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False, timeout=JOIN_TIMEOUT)
    if rank:
        store.set(f"connected/{rank}", "")
    else:
        _wait_for_all(store, size, exits)
    backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=DATA_TIMEOUT)
    return store


def _wait_for_all(store: dist.TCPStore, size: int, exits: Callable[[], str]) -> None:
    deadline = time.monotonic() + JOIN_TIMEOUT.total_seconds()
    while missing := [r for r in range(1, size) if not store.check([f"connected/{r}"])]:
        if ended := exits():
            raise RunStopped(f"a rank ended before it joined its process group: {ended}")
        if time.monotonic() > deadline:
            raise RunStopped(
                f"{len(missing)} of {size} ranks did not connect within {JOIN_TIMEOUT.seconds // 60} "
                "minutes. Check that there is memory for all of them and that they can reach this "
                "machine."
            )
        time.sleep(0.05)


def leave_world(*groups: RankGroup) -> None:
    """Close the connections of this process, with those of `groups`. Ranks that wait for it fail at
    once. The process can join another world after this."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for group in groups:
        group.failed = True
        del group.control, group.data  # the last references: these keep connections open


def make_group(store: dist.TCPStore, ranks: Sequence[int], agent: str = "") -> RankGroup:
    """The process group of an agent. Every process of the world must call this for the same groups in
    the same order, also for groups that it is not part of."""
    members = list(ranks)
    data = dist.new_group(members, timeout=DATA_TIMEOUT)
    control = dist.new_group(members, backend="gloo", timeout=CONTROL_TIMEOUT)
    own = dist.get_rank()
    rank = members.index(own) if own in members else -1
    return RankGroup(agent, rank, len(members), members[0], data, control, store)


@dataclass
class RankGroup:
    """The process group of an agent, as one of its ranks sees it.

    Example: rank 0 calls `group.broadcast(("score", ...))`, and `group.receive()` returns it elsewhere.
    """

    agent: str
    rank: int  # in this group; -1 in a process that is not a member
    size: int
    leader: int  # the rank in the world of this group's rank 0
    data: dist.ProcessGroup
    control: dist.ProcessGroup
    store: dist.TCPStore
    exits: Callable[[], str] = lambda: ""
    """Describes followers that have ended, where this process has started them."""
    failed: bool = False  # a call failed, so the ranks are out of step and the group is unusable

    def mesh(self, device: torch.device) -> DeviceMesh:
        """The device mesh for FSDP."""
        return DeviceMesh.from_group(self.data, device.type)

    def broadcast(self, command: Any) -> None:
        """Send from rank 0 to all others."""
        dist.broadcast_object_list([command], src=self.leader, group=self.control)

    def receive(self) -> Any:
        """The next `broadcast` of rank 0."""
        received = [None]
        try:
            dist.broadcast_object_list(received, src=self.leader, group=self.control)
        except RuntimeError as error:
            raise RunStopped(
                f"agent {self.agent!r}, rank {self.rank}: rank 0 of the process group is gone, so this "
                "rank ends too."
            ) from error
        return received[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks on rank 0, an empty list elsewhere."""
        values = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=self.leader, group=self.control)
        return values or []

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    # ------------------------------------------------------------ failures

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Around rank 0's part of a call that all ranks take part in. An exception makes the group
        unusable; if another rank has failed, the error names it and the reason."""
        if self.failed:
            raise RunStopped(f"agent {self.agent!r}: its process group has failed before.")
        self.failed = True
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RunStopped) or not (reason := self._failure(error)):
                raise
            raise RunStopped(
                f"agent {self.agent!r}: a rank of its process group is gone ({reason}). `hacrl resume` "
                "continues from the newest checkpoint."
            ) from error
        self.failed = False

    def report_failure(self, error: BaseException) -> None:
        """Write the reason to the store, for rank 0. The first failure is the cause and stays."""
        text = f"rank {self.rank}: {describe(error)}"
        with contextlib.suppress(RuntimeError):
            self.store.compare_set(f"failure/{self.agent}", "", text[:2000])

    def _failure(self, error: RuntimeError) -> str:
        """The failure of another rank that caused `error`; empty if it is this rank's own error."""
        key = f"failure/{self.agent}"
        deadline = time.monotonic() + 2.0  # a connection may close before the reason is written
        while time.monotonic() < deadline:
            if self.store.check([key]):
                return self.store.get(key).decode()
            time.sleep(0.05)
        connection_lost = isinstance(error, dist.DistError) or "gloo" in str(error)
        return self.exits() or (first_line(error) if connection_lost else "")
