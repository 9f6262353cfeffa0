"""How far the first-order gain of the diagnostics holds: the weights of one pocket agent are really
moved along each source's displacement, and held-out reward is measured before and after with the same
noise.

    python scripts/check_gain.py wren --step 4 --seed 5
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from hacrl.config import load_config
from hacrl.runs import start
from hacrl.store.reader import mean_rewards
from hacrl.study.diagnostics.baseline import standard_error
from hacrl.study.diagnostics.check import Diagnostics
from hacrl.study.diagnostics.gradients import Directions
from hacrl.training.hooks import Hooks
from hacrl.types import Rollout

SHARES = (0.1, 1.0)
"""How much of a step's displacement is tried."""
REPLIES = 48
"""To every held-out problem that evaluation leaves, before and after."""


class Moved(Diagnostics):
    """A check that also tries what it predicts."""

    learner, at = "", 0

    def check(self, step: int, *given: Any) -> dict[str, Any]:
        """Check only the chosen learner, at the chosen step."""
        if (self.agent.name, step) != (self.learner, self.at):
            return {}
        return super().check(step, *given)

    def gains(self, replies: Sequence[Rollout], found: Directions) -> dict[str, list[float]]:
        predicted = super().gains(replies, found)
        before = self._scores()
        print(f"{self.learner}, step {self.at}: {len(before)} problems x {REPLIES} replies")
        for source, move in found.moves.items():
            print(f"{source}: predicted {_points(predicted[source])}")
            for share in SHARES:
                self._move(share * found.updates[source], move)
                after = self._scores()
                self._move(-share * found.updates[source], move)
                change = [(after[p] - before[p]) / share for p in before]
                print(f"    moved by {share:g}: {_points(change)} for the whole", flush=True)
        return predicted

    def _scores(self) -> dict[str, float]:
        assert self._unseen is not None
        settings = self.settings
        self.settings = settings.model_copy(update={"samples": REPLIES})
        rollouts = self._fresh(-1, self._unseen.spare)
        self.settings = settings
        return mean_rewards(
            (r.problem_id, r.verdict.reward if r.verdict else None) for r in rollouts
        )

    @torch.no_grad()
    def _move(self, share: float, move: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.policy.master.items():
            parameter += share * move[name]
        self.policy.sampler.weights_changed()


def _points(values: Sequence[float]) -> str:
    return f"{100 * fmean(values):+.2f} ± {100 * (standard_error(values) or 0.0):.2f} points"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("learner", choices=("wren", "finch", "heron"))
    parser.add_argument("--step", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    Moved.learner, Moved.at = given.learner, given.step
    config = load_config(
        Path(__file__).parent.parent / "configs" / "pocket.toml",
        [
            f"seed={given.seed}",
            f"steps={given.step + 1}",
            "diagnostics.every=1",
            "diagnostics.problems=96",
            "evaluation.problems=240",
            "evaluation.samples=1",
            "checkpoint.save=false",
            "log.tensorboard=false",
        ],
    )
    with tempfile.TemporaryDirectory() as folder:
        start(config, Path(folder) / "run", hooks=Hooks(diagnostics=Moved))


if __name__ == "__main__":
    main()
