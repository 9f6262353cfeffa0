"""Read a run directory: metrics, evaluations, times and training samples.

Every command that looks at a run uses this reader. It writes nothing and imports no torch. A resumed
run measures some steps twice; only this module decides which of the two rows counts.
"""

import errno
import fcntl
import json
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Self

from hacrl.config import Config, load_config
from hacrl.errors import UserError
from hacrl.store.files import changed
from hacrl.store.rows import Row, RowLog, read_object, read_rows

LAYOUT = 3
"""Version of the layout of a run directory, written to environment.json. hacrl 0.1 wrote none."""

GROWING = ("metrics.jsonl", "times.jsonl", "notes.jsonl")
"""Files that grow while the run trains; counts.json has their numbers of rows."""
METRICS = GROWING[0]

DIAGNOSTICS = "diagnostics"
"""The phase of times.jsonl that belongs to diagnostics and not to training."""
BESIDE = ("evaluate", "checkpoint")  # phases of times.jsonl that are no part of a training step


class RunReader:
    """A run directory, opened for reading.

    Example: RunReader.open(Path("runs/team")).metric_rows("evaluation", "wren")[-1]["accuracy"]
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
        if (found := self.environment().get("layout")) != LAYOUT:
            wrote = (
                f"has layout {found}" if found else "was written by hacrl 0.1.x (commit 177e5d4)"
            )
            raise UserError(
                f"{self.path} {wrote}; this version of hacrl reads layout {LAYOUT}. Use the version of "
                "hacrl that wrote it (see environment.json)."
            )

    def environment(self) -> Row:
        """Content of environment.json; empty without the file, as in hacrl 0.1."""
        path = self.path / "environment.json"
        if not path.is_file():
            return {}
        data = path.read_bytes()
        if b'"check"' not in data and data.endswith(b"}\n"):  # of an older layout
            with suppress(ValueError):
                if (found := dict(json.loads(data))).get("layout") != LAYOUT:
                    return found
        way = "Restore it from a backup, or copy it from a run of the same version on the same machine"
        return read_object(path, way)

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics_path(self) -> Path:
        return self.path / METRICS

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

    def samples_folder(self, agent: str) -> Path:
        return self.path / "samples" / agent

    @property
    def error_path(self) -> Path:
        return self.path / "error.txt"

    @property
    def fingerprint_path(self) -> Path:
        return self.path / "fingerprint.json"

    def fingerprint(self) -> Row:
        """The inputs of the run and their history (hacrl.fingerprint); {} if there are none yet."""
        if not self.fingerprint_path.is_file():
            return {}
        way = "Restore it from a backup, or delete it to resume without a comparison of the inputs"
        return read_object(self.fingerprint_path, way)

    def digest(self) -> str | None:
        """The digest of the run's inputs, for checkpoints."""
        history = self.fingerprint().get("history")
        return history[-1]["digest"] if history else None

    def journalled(self) -> bool:
        """Whether something has been sampled."""
        return any((self.path / name).exists() for name in ("journal", "evaluation"))

    def config(self) -> Config:
        return load_config(self.config_path)

    def config_changed(self) -> bool:
        """Whether config.toml is not as hacrl wrote it, by the check value in its last line."""
        data = self.config_path.read_bytes().decode(errors="replace")
        text, mark, check = data.rpartition("# check: ")
        return config_check(text) != mark + check

    def steps_done(self) -> int:
        """Number of training steps in the metrics."""
        return 1 + max((row["step"] for row in self.metric_rows("train")), default=-1)

    def finished(self) -> bool:
        """Whether every learner has its last row: the final evaluation, or, without evaluations,
        the last training step."""
        config = self.config()
        evaluates = bool(config.evaluation.problems)
        kind, last = ("evaluation", config.steps) if evaluates else ("train", config.steps - 1)
        done = {row["agent"] for row in self.metric_rows(kind) if row["step"] == last}
        return done >= {agent.name for agent in config.agents if agent.learns}

    def state(self) -> str:
        """running, finished, failed (an error ended it) or stopped."""
        if self.running():
            return "running"
        ended = "failed" if self.error_path.exists() else "stopped"
        return "finished" if self.finished() else ended

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

    def metric_rows(self, kind: str | None = None, agent: str | None = None) -> list[Row]:
        """Rows of metrics.jsonl, of one kind ("train" or "evaluation") or agent where given. Where a
        resumed run has two rows of one (kind, step, agent), the last one counts."""
        rows = self._read(METRICS)
        found = {(row["kind"], row["step"], row["agent"]): row for row in rows}
        wanted = [row for row in found.values() if kind in (None, row["kind"])]
        return [row for row in wanted if agent in (None, row["agent"])]

    def notes(self) -> list[Row]:
        """Notes and warnings of the run: {"step": steps done when it was shown, "text": ...}."""
        return self._read("notes.jsonl")

    def times(self) -> dict[tuple[int, str, str], float]:
        """(step, agent, phase) -> seconds, without phases in BESIDE. A resumed run writes some steps
        twice; the longest time counts, because the second time the rollouts come from the journal."""
        longest: dict[tuple[int, str, str], float] = {}
        for row in self._read("times.jsonl"):
            for phase, value in row.items():
                if phase not in ("step", "agent", *BESIDE):
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
        path = self.samples_folder(agent) / f"step-{step:06d}.jsonl"
        return read_rows(path, self._measure_again())

    def scores(self, step: int, agent: str) -> dict[str, float]:
        """Problem id -> mean reward of its judged replies in an evaluation, recounted."""
        rows = read_replies(self.evaluation(step, agent), self._measure_again())
        return mean_rewards((row["problem"], row["reward"]) for row in rows)

    def _measure_again(self) -> str:
        return (
            f"Restore it from a backup, or delete {self.metrics_path} and run `hacrl resume "
            f"{self.path}`: all steps are measured again with the replies of the journals"
        )

    def _log(self, name: str) -> RowLog:
        repaired = f"`hacrl resume {self.path}` measures the missing part again"
        way = repaired if name == METRICS else "Delete the file to go on without it"
        return RowLog(self.path / name, way)

    def _counts(self) -> dict[str, int]:
        """File name -> number of rows that the file has at least, from counts.json."""
        path = self.path / "counts.json"
        try:
            return read_object(path, "Delete the file to go on without it")
        except UserError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            return {}  # none yet, or a resume has removed it just now

    def _read(self, name: str) -> list[Row]:
        """Rows of a file that grows."""
        least = self._counts().get(name, 0)  # before the rows: another process may be adding some
        rows, error = self._log(name).read(least)
        if error and (name == METRICS or (self.path / name).is_file()):  # the others may be deleted
            raise error
        return rows


def config_check(text: str) -> str:
    """The last line of config.toml: a check value of the text before it."""
    return f"# check: {sha256(text.encode()).hexdigest()[:12]}\n"


def read_replies(folder: Path, way: str) -> list[Row]:
    """Rows of an evaluation folder's replies.jsonl. A UserError with the `way` out if the file is
    missing or damaged."""
    path = folder / "replies.jsonl"
    if not path.is_file():
        raise changed(path, "the file is missing", way)
    return read_rows(path, way)


def mean_rewards(rewards: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """Problem id -> mean reward. Replies that were not judged have reward None and are left out; a
    problem without a judged reply is missing from the result."""
    found: dict[str, list[float]] = defaultdict(list)
    for problem, reward in rewards:
        if reward is not None:
            found[problem].append(reward)
    return {problem: fmean(values) for problem, values in found.items()}
