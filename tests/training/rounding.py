"""A machine whose matrix products round by their shape, as a GPU's do in half precision; a CPU's do
not, so tests of what that brings play it."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode


class RoundsByShape(TorchFunctionMode):
    """Inside the block a linear layer adds up its sums in one to three parts, by its number of rows."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not linear:
            return func(*args, **(kwargs or {}))
        x, weight, *bias = args
        parts = 1 + x.shape[:-1].numel() % 3
        pieces = zip(x.tensor_split(parts, -1), weight.tensor_split(parts, -1), strict=True)
        result = sum(linear(a, b) for a, b in pieces)
        return result if not bias or bias[0] is None else result + bias[0]
