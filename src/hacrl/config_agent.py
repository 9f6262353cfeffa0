"""The `[[agents]]` tables of a config, and the base class of all tables."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hacrl.trust import Level

MAX_REPLY_START = 1024  # characters: part of every row that the agent publishes

Beta = Annotated[float, Field(ge=0, lt=1)]
Schedule = Literal[
    "constant",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]


class Table(BaseModel):
    """Base of every table: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class LoraSettings(Table):
    rank: int = Field(32, ge=1)
    """Rank of the adapter."""
    alpha: float | None = Field(None, gt=0)
    """Scale. Unset: twice the rank."""
    targets: str | list[str] = "all-linear"
    """Which modules get an adapter."""


class AgentConfig(Table):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    """Unique in the team: letters, digits, '.', '_' and '-'."""
    model: str = ""
    """A model folder, a hub name, or pocket:NAME for a model of the pocket team."""
    learn: bool = True
    """False: a frozen agent (a teacher) that samples and never learns."""
    replay: str | None = None
    """Run directory whose stored trajectories this agent publishes instead of sampling."""
    replay_agent: str | None = None
    """The agent of that run; needed if the run has several."""

    learning_rate: float = Field(1e-6, gt=0)
    """After the warm-up; `schedule` lowers it during the run."""
    warmup_updates: int = Field(0, ge=0)
    """Updates over which the learning rate rises from 0 in equal steps."""
    schedule: Schedule = "constant"
    """The learning rate after the warm-up: a schedule of transformers."""
    schedule_steps: int | None = Field(None, ge=1)
    """Step after which the schedule ends and its last value stays. Unset: the last step of the run."""
    schedule_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the schedule in transformers, e.g. { min_lr_rate = 0.1 } for cosine_with_min_lr."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's weight decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's betas."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient clipping: gradients are scaled down to this norm."""

    publish: Level = "all"
    """What peers receive. all: every reply. successes: the text of right replies, the rewards of all.
    rewards: rewards only. nothing: an empty batch."""
    samples_per_prompt: int | None = Field(None, ge=1)
    """Samples per prompt of this agent. Unset: the run's."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Prompt limit of this agent; it does not attempt longer prompts. Unset: the run's."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Reply limit of this agent, for its rollouts and for peers' samples. Unset: the run's."""
    too_long: Literal["drop", "truncate"] = "drop"
    """What to do with a peer's sample that is too long for this agent."""
    mask_truncated: bool = False
    """Leave replies that reached the token limit (LENGTH) out of the loss; their reward still counts."""

    system: str | None = None
    """System message before every problem."""
    template: str | None = None
    """A chat template (Jinja) instead of the tokenizer's, or the name of a built-in one: plain."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the chat template, e.g. { enable_thinking = false }."""
    reply_start: str = Field("", max_length=MAX_REPLY_START)
    """Prefix of every reply, e.g. "The answer is"; part of the prompt."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on the CPU; on a GPU bfloat16 with float32 master weights."""
    device: str | None = None
    """Device of this agent. Unset: runtime.device."""
    attention: str = "sdpa"
    """Attention implementation of transformers. The default packs sequences without padding; any other
    one runs on padded rows."""
    ranks: int = Field(1, ge=1)
    """Number of GPUs to shard this agent over (FSDP2), one process each; locally those from `device`
    on. It may change on a resume."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, slower updates."""
    offload: Literal["auto", "none", "optimizer"] = "auto"
    """Where master weights, optimizer state and the KL term's start weights are between this agent's
    updates. none: on the GPU. optimizer: in host memory. auto: in host memory if otherwise less than a
    third of the GPU would be free."""
    trust_remote_code: bool = False
    """Run code from the model folder or hub. Only for sources that you trust."""
    lora: LoraSettings | None = None
    """Train a low-rank adapter instead of all weights; needs the extra hacrl[lora]."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Maximum number of tokens in one forward pass; a shared prompt counts once, padding counts. It
    changes time and memory, and results by rounding; in half precision clip decisions may differ
    (docs/models.md)."""
    sampler_rows: int = Field(512, ge=1)
    """Maximum number of sequences sampled at a time."""
    sampler: str | None = None
    """Sampler kind of this agent. Unset: sampler.kind."""

    cpus: float = Field(1, gt=0)
    """ray: CPU cores of each of its processes, including those of the verifier."""
    gpus: float | None = Field(None, ge=0)
    """ray: GPUs of each of its processes; 0.5 is half of one. Unset: one, if the cluster has GPUs and
    the device is not cpu."""
    resources: dict[str, float] = Field(default_factory=dict)
    """ray: custom resources of each process, as in `ray start --resources`, e.g. { big_memory = 1 }."""

    @model_validator(mode="after")
    def _consistent(self) -> AgentConfig:
        if self.name == "snapshot.json":
            raise ValueError("name: 'snapshot.json' is a file of the pool; choose another name")
        if bool(self.model) == (self.replay is not None):
            raise ValueError("give either `model` or `replay`, one of the two")
        if self.schedule == "constant" and (self.schedule_steps or self.schedule_options):
            raise ValueError(
                "schedule_steps and schedule_options have no meaning with schedule = 'constant'; "
                "remove them, or set schedule"
            )
        return self

    @property
    def learns(self) -> bool:
        return self.learn and self.replay is None
