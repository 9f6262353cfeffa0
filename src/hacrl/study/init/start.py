"""`hacrl init`: from models, a data file and a reward to a config file."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hacrl.errors import UserError
from hacrl.safe_text import plural
from hacrl.store.files import write_atomic
from hacrl.study.init.data import Ask, Data, check_references, guess_verifier, read_data
from hacrl.study.init.schema import config_schema
from hacrl.study.init.team import POCKET, PROMPTS, Reward, make_agents, write_text
from hacrl.study.templates import render
from hacrl.verify.settings import VERIFIERS

BUILT_IN = "arithmetic"  # in place of a data file: the built-in problems
OWN = "own"  # in place of a verifier: write a reward function to edit
SCHEMA = "hacrl-schema.json"
STEPS = 50


@dataclass(frozen=True)
class Wishes:
    """The options of `hacrl init`. What is None is asked for, or chosen from the data.

    Example: Wishes(Path("team.toml"), ["pocket:wren"], data="quiz.jsonl", reward="number")
    """

    config: Path
    models: list[str]
    data: str | None = None
    reward: str | None = None
    steps: int | None = None
    question: str | None = None
    answer: str | None = None
    held_out: Path | None = None
    schema: bool = False
    force: bool = False


def start_team(wishes: Wishes, ask: Ask, report: Callable[[str], None]) -> list[Path]:
    """Write the config, and a reward function or the schema if wanted. Returns the files. `report`
    gets one sentence for each choice."""
    config, base = wishes.config, wishes.config.parent
    if config.suffix != ".toml":
        raise UserError(f"{config}: give the config a name that ends with .toml, e.g. team.toml")
    if config.exists() and not wishes.force:
        raise UserError(f"{config} exists; choose another name, or overwrite it with --force")
    models = wishes.models or _models(ask)
    named = wishes.data or ask(
        "--data",
        f"Data file (.jsonl, .csv or .parquet), or `{BUILT_IN}` for built-in problems",
        None,
    )
    data = None
    if named != BUILT_IN:
        data = read_data(Path(named).expanduser(), wishes.question, wishes.answer, ask)
        report(
            f"data: {plural(len(data.rows), 'row')}; question: column {data.question!r}, answer: "
            f"{data.answer_source}"
        )
    reward = _reward(wishes.reward, data, ask, report)
    pocket = all(model.startswith(POCKET) for model in models)
    prompt = "{question}" if pocket else PROMPTS.get(reward.kind, "{question}")
    agents = make_agents(models, data, prompt, base)
    text = write_text(
        agents,
        data,
        reward,
        prompt,
        steps=wishes.steps or int(ask("--steps", "Training steps", str(STEPS))),
        gpu=_has_gpu(),
        train=_relative(data.path, base) if data else "",
        held_out=_relative(wishes.held_out, base) if wishes.held_out else None,
        schema=f"./{SCHEMA}" if wishes.schema else None,
    )
    files = {config: text}
    if wishes.schema:
        files[base / SCHEMA] = json.dumps(config_schema(), indent=1) + "\n"
    if reward.kind == "function":
        module, _, name = reward.options["path"].partition(":")
        code = base / f"{module.replace('.', '/')}.py"
        if not code.exists() and data is not None:
            files[code] = _stub(name, data)
    base.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        write_atomic(path, content)
    return list(files)


def _stub(name: str, data: Data) -> str:
    """A reward function to edit, which works for plain answers as it is."""
    numbers = all(re.fullmatch(r"-?\d+(\.\d+)?", answer) for answer in data.answers)
    return render("init/rewards.py.j2", name=name, data=data, numbers=numbers)


def _models(ask: Ask) -> list[str]:
    text = "Models: folders, hub names or pocket:NAME, separated by commas"
    given = ask("--model", text, "pocket:wren, pocket:finch")
    return [model.strip() for model in given.split(",") if model.strip()]


def _reward(
    wanted: str | None, data: Data | None, ask: Ask, report: Callable[[str], None]
) -> Reward:
    """The verifier: the given one, or the one that fits the answers."""
    if data is None:
        return Reward("number", {})
    if wanted is None:
        kind, reason = guess_verifier(data)
        report(f"reward: {kind} fits, because {reason}")
        kinds = ", ".join(k for k in VERIFIERS if k != "function")
        question = f"Reward: {kinds}, FILE.py:FUNCTION, or `{OWN}` to write a function"
        wanted = ask("--reward", question, kind)
    if wanted == OWN:
        wanted = "rewards.py:score"
    if ":" in wanted:
        module, _, name = wanted.partition(":")
        return Reward("function", {"path": f"{module.removesuffix('.py')}:{name}"})
    if wanted not in VERIFIERS or wanted == "function":
        known = ", ".join(k for k in VERIFIERS if k != "function")
        raise UserError(
            f"--reward {wanted}: choose one of {known}, {OWN}, or FILE.py:FUNCTION for your own"
        )
    if warning := check_references(data, wanted, {}):
        report(f"note: {warning}")
    return Reward(wanted, {})


def _relative(path: Path, base: Path) -> str:
    """A path as the config writes it: relative to the config's folder if it is inside or next to it."""
    relative = os.path.relpath(path.expanduser(), base)
    return str(path.resolve()) if relative.count("../") > 2 else relative


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
