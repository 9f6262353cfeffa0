"""What waits on the host comes back as it was, and the resident weights stay where they are."""

from __future__ import annotations

import warnings
from pathlib import Path
from weakref import WeakSet

import pytest
import torch

from hacrl.algorithms import make_algorithm
from hacrl.algorithms.settings import AlgorithmSettings
from hacrl.config import AgentConfig
from hacrl.policy import offload
from hacrl.policy.offload import Parking, Place, plan_slabs
from hacrl.policy.policy import Policy
from hacrl.types import Sample, Update

UPDATE = Update(0, 1, 0.8, "own", ("p",))
LOSS = make_algorithm(AlgorithmSettings(name="gspo", beta=0.1), (0.0, 1.0)).loss


def policy(model: Path, **changes) -> Policy:
    settings = {"name": "a", "model": str(model), "learning_rate": 1e-3, **changes}
    return Policy(AgentConfig(**settings), device="cpu", temperature=1.0, beta=0.1)


def samples(p: Policy) -> list[Sample]:
    made = []
    for i in range(4):
        prompt, reply = (1, 2 + i), tuple(range(9, 15 + 2 * i))
        (score,) = p.score([(prompt, reply)])
        made.append(
            Sample(
                problem_id="p",
                index=i,
                source="a",
                is_own=True,
                token_ids=prompt + reply,
                loss_mask=(0, 0) + (1,) * len(reply),
                behaviour=sum(score) / len(score),
                advantage=1.5 - i,
            )
        )
    return made


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"dtype": "float32"}])
def test_parked_between_updates_it_learns_the_same(llama: Path, changes: dict) -> None:
    """bfloat16 has a master of its own to park; in float32 the resident weights are the master."""
    parked, plain = (policy(llama, offload=o, **changes) for o in ("optimizer", "none"))
    where = {n: t.data_ptr() for n, t in parked.model.named_parameters()}
    apart = changes["dtype"] == "bfloat16"
    for _ in range(3):
        reports = [p.update(samples(p), LOSS, UPDATE) for p in (parked, plain)]
        assert reports[0] == reports[1]
        working = {n: t.data_ptr() for n, t in parked.master.items()}
        moments = [parked.optimizer.state[t]["exp_avg"] for t in parked.master.values()]
        for p in (parked, plain):
            p.rest()
        moved = [t.data_ptr() != working[n] for n, t in parked.master.items()]
        assert all(moved) if apart else not any(moved)
        for tensor, before in zip(parked.master.values(), moments, strict=True):
            now = parked.optimizer.state[tensor]["exp_avg"]
            assert now.data_ptr() != before.data_ptr() and torch.equal(now, before)
        assert all(t.grad is None for t in parked.master.values())
        assert {n: t.data_ptr() for n, t in parked.model.named_parameters()} == where
    assert reports[0].kl > 0
    a, b = (p.snapshot(3) for p in (parked, plain))  # while parked
    for one, two in ((a.model, b.model), (a.optimizer, b.optimizer)):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_parked_policy_can_be_restored(llama: Path) -> None:
    first = policy(llama, dtype="bfloat16")
    rows = samples(first)
    first.update(rows, LOSS, UPDATE)
    other = policy(llama, dtype="bfloat16", offload="optimizer")
    other.update(rows, LOSS, UPDATE)
    other.update(rows, LOSS, UPDATE)
    other.rest()
    other.restore(first.snapshot(1))
    for p in (first, other):
        p.update(rows, LOSS, UPDATE)
    assert all(torch.equal(first.master[n], other.master[n]) for n in first.master)


def test_gradients_of_bfloat16_are_summed_in_float32(llama: Path) -> None:
    """Four micro-batches of one row each: the sum has more digits than bfloat16, and no resident
    tensor is left with a gradient."""
    p = policy(llama, dtype="bfloat16", microbatch_tokens=1, max_grad_norm=1e9)
    p.update(samples(p), LOSS, UPDATE)
    found = [t.grad for t in p.master.values()]
    assert all(g.dtype == torch.float32 for g in found)
    assert any(not torch.equal(g, g.bfloat16().float()) for g in found)
    assert all(t.grad is None for t in p.model.parameters())


# ---------------------------------------------------------------- when a device is short of memory


class Gpu:
    """A device of so many bytes that holds real policies; its figures are those of their tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.whole = 0
        self.policies: list[Policy] = []
        monkeypatch.setattr(offload, "_tenants", WeakSet())
        monkeypatch.setattr(offload, "memory_in_use", lambda device: (self.used, self.whole))

    @property
    def used(self) -> int:
        used = 0
        for p in self.policies:
            used += sum(t.nbytes for t in p.model.parameters())
            used += sum(s.tensor.nbytes for s in p.turns.movable()) * (not p.turns.parking.parked)
        return used

    @property
    def parameters(self) -> int:
        return sum(t.numel() for p in self.policies for t in p.model.parameters())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.mark.parametrize("fits", [True, False])
def test_auto_counts_what_is_not_there_yet(gpu: Gpu, llama: Path, qwen: Path, fits: bool) -> None:
    """At rest a parameter takes 2 bytes of weights, 4 of master, 8 of moments and 2 of start weights:
    16, and two thirds of the device are for that. When the first agent has learned, the second has no
    moments yet; later one of the two is parked whenever the other decides. The decision stays."""
    for model in (llama, qwen):
        gpu.policies.append(policy(model, dtype="bfloat16"))
    gpu.whole = round(1.5 * 16 * gpu.parameters * (1.001 if fits else 0.999))
    rows = [samples(p) for p in gpu.policies]
    for step in range(2):
        for p, own in zip(gpu.policies, rows, strict=True):
            p.update(own, LOSS, UPDATE)
            here = [q for q in gpu.policies if not q.turns.parking.parked]
            assert here == (gpu.policies if fits else [p]), step
            p.rest()
            assert p.turns.parking.parked != fits
    assert gpu.used == (16 if fits else 2) * gpu.parameters


def test_absent_is_what_waits_and_what_is_still_to_be_made(llama: Path) -> None:
    """By hand, bytes a parameter: 8 of moments before the first update, none after it, and parked 4 of
    master, 8 of moments and 2 of start weights. In float32 the master is resident."""
    for dtype, waits in (("bfloat16", 4 + 8 + 2), ("float32", 8 + 4)):
        p = policy(llama, dtype=dtype, offload="optimizer")
        count = sum(t.numel() for t in p.model.parameters())
        assert p.turns.absent_bytes() == 8 * count
        p.update(samples(p), LOSS, UPDATE)
        assert p.turns.absent_bytes() == 0
        p.rest()
        assert p.turns.absent_bytes() == waits * count
        frozen = policy(llama, dtype=dtype, learn=False)
        assert frozen.turns.absent_bytes() == 0


def test_who_was_restored_steps_aside_for_the_first_learner(gpu: Gpu, llama: Path) -> None:
    """A resumed run begins with everybody's moments on the device, before anybody came to rest."""
    gpu.whole = 10**12
    first = policy(llama, dtype="bfloat16", offload="none")
    first.update(samples(first), LOSS, UPDATE)
    other = policy(llama, dtype="bfloat16", offload="optimizer")
    other.restore(first.snapshot(1))
    assert other.turns.absent_bytes() == 0
    first.update(samples(first), LOSS, UPDATE)
    assert other.turns.parking.parked and not first.turns.parking.parked
    other.update(samples(other), LOSS, UPDATE)
    first.update(samples(first), LOSS, UPDATE)
    assert not other.turns.parking.parked  # it had its turn: its agent lets it rest


def test_cuda_is_the_first_gpu() -> None:
    assert offload._place(torch.device("cuda")) == offload._place(torch.device("cuda:0"))
    assert offload._place(torch.device("cuda")) != offload._place(torch.device("cuda:1"))


# ---------------------------------------------------------------- the host's memory


def test_slabs_by_hand() -> None:
    """In slabs of 1024, sizes rounded up to 256. 2560 needs a block of 4096, whose last 1536 take the
    1024 and one 300 (as 512). 512 + 256 are left to place: the largest power of two in that is 512,
    which takes the other 300, and then 256 takes the 10."""
    plan = plan_slabs([10, 300, 2560, 300, 1024], slab=1024)
    assert plan.slabs == (4096, 512, 256)
    assert plan.starts == ((2, 0), (0, 3584), (0, 0), (1, 0), (0, 2560))


def test_slabs_waste_little_and_do_not_overlap() -> None:
    """Master and moments of Qwen3-4B. Tensor by tensor in powers of two they take 68 GB, not 48."""
    layer = [(2560, 4096), (2560, 1024), (2560, 1024), (4096, 2560)] + 3 * [(2560, 9728)]
    shapes = [(151936, 2560), *36 * [*layer, (2560, 1), (2560, 1), (128, 1), (128, 1)], (2560, 1)]
    sizes = 3 * [4 * a * b for a, b in shapes]
    plan = plan_slabs(sizes)
    assert sum(plan.slabs) < 1.01 * sum(sizes)
    assert all(size.bit_count() == 1 for size in plan.slabs)
    ends = [0] * len(plan.slabs)
    for (slab, start), size in sorted(zip(plan.starts, sizes, strict=True)):
        assert ends[slab] <= start and start % 256 == 0
        ends[slab] = start + size
    assert all(end <= size for end, size in zip(ends, plan.slabs, strict=True))


def test_where_no_memory_can_be_pinned_it_waits_in_ordinary_memory(monkeypatch) -> None:
    """Told once, and the run goes on."""
    empty = torch.empty

    def without_pinned(*sizes, pin_memory: bool = False, **named):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*sizes, **named)

    monkeypatch.setattr(torch, "empty", without_pinned)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    here = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    parking = Parking(torch.device("cuda"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        parking.park(Place(n, t, lambda x, n=n: here.update({n: x})) for n, t in here.items())
        here["c"] = torch.zeros(3)
        parking.parked = False
        parking.park(Place(n, t, lambda x, n=n: here.update({n: x})) for n, t in here.items())
    assert parking.parked
    (warning,) = told
    assert "pinned memory" in str(warning.message) and "out of memory" in str(warning.message)
    assert (
        warning.filename == offload.__file__
    )  # not torch's: filters by module must see whose it is
    assert here["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and here["b"].tolist() == [1] * 5
    assert here["b"].dtype == torch.bfloat16
