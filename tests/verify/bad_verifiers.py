"""Verifiers that misbehave, run by the pool's tests in real worker processes.

The reply chooses what they do, so that good and bad calls mix in one batch. Slow calls do not wait:
`take` writes their seconds to a file, and the tests move that worker's clock back by as much. So the
tests do not depend on the speed of the machine.
"""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacrl.types import Problem, Status, Verdict

LIMIT = 60.0
"""Seconds a call may take in the tests."""
FOREVER = 2 * LIMIT


@dataclass
class Actor:
    """Does what the reply says; the detail of a normal verdict is the reply."""

    folder: str = ""
    slow_start: float = 0.0
    name = "actor"
    version = "3"
    reward_range = (0.0, 1.0)

    def prepare(self) -> None:
        if self.slow_start:
            take(self, self.slow_start)

    def judge(self, reply: str, problem: Problem) -> Verdict:
        if reply in ACTS:
            ACTS[reply](self)
        return Verdict(1.0, Status.OK, f"{problem.answer}:{reply[:50]}")


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("even its text raises")


def take(actor: Actor, seconds: float, wait: bool = True) -> None:
    """Take `seconds` on the clock of the pool; `wait` until the tests have moved the clock."""
    if not actor.folder:
        return
    note, draft = (Path(actor.folder, f"{os.getpid()}{end}") for end in ("", ".draft"))
    draft.write_text(str(seconds))
    draft.rename(note)
    while wait and note.exists():
        time.sleep(0.01)


def spin(actor: Actor) -> None:
    take(actor, FOREVER, wait=False)
    while True:
        pass


def nap(actor: Actor) -> None:
    take(actor, 0.4 * LIMIT)


def wait(actor: Actor) -> None:
    """Waits until the test interrupts the batch."""
    Path(actor.folder, "waits").touch()
    while True:
        time.sleep(1)


def deep_hang(actor: Actor) -> None:
    """Never leaves C code, so no Python timer, signal handler or thread can stop it."""
    take(actor, FOREVER, wait=False)
    re.match(r"(a+)+$", "a" * 60 + "b")


def crash(actor: Actor) -> None:
    os._exit(7)


def shoot(actor: Actor) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def noise(actor: Actor) -> None:
    print("x" * 100_000)
    print("\x00\x00\x00\x01\x00\x00", file=sys.stderr)
    os.write(1, b"\x00" * 70_000)
    os.write(2, b"\x00" * 70_000)
    sys.stdout.flush()


def leave(actor: Actor) -> None:
    sys.exit(3)


def complain(actor: Actor) -> None:
    raise KeyError("no such column")


def odd(actor: Actor) -> None:
    raise Odd


def hungry(actor: Actor) -> None:
    bytearray(1 << 30)  # four times what the tests allow


LEAKED: list[bytearray] = []


def leak(actor: Actor) -> None:
    LEAKED.append(bytearray(30 << 20))  # the limit of the tests, 0.25 GB, is reached in 8 calls


def wait_for_a_kill(actor: Actor) -> None:
    """Hangs in the first process that runs it, and writes its process id."""
    note = Path(actor.folder, "kill_me")
    if not note.exists():
        note.write_text(str(os.getpid()))
        time.sleep(300)


def ask(actor: Actor) -> None:
    input()


def fork_and_die(actor: Actor) -> None:
    """A child keeps the worker's socket open; the pool must notice the death all the same."""
    if os.fork() == 0:
        time.sleep(300)
        os._exit(0)
    os._exit(1)


def with_child(actor: Actor, own_session: bool = False) -> None:
    """Hangs in a program it started."""
    program = [sys.executable, "-c", "import time; time.sleep(300)"]
    child = subprocess.Popen(program, start_new_session=own_session)
    with open(Path(actor.folder, "children"), "a") as file:
        file.write(f"{child.pid}\n")
    take(actor, FOREVER, wait=False)
    child.wait()


def with_session(actor: Actor) -> None:
    """The program is the leader of a session of its own, so no signal to a group reaches it."""
    with_child(actor, own_session=True)


_ACTS = (spin, deep_hang, crash, shoot, noise, leave, complain, odd, hungry, ask, nap, wait)
_MORE = (fork_and_die, with_child, with_session, leak, wait_for_a_kill)
ACTS = {act.__name__: act for act in (*_ACTS, *_MORE)}


class TooMuch:
    name, version, reward_range = "too-much", "1", (0.0, 1.0)

    def judge(self, reply: str, problem: Problem) -> Verdict:
        return Verdict(float(reply), Status.OK)


class Penalty:
    name, version, reward_range = "penalty", "1", (-1.0, 1.0)

    def judge(self, reply: str, problem: Problem) -> Verdict:
        return Verdict(-1.0, Status.WRONG)


class Pauses:
    name, version, reward_range = "pauses", "1", (0.0, 1.0)

    def judge(self, reply: str, problem: Problem) -> Verdict:
        time.sleep(0.3)
        return Verdict(1.0, Status.OK)


class Incomplete:
    name = "incomplete"


def unmakeable() -> None:
    os._exit(5)


def score(completion: str, answer: str, bonus: float = 0.0, **columns: Any) -> float | None:
    if completion == "none":
        return None
    if completion == "columns":
        return float(sorted(columns) == ["level", "tags"])
    return float(completion == answer) + bonus


def trl(completions: list[str], level: list[int], **columns: Any) -> list[float]:
    """A reward function as TRL calls it: lists, by name."""
    assert columns.keys() == {"prompts", "answer", "tags"}
    assert columns["prompts"] == ["how many?"]
    right = zip(completions, columns["answer"], strict=True)
    return [level[0] * float(reply == answer) for reply, answer in right]


def trl_messages(prompts: list[Any], completions: list[Any]) -> list[float]:
    return [float(completion[0]["content"] == "42") for completion in completions]


def trl_number(completions: list[str]) -> float:
    return 1.0


def echo(completion: str) -> Any:
    """Returns what the reply says, e.g. nan, "yes" or [1.0]."""
    return eval(completion)


def plain(completion: str, answer: str) -> bool:
    return completion == answer


NOT_CALLABLE = 3


def needs_city(completion: str, city: str) -> float:
    return 1.0


def by_name(completion: str, problem: str = "", solution: object = None) -> float:
    return 1.0 if problem == "6 * 7?" and completion == str(solution) else 0.0


def trl_by_name(completions: list[str], **columns: list[object]) -> list[float]:
    answers = columns.get("solution", [])
    return [1.0 if c == str(a) else 0.0 for c, a in zip(completions, answers, strict=True)]


def grows(completion: str, tags: list[str]) -> float:
    tags.append("b")
    return 1 / len(tags)
