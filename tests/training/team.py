"""Small configs of the pocket team for tests of whole runs."""

from typing import Any

from hacrl.logs.observer import Observer
from hacrl.store.pool import Pool
from hacrl.store.reader import RunReader
from hacrl.types import Snapshot

NO_EVALUATION = {"evaluation": {"problems": 0}, "checkpoint": {"every": 0}}


def member(name: str, model: str | None = None, **settings: Any) -> dict[str, Any]:
    return {
        "name": name,
        "model": f"pocket:{model or name}",
        "learning_rate": 2e-4,
        **settings,
    }


def team(*members: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A config of a few quick steps; whole tables given in `settings` replace those here."""
    return {
        "seed": 3,
        "steps": 3,
        "prompts_per_step": 6,
        "samples_per_prompt": 4,
        "minibatch_samples": 12,
        "max_prompt_tokens": 64,
        "max_response_tokens": 24,
        "task": {"kind": "arithmetic"},
        "verifier": {"kind": "number", "workers": 1, "timeout": 300},
        "algorithm": {"name": "hacpo", "epsilon_low": 3e-3, "epsilon_high": 4e-3},
        "evaluation": {"every": 2, "problems": 12},
        "checkpoint": {"every": 1},
        "runtime": {"threads": 1, "device": "cpu"},
        "log": {"tensorboard": False},
        "agents": list(members),
        **settings,
    }


class Notes(Observer):
    """Keeps the notes of a run."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def rows(run: RunReader, agent: str, kind: str = "train") -> list[dict[str, Any]]:
    """The metrics rows of one agent."""
    return run.metric_rows(kind, agent)


def snapshots(run: RunReader, steps: int) -> list[Snapshot]:
    pool = Pool(run.pool_path, read_only=True)
    return [pool.snapshot(step) for step in range(steps)]
