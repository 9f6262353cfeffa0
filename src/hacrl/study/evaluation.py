"""`hacrl eval` and `hacrl export`: load the agents of a run, or a model, and use them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.table import Table

from hacrl.config import AgentConfig, Config, change_config, load_config
from hacrl.config_file import Overrides, explain, set_key
from hacrl.errors import UserError
from hacrl.fingerprint import problems_changed
from hacrl.policy.policy import Policy
from hacrl.replies import Evaluation, judged_counts, judged_text, score_name
from hacrl.store.checkpoint import Checkpoints
from hacrl.store.files import whole_folder
from hacrl.store.reader import RunReader
from hacrl.study.model_card import CARD, model_card
from hacrl.study.tables import percent, plain_table
from hacrl.tasks import make_task
from hacrl.tasks.dataset import normalised
from hacrl.training.evaluate import evaluate
from hacrl.types import Problem
from hacrl.verify import VerifierPool

Report = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """An agent to evaluate. `load` loads its weights.

    Example: Candidate(AgentConfig(name="wren", model="pocket:wren"), step=40, load=lambda: policy)
    """

    agent: AgentConfig
    step: int  # training steps of the weights; 0 for a model as it is
    load: Callable[[], Policy]


def is_run(target: str) -> bool:
    """Whether `target` is a run directory, and not a model."""
    return (Path(target) / "config.toml").is_file()


def output_folder(target: str, name: str) -> Path:
    """Where the replies go by default: RUN/NAME, or runs/NAME-MODEL for a model."""
    return Path(target) / name if is_run(target) else Path("runs") / f"{name}-{model_name(target)}"


def candidates_of_run(
    run: RunReader,
    config: Config,
    *,
    agent: str | None = None,
    step: int | None = None,
    best: bool = False,
    report: Report = lambda text: None,
) -> list[Candidate]:
    """The agents of a run (all, or `agent`) at the newest checkpoint, the best, or that of `step`."""
    names = [a.name for a in config.agents if not a.replay]
    if agent is not None and agent not in names:
        raise UserError(f"agent {agent!r} is not in {run.path}; there are {', '.join(names)}")
    found = []
    for chosen in (config.agent(name) for name in names if agent in (None, name)):
        load = partial(
            Policy, chosen, device=config.runtime.device, temperature=config.temperature, beta=0.0
        )
        checkpoints = Checkpoints(run.checkpoints(chosen.name), config.checkpoint.keep)
        at = _checkpoint(run, checkpoints, chosen.name, step, best, report) if chosen.learns else 0
        found.append(
            Candidate(chosen, at, partial(_restored, load, checkpoints, at) if at else load)
        )
    return found


def _checkpoint(
    run: RunReader,
    checkpoints: Checkpoints,
    name: str,
    step: int | None,
    best: bool,
    report: Report,
) -> int:
    """The step of the checkpoint to use; 0 is the model before training."""
    if step == 0:
        return 0
    stored = checkpoints.steps()
    if not stored:
        raise UserError(
            f"{run.path} has no checkpoint of {name!r} yet; continue the run with "
            f"`hacrl resume {run.path}`"
        )
    if step is None and best:
        if (marked := checkpoints.best()) is None:
            raise UserError(
                f"{run.path}: no checkpoint of {name!r} is marked as the best; leave out --best"
            )
        step, score = marked
        if step == 0:
            report(
                f"no checkpoint of {name!r} is better than the start ({100 * score:.1f} %): this is "
                "the model before training. Leave out --best for the newest checkpoint."
            )
            return 0
    chosen = checkpoints.newest_whole(report) if step is None else step
    if chosen not in stored:
        raise UserError(
            f"{run.path} has no complete checkpoint of {name!r} at step {chosen}; there are "
            f"{', '.join(map(str, stored))}"
        )
    return chosen


def _restored(load: Callable[[], Policy], checkpoints: Checkpoints, step: int) -> Policy:
    policy = load()
    policy.restore(checkpoints.load(step))
    return policy


def candidate_of_model(
    model: str, settings: Mapping[str, Any], device: str = "auto", temperature: float = 1.0
) -> Candidate:
    """A model folder, hub name or pocket:NAME, with the settings of an agent's table."""
    values = {"name": model_name(model), **settings, "model": model, "learn": False}
    try:
        agent = AgentConfig.model_validate(values)
    except ValidationError as error:
        problems = explain(error, AgentConfig, values)
        raise UserError(f"settings of the model {model}: {problems}") from error
    return Candidate(
        agent, 0, partial(Policy, agent, device=device, temperature=temperature, beta=0.0)
    )


def model_name(model: str) -> str:
    """A model's name as an agent and as a folder, e.g. wren for pocket:wren."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name.removeprefix("pocket:"))
    return name.strip("._-")[:64] or "model"


def find_candidates(
    target: str,
    overrides: Sequence[str] = (),
    *,
    agent: str | None = None,
    step: int | None = None,
    best: bool = False,
    report: Report = lambda text: None,
) -> list[Candidate]:
    """The agents of the run `target`, or the model `target`. Overrides are keys of the run's config
    (runtime.device=cpu), or of an agent's table for a model (template=plain)."""
    if is_run(target):
        config = config_of(target, None, overrides)
        run = RunReader(Path(target))
        return candidates_of_run(run, config, agent=agent, step=step, best=best, report=report)
    if agent is not None or step is not None or best:
        raise UserError(f"{target} is not a run directory, so it has no agents and no checkpoints")
    settings: dict[str, Any] = {}
    for override in overrides:
        set_key(settings, override)
    return [candidate_of_model(target, settings)]


def config_of(target: str, config: Path | None, overrides: Overrides) -> Config:
    """The given config, or that of the run, with overrides. Paths in overrides start at the folder of
    the given config; for a run at the current folder, as in `hacrl resume`."""
    if config:
        return load_config(config, overrides)
    return change_config(load_config(Path(target) / "config.toml"), overrides)


def evaluate_held_out(
    target: str,
    overrides: Overrides = (),
    *,
    config: Path | None = None,
    agent: str | None = None,
    step: int | None = None,
    best: bool = False,
    out: Path | None = None,
    report: Report = lambda text: None,
) -> tuple[list[tuple[Candidate, Evaluation]], Path]:
    """Evaluate a run's agents, or a model, on held-out problems. Returns the results and the folder
    of the replies. For a model `config` gives problems and limits, and `agent` is the agent of it that
    lends its settings, by default the first."""
    if is_run(target) == bool(config):
        raise UserError(
            f"{target} is a run, which has its own config; change it with key=value instead of --config"
            if config
            else f"{target} is not a run directory. For a model give the config with the problems: "
            "--config FILE.toml"
        )
    settings = config_of(target, config, overrides)
    if not settings.evaluation.problems:
        raise UserError("evaluation.problems = 0: give a number, e.g. evaluation.problems=200")
    if config:
        if step is not None or best:
            raise UserError(f"{target} is not a run directory, so it has no checkpoints")
        found = [_like_agent(target, settings, agent)]
        task = make_task(settings.task, settings.seed, Path.cwd())
    else:
        run = RunReader(Path(target))
        found = candidates_of_run(run, settings, agent=agent, step=step, best=best, report=report)
        task = make_task(settings.task, settings.seed, run.path)
    problems = task.held_out(settings.evaluation.most)
    if not config:
        _check_problems(run, settings, problems, report)
    out, results = out or output_folder(target, "eval"), []
    if earlier := [c.agent.name for c in found if (out / "held_out" / c.agent.name).exists()]:
        report(f"replaces the evaluation of {', '.join(earlier)} in {out}; --out FOLDER keeps both")
    with VerifierPool(settings.verifier) as verifier:
        verifier.wait_ready()  # a verifier that cannot start is reported before a model is loaded
        verifier.report = report
        for candidate in found:
            name = candidate.agent.name
            report(f"{name}: {len(problems)} problems x {settings.evaluation.samples} replies")
            folder = out / "held_out" / name
            result = evaluate(candidate.load(), settings, problems, verifier, folder)
            results.append((candidate, result))
            if result.not_attempted:
                limit = settings.prompt_limit(candidate.agent)
                report(
                    f"{name}: {result.not_attempted} of {len(problems)} prompts are longer than "
                    f"max_prompt_tokens = {limit} and count as not solved"
                )
    return results, out


def _check_problems(
    run: RunReader, settings: Config, problems: Sequence[Problem], report: Report
) -> None:
    """Report problems that the run has trained on, and data that has changed since."""
    config = run.config()
    try:
        task = make_task(config.task, config.seed, run.path)
    except UserError:  # the data of the run is not here
        return
    pools = getattr(task, "pools", (task,))  # of a gym mixture
    known = (problem for pool in pools for problem in getattr(pool, "train", ()))
    trained = {_question(problem, config) for problem in known}
    if seen := sum(_question(problem, settings) in trained for problem in problems):
        report(
            f"{seen} of the {len(problems)} problems are training problems of {run.path}: this is no "
            "held-out accuracy"
        )
    if problems_changed(run, config, task):
        report(
            f"the data of {run.path} has changed since it was trained: its training problems may be "
            "among these"
        )


def _question(problem: Problem, config: Config) -> str:
    """What is asked, without the prompt's template where the row has a question, to compare problems."""
    said = "\n".join(message.content for message in problem.messages)
    return normalised(str(problem.asked.get(config.task.columns.question, said)))


def _like_agent(model: str, config: Config, agent: str | None) -> Candidate:
    """A model with the settings of an agent of the config (limits, prompt style)."""
    agents = {a.name: a for a in config.agents if not a.replay}
    if agent is not None and agent not in agents:
        raise UserError(f"--agent {agent!r}: the config has {', '.join(agents)}")
    chosen = agents[agent] if agent else next(iter(agents.values()), None)
    settings = chosen.model_dump(exclude={"name", "lora"}) if chosen else {}
    return candidate_of_model(model, settings, config.runtime.device, config.temperature)


def evaluation_table(
    results: Sequence[tuple[Candidate, Evaluation]], verifier_kind: str = "exact"
) -> Table:
    """One row per agent: held-out accuracy or mean reward, by task if there are a few, and lengths."""
    tasks = sorted({task for _, result in results for task in result.by_task})
    tasks = tasks if 1 < len(tasks) <= 6 else []
    name, unit = score_name(verifier_kind)
    title = f"{name}{' in percent' if unit else ''} with its 95 % interval"
    numbers = ("step", "problems", "accuracy" if unit else "reward", *tasks, "tokens", "truncated")
    table = plain_table(title, ["agent"], numbers)
    for candidate, r in results:
        table.add_row(
            candidate.agent.name,
            str(candidate.step),
            f"{r.avg.count if r.avg else 0} x {r.samples}",
            percent(r.avg) + judged_text(*judged_counts(r.metrics())) if r.avg else "-",
            *(f"{100 * r.by_task[t]:.1f}" if t in r.by_task else "-" for t in tasks),
            f"{r.reply_tokens:.0f}",
            f"{r.truncated:.0%}",
        )
    return table


def export_agent(
    run: RunReader,
    name: str,
    folder: Path,
    step: int | None,
    best: bool,
    report: Report,
    adapter: bool = False,
) -> int:
    """Write an agent's checkpoint as a model folder, or its adapter alone, with a model card; returns
    its step."""
    if folder.is_file() or (folder.exists() and any(folder.iterdir())):
        raise UserError(f"{folder} is a file or not empty; give a new folder")
    (candidate,) = candidates_of_run(
        run, run.config(), agent=name, step=step, best=best, report=report
    )
    if adapter and not candidate.agent.lora:
        raise UserError(
            f"agent {name!r} trained all its weights (it has no `lora`), so there is no adapter; leave "
            "out --adapter"
        )
    policy = candidate.load()
    with whole_folder(folder) as new:
        policy.export(new, adapter)
        card = model_card(run, name, candidate.step, adapter=adapter, best=best and step is None)
        (new / CARD).write_text(card, encoding="utf-8")
    return candidate.step
