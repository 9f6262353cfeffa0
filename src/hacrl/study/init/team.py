"""`hacrl init`: from models, a data file and a reward to a commented config."""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacrl.config import AgentConfig
from hacrl.errors import UserError
from hacrl.safe_text import plural
from hacrl.store.files import write_atomic
from hacrl.study.init.data import Ask, Data, guess_verifier, read_data
from hacrl.study.templates import render
from hacrl.verify.settings import VERIFIERS

POCKET = "pocket:"
BUILT_IN = "arithmetic"  # in place of a data file: the built-in problems
OWN = "own"  # in place of a verifier: write a reward function to edit
MEASURED_ROWS = 1000  # rows whose prompts are tokenised to choose max_prompt_tokens
SMALL = 500_000_000
"""Parameters. Smaller models get the learning rate and the clip of configs/real."""
PROMPTS = {
    "number": "{question}\nEnd the reply with the answer as a number.",
    "math": "{question}\nReason step by step and put the final answer in \\boxed{{}}.",
    "choice": "{question}\nEnd the reply with the letter of the answer.",
    "exact": "{question}\nReply with the answer only.",
}
"""Verifier -> prompt that asks for what it reads. Pocket models get the question alone."""


def start_team(
    config: Path,
    models: Sequence[str],
    data_file: str | None,
    reward: str | None,
    steps: int | None,
    question: str | None,
    answer: str | None,
    ask: Ask,
    report: Callable[[str], None],
) -> list[Path]:
    """Write the config, and a reward function if wanted. Returns the files. What is not given is asked
    for, or chosen from the data; `report` gets one sentence for each choice."""
    if config.suffix != ".toml":
        raise UserError(f"{config}: give the config a name that ends with .toml, e.g. team.toml")
    if config.exists():
        raise UserError(f"{config} exists; choose another name, or delete it")
    if not models:
        text = "Models: folders, hub names or pocket:NAME, separated by commas"
        given = ask("--model", text, "pocket:wren, pocket:finch")
        models = [model.strip() for model in given.split(",") if model.strip()]
    text = f"Data file (.jsonl, .csv or .parquet), or `{BUILT_IN}` for built-in problems"
    named, data = data_file or ask("--data", text, None), None
    if named != BUILT_IN:
        data = read_data(Path(named).expanduser(), question, answer, ask)
        report(
            f"data: {plural(len(data.rows), 'row')}; question: column {data.question!r}, answer: "
            f"{data.answer_source}"
        )
    wanted, kind, function = _reward(reward, data, ask, report)
    pocket = all(model.startswith(POCKET) for model in models)
    prompt = "{question}" if pocket else PROMPTS.get(kind, "{question}")
    agents = _make_agents(models, data, prompt, config.parent)
    text = str(steps or ask("--steps", "Training steps", "50")).strip()
    if not text.isascii() or not text.isdecimal() or not (count := int(text)):
        raise UserError(f"--steps {text}: give a whole number from 1 on")
    files = {config: _config_text(agents, data, kind, function, prompt, count, config.parent)}
    if function and data:
        module, _, name = function.partition(":")
        code = config.parent / f"{module.replace('.', '/')}.py"
        if code.exists():
            report(f"reward: {name} of {code}, which exists")
        elif ".py:" in wanted:
            raise UserError(
                f"--reward {wanted}: {code} does not exist; `--reward {OWN}` writes one"
            )
        elif wanted == OWN:
            numbers = all(re.fullmatch(r"-?\d+(\.\d+)?", answer) for answer in data.answers)
            texts = {"answer": data.answer_source, "columns": ", ".join(data.other_columns)}
            quoted = {k: json.dumps(v, ensure_ascii=False)[1:-1] for k, v in texts.items()}
            files[code] = render("init/rewards.py.j2", name=name, numbers=numbers, **quoted)
    config.parent.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        write_atomic(path, content)
    return list(files)


def _reward(
    wanted: str | None, data: Data | None, ask: Ask, report: Callable[[str], None]
) -> tuple[str, str, str | None]:
    """What is wanted, the kind of verifier, given or fitting the answers, and the import path of a
    reward function."""
    if data is None:
        return "number", "number", None
    known = ", ".join(kind for kind in VERIFIERS if kind != "function")
    if wanted is None:
        kind, reason = guess_verifier(data.answers)
        report(f"reward: {kind} fits, because {reason}")
        question = f"Reward: {known}, FILE.py:FUNCTION, or `{OWN}` to write a function"
        wanted = ask("--reward", question, kind)
    if wanted == OWN:
        return wanted, "function", "rewards:score"
    if ":" in wanted:
        module, _, name = wanted.partition(":")
        return wanted, "function", f"{module.removesuffix('.py')}:{name}"
    if wanted not in VERIFIERS or wanted == "function":
        raise UserError(
            f"--reward {wanted}: choose one of {known}, {OWN}, or FILE.py:FUNCTION for your own"
        )
    return wanted, wanted, None


@dataclass(frozen=True)
class Agent:
    """One agent of the new config.

    Example: Agent("smollm2-135m", "models/smollm2-135m", 1e-5, template=None, context=8192)
    """

    name: str
    model: str
    learning_rate: float
    template: str | None = None
    context: int | None = None
    """Context length of its model; None if the model is not on this machine."""
    prompt_tokens: int = 0
    """Longest prompt of the data in its tokens; 0 if its tokenizer is not on this machine."""


def _make_agents(models: Sequence[str], data: Data | None, prompt: str, base: Path) -> list[Agent]:
    """One agent per model, named after it. Models of this machine are measured on the data. Relative
    folders start at `base`, the config's folder."""
    from hacrl.policy.load import model_source
    from hacrl.study.doctor.memory import named_parameters
    from hacrl.study.evaluation import model_name

    agents: list[Agent] = []
    for model in models:
        name = plain = model_name(model).lower()[:60]
        number = 1
        while name in [agent.name for agent in agents]:
            number += 1
            name = f"{plain}-{number}"
        folder = base / Path(model).expanduser()
        source = Path(model_source(str(folder) if folder.exists() else model, name))
        if not source.is_dir():  # a hub name, which is not downloaded here
            agents.append(Agent(name, model, _learning_rate(named_parameters(model))))
            continue
        weights = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        rate = 2e-4 if model.startswith(POCKET) else _learning_rate(weights / 2)
        agents.append(Agent(name, model, rate, *_measure(name, str(source), data, prompt)))
    return agents


def _measure(
    name: str, source: str, data: Data | None, prompt: str
) -> tuple[str | None, int | None, int]:
    """Template, context length and the longest prompt of the data, of a model folder."""
    from hacrl.study.doctor.doctor import make_renderer
    from hacrl.text.render import load_tokenizer

    template = None if load_tokenizer(source).chat_template else "plain"
    agent = AgentConfig(name=name, model=source, template=template)
    renderer, context = make_renderer(agent, source)
    problems = data.problems(prompt, MEASURED_ROWS) if data else []
    longest = max((len(renderer.prompt(p.messages)) for p in problems), default=0)
    return template, context, longest


def _learning_rate(parameters: float | None) -> float:
    return 1e-5 if parameters and parameters < SMALL else 1e-6


def _limits(agents: Sequence[Agent], data: Data | None, response: int) -> dict[str, int]:
    """Token limits: room for the longest prompt, and `response` tokens if the models can read them.

    A prompt whose tokenizer is not on this machine is counted as two characters a token, which is
    safe for English text.
    """
    measured = max(a.prompt_tokens for a in agents)
    if data and any(not a.prompt_tokens for a in agents):
        longest = max(sum(len(m.content) for m in p.messages) for p in data.problems())
        measured = max(measured, longest // 2 + 64)
    prompt = max(32, 32 * -(-int(1.25 * measured) // 32))
    context = min((a.context for a in agents if a.context), default=prompt + response)
    if prompt + 16 > context:
        raise UserError(
            f"the longest prompt of {data.path if data else 'the task'} has {measured} tokens, but "
            f"a model of the team reads at most {context}; shorten the questions or choose others"
        )
    return {
        "max_prompt_tokens": prompt,
        "max_response_tokens": min(response, context - prompt),
    }


def _config_text(
    agents: Sequence[Agent],
    data: Data | None,
    kind: str,
    function: str | None,
    prompt: str,
    steps: int,
    base: Path,
) -> str:
    import torch

    gpu, pocket = torch.cuda.is_available(), all(a.model.startswith(POCKET) for a in agents)
    rows = len(data.rows) if data else 10**6
    fraction = round(min(0.2, max(0.1, 50 / rows)), 2)
    usable = int(rows * (1 - fraction) * 0.8)  # the hash of a question decides, not a count
    prompts = max(1, min(32 if pocket or gpu else 8, usable))
    samples = 8
    values: dict[str, Any] = {
        "agents": agents,
        "data": data,
        "kind": kind,
        "function": function,
        "prompt": prompt,
        "steps": steps,
        "gpu": gpu,
        "pocket": pocket,
        "train": os.path.relpath(data.path, base) if data else "",
        "fraction": fraction,
        "prompts": prompts,
        "samples": samples,
        "evaluated": "all" if rows * fraction <= 200 else 200,
        "minibatch": max(samples, prompts * samples // 2),
        "small": all(a.learning_rate > 1e-6 for a in agents),
        "epoch": -(-usable // prompts),
    }
    response = 48 if pocket else 512 if gpu else 128
    if kind == "exact" and data:  # a token is at least one character
        response = max(response, *(len(answer) for answer in data.answers))
    limits = _limits(agents, data, response)
    text = render("init/team.toml.j2", **values, **limits)
    # The template marks comments with ##; they start in one column.
    parts = (line.partition(" ## ") for line in text.splitlines())
    return "".join(f"{a:<28} # {b}\n" if b else f"{a}\n" for a, _, b in parts)
