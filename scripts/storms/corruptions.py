"""Damage random files of a run, then read and resume it: every change of a number must be noticed.

    python scripts/storms/corruptions.py --count 300

Takes a finished and a stopped pocket run. Each attempt copies one of them, flips a bit, truncates or
zeroes a block of one file, reads what `show` and `samples` read, and resumes the copy. Outcomes:

    noticed     an error or a note names the file
    repaired      a note names the file, and after the resume all numbers are those of the whole run
    harmless    no message, and all numbers are those of the whole run
    MISSED      no message, and a number differs
    UNNAMED     an error that does not name the file
    TRACEBACK   any other exception

Prints one line per finding (the last three) and a table by kind of file; the exit code is 1 if there is
a finding.
"""

import argparse
import contextlib
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacrl.errors import explain
from hacrl.logs.observer import Observer
from hacrl.runs import resume, start
from hacrl.store.checkpoint import Checkpoints, sha256
from hacrl.store.pool import Pool
from hacrl.store.reader import RunReader
from hacrl.study.diagnostics.check import HOOKS
from hacrl.study.inspect.summary import as_json, summarise

FINDINGS = ("MISSED", "UNNAMED", "TRACEBACK")
OUTCOMES = ("noticed", "repaired", "harmless", *FINDINGS)
TEAM: dict[str, Any] = {
    "steps": 4,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "minibatch_samples": 16,
    "max_prompt_tokens": 64,
    "max_response_tokens": 12,
    "task": {"kind": "arithmetic"},
    "verifier": {"kind": "number", "workers": 1},
    "evaluation": {"every": 1, "problems": 6},
    "checkpoint": {"every": 2},
    "diagnostics": {"every": 2, "problems": 2, "samples": 2},
    "runtime": {"threads": 1, "device": "cpu"},
    "log": {"tensorboard": False},
    "agents": [
        {"name": "wren", "model": "pocket:wren", "learning_rate": 2e-4},
        {"name": "finch", "model": "pocket:finch", "learning_rate": 2e-4},
    ],
}


class Stop(Exception):
    """Ends a run in its third step."""


class Listener(Observer):
    """Keeps notes; with `stop_after`, ends the run after that number of steps."""

    def __init__(self, stop_after: int = 1000) -> None:
        self.notes: list[str] = []
        self.stop_after = stop_after

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stepped(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if step + 1 >= self.stop_after:
            raise Stop


@dataclass(frozen=True)
class Outcome:
    """What became of one damaged file."""

    file: str
    damage: str
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.damage} of {self.file}: {self.message}"


def shown(run: RunReader) -> dict[str, Any]:
    """What `hacrl show` and `hacrl samples` read, without seconds and notes."""
    plain = as_json(summarise(run))
    del plain["path"], plain["notes"]
    config = run.config()
    learners = [a.name for a in config.agents if a.learns]
    steps = range(plain["steps_done"])
    return {
        **plain,
        "samples": [run.sample_rows(step, name) for step in steps for name in learners],
        "pool": [Pool(run.pool_path, read_only=True).snapshot(step) for step in steps],
        "environment": run.environment(),
    }


def final(run: RunReader) -> dict[str, Any]:
    """All numbers of a finished run. Seconds differ between equal runs."""
    found = shown(run)
    found["agents"] = [{**agent, "seconds": 0} for agent in found["agents"]]
    rows = run.metric_rows("evaluation")
    for name in [agent.name for agent in run.config().agents]:
        checkpoints = Checkpoints(run.checkpoints(name), 2)
        newest = checkpoints.path(checkpoints.steps()[-1]) / "model.safetensors"
        found[name] = checkpoints.best(), sha256(newest), newest.parent.name
    scores = {(r["step"], r["agent"]): run.scores(r["step"], r["agent"]) for r in rows}
    return {**found, "metrics": run.metric_rows(), "scores": scores, "config": run.config()}


def damage(path: Path, random_: random.Random) -> str | None:
    """Change the file; return how, or None if its bytes are the same as before."""
    data = path.read_bytes()
    if not data:
        return None
    place = random_.randrange(len(data))
    kind = random_.choice(("flip", "truncation", "truncation at a line", "zeroed block"))
    if kind == "flip":
        new = data[:place] + bytes([data[place] ^ 1 << random_.randrange(8)]) + data[place + 1 :]
    elif kind == "zeroed block":
        size = min(random_.choice((16, 512, 4096)), len(data) - place)
        new = data[:place] + bytes(size) + data[place + size :]
    else:
        new = data[: place if kind == "truncation" else data.rfind(b"\n", 0, place) + 1]
    path.write_bytes(new)
    return f"{kind} at {place}" if new != data else None


def attempt(
    whole: Path, truth: Mapping[str, Any], expected: Mapping[str, Any], random_: random.Random
) -> Outcome | None:
    """Damage a copy of `whole`; `truth` is what it shows, `expected` what it is after a resume."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        shutil.copytree(whole, copy)
        files = [p for p in sorted(copy.rglob("*")) if p.is_file() and p.name != ".lock"]
        kinds = sorted({file_kind(p.relative_to(copy)) for p in files})
        wanted = random_.choice(kinds)
        path = random_.choice([p for p in files if file_kind(p.relative_to(copy)) == wanted])
        name, how = str(path.relative_to(copy)), damage(path, random_)
        if how is None:
            return None
        # Seconds are read by `show` only; a resume does not compare them.
        first = look(lambda _: shown(RunReader.open(copy)), copy, truth, path)
        if first[0] in FINDINGS:
            return Outcome(name, how, *first)
        second = look(lambda said: final(resume(copy, (), said, HOOKS)), copy, expected, path)
        kind, message = second
        if kind == "harmless":
            kind, message = first
        return Outcome(name, how, kind, message)


def look(
    read: Callable[[Listener], Mapping[str, Any]],
    copy: Path,
    expected: Mapping[str, Any],
    path: Path,
) -> tuple[str, str]:
    """The outcome of one command, and its message."""
    said = Listener()
    try:
        found = read(said)
    except Exception as error:
        message = explain(error)
        if message is None:
            return "TRACEBACK", traceback.format_exc()
        return "noticed" if names(message, path, copy) else "UNNAMED", message
    changed_config = RunReader(copy).config_changed()
    notes = [*said.notes, *(["config.toml was changed"] if changed_config else [])]
    named = [note for note in notes if names(note, path, copy)]
    differ = [key for key in expected if found.get(key) != expected[key]]
    if differ:
        return ("noticed", named[0]) if named else ("MISSED", f"{', '.join(differ)}; {notes}")
    return ("repaired", named[0]) if named else ("harmless", "")


def names(message: str, path: Path, copy: Path) -> bool:
    """Whether the message names the file. A config is named by its keys; the notes of a resume name
    the folder of the pool, and the step of a checkpoint."""
    kind = file_kind(path.relative_to(copy))
    if kind == "config.toml" or path.name in message:
        return True
    return kind.startswith("pool") and "/pool" in message


def file_kind(path: Path) -> str:
    """Example: pool/step-000000/wren/0ab.jsonl.gz is of the kind "pool batch"."""
    if path.parts[0] == "pool":
        return "pool snapshot" if path.name == "snapshot.json" else "pool batch"
    if len(path.parts) == 1:
        return path.name
    return f"{path.parts[0]} {re.sub(r'[0-9]+', 'N', path.name)}"


def storm(count: int, seed: int) -> list[Outcome]:
    """Train the runs, and damage `count` copies."""
    random_ = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        finished, stopped, resumed = (Path(folder) / n for n in ("finished", "stopped", "resumed"))
        start(TEAM, finished, observer=Listener(), hooks=HOOKS)
        with contextlib.suppress(Stop):
            start(TEAM, stopped, observer=Listener(stop_after=3), hooks=HOOKS)
        shutil.copytree(stopped, resumed)
        expected = final(resume(resumed, (), Listener(), HOOKS))
        pairs = [
            (finished, shown(RunReader.open(finished)), final(RunReader.open(finished))),
            (stopped, shown(RunReader.open(stopped)), expected),
        ]
        outcomes: list[Outcome] = []
        while len(outcomes) < count:
            outcome = attempt(*pairs[len(outcomes) % 2], random_)
            if outcome:
                outcomes.append(outcome)
                if outcome.kind in FINDINGS:
                    print(outcome, flush=True)
        return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    outcomes = storm(args.count, args.seed)
    table = Counter((file_kind(Path(o.file)), o.kind) for o in outcomes)
    print(f"{'file':<34}" + "".join(f"{kind:>11}" for kind in OUTCOMES))
    for file in sorted({file for file, _ in table}):
        print(f"{file:<34}" + "".join(f"{table[file, kind]:>11}" for kind in OUTCOMES))
    findings = sum(o.kind in FINDINGS for o in outcomes)
    print(f"{len(outcomes)} damaged files, {findings} findings")
    sys.exit(findings > 0)


if __name__ == "__main__":
    main()
