"""The `[task]` table of a config."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

TASKS = {
    "arithmetic": "hacrl.tasks.arithmetic:arithmetic_task",
    "jsonl": "hacrl.tasks.dataset:dataset_task",
    "csv": "hacrl.tasks.dataset:dataset_task",
    "parquet": "hacrl.tasks.dataset:dataset_task",
    "hub": "hacrl.tasks.dataset:dataset_task",
    "gym": "hacrl.tasks.gym:gym_task",
}
"""Kind of task -> import path of its factory(task_config, seed, base_folder) -> Task."""


class ColumnsConfig(BaseModel):
    """The columns of the data that hold question, answer, id and task."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    question: str = "question"
    """Column with the problem text."""
    messages: str | None = None
    """Column with a conversation, [{ role, content }, ...], instead of a question. Unset: the column
    `messages` if there is no question column. A last message of the assistant is not part of the
    prompt; it is the reference answer if there is no answer column."""
    answer: str = "answer"
    """Column with the reference answer: text or a number."""
    id: str | None = None
    """Column with the problem's id. Unset: the column `id` if it exists, else file name and a hash
    of the row."""
    task: str | None = None
    """Column with the problem's task, for capability by task and for tables. Unset: task.name."""


class GymConfig(BaseModel):
    """One reasoning-gym dataset of a mixture."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    """The dataset's name in reasoning-gym, e.g. "chain_sum"."""
    label: str | None = None
    """Name of its problems in tables, unique in a mixture. Unset: the dataset's name."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the dataset in reasoning-gym, e.g. { max_terms = 2 }."""
    prompt: str = "{question}"
    """Template of the user message: {question} and the problem's metadata, e.g. {expression} or
    {numbers[0]}. Small models need short wording: "Calculate {expression}."."""
    draws: int = Field(default=2000, gt=0, le=1_000_000)
    """Problems to draw; duplicates are dropped. All runs draw the same problems."""


class TaskConfig(BaseModel):
    """Where problems come from, and the prompt that asks them."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: str = "arithmetic"
    """arithmetic (built in), jsonl (.jsonl, .jsonl.gz, .csv or .parquet files), hub (a dataset of
    the Hugging Face hub, or its folder), gym (reasoning-gym), or the import path
    "package.module:factory" of your own: factory(task_config, seed, base_folder) -> Task."""
    name: str | None = None
    """Name in tables. Unset: the training file's name."""
    train: str | None = None
    """jsonl: the training file. hub: the dataset's name or folder."""
    held_out: str | None = None
    """File of problems that training must not see. Training problems with the same text are left
    out and counted. Unset: a part of `train` is held out (held_out_fraction)."""
    held_out_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of the problems to hold out if no held-out file or split is given. A hash of the
    problem's text decides, so the split is the same for every seed and run."""
    columns: ColumnsConfig = Field(default_factory=ColumnsConfig)
    """Columns of question, answer, id and task."""
    prompt: str = "{question}"
    """Template of the (last) user message. Any column may be named; write literal braces twice:
    "{question}\\nPut the final answer in \\\\boxed{{}}."."""
    exclude: str | None = None
    """JSONL file with an `id` (and a `kind`) per line: training problems to leave out."""
    exclude_kinds: tuple[str, ...] | None = None
    """Leave out only the lines of `exclude` with these kinds. Unset: all of them."""
    subset: str | None = None
    """hub: the dataset's configuration, e.g. "main"."""
    train_split: str = "train"
    """hub: the split to train on."""
    held_out_split: str | None = None
    """hub: the split to hold out, e.g. "test"."""
    gym: str | tuple[GymConfig, ...] = ()
    """gym: the datasets to mix, or the name of a predefined mixture ("arithmetic-ladder")."""

    @model_validator(mode="after")
    def _fits_kind(self) -> TaskConfig:
        if self.kind not in TASKS and ":" not in self.kind:
            raise ValueError(
                f"task.kind {self.kind!r} is unknown: choose one of {', '.join(TASKS)}, or give "
                'the import path "package.module:factory" of your own'
            )
        if self.kind in ("arithmetic", "gym") and self.train:
            raise ValueError(f"task.train has no meaning for task.kind = {self.kind!r}")
        if self.kind in ("jsonl", "csv", "parquet", "hub") and not self.train:
            raise ValueError(f"task.train is missing: task.kind = {self.kind!r} needs it")
        if self.kind == "gym" and not self.gym:
            raise ValueError(
                'task.gym is missing: give a list of datasets or a mixture, e.g. "arithmetic-ladder"'
            )
        return self
