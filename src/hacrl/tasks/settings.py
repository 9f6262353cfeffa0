"""The `[task]` table of a run's config."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

KINDS = ("arithmetic", "jsonl", "parquet", "hub", "gym")


class ColumnsConfig(BaseModel):
    """Which columns of the data hold what."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    question: str = "question"
    """The problem text."""
    answer: str = "answer"
    """The gold answer: text, or a number."""
    id: str | None = None
    """The problem's id. Unset: the column `id` where there is one, else file name and line."""
    task: str | None = None
    """Which task a problem belongs to, for capability by task and for tables. Unset: task.name."""


class GymConfig(BaseModel):
    """One reasoning-gym dataset of a mixture."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    """The dataset's name in reasoning-gym, e.g. "chain_sum"."""
    label: str | None = None
    """What its problems are called in tables. Unset: the name. Must be unique in a mixture."""
    weight: float = Field(default=1.0, gt=0)
    """Its share of a batch, relative to the other weights."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """reasoning-gym's own settings of that dataset, e.g. { max_terms = 2 }."""
    prompt: str = "{question}"
    """Template of the user's message: {question}, and what the dataset keeps of a problem, e.g.
    {expression} or {numbers[0]}. Small models need short wording: "Calculate {expression}."."""
    draws: int = Field(default=2000, gt=0)
    """How many problems are drawn to make its pool; equal ones are kept once."""
    seed: int = 0
    """Of the pool. It is not the run's seed: all runs share one pool and one held-out set."""


class TaskConfig(BaseModel):
    """Where problems come from, and what the model is asked."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: str = "arithmetic"
    """arithmetic (built in), jsonl (.jsonl, .jsonl.gz or .parquet files), hub (a dataset of the
    Hugging Face hub, or a folder of one), gym (reasoning-gym), or the import path
    "package.module:factory" of your own: factory(task_config, seed, base_folder) -> Task."""
    name: str | None = None
    """Name in tables. Unset: the training file's name."""
    operations: tuple[str, ...] = ("add", "sub", "mul")
    """arithmetic: which of add, sub and mul."""
    train: str | None = None
    """jsonl: the training file. hub: the dataset's name or folder."""
    held_out: str | None = None
    """File of problems that training must not see. Training problems with the same text are left
    out and counted. Unset: a part of `train` is held out (held_out_share)."""
    held_out_share: float = Field(default=0.1, ge=0, lt=1)
    """Share of the problems to hold out where no held-out file or split is given. A hash of the
    problem's text decides, so the split is the same for every seed and run."""
    columns: ColumnsConfig = Field(default_factory=ColumnsConfig)
    """Which columns hold question, answer, id and task."""
    prompt: str = "{question}"
    """Template of the user's message. Any column may be named; write literal braces twice:
    "{question}\\nPut the final answer in \\\\boxed{{}}."."""
    exclude: str | None = None
    """JSONL file with an `id` (and a `kind`) a line: training problems to leave out."""
    exclude_kinds: tuple[str, ...] | None = None
    """Only leave out those of these kinds. Unset: all that `exclude` names."""
    subset: str | None = None
    """hub: the dataset's configuration, e.g. "main"."""
    train_split: str = "train"
    """hub: the split to train on."""
    held_out_split: str | None = None
    """hub: the split to hold out, e.g. "test"."""
    gym: str | tuple[GymConfig, ...] = ()
    """gym: the datasets to mix, or the name of a ready mixture ("arithmetic-ladder")."""

    @model_validator(mode="after")
    def _fits_kind(self) -> TaskConfig:
        if self.kind not in KINDS and ":" not in self.kind:
            raise ValueError(
                f"task.kind {self.kind!r} is unknown: choose one of {', '.join(KINDS)}, or give "
                'the import path "package.module:factory" of your own'
            )
        files = ("train", "held_out", "columns", "prompt", "exclude", "exclude_kinds")
        hub = ("subset", "train_split", "held_out_split")
        own = {
            "arithmetic": ("operations",),
            "jsonl": (*files, "held_out_share"),
            "parquet": (*files, "held_out_share"),
            "hub": (*files, *hub, "held_out_share"),
            "gym": ("gym", "held_out_share"),
        }
        for name, field in type(self).model_fields.items():
            if self.kind not in own or name in ("kind", "name", *own[self.kind]):
                continue
            if getattr(self, name) != field.get_default(call_default_factory=True):
                raise ValueError(f"task.{name} has no meaning for task.kind = {self.kind!r}")
        if self.kind in ("jsonl", "parquet", "hub") and not self.train:
            raise ValueError(f"task.train is missing: task.kind = {self.kind!r} needs it")
        if self.kind == "gym" and not self.gym:
            raise ValueError(
                "task.gym is missing: give a list of datasets or a mixture's name, e.g. "
                '"arithmetic-ladder"'
            )
        if self.held_out and self.held_out_split:
            raise ValueError("give task.held_out (a file) or task.held_out_split, not both")
        if self.exclude_kinds is not None and not self.exclude:
            raise ValueError("task.exclude_kinds needs task.exclude, the file that names the ids")
        return self
