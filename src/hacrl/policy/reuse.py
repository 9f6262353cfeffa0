"""Matrix products of a pass without gradient, used again by the pass of the rows that have one.

Which rows have a gradient is known only after a forward (update.py). Where many have none, that first
forward builds no graph; it keeps the results of its linear layers. The survivors then go forward
again, alone, and take their rows of those results instead of multiplying: what is computed twice is
norms, activations and attention, for the survivors. Forward 1 + backward 2 for each survivor, forward
1 for the others: nothing is multiplied for a row without gradient, or twice for one with.

Only for sequences laid end to end: there a sequence's tokens are rows of every linear layer's result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from hacrl.policy.logprobs import Inputs, LogProbs, spread


class Draft:
    """Log-probabilities without a graph, of which some sequences can have one afterwards.

    Example: draft = Draft(logprobs, inputs); draft.logprobs_BT; draft.again([0, 2], inputs_of_these)
    """

    def __init__(self, logprobs: LogProbs, inputs: Inputs) -> None:
        self.inputs = inputs
        self._logprobs = logprobs
        self._recording = Recording()
        with torch.no_grad():
            self._known = logprobs.of_tokens(inputs, decoding=self._recording)

    @property
    def logprobs_BT(self) -> Tensor:
        return spread(self._known[0], self.inputs)

    @property
    def usable(self) -> bool:
        """Whether the results are still what the layers gave, and have a row for every token: those
        of experts, who get some tokens each, have not."""
        row = (1, len(self.inputs.ids_N))
        return all(
            result._version == version and result.shape[:-1] == row
            for result, version in self._recording.results
        )

    def again(self, kept: Collection[int], inputs: Inputs) -> Tensor:
        """The same log-probabilities of the sequences `kept` (and `inputs` are these), with gradient.
        Only once: the results are let go as they are used."""
        token_N = _where(kept, torch.tensor(self.inputs.lengths)).to(inputs.ids_N.device)
        scored_M = torch.isin(self.inputs.row_M, torch.tensor(list(kept)).to(inputs.ids_N.device))
        logprob_M, lse_M = self._known
        found_M, _ = self._logprobs.of_tokens(
            inputs, (logprob_M[scored_M], lse_M[scored_M]), Reusing(self._recording, token_N)
        )
        return spread(found_M, inputs)


def _where(kept: Collection[int], length_B: Tensor) -> Tensor:
    """Tokens of the sequences `kept`, counted over all sequences.

    Example: _where([0, 2], tensor([2, 3, 1])) is tensor([0, 1, 5])
    """
    row_N = torch.arange(len(length_B)).repeat_interleave(length_B)
    return torch.isin(row_N, torch.tensor(list(kept))).nonzero().squeeze(1)


class Recording(TorchFunctionMode):
    """Keeps what linear layers give, in order, for as long as the block lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[Tensor, int]] = []
        """And each one's version: who changes it in place raises that."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is linear:
            self.results.append((result, result._version))
        return result


class Reusing(TorchFunctionMode):
    """Gives linear layers the recorded results of these tokens, in the same order, each once."""

    def __init__(self, recording: Recording, token_N: Tensor) -> None:
        super().__init__()
        self.results = [result for result, _ in reversed(recording.results)]
        recording.results.clear()
        self.token_N = token_N

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not linear:
            return func(*args, **(kwargs or {}))
        return _Given.apply(
            self.results.pop()[:, self.token_N], *_arguments(*args, **(kwargs or {}))
        )


def _arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


class _Given(torch.autograd.Function):
    """A linear layer whose result is known: the backward alone is left to do."""

    @staticmethod
    def forward(
        ctx: Any, result: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        return result.view_as(result)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        _, wants_input, wants_weight, wants_bias = ctx.needs_input_grad
        flat = gradient.flatten(0, -2)
        return (
            None,
            gradient @ weight if wants_input else None,
            flat.t() @ input.flatten(0, -2) if wants_weight else None,
            flat.sum(0) if wants_bias else None,
        )
