"""Matrix products of a pass without gradient, used again by the pass of the rows that have one.

Which rows have a gradient is known only after a forward (update.py). Where many have none, that first
forward builds no graph; it keeps the results of its linear layers. The survivors then go forward
again, alone, and take their rows of those results instead of multiplying: what is computed twice is
norms, activations and attention, for the survivors. Forward 1 + backward 2 for each survivor, forward
1 for the others: nothing is multiplied for a row without gradient, or twice for one with.

Only for sequences laid end to end: there a sequence's tokens are rows of every linear layer's result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hacrl.policy.batch import Inputs
from hacrl.policy.logprobs import LogProbs, spread
from hacrl.policy.packing import to_device


class Draft:
    """Log-probabilities without a graph, of which some sequences can have one afterwards.

    Example: draft = Draft(logprobs, inputs); draft.logprobs_BT; draft.again([0, 2], inputs_of_these)
    """

    def __init__(self, logprobs: LogProbs, inputs: Inputs) -> None:
        self.inputs = inputs
        self._logprobs = logprobs
        self._recording = Recording(logprobs.model.base_model)
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
            for results in self._recording.results.values()
            for result, version in results
        )

    def again(self, kept: Collection[int], inputs: Inputs) -> Tensor:
        """The same log-probabilities of the sequences `kept` (and `inputs` are these), with gradient.
        Only once: the results are let go as they are used."""
        device = inputs.ids_N.device
        # The same sequences, but a prompt may lie elsewhere now: before another one, or not apart.
        before, now = self.inputs.layout, inputs.layout
        token_N = torch.empty(now.tokens, dtype=torch.long)
        token_N[now.index_F] = before.index_F[_where(kept, before.lengths)]
        token_N = to_device(token_N, device)
        scored_M = to_device(_where(kept, self.inputs.scored), device)
        logprob_M, lse_M = (known_M[scored_M] for known_M in self._known)
        found_M, _ = self._logprobs.of_tokens(
            inputs, (logprob_M, lse_M), Reusing(self._recording, token_N)
        )
        return spread(found_M, inputs)


def recordable(model: nn.Module) -> bool:
    """Whether all matrices of a model are in plain linear layers, embeddings aside. Experts' are not: a
    draft would keep nothing of them, and rounding could send a token to another one the second time."""
    plain = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding) or (isinstance(module, nn.Linear) and _plain(module))
        for parameter in module.parameters(recurse=False)
    }
    return all(id(p) in plain for p in model.parameters() if p.ndim > 1)


def _where(kept: Collection[int], counts: Sequence[int]) -> Tensor:
    """Places of the tokens of the sequences `kept`, counted over all sequences.

    Example: _where([0, 2], [2, 3, 1]) is tensor([0, 1, 5])
    """
    row_N = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return torch.isin(row_N, torch.tensor(list(kept))).nonzero().squeeze(1)


class _Linears:
    """A model's linear layers work by `_forward` for as long as the block lasts."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = layers

    def __enter__(self) -> None:
        for layer in self.layers:
            layer.forward = partial(self._forward, layer)  # type: ignore[method-assign]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for layer in self.layers:
            del layer.forward

    def _forward(self, layer: nn.Linear, input: Tensor) -> Tensor:
        raise NotImplementedError


class Recording(_Linears):
    """They keep what they give. For a model that is `recordable`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([m for m in model.modules() if isinstance(m, nn.Linear)])
        self.results: dict[nn.Linear, deque[tuple[Tensor, int]]] = {m: deque() for m in self.layers}
        """And each one's version: who changes it in place raises that."""

    def _forward(self, layer: nn.Linear, input: Tensor) -> Tensor:
        result = linear(input, layer.weight, layer.bias)
        self.results[layer].append((result, result._version))
        return result


class Reusing(_Linears):
    """They give what was recorded of these tokens, each result once."""

    def __init__(self, recording: Recording, token_N: Tensor) -> None:
        super().__init__(recording.layers)
        self.results = recording.results
        self.token_N = token_N

    def _forward(self, layer: nn.Linear, input: Tensor) -> Tensor:
        recorded, _ = self.results[layer].popleft()
        return _Given.apply(recorded.index_select(1, self.token_N), input, layer.weight, layer.bias)


def _plain(layer: nn.Linear) -> bool:
    """Whether it works as torch's own does. It may be hooked or sharded, unlike one that is joined."""
    return type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)


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
