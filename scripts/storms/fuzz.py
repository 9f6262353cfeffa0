"""Malformed configs, overrides and command lines: each must end with a message, never with a traceback.

    python scripts/storms/fuzz.py --count 1500 --seed 0

Every case runs in this process through the command line, up to the point where models would be loaded:
reading, validation, task, algorithm, plan and chat templates. A case is good if it ends with exit code
0, with exit code 2 and a message, or at that point. Anything else is a finding: another exception, an
empty message, or more than 30 seconds.
"""

import argparse
import os
import random
import re
import resource
import signal
import sys
import tempfile
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tomli_w
from typer.testing import CliRunner

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a hub name never reaches the network

from hacrl.cli import app
from hacrl.config import parse_config
from hacrl.errors import RunStopped, UserError
from hacrl.store.rundir import RunDirectory

ROOT = Path(__file__).parents[2]
SECONDS = 30
"""Longest time of one case."""
LOADING = "fuzz: models would be loaded now"
# fmt: off
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"
ODD: list[Any] = [
    float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, -0.0, 0, -1, 1, 3.5, True, False,
    2**31, 2**53, 2**63 - 1, 2**63, 10**30, -(10**30), 10**400, "", " ", "²", "٣", "nan", "1e5",
    "none", "[/]", "\x1b[2J", "\u202eabc", "\uf8f00\uf8f1", "é" * 300, "a" * 5000, "/", "../..", "~",
    "%s{}", "{question", "{% for %}", "{{ x.y.z }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}", "x:y", ":", "os:",
    "hacrl.cli:main", "json:loads", "pocket:", "pocket:emu", "pocket:wren", "hub/none", "cuda:99",
    [], {}, [[]], [{}], [1, "a", [2]], {"a": {"b": [1]}}, {"": ""}, ["wren", "wren"], [float("nan")],
    datetime(2026, 1, 1),
]
KEYS = [
    "steps", "seed", "temperature", "agents", "agents.0.name", "agents.wren.learning_rate", "task.kind",
    "agents.*.template", "agents.².name", "agents.-1.name", "agents.9.name", "agents.0", "agents.*",
    "task", "task.train", "task.columns", "task.operations", "verifier", "verifier.kind", "log.wandb",
    "verifier.options", "verifier.options.path", "verifier.workers", "algorithm", "algorithm.name",
    "algorithm.alpha", "algorithm.x.y", "runtime.threads", "runtime.device", "runtime.kind", "nope",
    "sampler.options", "agents.0.template_args", "agents.0.lora", "agents.0.betas",
    "agents.0.system", "agents.0.reply_start", "evaluation.problems", "prompts_per_step", "", ".", "*",
    "samples_per_prompt", "minibatch_samples", "agents.0.resources", "diagnostics.every", "a." * 2000,
]
OVERRIDES = [
    "=", "==", "steps", "steps=", "=1", "+", "+nope", "+../pocket", "++", "+\x00", "\x00=1", "-1",
    "steps=1=2", "agents=[[]]", "agents=[1]", "agents=['wren']", "agents={}", "agents.name=x",
    "agents.999999999999999999999999.name=x", "steps=[", 'seed="""', "task={kind='gym'}", "steps=0x",
    "seed=" + "9" * 5000, "a=" + "[" * 3000, "algorithm=[1]", f"agents.*.template={ENDLESS}",
]
NAMES = [
    "run", "dir", "binary", "nothing", "loop", "a.toml", "", "x" * 300, "a/\x00b", "run/config.toml",
]
VALUES = ["0", "-1", "nan", "1", "99", "9" * 30, "²", "", "[/]", "wren", "\x1b[2J", "a,b", "a=1"]
EXTRA = ["--nope", "--json", "-h", "--", "--run", "\x00"]
# fmt: on
Case = list[str]


def configs() -> list[dict[str, Any]]:
    files = [*ROOT.glob("configs/*.toml"), *ROOT.glob("configs/real/*.toml")]
    files += [*ROOT.glob("configs/paper/*.toml")][:2]
    return [tomllib.loads(path.read_text()) for path in files]


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = enumerate(tree) if isinstance(tree, list) else tree.items()
    for key, value in items:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))


def mutate(tree: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """One to three random changes of a config."""
    tree = deepcopy(tree)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        found = list(places(tree))
        *parents, key = draw.choice(found)
        node: Any = tree
        for part in parents:
            node = node[part]
        action = draw.randrange(8)
        if action < 4:
            node[key] = deepcopy(draw.choice(ODD))
        elif action == 4:
            del node[key]
        elif action == 5:
            node[key] = draw.choice([[node[key]], {"x": node[key]}, str(node[key])])
        elif action == 6 and isinstance(node, list):
            node.append(deepcopy(node[key]))
        elif isinstance(node, dict):
            node[draw.choice([f"{key}x", "extra", "²", "lora", "replay", "options"])] = draw.choice(
                ODD
            )
    return tree


def spoil(data: bytes, draw: random.Random) -> bytes:
    """A change of the file's bytes."""
    at = draw.randrange(len(data))
    return draw.choice(
        [
            data[:at],
            b"\xef\xbb\xbf" + data,
            data.decode().encode("utf-16"),
            data[:at] + bytes(draw.randrange(256) for _ in range(8)) + data[at:],
            data + data,
            data.replace(b"\n", b"\r"),
            b"a = " + b"[" * 5000,
            b"a." * 3000 + b"b = 1\n" + data,
            b"",
            draw.randbytes(500),
            data.replace(b"=", b":"),
            data.replace(b'"', b""),
        ]
    )


class Storm:
    """Makes random cases in a folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        self.trees = configs()
        self.config, self.loop = folder / "a.toml", folder / "loop"
        self.loop.symlink_to(self.loop)
        (folder / "dir").mkdir()
        (folder / "binary").write_bytes(random.Random(0).randbytes(1000))
        (folder / "data.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 3)
        self.run = RunDirectory.create(folder / "run", parse_config(self.trees[0])).path
        suites = sorted(ROOT.glob("configs/suites/*.toml"))
        self.suites = [tomllib.loads(path.read_text()) for path in suites]
        for suite in self.suites:
            if isinstance(suite["base"], str):
                suite["base"] = str((ROOT / "configs/suites" / suite["base"]).resolve())

    def case(self) -> Case:
        kinds = [self.of_config] * 4 + [self.of_overrides] * 3 + [self.of_line] * 2
        return self.draw.choice([*kinds, self.of_suite])()

    def of_config(self) -> Case:
        self.write(mutate(self.draw.choice([self.trees[0], *self.trees]), self.draw))
        return [self.draw.choice(["train", "train", "doctor"]), str(self.config)]

    def write(self, tree: dict[str, Any]) -> None:
        data = tomli_w.dumps(tree).encode(errors="surrogatepass")
        self.config.write_bytes(spoil(data, self.draw) if self.draw.random() < 0.2 else data)

    def of_overrides(self) -> Case:
        self.config.write_text(tomli_w.dumps(self.trees[0]))
        count = self.draw.choice([1, 1, 1, 2])
        return ["train", str(self.config), "--", *(self.override() for _ in range(count))]

    def override(self) -> str:
        if self.draw.random() < 0.3:
            return self.draw.choice(OVERRIDES)
        value = self.draw.choice(ODD)
        text = value if isinstance(value, str) else tomli_w.dumps({"v": value})[4:].strip()
        return f"{self.draw.choice(KEYS)}={text}"

    def of_suite(self) -> Case:
        self.write(mutate(self.draw.choice(self.suites), self.draw))
        report = ["--report"] if self.draw.random() < 0.5 else []
        extra = [self.override()] if self.draw.random() < 0.3 else []
        out = str(self.folder / "out")
        return ["compare", str(self.config), *report, "--out", out, "--", *extra]

    def of_line(self) -> Case:
        draw = self.draw
        self.config.write_text(tomli_w.dumps(self.trees[0]))
        place, value = str(self.folder / draw.choice(NAMES)), draw.choice(VALUES)
        of_samples = draw.choice(["--step", "--agent", "--problem", "--limit"])
        of_eval = draw.choice(["--step", "--agent", "--config", "--out", "--benchmarks"])
        line = draw.choice(
            [
                ["show", place],
                ["show", place, "--png", place],
                ["samples", place, of_samples, value],
                ["eval", place, of_eval, value],
                ["eval", "pocket:wren", "--config", place, "--", self.override()],
                ["eval", place, "--benchmarks", "math7", "--samples", value],
                ["export", place, value, place],
                ["doctor", place],
                ["train", place, "--run", place],
                ["train", str(self.config), "--run", place],
                ["resume", place, "--", self.override()],
                ["resume", str(self.run), "--", self.override()],
                ["compare", place, "--only", value, "--against", value],
                ["demo", "--steps", value, "--run", place],
                [value, place],
                ["train", str(self.config), "--steps", "3"],
            ]
        )
        if draw.random() < 0.2:
            line.insert(draw.randrange(len(line) + 1), draw.choice(EXTRA))
        return line


def stop(*_: Any, **__: Any) -> Any:
    raise RunStopped(LOADING)


def prepare(config: Any, run: Any, *_: Any) -> Any:
    """What a run does before it loads models."""
    from hacrl.algorithms import make_algorithm
    from hacrl.study.doctor.doctor import check
    from hacrl.tasks import make_task
    from hacrl.training.plan import plan_of

    make_task(config.task, config.seed, run.path).batch(0, config.prompts_per_step)
    algorithm = make_algorithm(config.algorithm, (0.0, 1.0))
    for agent in config.agents:
        if agent.learns:
            plan_of(config, agent, algorithm)
    for finding in check(config):  # tokenizers, templates, devices
        if finding.good is False:
            raise UserError(finding.detail)
    stop()


@contextmanager
def without_models() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patch("hacrl.runs.import_object", lambda path, field: prepare))
        stack.enter_context(patch("hacrl.study.evaluation.Policy", stop))
        stack.enter_context(patch("hacrl.study.evaluation.VerifierPool", stop))
        stack.enter_context(patch("hacrl.study.compare.train_runs", lambda *given: []))
        yield


class TooLong(BaseException):
    """Not an Exception, which a command may catch."""


def too_long(*_: Any) -> None:
    raise TooLong


def judge(case: Case) -> tuple[str, str]:
    """Run one case: how it ended, and what is wrong with that (empty if nothing is)."""
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        result = CliRunner().invoke(app, case)
    except TooLong as error:
        return "hang", f"longer than {SECONDS} s at {place_of(error)}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    error, text = result.exception, result.stderr
    if error is not None and not isinstance(error, SystemExit):
        name = type(error).__name__
        return "traceback", f"{name} at {place_of(error)}: {str(error)[:200]!r}"
    if result.exit_code == 3 and LOADING in text:
        return "valid, would load models", ""
    end = f"exit code {result.exit_code}"
    if result.exit_code not in (0, 2) or re.search("Traceback|pydantic", text):
        return end, f"{end}: {text[-300:]!r}"
    if result.exit_code == 2 and not text.strip():
        return end, "no message"
    return end, "a terminal code in the message" if "\x1b[2J" in text else ""


def place_of(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "hacrl" in f.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"


def say(text: str) -> None:
    print(text, flush=True)


def storm(count: int, seed: int, report: Callable[[str], None] = say) -> list[str]:
    """Run `count` cases and report each finding."""
    findings: list[str] = []
    ends: Counter[str] = Counter()
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, without_models():
        os.chdir(folder)
        try:
            made = Storm(Path(folder), seed)
            for number in range(count):
                case = made.case()
                end, found = judge(case)
                ends[end] += 1
                if found:
                    kept = made.config.read_bytes()[-300:] if str(made.config) in case else b""
                    findings.append(
                        f"case {number}: {found}; hacrl {[p[:200] for p in case]} {kept!r}"
                    )
                    report(findings[-1])
        finally:
            os.chdir(here)
    report(f"{count} cases, {len(findings)} findings ({dict(ends)})")
    return findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    limit = 6 * 2**30  # a case that eats all memory becomes a finding
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    sys.exit(1 if storm(arguments.count, arguments.seed) else 0)


if __name__ == "__main__":
    main()
