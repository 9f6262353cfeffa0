"""Sequences laid end to end have the log-probabilities and gradients that they have padded."""

from __future__ import annotations

import warnings
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
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hacrl.algorithms import make_algorithm
from hacrl.algorithms.settings import AlgorithmSettings
from hacrl.config import AgentConfig
from hacrl.pocket import pocket_path
from hacrl.policy import logprobs as logprobs_module
from hacrl.policy.attention import Rule, causal
from hacrl.policy.logprobs import LogProbs, make_inputs
from hacrl.policy.packing import Layout, Packed, lay
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
    packed = Packed(lay([(1, 2, 3), (4, 5)]), value.device)
    queries, keys, elsewhere = packed.pieces
    assert queries.tolist() == keys.tolist() == [0, 3, 5]  # what a kernel gets
    assert queries.dtype == keys.dtype == torch.int32 and elsewhere is None
    zero = torch.zeros_like(value)
    out = packed.attend(0, zero, zero, value, Rule(1.0, None, None))
    assert out.flatten().tolist() == pytest.approx([1, 1.5, 2, 4, 6])
    out = packed.attend(0, zero, zero, value, Rule(1.0, 2, None))
    assert out.flatten().tolist() == pytest.approx([1, 1.5, 2.5, 4, 6])
    assert causal(zero, zero, value, Rule(1.0, None, None)).flatten()[3] == pytest.approx(2.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", ["wren", "finch", "heron"])
def test_packing_that_is_wrong_is_refused_and_told(model: str, dtype, monkeypatch) -> None:
    """A kernel that lets sequences see their neighbours, or scales scores by 1.5, is more than
    rounding; half precision alone is not, and nothing is said of it."""
    trained = AutoModelForCausalLM.from_pretrained(
        pocket_path(model), dtype=dtype, attn_implementation="sdpa"
    ).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LogProbs(trained, 1.0).packs
    scaled = type(
        "Scaled",
        (Packed,),
        {
            "attend": lambda self, layer, q, k, v, rule: Packed.attend(
                self, layer, q, k, v, Rule(1.5 * rule.scale, rule.window, rule.cap)
            )
        },
    )
    for wrong in (leaking, scaled):
        monkeypatch.setattr(logprobs_module, "Packed", wrong)
        with pytest.warns(UserWarning, match="rows are padded") as told:
            assert not LogProbs(trained, 1.0).packs
        assert told[0].filename == logprobs_module.__file__


@pytest.mark.parametrize("name", ["wren", "finch", "heron"])
def test_what_rounding_explains_is_what_the_library_rounds_itself(name: str, monkeypatch) -> None:
    """With the least limit put to 0 the way that is right may still lie as far from the plainest
    attention as the library's other one, and a wrong one is refused. That other one is no measure where
    it leaves out what the model has."""
    model = AutoModelForCausalLM.from_pretrained(
        pocket_path(name), dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    monkeypatch.setattr(logprobs_module, "ROUNDED", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LogProbs(model, 1.0).packs

    monkeypatch.setattr(logprobs_module, "Packed", leaking)
    with pytest.warns(UserWarning, match="rows are padded"):
        assert not LogProbs(model, 1.0).packs
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attends_to_nothing)
    with pytest.warns(UserWarning, match=r"rounding explains 0\.15"):
        assert not LogProbs(model, 1.0).packs


@pytest.mark.parametrize(
    ("rounding", "allowed"), [(0.0, 0.05), (0.02, 0.08), (0.2, 0.15), (float("nan"), 0.05)]
)
def test_how_far_two_ways_may_lie_apart(rounding: float, allowed: float, monkeypatch) -> None:
    """Four times what the library's own two lie apart; never less than 0.05 nor more than 0.15."""
    monkeypatch.setattr(logprobs_module, "_gap", lambda *_: rounding)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        half = LogProbs(build("llama").bfloat16().eval(), 1.0)
        assert half._allowed == pytest.approx(allowed)
        assert LogProbs(build("llama").eval(), 1.0)._allowed == 1e-3


def test_equal_values_are_no_distance_apart() -> None:
    """Also where they do not differ among themselves, as of a model whose head is all zeros."""
    same = torch.full((5,), -4.0)
    assert logprobs_module._gap(same, same) == 0
    assert logprobs_module._gap(same + 1, same) > 1


def leaking(layout: Layout, device: torch.device) -> Packed:
    return Packed(lay([range(layout.tokens)]), device)


def attends_to_nothing(module, query, *_, **__):
    return torch.zeros_like(query).transpose(1, 2), None


@pytest.mark.parametrize("words", [7, 14, 21, 50, 61, 104, 5000])
def test_trial_tokens_come_from_the_whole_vocabulary(words: int) -> None:
    """The first words of one are often never trained, and round more than others; and with one token
    over and over nothing could be told."""
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": words}))
    ids = LogProbs(model, 1.0)._trial_inputs(prompt=5).ids_N
    assert len(ids.unique()) > min(words / 2, 20)
    assert len(ids[:5].unique()) >= 4
    assert ids.min() < words / 6 and ids.max() >= words * 5 / 6 and ids.max() < words


def test_one_rounded_token_does_not_decide(monkeypatch) -> None:
    """Of n tokens one is off by d of their spread, the others not at all: the root of the mean square
    is d / sqrt(n). With 19 tokens d = 0.3 makes 0.07, and d = 0.5 makes 0.11."""
    logprobs = LogProbs(build("llama").bfloat16().eval(), 1.0)
    logprobs._allowed = 0.1
    expected = torch.linspace(-3, 0, 19)
    for apart, alike in ((0.3, True), (0.5, False)):
        found = expected.clone()
        found[7] += apart * expected.std()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert logprobs._alike(found, expected, "other") == alike
        assert len(told) == (not alike)
    with pytest.warns(UserWarning, match="nan"):
        assert not logprobs._alike(expected * torch.nan, expected, "other")


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
        loss = make_algorithm(AlgorithmSettings(name="gspo"), (0.0, 1.0)).loss
        report = policy.update(samples, loss, Update(0, 1, 0.8, "own", ("p",)))
        told.append((scores, report.grad_norm))
    for one, two in zip(told[0][0], told[1][0], strict=True):
        assert one == pytest.approx(two, abs=1e-5)
    assert told[0][1] == pytest.approx(told[1][1], rel=1e-4)
