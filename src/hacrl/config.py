"""What a user writes: one TOML file, every field with its doc, unknown keys are errors.

Sections and figures in the docs are those of arXiv 2603.02604. Paths in the file are relative to
the file; the resolved config that a run writes has them absolute and can be run again.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hacrl.algorithms import Algorithm
from hacrl.algorithms.settings import AlgorithmSettings
from hacrl.errors import UserError
from hacrl.overrides import apply_override, read_toml
from hacrl.tasks.settings import TaskConfig
from hacrl.training.plan import Plan, make_plan
from hacrl.verify.settings import VerifierConfig

Beta = Annotated[float, Field(ge=0, lt=1)]

RENAMED: dict[str, str] = {
    "pool": "no longer exists: trajectories are files in RUN/pool; delete the table [pool]",
}
"""Dotted name of a key that was renamed or removed -> what to write instead. Numbers in the name of
a key, such as agents.0, are left out."""


class Table(BaseModel):
    """Base of every table: unknown keys refused, values frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class EvaluationConfig(Table):
    every: int = Field(10, ge=0)
    """Evaluate each agent alone on held-out problems every so many steps, and before the first and
    after the last; 0: only these two."""
    problems: int = Field(200, ge=0)
    """How many held-out problems; 0 switches evaluation off."""
    samples: int = Field(1, ge=1)
    """Replies to each problem (the k of avg@k)."""
    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Longest reply; the training limit where absent (the paper evaluates with 8,196)."""


class DiagnosticsConfig(Table):
    every: int = Field(0, ge=0)
    """Every so many steps, the first included, measure what the theory claims (docs/diagnostics.md):
    bias and variance of the baselines, own against peers' gradients, gain or harm of each peer on
    held-out problems. It draws rollouts and takes time of its own, which no budget counts, and
    changes nothing else. 0: off."""
    problems: int = Field(16, ge=2)
    """How many problems of the step, and how many held-out ones."""
    samples: int = Field(32, ge=2)
    """Fresh replies of the learner to each of them."""


class CheckpointConfig(Table):
    every: int = Field(10, ge=0)
    """Write a checkpoint every so many steps, and after the last; 0: only after the last."""
    save: bool = True
    """False: write none at all, for comparisons that keep only figures. Such a run cannot be
    exported, and a resume learns again from the journal, from the first step on."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept; each agent's best by held-out score is kept besides."""


class SamplerConfig(Table):
    kind: str = "builtin"
    """What writes the replies: builtin (the trainer's own weights), vllm (an engine beside the
    trainer, docs/scale.md), or the import path of a class of yours. An agent may name its own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the kind (builtin has none). vllm: gpu_memory_utilization, cache_gib, eager."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest prompt and reply together that vllm is started for; what the run's limits allow where
    absent."""
    cache_fraction: float = Field(0.2, gt=0, lt=1)
    """Largest fraction of a device's memory for the built-in sampler's KV cache, which all agents of a
    process share. If it is too small for all rows, fewer rows are sampled at a time."""
    behaviour: Literal["score", "sampler"] = "score"
    """Whose log-probabilities count as behaviour: the trainer's at the sampling weights (score), or
    the sampler's own, as long as the probe finds them equal to within epsilon_low / 10."""
    check_samples: int = Field(32, ge=1)
    """With behaviour = "sampler", how many sequences of every step the comparison takes; otherwise
    it takes all."""
    tolerance: float | None = Field(None, gt=0)
    """Largest allowed difference of a sequence's mean log-probability between sampler and trainer,
    averaged over the compared sequences; above it the sampler's weights are stale and the run stops.
    Default: 1e-4 in float32, 0.05 in bfloat16."""


class RuntimeConfig(Table):
    kind: str = "local"
    """local: all agents in this process, phases in turn; ray: each in a process of its own, side by
    side (docs/scale.md; needs the extra hacrl[ray])."""
    address: str | None = None
    """ray: the cluster to join, HOST:PORT of its head or "auto"; absent: the one of RAY_ADDRESS, or a
    new one on this machine for the time of the run."""
    placement: Literal["pack", "spread"] = "pack"
    """ray: agents on as few machines as possible, or on as many."""
    deadline: float | None = Field(None, gt=0)
    """ray: seconds that the first member to publish a step waits for the others, until the run does
    what `late` says; absent: it waits as long as it takes."""
    late: Literal["wait", "go_on"] = "wait"
    """ray: what becomes of a step at the deadline. wait: it says who is missing and goes on waiting,
    so lost agents change no number. go_on: it is closed with the members that are there; the others
    learn from it when they come back, as non-members."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 ...; an agent may name its own."""
    threads: int | None = Field(None, ge=1)
    """Threads of torch on the CPU; pin it to have the same run number for number."""

    @model_validator(mode="after")
    def _late_ones(self) -> RuntimeConfig:
        if self.kind == "local" and (self.deadline is not None or self.late != "wait"):
            raise ValueError(
                "deadline and late have no meaning with kind = 'local', where members take turns and "
                "nobody is late; leave them out, or use kind = 'ray'"
            )
        if self.late == "go_on" and self.deadline is None:
            raise ValueError("late = 'go_on' needs a deadline, in seconds")
        return self


class LogConfig(Table):
    tensorboard: bool = True
    """Write TensorBoard event files into the run directory."""
    wandb: str | None = None
    """Project name at Weights & Biases; needs the extra hacrl[wandb]."""
    samples: bool = True
    """Keep every training sample's advantage, weight and ratio for `hacrl samples RUN`."""


class LoraSettings(Table):
    rank: int = Field(32, ge=1)
    """Rank of the adapter."""
    alpha: float | None = None
    """Scale; twice the rank where absent."""
    targets: str | list[str] = "all-linear"
    """Which modules get an adapter."""


class AgentConfig(Table):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    """Unique in the team; names files, streams and metrics. Letters, digits, '.', '_' and '-'."""
    model: str = ""
    """A model folder, a hub name, or pocket:NAME for a model of the pocket team."""
    learn: bool = True
    """False: a frozen member (a teacher) that samples and never learns."""
    replay: str | None = None
    """Run directory whose stored trajectories this member publishes instead of sampling."""
    replay_agent: str | None = None
    """Which agent of that run; needed where it has several."""

    learn_steps: int | None = Field(None, ge=1)
    """Learn in the first so many steps only, and go on as a frozen member."""
    away: list[tuple[int, int]] = Field(default_factory=list)
    """Spans of steps, first and first after, in which this member takes no part: [[10, 20]] leaves
    before step 10 and is back in step 20."""

    learning_rate: float = Field(1e-6, gt=0)
    """Constant after the warm-up."""
    warmup_updates: int = Field(0, ge=0)
    """Updates over which the learning rate rises from 0 in equal steps."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm."""

    samples_per_prompt: int | None = Field(None, ge=1)
    """This agent's own number of samples; the run's where absent."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """This agent's own limit; a longer prompt is "not attempted"."""
    max_response_tokens: int | None = Field(None, ge=1)
    """This agent's own limit, for its rollouts and for its view of peers."""
    too_long: Literal["drop", "truncate"] = "drop"
    """What to do with a peer's sample that is too long for this agent."""
    mask_truncated: bool = False
    """Leave replies that reached the token limit (LENGTH) out of the loss; their reward still counts."""

    system: str | None = None
    """System text put before every problem."""
    template: str | None = None
    """A chat template (Jinja) instead of the tokenizer's, or the name of a built-in one: plain."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the chat template, e.g. { enable_thinking = false }."""
    reply_start: str = ""
    """A begun reply, e.g. "The answer is": part of the prompt."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on the CPU; on a GPU bfloat16 with a float32 master."""
    device: str | None = None
    """This agent's own device."""
    attention: str = "sdpa"
    """Attention implementation of transformers. With the default, scores and updates lay sequences end
    to end and attend within each; any other one is used as it is, on padded rows."""
    ranks: int = Field(1, ge=1)
    """Processes that hold this agent together, each with a part of the weights, gradients and
    optimizer (FSDP2) and a share of the sampling; one GPU each. With runtime.kind = "local" the GPUs
    are those from the agent's `device` on (cuda: from the first). A checkpoint serves any number of
    ranks: change it in the run's config.toml and resume."""
    gradient_checkpointing: bool = False
    """Trade time for memory in updates."""
    offload: Literal["auto", "none", "optimizer"] = "auto"
    """Where the float32 master, the optimizer's moments and the start weights of the KL term wait
    while this agent does not learn: none: on the device; optimizer: in the host's memory; auto: there
    when less than a third of the GPU would be free with everything of all agents at rest on it."""
    trust_remote_code: bool = False
    """Allow code from the model folder or hub to run. Off unless you trust it."""
    lora: LoraSettings | None = None
    """Train a low-rank adapter instead of the whole weights; needs the extra hacrl[lora]."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Most tokens in one forward pass, end to end, a prompt that several rows begin with counted once
    (padding included, where a model needs any); changes time and memory, not results."""
    prune: bool = True
    """Leave out of updates what adds exactly nothing: time, not results, but for rounding."""
    sampler_rows: int = Field(512, ge=1)
    """Most sequences sampled side by side."""
    sampler: str | None = None
    """This agent's own kind of sampler (sampler.kind); the run's where absent."""

    cpus: float = Field(1, gt=0)
    """With the ray runtime: processor cores that each of its ranks takes, the verifier's among them."""
    gpus: float | None = Field(None, ge=0)
    """With the ray runtime: GPUs that each of its ranks takes; a part (0.5) shares one. Absent: one
    where the cluster has any and the device is not cpu."""
    resources: dict[str, float] = Field(default_factory=dict)
    """With the ray runtime: what else each rank's machine must offer, by the names given to `ray start
    --resources`, e.g. { big_memory = 1 }."""

    @model_validator(mode="after")
    def _model_or_replay(self) -> AgentConfig:
        if bool(self.model) == (self.replay is not None):
            raise ValueError("give either `model` or `replay`, one of the two")
        return self

    @model_validator(mode="after")
    def _spans(self) -> AgentConfig:
        for first, after in self.away:
            if not 0 <= first < after:
                raise ValueError(f"away: [{first}, {after}] is not a span of steps")
        return self

    def is_away(self, step: int) -> bool:
        return any(first <= step < after for first, after in self.away)

    @property
    def learns(self) -> bool:
        return self.learn and self.replay is None


class Config(Table):
    seed: int = 0
    """Every random draw of the run is a function of it."""
    steps: int = Field(ge=1)
    """How many steps to train."""
    prompts_per_step: int = Field(128, ge=1)
    """Problems a step, the same for every agent (the paper: 128)."""
    samples_per_prompt: int = Field(8, ge=1)
    """G: each agent's attempts at a problem (the paper: 8)."""
    minibatch_samples: int = Field(512, ge=1)
    """Samples in one parameter update (the paper: 64 prompts x 8)."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; log-probabilities are of logits / temperature."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt."""
    max_response_tokens: int = Field(4096, ge=1)
    """Longest reply."""
    skip_limit: int = Field(5, ge=1)
    """So many non-finite updates in a row stop the run, with the batch saved."""

    task: TaskConfig
    """Where problems come from."""
    verifier: VerifierConfig
    """What is right."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """How to learn from the verified replies."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Each agent alone on held-out problems."""
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    """What the theory claims, measured while training."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When weights are written and how many are kept."""
    sampler: SamplerConfig = SamplerConfig()
    """Which log-probabilities count, and the sampler/trainer agreement check."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Where and when agents run."""
    log: LogConfig = LogConfig()
    """Where metrics go besides metrics.jsonl."""
    agents: list[AgentConfig] = Field(min_length=1)
    """The team: one table for each member."""

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        names = [a.name for a in self.agents]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(
                f"agents: the name {twice[0]!r} is used twice; every agent needs its own name"
            )
        if not any(a.learns for a in self.agents):
            raise ValueError("agents: none of them learns; set learn = true for at least one")
        if any(a.away for a in self.agents):
            for step in range(self.steps):
                if not any(a.learns and not a.is_away(step) for a in self.agents):
                    raise ValueError(f"agents: in step {step} every learner is away")
        kinds = {a.name: a.sampler or self.sampler.kind for a in self.agents}
        if self.sampler.options and set(kinds.values()) == {"builtin"}:
            raise ValueError("sampler.options: the built-in sampler has none; set sampler.kind too")
        for agent in self.agents:
            if agent.ranks > 1 and kinds[agent.name] != "builtin":
                raise ValueError(
                    f"agents: {agent.name!r} has ranks = {agent.ranks} and the sampler "
                    f"{kinds[agent.name]!r}; an agent of several ranks samples with the built-in one: "
                    "give it sampler = 'builtin'"
                )
            if agent.ranks > 1 and self.runtime.kind == "local" and "vllm" in kinds.values():
                raise ValueError(
                    f"agents: {agent.name!r} has ranks = {agent.ranks} and another agent samples with "
                    "vllm; the two cannot share a process: use runtime.kind = 'ray'"
                )
        return self

    def agent(self, name: str) -> AgentConfig:
        return next(a for a in self.agents if a.name == name)

    def samples_of(self, agent: AgentConfig) -> int:
        return agent.samples_per_prompt or self.samples_per_prompt

    def prompt_limit(self, agent: AgentConfig) -> int:
        return agent.max_prompt_tokens or self.max_prompt_tokens

    def response_limit(self, agent: AgentConfig) -> int:
        return agent.max_response_tokens or self.max_response_tokens

    def sampler_of(self, agent: AgentConfig) -> SamplerConfig:
        """The run's sampler settings as they are for this agent."""
        replies = max(self.response_limit(agent), self.evaluation.max_response_tokens or 0)
        return self.sampler.model_copy(
            update={
                "kind": agent.sampler or self.sampler.kind,
                "max_tokens": self.sampler.max_tokens or self.prompt_limit(agent) + replies,
            }
        )

    def plan_of(self, agent: AgentConfig, algorithm: Algorithm) -> Plan:
        """The learner's plan; a UserError where sizes or floors are impossible."""
        return make_plan(
            learner=agent.name,
            prompts=self.prompts_per_step,
            samples_per_prompt={a.name: self.samples_of(a) for a in self.agents},
            minibatch_samples=self.minibatch_samples,
            needs=algorithm.needs,
            floor=self.algorithm.floor,
            last_floor=self.algorithm.last_floor,
        )


# ---------------------------------------------------------------- reading and writing


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply overrides (`key=value`, or `+arm` for a file of them in arms/), and
    resolve paths against the file's folder."""
    if not path.is_file():
        raise UserError(f"config {path} does not exist. Try `hacrl train configs/pocket.toml`.")
    tree = read_toml(path)
    for override in overrides:
        apply_override(tree, override, path.parent)
    return parse_config(tree, str(path), path.parent)


def parse_config(tree: dict[str, Any], source: str = "config", base: Path | None = None) -> Config:
    """Validate a plain dict; errors name the key and the way out."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{source}: {_explain(error, tree)}") from error
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    return resolve_paths(config, (base or Path.cwd()).resolve())


def resolve_paths(config: Config, base: Path) -> Config:
    """Make the paths that exist beside the config file absolute."""

    def absolute(value: str | None) -> str | None:
        if value is None or value.startswith("pocket:"):
            return value
        path = base / Path(value).expanduser()
        return str(path.resolve()) if path.exists() or _looks_like_path(value) else value

    agents = [
        a.model_copy(
            update={"model": absolute(a.model) if a.model else "", "replay": absolute(a.replay)}
        )
        for a in config.agents
    ]
    task = config.task.model_copy(
        update={
            field: absolute(value) if config.task.kind == "hub" else str((base / value).resolve())
            for field in ("train", "held_out", "exclude")
            if isinstance(value := getattr(config.task, field, None), str)
        }
    )
    return config.model_copy(update={"agents": agents, "task": task})


def _looks_like_path(value: str) -> bool:
    return value.startswith(("/", "./", "../", "~"))


def dump_config(config: Config) -> str:
    """The whole config as TOML, defaults included: what a run directory holds."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _explain(error: ValidationError, tree: dict[str, Any]) -> str:
    """One line for each problem: where, what, and for an unknown key the nearest known ones."""
    return "; ".join(_explain_one(dict(e), tree) for e in error.errors())


def _explain_one(item: dict[str, Any], tree: dict[str, Any]) -> str:
    location = item["loc"]
    where = ".".join(str(part) for part in location) or "the file"
    if item["type"] == "extra_forbidden":
        if advice := RENAMED.get(".".join(part for part in location if isinstance(part, str))):
            return f"{where}: {advice}"
        known = _known_keys(location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"{where}: unknown key; {hint}"
    if item["type"] == "missing":
        return f"{where}: missing; add it"
    message = re.sub(r"^(Value error|Assertion failed), ", "", item["msg"])
    given = (
        ""
        if isinstance(item.get("input"), (dict, list, BaseModel))
        else f" (given: {item['input']!r})"
    )
    return f"{where}: {message}{given}"


def _known_keys(location: Sequence[int | str]) -> list[str]:
    """The keys that a table at this place may have."""
    table: Any = Config
    for part in location:
        if isinstance(part, int):
            continue
        annotation = table.model_fields[part].annotation
        inner = getattr(annotation, "__args__", (annotation,))
        table = next((a for a in inner if isinstance(a, type) and issubclass(a, BaseModel)), None)
        if table is None:
            return []
    return list(table.model_fields)
