"""Runtimes decide where and when agents run their phases. One dict, chosen by `runtime.kind`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hacrl.config import Config, load_config, parse_config
from hacrl.errors import UserError
from hacrl.store.rundir import RunDirectory
from hacrl.training.local import run_local
from hacrl.training.observer import Observer, Quiet
from hacrl.training.ray import run_ray

Runtime = Callable[[Config, RunDirectory, Observer], None]
RUNTIMES: dict[str, Runtime] = {"local": run_local, "ray": run_ray}


def start(
    config: Config | str | Path | dict[str, Any],
    run: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> RunDirectory:
    """Train from the beginning, in a new run directory."""
    name = "run"
    if isinstance(config, (str, Path)):
        name = Path(config).stem
        config = load_config(Path(config))
    elif isinstance(config, dict):
        config = parse_config(config)
    config = _changed(config, overrides or {})
    directory = RunDirectory.create(Path(run) if run else free_name(Path("runs") / name), config)
    with directory.locked():  # who does not get the lock must not take another's directory away
        try:
            _runtime(config)(config, directory, observer or Quiet())
        except UserError:
            directory.forget_if_not_begun()  # so that the mended config can take the same place
            raise
    return directory


def go_on(
    run: Path, overrides: Mapping[str, Any] | None = None, observer: Observer | None = None
) -> RunDirectory:
    """Resume a run from its newest whole checkpoint. Only `steps` may change."""
    directory = RunDirectory.open(run)
    config = directory.config()
    if other := set(overrides or {}) - {"steps"}:
        raise UserError(
            f"resume: {sorted(other)[0]} cannot change inside a run; only steps can. For another "
            "setting start a new run."
        )
    with directory.locked():
        if not config.checkpoint.save and _steps_done(directory) >= config.steps:
            raise UserError(
                f"{run} is finished and wrote no checkpoints (checkpoint.save = false), so there is "
                "nothing to go on from. Start a new run."
            )
        if overrides:
            config = _changed(config, overrides)
            done = _steps_done(directory)
            if config.steps < done:
                raise UserError(f"steps={config.steps}, but {run} has done {done} steps already.")
            directory.set_config(config)
        _runtime(config)(config, directory, observer or Quiet())
    return directory


def _steps_done(run: RunDirectory) -> int:
    return max((row["step"] + 1 for row in run.metrics() if row["kind"] == "train"), default=0)


def free_name(path: Path) -> Path:
    """runs/pocket, runs/pocket-2, ...: a new run never needs a name."""
    candidate, n = path, 1
    while (candidate / "config.toml").exists():
        n += 1
        candidate = path.with_name(f"{path.name}-{n}")
    return candidate


def _changed(config: Config, overrides: Mapping[str, Any]) -> Config:
    return (
        parse_config({**config.model_dump(exclude_none=True), **overrides}) if overrides else config
    )


def _runtime(config: Config) -> Runtime:
    if config.runtime.kind not in RUNTIMES:
        raise UserError(
            f"runtime.kind = {config.runtime.kind!r} is unknown. There are: {', '.join(RUNTIMES)}."
        )
    return RUNTIMES[config.runtime.kind]
