"""Choose the numbers of a config from data and models, and write it with comments."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hacrl.config import AgentConfig
from hacrl.errors import UserError
from hacrl.study.init.data import Data
from hacrl.study.templates import render

POCKET = "pocket:"
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
    answer_tokens: int = 0  # longest answer of the data


@dataclass(frozen=True)
class Reward:
    """The verifier table of the new config.

    Example: Reward("function", {"path": "rewards:score"})
    """

    kind: str
    options: dict[str, Any]


def make_agents(
    models: Sequence[str], data: Data | None, prompt: str, base: Path
) -> tuple[Agent, ...]:
    """One agent per model, named after it. Models of this machine are measured on the data. Relative
    folders start at `base`, the config's folder."""
    names: list[str] = []
    for model in models:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", model.removeprefix(POCKET).rpartition("/")[2])
        name = name.strip("._-").lower()[:60] or "agent"
        while name in names:
            stem, _, number = name.rpartition("~")
            name = f"{stem or name}-{int(number or 1) + 1}"
        names.append(name)
    return tuple(_agent(n, m, data, prompt, base) for n, m in zip(names, models, strict=True))


def _agent(name: str, model: str, data: Data | None, prompt: str, base: Path) -> Agent:
    if not find_spec("torch"):  # nothing is measured
        return Agent(name, model, 2e-4 if model.startswith(POCKET) else 1e-6)
    from hacrl.policy.load import model_source
    from hacrl.study.doctor.memory import named_parameters

    local = base / Path(model).expanduser()
    path = model if model.startswith(POCKET) or not local.exists() else str(local)
    source = Path(model_source(path, name))
    if not source.is_dir():  # a hub name, which is not downloaded here
        return Agent(name, model, _learning_rate(named_parameters(model)))
    rate = 2e-4 if model.startswith(POCKET) else _learning_rate(_folder_size(source))
    return _measured(Agent(name, model, rate), str(source), data, prompt)


def _measured(agent: Agent, source: str, data: Data | None, prompt: str) -> Agent:
    """The agent with template, context length and the longest prompt and answer of the data."""
    from hacrl.study.doctor.doctor import context_length, make_renderer
    from hacrl.text.render import load_tokenizer

    template = None if load_tokenizer(source).chat_template else "plain"
    settings = AgentConfig(name=agent.name, model=source, template=template)
    renderer = make_renderer(settings, source)
    longest = answer = 0
    for problem in data.problems(prompt, MEASURED_ROWS) if data else []:
        longest = max(longest, len(renderer.prompt(problem.messages)))
        ids = renderer.tokenizer.encode(problem.answer, add_special_tokens=False)
        answer = max(answer, len(ids))
    context = context_length(settings, source)
    return replace(
        agent, template=template, context=context, prompt_tokens=longest, answer_tokens=answer
    )


def _learning_rate(parameters: float | None) -> float:
    return 1e-5 if parameters and parameters < SMALL else 1e-6


def _folder_size(folder: Path) -> int:
    """Parameters of a model folder, assuming two bytes each."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 2


def _round_up(number: float, step: int = 32) -> int:
    return step * -(-int(number) // step)


def limits(agents: Sequence[Agent], data: Data | None, reward: Reward, gpu: bool) -> dict[str, int]:
    """Token limits: room for the longest prompt, and for reasoning before the answer.

    A prompt whose tokenizer is not on this machine is counted as two characters a token, which is
    safe for English text.
    """
    measured = max((a.prompt_tokens for a in agents), default=0)
    if data and any(not a.prompt_tokens for a in agents):
        longest = max(sum(len(m.content) for m in p.messages) for p in data.problems())
        measured = max(measured, longest // 2 + 64)
    prompt = max(32, _round_up(1.25 * measured))
    pocket = all(a.model.startswith(POCKET) for a in agents)
    response = 48 if pocket else 512 if gpu else 128
    answer = max((a.answer_tokens for a in agents), default=0)
    response = max(response, _round_up(2 * answer)) if reward.kind == "exact" else response
    context = min((a.context for a in agents if a.context), default=prompt + response)
    if prompt + 16 > context:
        raise UserError(
            f"the longest prompt of {data.path if data else 'the task'} has {measured} tokens, but "
            f"a model of the team reads at most {context}; shorten the questions or choose others"
        )
    return {
        "max_prompt_tokens": min(prompt, context - 16),
        "max_response_tokens": min(response, context - min(prompt, context - 16)),
    }


def write_text(
    agents: Sequence[Agent],
    data: Data | None,
    reward: Reward,
    prompt: str,
    *,
    steps: int,
    gpu: bool,
    train: str,
    held_out: str | None = None,
    schema: str | None = None,
) -> str:
    """The config file. `train` and `held_out` are the data files as the config names them."""
    pocket = all(a.model.startswith(POCKET) for a in agents)
    rows = len(data.rows) if data else 10**6
    fraction = 0 if held_out else round(min(0.2, max(0.1, 50 / rows)), 2)
    usable = int(rows * (1 - fraction) * 0.8)  # the hash of a question decides, not a count
    prompts = max(1, min(32 if pocket or gpu else 8, usable))
    samples = 8
    text = render(
        "init/team.toml.j2",
        agents=agents,
        data=data,
        reward=reward,
        prompt=prompt,
        steps=steps,
        gpu=gpu,
        pocket=pocket,
        train=train,
        held_out=held_out,
        schema=schema,
        fraction=fraction,
        prompts=prompts,
        samples=samples,
        evaluated="all" if rows * (fraction or 1) <= 200 else 200,
        minibatch=max(1, prompts * samples // 2),
        small=all(a.learning_rate > 1e-6 for a in agents),
        epoch=-(-usable // prompts),
        **limits(agents, data, reward, gpu),
    )
    # The template marks comments with ##; they start in one column.
    parts = (line.partition(" ## ") for line in text.splitlines())
    return "".join(f"{a:<28} # {b}\n" if b else f"{a}\n" for a, _, b in parts)
