"""The pocket team with wider heads: the same functions, in a shape that vLLM's CPU kernels take.

vLLM on the CPU has attention for heads of 32, 64, 80 ... numbers; wren has 16, finch 24, heron 32. A
head of d numbers is put into one of D by zeros that never touch a result and take no gradient:

- rotary positions turn number i with number i + d/2 by the angle theta^(-2i/d). With theta' =
  theta^(D/d) the first d/2 pairs of D turn by the same angles: theta'^(-2i/D) = theta^(-2i/d). So the
  two halves of a head go to the beginnings of the two halves of the wider one;
- scores are divided by sqrt(D) instead of sqrt(d): queries are multiplied by sqrt(D/d);
- Qwen's norm over a head divides by the root of the mean over D instead of d: its weights are
  multiplied by sqrt(d/D) (and for queries by sqrt(D/d) on top, for the line above).
"""

from __future__ import annotations

import shutil
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hacrl.pocket import pocket_path

HEAD = 32


def wide_member(name: str, folder: Path) -> Path:
    """A model folder that computes what pocket:NAME computes, with heads of 32."""
    source = pocket_path(name)
    shutil.copytree(source, folder)
    config = AutoConfig.from_pretrained(source)
    narrow, config.head_dim = config.head_dim, HEAD
    config.rope_parameters["rope_theta"] **= HEAD / narrow
    wide = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    normed = any("q_norm" in name for name, _ in start.named_parameters())
    state = {
        name: _widened(name.split(".")[-2], tensor, narrow, normed)
        for name, tensor in start.state_dict().items()
    }
    wide.load_state_dict(state)
    wide.save_pretrained(folder)
    return folder


def _widened(layer: str, tensor: Tensor, narrow: int, normed: bool) -> Tensor:
    if narrow == HEAD:
        return tensor
    louder = sqrt(HEAD / narrow)
    if layer == "q_proj":
        return _spread(tensor, narrow) * (1.0 if normed else louder)
    if layer in ("k_proj", "v_proj"):
        return _spread(tensor, narrow)
    if layer == "o_proj":
        return _spread(tensor.T, narrow).T
    if layer == "q_norm":  # both factors of the docstring: sqrt(D/d) * sqrt(d/D)
        return _spread(tensor, narrow)
    if layer == "k_norm":
        return _spread(tensor, narrow) / louder
    return tensor


def _spread(rows: Tensor, narrow: int) -> Tensor:
    """[heads * narrow, ...] -> [heads * HEAD, ...]: each half of a head, then zeros."""
    halves = rows.reshape(-1, 2, narrow // 2, *rows.shape[1:])
    spread = torch.zeros(halves.shape[0], 2, HEAD // 2, *rows.shape[1:])
    spread[:, :, : narrow // 2] = halves
    return spread.flatten(0, 2).contiguous()
