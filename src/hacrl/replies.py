"""Figures of an evaluation, counted from the rows of replies.jsonl: avg@k, best@k, maj@k, pass@k."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from hacrl.safe_text import printable
from hacrl.statistics import Estimate, estimate_rewards, expected_best, majority, pass_at_k
from hacrl.types import Finish, Status

Row = Mapping[str, Any]  # a line of replies.jsonl

FIRST_FAILURE = "verdict/first_failure"
"""Key of a metrics row: status and message of the first reply that was not judged, if there is one."""


@dataclass(frozen=True)
class Evaluation:
    """Figures of the replies to a set of problems. Means and intervals are over problems. A reply
    that could not be judged (timeout, error) is left out; a problem whose prompt is too long counts
    as not solved. The estimates are None if no reply could be judged.

    Example: Evaluation(problems=200, samples=4, replies=800, avg=Estimate(0.61, 0.55, 0.67, 200), ...)
    """

    problems: int
    samples: int  # k: replies to each problem
    replies: int
    avg: Estimate | None  # avg@k: mean reward of a problem's replies
    best: Estimate | None  # best@k: largest reward of a problem's replies
    majority: Estimate | None  # maj@k: reward of a problem's most frequent answer
    passes: Mapping[int, float]
    """pass@j for j = 1, 2, 4, ... and k: unbiased estimates, over problems with j judged replies."""
    by_task: Mapping[str, float]  # avg@k of each task
    verdicts: Mapping[str, int]  # number of replies by status: ok, wrong, unparsed, timeout, error
    not_attempted: int  # problems whose prompt was too long
    unjudged: int  # problems without a judged reply, left out of all means
    reply_tokens: float  # mean length of a reply
    truncated: float  # fraction of replies truncated at the limit
    first_failure: str = ""  # status and message of the first reply that was not judged
    drawn: Estimate | None = None
    """best@k as verl counts it: expected largest reward of k draws with replacement from the replies."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Mean of each reward of verifier.kind = "sum" over judged replies, before its weight."""

    def metrics(self) -> dict[str, Any]:
        """The columns of an evaluation's row in metrics.jsonl."""
        return {
            "accuracy": self.avg.mean if self.avg else None,
            "accuracy/low": self.avg.low if self.avg else None,
            "accuracy/high": self.avg.high if self.avg else None,
            "problems": self.avg.count if self.avg else 0,
            **{f"accuracy/{t}": v for t, v in self.by_task.items() if t not in ("low", "high")},
            **{f"reward/{name}": mean for name, mean in self.rewards.items()},
            **{f"verdict/{status}": n for status, n in self.verdicts.items()},
            **({FIRST_FAILURE: self.first_failure} if self.first_failure else {}),
            "not_attempted": self.not_attempted,
            "reply_tokens": self.reply_tokens,
            "truncated": self.truncated,
        }


def count(
    rows: Sequence[Row], interval: Callable[[Sequence[float]], Estimate] = estimate_rewards
) -> Evaluation:
    """Count the rows of replies.jsonl. `interval` turns one score per problem into an estimate."""
    problems: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: int(row["index"])):
        problems.setdefault(row["problem"], []).append(row)
    samples = 1 + max((row["index"] for row in rows), default=0)
    judged = [[r for r in group if r["reward"] is not None] for group in problems.values()]
    judged = [group for group in judged if group]
    attempted = [row for row in rows if row["finish"] != Finish.NOT_ATTEMPTED]
    statuses = Counter(row["status"] for row in attempted)
    lengths = [row["tokens"] for row in attempted] or [0]
    tasks: dict[str, list[float]] = {}
    for group in judged:
        tasks.setdefault(group[0]["task"], []).append(fmean(r["reward"] for r in group))

    def mean(score: Callable[[Sequence[Row]], float]) -> Estimate | None:
        return interval([score(group) for group in judged]) if judged else None

    return Evaluation(
        problems=len(problems),
        samples=samples,
        replies=len(attempted),
        avg=mean(lambda group: fmean(r["reward"] for r in group)),
        best=mean(lambda group: max(r["reward"] for r in group)),
        drawn=mean(lambda group: expected_best([r["reward"] for r in group])),
        majority=mean(lambda group: majority([_vote(r) for r in group])),
        passes=_passes(judged, samples),
        by_task={task: fmean(values) for task, values in sorted(tasks.items())},
        verdicts={status.value: statuses[status.value] for status in Status},
        not_attempted=len({r["problem"] for r in rows if r["finish"] == Finish.NOT_ATTEMPTED}),
        unjudged=len(problems) - len(judged),
        reply_tokens=fmean(lengths),
        truncated=fmean([row["finish"] == Finish.LENGTH for row in attempted] or [0]),
        first_failure=next(
            (f"{r['status']}: {r['detail']}" for r in attempted if r["reward"] is None), ""
        ),
        rewards=mean_parts(part for row in attempted for part in row.get("rewards", {}).items()),
    )


def mean_parts(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Mean by name, in the order in which the names first come.

    Example: mean_parts([("math", 1.0), ("math", 0.0)]) == {"math": 0.5}
    """
    values: dict[str, list[float]] = {}
    for name, value in parts:
        values.setdefault(name, []).append(value)
    return {name: fmean(found) for name, found in values.items()}


def score_name(verifier_kind: str) -> tuple[str, str]:
    """Name and unit of an evaluation's mean: the accuracy if the verifier only knows right and wrong,
    else a mean reward, which is shown times 100."""
    if verifier_kind in ("exact", "number", "choice", "math"):
        return "held-out accuracy", " %"
    return "mean held-out reward x 100", ""


def judged_counts(row: Row) -> tuple[int, int]:
    """How many replies of a metrics row were judged and how many were not."""
    counts = {status: row.get(f"verdict/{status.value}", 0) for status in Status}
    unjudged = counts[Status.TIMEOUT] + counts[Status.ERROR]
    return sum(counts.values()) - unjudged, unjudged


def judged_text(judged: int, unjudged: int) -> str:
    """Text behind an accuracy, e.g. " (of 412 judged, 88 not)"; "" if all replies were judged."""
    return f" (of {judged:,} judged, {unjudged:,} not)" if unjudged else ""


def failure_text(row: Row, verifier_kind: str) -> str:
    """What the verifier did with the replies of a metrics row that has some not judged.

    Example: your reward function failed on all 32 replies (first error: ValueError: boom)
    """
    judged, unjudged = judged_counts(row)
    names = {status: row.get(f"verdict/{status}", 0) for status in ("error", "timeout")}
    statuses = ", ".join(f"{n} {status}" for status, n in names.items() if n)
    verifier = (
        "your reward function" if verifier_kind == "function" else f"the verifier {verifier_kind!r}"
    )
    of = f"all {unjudged}" if not judged else f"{unjudged} of {judged + unjudged}"
    first = " ".join(printable(row.get(FIRST_FAILURE, "")).split())
    counts = f"{statuses}; " if judged else ""
    return f"{verifier} failed on {of} replies ({counts}first {first})"


def _vote(row: Row) -> tuple[str | None, float]:
    """The extracted answer (a verdict's detail), if the reply has one, and the reward."""
    found = row["status"] in (Status.OK, Status.WRONG)
    return (row["detail"] if found else None), row["reward"]


def _passes(groups: Sequence[Sequence[Row]], samples: int) -> dict[int, float]:
    """pass@j for the powers of two up to k, and for k."""
    passes = {}
    for j in sorted({*(2**i for i in range(samples.bit_length())), samples}):
        large = [group for group in groups if len(group) >= j]
        right = [sum(r["status"] == Status.OK for r in group) for group in large]
        if large and j <= samples:
            passes[j] = fmean(pass_at_k(len(g), n, j) for g, n in zip(large, right, strict=True))
    return passes
