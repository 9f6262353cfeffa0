"""Own ratios of a run's first updates, on a machine that rounds by shape."""

import shutil
from pathlib import Path

import pytest
from rounding import RoundsByShape
from team import member, team

import hacrl
from hacrl.config import parse_config
from hacrl.policy.policy import Policy
from hacrl.store.journal import Journal
from hacrl.store.rundir import RunDirectory
from hacrl.training.scoring import ROUNDING, recall_scores


def own_ratios(run: RunDirectory, step: int, update: int) -> list[float]:
    rows = run.sample_rows(step, "wren")
    found = [r["ratio"] for r in rows if r["update"] == update and r["source"] == "wren"]
    return [ratio for ratio in found if ratio is not None]


def test_a_bfloat16_run_begins_every_step_at_ratio_1(tmp_path: Path) -> None:
    """Micro-batches of a few rows of unequal length, groups without advantage left out. The step's
    second update has other weights, so that its ratios are not 1. A step learned again from the journal
    has the ratios of the first time."""
    config = team(
        member("wren", dtype="bfloat16", microbatch_tokens=150),
        steps=2,
        prompts_per_step=12,
        minibatch_samples=24,
        sampler={"tolerance": 10.0},
        evaluation={"problems": 0},
        checkpoint={"every": 0},
    )
    with RoundsByShape():
        run = hacrl.train(config, tmp_path / "run")
        for step in (0, 1):
            first, second = (own_ratios(run, step, update) for update in (0, 1))
            assert 0 < len(first) < 24
            assert first == pytest.approx([1.0] * len(first), abs=1e-6)
            assert second != pytest.approx([1.0] * len(second), abs=1e-4)
        before = [own_ratios(run, step, update) for step in (0, 1) for update in (0, 1)]
        shutil.rmtree(run.path / "checkpoints")
        hacrl.resume(run.path)
    after = [own_ratios(run, step, update) for step in (0, 1) for update in (0, 1)]
    assert after == before


def test_a_step_without_own_replies_has_the_rounding_of_the_step_before(tmp_path: Path) -> None:
    """Step 2 was closed without wren, which learns it from its peers' replies. After a kill before it,
    the rounding is the same as without: that of step 1."""
    config = parse_config(team(member("wren", dtype="bfloat16")))
    policy = Policy(config.agents[0], device="cpu", temperature=1.0, beta=0.0)
    journal = Journal(tmp_path / "wren")
    for step, rounding in ((0, 0.5), (1, 0.25), (3, 0.125)):
        journal.write(step, [], {ROUNDING: rounding})
    recall_scores(policy, journal, 2)
    assert policy.has_scored(2)
    policy.restore(policy.checkpoint(2))  # the weights change, as in an update
    loss = policy.without_rounding(lambda batch, update: pytest.fail("not called"), 2)
    assert getattr(loss, "noise", None) == 0.25
