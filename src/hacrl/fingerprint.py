"""The inputs of a run: config, data and model files, user code, problems, versions.

RUN/fingerprint.json keeps them, and `hacrl resume` compares them with those it finds:

    inputs      the current inputs
    history     [{"step": 0, "digest": ...}, {"step": 20, "digest": ..., "changes": [...]}]; with
                "sampled_again" where replies of later steps are removed; "pending" until they
                are (training/repair.py)

The manifest of a checkpoint has the digest of the inputs that the checkpoint was trained with.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hacrl.config import Config
from hacrl.config_file import import_tables
from hacrl.errors import UserError
from hacrl.importing import source_files
from hacrl.pocket import pocket_path
from hacrl.safe_text import mask
from hacrl.store.checkpoint import fingerprint_of, sha256
from hacrl.store.files import steps_in
from hacrl.store.reader import RunReader
from hacrl.store.rundir import RunDirectory, environment
from hacrl.tasks import Task
from hacrl.verify.settings import VERIFIERS

Inputs = dict[str, dict[str, Any]]
Kind = Literal["free", "rounding", "results"]

FREE = """
    steps evaluation.every diagnostics.* checkpoint.* log.* verifier.workers
    runtime.address runtime.placement runtime.deadline hub.url
    agents.*.cpus agents.*.gpus agents.*.resources*
"""
"""Keys that change no number of a step: a resume may change them."""
ROUNDING = """
    runtime.kind runtime.device runtime.threads sampler.cache_fraction sampler.max_tokens
    agents.*.device agents.*.ranks agents.*.attention agents.*.offload agents.*.microbatch_tokens
    agents.*.sampler_rows agents.*.gradient_checkpointing torch transformers gpu
"""
"""Keys that change numbers by rounding only: a resume may change them, and notes it. Every other key
needs `--accept-changed`."""
_MODEL_FILES = ".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken", ".py"


class Change(NamedTuple):
    """An input that differs, e.g. Change("rounding", "runtime.threads: 1 -> 2")."""

    kind: Kind
    text: str


def check_inputs(
    config: Config,
    task: Task,
    run: RunDirectory,
    note: Callable[[str], None],
    accept_changed: bool = False,
) -> None:
    """Compare the inputs with those that the run stored, and store them. A new run only stores them.
    UserError if a change would change results and is not accepted. Replies that an accepted change
    makes invalid are removed once all agents are loaded (training/repair.py)."""
    stored = run.fingerprint()
    old: Inputs = stored.get("inputs", {})
    new = read_inputs(config, task, old.get("files", {}))
    learners = [a.name for a in config.agents if a.learns]
    saved = [set(steps_in(run.checkpoints(name))) for name in learners]
    step = max(set.intersection(*saved), default=0) if saved else 0
    history = stored.get("history", [])
    digests = {entry["digest"] for entry in history}
    for name in learners if stored and step else ():
        if fingerprint_of(run.checkpoints(name), step) not in digests | {None}:
            raise UserError(
                f"{run.checkpoints(name)}/step-{step:06d}/manifest.json: the checkpoint of step {step} "
                f"was trained with other inputs than {run.fingerprint_path} lists. Restore the files "
                "of this run."
            )
    found = changes(old, new) if stored else []
    if unaccepted := [text for kind, text in found if kind == "results" and not accept_changed]:
        again = f"`hacrl resume {run.path} --accept-changed`"
        if config.hub:
            again = "the same `hacrl join ...` and --accept-changed"
        raise UserError(
            f"{run.path} was trained with other inputs: {_listed(unaccepted)}. Restore them, start a "
            f"new run, or accept the change with {again}."
        )
    noted = [text for kind, text in found if kind != "free"]
    if noted:
        note(
            f"resumed with changed inputs ({_listed(noted)}): from step {step + 1} on, results may "
            "differ from those of an uninterrupted run."
        )
    elif not stored and run.journalled():
        note("the run has no fingerprint.json, so changed data or models cannot be detected.")
    sampled_again = any(kind == "results" for kind, _ in found)
    if noted or not history:
        entry = {"step": step, "digest": digest(new), **({"changes": noted} if noted else {})}
        removes = {"sampled_again": True, "pending": True} if sampled_again else {}
        history = [*history, entry | removes]
    run.set_fingerprint({"inputs": new, "history": history})


def read_inputs(config: Config, task: Task, known: dict[str, Any]) -> Inputs:
    """The current inputs. `known` are the files of an earlier start: a file with the same size and
    modification time is not read again."""
    here = environment(config)
    versions = {key: here[key] for key in ("hacrl", "torch", "transformers", "gpu")}
    kinds = [reward.kind for reward in config.verifier.rewards] or [config.verifier.kind]
    if built_in := [kind for kind in kinds if kind in VERIFIERS]:
        labels = (f"{kind}/{getattr(VERIFIERS[kind], 'version', '')}" for kind in built_in)
        versions["verifier"] = ", ".join(labels)
    files = _data_and_code(config)
    for model in [agent.model for agent in config.agents if agent.model]:
        if folder := model_folder(model):
            files += sorted(p for p in folder.iterdir() if p.suffix in _MODEL_FILES)
        elif model.count("/") == 1 and not Path(model).expanduser().is_absolute():
            versions[f"hub revision of {model}"] = hub_revision(model)
    for agent in config.agents:
        if agent.replay:
            versions[f"batches of {agent.replay}"] = _batches(agent.replay, agent.replay_agent)
    held_out = task.held_out(config.evaluation.most) if config.evaluation.problems else []
    return {
        "config": config_by_key(config),
        "files": {str(p): _stat(p, known.get(str(p))) for p in files if p.is_file()},
        "versions": versions,
        "problems": {"training": _training(config, task), "held-out": _hash(held_out)},
    }


def model_folder(model: str) -> Path | None:
    """The folder of a model; None for a hub name."""
    is_pocket, name = model.startswith("pocket:"), model.removeprefix("pocket:")
    folder = pocket_path(name) if is_pocket else Path(model).expanduser()
    return folder if folder.is_dir() else None


def changed_files(run: RunReader) -> list[str]:
    """Files of the run's inputs that are here and have changed since the run was trained."""
    stored = run.fingerprint().get("inputs", {}).get("files", {})
    return [
        path
        for path, known in stored.items()
        if Path(path).is_file() and _stat(Path(path), known)["sha256"] != known["sha256"]
    ]


def problems_changed(run: RunReader, config: Config, task: Task) -> bool:
    """Whether the training problems of `task`, made from the run's config, are not those of the run."""
    stored = run.fingerprint().get("inputs", {}).get("problems", {}).get("training")
    return stored is not None and stored != _training(config, task)


def _training(config: Config, task: Task) -> str:
    return _hash(getattr(task, "train", None) or task.batch(0, config.prompts_per_step))


def changes(old: Inputs, new: Inputs) -> list[Change]:
    """The inputs that differ. Problems are listed only if no changed key or file explains them."""
    found = []
    both = {*old["config"].get("agents", ())} & {*new["config"].get("agents", ())}
    for part in ("config", "versions"):
        for key in sorted(old[part].keys() | new[part].keys()):
            before, now = old[part].get(key), new[part].get(key)
            is_agents = key.startswith("agents.")
            if is_agents and not any(key.startswith(f"agents.{name}.") for name in both):
                continue  # the key `agents` names those that came or left
            if before != now:
                texts = ("unset" if v is None else json.dumps(v) for v in (before, now))
                found.append(Change(change_kind(key), f"{key}: {' -> '.join(texts)}"))
    for path in sorted(old["files"].keys() | new["files"].keys()):
        before, now = (inputs["files"].get(path, {}).get("sha256") for inputs in (old, new))
        if before != now:
            what = "was added" if not before else "was changed" if now else "is gone or not used"
            found.append(Change("results", f"{path} {what}"))
    if all(kind != "results" for kind, _ in found):
        for side, before in old["problems"].items():
            if before != new["problems"][side]:
                found.append(Change("results", f"the {side} problems of the task changed"))
    return found


def digest(inputs: Inputs) -> str:
    """The hash of all inputs but those that may change freely."""
    kept: dict[str, Any] = {
        part: {k: v for k, v in inputs[part].items() if change_kind(k) != "free"}
        for part in ("config", "versions", "problems")
    }
    kept["files"] = {path: entry["sha256"] for path, entry in inputs["files"].items()}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def hub_revision(name: str) -> str | None:
    """The commit that the hub name stands for now, or stands for in the local cache if the hub cannot
    be reached; None if neither knows it."""
    import huggingface_hub

    try:
        return huggingface_hub.model_info(name, timeout=5).sha
    except Exception:  # loading the model reports what is wrong
        cached = huggingface_hub.try_to_load_from_cache(name, "config.json")
        return Path(cached).parent.name if isinstance(cached, str) else None


def _data_and_code(config: Config) -> list[Path]:
    named = [getattr(config.task, key) for key in ("train", "held_out", "exclude")]
    files = [Path(name) for name in named if name]
    tree = config.model_dump(mode="json", exclude_none=True)
    named = [table[key] for table, key in import_tables(tree) if ":" in table[key]]
    return files + [file for path in named for file in source_files(path)]


def _batches(run: str, agent: str | None) -> str:
    """A hash of what an agent of a stored run has published: the names of its batches are digests."""
    found = RunDirectory(Path(run)).pool_path.glob(f"step-*/{agent or '*'}/*.jsonl.gz")
    names = sorted(f"{path.parent.parent.name}/{path.name}" for path in found)
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]


def _stat(path: Path, known: dict[str, Any] | None) -> dict[str, Any]:
    stat = os.stat(path)
    facts = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    same = known is not None and facts.items() <= known.items()
    return {**facts, "sha256": known["sha256"] if known and same else sha256(path)}


def config_by_key(config: Config, *, exclude_defaults: bool = False) -> dict[str, Any]:
    """Dotted key -> value, e.g. agents.wren.model, and the names of the agents. Secrets are masked: a
    new password is no change. The end of a learning-rate schedule is listed as it applies: without
    schedule_steps, another number of steps changes it."""
    tree = mask(
        config.model_dump(mode="json", exclude_none=True, exclude_defaults=exclude_defaults)
    )
    for agent in (a for a in tree["agents"] if a.get("schedule", "constant") != "constant"):
        agent.setdefault("schedule_steps", config.steps)
    agents = {agent["name"]: agent for agent in tree["agents"]}
    return {**dict(_flat({**tree, "agents": agents})), "agents": list(agents)}


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def change_kind(key: str) -> Kind:
    """What a change of the key affects: nothing, rounding, or results."""
    if any(fnmatch(key, pattern) for pattern in FREE.split()):
        return "free"
    return "rounding" if any(fnmatch(key, p) for p in ROUNDING.split()) else "results"


def _listed(texts: list[str]) -> str:
    more = f"; and {len(texts) - 5} more" if len(texts) > 5 else ""
    return "; ".join(texts[:5]) + more


def _hash(problems: Any) -> str:
    found = hashlib.sha256()
    for problem in problems:
        found.update(repr(problem).encode("utf-8", "surrogatepass"))
    return found.hexdigest()
