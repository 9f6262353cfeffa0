"""Packed sequences, with and without shared prompts, equal padded ones in values and gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ratio_rows import assert_equal_state, learn, policy, rows_of
from small_models import assert_same_learned, learned, model_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from hacrl.pocket import pocket_path
from hacrl.policy import packing
from hacrl.policy.attention import Rule, causal
from hacrl.policy.batch import Inputs, make_inputs
from hacrl.policy.logprobs import LogProbs
from hacrl.policy.microbatch import plan_microbatches
from hacrl.policy.packing import Copies, Packed, pack

CPU = torch.device("cpu")
A, B = (1,) * 8, (2,) * 8  # prompts


# ---------------------------------------------------------------- micro-batches and layout


@pytest.mark.parametrize(
    ("lengths", "tokens", "options", "planned"),
    [
        ([5, 9, 4, 8], 14, {}, [[1, 0], [3, 2]]),
        ([5, 30, 5], 10, {}, [[1], [0, 2]]),
        ([], 10, {}, []),
        # Equally full instead of 20, 20 and 4; never above the limit, nor one micro-batch more.
        ([4] * 11, 20, {}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]),
        ([9, 6, 6], 12, {}, [[0], [1, 2]]),
        ([5, 5, 5, 1], 10, {}, [[0, 1], [2, 3]]),
        ([5, 9, 4, 8], 18, {"padded": True}, [[1, 3], [0, 2]]),
        ([5, 9, 4, 8], 14, {"padded": True}, [[1], [3], [0, 2]]),
        # A prompt counts once; a further row costs its own tokens and an eighth of the prompt.
        ([12] * 3, 22, {"prompts": [A] * 3}, [[0, 1, 2]]),
        ([12] * 3, 21, {"prompts": [A] * 3}, [[0, 1], [2]]),
        # Rows of one prompt are together, another prompt fills the rest.
        ([12, 13, 12, 13], 34, {"prompts": [A, B, A, B]}, [[1, 3, 0], [2]]),
        ([12, 13, 12, 33], 34, {"prompts": [A, B, A, B]}, [[3], [1, 0, 2]]),
        ([30, 9, 9], 30, {"prompts": [A, A, B]}, [[0], [1, 2]]),
    ],
)
def test_microbatches_are_planned_from_lengths(lengths, tokens, options, planned) -> None:
    assert plan_microbatches(lengths, tokens, **options) == planned


def test_layout() -> None:
    """The third sequence shares the first one's prompt. Equal tokens that are no prompt, and a prompt
    of one sequence only, are not shared."""
    row = [(5, 6, 7), (4, 5, 6), (5, 6, 8, 9), (7, 7)]
    masks = [(0, 0, 1), (0, 0, 1), (0, 0, 1, 1), (0, 1)]
    inputs = make_inputs(row, masks, 0, CPU, share=True)
    layout = inputs.layout
    assert layout.lengths == (3, 3, 4, 2) and layout.prompts == (2, 0, 2, 0)
    assert layout.index_F.tolist() == [*(0, 1, 2), *(3, 4, 5), *(0, 1, 6, 7), *(8, 9)]
    apart = pack(row)
    assert apart.tokens == 12 and not apart.shares and apart.index_F.tolist() == list(range(12))
    assert inputs.ids_N.tolist() == [5, 6, 7, 4, 5, 6, 8, 9, 7, 7]
    assert inputs.position_N.tolist() == [0, 1, 2, 0, 1, 2, 2, 3, 0, 1]
    assert inputs.target_M.tolist() == [7, 6, 8, 9, 7]
    assert inputs.predictor_M.tolist() == [1, 4, 1, 6, 8]  # the same token predicts 7 and 8


# ---------------------------------------------------------------- attention

LAYOUT = pack(
    [[1] * 6 + [b] + [2] * n for b, n in enumerate((3, 0, 8))]
    + [[5] * 4, [7]]
    + [[3, 3, 9 + b] for b in range(2)],
    [6, 6, 6, 3, 1, 2, 2],
)


def by_hand(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, *most: int, **how: Any
) -> Tensor:
    """The documented result of the kernel: the queries of a piece are the last of its keys."""
    window = how["window_size"][0]
    assert most[0] >= queries.diff().max() and most[1] >= keys.diff().max()
    rule = Rule(how["scale"], None if window < 0 else window + 1, None)
    parts = []
    for i in range(len(queries) - 1):
        q = query[queries[i] : queries[i + 1]].transpose(0, 1).unsqueeze(0)
        k, v = (t[keys[i] : keys[i + 1]].transpose(0, 1).unsqueeze(0) for t in (key, value))
        parts.append(causal(q, k, v, rule)[0])
    return torch.cat(parts)


@pytest.mark.parametrize("window", [None, 4, 14, 15, 100])
@pytest.mark.parametrize("kernel", [True, False])
def test_attention_is_that_of_whole_sequences(
    window: int | None, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, with the kernel's boundaries and by length, against each sequence alone."""
    if kernel:
        monkeypatch.setattr(packing, "varlen_attn", by_hand)
        monkeypatch.setattr(packing, "kernel_serves", lambda *_: True)
    torch.manual_seed(0)
    given = [torch.randn(1, n, LAYOUT.tokens, 8, requires_grad=True) for n in (4, 2, 2)]
    rule = Rule(0.3, window, None)
    out_NHD = Packed(LAYOUT, CPU).attend(0, *given, rule)[0]
    alone_NHD = torch.full_like(out_NHD, torch.nan)
    for at in LAYOUT.index_F.split(LAYOUT.lengths):
        alone_NHD[at] = causal(*(t[:, :, at] for t in given), rule)[0]
    assert torch.allclose(out_NHD, alone_NHD, atol=1e-6)
    weight = torch.randn_like(out_NHD)
    found, wanted = (torch.autograd.grad((o * weight).sum(), given) for o in (out_NHD, alone_NHD))
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_attention_by_hand() -> None:
    """One head of size 1 and scores of 0: the output is the mean of the visible values. Of the values
    1 2 3 | 4 8 the second sequence sees 4, then (4 + 8) / 2; with window 2 the third token of the first
    sees (2 + 3) / 2."""
    value = torch.tensor([1.0, 2, 3, 4, 8]).view(1, 1, 5, 1)
    packed = Packed(pack([(1, 2, 3), (4, 5)]), CPU)
    zero = torch.zeros_like(value)
    for window, third in ((None, 2), (2, 2.5)):
        out = packed.attend(0, zero, zero, value, Rule(1.0, window, None))
        assert out.flatten().tolist() == pytest.approx([1, 1.5, third, 4, 6])


def test_gradients_of_copies_are_added_in_float32() -> None:
    """256 and sixty-four ones: in bfloat16 each one is lost."""
    values = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    out = Copies(torch.tensor([0] * 65 + [1]), of=2).taken_from(values)
    out.backward(torch.tensor([[256.0], *[[1.0]] * 65], dtype=torch.bfloat16))
    assert values.grad is not None and values.grad.flatten().tolist() == [320.0, 1.0]


# ---------------------------------------------------------------- models


def some_inputs(share: bool) -> Inputs:
    """Groups of three, two and one; prompts shorter than the window of six, equal to it and longer."""
    draw = torch.Generator().manual_seed(2)
    ids, masks = [], []
    for prompt, replies in ((6, (9, 1, 4)), (11, (5, 12)), (1, (3, 3)), (4, (7,))):
        begin = torch.randint(0, 200, (prompt,), generator=draw).tolist()
        for n in replies:
            ids.append(begin + torch.randint(0, 200, (n,), generator=draw).tolist())
            masks.append([0] * prompt + [1] * n)
    order = [3, 0, 5, 1, 4, 7, 2, 6]  # groups mixed
    return make_inputs([ids[i] for i in order], [masks[i] for i in order], 0, CPU, share=share)


@pytest.mark.parametrize(
    "family", ["tied", "qwen2", "qwen", "gemma3", "gemma2", "gpt2", "wren", "finch", "heron"]
)
def test_packed_and_shared_equal_padded(family: str) -> None:
    """GPT-2 learns positions one by one, so a sequence must start at position 0."""
    if family in ("wren", "finch", "heron"):
        model = AutoModelForCausalLM.from_pretrained(pocket_path(family), dtype=torch.float32)
    else:
        model = model_of(family)
    model.config._attn_implementation = "sdpa"
    logprobs = LogProbs(model.eval(), 0.9)
    assert logprobs.packs and logprobs.shares
    shared, apart = some_inputs(True), some_inputs(False)
    assert (shared.layout.tokens, apart.layout.tokens) == (66, 90)
    found = [learned(logprobs, inputs) for inputs in (shared, apart)]
    logprobs.packs = False
    if family == "gemma2":  # with its score cap, which transformers' sdpa ignores
        model.config._attn_implementation = "eager"
    padded = learned(logprobs, apart)
    for packed in found:
        assert_same_learned(packed, padded)


def test_two_threads_give_the_same_bits_each_time() -> None:
    """32 replies of 60 tokens to one prompt of 60."""
    logprobs = LogProbs(model_of("llama"), 1.0)
    draw = torch.Generator().manual_seed(0)
    begin = torch.randint(0, 300, (60,), generator=draw).tolist()
    ids = [begin + torch.randint(0, 300, (60 - n % 3,), generator=draw).tolist() for n in range(32)]
    masks = [[0] * 60 + [1] * (len(row) - 60) for row in ids]
    inputs = make_inputs(ids, masks, 0, CPU, share=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = []
        for _ in range(4):
            values, gradients = learned(logprobs, inputs)
            found.append([values, *(g.clone() for g in gradients.values())])
    finally:
        torch.set_num_threads(threads)
    assert all(all(map(torch.equal, other, found[0])) for other in found)


# ---------------------------------------------------------------- updates


@pytest.mark.parametrize("tokens", [40, 16384])
@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"lora": {"rank": 4}}])
def test_updates_are_the_same_with_shared_prompts(llama: Path, changes: dict, tokens: int) -> None:
    shared, apart = (policy(llama, microbatch_tokens=tokens, **changes) for _ in range(2))
    assert shared.logprobs.shares
    apart.logprobs.shares = False
    samples = rows_of(apart, shared=True)
    one, two = (learn(p, samples) for p in (shared, apart))
    assert_equal_state(shared, apart)
    assert one.loss == pytest.approx(two.loss, abs=1e-6)


def test_a_shared_prompt_is_computed_once(llama: Path) -> None:
    """Tokens in the layers: ten rows with two prompts (two have advantage 0) have 94 reply tokens and 7
    of prompts, otherwise 95 + 5 x 3 + 5 x 4."""
    p = policy(llama)
    samples = rows_of(p, shared=True)
    pairs = [(s.prompt_ids, s.token_ids[len(s.prompt_ids) :]) for s in samples]
    seen: list[int] = []
    p.model.model.norm.register_forward_hook(lambda *a: seen.append(a[2].shape[1]))
    for shares in (True, False):
        p.logprobs.shares = shares
        learn(p, samples)
        p.score(pairs)
    assert seen == [102, 121, 130, 156]


def test_another_attention_setting_is_used_with_padded_rows(llama: Path) -> None:
    sdpa, eager = (policy(llama, attention=x, microbatch_tokens=60) for x in ("sdpa", "eager"))
    assert sdpa.logprobs.packs and not eager.logprobs.packs
    samples = rows_of(sdpa)
    pairs = [(s.prompt_ids, s.token_ids[len(s.prompt_ids) :]) for s in samples]
    for one, two in zip(sdpa.score(pairs), eager.score(pairs), strict=True):
        assert one == pytest.approx(two, abs=1e-5)
    one, two = (learn(p, samples) for p in (sdpa, eager))
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-4)
