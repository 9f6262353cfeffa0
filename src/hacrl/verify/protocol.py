"""What a verifier is: an object that judges one reply.

A verifier runs in a worker process (pool.py), so it may be slow, hang or crash: the pool turns that
into TIMEOUT and ERROR. It must depend on (reply, problem) alone: a call runs again in another process
if its worker died, ran out of memory or was killed for an earlier call.
"""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from hacrl.errors import EXIT_OUT_OF_MEMORY, describe, exit_code
from hacrl.types import Problem, Status, Verdict

DETAIL_LIMIT = 300
"""Characters; longer details are truncated, because every stored trajectory has one."""
MARK = "HACRL_VERIFIER"
"""Environment variable with a random mark of a worker, which all processes it starts inherit."""


class Verifier(Protocol):
    """The protocol. The optional method `prepare()` runs once in every worker before the clock of
    the first call starts; imports and warm-up belong there.

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
        """Change it whenever a verdict may change; stored in `Trajectory.verifier`."""
        ...

    @property
    def reward_range(self) -> tuple[float, float]:
        """Smallest and largest reward."""
        ...

    def judge(self, reply: str, problem: Problem) -> Verdict: ...


def right(answer: str, reward: float = 1.0) -> Verdict:
    """The reply's answer is the reference answer."""
    return Verdict(reward, Status.OK, answer[:DETAIL_LIMIT])


def wrong(answer: str, reward: float = 0.0) -> Verdict:
    """The reply has another answer."""
    return Verdict(reward, Status.WRONG, answer[:DETAIL_LIMIT])


def unparsed(reason: str) -> Verdict:
    """The reply has no answer: judged, reward 0."""
    return Verdict(0.0, Status.UNPARSED, reason[:DETAIL_LIMIT])


def failed(reason: str) -> Verdict:
    """The verifier could not judge (an unreadable reference answer, an exception, a dead process)."""
    return Verdict(0.0, Status.ERROR, reason[:DETAIL_LIMIT])


def introduction(verifier: Verifier) -> dict[str, Any]:
    """Name, version and reward range, as a worker reports them."""
    low, high = verifier.reward_range
    names = {"name": str(verifier.name), "version": str(verifier.version)}
    return {**names, "reward_range": (float(low), float(high))}


def guarded_judge(
    verifier: Verifier, reply: str, problem: Problem, raise_memory: bool = False
) -> Verdict:
    """Judge one reply. Any exception, SystemExit included, and a reward outside the declared range
    become ERROR: a user's verifier may raise anything, and the run must continue. `raise_memory`
    passes on the errors of a process without memory."""
    try:
        verdict = verifier.judge(reply, problem)
        if not isinstance(verdict, Verdict):
            return failed(f"judge returned {type(verdict).__name__}, not a Verdict")
        low, high = verifier.reward_range
        reward = float(verdict.reward)
        if verdict.judged and not (math.isfinite(reward) and low <= reward <= high):
            return failed(
                f"reward {reward:g} is outside the declared range [{low:g}, {high:g}]: change "
                f"reward_range of verifier {verifier.name!r}, or its rewards"
            )
        parts = tuple((str(name), float(value)) for name, value in verdict.parts)
        return Verdict(reward, Status(verdict.status), str(verdict.detail)[:DETAIL_LIMIT], parts)
    except BaseException as error:
        if raise_memory and exit_code(error) == EXIT_OUT_OF_MEMORY:
            raise
        return failed(describe(error))


def first_failure(verdicts: Iterable[Verdict | None]) -> str:
    """Status and message of the first reply that was not judged; "" if there is none.

    Example: "error: ValueError: boom"
    """
    failure = next((v for v in verdicts if v is not None and not v.judged), None)
    return f"{failure.status.value}: {failure.detail}" if failure else ""


def count_statuses(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """The number of verdicts of each of the five statuses.

    Example: {"ok": 3, "wrong": 4, "unparsed": 1, "timeout": 0, "error": 0}
    """
    counts = Counter(verdict.status for verdict in verdicts)
    return {status.value: counts[status] for status in Status}
