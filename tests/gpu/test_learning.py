"""Scoring, updates and offload on a GPU, and the kernels against plain torch.

Run on a machine with a GPU: python -m pytest -m gpu tests/gpu
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import model_of
from torch import Tensor

from hacrl.algorithms import make_algorithm, make_settings
from hacrl.config import AgentConfig
from hacrl.policy import fuse, head
from hacrl.policy.attention import Rule
from hacrl.policy.batch import make_inputs
from hacrl.policy.logprobs import LogProbs
from hacrl.policy.packing import Copies, Layout, Packed, kernel_serves, pack
from hacrl.policy.policy import Policy
from hacrl.sampling.base import Request
from hacrl.types import Sample, Update

pytestmark = pytest.mark.gpu

LENGTHS = (70, 33, 33, 1, 129)
APART = pack([range(n) for n in LENGTHS])
SHARED = pack(
    [[*range(30), 100 + b, *range(n)] for b, n in enumerate((40, 1, 129))]
    + [range(n) for n in (33, 1)]
    + [[*range(1, 8), 200 + b, *range(n)] for b, n in enumerate((1, 60))],
    [30, 30, 30, 20, 0, 7, 7],
)
"""Three sequences with one prompt, two that share nothing, two with another prompt."""


def near(mine: Tensor, wanted: Tensor, limit: float = 0.02) -> None:
    """Equal up to a fraction of the largest number; the default is what bfloat16 allows."""
    assert (mine.float() - wanted.float()).abs().max() <= limit * wanted.float().abs().max()


@pytest.mark.parametrize("layout", [APART, SHARED], ids=["apart", "shared"])
@pytest.mark.parametrize("window", [None, 16, 100])
@pytest.mark.parametrize(("heads", "keys", "size"), [(4, 4, 64), (8, 2, 128), (4, 1, 256)])
def test_the_attention_kernel(
    window: int | None, heads: int, keys: int, size: int, layout: Layout
) -> None:
    """Values and gradients against float32, with grouped heads and windows."""
    torch.manual_seed(0)
    tokens = layout.tokens
    given = [torch.randn(1, n, tokens, size, device="cuda") for n in (heads, keys, keys)]
    out_gradient = torch.randn(1, tokens, heads, size, device="cuda")
    rule = Rule(size**-0.5, window, None)
    packed = Packed(layout, torch.device("cuda"))
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        tensors = [t.to(torch.bfloat16).to(dtype).requires_grad_() for t in given]
        assert kernel_serves(tensors[0], tensors[2], rule) == (dtype == torch.bfloat16)
        out = packed.attend(0, *tensors, rule)
        gradients = torch.autograd.grad(out, tensors, out_gradient.to(dtype))
        found.append([out.detach(), *gradients])
    for mine, wanted in zip(*found, strict=True):
        near(mine, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (2, 24), (1500,)])
def test_gradients_of_copies_are_summed_in_one_order(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Against float64, and the same bits each time; one row is never taken, one 65 times."""
    torch.manual_seed(0)
    row = torch.cat([torch.tensor([0] * 65), torch.randint(2, 50, (200,))])[torch.randperm(265)]
    copies = Copies(row.cuda(), of=50)
    values = torch.randn(50, *shape, device="cuda").to(dtype).requires_grad_()
    given = torch.randn(265, *shape, device="cuda").to(dtype)
    out = copies.taken_from(values)
    assert torch.equal(out, values[copies.row_F])
    (found,) = torch.autograd.grad(out, values, given, retain_graph=True)
    wanted = torch.zeros(50, *shape, dtype=torch.float64).index_add_(0, row, given.cpu().double())
    assert found.dtype == dtype and not found[1].any()
    near(found.cpu(), wanted, 0.004 if dtype == torch.bfloat16 else 1e-6)
    for _ in range(8):
        assert torch.equal(found, torch.autograd.grad(out, values, given, retain_graph=True)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [5, 1000])
def test_the_head_kernels_equal_log_softmax(dtype: torch.dtype, tokens: int, monkeypatch) -> None:
    count, size, words, temperature = 37, 64, 10_007, 0.7
    monkeypatch.setitem(head.CHUNK_BYTES, "cuda", tokens * words * dtype.itemsize)
    torch.manual_seed(0)
    hidden = torch.randn(count, size, device="cuda").to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(words, size, device="cuda")).to(dtype).requires_grad_()
    target = torch.randint(0, words, (count,), device="cuda")
    gradient = torch.randn(count, device="cuda") * (torch.arange(count, device="cuda") % 3 > 0)
    mine = head.head_logprobs(hidden, weight, None, target, temperature)
    logits = (hidden @ weight.t()).float() / temperature
    wanted = logits.log_softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)
    assert torch.allclose(mine, wanted, atol=1e-3)
    for one, two in zip(
        torch.autograd.grad(mine, (hidden, weight), gradient),
        torch.autograd.grad(wanted, (hidden, weight), gradient),
        strict=True,
    ):
        near(one, two, 0.02 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("family", ["tied", "qwen", "gemma3"])
def test_packed_bfloat16_equals_padded_float32(family: str) -> None:
    model = model_of(family)
    lengths = (70, 33, 33, 2, 129)
    drawn = torch.Generator().manual_seed(4)
    ids = [torch.randint(0, 300, (n,), generator=drawn).tolist() for n in lengths]
    masks = [[0] + [1] * (n - 1) for n in lengths]
    plain = LogProbs(model, 1.0)
    plain.packs = False
    with torch.no_grad():
        wanted = plain(make_inputs(ids, masks, 0, torch.device("cpu")))
    packed = LogProbs(model.to("cuda", torch.bfloat16), 1.0)
    assert packed.packs
    found = packed(make_inputs(ids, masks, 0, torch.device("cuda"))).detach().cpu()
    assert (found - wanted).abs().max() < 0.1 * wanted[wanted != 0].std()
    assert (found - wanted).abs().mean() < 0.02 * wanted[wanted != 0].std()


LOSS = make_algorithm(make_settings(epsilon_low=0.1, epsilon_high=0.1)).loss

UPDATE = Update(0, 0.8, "peers", ("p",))


def policy(folder: Path, **changes) -> Policy:
    settings = {"name": "a", "model": str(folder), "learning_rate": 1e-4, **changes}
    return Policy(AgentConfig(**settings), device="cuda", temperature=1.0, beta=0.0)


def samples(p: Policy, count: int = 12) -> list[Sample]:
    """Peers' samples, three to a prompt, every third outside the trust interval."""
    made = []
    for i in range(count):
        prompt, reply = (1, 2 + i // 3, 9), tuple((7 * t + i) % 250 for t in range(12 + 3 * i))
        (score,) = p.score([(prompt, reply)])
        s = 1.5 if i % 3 == 0 else 0.9
        mask, mean = (0,) * 3 + (1,) * len(reply), sum(score) / len(score)
        behaviour, advantage = mean - math.log(s), (-1.0) ** i
        made.append(
            Sample("p", i, "b", False, prompt + reply, mask, behaviour, advantage=advantage)
        )
    return made


def similar(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, gradient in one.items():
        wanted = other[name]
        cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), wanted.flatten(), dim=0)
        assert cosine > 0.99 or wanted.abs().max() == 0, name


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"lora": {"rank": 4}}])
def test_compiled_and_plain_updates_agree(llama: Path, changes: dict, monkeypatch) -> None:
    plain = policy(llama, microbatch_tokens=200, **changes)
    monkeypatch.setattr(fuse, "WORTH_COMPILING", 0)
    compiled = policy(llama, microbatch_tokens=200, **changes)
    assert compiled.logprobs.fusion and not plain.logprobs.fusion
    rows = samples(plain)
    one, two = (p.update(rows, LOSS, UPDATE) for p in (compiled, plain))
    # Rounding differs: a row's mean log-probability by a hundredth or two.
    assert one.ratios == pytest.approx(two.ratios, rel=0.05)
    assert one.loss == pytest.approx(two.loss, abs=0.01)
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=0.05)
    similar(*({n: m.grad for n, m in p.master.items()} for p in (compiled, plain)))


def test_shared_prompts_and_one_prompt_each_agree(llama: Path) -> None:
    """Scores, and the gradient of an update."""
    one, two = (policy(llama, microbatch_tokens=200) for _ in range(2))
    assert one.logprobs.shares
    two.logprobs.shares = False
    rows = samples(one)
    pairs = [(r.token_ids[:3], r.token_ids[3:]) for r in rows]
    near(*(torch.cat([torch.tensor(x) for x in p.score(pairs)]) for p in (one, two)), limit=0.05)
    similar(*(p.gradient(rows, range(len(rows)), LOSS, UPDATE) for p in (one, two)))


def test_offloaded_tensors_leave_the_device_and_come_back(llama: Path) -> None:
    moving, staying = (policy(llama, offload=o) for o in ("optimizer", "none"))
    where = {n: t.data_ptr() for n, t in moving.model.named_parameters()}
    rows = samples(staying)
    for _ in range(2):
        for p in (moving, staying):
            p.update(rows, LOSS, UPDATE)
        before = torch.cuda.memory_allocated()
        moving.offload()
        count = sum(t.numel() for t in moving.master.values())
        assert before - torch.cuda.memory_allocated() >= 16 * count  # master, moments, gradients
        assert {t.device.type for t in moving.master.values()} == {"cpu"}
        assert all(t.is_pinned() for t in moving.master.values())
        moving.score([((1, 2), (3, 4))])  # needs none of it
    assert {n: t.data_ptr() for n, t in moving.model.named_parameters()} == where
    for name, master in moving.master.items():
        assert torch.allclose(master, staying.master[name].cpu(), atol=1e-4)


@pytest.mark.parametrize(
    "changes", [{}, {"dtype": "float32"}, {"lora": {"rank": 4}}, {"offload": "optimizer"}]
)
def test_a_restored_policy_continues_like_the_original(llama: Path, changes: dict) -> None:
    """Fused AdamW needs its step counter on the device, which is never offloaded; a checkpoint has it
    on the host. The restored policy has learned before."""
    original, restored = (policy(llama, **changes) for _ in range(2))
    rows = samples(original)
    for _ in range(2):
        original.update(rows, LOSS, UPDATE)
    restored.update(rows, LOSS, UPDATE)
    for p in (original, restored):
        p.offload()
    restored.restore(original.checkpoint(step=0))
    one, two = (p.update(rows, LOSS, UPDATE) for p in (original, restored))
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-3)
    for name, master in original.master.items():
        assert torch.allclose(master, restored.master[name], rtol=0, atol=1e-6), name
        step = restored.optimizer.state[restored.master[name]]["step"]
        assert step.is_cuda and step.item() == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_optimizer_steps_like_plain_adamw(llama: Path, dtype: str) -> None:
    """Tensor by tensor in torch, with the same clipped gradients, a rate per update, and an update that
    is skipped because its loss is not finite."""
    p = policy(llama, dtype=dtype, weight_decay=0.1, warmup_updates=3, max_grad_norm=0.1)
    rows = samples(p)
    plain = [m.detach().clone().requires_grad_() for m in p.master.values()]
    adam = torch.optim.AdamW(
        plain, betas=p.agent.betas, weight_decay=0.1, foreach=False, fused=False
    )
    broken = [replace(r, weight=float("inf")) for r in rows]
    for batch in (rows, broken, rows):
        report = p.update(batch, LOSS, UPDATE)
        assert report.skipped == (batch is broken)
        if not report.skipped:
            adam.param_groups[0]["lr"] = report.learning_rate
            for mine, master in zip(plain, p.master.values(), strict=True):
                mine.grad = master.grad.clone()
            adam.step()
    for mine, master in zip(plain, p.master.values(), strict=True):
        assert torch.allclose(mine, master, rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_policy_on_a_gpu_that_is_not_the_current_one(llama: Path) -> None:
    """Scores, replies and gradients are those of the first GPU: kernels run where the tensors are."""
    one, two = (policy(llama, device=d) for d in ("cuda:0", "cuda:1"))
    assert torch.cuda.current_device() == 0
    rows = samples(one)
    pairs = [(r.token_ids[:3], r.token_ids[3:]) for r in rows]
    near(*(torch.cat([torch.tensor(x) for x in p.score(pairs)]) for p in (one, two)))
    asked = [Request((1, 2 + i, 9), i, 40) for i in range(8)]
    first, second = ([r.token_ids for r in p.sampler.sample(asked, 0.0)] for p in (one, two))
    assert first == second
    found, wanted = (p.gradient(rows, range(len(rows)), LOSS, UPDATE) for p in (two, one))
    similar({n: g.to("cuda:0") for n, g in found.items()}, wanted)
