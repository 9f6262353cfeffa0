"""Scoring and updates on a GPU: the kernels against the plain computation, and what waits on the host.

Run where there is one: python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hacrl.algorithms import make_algorithm, make_settings
from hacrl.config import AgentConfig
from hacrl.policy import fuse, head
from hacrl.policy.attention import Rule
from hacrl.policy.batch import make_inputs
from hacrl.policy.gradients import GradientPass
from hacrl.policy.logprobs import LogProbs
from hacrl.policy.packing import Copies, Layout, Packed, kernel_serves, pack
from hacrl.policy.policy import Policy
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


def near(mine: Tensor, wanted: Tensor, share: float = 0.02) -> None:
    """To a share of the largest number: what bfloat16 leaves."""
    assert (mine.float() - wanted.float()).abs().max() <= share * wanted.float().abs().max()


@pytest.mark.parametrize("layout", [APART, SHARED], ids=["apart", "shared"])
@pytest.mark.parametrize("window", [None, 16, 100])
@pytest.mark.parametrize(("heads", "keys", "size"), [(4, 4, 64), (8, 2, 128), (4, 1, 256)])
def test_the_kernel_attends_as_the_plain_way_does(
    window: int | None, heads: int, keys: int, size: int, layout: Layout
) -> None:
    """Values and gradients, grouped heads and windows included, against float32."""
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
def test_gradients_of_copies_are_added_in_one_order(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Against float64; one row is never taken, one 65 times; and the same bits each time."""
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
def test_the_heads_kernels_give_what_log_softmax_gives(
    dtype: torch.dtype, tokens: int, monkeypatch
) -> None:
    count, size, words, temperature = 37, 64, 10_007, 0.7
    monkeypatch.setitem(head.CHUNK_BYTES, "cuda", tokens * words * dtype.itemsize)
    torch.manual_seed(0)
    hidden = torch.randn(count, size, device="cuda").to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(words, size, device="cuda")).to(dtype).requires_grad_()
    target = torch.randint(0, words, (count,), device="cuda")
    gradient = torch.randn(count, device="cuda") * (torch.arange(count, device="cuda") % 3 > 0)
    mine, lse = head.head_logprobs(hidden, weight, None, target, temperature)
    logits = (hidden @ weight.t()).float() / temperature
    wanted = logits.log_softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)
    assert torch.allclose(mine, wanted, atol=1e-3)
    assert torch.allclose(lse, logits.logsumexp(1), atol=1e-3)
    for one, two in zip(
        torch.autograd.grad(mine, (hidden, weight), gradient),
        torch.autograd.grad(wanted, (hidden, weight), gradient),
        strict=True,
    ):
        near(one, two, 0.02 if dtype == torch.bfloat16 else 1e-3)


def build(family: str):
    sizes = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "attn_implementation": "sdpa",
    }
    torch.manual_seed(3)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes))
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, sliding_window=16, layer_types=types))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_packed_bfloat16_equals_padded_float32(family: str) -> None:
    model = build(family).eval()
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


def policy(folder: Path, **changes) -> Policy:
    settings = {"name": "a", "model": str(folder), "learning_rate": 1e-4, **changes}
    return Policy(AgentConfig(**settings), device="cuda", temperature=1.0, beta=0.0)


def samples(p: Policy, count: int = 12) -> list[Sample]:
    """Peers' rows, every third outside the trust interval, three to a prompt."""
    made = []
    for i in range(count):
        prompt, reply = (1, 2 + i // 3, 9), tuple((7 * t + i) % 250 for t in range(12 + 3 * i))
        (score,) = p.score([(prompt, reply)])
        s = 1.5 if i % 3 == 0 else 0.9
        made.append(
            Sample(
                problem_id="p",
                index=i,
                source="b",
                is_own=False,
                token_ids=prompt + reply,
                loss_mask=(0,) * 3 + (1,) * len(reply),
                behaviour=sum(score) / len(score) - math.log(s),
                advantage=(-1.0) ** i,
            )
        )
    return made


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"lora": {"rank": 4}}])
def test_pruned_and_plain_updates_agree(
    llama: Path, changes: dict, fused: bool, monkeypatch
) -> None:
    """Passes that only tell who survives, and the survivors', against a graph over all rows; with the
    small parts compiled, against one without."""
    monkeypatch.setattr("hacrl.policy.gradients.THIN_BELOW", {"cuda": 0.75})  # 2 of 3 survive
    plain = policy(llama, prune=False, microbatch_tokens=200, **changes)
    if fused:
        monkeypatch.setattr(fuse, "WORTH_COMPILING", 0)
    pruned = policy(llama, prune=True, microbatch_tokens=200, **changes)
    assert (pruned.logprobs.fusion is not None) == fused
    rows = samples(plain)
    update = Update(0, 2, 0.8, "peers", ("p",))
    one, two = (p.update(rows, LOSS, update) for p in (pruned, plain))
    assert one.pruned_backward == 4 or (
        changes.get("gradient_checkpointing") and one.pruned_backward
    )
    # Compiled parts round otherwise: a row's mean log-probability by a hundredth or two.
    assert one.ratios == pytest.approx(two.ratios, rel=0.05 if fused else 1e-3)
    assert one.loss == pytest.approx(two.loss, abs=0.01 if fused else 1e-3)
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=0.05)
    for name, master in pruned.master.items():
        other = plain.master[name].grad
        assert other is not None and master.grad is not None
        similar = torch.nn.functional.cosine_similarity(
            master.grad.flatten(), other.flatten(), dim=0
        )
        assert similar > 0.99 or other.abs().max() == 0, name


def test_shared_prompts_and_prompts_of_their_own_agree(llama: Path) -> None:
    """Scores, and the gradient of an update."""
    one, two = (policy(llama, prune=False, microbatch_tokens=200) for _ in range(2))
    assert one.logprobs.shares
    two.logprobs.shares = False
    rows = samples(one)
    pairs = [(r.token_ids[:3], r.token_ids[3:]) for r in rows]
    near(*(torch.cat([torch.tensor(x) for x in p.score(pairs)]) for p in (one, two)), share=0.05)
    update = Update(0, 2, 0.8, "peers", ("p",))
    shared, apart = (p.gradient(rows, range(len(rows)), LOSS, update) for p in (one, two))
    for name, gradient in shared.items():
        similar = torch.nn.functional.cosine_similarity(
            gradient.flatten(), apart[name].flatten(), dim=0
        )
        assert similar > 0.99 or apart[name].abs().max() == 0, name


def test_scouts_are_not_waited_for(llama: Path, monkeypatch) -> None:
    """A pass is begun and finished, and its survivors asked for after the next one is begun, without
    anything that blocks: a copy, or a mask that is counted, would wait for what was begun meanwhile."""
    monkeypatch.setattr(fuse, "WORTH_COMPILING", 0)
    monkeypatch.setattr("hacrl.policy.gradients.THIN_BELOW", {"cuda": 2.0})  # always
    p = policy(llama, microbatch_tokens=200)
    rows, update = samples(p, 24), Update(0, 2, 0.8, "peers", ("p",))
    p.update(rows, LOSS, update)  # compiles
    rows = samples(p, 24)
    one, later = GradientPass(p, rows, LOSS, update), {}
    batches = one._microbatches(range(len(rows)))
    assert len(batches) > 3
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            begun = one._begin(batch)
            survived, done = one._finish(begun)
            later |= survived
            assert not done and one.scouting == [begun]
        later |= one._ask_scouts()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sorted(later) == [i for i in range(24) if i % 3]


def test_what_waits_on_the_host_leaves_the_device_and_comes_back(llama: Path) -> None:
    parked, plain = (policy(llama, offload=o) for o in ("optimizer", "none"))
    where = {n: t.data_ptr() for n, t in parked.model.named_parameters()}
    rows = samples(plain)
    update = Update(0, 1, 0.8, "peers", ("p",))
    for _ in range(2):
        for p in (parked, plain):
            p.update(rows, LOSS, update)
        before = torch.cuda.memory_allocated()
        parked.offload()
        count = sum(t.numel() for t in parked.master.values())
        assert before - torch.cuda.memory_allocated() >= 16 * count  # master, moments, gradients
        assert {t.device.type for t in parked.master.values()} == {"cpu"}
        assert all(t.is_pinned() for t in parked.master.values())
        parked.score([((1, 2), (3, 4))])  # needs none of it
    assert {n: t.data_ptr() for n, t in parked.model.named_parameters()} == where
    for name, master in parked.master.items():
        assert torch.allclose(master, plain.master[name].cpu(), atol=1e-4)
