"""Who is evaluated: the agents of a run at a checkpoint, or a model as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hacrl.config import AgentConfig, load_config
from hacrl.errors import UserError
from hacrl.overrides import set_key
from hacrl.policy.policy import Policy
from hacrl.store.rundir import RunDirectory
from hacrl.study.benchmarks.run import Contestant
from hacrl.study.evaluation import candidates_of_run


def contestants_of(
    target: str,
    overrides: Sequence[str] = (),
    *,
    agent: str | None = None,
    step: int | None = None,
    best: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> list[Contestant]:
    """The agents of the run `target` (all, or `agent`) at their newest checkpoint, that of `step`, or
    their best; or the model `target`: a folder, a hub name, or pocket:NAME. Overrides are keys of the
    run's config (runtime.device=cpu), and for a model those of an agent's table (template=plain)."""
    path = Path(target)
    if (path / "config.toml").is_file():
        config = load_config(path / "config.toml", overrides)
        run = RunDirectory.open(path)
        return [
            Contestant(c.agent, partial(c.load, config), c.step)
            for c in candidates_of_run(run, config, agent, step, best, report)
        ]
    if agent is not None or step is not None or best:
        raise UserError(f"{target} is not a run directory, so it has no agents and no checkpoints")
    return [_model(target, overrides)]


def _model(target: str, overrides: Sequence[str]) -> Contestant:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(target).name.removeprefix("pocket:"))
    tree: dict[str, Any] = {"name": name.lstrip("._-") or "model", "model": target}
    for override in overrides:
        set_key(tree, override)
    try:
        settings = AgentConfig.model_validate({**tree, "learn": False})
    except ValidationError as error:
        found = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg']} (given: {e['input']!r})"
            for e in error.errors()
        )
        raise UserError(f"settings of the model {target}: {found}") from error
    return Contestant(settings, lambda: Policy(settings, device="auto", temperature=1.0, beta=0.0))
