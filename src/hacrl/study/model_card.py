"""The model card of an exported agent: what it learned, from whom, and how well it did."""

import json
from pathlib import Path
from typing import Any

from hacrl import __version__
from hacrl.config import AgentConfig
from hacrl.safe_text import printable
from hacrl.store.reader import RunReader
from hacrl.study.inspect.summary import peers_used, scores_of
from hacrl.study.templates import render

CARD = "README.md"


def model_card(
    run: RunReader, name: str, step: int, *, adapter: bool = False, best: bool = False
) -> str:
    """Return the card of an agent after `step` steps, as Markdown. Local folders are shown by their
    last name only."""
    config = run.config()
    agent = config.agent(name)
    rows = [row for row in run.metric_rows("train", name) if row["step"] < step]
    scores = scores_of(run, name)

    def total(key: str) -> int:
        return int(sum(row.get(key, 0) for row in rows))

    task = config.task
    values: dict[str, Any] = {
        "agent": agent,
        "model": _model(agent),
        "hub_model": agent.model if _is_hub_name(agent.model) else None,
        "adapter": adapter,
        "step": step,
        "algorithm": config.algorithm.name.rpartition("/")[2],
        "version": __version__,
        "team": [
            {"name": a.name, "model": _model(a), "samples": total(f"samples/kept/{a.name}")}
            for a in config.agents
        ],
        "own": total("own/samples"),
        "peers": total("peers/samples"),
        "updates": total("updates"),
        "used": peers_used(rows),
        "data": printable(task.name or Path(task.train or task.kind).name),
        "verifier": config.verifier.kind.rpartition("/")[2],
        "seed": config.seed,
        "scores": [score for score in scores if score.step in (0, step)],
        "samples": config.evaluation.samples,
        "temperature": config.evaluation.temperature,
        "best": best and step > 0,
        "evaluations": len(scores),
        "digest": run.digest() or "unknown",
        "quoted": lambda value: f"`{json.dumps(printable(value))}`",
    }
    return render("model_card.md.j2", **values)


def _model(agent: AgentConfig) -> str:
    """Its model by name; a replayed agent by its run."""
    source = agent.model or f"replay of {Path(agent.replay or '').name}"
    return source if _is_hub_name(source) else Path(source).name


def _is_hub_name(model: str) -> bool:
    return model.count("/") == 1 and not Path(model).is_absolute()
