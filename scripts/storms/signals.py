"""Send Ctrl-C or SIGTERM to pocket runs at random moments, start-up included.

    python scripts/storms/signals.py --count 40
    python scripts/storms/signals.py --count 5 --shape SmolLM2-135M --device cuda --longest 5 \\
        --parallel 4 --resume-every 0 --within 150 --results signals.jsonl

Half of the moments count from the start of the command, the others from the run's first evaluation.
With --shape the run trains a model of random weights (benchmarks/speed/shapes.py).

Every command must end within 5 seconds with exit code 130 or 143 (or by the signal itself, which a
shell reports as the same number), leave no process behind, and the run must continue afterwards.
Prints one line per shot and a summary with the longest delay; --results appends each shot to a file of
JSON lines as soon as it is known. The exit code is 1 if there is a finding.
"""

import argparse
import ctypes
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
from process_table import marked, wait_until

import hacrl
from hacrl.store.reader import RunReader

LIMIT = 5.0
"""Seconds until the command must have ended."""
PATIENCE = 120.0
"""Seconds to wait for the first evaluation before the signal, and for the end of a resumed run."""
KILL = 30.0
"""Seconds after which a command that did not stop is killed."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
Team = dict[str, Any]
TEAM: Team = {
    "steps": 10_000,
    "prompts_per_step": 8,
    "samples_per_prompt": 4,
    "minibatch_samples": 16,
    "max_prompt_tokens": 64,
    "max_response_tokens": 24,
    "task": {"kind": "arithmetic"},
    "verifier": {"kind": "number", "workers": 1},
    "evaluation": {"every": 3, "problems": 20},
    "checkpoint": {"every": 2},
    "runtime": {"threads": 1, "device": "cpu"},
    "agents": [
        {"name": "wren", "model": "pocket:wren", "learning_rate": 2e-4},
        {"name": "finch", "model": "pocket:finch", "learning_rate": 2e-4},
    ],
}
SUITE = {
    "base": "team.toml",
    "seeds": [1],
    "reference": "gspo",
    "parallel": 2,
    "arms": [{"name": "hacpo"}, {"name": "gspo", "overrides": ["algorithm.name=gspo"]}],
}
COMMANDS = {
    "train": ("train", "team.toml", "--run", "run"),
    "ranks": ("train", "team.toml", "agents.wren.ranks=2", "--run", "run"),
    "processes": ("train", "team.toml", "runtime.kind=processes", "--run", "run"),
    "ray": ("train", "team.toml", "runtime.kind=ray", "--run", "run"),
    "compare": ("compare", "suite.toml", "--out", "out"),
    "eval": ("eval", "pocket:wren", "evaluation.problems=5000", "--config", "team.toml"),
}


@dataclass
class Shot:
    """One command that was signalled."""

    signal: signal.Signals
    after: float
    """Seconds from the start of the command to the signal."""
    seconds: float
    """Seconds from the signal to the end of the command."""
    trained: bool
    """Whether the run had finished a step."""
    findings: list[str]

    def __str__(self) -> str:
        when = "trained" if self.trained else "start-up"
        text = "; ".join(self.findings) or "ok"
        delay = f"ended in {self.seconds:.2f} s"
        return f"{self.signal.name} after {self.after:.2f} s ({when}): {delay}: {text}"


def random_team(folder: Path, shape: str, device: str) -> Team:
    """A team of one model of this shape with random weights, large enough to keep a GPU busy. Half of
    the replies get a reward, so that every step has updates."""
    import torch
    from transformers import AutoTokenizer

    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from speed.shapes import build_model

    from hacrl.pocket import pocket_path

    build_model(shape, torch.device("cpu")).save_pretrained(folder / shape)
    AutoTokenizer.from_pretrained(pocket_path("wren")).save_pretrained(folder / shape)
    (folder / "halves.py").write_text("def score(reply):\n    return len(reply) % 2\n")
    agent = {"name": "random", "model": str(folder / shape), "learning_rate": 1e-6}
    large = {
        "prompts_per_step": 64,
        "samples_per_prompt": 8,
        "minibatch_samples": 256,
        "max_response_tokens": 256,
    }
    return {
        **TEAM,
        **({} if device == "cpu" else large),
        "algorithm": {"name": "gspo"},
        "verifier": {"kind": "function", "options": {"path": f"{folder}/halves:score"}},
        "runtime": {"threads": 1, "device": device},
        "log": {"tensorboard": False},
        "agents": [agent],
    }


def shoot(
    place: Path,
    command: str,
    number: signal.Signals,
    after: float,
    running: bool = False,
    resumed: bool = True,
    team: Team = TEAM,
) -> Shot:
    """Start the command in `place`, signal it after this many seconds and check its end. `running`:
    the seconds begin when the run has measured its first evaluation. `resumed`: check that the run
    continues."""
    place.mkdir(parents=True)
    (place / "team.toml").write_text(tomli_w.dumps(team))
    (place / "suite.toml").write_text(tomli_w.dumps(SUITE))
    mark = uuid.uuid4().hex
    child = _start(place, COMMANDS[command], mark)
    begin = time.monotonic()
    while running and not (place / "run" / "metrics.jsonl").exists() and child.poll() is None:
        if time.monotonic() > begin + PATIENCE:
            break
        time.sleep(0.05)
    time.sleep(after)
    after = time.monotonic() - begin
    findings = [] if child.poll() is None else [f"ended by itself: {_last_line(place)}"]
    begin = time.monotonic()
    child.send_signal(number)
    try:
        child.wait(timeout=KILL)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    seconds = time.monotonic() - begin
    if seconds > LIMIT:
        findings.append("did not stop in time")
    allowed = {128 + number, -number}
    if "/hacrl/" not in (place / "log").read_text() and _last_line(place) == "KeyboardInterrupt":
        allowed.add(1)  # Python itself was starting
    if not findings and child.returncode not in allowed:
        findings.append(f"exit code {child.returncode}: {_last_line(place)}")
    if left := _survivors(mark):
        findings.append(f"processes left: {', '.join(left)}")
    metrics = place / "run" / "metrics.jsonl"
    trained = metrics.exists() and b'"train"' in metrics.read_bytes()
    if COMMANDS[command][0] == "train" and resumed:
        findings += _not_resumable(place)
    return Shot(number, after, seconds, trained, findings)


def _start(place: Path, arguments: Sequence[str], mark: str = "") -> subprocess.Popen[bytes]:
    """Start `hacrl` in `place`, with the mark in its environment and its output in a file."""
    with open(place / "log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "hacrl", *arguments],
            cwd=place,
            stdout=log,
            stderr=log,
            env=os.environ | {"STORM": mark, "PYTHONPATH": str(Path(hacrl.__file__).parents[1])},
            preexec_fn=_prepare,
        )


def _prepare() -> None:
    """In the new process: the usual Ctrl-C, and (Linux) an end with this script."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _last_line(place: Path) -> str:
    return ((place / "log").read_text().strip().splitlines() or ["(no output)"])[-1]


def _survivors(mark: str) -> list[str]:
    """Command lines of the processes that still carry the mark after 3 seconds."""
    with suppress(AssertionError):
        wait_until(lambda: not marked(mark), 3)
    return marked(mark)


def _not_resumable(place: Path) -> list[str]:
    """Why the run cannot continue by one step, or start where it had not begun."""
    run = place / "run"
    begun = (run / "config.toml").exists()
    done = len({row["step"] for row in RunReader(run).metric_rows("train")}) if begun else 0
    arguments = ["resume", "run"] if begun else ["train", "team.toml", "--run", "run"]
    child = _start(place, [*arguments, f"steps={done + 1}"])
    try:
        code = child.wait(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return [f"did not continue within {PATIENCE:.0f} s: {_last_line(place)}"]
    return [f"cannot continue: {_last_line(place)}"] if code else []


def storm(
    count: int,
    seed: int,
    command: str = "train",
    longest: float = 20.0,
    shape: str = "",
    device: str = "cpu",
    parallel: int = 1,
    resume_every: int = 1,
    within: float = float("inf"),
    results: Path | None = None,
) -> list[Shot]:
    """`count` shots of each signal, from 0.05 to `longest` seconds after the start of the command or
    of training, in turn. Every `resume_every`th run is resumed. No shot begins after `within`
    seconds."""
    draw = random.Random(seed)
    trains = COMMANDS[command][0] == "train"
    moments = [
        (
            number,
            draw.uniform(0.05, longest),
            trains and i % 2 == 1,
            resume_every > 0 and i % resume_every == 0,
        )
        for i, number in itertools.product(range(count), SIGNALS)
    ]
    shots, begin = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(parallel) as threads:
        team = random_team(Path(folder), shape, device) if shape else TEAM
        if shape:
            print(f"wrote a model of shape {shape}: {time.monotonic() - begin:.0f} s", flush=True)

        def one(i: int) -> Shot | None:
            if time.monotonic() > begin + within:
                return None
            return shoot(Path(folder) / str(i), command, *moments[i], team)

        for done in as_completed([threads.submit(one, i) for i in range(len(moments))]):
            if shot := done.result():
                shots.append(shot)
                clock = time.monotonic() - begin
                print(f"{len(shots)}/{len(moments)}, {clock:.0f} s: {shot}", flush=True)
                if results:
                    with open(results, "a") as file:
                        file.write(json.dumps(asdict(shot) | {"signal": shot.signal.name}) + "\n")
    return shots


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=40, help="shots of each signal")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", choices=COMMANDS, default="train")
    parser.add_argument("--longest", type=float, default=20.0, help="latest signal, in seconds")
    parser.add_argument("--shape", default="", help="train a random model of this shape instead")
    parser.add_argument("--device", default="cpu", help="of the random model")
    parser.add_argument("--parallel", type=int, default=1, help="commands at a time")
    parser.add_argument(
        "--resume-every", type=int, default=1, help="resume one run of this many; 0: none"
    )
    parser.add_argument(
        "--within", type=float, default=float("inf"), help="begin no shot after these seconds"
    )
    parser.add_argument("--results", type=Path, help="append every shot to this file of JSON lines")
    args = parser.parse_args()
    shots = storm(**vars(args))
    for number in SIGNALS:
        mine = [shot for shot in shots if shot.signal == number]
        seconds = sorted(shot.seconds for shot in mine) or [0.0]
        trained = sum(shot.trained for shot in mine)
        print(
            f"{args.command}, {number.name}: {len(mine)} shots, {trained} after the first step, "
            f"longest {seconds[-1]:.2f} s, median {seconds[len(seconds) // 2]:.2f} s, "
            f"{sum(bool(shot.findings) for shot in mine)} findings",
            flush=True,
        )
    return int(any(shot.findings for shot in shots))


if __name__ == "__main__":
    sys.exit(main())
