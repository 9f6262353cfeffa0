"""Sequences laid end to end have the log-probabilities and gradients that they have padded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hacrl.algorithms import make_algorithm, make_settings
from hacrl.config import AgentConfig
from hacrl.pocket import pocket_path
from hacrl.policy.attention import Rule, causal
from hacrl.policy.batch import make_inputs
from hacrl.policy.logprobs import LogProbs
from hacrl.policy.packing import Packed, pack
from hacrl.policy.policy import Policy
from hacrl.types import Sample, Update

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "attn_implementation": "sdpa",
}
WINDOW = 5
GEMMA = {
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
LENGTHS = (14, 9, 9, 5, 2, 17)  # inside the window, at it, and across


def build(family: str):
    torch.manual_seed(3)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8))
    if family == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **GEMMA))
    if family == "gpt2":  # positions learned one by one, so a sequence must start at the first
        sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        return GPT2LMHeadModel(
            GPT2Config(**sizes, initializer_range=0.3, attn_implementation="sdpa")
        )
    if family == "gemma2":
        return Gemma2ForCausalLM(Gemma2Config(**SIZES, **GEMMA, final_logit_softcapping=None))
    return AutoModelForCausalLM.from_pretrained(
        pocket_path(family), dtype=torch.float32, attn_implementation="sdpa"
    )


def some_rows(words: int):
    generator = torch.Generator().manual_seed(4)
    ids = [torch.randint(0, words, (n,), generator=generator).tolist() for n in LENGTHS]
    masks = [[0] * (n // 3 + 1) + [1] * (n - n // 3 - 1) for n in LENGTHS]
    return make_inputs(ids, masks, 0, torch.device("cpu"))


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma3", "gemma2", "gpt2", "wren", "finch", "heron"]
)
def test_packed_equals_padded(family: str) -> None:
    model = build(family).eval()
    logprobs = LogProbs(model, 0.9)
    assert logprobs.packs
    rows = some_rows(model.config.vocab_size)
    weight_BT = torch.linspace(-1, 1, rows.reply_mask_BT.numel()).view_as(rows.reply_mask_BT)
    found = []
    for packs in (True, False):
        logprobs.packs = packs
        if not packs and family == "gemma2":
            model.config._attn_implementation = (
                "eager"  # sdpa of transformers forgets its score cap
            )
        model.zero_grad()
        values_BT = logprobs(rows)
        (values_BT * weight_BT).sum().backward()
        found.append((values_BT.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (one, ones), (two, twos) = found
    assert torch.allclose(one, two, atol=2e-5)
    assert one.std() > 0.3  # words differ in chance
    for name in ones:
        scale = twos[name].abs().max()
        assert torch.allclose(ones[name], twos[name], atol=1e-5 * max(scale, 1)), name


def test_a_sequence_does_not_feel_its_neighbours() -> None:
    """The window too counts from the sequence's own start."""
    model = build("gemma3").eval()
    logprobs = LogProbs(model, 1.0)
    ids = [[(5 * i + n) % 61 for i in range(n)] for n in LENGTHS]
    masks = [[0] + [1] * (n - 1) for n in LENGTHS]
    device = torch.device("cpu")
    together = logprobs(make_inputs(ids, masks, 0, device))
    for b, (row, mask) in enumerate(zip(ids, masks, strict=True)):
        (alone,) = logprobs(make_inputs([row], [mask], 0, device))
        assert torch.allclose(together[b, : len(alone)], alone, atol=1e-5)
    changed = [ids[0], ids[1][::-1], *ids[2:]]
    after = logprobs(make_inputs(changed, masks, 0, device))
    same = (after == together).all(1).tolist()
    assert same == [True, False, True, True, True, True]


def test_attention_by_hand() -> None:
    """One head of size 1, scores 0: a token's result is the mean of the values it may see. Of the
    values 1 2 3 | 4 8 the second sequence sees 4, then (4 + 8) / 2; with window 2 the third token
    of the first sees (2 + 3) / 2."""
    value = torch.tensor([1.0, 2, 3, 4, 8]).view(1, 1, 5, 1)
    packed = Packed(pack([(1, 2, 3), (4, 5)]), value.device)
    queries, keys, elsewhere = packed.pieces
    assert queries.tolist() == keys.tolist() == [0, 3, 5]  # what a kernel gets
    assert queries.dtype == keys.dtype == torch.int32 and elsewhere is None
    zero = torch.zeros_like(value)
    out = packed.attend(0, zero, zero, value, Rule(1.0, None, None))
    assert out.flatten().tolist() == pytest.approx([1, 1.5, 2, 4, 6])
    out = packed.attend(0, zero, zero, value, Rule(1.0, 2, None))
    assert out.flatten().tolist() == pytest.approx([1, 1.5, 2.5, 4, 6])
    assert causal(zero, zero, value, Rule(1.0, None, None)).flatten()[3] == pytest.approx(2.5)


def test_another_attention_is_padded(llama: Path) -> None:
    """Who asks for one gets it, for scores and for updates."""
    told = []
    for attention in ("sdpa", "eager"):
        agent = AgentConfig(name="a", model=str(llama), attention=attention, microbatch_tokens=60)
        policy = Policy(agent, device="cpu", temperature=1.0, beta=0.0)
        assert policy.logprobs.packs == (attention == "sdpa")
        pairs = [((1, 2, 3), tuple(range(5, 5 + n))) for n in (4, 30, 11)]
        scores = policy.score(pairs)
        samples = [
            Sample(
                problem_id="p",
                index=i,
                source="a",
                is_own=True,
                token_ids=(*prompt, *reply),
                loss_mask=(0,) * 3 + (1,) * len(reply),
                behaviour=sum(scores[i]) / len(reply),
                advantage=1.0 - i,
            )
            for i, (prompt, reply) in enumerate(pairs)
        ]
        loss = make_algorithm(make_settings("gspo")).loss
        report = policy.update(samples, loss, Update(0, 1, 0.8, "own", ("p",)))
        told.append((scores, report.grad_norm))
    for one, two in zip(told[0][0], told[1][0], strict=True):
        assert one == pytest.approx(two, abs=1e-5)
    assert told[0][1] == pytest.approx(told[1][1], rel=1e-4)
