"""What a verifier is: a plain object that says of one reply whether it is right.

A verifier lives inside a worker process (see pool.py), so it may be slow, may hang and may crash:
the pool turns that into TIMEOUT and ERROR. It must be a function of (reply, problem) alone, because
a call may be run again in another process when its neighbour in the queue was killed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from hacrl.errors import describe
from hacrl.types import Problem, Status, Verdict

DETAIL_LIMIT = 300
"""Details are kept in every pool row: longer ones are cut."""


class Verifier(Protocol):
    """The protocol. An optional method `prepare()` runs once in every worker before the first
    clock starts: imports and warm-up belong there.

    Example:
        class Shout:
            name, version, reward_range = "shout", "1", (0.0, 1.0)

            def judge(self, reply: str, problem: Problem) -> Verdict:
                return right(reply) if reply.isupper() else wrong(reply)
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str:
        """Changes whenever a verdict may change; goes to `Trajectory.verifier`."""
        ...

    @property
    def reward_range(self) -> tuple[float, float]:
        """Least and largest reward it may give."""
        ...

    def judge(self, reply: str, problem: Problem) -> Verdict: ...


def right(answer: str, reward: float = 1.0) -> Verdict:
    """The reply's answer is the gold one."""
    return Verdict(reward, Status.OK, answer[:DETAIL_LIMIT])


def wrong(answer: str, reward: float = 0.0) -> Verdict:
    """The reply has an answer and it is another one."""
    return Verdict(reward, Status.WRONG, answer[:DETAIL_LIMIT])


def unparsed(reason: str) -> Verdict:
    """The reply has no answer: judged, reward 0."""
    return Verdict(0.0, Status.UNPARSED, reason[:DETAIL_LIMIT])


def failed(reason: str) -> Verdict:
    """The verifier could not judge (a gold it cannot read, an exception, a dead process)."""
    return Verdict(0.0, Status.ERROR, reason[:DETAIL_LIMIT])


def timed_out(limit: float) -> Verdict:
    return Verdict(0.0, Status.TIMEOUT, f"no verdict within {limit:g} s")


def guarded_judge(verifier: Verifier, reply: str, problem: Problem) -> Verdict:
    """One call in which nothing escapes: whatever is raised, or a reward outside the declared
    range, becomes ERROR. The blanket except is the point: a user's verifier may raise anything,
    SystemExit included, and the run must go on.
    """
    try:
        verdict = verifier.judge(reply, problem)
        if not isinstance(verdict, Verdict):
            return failed(f"judge returned {type(verdict).__name__}, not a Verdict")
        low, high = verifier.reward_range
        reward = float(verdict.reward)
        if verdict.judged and not (math.isfinite(reward) and low <= reward <= high):
            return failed(f"reward {reward} is outside the declared range [{low:g}, {high:g}]")
        return Verdict(reward, Status(verdict.status), str(verdict.detail)[:DETAIL_LIMIT])
    except BaseException as error:  # see the docstring
        return failed(describe(error))


def count_statuses(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many of each status, all five always there, for the metrics.

    Example: {"ok": 3, "wrong": 4, "unparsed": 1, "timeout": 0, "error": 0}
    """
    counts = {status.value: 0 for status in Status}
    for verdict in verdicts:
        counts[verdict.status.value] += 1
    return counts
