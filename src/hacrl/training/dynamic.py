"""Rounds of sampling: prompts whose rewards are all equal are replaced (dynamic sampling).

The list of prompts is fixed, and a prompt's replies depend on seed, agent, step and problem only. So the
rounds can be repeated after a crash, and the journal need not store them.
"""

from collections.abc import Callable, Mapping, Sequence

from hacrl.algorithms.functional import is_mixed
from hacrl.types import Rollout

Ids = tuple[int, ...]


def sample_rounds(
    prompts: Mapping[str, Ids], wanted: int, attempt: Callable[[dict[str, Ids]], list[Rollout]]
) -> list[Rollout]:
    """Attempt the first `wanted` prompts, then as many further ones as groups are missing, until
    `wanted` groups are mixed or no prompt is left. At most `wanted` prompts are one round.

    `attempt` returns judged rollouts.
    """
    rollouts: list[Rollout] = []
    left, missing = list(prompts), wanted
    while True:
        now, left = left[:missing], left[missing:]
        rollouts += attempt({p: prompts[p] for p in now})
        missing = wanted - mixed_problems(rollouts)
        if not left or not missing:
            return rollouts


def round_metrics(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """How many problems of the list a step tried, and how many of them it trains on."""
    tried = len({r.problem_id for r in rollouts})
    return {"problems/tried": tried, "problems/mixed": mixed_problems(rollouts)}


def mixed_problems(rollouts: Sequence[Rollout]) -> int:
    """The number of problems whose judged rewards are not all equal."""
    rewards: dict[str, list[float]] = {}
    for r in rollouts:
        if r.verdict is not None and r.verdict.judged:
            rewards.setdefault(r.problem_id, []).append(r.verdict.reward)
    return sum(map(is_mixed, rewards.values()))
