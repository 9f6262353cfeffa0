"""What is offloaded to the host comes back unchanged, and the model's own tensors never move."""

import warnings
from pathlib import Path
from weakref import WeakSet

import pytest
import ratio_rows
import torch

from hacrl.algorithms import make_algorithm, make_settings
from hacrl.policy import offload
from hacrl.policy.offload import plan_slabs
from hacrl.policy.policy import Policy
from hacrl.types import Sample, Update

UPDATE = Update(0, 0.8, "own", ("p",))
LOSS = make_algorithm(make_settings("gspo", beta=0.1)).loss


def policy(model: Path, **changes) -> Policy:
    return ratio_rows.policy(model, 0.1, **changes)


def samples(p: Policy) -> list[Sample]:
    return ratio_rows.rows_of(p, [(True, 1.0, 1.5 - i) for i in range(4)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_updates_are_the_same_with_offload(llama: Path, dtype: str) -> None:
    """bfloat16 has a separate master to offload; in float32 the model is its own master."""
    moving, staying = (policy(llama, offload=o, dtype=dtype) for o in ("optimizer", "none"))
    where = {n: t.data_ptr() for n, t in moving.model.named_parameters()}
    for _ in range(3):
        reports = [p.update(samples(p), LOSS, UPDATE) for p in (moving, staying)]
        assert reports[0] == reports[1]
        working = {n: t.data_ptr() for n, t in moving.master.items()}
        moments = [moving.optimizer.state[t]["exp_avg"] for t in moving.master.values()]
        for p in (moving, staying):
            p.offload()
        moved = {t.data_ptr() != working[n] for n, t in moving.master.items()}
        assert moved == {dtype == "bfloat16"}
        for tensor, before in zip(moving.master.values(), moments, strict=True):
            now = moving.optimizer.state[tensor]["exp_avg"]
            assert now.data_ptr() != before.data_ptr() and torch.equal(now, before)
        assert all(t.grad is None for t in moving.master.values())
        assert {n: t.data_ptr() for n, t in moving.model.named_parameters()} == where
    assert reports[0].kl > 0
    a, b = (p.checkpoint(3) for p in (moving, staying))  # while offloaded
    assert all(torch.equal(a.model[key], b.model[key]) for key in b.model)
    assert all(torch.equal(a.optimizer[key], b.optimizer[key]) for key in b.optimizer)


def test_an_offloaded_policy_can_be_restored(llama: Path) -> None:
    first = policy(llama, dtype="bfloat16")
    rows = samples(first)
    first.update(rows, LOSS, UPDATE)
    other = policy(llama, dtype="bfloat16", offload="optimizer")
    for _ in range(2):
        other.update(rows, LOSS, UPDATE)
    other.offload()
    other.restore(first.checkpoint(1))
    for p in (first, other):
        p.update(rows, LOSS, UPDATE)
    assert all(torch.equal(first.master[n], other.master[n]) for n in first.master)


def test_gradients_of_bfloat16_are_summed_in_float32(llama: Path) -> None:
    """Four micro-batches of one row: the sum has more digits than bfloat16."""
    p = policy(llama, dtype="bfloat16", microbatch_tokens=1, max_grad_norm=1e9)
    p.update(samples(p), LOSS, UPDATE)
    found = [t.grad for t in p.master.values()]
    assert all(g.dtype == torch.float32 for g in found)
    assert any(not torch.equal(g, g.bfloat16().float()) for g in found)
    assert all(t.grad is None for t in p.model.parameters())


# ---------------------------------------------------------------- offload = "auto"


class Gpu:
    """A device of a given capacity that holds real policies; its usage is that of their tensors."""

    def __init__(self) -> None:
        self.capacity = 10**12
        self.policies: list[Policy] = []

    @property
    def used(self) -> int:
        moved = [
            i for p in self.policies if not p.offloader.offloaded for i in p.offloader.movable()
        ]
        own = sum(t.nbytes for p in self.policies for t in p.model.parameters())
        return own + sum(i.tensor.nbytes for i in moved)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(offload, "_offloaders", WeakSet())
    monkeypatch.setattr(offload, "memory_in_use", lambda device: (made.used, made.capacity))
    return made


@pytest.mark.parametrize("fits", [True, False])
def test_auto_counts_what_is_not_allocated_yet(
    gpu: Gpu, llama: Path, qwen: Path, fits: bool
) -> None:
    """Between updates a parameter takes 2 bytes of weights, 4 of master, 8 of moments and 2 of start
    weights: 16, in two thirds of the device. When the first agent has learned, the second has no moments
    yet; later one of the two is always offloaded. The decision is the same each time."""
    gpu.policies = [policy(model, dtype="bfloat16") for model in (llama, qwen)]
    parameters = sum(t.numel() for p in gpu.policies for t in p.model.parameters())
    gpu.capacity = round(1.5 * 16 * parameters * (1.001 if fits else 0.999))
    rows = [samples(p) for p in gpu.policies]
    for step in range(2):
        for p, own in zip(gpu.policies, rows, strict=True):
            p.update(own, LOSS, UPDATE)
            here = [q for q in gpu.policies if not q.offloader.offloaded]
            assert here == (gpu.policies if fits else [p]), step
            p.offload()
            assert p.offloader.offloaded != fits
    assert gpu.used == (16 if fits else 2) * parameters


def test_a_restored_agent_is_offloaded_for_the_first_learner(gpu: Gpu, llama: Path) -> None:
    """A resumed run starts with the moments of all agents on the device."""
    first = policy(llama, dtype="bfloat16", offload="none")
    first.update(samples(first), LOSS, UPDATE)
    other = policy(llama, dtype="bfloat16", offload="optimizer")
    other.restore(first.checkpoint(1))
    assert other.offloader.absent_bytes() == 0
    first.update(samples(first), LOSS, UPDATE)
    assert other.offloader.offloaded and not first.offloader.offloaded
    other.update(samples(other), LOSS, UPDATE)
    first.update(samples(first), LOSS, UPDATE)
    assert not other.offloader.offloaded  # it has learned: its agent calls offload()


# ---------------------------------------------------------------- host memory


def test_slabs_waste_little_and_do_not_overlap() -> None:
    """Master and moments of Qwen3-4B: 48 GB. One power of two per tensor would take 68 GB."""
    layer = [(2560, 4096), (2560, 1024), (2560, 1024), (4096, 2560)] + 3 * [(2560, 9728)]
    shapes = [(151936, 2560), *36 * [*layer, (2560, 1), (2560, 1), (128, 1), (128, 1)], (2560, 1)]
    sizes = 3 * [4 * a * b for a, b in shapes]
    slabs, places = plan_slabs(sizes)
    assert sum(slabs) < 1.01 * sum(sizes)
    assert all(size.bit_count() == 1 for size in slabs)
    ends = [0] * len(slabs)
    for (slab, start), size in sorted(zip(places, sizes, strict=True)):
        assert ends[slab] <= start and start % 256 == 0
        ends[slab] = start + size
    assert all(end <= size for end, size in zip(ends, slabs, strict=True))


def test_without_pinned_memory_it_warns_once_and_uses_pageable_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def without_pinned(*sizes, pin_memory: bool = False, **named):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*sizes, **named)

    p = policy(llama, dtype="bfloat16", offload="optimizer")
    p.offloader._pinned = True
    monkeypatch.setattr(torch, "empty", without_pinned)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        p.offload()  # master and start weights
        p.update(samples(p), LOSS, UPDATE)
        p.offload()  # and moments
    assert p.offloader.offloaded
    (warning,) = caught
    assert "pinned" in str(warning.message) and "out of memory" in str(warning.message)
