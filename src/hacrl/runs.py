"""Start and resume runs."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hacrl.config import Config, change_config, load_config, parse_config
from hacrl.config_file import Overrides
from hacrl.errors import Terminated, UserError
from hacrl.fingerprint import check_inputs
from hacrl.importing import import_object
from hacrl.logs.metrics_log import MetricsLog
from hacrl.logs.observer import NotesOnDisk, Observer, Several
from hacrl.logs.warnings import WATCHES
from hacrl.safe_text import plural
from hacrl.stopping import stoppable
from hacrl.store.files import write_config
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory
from hacrl.tasks import Task, make_task
from hacrl.training.hooks import Hooks
from hacrl.training.loop import Executor, Team
from hacrl.verify.number import misread
from hacrl.verify.settings import VERIFIERS

EXECUTORS = {
    "local": "hacrl.training.local:LocalExecutor",
    "processes": "hacrl.cluster.processes:ProcessExecutor",
    "ray": "hacrl.cluster.ray:RayExecutor",
}
MakePool = Callable[[RunDirectory, Callable[[str], None]], Pool]
"""Opens the pool of a run; the second argument takes notes for the user."""


def start(
    config: Config | str | Path | dict[str, Any],
    run: str | Path | None = None,
    overrides: Overrides = (),
    observer: Observer | None = None,
    hooks: Hooks | None = None,
) -> RunDirectory:
    """Train from the first step in a new run directory, and return it."""
    config, name = read_config(config)
    config = change_config(config, overrides)
    if config.hub is not None:
        raise UserError(
            f"[hub]: the config is that of a member of a team across owners. Train it with `hacrl join "
            f"{config.hub.url} MINE.toml --as {config.agents[0].name} --key FILE`, or remove the table."
        )
    directory = RunDirectory.create(Path(run) if run else free_name(Path("runs") / name), config)
    with directory.locked():
        try:
            train_team(config, directory, observer or Observer(), hooks or Hooks())
        except UserError:
            directory.forget_if_not_begun()  # a corrected config can use the same directory
            raise
    return directory


def read_config(config: Config | str | Path | dict[str, Any]) -> tuple[Config, str]:
    """The config, given as such, as a file or as a dict, and the default name of its run."""
    if isinstance(config, (str, Path)):
        return load_config(Path(config)), Path(config).stem
    return (parse_config(config) if isinstance(config, dict) else config), "run"


def resume(
    run: Path,
    overrides: Overrides = (),
    observer: Observer | None = None,
    hooks: Hooks | None = None,
    accept_changed: bool = False,
) -> RunDirectory:
    """Continue a run from its newest whole checkpoint. Changes of the config or of a file that would
    change results raise a UserError, unless `accept_changed` (see hacrl.fingerprint)."""
    directory = RunDirectory.open(run)
    old = directory.config()
    if old.hub is not None:
        raise UserError(
            f"{run} belongs to a team across owners. Continue it with `hacrl join {old.hub.url} "
            f"MINE.toml --as {old.agents[0].name} --key FILE --run {run}`."
        )
    with directory.locked():
        rows, _ = directory.intact_metrics()
        done = max((row["step"] + 1 for row in rows if row["kind"] == "train"), default=0)
        if not old.checkpoint.save and done >= old.steps:
            raise UserError(
                f"{run} is finished and wrote no checkpoints (checkpoint.save = false), so it "
                "cannot be resumed. Start a new run."
            )
        config = change_config(old, overrides)
        if config.steps < done:
            raise UserError(f"steps={config.steps}, but {run} has done {done} steps already.")
        args = (config, directory, observer or Observer(), hooks or Hooks())
        train_team(*args, accept_changed)
    return directory


def join(
    config: Config,
    run: Path,
    make_pool: MakePool,
    observer: Observer | None = None,
    hooks: Hooks | None = None,
    accept_changed: bool = False,
) -> RunDirectory:
    """Train a member of a team across owners (owners/join.py). A run that exists is continued."""
    begun = (run / "config.toml").exists()
    directory = RunDirectory.open(run) if begun else RunDirectory.create(run, config)
    if begun and (old := directory.config().hub) and config.hub and old.team != config.hub.team:
        raise UserError(
            f"{run} belongs to the team {old.team}, not to {config.hub.team}: check the URL, or choose "
            "another directory with --run"
        )
    verifier = config.verifier.kind
    here = f"{verifier}/{getattr(VERIFIERS[verifier], 'version', '')}"
    with directory.locked():
        try:
            if config.hub and here != config.hub.verifier:
                raise UserError(
                    f"the team judges with {config.hub.verifier}, but this hacrl has {here}: install "
                    "the version of hacrl that the team uses"
                )
            args = (config, directory, observer or Observer(), hooks or Hooks())
            train_team(*args, accept_changed, make_pool)
        except UserError:
            if not begun:
                directory.forget_if_not_begun()
            raise
    return directory


def train_team(
    config: Config,
    run: RunDirectory,
    observer: Observer,
    hooks: Hooks,
    accept_changed: bool = False,
    make_pool: MakePool = lambda run, _: Pool(run.pool_path),
) -> None:
    """Run the team's loop (loop.py) from the newest checkpoint that all learners have."""
    if _inside_event_loop():  # a notebook: one thread cannot run two event loops
        with stoppable(), ThreadPoolExecutor(1) as thread:
            args = (config, run, observer, hooks, accept_changed, make_pool)
            training = thread.submit(train_team, *args)
            while not wait([training], timeout=0.5).done:  # lets this thread handle signals
                pass
            return training.result()
    on_disk = NotesOnDisk(run)
    observer = Several(on_disk, observer)
    observer.phase("loading")
    before, inputs = run.config_path.read_text(encoding="utf-8"), run.fingerprint()
    try:
        pool = make_pool(run, observer.note)
        task = make_task(config.task, config.seed, run.path)
        for text in _check_task(config, task):
            observer.note(text)
        check_inputs(config, task, run, observer.note, accept_changed)
        edited = run.config_changed()
        if edited:
            observer.note(
                f"{run.config_path} was edited after hacrl wrote it; the run uses the edited settings."
            )
        if edited or config != run.config():
            run.set_config(config)
        with ExitStack() as stack:
            kind: type[Executor] = import_object(EXECUTORS[config.runtime.kind], "runtime.kind")
            executor = kind(config, run, observer, hooks)
            executor.open(stack, task, pool)
            log = MetricsLog(run, observer, WATCHES)
            stack.callback(log.close)
            # pop_all: what was opened is closed before the signal handlers are restored.
            with stoppable(), stack.pop_all(), asyncio.Runner() as runner:
                runner.get_loop().set_exception_handler(_report_unless_stopped)
                runner.get_loop().run_until_complete(executor.load())
                team = Team(config, run, pool, executor, log)  # it removes what is not used again
                runner.get_loop().run_until_complete(team.train())
    except Exception as error:
        if on_disk.trains:
            on_disk.failed(error)
        elif isinstance(error, UserError):  # a change that cannot be trained is not kept
            write_config(run.config_path, before)
            run.set_fingerprint(inputs)
        raise
    observer.finished()


def _inside_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _check_task(config: Config, task: Task) -> list[str]:
    """Check the numbers of problems before any model is loaded; return notes for the user."""
    notes = list(getattr(task, "notes", ()))
    task.batch(0, config.problems_per_step)
    wanted = config.evaluation.problems
    found = len(task.held_out(config.evaluation.most)) if wanted else 0
    if wanted and not found:
        raise UserError(
            f"evaluation.problems = {wanted}, but the task has no held-out problems: give it some, or "
            "switch evaluation off with evaluation.problems=0"
        )
    if isinstance(wanted, int) and found < wanted:
        notes.append(
            f"evaluation.problems = {wanted}, but the task has {plural(found, 'held-out problem')}; "
            "all are used."
        )
    if config.verifier.kind == "number":
        known = [*getattr(task, "train", ()), *getattr(task, "kept_out", ())]
        notes += filter(None, [misread(problem.answer for problem in known)])
    return notes


def _report_unless_stopped(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what no task has handled. A signal also ends the tasks, but the caller reports it."""
    if not isinstance(context.get("exception"), (KeyboardInterrupt, Terminated)):
        loop.default_exception_handler(context)


def free_name(path: Path) -> Path:
    """runs/pocket, runs/pocket-2, ...: the first that is no run yet."""
    candidate, n = path, 1
    while (candidate / "config.toml").exists():
        n += 1
        candidate = path.with_name(f"{path.name}-{n}")
    return candidate
