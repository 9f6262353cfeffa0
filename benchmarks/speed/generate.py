"""transformers' `generate` on the same requests: the baseline that every user has."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from hacrl.noise import exponential_noise
from hacrl.policy.policy import Policy
from hacrl.sampling.base import Reply, Request


def padded_left(
    prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> dict[str, Tensor]:
    width = max(map(len, prompts))
    ids = [[pad_id] * (width - len(p)) + list(p) for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def generate_rows(model: Any, requests: Sequence[Request], pad_id: int) -> None:
    """Plain sampling of replies with forced lengths: one batch, which runs until its longest is done."""
    longest = max(r.limit for r in requests)
    model.generate(
        **padded_left([r.prompt_ids for r in requests], pad_id, model.device),
        generation_config=GenerationConfig(
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=pad_id,
            eos_token_id=None,
        ),
    )


class Noise(LogitsProcessor):
    """Turns greedy decoding into hacrl's own draw: the same noise, counted from the same keys."""

    def __init__(self, keys: Sequence[int], prompt_width: int, device: torch.device) -> None:
        self.keys_B = torch.tensor(keys, device=device)
        self.prompt_width = prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = input_ids.shape[1] - self.prompt_width
        noise_BV = exponential_noise(
            self.keys_B, torch.full_like(self.keys_B, position), scores.shape[1]
        )
        return scores.float().log_softmax(1) + noise_BV.log_().neg_()


class GenerateSampler:
    """hacrl's sampler interface over `generate`: rollouts as a script around it would do them.

    Log-probabilities are not kept in the loop, as such scripts do not; they come from a scoring pass
    of the policy, outside of what the benchmark times.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.end_ids, self.pad_id = policy.renderer.end_ids, policy.renderer.pad_id
        self.rows = policy.agent.sampler_rows
        self.seconds = 0.0
        """Spent in writing replies; scoring them is not counted."""

    def weights_changed(self) -> None:
        """It reads the trainer's own tensors."""

    @torch.no_grad()
    def write(self, requests: Sequence[Request], *, own_noise: bool = True) -> list[list[int]]:
        """The replies' ids, by hacrl's noise, or by torch's generator (what scripts do)."""
        replies: list[list[int]] = []
        model = self.policy.model
        for first in range(0, len(requests), self.rows):
            part = requests[first : first + self.rows]
            inputs = padded_left([r.prompt_ids for r in part], self.pad_id, model.device)
            width = inputs["input_ids"].shape[1]
            noise = Noise([r.key for r in part], width, model.device)
            settings = GenerationConfig(
                do_sample=not own_noise,
                top_k=0 if not own_noise else None,
                max_new_tokens=max(r.limit for r in part),
                pad_token_id=self.pad_id,
                eos_token_id=list(self.end_ids),
            )
            ids = model.generate(
                **inputs,
                generation_config=settings,
                logits_processor=LogitsProcessorList([noise] if own_noise else []),
            )[:, width:].tolist()
            replies += [self._cut(row, r.limit) for row, r in zip(ids, part, strict=True)]
        return replies

    def _cut(self, row: list[int], limit: int) -> list[int]:
        for i, token in enumerate(row[:limit]):
            if token in self.end_ids:
                return row[: i + 1]
        return row[:limit]

    def sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        assert temperature == 1.0, "the benchmark samples at temperature 1"
        start = time.perf_counter()
        replies = self.write(requests)
        self.seconds += time.perf_counter() - start
        scores = self.policy.score(
            [(r.prompt_ids, ids) for r, ids in zip(requests, replies, strict=True)]
        )
        return [
            Reply(tuple(ids), tuple(values), ids[-1] in self.end_ids)
            for ids, values in zip(replies, scores, strict=True)
        ]
