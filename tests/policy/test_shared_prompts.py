"""A shared prompt is computed once; log-probabilities and gradients are the same as with one prompt
each."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ratio_rows import assert_equal_state, learn, policy, rows_of
from small_models import assert_same_learned, learned, model_of
from torch import Tensor

from hacrl.policy import packing
from hacrl.policy.attention import Rule, causal
from hacrl.policy.batch import Inputs, make_inputs
from hacrl.policy.logprobs import LogProbs
from hacrl.policy.microbatch import plan_microbatches
from hacrl.policy.packing import Copies, Packed, pack

CPU = torch.device("cpu")

# ---------------------------------------------------------------- layout


def test_layout() -> None:
    """The third sequence shares the first one's prompt. Equal tokens that are no prompt, and a prompt
    of one sequence only, are not shared."""
    row = [(5, 6, 7), (4, 5, 6), (5, 6, 8, 9), (7, 7)]
    layout = pack(row, [2, 2, 2, 1])
    assert layout.lengths == (3, 3, 4, 2) and layout.prompts == (2, 0, 2, 0)
    assert layout.index_F.tolist() == [*(0, 1, 2), *(3, 4, 5), *(0, 1, 6, 7), *(8, 9)]
    assert layout.tokens == 10 and layout.shares
    apart = pack(row)
    assert apart.tokens == 12 and not apart.shares and apart.index_F.tolist() == list(range(12))

    masks = [(0, 0, 1), (0, 0, 1), (0, 0, 1, 1), (0, 1)]
    inputs = make_inputs(row, masks, 0, CPU, share=True)
    assert inputs.ids_N.tolist() == [5, 6, 7, 4, 5, 6, 8, 9, 7, 7]
    assert inputs.position_N.tolist() == [0, 1, 2, 0, 1, 2, 2, 3, 0, 1]
    assert inputs.target_M.tolist() == [7, 6, 8, 9, 7]
    assert inputs.predictor_M.tolist() == [1, 4, 1, 6, 8]  # the same token predicts 7 and 8
    queries, keys, copies = Packed(inputs.layout, CPU).pieces
    assert queries.tolist() == [0, 2, 3, 6, 8, 10]
    assert keys.tolist() == [0, 2, 5, 8, 12, 14]
    assert copies is not None and copies.rows == 10
    assert copies.row_F.tolist() == [*(0, 1), *(0, 1, 2), *(3, 4, 5), *(0, 1, 6, 7), *(8, 9)]


def test_a_prompt_is_counted_once_in_a_microbatch() -> None:
    """A further row costs its own tokens and an eighth of the prompt for keys and values."""
    a, b = (1,) * 8, (2,) * 8
    assert plan_microbatches([12] * 4, 20, prompts=[a] * 4) == [[0, 1], [2, 3]]  # 12 + 4 + 1
    assert plan_microbatches([12] * 3, 22, prompts=[a] * 3) == [[0, 1, 2]]  # + 4 + 1
    assert plan_microbatches([12] * 3, 21, prompts=[a] * 3) == [[0, 1], [2]]
    assert plan_microbatches([12] * 4, 22, prompts=[a] * 4) == [[0, 1, 2], [3]]  # + 4 + 1
    assert plan_microbatches([12] * 4, 22) == [[0], [1], [2], [3]]
    # Rows of one prompt are together; another prompt fills the rest.
    assert plan_microbatches([12, 13, 12, 13], 34, prompts=[a, b, a, b]) == [[1, 3, 0], [2]]
    assert plan_microbatches([12, 13, 12, 13], 36, prompts=[a, b, a, b]) == [[1, 3, 0, 2]]
    assert plan_microbatches([12, 13, 12, 33], 34, prompts=[a, b, a, b]) == [[3], [1, 0, 2]]
    assert plan_microbatches([12, 13, 12, 13], 18, prompts=[a, b, a, b]) == [[1], [3], [0, 2]]
    # A row that does not fit next to its prompt goes into any micro-batch with room.
    assert plan_microbatches([30, 9, 9], 30, prompts=[a, a, b]) == [[0], [1, 2]]
    assert plan_microbatches([12, 12], 20, padded=True, prompts=[a, a]) == [[0], [1]]


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


# ---------------------------------------------------------------- models


def some_inputs(share: bool) -> Inputs:
    """Groups of three, two and one; prompts shorter than the window of six, equal to it and longer."""
    draw = torch.Generator().manual_seed(2)
    ids, masks = [], []
    for prompt, replies in ((6, (9, 1, 4)), (11, (5, 12)), (1, (3, 3)), (4, (7,))):
        begin = torch.randint(0, 300, (prompt,), generator=draw).tolist()
        for n in replies:
            ids.append(begin + torch.randint(0, 300, (n,), generator=draw).tolist())
            masks.append([0] * prompt + [1] * n)
    order = [3, 0, 5, 1, 4, 7, 2, 6]  # groups mixed
    return make_inputs([ids[i] for i in order], [masks[i] for i in order], 0, CPU, share=share)


@pytest.mark.parametrize("family", ["llama", "tied", "qwen2", "qwen", "gpt2", "gemma3"])
def test_models_give_the_same(family: str) -> None:
    logprobs = LogProbs(model_of(family), 0.9)
    assert logprobs.packs and logprobs.shares
    shared, apart = some_inputs(True), some_inputs(False)
    assert (shared.layout.tokens, apart.layout.tokens) == (66, 90)
    assert_same_learned(learned(logprobs, shared), learned(logprobs, apart))


# ---------------------------------------------------------------- updates


@pytest.mark.parametrize("tokens", [40, 16384])
@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"lora": {"rank": 4}}])
def test_updates_are_the_same(llama: Path, changes: dict, tokens: int) -> None:
    shared, apart = (policy(llama, microbatch_tokens=tokens, **changes) for _ in range(2))
    assert shared.logprobs.shares
    apart.logprobs.shares = False
    samples = rows_of(apart, shared=True)
    one, two = (learn(p, samples) for p in (shared, apart))
    assert_equal_state(shared, apart)
    assert one.loss == pytest.approx(two.loss, abs=1e-6)
    pairs = [(s.token_ids[:3], s.token_ids[3:]) for s in samples[::2]]
    apart.restore(shared.checkpoint(1))
    for mine, theirs in zip(shared.score(pairs), apart.score(pairs), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_a_shared_prompt_is_computed_once(llama: Path) -> None:
    """Tokens in the layers: ten rows with two prompts (two have advantage 0) have 94 reply tokens and 7
    of prompts, otherwise 95 + 5 x 3 + 5 x 4."""
    p = policy(llama)
    seen: list[int] = []
    p.model.model.norm.register_forward_hook(lambda *a: seen.append(a[2].shape[1]))
    samples = rows_of(p, shared=True)
    seen.clear()
    learn(p, samples)
    p.logprobs.shares = False
    learn(p, samples)
    assert seen == [102, 130]
    pairs = [(s.prompt_ids, s.token_ids[len(s.prompt_ids) :]) for s in samples]
    p.score(pairs)
    p.logprobs.shares = True
    p.score(pairs)
    assert seen[2:] == [156, 121]
    nothing = replace(samples[0], loss_mask=(0,) * len(samples[0].token_ids))
    assert samples[0].prompt_ids == samples[0].token_ids[:3] and nothing.prompt_ids == ()


def test_gradients_of_copies_are_added_in_float32() -> None:
    """256 and sixty-four ones: in bfloat16 each one is lost."""
    values = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    out = Copies(torch.tensor([0] * 65 + [1]), of=2).taken_from(values)
    out.backward(torch.tensor([[256.0], *[[1.0]] * 65], dtype=torch.bfloat16))
    assert values.grad is not None and values.grad.flatten().tolist() == [320.0, 1.0]


def test_two_threads_give_the_same_bits_each_time() -> None:
    """32 replies of 60 tokens to one prompt of 60: equal bits each time."""
    model = model_of("llama")
    logprobs = LogProbs(model, 1.0)
    draw = torch.Generator().manual_seed(0)
    begin = torch.randint(0, 300, (60,), generator=draw).tolist()
    ids = [begin + torch.randint(0, 300, (60 - n % 3,), generator=draw).tolist() for n in range(32)]
    masks = [[0] * 60 + [1] * (len(row) - 60) for row in ids]
    inputs = make_inputs(ids, masks, 0, CPU, share=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first: list[Tensor] = []
        for _ in range(4):
            model.zero_grad()
            values = logprobs(inputs)
            values.square().sum().backward()
            found = [values.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
            first = first or [t.clone() for t in found]
            assert all(map(torch.equal, found, first))
    finally:
        torch.set_num_threads(threads)
