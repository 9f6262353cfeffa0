"""The files of a run directory, and how they are written.

config.toml             the resolved config; runnable as it is
environment.json        versions, device, threads
fingerprint.json        inputs of the run (config, files, models, versions) and how they changed
counts.json             number of rows of the files that grow (metrics, times, notes)
metrics.jsonl           one line for each step and agent, and for each evaluation
times.jsonl             seconds by phase (sample, score, verify, publish, samples, diagnostics,
                        update, offload, evaluate, checkpoint, wait); differs between equal runs
notes.jsonl             notes and warnings shown while the run trained; differs between equal runs
error.txt               the error that ended the training, if one did
pool/STEP/              trajectories by agent, and the snapshot of each closed step
journal/AGENT/          own rollouts: ids, log-probabilities, verdicts; own verdicts on peers' texts
                        and quarantine (where [trust] asks for them)
samples/AGENT/          what each training sample was worth: advantage, weight, ratio
evaluation/STEP/AGENT/  every held-out reply and the result
diagnostics/AGENT/      checks of the theory, problem by problem (where they are on)
checkpoints/AGENT/      weights and optimizer
hub/, data/             of a member of a team across owners: charter, signed snapshots and receipts,
                        own envelopes; the data files of the task
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hacrl.config import Config, dump_config
from hacrl.errors import UserError
from hacrl.store.files import remove_whole, sweep, write_atomic, write_config
from hacrl.store.reader import GROWING, LAYOUT, METRICS, RunReader, config_check
from hacrl.store.rows import RowLog, seal, write_object, write_rows
from hacrl.types import Sample

Row = Mapping[str, Any]

LOCK_TRIES, LOCK_WAIT = 10, 0.05
"""How often the lock is tried, and the seconds between two tries: a reader holds it for a moment
(`RunReader.running`)."""


class RunDirectory(RunReader):
    """A run directory opened for writing; everything that reads is in `RunReader`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._logs: dict[str, RowLog] = {}

    @classmethod
    def create(cls, path: Path, config: Config) -> RunDirectory:
        """Start a new run; a UserError if the directory holds a run or other files."""
        run = cls(path)
        run._check_new()
        path.mkdir(parents=True, exist_ok=True)
        with run.locked():
            run._check_new()  # another process may have started one since
            write_object(run.path / "environment.json", environment(config), indent=2)
            run.set_config(config)
        return run

    def _check_new(self) -> None:
        """Raise a UserError if the directory holds a run or other files."""
        path = self.path
        if self.config_path.exists():
            raise UserError(
                f"{path} holds a run already. Continue it with `hacrl resume {path}`, choose another "
                "directory with --run, or delete this one."
            )
        if path.exists() and any(not _left_by_a_kill(file) for file in path.iterdir()):
            raise UserError(
                f"{path} is not empty and is not a run. Choose a new directory with --run: a run "
                "needs a directory of its own."
            )

    def forget_if_not_begun(self) -> None:
        """Remove the directory, which `create` made, if nothing has been sampled yet."""
        if not self.journalled():
            shutil.rmtree(self.path, ignore_errors=True)

    def forget_from(self, step: int) -> None:
        """Remove rollouts, verdicts, batches, samples, evaluations and checkpoints made after `step`
        steps. They come from other inputs."""
        after = step + 1 if step else 0  # names in evaluation/ and checkpoints/ count steps done
        places = {"evaluation/*": after, "checkpoints/*/*": after}
        for part in ("journal/*/*", "pool/*", "samples/*/*", "diagnostics/*/*"):
            places[part] = step
        for place, first in places.items():
            for path in sorted(self.path.glob(place)):
                found = re.search(r"-(\d{6,})", path.name)
                if found and int(found[1]) >= first:
                    remove_whole(path) if path.is_dir() else path.unlink(missing_ok=True)

    def set_fingerprint(self, content: Row) -> None:
        write_object(self.fingerprint_path, content, indent=1)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run's lock, so that one process writes it, and remove what a kill left behind. The
        lock ends with the process."""
        with open(self.path / ".lock", "w") as lock:
            for tries_left in reversed(range(LOCK_TRIES)):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if not tries_left:
                        raise UserError(
                            f"another process is working on {self.path}. Wait for it, or stop it first."
                        ) from error
                time.sleep(LOCK_WAIT)
            sweep(self.path)
            yield

    def set_config(self, config: Config) -> None:
        text = dump_config(config)
        write_config(self.config_path, text + config_check(text))

    def add_metrics(self, rows: Iterable[Row]) -> None:
        """Append rows to metrics.jsonl. Numbers that are not finite become null."""
        self._add(METRICS, rows, sync=True)

    def add_times(self, row: Row) -> None:
        self._add("times.jsonl", [row])

    def add_note(self, done: int, text: str) -> None:
        """Keep a note that was shown after `done` steps. A note that the run has is not repeated."""
        if all(row["text"] != text for row in self.notes()):
            self._add("notes.jsonl", [{"step": done, "text": text}])

    def intact_metrics(self) -> tuple[list[dict[str, Any]], UserError | None]:
        """Rows of metrics.jsonl up to the first damaged one, and the error that names it."""
        try:
            least = self._counts().get(METRICS, 0)
        except UserError:  # written again by `rewind`
            least = 0
        return self._log(METRICS).read(least)

    def rewind(self, step: int) -> None:
        """Drop metrics measured after the checkpoint of `step`: they will be measured again."""
        # Training rows count steps from 0; evaluation rows hold the number of steps done.
        rows = self.intact_metrics()[0] if step else []
        kept = [row for row in rows if row["step"] < step + (row["kind"] == "evaluation")]
        self._logs = {name: self._log(name) for name in GROWING}
        for name in GROWING[1:]:
            self._read(name)  # an error if it is damaged
            self._logs[name].read()
        (self.path / "counts.json").unlink(missing_ok=True)  # a kill here must not look like damage
        self._logs[METRICS].replace(kept)
        self._write_counts()

    def _add(self, name: str, rows: Iterable[Row], sync: bool = False) -> None:
        log = self._logs.setdefault(name, self._log(name))
        for row in rows:
            log.add(row, sync)
        self._write_counts()

    def _write_counts(self) -> None:
        counts = {name: log.count for name, log in self._logs.items()}
        write_atomic(self.path / "counts.json", seal(counts) + "\n", sync=False)

    def write_samples(self, agent: str, step: int, rows: Iterable[Row]) -> None:
        write_rows(self.samples_folder(agent) / f"step-{step:06d}.jsonl", rows)

    def save_broken_batch(self, agent: str, step: int, batch: Sequence[Sample]) -> Path:
        """Keep a minibatch whose update was not finite, and return the file."""
        path = self.path / f"broken-{agent}-step-{step:06d}.jsonl"
        write_rows(path, map(asdict, batch))
        return path


def _left_by_a_kill(path: Path) -> bool:
    """Whether a new run writes this file before it is one, or a run that ended early left it."""
    if path.name == "environment.json":
        return b'"layout"' in path.read_bytes()
    return path.name in (".lock", "fingerprint.json") or path.name.startswith(".tmp-")


def environment(config: Config) -> dict[str, Any]:
    """Return versions and hardware, for environment.json."""
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
        "threads": config.runtime.threads or torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }
