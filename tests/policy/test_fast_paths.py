"""Fast paths are used only where they give the model's own log-probabilities."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from small_models import SMALL, attends_to_nothing, model_of
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hacrl.pocket import pocket_path
from hacrl.policy import fast_paths, fuse
from hacrl.policy import logprobs as logprobs_module
from hacrl.policy.attention import Rule
from hacrl.policy.fast_paths import checked_fusion, difference, is_close, trial_inputs
from hacrl.policy.logprobs import LogProbs
from hacrl.policy.packing import Layout, Packed, pack


def pocket(name: str, dtype: torch.dtype = torch.bfloat16):
    return AutoModelForCausalLM.from_pretrained(
        pocket_path(name), dtype=dtype, attn_implementation="sdpa"
    ).eval()


def leaking(layout: Layout, device: torch.device) -> Packed:
    """Sequences see their neighbours."""
    return Packed(pack([range(layout.tokens)]), device)


class Scaled(Packed):
    """Scores are scaled by 1.5."""

    def attend(self, layer, query, key, value, rule):
        rule = Rule(1.5 * rule.scale, rule.window, rule.cap)
        return super().attend(layer, query, key, value, rule)


class NoPrompt(Packed):
    """Sequences do not see the prompt that they share."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        if layout.shares:
            rests = [n - p for n, p in zip(layout.lengths, layout.prompts, strict=True)]
            ids = [range(100 * b, 100 * b + n) for b, n in enumerate(rests)]
            layout = pack([*ids, range(layout.prompts[0])])
        super().__init__(layout, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["wren", "finch", "heron"])
def test_wrong_packing_is_disabled_with_a_warning(name: str, dtype, monkeypatch) -> None:
    """Half precision alone gives no warning."""
    model = pocket(name, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LogProbs(model, 1.0).packs
    for wrong in (leaking, Scaled):
        monkeypatch.setattr(logprobs_module, "Packed", wrong)
        with pytest.warns(UserWarning, match="rows are padded"):
            assert not LogProbs(model, 1.0).packs


def test_wrong_sharing_is_disabled_with_a_warning(monkeypatch) -> None:
    model = model_of("llama")
    assert LogProbs(model, 1.0).shares
    monkeypatch.setattr(logprobs_module, "Packed", NoPrompt)
    with pytest.warns(UserWarning, match="shared prompts disabled"):
        logprobs = LogProbs(model, 1.0)
    assert logprobs.packs and not logprobs.shares


def test_the_limit_follows_the_models_own_rounding(monkeypatch) -> None:
    """With a minimum of 0, packing is still accepted, because transformers' two attentions differ as
    much; a wrong packing is not. If transformers' sdpa is wrong itself, the maximum is the limit."""
    model = pocket("finch")
    monkeypatch.setattr(fast_paths, "ROUNDED", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LogProbs(model, 1.0).packs
    monkeypatch.setattr(logprobs_module, "Packed", leaking)
    with pytest.warns(UserWarning, match="rows are padded"):
        assert not LogProbs(model, 1.0).packs

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attends_to_nothing)
    with pytest.warns(UserWarning, match=r"> 0\.15"):
        assert not LogProbs(model, 1.0).packs


def test_difference_is_the_root_mean_square_over_the_spread() -> None:
    """One of 19 tokens off by d of the spread gives d / sqrt(19)."""
    expected = torch.linspace(-3, 0, 19)
    for d in (0.3, 0.5):
        found = expected.clone()
        found[7] += d * expected.std()
        assert difference(found, expected) == pytest.approx(d / 19**0.5)
    with pytest.warns(UserWarning, match="nan"):
        assert not is_close(expected * torch.nan, expected, 0.1, "other")
    same = torch.full((5,), -4.0)  # a head of zeros
    assert difference(same, same) == 0 and difference(same + 1, same) > 1


@pytest.mark.parametrize("words", [7, 5000])
def test_trial_tokens_cover_the_vocabulary(words: int) -> None:
    """Its first tokens are often untrained and round more; one repeated token would show nothing."""
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": words}))
    ids = trial_inputs(model, prompt=5).ids_N
    assert len(ids.unique()) > min(words / 2, 20)
    assert len(ids[:5].unique()) >= 4
    assert ids.min() < words / 6 and ids.max() >= words * 5 / 6 and ids.max() < words


# ---------------------------------------------------------------- compiled operations


def halving(function):
    """A compiler that halves every result."""

    def call(*arguments, **named):
        found = function(*arguments, **named)
        return tuple(f / 2 for f in found) if isinstance(found, tuple) else found / 2

    return call


def failing_with(error: Exception):
    """A compiler whose code fails where there is a gradient."""

    def compiler(function):
        def call(*arguments, **named):
            if torch.is_grad_enabled():
                raise error
            return function(*arguments, **named)

        return call

    return compiler


@pytest.mark.parametrize(
    ("compiler", "expected"),
    [
        (lambda function: function, nullcontext()),
        (halving, pytest.warns(UserWarning, match="compiled operations disabled")),
        (
            failing_with(RuntimeError("no derivative")),
            pytest.warns(UserWarning, match=r"failed.*no derivative"),
        ),
        # A slower path would round differently from a run with more free memory.
        (failing_with(torch.OutOfMemoryError("")), pytest.raises(torch.OutOfMemoryError)),
    ],
    ids=["right", "wrong", "no gradient", "no memory"],
)
def test_compiled_operations_are_checked_when_the_model_is_loaded(
    compiler, expected, monkeypatch
) -> None:
    monkeypatch.setattr(fuse, "_compile", compiler)
    logprobs = LogProbs(model_of("llama"), 1.0)
    fusion = None
    with expected:
        fusion = checked_fusion(logprobs, 1e-3)
    assert (fusion is not None) == isinstance(expected, nullcontext) and logprobs.fusion is None
