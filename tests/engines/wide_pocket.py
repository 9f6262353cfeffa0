"""The pocket team with wider heads: the same functions, with head sizes that vLLM supports on the CPU.

vLLM's CPU attention supports head sizes 32, 64, 80, ...; wren has 16, finch 24, heron 32. A head of size
d becomes one of size D by padding with zeros, which change no result and get no gradient:

- rotary embeddings rotate dimensions i and i + d/2 by the angle theta^(-2i/d). With theta' =
  theta^(D/d) the first d/2 pairs of D have the same angles: theta'^(-2i/D) = theta^(-2i/d). So each half
  of a head moves to the beginning of a half of the wider head;
- scores are divided by sqrt(D) instead of sqrt(d), so queries are multiplied by sqrt(D/d);
- Qwen's head norm takes the mean over D instead of d, so its weights are multiplied by sqrt(d/D) (and
  those of queries also by sqrt(D/d), see above).
"""

import shutil
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hacrl.pocket import pocket_path

HEAD = 32


def wide_member(name: str, folder: Path) -> Path:
    """Write a model that computes the same as pocket:NAME with heads of size 32; returns its folder."""
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
    if layer == "q_norm":  # sqrt(D/d) * sqrt(d/D) = 1
        return _spread(tensor, narrow)
    if layer == "k_norm":
        return _spread(tensor, narrow) / louder
    return tensor


def _spread(rows: Tensor, narrow: int) -> Tensor:
    """[heads * narrow, ...] -> [heads * HEAD, ...], each half of a head followed by zeros."""
    halves = rows.reshape(-1, 2, narrow // 2, *rows.shape[1:])
    spread = torch.zeros(halves.shape[0], 2, HEAD // 2, *rows.shape[1:])
    spread[:, :, : narrow // 2] = halves
    return spread.flatten(0, 2).contiguous()
