"""hacrl: train a team of different language models together with reinforcement learning.

    import hacrl
    run = hacrl.train("configs/pocket.toml", steps=20)

In a terminal or notebook the calls show their progress. Ctrl-C stops them at a safe point.
Importing this package is quick: torch and transformers are imported by the first call.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hacrl.config import Config
    from hacrl.config_file import Overrides
    from hacrl.logs.observer import Observer
    from hacrl.store.rundir import RunDirectory

__version__ = "0.1.0"
__all__ = ["__version__", "resume", "train"]


def train(
    config: Config | str | Path | dict[str, Any],
    run: str | Path | None = None,
    *,
    observer: Observer | None = None,
    **overrides: Any,
) -> RunDirectory:
    """Train the team of `config` and return the run directory.

    `config` is a Config, the path of a TOML file, or a dict of the same form. Keyword arguments
    replace top-level settings (`steps=20`). `run` is the directory to write (default: runs/NAME).
    `observer` gets every step, evaluation and note (hacrl/logs/observer.py).
    """
    from hacrl.runs import start
    from hacrl.study.diagnostics.check import HOOKS

    with _shown(observer) as shown:
        return start(config, run, overrides, observer=shown, hooks=HOOKS)


def resume(
    run: str | Path,
    overrides: Overrides = (),
    accept_changed: bool = False,
    *,
    observer: Observer | None = None,
    **settings: Any,
) -> RunDirectory:
    """Continue a run from its newest complete checkpoint; `steps=N` extends it.

    `overrides` are those of the command line (`["runtime.device=cpu"]`) or a dict of dotted keys;
    keyword arguments are top-level settings. A change of settings, data or models that changes
    results is an error, unless `accept_changed`; it is then recorded in RUN/fingerprint.json.
    """
    from hacrl.runs import resume as resume_run
    from hacrl.study.diagnostics.check import HOOKS

    if overrides and settings:
        raise TypeError("give overrides or keyword arguments, not both")
    with _shown(observer) as shown:
        return resume_run(Path(run), overrides or settings, shown, HOOKS, accept_changed)


def _shown(observer: Observer | None) -> AbstractContextManager[Observer | None]:
    """The observer; without one, progress on standard error in a terminal or notebook."""
    from rich.console import Console

    from hacrl.cli.progress import ProgressLine

    console = Console(stderr=True)
    if observer is None and (console.is_terminal or console.is_jupyter):
        return ProgressLine(console)
    return nullcontext(observer)
