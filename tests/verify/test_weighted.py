"""verifier.kind = "sum": several rewards with weights, worked by hand."""

from pathlib import Path
from typing import Any

import pytest
from team import member, rows, team

import hacrl
from hacrl.errors import UserError
from hacrl.store.journal import Journal
from hacrl.store.pool import Pool
from hacrl.store.rows import read_rows
from hacrl.types import Problem, Status
from hacrl.verify import VerifierConfig, VerifierPool

BRIEF = """
def brief(completion):
    if "crash" in completion:
        raise ValueError("boom")
    return 1.0 if len(completion) < 4 else 0.25
"""


def settings(folder: Path, weight: float = 0.5) -> dict[str, Any]:
    (folder / "rewards.py").write_text(BRIEF)
    brief = {"kind": "function", "options": {"path": f"{folder}/rewards:brief"}, "weight": weight}
    return {"kind": "sum", "rewards": [{"kind": "number"}, brief], "workers": 1, "timeout": 300}


@pytest.mark.parametrize(
    ("weight", "expected", "range_"),
    [
        (0.5, [1.5, 0.5, 1.125, 0.125], (0.0, 1.5)),
        (-0.5, [0.5, -0.5, 0.875, -0.125], (-0.5, 1.0)),
    ],
)
def test_the_sum_its_range_and_a_part_that_fails(
    tmp_path: Path, weight: float, expected: list[float], range_: tuple[float, float]
) -> None:
    """Right 1, wrong 0; brief 1, long 0.25."""
    replies = ["42", "41", "it is 42", "it is 41", "crash 42"]
    with VerifierPool(VerifierConfig(**settings(tmp_path, weight))) as pool:
        verdicts = pool.judge_all([(reply, Problem("p", (), "42", "t")) for reply in replies])
        assert pool.reward_range == range_
        assert pool.label == f"sum(1*number+{weight:g}*function(rewards:brief))/1,1"
    assert [v.reward for v in verdicts[:4]] == expected
    assert [v.status for v in verdicts] == [*[Status.OK, Status.WRONG] * 2, Status.ERROR]
    assert [v.detail for v in verdicts[:2]] == ["42", "41"]  # answers, for majority votes
    assert verdicts[2].parts == (("number", 1.0), ("brief", 0.25))
    assert verdicts[4].detail == "brief: ValueError: boom" and not verdicts[4].judged


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kind": "sum"}, "needs verifier.rewards"),
        ({"kind": "number", "rewards": [{"kind": "exact"}]}, 'needs verifier.kind = "sum"'),
        ({"kind": "sum", "rewards": [{"kind": "nmber"}]}, r"rewards\.0\.kind 'nmber' is unknown"),
        ({"kind": "sum", "rewards": [{"kind": "exact", "weight": 0}]}, "every weight is 0"),
        ({"kind": "sum", "rewards": [{"kind": "exact"}] * 2}, "'exact' is used twice; give each"),
        (
            {"kind": "sum", "rewards": [{"kind": "number", "options": {"x": 1}}]},
            "options do not fit",
        ),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, UserError), match=words):
        VerifierConfig.model_validate(given)


def test_a_run_logs_every_part_and_knows_the_code_of_each(tmp_path: Path) -> None:
    config = team(member("wren"), steps=1, verifier=settings(tmp_path))
    run = hacrl.train(config, tmp_path / "run")
    for row in (*rows(run, "wren"), *rows(run, "wren", "evaluation")):
        total = row["reward/number"] + 0.5 * row["reward/brief"]
        assert row.get("reward", row.get("accuracy")) == pytest.approx(total)
    reply = read_rows(run.evaluation(1, "wren") / "replies.jsonl", "")[0]
    assert set(reply["rewards"]) == {"number", "brief"}
    rollout = Journal(run.journal("wren")).read(0)[0][0]
    assert [name for name, _ in rollout.verdict.parts] == ["number", "brief"]
    published = Pool(run.pool_path).snapshot(0).groups[0].trajectories[0]
    assert published.verdict.parts == ()  # peers get the sum
    (tmp_path / "rewards.py").write_text(BRIEF.replace("4", "5"))
    with pytest.raises(UserError, match=r"rewards\.py was changed"):
        hacrl.resume(run.path, steps=2)
