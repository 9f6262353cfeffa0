"""hacrl: train a team of different language models together with reinforcement learning.

    import hacrl
    run = hacrl.train("configs/pocket.toml", steps=20)

Importing this package is quick: torch and transformers are imported by the first call.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hacrl.config import Config
    from hacrl.store.rundir import RunDirectory

__version__ = "0.1.0"
__all__ = ["__version__", "resume", "train"]


def train(
    config: Config | str | Path | dict[str, Any], run: str | Path | None = None, **overrides: Any
) -> RunDirectory:
    """Train the team of `config` and return the run directory.

    `config` is a Config, the path of a TOML file, or a dict of the same form. Keyword arguments
    replace top-level settings (`steps=20`). `run` is the directory to write (default: runs/NAME).
    """
    from hacrl.runs import start
    from hacrl.study.diagnostics.check import HOOKS

    return start(config, run, overrides, hooks=HOOKS)


def resume(run: str | Path, **overrides: Any) -> RunDirectory:
    """Continue a run from its newest complete checkpoint; `steps=N` extends it."""
    from hacrl.runs import resume as resume_run
    from hacrl.study.diagnostics.check import HOOKS

    return resume_run(Path(run), overrides, hooks=HOOKS)
