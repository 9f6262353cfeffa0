"""The gradient of a minibatch: micro-batches through forward, loss and backward.

Rows of advantage 0 are skipped unless there is a KL term: they add nothing to any algorithm's loss
(algorithms/base.py). Rows that a clip leaves without gradient go through the model like all others; only
the head skips tokens whose gradient is zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hacrl.policy.batch import divisors_of, make_batch, make_inputs
from hacrl.policy.microbatch import plan_microbatches
from hacrl.policy.update import Loss, Sums, merge_rows
from hacrl.stopping import check
from hacrl.types import LossOutput, MicroBatch, Sample, Update

if TYPE_CHECKING:
    from hacrl.policy.policy import Policy


def accumulate_gradient(
    policy: Policy, samples: Sequence[Sample], chosen: Sequence[int], loss: Loss, update: Update
) -> Sums:
    """Add the gradient of the samples `chosen` to the policy's master. Losses are divided by the counts
    of the whole minibatch `samples`, so micro-batches and skipped rows do not change the sum."""
    divisors = divisors_of(samples)
    has_kl = policy.start_logprobs is not None and divisors["num_own"] > 0  # it is of own samples
    forward = [i for i in chosen if samples[i].advantage != 0 or has_kl]
    prompts, lengths = [s.prompt_ids for s in samples], [len(s.token_ids) for s in samples]
    mine = policy.ranks.split([prompts[i] for i in forward], [lengths[i] for i in forward])
    outputs: list[tuple[list[int], LossOutput]] = []
    with _training_mode(policy):
        for rows in microbatches(policy, [forward[i] for i in mine], lengths, prompts):
            check()
            micro = [samples[i] for i in rows]
            outputs.append((rows, _add_gradient(policy, micro, loss, update, divisors, has_kl)))
    # Read after the last micro-batch: reading waits for the GPU.
    total, kl = 0.0, 0.0
    ratios: list[float | None] = [None] * len(samples)
    weights: list[float | None] = [None] * len(samples)
    for rows, output in outputs:
        total += output.loss.item()
        kl += float(output.kl)
        values = zip(rows, output.ratio_B.tolist(), output.weight_B.tolist(), strict=False)
        for i, ratio, weight in values:
            ratios[i], weights[i] = ratio, weight
    parts = policy.ranks.gather(Sums(total, kl, ratios, weights))
    return Sums(
        loss=sum(p.loss for p in parts),
        kl=sum(p.kl for p in parts),
        ratios=merge_rows([p.ratios for p in parts]),
        weights=merge_rows([p.weights for p in parts]),
    )


def _add_gradient(
    policy: Policy,
    samples: Sequence[Sample],
    loss: Loss,
    update: Update,
    divisors: Mapping[str, int],
    has_kl: bool,
) -> LossOutput:
    """Forward, loss and backward of one micro-batch. Returns the loss without its graph: the graph is
    freed here, while the GPU still computes, and not when it waits for the optimizer step."""
    micro = samples or [idle_sample(policy.renderer.pad_id)]
    inputs = make_inputs(
        [s.token_ids for s in micro],
        [s.loss_mask for s in micro],
        policy.renderer.pad_id,
        policy.device,
        share=policy.logprobs.shares,
    )
    start_BT = None
    if has_kl and policy.start_logprobs is not None:
        with torch.no_grad():
            start_BT = policy.start_logprobs(inputs)
    batch = make_batch(micro, inputs, policy.logprobs(inputs), start_BT, divisors)
    output = loss(batch, update) if samples else _no_loss(batch)
    output.loss.backward()
    return replace(output, loss=output.loss.detach())


def microbatches(
    policy: Policy, rows: Sequence[int], lengths: Sequence[int], prompts: Sequence[tuple[int, ...]]
) -> list[list[int]]:
    """Split `rows` into micro-batches; `lengths` and `prompts` are of all rows. Every rank gets the
    same number of micro-batches, because each forward is a collective; the last ones may be empty."""
    planned = plan_microbatches(
        [lengths[i] for i in rows],
        policy.agent.microbatch_tokens,
        padded=not policy.logprobs.packs,
        prompts=[prompts[i] for i in rows] if policy.logprobs.shares else None,
    )
    most = max(policy.ranks.gather(len(planned)))
    return [[rows[i] for i in batch] for batch in planned] + [[]] * (most - len(planned))


def idle_sample(pad_id: int) -> Sample:
    """Fills an empty micro-batch: the forward of a rank that has no more rows."""
    return Sample("", 0, "", False, (pad_id, pad_id), (0, 1), 0.0, (0.0,), (0.0,))


def _no_loss(batch: MicroBatch) -> LossOutput:
    """The loss of an empty micro-batch: zero, with a graph."""
    nothing = torch.zeros(0)
    return LossOutput((batch.logprobs_BT * 0.0).sum(), nothing, nothing)


@contextlib.contextmanager
def _training_mode(policy: Policy) -> Iterator[None]:
    """transformers checkpoints activations only in training mode. The flag of a layer is not that of its
    parts: the noise of a router stays off. Dropout is 0."""
    for module in policy.network.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = policy.agent.gradient_checkpointing
    try:
        yield
    finally:
        policy.network.eval()
