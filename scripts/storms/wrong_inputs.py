"""Wrong inputs of a user: reward functions, data files, configs. Each must end with the right numbers,
or with a message on the screen that names the problem, and never with a traceback.

    python scripts/storms/wrong_inputs.py --count 250 --seed 0

The kinds are in wrong_inputs_kinds.py. Every case trains one or two pocket models for two steps in this
process; reward functions run in worker processes.
"""

import argparse
import contextlib
import os
import random
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from typer.testing import CliRunner

from hacrl.cli import app
from hacrl.store.rundir import RunDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))
from storms.wrong_inputs_kinds import HEAD, KINDS, ROWS, SCORE, Kind, _lines

SLOW = 90.0
"""Seconds after which a case is a finding."""
Case = tuple[Kind, str]
"""A kind and a team."""


def config(team: str, has_reward: bool) -> dict[str, Any]:
    names = ["wren", "finch"] if team == "two" else ["wren"]
    path = {"kind": "function", "options": {"path": "rewards:score"}}
    return {
        "steps": 2,
        "prompts_per_step": 3,
        "samples_per_prompt": 4,
        "minibatch_samples": 12,
        "max_prompt_tokens": 32,
        "max_response_tokens": 24,
        "task": {"kind": "arithmetic"},
        "verifier": {**(path if has_reward else {"kind": "number"}), "workers": 1, "timeout": 30.0},
        "algorithm": {"name": "hacpo" if team == "two" else "gspo"},
        "evaluation": {"problems": 6},
        "runtime": {"threads": 1, "device": "cpu"},
        "log": {"tensorboard": False},
        "agents": [{"name": n, "model": f"pocket:{n}", "learning_rate": 2e-4} for n in names],
    }


class Storm:
    """Runs cases, each in a new folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.expected: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
        """Metrics of runs with sound inputs, by team and kind of input."""

    def run(self, kind: Kind, team: str) -> tuple[int, str, Path]:
        """Exit code, screen and run directory of a case."""
        self.number += 1
        work, run = self.folder / f"{self.number}" / "work", self.folder / f"{self.number}" / "run"
        work.mkdir(parents=True)
        place = f"FOLDER, WORK = {str(work.parent)!r}, {str(work)!r}\n"
        for name, content in kind.files.items():
            content = content.encode() if isinstance(content, str) else content
            (work / name).write_bytes((place.encode() if name == "rewards.py" else b"") + content)
        settings = config(team, "rewards.py" in kind.files)
        (work / "team.toml").write_text(tomli_w.dumps(settings))
        command = kind.command or ("train", "team.toml", "--run", str(run), *kind.overrides)
        sys.modules.pop("rewards", None)
        before = list(sys.path)
        os.chdir(work)
        try:
            with warnings.catch_warnings(record=True):
                result = CliRunner().invoke(app, command, env={"COLUMNS": "400"})
        finally:
            os.chdir("/")
            sys.path[:] = before
        screen = result.stdout + result.stderr
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            screen += "\nTraceback: " + "".join(traceback.format_exception(result.exception))
        return result.exit_code, screen, run

    def reference(self, kind: Kind, team: str) -> list[Mapping[str, Any]]:
        """The metrics of the same config with sound inputs."""
        what = kind.name.partition(" ")[0]
        key = (what, team, *kind.overrides)
        if key not in self.expected:
            files = {"rewards.py": HEAD + SCORE.format("pass")}
            if what == "data":
                files = {"data.jsonl": _lines(ROWS)}
            sound = Kind("sound", files=files, overrides=kind.overrides)
            code, screen, run = self.run(sound, team)
            assert code == 0, screen
            self.expected[key] = RunDirectory.open(run).metric_rows()
        return self.expected[key]

    def judge(self, kind: Kind, team: str) -> str:
        """Run a case; what is wrong with it, or ""."""
        began = time.monotonic()
        code, screen, run = self.run(kind, team)
        seconds = time.monotonic() - began
        if "Traceback" in screen:
            return "traceback: " + screen[screen.rindex("Traceback") :][-1500:]
        if seconds > SLOW:
            return f"took {seconds:.0f} s"
        if kind.says:
            found = re.search(kind.says, screen, re.DOTALL)
            return "" if found else f"exit {code}, not named ({kind.says}): {screen[-700:]}"
        if code != 0:
            return f"exit {code}: {screen[-700:]}"
        if kind.same and RunDirectory.open(run).metric_rows() != self.reference(kind, team):
            return f"other numbers than with sound inputs: {screen[-700:]}"
        return ""


def cases(count: int, seed: int) -> list[Case]:
    """`count` cases: every kind with every team, in random order, then again."""
    draw, found = random.Random(seed), list[Case]()
    while len(found) < count:
        every = [(kind, team) for kind in KINDS for team in kind.teams]
        draw.shuffle(every)
        found += every
    return found[:count]


def storm(wanted: Sequence[Case], folder: Path, report: Any = print) -> list[str]:
    """Run the cases and return the findings."""
    storm, findings = Storm(folder), []
    for kind, team in wanted:
        if problem := storm.judge(kind, team):
            findings.append(f"{kind.name} ({team}): {problem}")
            report(findings[-1])
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="Only kinds whose name contains this.")
    parser.add_argument("--list", action="store_true", help="List the kinds and end.")
    options = parser.parse_args()
    if options.list:
        print(*(kind.name for kind in KINDS), sep="\n")
        return 0
    wanted = [c for c in cases(options.count, options.seed) if options.only in c[0].name]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir("/"):
        findings = storm(wanted, Path(folder))
    found = Counter((kind.name, "named" if kind.says else "right") for kind, _ in wanted)
    wrong = Counter(finding.partition(" (")[0] for finding in findings)
    for (name, outcome), number in sorted(found.items()):
        print(f"{name}: {number - wrong[name]} of {number} {outcome}")
    groups = Counter(kind.name.partition(" ")[0] for kind, _ in wanted)
    print(
        f"{len(wanted)} cases of {len({k.name for k, _ in wanted})} kinds ({dict(groups)}), "
        f"{len(findings)} findings, {time.monotonic() - began:.0f} s"
    )
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
