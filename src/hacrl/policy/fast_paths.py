"""Checks, once per model, which fast paths give the model's own log-probabilities.

Three paths: sequences packed in one row instead of padded, shared prompts once in that row, and compiled
small operations. Each is compared with the slower path on a few tokens. The difference is the root mean
square of the differences, divided by the standard deviation of the log-probabilities. Measured in
bfloat16: rounding gives 0.005 to 0.035 for models up to 1.7B and 0.02 to 0.12 for Gemma-3-270M; a wrong
mask 0.3 to 2; wrong positions or a scale wrong by a fifth to a half 0.07 to 0.8.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hacrl.errors import first_line
from hacrl.policy.batch import Inputs, make_inputs
from hacrl.policy.fuse import LearningFusion, worth_fusing

if TYPE_CHECKING:
    from hacrl.policy.logprobs import LogProbs

EXACT = 1e-3  # allowed difference in float32
ROUNDED, MISTAKEN = 0.05, 0.15  # allowed difference in half precision: at least and at most
SLACK = 4  # between these two: this many times the difference of transformers' two own attentions
COMPILED = 0.1
"""Allowed difference of compiled operations in half precision: they skip roundings, so they differ more
than two kinds of attention do (measured: 0.01 to 0.035)."""
SCATTER = 0.618034
"""Trial tokens are this fraction of the vocabulary apart: the first tokens are often untrained and round
more."""


def choose_fast_paths(logprobs: LogProbs) -> None:
    """Set `packs`, `shares` and `fusion`."""
    logprobs.packs, allowed = check_packing(logprobs)
    logprobs.shares = logprobs.packs and _sharing_is_right(logprobs, allowed)
    if logprobs.packs and worth_fusing(logprobs.model):
        logprobs.fusion = checked_fusion(
            logprobs, allowed if allowed == EXACT else max(COMPILED, allowed)
        )


@torch.no_grad()
def head_scale(model: Any) -> float | None:
    """The factor s of logits that are s times the head's matrix product of the decoder's output: 1 for
    most models. None if they are no such product: some models cap them."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.base_model is model or caps_logits(model.config):
        return None
    ids = torch.arange(8, device=head.weight.device).unsqueeze(0) % head.weight.shape[0]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    own = model(input_ids=ids, use_cache=False).logits
    mine = head(hidden)
    if own.shape != mine.shape:
        return None
    exact = own.dtype == torch.float32
    own, mine = own.float(), mine.float()
    if torch.allclose(own, mine, atol=1e-4, rtol=1e-4):
        return 1.0
    scale = ((own * mine).sum() / mine.square().sum()).item()
    near = 1e-4 * own.abs().max().item()
    same = torch.allclose(own, scale * mine, atol=near, rtol=1e-4 if exact else 1e-2)
    return scale if same and scale > 0 else None


def caps_logits(config: Any) -> bool:
    """Whether logits become cap * tanh(logits / cap), which small logits of a check would not show."""
    caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return any(getattr(config.get_text_config(), cap, None) for cap in caps)


@torch.no_grad()
def check_packing(logprobs: LogProbs) -> tuple[bool, float]:
    """Compare packed sequences with padded ones under eager attention: (whether packing is right, the
    difference that rounding explains in this model)."""
    model = logprobs.model
    half = model.dtype != torch.float32
    allowed = ROUNDED if half else EXACT
    # Only with transformers' default attention: an agent with another `attention` setting keeps it.
    name = getattr(model.config, "_attn_implementation", None)
    if name != "sdpa" or not getattr(model, "_supports_attention_backend", False):
        return False, allowed
    # A convolution or a recurrence would read the end of the sequence before; over short ones the
    # difference can be too small to be seen.
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if any("attention" not in kind or kind == "linear_attention" for kind in kinds):
        return False, allowed
    inputs = trial_inputs(model)
    with logprobs.switch.on("eager"):
        eager_M = logprobs.of_tokens(inputs)
    if half:
        rounding = difference(logprobs.of_tokens(inputs), eager_M)  # sdpa is the same function
        allowed = min(max(ROUNDED, SLACK * rounding), MISTAKEN)
    logprobs.packs = True
    try:
        packed_M = logprobs.of_tokens(inputs)
    except (
        AttributeError,
        TypeError,
        KeyError,
    ):  # the model does not pass its attention settings on
        return False, allowed
    finally:
        logprobs.packs = False
    consequence = "packed sequences disabled for this model, rows are padded (slower)"
    return is_close(packed_M, eager_M, allowed, consequence), allowed


@torch.no_grad()
def _sharing_is_right(logprobs: LogProbs, allowed: float) -> bool:
    """Compares sequences that share a prompt with sequences that each have their own."""
    apart_M, shared_M = (
        logprobs.of_tokens(trial_inputs(logprobs.model, prompt=5, share=share))
        for share in (False, True)
    )
    consequence = "shared prompts disabled for this model (slower)"
    return is_close(shared_M, apart_M, allowed, consequence)


def checked_fusion(logprobs: LogProbs, allowed: float) -> LearningFusion | None:
    """Compiled small operations, if they compile here, with and without gradient, and are right."""
    inputs = trial_inputs(logprobs.model)
    trained = [p for p in logprobs.model.parameters() if p.requires_grad]
    with torch.no_grad():
        plain_M = logprobs.of_tokens(inputs)
    try:
        logprobs.fusion = fusion = LearningFusion(logprobs.model)
        with torch.no_grad():
            fused_M = logprobs.of_tokens(inputs)
        if trained:
            with torch.enable_grad():
                total = logprobs.of_tokens(inputs).sum()
            torch.autograd.grad(total, min(trained, key=Tensor.numel), allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        warnings.warn(
            "torch.compile of small operations failed; scoring and updates are about a third slower "
            f"({first_line(error)})",
            stacklevel=2,
        )
        return None
    finally:
        logprobs.fusion = None
    consequence = "compiled operations disabled for this model (a third slower)"
    return fusion if is_close(fused_M, plain_M, allowed, consequence) else None


def is_close(found_M: Tensor, expected_M: Tensor, allowed: float, consequence: str) -> bool:
    """Whether two ways differ by rounding only; warns with the consequence if not."""
    found = difference(found_M, expected_M)
    if found <= allowed:  # False for nan
        return True
    warnings.warn(
        f"{consequence}: relative log-probability error {found:.2g} > {allowed:.2g}. If the model is a "
        "common one, please report it.",
        stacklevel=2,
    )
    return False


def difference(found_M: Tensor, expected_M: Tensor) -> float:
    """Root mean square of the differences over the expected values' standard deviation."""
    spread = expected_M.std().clamp_min(1e-30)  # equal values differ by 0, even if all are the same
    return ((found_M - expected_M).square().mean().sqrt() / spread).item()


def trial_inputs(model: Any, prompt: int = 0, share: bool = False) -> Inputs:
    """Four short sequences; all but the last start with the same `prompt` tokens."""
    weight = model.get_input_embeddings().weight

    def token(number: int) -> int:
        return int(number * SCATTER % 1 * len(weight))

    rows = [[token(7 * i + 3 * n + 1) for i in range(n)] for n in (6, 9, 4, 4)]
    begin = [token(5 * i + 2) for i in range(prompt)]
    ids = [*(begin + row for row in rows[:-1]), rows[-1]]
    unscored = [*[max(1, prompt)] * (len(rows) - 1), 1]
    masks = [[0] * n + [1] * (len(row) - n) for row, n in zip(ids, unscored, strict=True)]
    return make_inputs(ids, masks, 0, weight.device, share=share)
