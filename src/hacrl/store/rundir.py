"""A run's directory: what lies where, and how its files are written.

config.toml             the resolved config; runnable as it is
environment.json        versions, device, threads
metrics.jsonl           one line for each step and agent, and for each evaluation
times.jsonl             seconds by phase (an agent's: sample, score, verify, publish, view, diagnostics,
                        update, rest); the only file that differs between equal runs
pool/STEP/              trajectories by agent, and the snapshot of each closed step
journal/AGENT/          own rollouts: ids, log-probabilities, verdicts
samples/AGENT/          what each training sample was worth: advantage, weight, ratio
evaluation/STEP/AGENT/  every held-out reply and the result
diagnostics/AGENT/      checks of the theory, problem by problem (where they are on)
checkpoints/AGENT/      weights and optimizer
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from hacrl.config import Config, dump_config
from hacrl.errors import UserError
from hacrl.store.files import append_line, sweep, write_atomic
from hacrl.store.reader import LAYOUT, RunReader
from hacrl.types import Sample

Row = Mapping[str, Any]


class RunDirectory(RunReader):
    """A run directory opened for writing; everything that reads is in `RunReader`."""

    @classmethod
    def create(cls, path: Path, config: Config) -> RunDirectory:
        """A new run. A directory that holds one already is refused, with the way on."""
        run = cls(path)
        if run.config_path.exists():
            run.check_layout()
            stored = run.config()
            changed = first_difference(stored.model_dump(), config.model_dump())
            if changed:
                raise UserError(
                    f"{path} holds a run of another config: {changed}. Choose another directory "
                    "with --run, or delete this one."
                )
            raise UserError(
                f"{path} holds a run of this config already. Go on with `hacrl resume {path}`, "
                "choose another directory with --run, or delete this one."
            )
        if path.exists() and any(path.iterdir()):
            raise UserError(
                f"{path} is not empty and is not a run. Choose a new directory with --run: a run "
                "keeps its files for itself."
            )
        path.mkdir(parents=True, exist_ok=True)
        write_atomic(run.path / "environment.json", json.dumps(environment(), indent=2) + "\n")
        write_atomic(run.config_path, dump_config(config))
        return run

    def forget_if_not_begun(self) -> None:
        """Take the directory back, which `create` made, if nothing has been sampled yet."""
        if not any((self.path / begun).exists() for begun in ("journal", "evaluation")):
            shutil.rmtree(self.path, ignore_errors=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process at a time may write a run. The lock ends with the process, however."""
        with open(self.path / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(
                    f"another process is working on {self.path}. Wait for it, or stop it first."
                ) from error
            yield

    def set_config(self, config: Config) -> None:
        write_atomic(self.config_path, dump_config(config))

    # ------------------------------------------------------------ metrics and times

    def add_metrics(self, rows: Iterable[Row]) -> None:
        for row in rows:
            append_line(self.metrics_path, json.dumps(_plain(row), allow_nan=False), sync=True)

    def add_times(self, row: Row) -> None:
        append_line(self.path / "times.jsonl", json.dumps(row))

    def rewind(self, step: int) -> None:
        """Forget what was measured after the checkpoint of `step`: it will be measured again."""
        sweep(self.path)
        kept = [row for row in self.metrics() if _before(row, step)] if step else []
        write_atomic(self.metrics_path, "".join(json.dumps(row) + "\n" for row in kept))

    # ------------------------------------------------------------ samples

    def write_samples(self, agent: str, step: int, rows: Iterable[Row]) -> None:
        folder = self.samples(agent)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(
            folder / f"step-{step:06d}.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
        )

    def save_broken_batch(self, agent: str, step: int, batch: Sequence[Sample]) -> Path:
        path = self.path / f"broken-{agent}-step-{step:06d}.jsonl"
        write_atomic(path, "".join(json.dumps(asdict(s)) + "\n" for s in batch))
        return path


def sample_rows(done: Iterable[tuple[Any, Sequence[Sample], Any]]) -> list[Row]:
    """One row a training sample: what `hacrl samples RUN` prints beside its text. Ratio and
    used are null where the sample did not go through the model (advantage 0, `prune`)."""
    return [
        {
            "problem": s.problem_id,
            "source": s.source,
            "index": s.index,
            "advantage": s.advantage,
            "weight": s.weight,
            "ratio": report.ratios[i],
            "used": report.used[i],
            "update": update.index,
            "floor": update.floor,
        }
        for update, batch, report in done
        for i, s in enumerate(batch)
    ]


def _plain(row: Row) -> Row:
    """JSON knows no nan: what is not finite is null."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in row.items()}


def _before(row: Row, step: int) -> bool:
    """Training rows count steps from 0; evaluation rows count the steps done."""
    return row["step"] <= step if row["kind"] == "evaluation" else row["step"] < step


def first_difference(old: Any, new: Any, where: str = "") -> str | None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(set(old) | set(new)):
            found = first_difference(old.get(key), new.get(key), f"{where}.{key}".strip("."))
            if found:
                return found
        return None
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            if found := first_difference(a, b, f"{where}.{i}"):
                return found
        return None
    if old == new:
        return None
    return f"{where} is {old!r} there and {new!r} here"


def environment() -> dict[str, Any]:
    """Facts that a reader of the results will ask for."""
    import torch
    import transformers

    from hacrl import __version__

    return {
        "layout": LAYOUT,
        "hacrl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }
