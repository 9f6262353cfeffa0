"""The head in chunks has the log-probabilities and gradients of full logits."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hacrl.policy import head
from hacrl.policy.head import chunk_tokens, head_logprobs, logits_logprobs

TOKENS, SIZE, WORDS, T = 23, 6, 40, 0.7


def inputs(bias: bool = True, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    return {
        "hidden": draw(TOKENS, SIZE),
        "weight": draw(WORDS, SIZE),
        "bias": draw(WORDS) if bias else None,
    }


TARGET = torch.arange(TOKENS) * 7 % WORDS
GRADIENT = torch.linspace(-1, 2, TOKENS) * (torch.arange(TOKENS) % 4 != 1)  # some exactly zero


def in_chunks_of(tokens: int, monkeypatch) -> None:
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", tokens * WORDS * 12)
    assert chunk_tokens(torch.zeros(WORDS, SIZE)) == tokens


def gradients(given: dict[str, Tensor | None], logprob_N: Tensor) -> dict[str, Tensor]:
    wanted = {n: t for n, t in given.items() if t is not None and t.requires_grad}
    found = torch.autograd.grad(logprob_N, list(wanted.values()), GRADIENT)
    return dict(zip(wanted, found, strict=True))


def whole(given: dict[str, Tensor | None]) -> Tensor:
    """By torch's own log-softmax."""
    logits = given["hidden"] @ given["weight"].t()
    logits = logits if given["bias"] is None else logits + given["bias"]
    return (logits.float() / T).log_softmax(1)[torch.arange(TOKENS), TARGET]


@pytest.mark.parametrize("tokens", [1, 5, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_log_softmax(
    tokens: int, bias: bool, monkeypatch
) -> None:
    in_chunks_of(tokens, monkeypatch)
    given = inputs(bias)
    logprob_N = head_logprobs(*given.values(), TARGET, T)
    assert torch.allclose(logprob_N, whole(given), atol=1e-5)
    mine, wanted = gradients(given, logprob_N), gradients(given, whole(given))
    assert mine.keys() == wanted.keys()
    for name in mine:
        assert torch.allclose(mine[name], wanted[name], atol=1e-5), name


def test_a_frozen_head_and_a_tied_head(monkeypatch) -> None:
    in_chunks_of(5, monkeypatch)
    given = inputs(bias=False)
    given["weight"] = given["weight"].detach()
    mine = gradients(given, head_logprobs(*given.values(), TARGET, T))
    assert mine.keys() == {"hidden"}
    assert torch.allclose(mine["hidden"], gradients(given, whole(given))["hidden"], atol=1e-5)

    weight = inputs()["weight"]

    def tied() -> dict[str, Tensor | None]:
        hidden = torch.nn.functional.embedding(TARGET.roll(1), weight)
        return {"hidden": hidden, "weight": weight, "bias": None}

    both = [head_logprobs(*tied().values(), TARGET, T), whole(tied())]
    mine, wanted = (torch.autograd.grad(x, weight, GRADIENT)[0] for x in both)
    assert torch.allclose(mine, wanted, atol=1e-5)


def test_zero_gradients_give_zeros(monkeypatch) -> None:
    in_chunks_of(5, monkeypatch)
    given = inputs()
    logprob_N = head_logprobs(*given.values(), TARGET, T)
    found = torch.autograd.grad(logprob_N, list(given.values()), torch.zeros(TOKENS))
    assert all(not g.any() for g in found)


def test_bfloat16_chunks_add_up_in_float32(monkeypatch) -> None:
    """Against the float32 gradient of the same rounded numbers: each product is rounded to bfloat16 once
    (8 bits: 0.4 %), and the sum of 23 chunks once more."""
    given = inputs(bias=False, dtype=torch.bfloat16)
    wide = {n: t.detach().float().requires_grad_() for n, t in given.items() if t is not None}
    wide["bias"] = None
    wanted = gradients(wide, whole(wide))
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", WORDS * 10)
    mine = gradients(given, head_logprobs(*given.values(), TARGET, T))
    for name in mine:
        assert mine[name].dtype == torch.bfloat16
        scale = wanted[name].abs().max()
        assert (mine[name].float() - wanted[name]).abs().max() < 0.02 * scale


def test_a_long_sum_of_bfloat16_chunks_does_not_stall(monkeypatch) -> None:
    """All logits 0 and 600 tokens, one per chunk, with the same target: its row's gradient is
    600 (1 - 1/2) = 300. A sum in bfloat16, with 8 bits, would stop at 128."""
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", 1)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(600, 1, dtype=torch.bfloat16)
    logprob_N = head_logprobs(hidden, weight, None, torch.ones(600, dtype=torch.long), 1.0)
    logprob_N.sum().backward()
    assert weight.grad.flatten().tolist() == pytest.approx([-300, 300], rel=0.01)


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_there_are_never_full_logits(monkeypatch) -> None:
    in_chunks_of(8, monkeypatch)
    given = inputs()
    with Largest() as seen:
        gradients(given, head_logprobs(*given.values(), TARGET, T))
    assert seen.elements == 8 * WORDS
    with Largest() as seen:
        logits = given["hidden"] @ given["weight"].t()
        gradients({**given, "bias": None}, logits_logprobs(logits, TARGET, T))
    assert seen.elements == TOKENS * WORDS  # the comparison
