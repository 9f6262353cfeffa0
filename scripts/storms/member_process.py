"""Members of a team across owners as processes (`hacrl join`), and the same team in one process."""

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import tomli_w
from hub_process import HubProcess

from hacrl.store.checkpoint import Checkpoints
from hacrl.store.reader import RunReader

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "hacrl.cli.owners",
        "hacrl.runs",
        "hacrl.training.local",
        "hacrl.owners.join",
        "hacrl.owners.hub.server",
    ]
)
TEAM = {
    "steps": 4,
    "seed": 3,
    "prompts_per_step": 6,
    "samples_per_prompt": 4,
    "max_prompt_tokens": 64,
    "max_response_tokens": 24,
    "max_batch_bytes": 10**6,
}
"""A charter of a few quick steps."""
MINE: dict[str, Any] = {
    "minibatch_samples": 12,
    "algorithm": {"name": "hacpo", "epsilon_low": 3e-3, "epsilon_high": 4e-3},
    "verifier": {"workers": 1, "timeout": 300.0},
    "evaluation": {"every": 2, "problems": 12},
    "checkpoint": {"every": 2},
    "runtime": {"threads": 1, "device": "cpu"},
    "log": {"tensorboard": False},
    "trust": {"judge_again": True},
}


def mine(model: str, agent: Mapping[str, Any] | None = None, **tables: Any) -> dict[str, Any]:
    """The content of a member's file; whole tables given replace those of MINE."""
    own = {"model": f"pocket:{model}", "learning_rate": 2e-4, **(agent or {})}
    return {**MINE, **tables, "agent": own}


def run_command(
    folder: Path, arguments: list[str], slowness: float = 1.0, pause: float = 0.0
) -> None:
    """Run hacrl in this process, in a folder, with its output in the file `log`."""
    if slowness > 1 or pause:
        _slow_down(slowness, pause)
    os.chdir(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from hacrl.cli import app

    app(arguments, prog_name="hacrl")


def _slow_down(factor: float, pause: float) -> None:
    """Let sampling and learning each take `factor` times as long and `pause` seconds more."""
    from hacrl.training.agent import Agent

    for name in ("_attempt", "learn"):
        real = getattr(Agent, name)

        def slow(*args: Any, real: Any = real) -> Any:
            began = time.monotonic()
            result = real(*args)
            time.sleep((factor - 1) * (time.monotonic() - began) + pause)
            return result

        setattr(Agent, name, slow)


class MemberProcess:
    """A member with a folder, a key and a config of its own.

    Example: member = MemberProcess(hub, "ant", mine("wren")); member.start(); member.wait()
    """

    def __init__(self, hub: HubProcess, name: str, settings: Mapping[str, Any]) -> None:
        self.hub, self.name, self.settings = hub, name, settings
        self.folder = hub.folder / "owners" / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.key, self.run = self.folder / "my.key", self.folder / "run"
        if name in hub.keys:
            self.key.write_bytes((hub.folder / f"{name}.key").read_bytes())
            self.key.chmod(0o600)
        (self.folder / "mine.toml").write_text(tomli_w.dumps(settings))
        self.process: ForkServerProcess | None = None
        self.slowness = 1.0
        """An agent that takes this many times as long, by sleeping."""
        self.pause = 0.0
        """Seconds that sampling and learning each take longer, by sleeping."""

    @property
    def log(self) -> str:
        """What the command has printed so far."""
        return (self.folder / "log").read_text()

    def arguments(self, *options: str) -> list[str]:
        """Of the command hacrl."""
        arguments = ["join", self.hub.url, "mine.toml", "--as", self.name, "--key", str(self.key)]
        return [*arguments, "--run", str(self.run), *options]

    def start(self, *options: str) -> None:
        """Run the command in a process that has hacrl and torch loaded already."""
        arguments = (self.folder, self.arguments(*options), self.slowness, self.pause)
        self.process = PROCESSES.Process(target=run_command, args=arguments, daemon=True)
        self.process.start()

    def wait(self, seconds: float = 600, expect: int | None = 0) -> int | None:
        """Return the exit code; None if the process still runs."""
        assert self.process is not None
        self.process.join(seconds)
        code: int | None = self.process.exitcode
        assert expect is None or code == expect, f"{self.name}: exit code {code}\n{self.log}"
        return code

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.join()

    def train(self, *options: str, seconds: float = 600) -> RunReader:
        """Run to the end and return the run."""
        self.start(*options)
        self.wait(seconds)
        return self.reader()

    def reader(self) -> RunReader:
        return RunReader(self.run)


def one_process(members: list[MemberProcess]) -> dict[str, Any]:
    """The config of the same team in one process. All members must have the same tables."""
    first, charter = members[0], members[0].hub.team.charter
    tables = {k: v for k, v in first.settings.items() if k != "agent"}
    levels = {m.name: m.publish for m in charter.members}
    common = ("steps", "prompts_per_step", "samples_per_prompt", "temperature", "seed")
    return {
        **tables,
        **{name: getattr(charter, name) for name in (*common, "max_prompt_tokens")},
        "max_response_tokens": charter.max_response_tokens,
        "task": charter.task.model_dump(mode="json", exclude_unset=True),
        "verifier": {**tables.get("verifier", {}), "kind": charter.verifier.kind},
        "trust": {**tables["trust"], "reciprocity": charter.reciprocity},
        "agents": [
            {**m.settings["agent"], "name": m.name, "publish": levels[m.name]} for m in members
        ],
    }


def difference(name: str, run: RunReader, reference: RunReader) -> str:
    """Where the run of a member differs from the reference, which has the same agent: metrics,
    evaluations and weights; empty if they are equal, byte for byte."""
    for kind in ("train", "evaluation"):
        mine, theirs = (
            [json.dumps(row) for row in r.metric_rows(kind, name)] for r in (run, reference)
        )
        if not mine or mine != theirs:
            pairs = [p for p in zip(mine, theirs, strict=False) if p[0] != p[1]]
            return f"{kind} metrics ({len(mine)} and {len(theirs)} rows): {pairs[:1]}"
    done = sorted({row["step"] for row in run.metric_rows("evaluation", name)})
    for step in done:
        folders = (run.evaluation(step, name), reference.evaluation(step, name))
        files = [{p.name: p.read_bytes() for p in f.iterdir() if p.is_file()} for f in folders]
        if files[0] != files[1]:
            return f"evaluation after step {step}"
    newest = [Checkpoints(r.checkpoints(name), 1) for r in (run, reference)]
    if run.config().agent(name).learns:
        last = run.config().steps
        weights = [c.load(last).model for c in newest]
        if weights[0].keys() != weights[1].keys() or not all(
            weights[0][k].equal(weights[1][k]) for k in weights[0]
        ):
            return "weights"
    return ""


def until(condition: Callable[[], Any], seconds: float = 300) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def replay(member: MemberProcess, kept: int) -> bool:
    """Remove the checkpoints after `kept` steps, continue with the same command, and return whether the
    metrics are those of before."""
    before = member.reader().metrics_path.read_bytes()
    for folder in (member.run / "checkpoints" / member.name).glob("step-*"):
        if int(folder.name.removeprefix("step-")) > kept:
            shutil.rmtree(folder)
    return member.train().metrics_path.read_bytes() == before
