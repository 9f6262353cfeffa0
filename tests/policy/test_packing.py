"""Packed sequences have the log-probabilities and gradients of padded ones."""

from pathlib import Path

import pytest
import torch
from ratio_rows import learn, policy, rows_of
from small_models import assert_same_learned, learned, model_of
from transformers import AutoModelForCausalLM

from hacrl.pocket import pocket_path
from hacrl.policy.attention import Rule, causal
from hacrl.policy.batch import make_inputs
from hacrl.policy.logprobs import LogProbs
from hacrl.policy.packing import Packed, pack

LENGTHS = (14, 9, 9, 5, 2, 17)  # shorter than the window of 6, equal to it, and longer
CPU = torch.device("cpu")


def build(family: str):
    if family not in ("wren", "finch", "heron"):
        return model_of(family)
    return AutoModelForCausalLM.from_pretrained(
        pocket_path(family), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@pytest.mark.parametrize(
    "family", ["tied", "qwen", "gemma3", "gemma2", "gpt2", "wren", "finch", "heron"]
)
def test_packed_equals_padded(family: str) -> None:
    """GPT-2 learns positions one by one, so a sequence must start at position 0."""
    model = build(family)
    if family == "gemma2":  # with its score cap, which transformers' sdpa ignores
        model.config._attn_implementation = "sdpa"
    logprobs = LogProbs(model, 0.9)
    assert logprobs.packs
    draw = torch.Generator().manual_seed(4)
    words = model.config.vocab_size
    ids = [torch.randint(0, words, (n,), generator=draw).tolist() for n in LENGTHS]
    masks = [[0] * (n // 3 + 1) + [1] * (n - n // 3 - 1) for n in LENGTHS]
    inputs = make_inputs(ids, masks, 0, CPU)
    packed = learned(logprobs, inputs)
    logprobs.packs = False
    if family == "gemma2":
        model.config._attn_implementation = "eager"
    assert_same_learned(packed, learned(logprobs, inputs))


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    """Windows count from the start of the sequence."""
    logprobs = LogProbs(model_of("gemma3"), 1.0)
    ids = [[(5 * i + n) % 61 for i in range(n)] for n in LENGTHS]
    masks = [[0] + [1] * (n - 1) for n in LENGTHS]
    together = logprobs(make_inputs(ids, masks, 0, CPU))
    for b, (row, mask) in enumerate(zip(ids, masks, strict=True)):
        (alone,) = logprobs(make_inputs([row], [mask], 0, CPU))
        assert torch.allclose(together[b, : len(alone)], alone, atol=1e-5)
    changed = [ids[0], ids[1][::-1], *ids[2:]]
    after = logprobs(make_inputs(changed, masks, 0, CPU))
    assert (after == together).all(1).tolist() == [True, False, True, True, True, True]


def test_attention_by_hand() -> None:
    """One head of size 1 and scores of 0: the output is the mean of the visible values. Of the values
    1 2 3 | 4 8 the second sequence sees 4, then (4 + 8) / 2; with window 2 the third token of the first
    sees (2 + 3) / 2."""
    value = torch.tensor([1.0, 2, 3, 4, 8]).view(1, 1, 5, 1)
    packed = Packed(pack([(1, 2, 3), (4, 5)]), CPU)
    queries, keys, copies = packed.pieces
    assert queries.tolist() == keys.tolist() == [0, 3, 5] and copies is None
    assert queries.dtype == keys.dtype == torch.int32
    zero = torch.zeros_like(value)
    out = packed.attend(0, zero, zero, value, Rule(1.0, None, None))
    assert out.flatten().tolist() == pytest.approx([1, 1.5, 2, 4, 6])
    out = packed.attend(0, zero, zero, value, Rule(1.0, 2, None))
    assert out.flatten().tolist() == pytest.approx([1, 1.5, 2.5, 4, 6])
    assert causal(zero, zero, value, Rule(1.0, None, None)).flatten()[3] == pytest.approx(2.5)


def test_another_attention_setting_is_used_with_padded_rows(llama: Path) -> None:
    sdpa, eager = (policy(llama, attention=x, microbatch_tokens=60) for x in ("sdpa", "eager"))
    assert sdpa.logprobs.packs and not eager.logprobs.packs
    samples = rows_of(sdpa)
    pairs = [(s.prompt_ids, s.token_ids[len(s.prompt_ids) :]) for s in samples]
    for one, two in zip(sdpa.score(pairs), eager.score(pairs), strict=True):
        assert one == pytest.approx(two, abs=1e-5)
    one, two = (learn(p, samples) for p in (sdpa, eager))
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-4)
