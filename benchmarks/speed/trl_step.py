"""One GSPO step of TRL's GRPOTrainer on the same model, prompts, lengths and batch.

Set as a user who knows it would: sequence-level ratio, no KL, bfloat16, no checkpointing of
activations while memory allows, a per-device batch that fills the GPU, and as many optimizer steps
on one generation as hacrl makes. Its weights are bfloat16 without a float32 master: less work than
hacrl does, and its fastest setting. Lengths are forced by a logits processor, since a random model
does not stop: the end token is put where a reply has its length, and nowhere else.
"""

import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PrinterCallback, TrainerCallback

from speed.floor import synchronize
from speed.measure import free, peak_gb, reset_peak
from speed.shapes import build_model, make_tokenizer, text_of, vocabulary_of
from speed.workload import Trace


@dataclass(frozen=True)
class TrlStep:
    """Seconds of one step and of its phases."""

    whole: float
    generate: float
    score: float
    """And rewards and bookkeeping before the first optimizer step."""
    update: float
    peak_gb: float | None
    settings: str


class EndAt(LogitsProcessor):
    """The end token exactly as the last token of each row."""

    def __init__(self, lengths: list[int], end_id: int, prompt_width: int) -> None:
        self.lengths, self.end_id, self.prompt_width = lengths, end_id, prompt_width
        self.by_position: dict[int, list[int]] = {}
        for row, n in enumerate(lengths):
            self.by_position.setdefault(n - 1, []).append(row)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self.end_id] = float("-inf")
        rows = self.by_position.get(input_ids.shape[1] - self.prompt_width)
        if rows:
            scores[rows] = float("-inf")
            scores[rows, self.end_id] = 0.0
        return scores


class _Watch(TrainerCallback):
    """When generations begin and end, and when the last optimizer step was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[dict[str, float]] = []

    def now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps[-1]["end"] = self.now()


def trl_step(
    shape: str,
    trace: Trace,
    device: torch.device,
    *,
    updates: int,
    per_device: int,
    checkpointing: bool = False,
    steps: int = 2,
) -> TrlStep:
    """The last of `steps` steps; the ones before warm up. Smaller batches where memory runs out."""
    found: TrlStep | None = None
    try:
        found = _run(shape, trace, device, updates, per_device, checkpointing, steps)
    except torch.OutOfMemoryError:
        if per_device <= 4 and checkpointing:
            raise
    free(device)  # outside of the except block: the traceback holds the trainer
    if found is not None:
        return found
    return trl_step(
        shape,
        trace,
        device,
        updates=updates,
        per_device=max(4, per_device // 2),
        checkpointing=per_device <= 8,
        steps=steps,
    )


SETTINGS = {
    "importance_sampling_level": "sequence",
    "loss_type": "grpo",
    "epsilon": 3e-4,
    "epsilon_high": 4e-4,
    "beta": 0.0,
    "learning_rate": 1e-12,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "temperature": 1.0,
    "shuffle_dataset": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""Settings of TRL that do not depend on the case: sequence ratios, no KL, no logging."""


def _time_generate(model: Any, trace: Trace, end_id: int, watch: _Watch) -> None:
    """Force the reply lengths of the trace and measure the time of `generate`."""
    plain_generate = model.generate

    def generate(*args: Any, **kwargs: Any) -> Tensor:
        width = kwargs["input_ids"].shape[1]
        kwargs["logits_processor"] = LogitsProcessorList(
            [EndAt([n for _, n in trace.rows], end_id, width)]
        )
        start = watch.now()
        ids = plain_generate(*args, **kwargs)
        watch.steps[-1]["generate"] = watch.now() - start
        return ids

    model.generate = generate


def _time_rollout(trainer: Any, trace: Trace, watch: _Watch) -> None:
    """Measure the time of the rollouts and check the lengths of the replies."""
    plain_rollout = trainer._generate_and_score_completions

    def rollout(inputs: Any) -> Any:
        reset_peak(watch.device)
        watch.steps.append({"start": watch.now()})
        outputs = plain_rollout(inputs)
        watch.steps[-1]["rolled"] = watch.now()
        lengths = outputs["completion_mask"].sum(1).tolist()
        assert lengths == [n for _, n in trace.rows], "TRL's replies have other lengths"
        return outputs

    trainer._generate_and_score_completions = rollout


def _run(
    shape: str,
    trace: Trace,
    device: torch.device,
    updates: int,
    per_device: int,
    checkpointing: bool,
    steps: int,
) -> TrlStep:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    cuda = device.type == "cuda"
    total, group = len(trace.rows), len(trace.lengths[0])
    accumulate = total // (per_device * updates)
    assert accumulate * per_device * updates == total, "the batch sizes do not divide the samples"
    tokenizer = make_tokenizer(shape)
    tokenizer.pad_token = text_of([0])
    end_id = vocabulary_of(shape) - 1  # TRL's must be one that the model can write
    tokenizer.eos_token = text_of([end_id])
    model = build_model(shape, device, torch.bfloat16 if cuda else torch.float32)
    model.generation_config.eos_token_id = end_id
    watch = _Watch(device)
    rewards = [float(r) for row in trace.rewards for r in row]
    prompts = [text_of(p) for p in trace.prompts]
    _time_generate(model, trace, end_id, watch)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: rewards[: len(completions)],
            args=GRPOConfig(
                output_dir=folder,
                num_generations=group,
                max_completion_length=max(n for _, n in trace.rows),
                per_device_train_batch_size=per_device,
                gradient_accumulation_steps=accumulate,
                steps_per_generation=accumulate * updates,
                max_steps=steps * updates,
                gradient_checkpointing=checkpointing,
                bf16=cuda,
                use_cpu=not cuda,
                **SETTINGS,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts * steps}),
            processing_class=tokenizer,
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        _time_rollout(trainer, trace, watch)
        trainer.train()
    last = watch.steps[-1]
    return TrlStep(
        whole=last["end"] - last["start"],
        generate=last["generate"],
        score=last["rolled"] - last["start"] - last["generate"],
        update=last["end"] - last["rolled"],
        peak_gb=peak_gb(device),
        settings=f"per device {per_device} x {accumulate} x {updates} updates, "
        f"checkpointing {'on' if checkpointing else 'off'}, {'bfloat16' if cuda else 'float32'}",
    )
