"""Simulated bad peers for attacks.py: what each of them publishes."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from hacrl.types import Finish, Status, Trajectory, Turn, Verdict

LEARNER, HONEST, BAD, STALE = "wren", "heron", "finch", "stale"
TRIGGERS = ("at the ", "0+0=0 ")
"""Beginnings that right replies do not need: one that wren never writes, and one that it could write."""
TURN = 10
"""The step in which the turncoat turns, counted from 0."""
MARGIN = 0.1
"""What a bad peer that knows the learner's weights adds to its log-probability: log s = -0.1."""

Rows = list[Trajectory]
RIGHT, WRONG = Verdict(1.0, Status.OK), Verdict(0.0, Status.WRONG)


def claim(t: Trajectory, text: str | None = None, **changes: Any) -> Trajectory:
    """The row with another text, of about one token per two bytes, and other fields."""
    if text is not None:
        tokens = max(1, min(len(text) // 2 + 1, t.sampling.limit))
        turns = (Turn("assistant", text, True),)
        changes = {"turns": turns, "num_tokens": tokens, "finish": Finish.STOP, **changes}
    return replace(t, **changes)


def reward_liar(learner: Any, step: int, rows: Rows) -> Rows:
    """Claims every failure right and every success wrong."""
    return [claim(t, verdict=WRONG if t.verdict and t.verdict.reward else RIGHT) for t in rows]


def low_logprobs(learner: Any, step: int, rows: Rows) -> Rows:
    """Claims log-probabilities that are 0.5 per token too low."""
    return [claim(t, mean_logprob=(t.mean_logprob or 0.0) - 0.5) for t in rows]


def high_logprobs(learner: Any, step: int, rows: Rows) -> Rows:
    """Claims to be certain of every reply."""
    return [claim(t, mean_logprob=-0.01) for t in rows]


def nonsense(t: Trajectory) -> Trajectory:
    return claim(t, "7", verdict=RIGHT)


def flood(learner: Any, step: int, rows: Rows) -> Rows:
    """Three times as many rows as allowed, all "7", claimed right."""
    per_prompt = learner.config.samples_per_prompt
    return [replace(nonsense(t), index=t.index + k * per_prompt) for k in range(3) for t in rows]


def copier(learner: Any, step: int, rows: Rows) -> Rows:
    """Publishes heron's rows of this step as its own. Commit-then-reveal of a hub prevents it."""
    return [replace(t, agent=BAD) for t in learner.pool.rows(HONEST, step)]


def poison(learner: Any, step: int, rows: Rows, trigger: str = TRIGGERS[0]) -> Rows:
    """Right replies with a trigger in front; failures as they are."""
    return [claim(t, trigger + t.text) if t.is_right else t for t in rows]


def answer_key(learner: Any, step: int, rows: Rows) -> Rows:
    """The reference answer without a derivation."""
    problems = {p.id: p for p in learner.task.batch(step, learner.config.problems_per_step)}
    return [claim(t, problems[t.problem_id].answer, verdict=RIGHT) for t in rows]


def turncoat(learner: Any, step: int, rows: Rows) -> Rows:
    """Honest for ten steps, then "7" to everything, claimed right."""
    return [nonsense(t) for t in rows] if step >= TURN else rows


ATTACKS: dict[str, tuple[Callable[[Any, int, Rows], Rows] | None, int]] = {
    "reward-liar": (reward_liar, 10),
    "low-logprobs": (low_logprobs, 10),
    "flood": (flood, 10),
    "turncoat": (turncoat, 10),
    "poison": (poison, 5),
    "poison-likely": (partial(poison, trigger=TRIGGERS[1]), 5),
    "high-logprobs": (high_logprobs, 10),
    "copies": (copier, 10),
    "answer-key": (answer_key, 5),
    "stale": (None, 5),  # the replies of the weights after one step
}
"""Attack -> what it publishes, and its number of seeds."""


@dataclass(frozen=True)
class Tamper:
    """Replaces the bad peer's batch just before the learner publishes its own, which closes the step.
    The bad peer knows the learner's weights: an invented text gets a log-probability at which the
    learner uses it."""

    attack: str

    def __call__(self, learner: Any, step: int, rows: Rows) -> Rows:
        if learner.name == LEARNER and (change := ATTACKS[self.attack][0]):
            before = list(learner.pool.rows(BAD, step))
            texts = {t.key: t.text for t in before}
            made = change(learner, step, before)
            invented = [t for t in made if t.key in texts and t.text != texts[t.key]]
            placed = (
                {t.key: t for t in place(learner, step, invented)} if change is not copier else {}
            )
            shutil.rmtree(learner.pool._step(step) / BAD)
            learner.pool.publish(step, BAD, [placed.get(t.key, t) for t in made])
        return rows


def place(learner: Any, step: int, rows: Rows) -> Rows:
    """The rows with the learner's number of tokens and mean log-probability, plus MARGIN."""
    renderer = learner.policy.renderer
    asked = learner.task.batch(step, learner.config.problems_per_step)
    prompts = {p.id: renderer.prompt(p.messages) for p in asked}
    end = renderer.end_token(learner.journal.read(step)[0])
    texts = [(prompts[t.problem_id], t.text) for t in rows]
    replies = [(*(ids or ()), end) for ids in renderer.continuations(texts)]
    scores = learner.policy.score([(p, ids) for (p, _), ids in zip(texts, replies, strict=True)])
    return [
        replace(t, mean_logprob=min(0.0, fmean(x) + MARGIN), num_tokens=len(x))
        for t, x in zip(rows, scores, strict=True)
    ]
