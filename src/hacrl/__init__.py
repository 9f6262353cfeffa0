"""hacrl: train a team of different language models together; run each one alone.

    import hacrl
    run = hacrl.train("configs/pocket.toml", steps=20)

Importing this package is cheap: torch and transformers load with the first call.
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
    """Train the team that `config` describes and return its run directory.

    `config` is a Config, a TOML file, or a plain dict of the same form; keyword arguments override
    top-level fields (`steps=20`). `run` is the directory to write, runs/NAME by default.
    """
    from hacrl.training.run import start

    return start(config, run, overrides)


def resume(run: str | Path, **overrides: Any) -> RunDirectory:
    """Go on with a run from its newest whole checkpoint; `steps=N` makes it longer."""
    from hacrl.training.run import go_on

    return go_on(Path(run), overrides)
