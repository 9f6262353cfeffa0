"""Triton kernels of a decode step: attention over a paged KV cache, and the draw of a token.

Attention reads only the filled part of each row's cache. The query heads of one key head form one matrix
product, so keys are not repeated for grouped-query attention. The draw reads the logits once and
computes the noise of noise.py on the fly, without a [rows, words] tensor.

Axis suffixes: R rows, H query heads, K key heads, D head size, V words, S splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hacrl.policy.attention import Rule

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
MIX1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
MIX2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
FAR = tl.constexpr(-1.0e30)
DRAW_SPLITS = 8
DRAW_BLOCK = 1024
NUM_WARPS, NUM_STAGES = 4, 2


# ---------------------------------------------------------------- attention


@triton.jit
def _soft_cap(scores, cap):
    """cap * tanh(scores / cap)"""
    return cap * (2.0 / (1.0 + tl.exp(-2.0 * scores / cap)) - 1.0)


@triton.jit
def _add_token(q, k, v, top, total, acc, scale, cap, CAPPED: tl.constexpr):
    """Add one key and value to an online softmax."""
    scores = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
    if CAPPED:
        scores = _soft_cap(scores, cap)
    new_top = tl.maximum(top, scores)
    shrink = tl.exp(top - new_top)
    weight = tl.exp(scores - new_top)
    total = total * shrink + weight
    acc = acc * shrink[:, None] + weight[:, None] * v.to(tl.float32)[None, :]
    return new_top, total, acc


@triton.jit
def _attend_kernel(
    query, key, value, keys, values, table, position, out, part_out, part_max, part_sum,
    scale, window, cap,
    query_row, query_head, key_row, key_head, value_row, value_head,
    page_stride, head_stride, table_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Attention of one row's new token, at `position`, with one key head over one split of its pages."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g, d, o = tl.arange(0, GROUP_PAD), tl.arange(0, SIZE_PAD), tl.arange(0, PAGE)
    real = (g < GROUP)[:, None] & (d < SIZE)[None, :]
    heads = head * GROUP + g
    length = tl.load(position + row).to(tl.int32)
    q = tl.load(
        query + row * query_row + heads[:, None] * query_head + d[None, :], mask=real, other=0.0
    )
    top = tl.full([GROUP_PAD], FAR, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, SIZE_PAD], tl.float32)
    first = 0
    if WINDOWED:
        first = tl.maximum(length + 1 - window, 0)
    for p in range(first // PAGE + split, tl.cdiv(length, PAGE), SPLITS):
        page = tl.load(table + row * table_row + p).to(tl.int64)
        at = page * page_stride + head * head_stride + o[:, None] * SIZE + d[None, :]
        index = p * PAGE + o
        seen = (index < length) & (index >= first)
        stored = seen[:, None] & (d < SIZE)[None, :]
        k = tl.load(keys + at, mask=stored, other=0.0)
        v = tl.load(values + at, mask=stored, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scores = _soft_cap(scores, cap)
        scores = tl.where(seen[None, :], scores, FAR)
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - new_top)
        weight = tl.where(seen[None, :], tl.exp(scores - new_top[:, None]), 0.0)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = new_top
    if split == 0:  # the new token: attend to it from registers and store it in the cache
        k = tl.load(key + row * key_row + head * key_head + d, mask=d < SIZE, other=0.0)
        v = tl.load(value + row * value_row + head * value_head + d, mask=d < SIZE, other=0.0)
        page = tl.load(table + row * table_row + length // PAGE).to(tl.int64)
        at = page * page_stride + head * head_stride + (length % PAGE) * SIZE + d
        tl.store(keys + at, k, mask=d < SIZE)
        tl.store(values + at, v, mask=d < SIZE)
        top, total, acc = _add_token(q, k, v, top, total, acc, scale, cap, CAPPED)
    all_heads = HEADS * GROUP
    if SPLITS == 1:
        at = (row * all_heads + heads)[:, None] * SIZE + d[None, :]
        tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
    else:
        place = (row * all_heads + heads) * SPLITS + split
        tl.store(part_out + place[:, None] * SIZE + d[None, :], acc, mask=real)
        tl.store(part_max + place, top, mask=g < GROUP)
        tl.store(part_sum + place, total, mask=g < GROUP)


@triton.jit
def _join_kernel(
    part_out, part_max, part_sum, out,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one row and query head."""
    place = tl.program_id(0)
    s, d = tl.arange(0, SPLITS), tl.arange(0, SIZE_PAD)
    top = tl.load(part_max + place * SPLITS + s)
    total = tl.load(part_sum + place * SPLITS + s)
    weight = tl.exp(top - tl.max(top, 0))
    at = (place * SPLITS + s)[:, None] * SIZE + d[None, :]
    acc = tl.load(part_out + at, mask=(d < SIZE)[None, :], other=0.0)
    joined = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + place * SIZE + d, joined.to(out.dtype.element_ty), mask=d < SIZE)


def decode_attention(
    query_RHD: Tensor,
    key_RKD: Tensor,
    value_RKD: Tensor,
    keys: Tensor,
    values: Tensor,
    table_RP: Tensor,
    position_R: Tensor,
    rule: Rule,
    splits: int,
) -> Tensor:
    """Attention [R, H, D] of one new token per row over its pages; stores the token's key and value.

    `keys` and `values` are the pages of one layer: [pages, K, tokens of a page, D].
    """
    rows, all_heads, size = query_RHD.shape
    _, heads, page, _ = keys.shape
    group = all_heads // heads
    out = torch.empty((rows, all_heads, size), dtype=query_RHD.dtype, device=query_RHD.device)
    parts = rows * all_heads * splits if splits > 1 else 1
    part_out = torch.empty(parts * size, dtype=torch.float32, device=out.device)
    part_max = torch.empty(parts, dtype=torch.float32, device=out.device)
    part_sum = torch.empty(parts, dtype=torch.float32, device=out.device)
    size_pad = triton.next_power_of_2(size)
    _attend_kernel[(rows, heads, splits)](
        query_RHD, key_RKD, value_RKD, keys, values, table_RP, position_R,
        out, part_out, part_max, part_sum,
        rule.scale, rule.window or 0, rule.cap or 1.0,
        query_RHD.stride(0), query_RHD.stride(1), key_RKD.stride(0), key_RKD.stride(1),
        value_RKD.stride(0), value_RKD.stride(1), keys.stride(0), keys.stride(1), table_RP.stride(0),
        HEADS=heads, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)),
        SIZE=size, SIZE_PAD=size_pad, PAGE=page, SPLITS=splits,
        WINDOWED=rule.window is not None, CAPPED=rule.cap is not None,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(rows * all_heads,)](
            part_out, part_max, part_sum, out, SIZE=size, SIZE_PAD=size_pad, SPLITS=splits
        )
    return out


# ---------------------------------------------------------------- the draw


@triton.jit
def _mix(x):
    """splitmix64's finaliser. The masks turn arithmetic shifts into logical ones."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _exponential(u):
    """-log(1 - u), by a series for small u, where 1 - u loses precision."""
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u / 6)))))
    return tl.where(u < 0.03125, series, -tl.log(1 - u))


@triton.jit
def _scan_kernel(
    logits, row_stride, words, keys, index, settings, best, best_word, best_logit, top, total,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Largest noisy logit and softmax normaliser over one split of a row's words."""
    row, split = tl.program_id(0), tl.program_id(1)
    inverse, noisy = tl.load(settings), tl.load(settings + 1)
    stream = _mix(tl.load(keys + row) + (tl.load(index + row).to(tl.int64) + 1) * GOLDEN)
    each = tl.cdiv(words, SPLITS * BLOCK) * BLOCK
    lane = tl.arange(0, BLOCK)
    lane_best = tl.full([BLOCK], float("-inf"), tl.float32)
    lane_word = tl.zeros([BLOCK], tl.int32)
    lane_logit = tl.zeros([BLOCK], tl.float32)
    lane_top = tl.full([BLOCK], FAR, tl.float32)
    lane_total = tl.zeros([BLOCK], tl.float32)
    for start in range(split * each, tl.minimum((split + 1) * each, words), BLOCK):
        word = start + lane
        there = word < words
        logit = tl.load(logits + row.to(tl.int64) * row_stride + word, mask=there, other=0.0)
        logit = logit.to(tl.float32) * inverse
        bits = (_mix(stream + (word + 1).to(tl.int64) * GOLDEN) >> 32) & 0xFFFFFFFF
        u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
        score = tl.where(there, logit - noisy * tl.log(_exponential(u)), float("-inf"))
        better = score > lane_best
        lane_best = tl.where(better, score, lane_best)
        lane_word = tl.where(better, word, lane_word)
        lane_logit = tl.where(better, logit, lane_logit)
        new_top = tl.where(there, tl.maximum(lane_top, logit), lane_top)
        lane_total = lane_total * tl.exp(lane_top - new_top)
        lane_total += tl.where(there, tl.exp(logit - new_top), 0.0)
        lane_top = new_top
    place = row * SPLITS + split
    winner = tl.argmax(lane_best, 0)
    chosen = lane == winner
    tl.store(best + place, tl.max(lane_best, 0))
    tl.store(best_word + place, tl.sum(tl.where(chosen, lane_word, 0), 0))
    tl.store(best_logit + place, tl.sum(tl.where(chosen, lane_logit, 0.0), 0))
    peak = tl.max(lane_top, 0)
    tl.store(top + place, peak)
    tl.store(total + place, tl.sum(lane_total * tl.exp(lane_top - peak), 0))


@triton.jit
def _advance_kernel(
    best, best_word, best_logit, top, total, ends, num_ends, tick,
    token, position, index, limit, done, out_token, out_logprob, out_row,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of a row, store its token, and advance the row unless it is done."""
    row = tl.program_id(0)
    s = tl.arange(0, SPLITS)
    place = row * SPLITS + s
    scores = tl.load(best + place)
    chosen = s == tl.argmax(scores, 0)
    word = tl.sum(tl.where(chosen, tl.load(best_word + place), 0), 0)
    logit = tl.sum(tl.where(chosen, tl.load(best_logit + place), 0.0), 0)
    tops = tl.load(top + place)
    peak = tl.max(tops, 0)
    normaliser = peak + tl.log(tl.sum(tl.load(total + place) * tl.exp(tops - peak), 0))
    at = row * out_row + tl.load(tick)
    tl.store(out_token + at, word)
    tl.store(out_logprob + at, logit - normaliser)
    if tl.load(done + row) == 0:
        written = tl.load(index + row) + 1
        finished = written >= tl.load(limit + row)
        for i in range(num_ends):
            finished = finished | (tl.load(ends + i) == word)
        tl.store(index + row, written)
        tl.store(token + row, word.to(tl.int64))
        tl.store(position + row, tl.load(position + row) + 1)
        tl.store(done + row, finished.to(tl.int64))


def draw_and_advance(
    logits_RV: Tensor,
    rows: dict[str, Tensor],
    settings: Tensor,
    ends: Tensor,
    tick: Tensor,
    out_token: Tensor,
    out_logprob: Tensor,
) -> None:
    """Draw a token for every row by Gumbel-max and advance the rows, without the host.

    `rows` has the tensors of STATE in decode.py. `settings` is [1 / temperature, 1 for sampling or 0
    for greedy]. Column `tick` of the outputs gets the tokens and their log-probabilities.
    """
    count, words = logits_RV.shape
    parts = [
        torch.empty(count * DRAW_SPLITS, dtype=dtype, device=logits_RV.device)
        for dtype in (torch.float32, torch.int32, torch.float32, torch.float32, torch.float32)
    ]
    _scan_kernel[(count, DRAW_SPLITS)](
        logits_RV, logits_RV.stride(0), words, rows["key"], rows["index"], settings, *parts,
        SPLITS=DRAW_SPLITS, BLOCK=DRAW_BLOCK, num_warps=4,
    )  # fmt: skip
    _advance_kernel[(count,)](
        *parts, ends, len(ends), tick,
        rows["token"], rows["position"], rows["index"], rows["limit"], rows["done"],
        out_token, out_logprob, out_token.stride(0),
        SPLITS=DRAW_SPLITS, num_warps=1,
    )  # fmt: skip
