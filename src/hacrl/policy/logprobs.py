"""Token log-probabilities of given sequences, without padding and without all logits at once.

Axis suffixes: B sequences, T reply tokens (padded right), N tokens of all sequences in one row, M scored
tokens, L tokens of a padded row, D hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from hacrl.policy.attention import Switch
from hacrl.policy.batch import Inputs
from hacrl.policy.fast_paths import choose_fast_paths, head_scale
from hacrl.policy.fuse import LearningFusion
from hacrl.policy.head import head_logprobs, logits_logprobs
from hacrl.policy.packing import Copies, Packed, attending


class LogProbs:
    """Log-probabilities of a causal LM at a temperature.

    The decoder computes hidden states, and the head is applied to the scored positions only, chunk by
    chunk. Faster paths are used where a check finds that they give the model's own numbers
    (fast_paths.py); otherwise the model's own forward is used, with padded rows.
    """

    def __init__(self, model: Any, temperature: float) -> None:
        self.model = model
        self.temperature = temperature
        self.switch = Switch(model)
        self.head_scale = head_scale(model)
        """Factor of the logits to the head's matrix product of the decoder's output; None if they are no
        such product, and the model's own logits are needed."""
        self.packs = False  # whether sequences are concatenated in one row instead of padded
        self.shares = False
        """Whether a prompt that several sequences start with may be in the row once."""
        self.fusion: LearningFusion | None = None
        """Compiled norms, rotary embedding and gated product (fuse.py), if used."""
        choose_fast_paths(self)

    def __call__(self, inputs: Inputs) -> Tensor:
        """[B, T], 0 where padded; with gradient if gradients are enabled."""
        grid_BT = torch.zeros_like(inputs.reply_mask_BT)
        return grid_BT.index_put((inputs.row_M, inputs.slot_M), self.of_tokens(inputs))

    def of_tokens(self, inputs: Inputs) -> Tensor:
        """[M], of each scored token."""
        if self.head_scale is not None:
            head = self.model.get_output_embeddings()
            hidden_MD = self._forward(self.model.base_model, inputs, "last_hidden_state")
            temperature = self.temperature / self.head_scale
            return head_logprobs(hidden_MD, head.weight, head.bias, inputs.target_M, temperature)
        logits_MV = self._forward(self.model, inputs, "logits")
        return logits_logprobs(logits_MV, inputs.target_M, self.temperature)

    def _forward(self, module: Any, inputs: Inputs, output: str) -> Tensor:
        """The module's output at the tokens that predict a scored one."""
        if not self.packs:
            return self._padded_forward(module, inputs, output)
        packed = Packed(inputs.layout, inputs.ids_N.device)
        with attending(self.switch, packed, self.fusion):
            found_1ND = module(
                input_ids=inputs.ids_N.unsqueeze(0),
                position_ids=inputs.position_N.unsqueeze(0),
                use_cache=False,
            )[output]
        if inputs.layout.shares:  # the last token of a shared prompt predicts several tokens
            return Copies(inputs.predictor_M, of=inputs.layout.tokens).taken_from(
                found_1ND.squeeze(0)
            )
        return found_1ND.squeeze(0)[inputs.predictor_M]

    def _padded_forward(self, module: Any, inputs: Inputs, output: str) -> Tensor:
        assert not inputs.layout.shares, "padded rows cannot share a prompt"
        lengths = inputs.layout.lengths
        lengths_B = torch.tensor(lengths, device=inputs.ids_N.device)
        row_N = torch.arange(len(lengths_B), device=lengths_B.device).repeat_interleave(lengths_B)
        ids_BL = inputs.ids_N.new_full((len(lengths), max(lengths)), inputs.pad_id)
        mask_BL = torch.zeros_like(ids_BL)
        ids_BL[row_N, inputs.position_N] = inputs.ids_N
        mask_BL[row_N, inputs.position_N] = 1
        found_BLD = module(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False)[output]
        return found_BLD[row_N[inputs.predictor_M], inputs.position_N[inputs.predictor_M]]
