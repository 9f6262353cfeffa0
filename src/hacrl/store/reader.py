"""Read a run directory: metrics, evaluations, times and training samples.

Every command that looks at a run uses this reader. It writes nothing and imports no torch. A resumed
run measures some steps twice; the rule for such rows is here and nowhere else.
"""

from __future__ import annotations

import errno
import fcntl
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from hacrl.config import Config, load_config
from hacrl.errors import UserError
from hacrl.store.files import changed, read_whole_lines

Row = dict[str, Any]

LAYOUT = 2
"""Version of the layout of a run directory, written to environment.json. hacrl 0.1 wrote none."""

DIAGNOSTICS = "diagnostics"
"""The phase of times.jsonl that belongs to diagnostics and not to training."""
BESIDE = ("evaluate", "checkpoint")
"""Phases of times.jsonl that are no part of a training step."""


class RunReader:
    """A run directory, opened for reading.

    Example: RunReader.open(Path("runs/team")).metrics("evaluation", "wren")[-1]["accuracy"]
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a run; a UserError if `path` is not a run directory."""
        run = cls(path)
        if not run.config_path.is_file():
            raise UserError(
                f"{path} is not a run directory: it has no config.toml. `hacrl train` writes run "
                "directories, by default under runs/."
            )
        run.check_layout()
        return run

    def check_layout(self) -> None:
        """Raise a UserError if another version of hacrl wrote the run in a layout of its own."""
        path = self.path / "environment.json"
        found = json.loads(path.read_text()).get("layout") if path.is_file() else None
        if found is None:
            raise UserError(
                f"{self.path} was written by hacrl 0.1.x; this version cannot read it. Use hacrl "
                "0.1.x (commit 177e5d4)."
            )
        if found != LAYOUT:
            raise UserError(
                f"{self.path} has layout {found}; this version of hacrl reads layout {LAYOUT}. Use "
                "the version of hacrl that wrote it (see environment.json)."
            )

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def pool_path(self) -> Path:
        return self.path / "pool"

    def journal(self, agent: str) -> Path:
        return self.path / "journal" / agent

    def checkpoints(self, agent: str) -> Path:
        return self.path / "checkpoints" / agent

    def evaluation(self, step: int, agent: str) -> Path:
        """Folder of an evaluation after `step` steps."""
        return self.path / "evaluation" / f"step-{step:06d}" / agent

    def samples(self, agent: str) -> Path:
        return self.path / "samples" / agent

    @property
    def fingerprint_path(self) -> Path:
        return self.path / "fingerprint.json"

    def fingerprint(self) -> dict[str, Any]:
        """The inputs of the run and their history (hacrl.fingerprint); {} if there are none yet."""
        try:
            found = json.loads(self.fingerprint_path.read_text(encoding="utf-8"))
            return found if found["inputs"] and found["history"] else {}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError) as error:
            raise changed(self.fingerprint_path, f"not a fingerprint ({error!r})") from error

    def digest(self) -> str | None:
        """The digest of the run's inputs, for checkpoints."""
        history = self.fingerprint().get("history")
        return history[-1]["digest"] if history else None

    def journalled(self) -> bool:
        """Whether something has been sampled."""
        return any((self.path / name).exists() for name in ("journal", "evaluation"))

    def config(self) -> Config:
        return load_config(self.config_path)

    def steps_done(self) -> int:
        """Number of training steps in the metrics."""
        return 1 + max((row["step"] for row in self.metrics("train")), default=-1)

    def finished(self) -> bool:
        """Whether every learner has its last row: the final evaluation, or, without evaluations,
        the last training step."""
        config = self.config()
        evaluates = bool(config.evaluation.problems)
        kind, last = ("evaluation", config.steps) if evaluates else ("train", config.steps - 1)
        done = {row["agent"] for row in self.metrics(kind) if row["step"] == last}
        return done >= {agent.name for agent in config.agents if agent.learns}

    def running(self) -> bool:
        """Whether a process holds the run's lock."""
        try:
            with open(self.path / ".lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError as error:
            return error.errno == errno.EWOULDBLOCK
        return False

    def metrics(self, kind: str | None = None, agent: str | None = None) -> list[Row]:
        """Rows of metrics.jsonl, of one kind ("train" or "evaluation") or agent where given.

        Where a resumed run has two rows of one (kind, step, agent), the last one counts.
        """
        rows = read_rows(self.metrics_path, ("kind", "step", "agent"), appended=True)
        found = {(row["kind"], row["step"], row["agent"]): row for row in rows}
        wanted = [row for row in found.values() if kind in (None, row["kind"])]
        return [row for row in wanted if agent in (None, row["agent"])]

    def notes(self) -> list[Row]:
        """Notes and warnings of the run: {"step": steps done when it was shown, "text": ...}."""
        return read_rows(self.path / "notes.jsonl", ("step", "text"), appended=True)

    def times(self) -> dict[tuple[int, str, str], float]:
        """(step, agent, phase) -> seconds of the agents' phases.

        A resumed run writes some steps twice. The longest time of a phase counts, because the
        second time the rollouts come from the journal. Phases in BESIDE are left out; runs of
        older versions list them under the agent "".
        """
        longest: dict[tuple[int, str, str], float] = {}
        for row in read_rows(self.path / "times.jsonl", ("step", "agent"), appended=True):
            for phase, value in row.items():
                if row["agent"] and phase not in ("step", "agent", *BESIDE):
                    key = (row["step"], row["agent"], phase)
                    longest[key] = max(longest.get(key, 0.0), value)
        return longest

    def training_seconds(self) -> dict[int, float]:
        """Step -> seconds of all agents' phases, without diagnostics."""
        seconds: dict[int, float] = defaultdict(float)
        for (step, _, phase), value in self.times().items():
            if phase != DIAGNOSTICS:
                seconds[step] += value
        return dict(seconds)

    def seconds(self, agent: str, *, diagnostics: bool = False) -> float:
        """Seconds of one agent's phases without diagnostics, or of its diagnostics alone."""
        times = self.times().items()
        return sum(v for (_, a, p), v in times if a == agent and (p == DIAGNOSTICS) is diagnostics)

    def sample_steps(self) -> list[int]:
        """Steps with stored training samples, ascending. Steps count from 0."""
        paths = self.path.glob("samples/*/step-*.jsonl")
        return sorted({int(path.stem.removeprefix("step-")) for path in paths})

    def sample_rows(self, step: int, agent: str) -> list[Row]:
        """One row per training sample of a learner: advantage, weight, ratio, used."""
        needed = ("problem", "source", "index", "advantage", "weight", "ratio", "used")
        return read_rows(self.samples(agent) / f"step-{step:06d}.jsonl", needed)


def read_replies(folder: Path) -> list[Row]:
    """Rows of an evaluation folder's replies.jsonl; empty when there is no such file."""
    return read_rows(folder / "replies.jsonl", ("problem", "reward"))


def read_scores(folder: Path) -> dict[str, float]:
    """Problem id -> mean reward of its judged replies, recounted from replies.jsonl."""
    return mean_rewards((row["problem"], row["reward"]) for row in read_replies(folder))


def mean_rewards(rewards: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """Problem id -> mean reward. Replies that were not judged have reward None and are left out; a
    problem without a judged reply is missing from the result."""
    found: dict[str, list[float]] = defaultdict(list)
    for problem, reward in rewards:
        if reward is not None:
            found[problem].append(reward)
    return {problem: fmean(values) for problem, values in found.items()}


def read_rows(path: Path, needed: Iterable[str] = (), *, appended: bool = False) -> list[Row]:
    """The JSON objects of a .jsonl file, each with at least the keys `needed`; none when there is no
    such file. A UserError names the file and line of anything else.

    appended: the file grows line by line, so an unfinished last line is normal and left out.
    """
    lines = read_whole_lines(path)
    if not appended and path.is_file() and not path.read_bytes().endswith(b"\n"):
        raise UserError(
            f"{path}, line {len(lines) + 1}: the file is truncated. Restore it from a backup, or "
            "delete the run and train again."
        )
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise _bad_line(path, number, f"not JSON ({error})") from error
        if not isinstance(row, dict):
            raise _bad_line(path, number, "not a JSON object")
        if missing := [key for key in needed if key not in row]:
            raise _bad_line(path, number, f"no {missing[0]!r}")
        rows.append(row)
    return rows


def _bad_line(path: Path, number: int, reason: str) -> UserError:
    return UserError(
        f"{path}, line {number}: {reason}. The file was changed after hacrl wrote it; restore it, or "
        "delete the line to go on without it."
    )
