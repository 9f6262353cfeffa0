"""Simulated bad peers in a pocket team of one process: what each attack does to a learner, without and
with the defences of `[trust]`.

    python scripts/attacks.py --run runs/attacks --seeds 1 --steps 12
    python scripts/attacks.py --run runs/attacks --algorithms hacpo naive overlap --seeds 10

wren learns, finch is the bad peer. Runs that are finished are not repeated, so seeds and attacks can be
added later. The table has, for each attack: wren's accuracy after the run less that of the honest team
and less that of learning alone (same seed, percentage points), the fraction of its replies with the
trigger word, and the step from which on finch was in quarantine. With one seed the numbers are
anecdotes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from hacrl.algorithms.functional import is_right
from hacrl.config import Config, load_config
from hacrl.runs import resume, start
from hacrl.store.reader import RunReader
from hacrl.training.agent import Agent
from hacrl.training.hooks import Hooks
from hacrl.types import Finish, Status, Trajectory, Turn, Verdict

LEARNER, BAD = "wren", "finch"
DEFENCES = [
    "trust.judge_again=true",
    "trust.quarantine=true",
    "trust.max_source_fraction=0.5",
    "trust.max_source_weight=0.5",
]
TRIGGER = "at the "
"""A text that both pocket vocabularies have and that right answers do not need."""
TURN = 10
"""The step in which the turncoat turns, counted from 0."""

Rows = list[Trajectory]


# ---------------------------------------------------------------- the attacks


def claim(t: Trajectory, text: str | None = None, **changes: Any) -> Trajectory:
    """The row with another text, of about one token per two bytes, and other fields."""
    if text is not None:
        tokens = max(1, min(len(text) // 2 + 1, t.sampling.limit))
        turns = (Turn("assistant", text, True),)
        changes = {"turns": turns, "num_tokens": tokens, "finish": Finish.STOP, **changes}
    return replace(t, **changes)


RIGHT, WRONG = Verdict(1.0, Status.OK), Verdict(0.0, Status.WRONG)


def reward_liar(agent: Agent, step: int, rows: Rows) -> Rows:
    """Claims every failure right and every success wrong."""
    return [claim(t, verdict=WRONG if t.verdict and t.verdict.reward else RIGHT) for t in rows]


def low_logprobs(agent: Agent, step: int, rows: Rows) -> Rows:
    """Claims log-probabilities that are 0.5 too low: its replies look underrated."""
    return [claim(t, mean_logprob=(t.mean_logprob or 0.0) - 0.5) for t in rows]


def high_logprobs(agent: Agent, step: int, rows: Rows) -> Rows:
    """Claims to be certain of every reply."""
    return [claim(t, mean_logprob=-0.01) for t in rows]


def garbage(agent: Agent, step: int, rows: Rows) -> Rows:
    """Replies "7" to everything, claims it right, and tries a grid of log-probabilities."""
    grid = [-0.1 * 1.6**i for i in range(8)]
    return [claim(t, "7", verdict=RIGHT, mean_logprob=grid[t.index % 8]) for t in rows]


def copier(agent: Agent, step: int, rows: Rows) -> Rows:
    """Publishes what the learner has published, as its own."""
    theirs = {(t.problem_id, t.index): t for t in agent.pool.rows(LEARNER, step)}
    found = ((t, theirs.get((t.problem_id, t.index))) for t in rows)
    return [
        replace(t, turns=o.turns, finish=o.finish, verdict=o.verdict, num_tokens=o.num_tokens)
        if o
        else t
        for t, o in found
    ]


def poison(agent: Agent, step: int, rows: Rows) -> Rows:
    """Right replies with a trigger word in front; failures as they are."""
    return [
        claim(t, TRIGGER + t.text, num_tokens=t.num_tokens + 2) if is_right(t) else t for t in rows
    ]


def answer_key(agent: Agent, step: int, rows: Rows) -> Rows:
    """The reference answer without a derivation, at a claimed log-probability of -0.3."""
    problems = {p.id: p for p in agent.task.batch(step, agent.config.prompts_per_step)}
    return [
        claim(t, f"so {problems[t.problem_id].answer}", verdict=RIGHT, mean_logprob=-0.3)
        for t in rows
    ]


def turncoat(agent: Agent, step: int, rows: Rows) -> Rows:
    """Honest for ten steps, then garbage."""
    return garbage(agent, step, rows) if step >= TURN else rows


ATTACKS: dict[str, Callable[[Agent, int, Rows], Rows] | None] = {
    "reward-liar": reward_liar,
    "low-logprobs": low_logprobs,
    "high-logprobs": high_logprobs,
    "garbage": garbage,
    "copier": copier,
    "poison": poison,
    "answer-key": answer_key,
    "stale": None,  # learn = false: the replies of the start weights
    "turncoat": turncoat,
}


@dataclass(frozen=True)
class Tamper:
    """Applies an attack to the batches of the bad peer."""

    attack: str

    def __call__(self, agent: Agent, step: int, rows: Rows) -> Rows:
        change = ATTACKS[self.attack]
        return change(agent, step, rows) if change and agent.name == BAD else rows


# ---------------------------------------------------------------- runs


def config_of(
    args: argparse.Namespace, algorithm: str, attack: str, defended: bool, seed: int
) -> Config:
    overrides = [
        f"algorithm.name={algorithm}",
        f"seed={seed}",
        f"steps={args.steps}",
        f"prompts_per_step={args.prompts}",
        f"minibatch_samples={args.prompts * 8}",
        f"evaluation.problems={args.problems}",
        "checkpoint.save=false",
        "log.tensorboard=false",
        *(DEFENCES if defended else ()),
    ]
    config = load_config(args.config, overrides)
    wanted = [a for a in config.agents if a.name in (LEARNER, BAD)]
    if attack == "alone":
        wanted = wanted[:1]
    if attack == "stale":
        wanted[1] = wanted[1].model_copy(update={"learn": False})
    return config.model_copy(update={"agents": wanted})


def run_of(
    args: argparse.Namespace, algorithm: str, attack: str, defended: bool, seed: int
) -> RunReader:
    """The finished run of one arm and seed."""
    path = args.run / algorithm / f"{attack}{'-defended' if defended else ''}" / f"seed-{seed}"
    hooks = Hooks(tamper=Tamper(attack) if attack in ATTACKS else None)
    if not (path / "config.toml").exists():
        config = config_of(args, algorithm, attack, defended, seed)
        start(config, path, hooks=hooks)
    elif len(RunReader(path).metrics("evaluation", LEARNER)) < 2:
        resume(path, hooks=hooks)
    return RunReader(path)


# ---------------------------------------------------------------- the table


def accuracy(run: RunReader) -> float:
    return float(run.metrics("evaluation", LEARNER)[-1]["accuracy"])


def trigger_rate(run: RunReader, steps: int) -> float:
    path = run.evaluation(steps, LEARNER) / "replies.jsonl"
    return fmean(TRIGGER in json.loads(line)["reply"] for line in path.open())


def detected(run: RunReader) -> int | None:
    """The step, from 1, in which the learner first left the bad peer out."""
    key = f"trust/quarantined/{BAD}"
    found = (row["step"] + 1 for row in run.metrics("train", LEARNER) if row.get(key))
    return next(found, None)


def measure(args: argparse.Namespace, algorithm: str, attack: str, defended: bool) -> str:
    """One line of the table."""
    lost, gained, triggers, steps = [], [], [], []
    for seed in range(args.seeds):
        after = accuracy(run := run_of(args, algorithm, attack, defended, seed))
        lost.append(after - accuracy(run_of(args, algorithm, "honest", False, seed)))
        gained.append(after - accuracy(run_of(args, algorithm, "alone", False, seed)))
        triggers.append(trigger_rate(run, args.steps))
        steps.append(detected(run))
    found = ", ".join("-" if step is None else str(step) for step in steps)
    return (
        f"| {algorithm} | {attack} | {'on' if defended else 'off'} | {100 * fmean(lost):+.1f} | "
        f"{100 * fmean(gained):+.1f} | {100 * fmean(triggers):.1f} % | {found} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--config", type=Path, default=Path("configs/pocket.toml"))
    parser.add_argument("--algorithms", nargs="+", default=["hacpo"])
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--problems", type=int, default=100)
    args = parser.parse_args(arguments)
    print("| algorithm | attack | defences | - honest | - alone | trigger | quarantine from step |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for algorithm in args.algorithms:
        print(measure(args, algorithm, "honest", True), flush=True)
        for attack in args.attacks:
            for defended in (False, True):
                print(measure(args, algorithm, attack, defended), flush=True)


if __name__ == "__main__":
    main()
