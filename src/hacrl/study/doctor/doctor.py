"""`hacrl doctor`: what is installed, which device, and whether a config can run here."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from hacrl.config import AgentConfig, Config
from hacrl.errors import UserError
from hacrl.study.doctor.memory import (
    Need,
    count_parameters,
    device_peak,
    estimate_need,
    memory_of,
    size_text,
)
from hacrl.study.tables import plain_table
from hacrl.training.plan import Plan

CORE = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "pydantic",
    "tensorboard",
)
EXTRAS = {
    "lora": ("peft", "low-rank adapters: agents.N.lora"),
    "math": ("math-verify", "verifier math"),
    "gym": ("reasoning-gym", "tasks of reasoning-gym"),
    "data": ("datasets", "Parquet and hub datasets"),
    "gguf": ("gguf", "hacrl models fetch"),
    "ray": ("ray", "runtime.kind = 'ray'"),
    "vllm": ("vllm", "sampler.kind = 'vllm'"),
    "wandb": ("wandb", "log.wandb"),
    "bench": ("trl", "make bench"),
}
"""Extra -> (the package that tells whether it is there, what needs it)."""


FITS = 0.95
"""Of a device's memory; the rest goes to what torch and the driver hold, and to gaps."""


@dataclass(frozen=True)
class Finding:
    """One thing a config needs.

    Example: Finding(False, "agent wren: model", "the model folder /x does not exist. Give ...")
    """

    good: bool
    what: str
    detail: str


def print_installation(console: Console) -> None:
    """Versions, extras, device."""
    import torch

    from hacrl import __version__

    packages = ", ".join(f"{name} {_version(name)}" for name in CORE)
    console.print(f"hacrl {__version__}, Python {platform.python_version()}, {platform.platform()}")
    console.print(packages, highlight=False)
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(i).total_memory
            console.print(f"cuda:{i}: {torch.cuda.get_device_name(i)}, {size_text(memory)}")
    else:
        console.print(f"device: cpu, {torch.get_num_threads()} threads of torch; no GPU is seen")
    free = shutil.disk_usage(Path.cwd()).free
    console.print(f"free disk here: {size_text(free)}")
    table = plain_table("\nextras")
    for name in ("extra", "package", "state", "for"):
        table.add_column(name, no_wrap=True)
    for extra, (package, purpose) in EXTRAS.items():
        found = _version(package)
        state = found if found else f"pip install 'hacrl[{extra}]'"
        table.add_row(extra, package, escape(state), purpose)
    console.print(table)


def _version(package: str) -> str:
    for name in (package, f"{package}-cpu"):  # vLLM's build for the CPU has a name of its own
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def print_config(console: Console, config: Config) -> list[Finding]:
    """What the config needs and how a step goes; returns what is missing."""
    findings = list(check(config))
    console.print("\n[bold]what the config needs[/bold]")
    for finding in findings:
        mark = "[green]ok[/green]  " if finding.good else "[red]no[/red]  "
        console.print(f"{mark}{escape(finding.what)}: {escape(finding.detail)}", highlight=False)
    _print_plan(console, config)
    return [f for f in findings if not f.good]


def check(config: Config) -> Iterator[Finding]:
    """Everything that can be found wrong before a run, without loading a model."""
    yield _try("task", lambda: _task(config))
    yield _try("verifier", lambda: _verifier(config))
    yield _try("algorithm", lambda: _algorithm(config))
    yield _try("device", lambda: _device(config))
    for agent in config.agents:
        yield _try(f"agent {agent.name}", lambda agent=agent: _agent(agent))
        if agent.lora:
            yield _extra("lora", f"agent {agent.name}")
    if config.runtime.kind == "ray":
        yield _extra("ray", "runtime.kind = 'ray'")
    for agent in config.agents:
        if agent.model and config.sampler_of(agent).kind == "vllm":
            yield _extra("vllm", f"agent {agent.name}")
    if config.log.wandb:
        yield _extra("wandb", "log.wandb")
    yield from _memory(config)


def _memory(config: Config) -> Iterator[Finding]:
    """Whether the agents of each device fit there; nothing where their sizes are not known."""
    from hacrl.policy.load import choose_device

    devices: dict[str, dict[str, Need]] = {}
    for agent in config.agents:
        need = _need(config, agent)
        if need is not None:
            place = str(choose_device(agent.device or config.runtime.device))
            place = "cuda:0" if place == "cuda" else place
            place += "" if config.runtime.kind == "local" else f" for {agent.name}"
            devices.setdefault(place, {})[agent.name] = need
    for place, needs in devices.items():
        device = choose_device(place.split()[0])
        whole = memory_of(device)
        peak = device_peak(needs, whole, keeps_cache=device.type == "cuda")
        told = f"about {size_text(peak.bytes)} at most, when {peak.when}"
        told += " (the others' optimizers wait on the host)" if peak.parked else ""
        fits = whole is None or peak.bytes <= FITS * whole
        if whole is not None:
            told += f"; there are {size_text(whole)}"
        if not fits:
            told += (
                ". Lower microbatch_tokens or sampler.cache_fraction, or set gradient_checkpointing, "
                "offload = 'optimizer' or lora for an agent."
            )
        yield Finding(fits, f"memory of {place}", told)


def _need(config: Config, agent: AgentConfig) -> Need | None:
    """None for a member without a model folder here; what is wrong with it is told elsewhere."""
    from hacrl.policy.load import choose_device, model_source

    try:
        source = model_source(agent.model, agent.name) if agent.model else ""
        device = choose_device(agent.device or config.runtime.device)
    except UserError:
        return None
    if not source or not Path(source).is_dir():
        return None
    return estimate_need(config, agent, source, device, memory_of(device))


def _try(what: str, call: object) -> Finding:
    assert callable(call)
    try:
        return Finding(True, what, call())
    except (UserError, ImportError) as error:
        return Finding(False, what, str(error))


def _extra(extra: str, what: str) -> Finding:
    package = EXTRAS[extra][0]
    found = _version(package)
    return Finding(
        bool(found), what, f"{package} {found}" if found else f"needs pip install 'hacrl[{extra}]'"
    )


def _task(config: Config) -> str:
    from hacrl.tasks import make_task

    task = make_task(config.task, config.seed, Path.cwd())
    training = task.batch(0, config.prompts_per_step)
    held_out = task.held_out(config.evaluation.problems) if config.evaluation.problems else []
    return f"{config.task.kind}, {len(training)} problems a step, {len(held_out)} held out"


def _verifier(config: Config) -> str:
    from hacrl.verify import make_verifier

    make_verifier(config.verifier)
    return f"{config.verifier.kind}, {config.verifier.num_workers} worker processes"


def _algorithm(config: Config) -> str:
    from hacrl.algorithms import make_algorithm

    shares = make_algorithm(config.algorithm, (0.0, 1.0)).needs.peers != "none"
    return f"{config.algorithm.name}, {'learns from peers' if shares else 'each agent for itself'}"


def _device(config: Config) -> str:
    from hacrl.policy.load import choose_device

    wanted = sorted({a.device or config.runtime.device for a in config.agents})
    return ", ".join(f"{name} is {choose_device(name)}" for name in wanted)


def _agent(agent: AgentConfig) -> str:
    from hacrl.policy.load import model_source
    from hacrl.store.rundir import RunDirectory
    from hacrl.text.render import Renderer, RenderSettings, load_tokenizer

    if agent.replay:
        RunDirectory.open(Path(agent.replay))
        return f"replays {agent.replay}"
    source = model_source(agent.model, agent.name)
    if not Path(source).is_dir():
        return f"{source} is a hub name: it is downloaded when the run starts"
    if count_parameters(Path(source)) is None:
        raise UserError(f"{source} has no safetensors weights; save the model with save_pretrained")
    tokenizer = load_tokenizer(source, trust_remote_code=agent.trust_remote_code)
    settings = RenderSettings(agent.system, agent.template, agent.template_args, agent.reply_start)
    Renderer(tokenizer, settings, _end_ids(Path(source), tokenizer))
    return f"{source}, {len(tokenizer):,} tokens in its vocabulary"


def _end_ids(folder: Path, tokenizer: Any) -> list[int] | None:
    """The end tokens that the folder and its tokenizer name, without loading the model."""
    named: list[Any] = [tokenizer.eos_token_id]
    for path in (folder / "generation_config.json", folder / "config.json"):
        if path.is_file():
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            named += value if isinstance(value, list) else [value]
    return sorted({i for i in named if i is not None}) or None


def _print_plan(console: Console, config: Config) -> None:
    """Updates, floors, sizes and memory of every agent."""
    from hacrl.algorithms import make_algorithm
    from hacrl.training.plan import plan_of

    algorithm = make_algorithm(config.algorithm, (0.0, 1.0))
    table = plain_table("\na step of each agent")
    table.caption = (
        "memory of sequences at their longest; optimizer: master, moments, start weights"
    )
    table.add_column("agent", no_wrap=True)
    for name in (
        "rollouts",
        "updates",
        "peers' floors",
        "parameters",
        "weights",
        "optimizer",
        "an update",
        "cache",
    ):
        table.add_column(name, justify="right")
    for agent in config.agents:
        plan = None
        if agent.learns:
            plan = plan_of(config, agent, algorithm)
        sizes = ["-"] * 5
        if need := _need(config, agent):
            sizes = [f"{need.parameters:,}"]
            told = (need.weights, need.waiting, need.learning, need.cache)
            sizes += [size_text(x) if x else "-" for x in told]
        rollouts = 0 if agent.replay else config.prompts_per_step * config.samples_of(agent)
        table.add_row(agent.name, f"{rollouts:,}", *plan_cells(plan), *sizes)
    console.print(table)


def plan_cells(plan: Plan | None) -> list[str]:
    """Updates, and floors of those that hold peers: ["2 own + 4 peers", "0.83 to 0.875"]."""
    if plan is None:
        return ["none (frozen)", "-"]
    updates = " + ".join(f"{count} {name}" for name, count in plan.parts)
    floors: list[float] = []
    m = 0
    for name, count in plan.parts:
        if name != "own":
            floors += plan.floors[m : m + count]
        m += count
    if not floors:
        return [updates, "-"]
    return [updates, f"{floors[0]:.4g}" + (f" to {floors[-1]:.4g}" if len(floors) > 1 else "")]
