"""The schema of a config file: one TOML file, every field with its doc, unknown keys are errors.

Numbers called the paper's are those of arXiv 2603.02604. Paths in the file are relative to the file. A
run stores its resolved config, with absolute paths, which can be run again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    model_validator,
)

from hacrl.algorithms import AlgorithmSettings, make_settings
from hacrl.algorithms.base import DynamicSettings
from hacrl.config_agent import AgentConfig, Table
from hacrl.config_file import (
    Overrides,
    apply_overrides,
    check_values,
    explain,
    read_toml,
    resolve_imports,
    resolve_paths,
    with_overrides,
)
from hacrl.errors import UserError
from hacrl.tasks.settings import TaskConfig
from hacrl.trust import TrustConfig
from hacrl.verify.settings import VerifierConfig

AlgorithmTable = Annotated[
    SerializeAsAny[AlgorithmSettings],
    BeforeValidator(lambda v: make_settings(**v) if isinstance(v, dict) else v),
]
"""Validated by the settings class of the algorithm that it names."""


class EvaluationConfig(Table):
    every: int = Field(10, ge=0)
    """Steps between evaluations. 0: only before the first step and after the last."""
    problems: Annotated[int, Field(ge=0)] | Literal["all"] = 200
    """Maximum number of held-out problems, or "all". 0 switches evaluation off."""
    samples: int = Field(1, ge=1)
    """Replies to each problem (the k of avg@k)."""
    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Token limit of a reply (the paper: 8,196). Unset: the training limit."""

    @property
    def most(self) -> int | None:
        """`problems`, with None for all."""
        return None if self.problems == "all" else self.problems


class DiagnosticsConfig(Table):
    every: int = Field(0, ge=0)
    """Every this many steps, including the first, measure the claims of the theory
    (docs/diagnostics.md): bias and variance of baselines, own and peers' gradients, gain by each peer.
    The checks draw extra rollouts and do not change training. 0: off."""
    problems: int = Field(16, ge=2)
    """Number of problems of the step, and of held-out ones."""
    samples: int = Field(32, ge=2)
    """New replies of the learner to each of these problems."""


class CheckpointConfig(Table):
    every: int = Field(10, ge=0)
    """Write a checkpoint every this many steps and after the last step. 0: only after the last."""
    save: bool = True
    """False: write no checkpoint, for comparisons. Such a run cannot be exported, and resuming it
    repeats all updates from the journal."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep. The best by held-out score is kept in addition."""


class SamplerConfig(Table):
    kind: str = "builtin"
    """builtin, vllm (docs/scale.md), or the import path of your own class; an agent may set its own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the kind (builtin has none). vllm: gpu_memory_utilization, cache_gib, eager."""
    max_tokens: int | None = Field(None, ge=1)
    """Context length that vllm is started with. Unset: the run's prompt and reply limits together."""
    cache_fraction: float = Field(0.2, gt=0, lt=1)
    """Largest fraction of a device's memory for the built-in sampler's KV cache, which all agents of a
    process share. If it is too small for all rows, fewer rows are sampled at a time."""
    tolerance: float | None = Field(None, gt=0)
    """The run stops if the mean log-probabilities of sampler and trainer differ by more, averaged over
    sequences: the sampler's weights are stale. Unset: 1e-4 in float32, 0.05 in bfloat16."""


class RuntimeConfig(Table):
    kind: Literal["local", "processes", "ray"] = "local"
    """local: all agents in this process, one after another. processes: each agent in its own process on
    this machine, in parallel. ray: the same on one or many machines (needs the extra hacrl[ray]). See
    docs/scale.md."""
    address: str | None = None
    """ray: the cluster to join, HOST:PORT of its head or "auto". Unset: RAY_ADDRESS, or a new cluster on
    this machine for the run."""
    placement: Literal["pack", "spread"] = "pack"
    """ray: place agents on as few machines as possible, or on as many."""
    deadline: float | None = Field(None, gt=0)
    """processes, ray: seconds to wait for other agents after the first has published a step. Unset: no
    limit."""
    late: Literal["wait", "go_on"] = "wait"
    """processes, ray: what to do when an agent misses the deadline. wait: report it and keep waiting
    (results unaffected). go_on: close the step without it; it learns from the others' rollouts later."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 ...; an agent may set its own."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of torch. Set it to make a run repeatable number for number."""

    @model_validator(mode="after")
    def _late_ones(self) -> RuntimeConfig:
        if self.kind == "local" and (self.deadline is not None or self.late != "wait"):
            raise ValueError(
                "deadline and late have no effect with kind = 'local'; remove them, or set "
                "runtime.kind to 'processes' or 'ray'"
            )
        if self.late == "go_on" and self.deadline is None:
            raise ValueError("late = 'go_on' needs a deadline, in seconds")
        return self


class LogConfig(Table):
    tensorboard: bool = True
    """Write TensorBoard event files into the run directory, one folder per agent."""
    wandb: str | None = None
    """Project name at Weights & Biases; needs the extra hacrl[wandb]."""
    trackio: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Project name in trackio's local folder (TRACKIO_DIR); needs the extra hacrl[trackio]."""
    table_rows: int = Field(8, ge=0)
    """Held-out replies per agent and evaluation in tables of TensorBoard, W&B and trackio."""
    aliases: tuple[Literal["trl"], ...] = ("trl",)
    """Log training metrics also under the names of these trainers (docs/logging.md)."""
    samples: bool = True
    """Store advantage, weight and ratio of every training sample for `hacrl samples RUN`."""


class HubConfig(Table):
    """The `[hub]` table of a member of a team across owners. `hacrl join` fills it from the charter."""

    url: str
    """Address of the hub."""
    team: str
    """Id of the team."""
    verifier: str
    """The team's verifier and its version."""
    staleness: int = Field(0, ge=0)
    """Late batches of this many steps are used, each once."""
    late_samples: int | None = Field(None, ge=1)
    """Maximum number of samples of late batches in a step; set it in your own file. Unset: one batch."""


class Config(Table):
    seed: int = 0
    """Determines every random draw of the run."""
    steps: int = Field(ge=1)
    """Number of steps to train."""
    prompts_per_step: int = Field(128, ge=1, le=1_000_000)
    """Problems per step, the same for every agent (the paper: 128)."""
    samples_per_prompt: int = Field(8, ge=1)
    """G: each agent's replies to a problem (the paper: 8)."""
    minibatch_samples: int = Field(512, ge=1)
    """Samples in one optimizer update (the paper: 64 prompts x 8)."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; log-probabilities are of logits / temperature."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Token limit of a prompt."""
    max_response_tokens: int = Field(4096, ge=1)
    """Token limit of a reply."""

    task: TaskConfig
    """Where problems come from."""
    verifier: VerifierConfig
    """How replies are judged."""
    algorithm: AlgorithmTable = make_settings()
    """How to learn from the verified replies."""
    trust: TrustConfig = TrustConfig()
    """What a learner believes of its peers (docs/security.md)."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation of each agent alone on held-out problems."""
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    """Measurements of the theory's claims during training."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written and how many are kept."""
    sampler: SamplerConfig = SamplerConfig()
    """How replies are sampled."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Where agents run."""
    log: LogConfig = LogConfig()
    """Metrics in addition to metrics.jsonl."""
    hub: HubConfig | None = None
    """Written by `hacrl join`: the team across owners that the agent belongs to (docs/owners.md)."""
    agents: list[AgentConfig] = Field(min_length=1)
    """The team: one table per agent."""

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        names = [a.name for a in self.agents]
        if twice := [n for n in names if names.count(n) > 1]:
            raise ValueError(f"agents: the name {twice[0]!r} is used twice; names must be unique")
        if self.hub is not None:  # the other members' agents are not in this file
            return self._of_a_member()
        if not any(a.learns for a in self.agents):
            raise ValueError("agents: no agent learns; set learn = true for at least one")
        if unknown := [n for n in self.trust.trusted if n not in names]:
            raise ValueError(f"trust.trusted: {unknown[0]!r} is not one of {', '.join(names)}")
        return self._samplers()

    def _of_a_member(self) -> Config:
        agent = self.agents[0]
        if len(self.agents) > 1:
            raise ValueError("agents: `hacrl join` trains one agent; remove the others")
        if agent.samples_per_prompt:
            raise ValueError("agents: samples_per_prompt comes from the team; remove it")
        if self.has_rounds:
            raise ValueError(
                "algorithm.name: gspo-dynamic chooses its own problems; a team across owners needs "
                "another algorithm"
            )
        if self.runtime.kind != "local":
            raise ValueError("runtime.kind: `hacrl join` runs in one process; remove it")
        return self._samplers()

    def _samplers(self) -> Config:
        kinds = {a.name: a.sampler or self.sampler.kind for a in self.agents}
        if self.sampler.options and set(kinds.values()) == {"builtin"}:
            raise ValueError("sampler.options: the built-in sampler has none; set sampler.kind too")
        for agent in (a for a in self.agents if a.ranks > 1):
            has = f"agents: {agent.name!r} has ranks = {agent.ranks} and"
            if kinds[agent.name] != "builtin":
                raise ValueError(
                    f"{has} the sampler {kinds[agent.name]!r}; set sampler = 'builtin'"
                )
            if self.runtime.kind == "local" and "vllm" in kinds.values():
                raise ValueError(f"{has} another agent uses vllm; set runtime.kind = 'ray'")
        return self

    @property
    def has_rounds(self) -> bool:
        """Whether prompts without a signal are replaced (dynamic sampling)."""
        return isinstance(self.algorithm, DynamicSettings)

    @property
    def problems_per_step(self) -> int:
        """Length of a step's list of problems: prompts_per_step, or more with dynamic sampling."""
        factor = self.algorithm.list_factor if isinstance(self.algorithm, DynamicSettings) else 1
        return self.prompts_per_step * factor

    @property
    def late_samples(self) -> int:
        """Maximum number of samples of late batches in a step."""
        if self.hub is None or not self.hub.staleness:
            return 0
        return max(self.hub.late_samples or 0, self.prompts_per_step * self.samples_per_prompt)

    def agent(self, name: str) -> AgentConfig:
        return next(a for a in self.agents if a.name == name)

    def samples_of(self, agent: AgentConfig) -> int:
        return agent.samples_per_prompt or self.samples_per_prompt

    def prompt_limit(self, agent: AgentConfig) -> int:
        return agent.max_prompt_tokens or self.max_prompt_tokens

    def response_limit(self, agent: AgentConfig) -> int:
        return agent.max_response_tokens or self.max_response_tokens

    def sampler_of(self, agent: AgentConfig) -> SamplerConfig:
        """The run's sampler settings with this agent's changes."""
        replies = max(self.response_limit(agent), self.evaluation.max_response_tokens or 0)
        return self.sampler.model_copy(
            update={
                "kind": agent.sampler or self.sampler.kind,
                "max_tokens": self.sampler.max_tokens or self.prompt_limit(agent) + replies,
            }
        )


# ---------------------------------------------------------------- reading and writing


def load_config(path: Path, overrides: Overrides = ()) -> Config:
    """Read a TOML file, apply overrides (`key=value`, or `+arm` for a file of them in arms/; or a
    mapping), and resolve paths against the file's folder."""
    tree = read_toml(path)
    apply_overrides(tree, overrides, path.parent)
    return parse_config(tree, str(path), path.parent, overrides)


def parse_config(
    tree: dict[str, Any],
    source: str = "config",
    base: Path | None = None,
    overrides: Overrides = (),
) -> Config:
    """Validate a plain dict. Data paths and import paths start at `base` (default: current folder).
    `overrides` are in the tree already; errors name them and `source`."""
    base = (base or Path.cwd()).resolve()
    source = with_overrides(source, overrides)
    check_values(tree, source)
    tree = resolve_imports(tree, base)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{source}: {explain(error, Config, tree)}") from error
    return resolve_paths(config, base)


def change_config(config: Config, overrides: Overrides) -> Config:
    """Return the config with overrides, as on the command line or as a mapping of dotted keys to
    values. Paths in them start at the current folder."""
    if not overrides:
        return config
    tree = config.model_dump(mode="json", exclude_none=True)
    apply_overrides(tree, overrides, Path.cwd())
    return parse_config(tree, overrides=overrides)


def dump_config(config: Config) -> str:
    """Return the whole config as TOML, including defaults."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
