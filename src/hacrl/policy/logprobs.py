"""Token log-probabilities of given sequences: no padding, no full [tokens x vocabulary] tensor.

Axis suffixes: B sequences, T reply tokens (padded right), N tokens of all sequences laid end to end,
a shared prompt once, M scored tokens, L tokens of a padded row, D hidden size, V words.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hacrl.errors import first_line
from hacrl.policy.attention import Switch
from hacrl.policy.fuse import LearningFusion, worth_fusing
from hacrl.policy.head import head_logprobs, logits_logprobs
from hacrl.policy.packing import Copies, Layout, Packed, attending, lay, placed

NOTHING: AbstractContextManager[Any] = nullcontext()

EXACT, ROUNDED, MISTAKEN = 1e-3, 0.05, 0.15
"""How far log-probabilities by two ways may lie apart: in float32; in half precision, where the model
hardly rounds, and at most: the root mean square of the differences over the tokens' own standard
deviation. Rounding in bfloat16 makes it 0.005 to 0.035 in models from the pocket team's to 1.7B and 0.02
to 0.12 in Gemma-3-270M; a wrong mask 0.3 to 2; in trained models, wrong places or a scale that is off by
a fifth to a half 0.07 to 0.8."""
SLACK = 4
"""Rounding by one way may be so many times what it is by another, where both are few tokens' noise."""
COMPILED = 0.1
"""The same for parts that are compiled, in half precision: they leave roundings out, and so lie further
from those that are not than two kinds of attention from each other (measured: 0.01 to 0.035)."""
SCATTERED = 0.618034
"""Trial tokens lie this part of the vocabulary apart: its first words are often untrained, and round
more."""


@dataclass(frozen=True)
class Inputs:
    """Sequences ready for a forward pass.

    Example: make_inputs([[5, 6, 7], [8, 9]], [[0, 1, 1], [0, 1]], pad_id=0, device=cpu) has
    ids_N = 5 6 7 8 9, place_N = 0 1 2 0 1, predictor_M = 0 1 3, target_M = 6 7 9
    """

    layout: Layout
    """Where the sequences lie."""
    scored: tuple[int, ...]
    """How many tokens of each sequence are scored."""
    ids_N: Tensor
    place_N: Tensor
    """Position of each token in its sequence."""
    reply_mask_BT: Tensor
    """1.0 for a reply token, in reply order."""
    row_M: Tensor
    """Sequence of each scored token."""
    slot_M: Tensor
    """Its place among the sequence's reply tokens."""
    predictor_M: Tensor
    """Which of the N tokens stands before it: its hidden state says what comes."""
    target_M: Tensor
    """Its id."""
    pad_id: int

    @property
    def tokens(self) -> int:
        return self.layout.tokens


def make_inputs(
    token_ids: Sequence[Sequence[int]],
    loss_masks: Sequence[Sequence[int]],
    pad_id: int,
    device: torch.device,
    *,
    share: bool = False,
) -> Inputs:
    """With `share`, what sequences have before their first scored token lies once for all that have the
    same."""
    prompts = [mask.index(1) if 1 in mask else 0 for mask in loss_masks]
    layout = lay(token_ids, prompts if share else None)
    scored = [sum(mask) for mask in loss_masks]
    counts_B = torch.tensor(scored)
    ids_F = _end_to_end(token_ids)
    place_F = torch.cat([torch.arange(n) for n in layout.lengths])
    scored_M = _end_to_end(loss_masks).nonzero().squeeze(1)
    ids_N, place_N = ids_F.new_empty(layout.tokens), place_F.new_empty(layout.tokens)
    ids_N[layout.at_F], place_N[layout.at_F] = ids_F, place_F
    row_M = torch.arange(len(scored)).repeat_interleave(counts_B)
    slot_M = torch.cat([torch.arange(int(n)) for n in counts_B])
    reply_mask_BT = (torch.arange(int(counts_B.max())) < counts_B.unsqueeze(1)).float()
    return Inputs(
        layout=layout,
        scored=tuple(scored),
        ids_N=placed(ids_N, device),
        place_N=placed(place_N, device),
        reply_mask_BT=placed(reply_mask_BT, device),
        row_M=placed(row_M, device),
        slot_M=placed(slot_M, device),
        predictor_M=placed(layout.at_F[scored_M - 1], device),
        target_M=placed(ids_F[scored_M], device),
        pad_id=pad_id,
    )


def _end_to_end(rows: Sequence[Sequence[int]]) -> Tensor:
    """By way of an array: torch.tensor takes a list four times as long."""
    return torch.frombuffer(array("q", chain.from_iterable(rows)), dtype=torch.int64)


class LogProbs:
    """Log-probabilities of a causal LM at a temperature.

    The decoder gives hidden states, and the head is applied to the scored positions only, chunk by
    chunk. Whether that equals the model's own logits (some models scale or cap them) is measured
    once, as is whether the model gives the same for sequences laid end to end; where it does not,
    the model's own forward is used, or rows are padded.
    """

    def __init__(self, model: Any, temperature: float) -> None:
        self.model = model
        self.temperature = temperature
        self.packs = False
        """Whether sequences are laid end to end."""
        self.shares = False
        """Whether a prompt that several begin with may lie there once."""
        self._switch = Switch(model)
        self._fusion: LearningFusion | None = None
        self.plain_head = self._head_is_plain()
        """Whether the head is one matrix product of the decoder's result."""
        self._half = model.dtype != torch.float32
        self._allowed = ROUNDED if self._half else EXACT
        """How far two ways may lie apart in this model."""
        self.packs = self._packing_is_right()
        self.shares = self.packs and self._sharing_is_right()
        if self.packs and worth_fusing(model):
            self._fusion = self._right_fusion()

    @property
    def fused(self) -> bool:
        """Whether small parts are compiled (fuse.py)."""
        return self._fusion is not None

    def __call__(self, inputs: Inputs) -> Tensor:
        """[B, T], 0 where padded; with gradient where gradients are on."""
        return spread(self.of_tokens(inputs)[0], inputs)

    def of_tokens(
        self,
        inputs: Inputs,
        known: tuple[Tensor, Tensor] | None = None,
        decoding: AbstractContextManager[Any] = NOTHING,
    ) -> tuple[Tensor, Tensor]:
        """Of each scored token, log-probability and logsumexp. Where both are `known` from a pass
        without gradient, the head's forward is left out; the decoder's is inside `decoding`."""
        if self.plain_head:
            head = self.model.get_output_embeddings()
            with decoding:
                hidden_MD = self._forward(self.model.base_model, inputs, "last_hidden_state")
            return head_logprobs(
                hidden_MD, head.weight, head.bias, inputs.target_M, self.temperature, known
            )
        logits_MV = self._forward(self.model, inputs, "logits")
        return logits_logprobs(logits_MV, inputs.target_M, self.temperature)

    def _forward(self, module: Any, inputs: Inputs, output: str) -> Tensor:
        """What the module says at the tokens that stand before a scored one."""
        if self.packs:
            packed = Packed(inputs.layout, inputs.ids_N.device)
            with attending(self._switch, packed, self._fusion):
                found_1ND = module(
                    input_ids=inputs.ids_N.unsqueeze(0),
                    position_ids=inputs.place_N.unsqueeze(0),
                    use_cache=False,
                )[output]
            if inputs.layout.shares:  # what follows a prompt follows its one last token
                return Copies(inputs.predictor_M, of=inputs.tokens).taken_from(found_1ND.squeeze(0))
            return found_1ND.squeeze(0)[inputs.predictor_M]
        assert not inputs.layout.shares, "padded rows share nothing"
        lengths = inputs.layout.lengths
        lengths_B = torch.tensor(lengths, device=inputs.ids_N.device)
        row_N = torch.arange(len(lengths_B), device=lengths_B.device).repeat_interleave(lengths_B)
        ids_BL = inputs.ids_N.new_full((len(lengths), max(lengths)), inputs.pad_id)
        mask_BL = torch.zeros_like(ids_BL)
        ids_BL[row_N, inputs.place_N] = inputs.ids_N
        mask_BL[row_N, inputs.place_N] = 1
        found_BLD = module(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False)[output]
        return found_BLD[row_N[inputs.predictor_M], inputs.place_N[inputs.predictor_M]]

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or self.model.base_model is self.model:
            return False
        ids = torch.arange(8, device=head.weight.device).unsqueeze(0) % head.weight.shape[0]
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        own = self.model(input_ids=ids, use_cache=False).logits
        mine = head(hidden)
        return own.shape == mine.shape and torch.allclose(
            own.float(), mine.float(), atol=1e-4, rtol=1e-4
        )

    def _packing_is_right(self) -> bool:
        """Whether sequences laid end to end have the log-probabilities that they have padded, by the
        plainest attention that the model has.

        Only with transformers' default attention: who asks for another one gets it.
        """
        name = getattr(self.model.config, "_attn_implementation", None)
        if name != "sdpa" or not getattr(self.model, "_supports_attention_backend", False):
            return False
        inputs = self._trial_inputs()
        with torch.no_grad():
            with self._switch.on("eager"):
                padded_M = self.of_tokens(inputs)[0]
            if self._half:
                rounding = _gap(self.of_tokens(inputs)[0], padded_M)  # "sdpa" computes the same
                self._allowed = min(max(ROUNDED, SLACK * rounding), MISTAKEN)
            self.packs = True
            try:
                packed_M = self.of_tokens(inputs)[0]
            except (AttributeError, TypeError, KeyError):  # it does not tell how it attends
                return False
        return self._alike(
            packed_M,
            padded_M,
            "sequences laid end to end have other log-probabilities than padded ones, so rows are "
            "padded and scoring and updates take longer",
        )

    @torch.no_grad()
    def _sharing_is_right(self) -> bool:
        """Whether sequences have the log-probabilities that each has with a prompt of its own."""
        apart, shared = (
            self.of_tokens(self._trial_inputs(prompt=5, share=share))[0] for share in (False, True)
        )
        return self._alike(
            shared,
            apart,
            "sequences that share their prompt have other log-probabilities than with one each, so each "
            "has its own and scoring and updates take longer",
        )

    def _right_fusion(self) -> LearningFusion | None:
        """Small parts fused, if they can be compiled here, with gradient and without, and give what
        they gave."""
        inputs = self._trial_inputs()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        with torch.no_grad():
            plain_M = self.of_tokens(inputs)[0]
        try:
            self._fusion = fusion = LearningFusion(self.model)
            with torch.no_grad():
                fused_M = self.of_tokens(inputs)[0]
            if trained:
                with torch.enable_grad():
                    total = self.of_tokens(inputs)[0].sum()
                torch.autograd.grad(total, min(trained, key=Tensor.numel), allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            warnings.warn(
                "small parts cannot be compiled here, so scoring and updates take about a third longer: "
                f"{first_line(error)}",
                stacklevel=2,
            )
            return None
        finally:
            self._fusion = None
        alike = self._alike(
            fused_M,
            plain_M,
            "small parts compute something else when compiled, so they are left as they are and scoring "
            "and updates take about a third longer",
            at_least=COMPILED if self._half else 0.0,
        )
        return fusion if alike else None

    def _alike(
        self, found_M: Tensor, expected_M: Tensor, otherwise: str, at_least: float = 0.0
    ) -> bool:
        """Whether the two differ by rounding alone; where not, that is told, with its consequence."""
        gap, allowed = _gap(found_M, expected_M), max(self._allowed, at_least)
        if gap <= allowed:  # not where it is nan
            return True
        warnings.warn(
            f"{otherwise}: they differ by {gap:.2g} of how far tokens lie apart, where rounding "
            f"explains {allowed:.2g}. If the model is a common one, please report it.",
            stacklevel=2,
        )
        return False

    def _trial_inputs(self, prompt: int = 0, share: bool = False) -> Inputs:
        """A few sequences; all but the last begin with the same so many tokens."""
        weight = self.model.get_input_embeddings().weight

        def token(number: int) -> int:
            return int(number * SCATTERED % 1 * len(weight))

        rows = [[token(7 * i + 3 * n + 1) for i in range(n)] for n in (6, 9, 4, 4)]
        begin = [token(5 * i + 2) for i in range(prompt)]
        ids = [*(begin + row for row in rows[:-1]), rows[-1]]
        unscored = [*[max(1, prompt)] * (len(rows) - 1), 1]
        masks = [[0] * n + [1] * (len(row) - n) for row, n in zip(ids, unscored, strict=True)]
        return make_inputs(ids, masks, 0, weight.device, share=share)


def spread(value_M: Tensor, inputs: Inputs) -> Tensor:
    """Scored tokens' values in rows, [B, T], 0 where padded."""
    grid_BT = value_M.new_zeros(inputs.reply_mask_BT.shape)
    return grid_BT.index_put((inputs.row_M, inputs.slot_M), value_M)


def _gap(found_M: Tensor, expected_M: Tensor) -> float:
    """Root mean square of the differences over the expected ones' standard deviation."""
    apart = expected_M.std().clamp_min(1e-30)  # all the same is alike
    return ((found_M - expected_M).square().mean().sqrt() / apart).item()
