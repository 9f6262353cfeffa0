"""The Python interface: train, resume, evaluate, compare, and runs as objects. Made for notebooks.

Each function calls the one behind the command of the same name. Reward functions may be plain Python
functions: see `train`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacrl.config import Config, change_config, load_config
from hacrl.config_file import Overrides
from hacrl.errors import UserError
from hacrl.importing import give_function
from hacrl.logs.observer import Callback, Observer, Several
from hacrl.store.rundir import Row, RunDirectory
from hacrl.study.inspect.samples import as_json as samples_json
from hacrl.study.inspect.samples import find_samples
from hacrl.study.inspect.summary import RunSummary, summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Reward = Callable[..., Any]
"""A reward function: f(completion, answer, **columns) -> float or None (hacrl/verify/function.py)."""


class Run(RunDirectory):
    """A run directory: results, samples, evaluation, export, curves.

    Tables are pandas data frames; they need the extra hacrl[notebook].

    Example: hacrl.Run("runs/team").metrics("train", "wren").plot("step", "reward")
    """

    def __init__(self, path: str | Path) -> None:
        RunDirectory.open(Path(path))  # an error if it is not a run
        super().__init__(Path(path).absolute())  # a notebook may change its folder

    def __repr__(self) -> str:
        found = self.summary()
        agents = " + ".join(agent.name for agent in found.agents)
        steps = f"step {found.steps_done} of {found.config.steps}, {found.state}"
        return f"Run({str(self.path)!r}: {found.config.algorithm.name}, {agents}, {steps})"

    def summary(self) -> RunSummary:
        """The figures of `hacrl show`."""
        return summarise(self)

    def metrics(self, kind: str | None = None, agent: str | None = None) -> DataFrame:
        """metrics.jsonl as a data frame, of one kind ("train" or "evaluation") or agent where given.
        docs/metrics.md explains the columns."""
        known = {"kind": ["train", "evaluation"], "agent": [a.name for a in self.config().agents]}
        for field, given in (("kind", kind), ("agent", agent)):
            if given is not None and given not in known[field]:
                raise UserError(f"{field} = {given!r}: choose one of {', '.join(known[field])}")
        return _frame(self.metric_rows(kind, agent))

    def samples(
        self, step: int | None = None, agent: str | None = None, problem: str | None = None
    ) -> DataFrame:
        """The replies of a training step (from 1; default: the last) with reward, and what each
        learner made of them; only those of one learner or problem where given."""
        return _frame(samples_json(find_samples(self, step, agent, problem, _note)))

    def evaluate(self, **options: Any) -> DataFrame:
        """Evaluate the agents of the run; see `hacrl.evaluate`."""
        return evaluate(str(self.path), **options)

    def export(
        self, agent: str, folder: str | Path, *, step: int | None = None, best: bool = False
    ) -> Path:
        """Write an agent as a model folder that transformers can load, and return the folder."""
        from hacrl.study.evaluation import export_agent

        export_agent(self, agent, Path(folder), step, best, _note)
        return Path(folder)

    def plot(self) -> Figure:
        """Curves of training reward and held-out reward as a matplotlib figure."""
        if "IPython" in sys.modules:  # lets a notebook draw figures that pyplot did not make
            from IPython.core.getipython import get_ipython
            from IPython.core.pylabtools import select_figure_formats

            if shell := get_ipython():
                select_figure_formats(shell, {"png"})
        from hacrl.study.plots import run_figure

        return run_figure(self.summary())

    def resume(self, **options: Any) -> Run:
        """Continue the run; see `hacrl.resume`."""
        return resume(self.path, **options)


def train(
    config: Config | str | Path | dict[str, Any],
    run: str | Path | None = None,
    *,
    reward: Reward | None = None,
    callbacks: Sequence[Callback] = (),
    observer: Observer | None = None,
    **overrides: Any,
) -> Run:
    """Train the team of `config` and return the run.

    `config` is a Config, the path of a TOML file, or a dict of the same form. Keyword arguments
    replace settings: `steps=20`, or `**{"runtime.device": "cpu"}`. `run` is the directory to write
    (default: runs/NAME).

    `reward` is a Python function that replaces the config's verifier. It is sent to the worker
    processes with cloudpickle, so it may come from a notebook, but its globals must be picklable, and
    what it prints is discarded. It works with runtime.kind = "local" only. The run records a hash of
    its source, and a resume needs the function again.

    `callbacks` are functions f(step, rows), called after each step with one metrics row per agent, or
    objects with any of the methods of `hacrl.logs.observer.Observer`. In a terminal or notebook the
    progress is shown, unless `observer` replaces it.
    """
    from hacrl.runs import free_name, read_config, start
    from hacrl.study.diagnostics.check import HOOKS

    if reward is not None:
        if isinstance(config, dict):  # the function takes the place of a verifier
            config = {"verifier": {"kind": "exact"}, **config}
        config, name = read_config(config)
        overrides = {**_reward_settings(reward, config), **overrides}
        _check_local(change_config(config, overrides))
        run = run or free_name(Path("runs") / name)
    with _shown(observer, callbacks) as shown:
        return Run(start(config, run, overrides, observer=shown, hooks=HOOKS).path)


def resume(
    run: str | Path,
    overrides: Overrides = (),
    accept_changed: bool = False,
    *,
    reward: Reward | None = None,
    callbacks: Sequence[Callback] = (),
    observer: Observer | None = None,
    **settings: Any,
) -> Run:
    """Continue a run from its newest complete checkpoint; `steps=N` extends it.

    `overrides` are those of the command line (`["runtime.device=cpu"]`) or a dict of dotted keys;
    keyword arguments are settings. A change of settings, data, models or of the reward function that
    changes results is an error, unless `accept_changed`; it is then recorded in
    RUN/fingerprint.json. `reward`, `callbacks` and `observer` are those of `train`.
    """
    from hacrl.runs import resume as resume_run
    from hacrl.study.diagnostics.check import HOOKS

    if overrides and (settings or reward):
        raise TypeError("give overrides or keyword arguments, not both")
    if reward is not None:
        old = RunDirectory.open(Path(run)).config()
        settings = {**_reward_settings(reward, old), **settings}
        _check_local(change_config(old, settings))
    with _shown(observer, callbacks) as shown:
        return Run(resume_run(Path(run), overrides or settings, shown, HOOKS, accept_changed).path)


def evaluate(
    target: str | Path,
    config: str | Path | None = None,
    *,
    reward: Reward | None = None,
    agent: str | None = None,
    step: int | None = None,
    best: bool = False,
    out: str | Path | None = None,
    **overrides: Any,
) -> DataFrame:
    """Evaluate the agents of a run, or a model, on held-out problems: one row per agent.

    `target` is a run directory or a model; for a model, `config` has the problems. The replies are
    written to `out` (default: RUN/eval). The other arguments are those of `hacrl eval` and `train`.
    """
    from hacrl.study.evaluation import evaluate_held_out

    _frame([])  # without pandas an error before the work
    path = Path(config) if config else None
    if reward is not None:
        used = load_config(path) if path else RunDirectory.open(Path(target)).config()
        overrides = {**_reward_settings(reward, used), **overrides}
    results, _ = evaluate_held_out(
        str(target),
        overrides,
        config=path,
        agent=agent,
        step=step,
        best=best,
        out=Path(out) if out else None,
        report=_note,
    )
    return _frame([{"agent": c.agent.name, "step": c.step, **r.metrics()} for c, r in results])


class Comparison:
    """A finished comparison. `rows` has one row per team, agent and arm; `verdicts` one sentence per
    agent; `report` is the HTML report."""

    def __init__(self, values: Mapping[str, Any], report: Path) -> None:
        self.values, self.report = values, report
        self.verdicts: list[str] = values["verdicts"]

    @property
    def rows(self) -> DataFrame:
        kept = ("team", "agent", "arm", "verdict", "rollouts", "updates", "seconds")
        return _frame(
            [
                {key: row[key] for key in kept}
                | {when: row[when]["mean"] for when in ("before", "after")}
                | {"difference": (row["difference"] or {}).get("interval", {}).get("mean")}
                for row in self.values["rows"]
            ]
        )

    def __repr__(self) -> str:
        return "\n".join([f"Comparison({str(self.report)!r})", *self.verdicts])


def compare(
    suite: str | Path,
    out: str | Path | None = None,
    *,
    parallel: int | None = None,
    only: Sequence[str] = (),
    against: str = "",
    report_only: bool = False,
    **overrides: Any,
) -> Comparison:
    """Train every run of a suite file that is not finished, and compare the arms.

    The arguments are those of `hacrl compare`. Runs are processes of their own, so reward functions
    must be import paths here.
    """
    from hacrl.study.compare import compare as run_suite
    from hacrl.study.compare.report import as_json

    folder = Path(out) if out else Path("runs") / "compare" / Path(suite).stem
    changes = _as_arguments(overrides)
    results = run_suite(Path(suite), folder, changes, parallel, only, against, report_only)
    place = folder / "against" / against if against else folder
    return Comparison(as_json(results), place / "report.html")


# ---------------------------------------------------------------- helpers


def _check_local(config: Config) -> None:
    """UserError if agents are in other processes, which a Python function does not reach."""
    if config.runtime.kind != "local":
        raise UserError(
            f"reward: a Python function needs runtime.kind = 'local', not {config.runtime.kind!r}; "
            'write it into a file, and give verifier = { kind = "function", options = { path = ... } }'
        )


def _reward_settings(reward: Reward, config: Config) -> dict[str, Any]:
    """The verifier settings for a given function. Options such as reward_range are kept."""
    old = config.verifier.options if config.verifier.kind == "function" else {}
    path, version = give_function(reward, "reward")
    options = {**old, "path": path, "version": version}
    return {"verifier.kind": "function", "verifier.options": options, "verifier.rewards": []}


@contextmanager
def _shown(observer: Observer | None, callbacks: Sequence[Callback]) -> Iterator[Observer]:
    """The observer and the callbacks; without an observer, progress on standard error in a terminal or
    notebook."""
    from rich.console import Console

    from hacrl.cli.progress import ProgressLine

    if not isinstance(callbacks, Sequence):
        raise UserError("callbacks is not a list; give one, e.g. callbacks=[FUNCTION]")
    methods = [name for name in vars(Observer) if not name.startswith("_")]
    for callback in callbacks:
        if not callable(callback) and not any(hasattr(callback, name) for name in methods):
            raise UserError(
                f"callbacks: {type(callback).__name__} is not a function and has none of the methods "
                f"{', '.join(methods)}, so it would never be called"
            )
    console = Console(stderr=True)
    if observer is None and (console.is_terminal or console.is_jupyter):
        with ProgressLine(console) as line:
            yield Several(line, *callbacks)
    else:
        yield Several(observer or Observer(), *callbacks)


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _as_arguments(overrides: Mapping[str, Any]) -> list[str]:
    """Settings as on the command line, e.g. ["steps=3"]."""
    from hacrl.study.templates import toml

    if unset := [key for key, value in overrides.items() if value is None]:
        raise UserError(
            f"{unset[0]} = None: a comparison cannot unset a key; leave it out of its base"
        )
    return [f"{key}={toml(value)}" for key, value in overrides.items()]


def _frame(rows: Sequence[Row]) -> DataFrame:
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise UserError("data frames need pandas: pip install 'hacrl[notebook]'") from error
    return DataFrame(rows)
