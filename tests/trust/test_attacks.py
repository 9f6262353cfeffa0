"""scripts/attacks.py: one tiny arm, and the verdicts of the table by hand."""

import argparse
import json
from pathlib import Path

import attacks
import pytest
from bad_peers import MARGIN

from hacrl.statistics import t_interval
from hacrl.store.pool import Pool


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([0.5, 1.0, 1.5], "held"),  # 1.0 +- 1.24
        ([-1.0, 1.0, 3.0], "open"),  # 1.0 +- 4.97: ends above 3
        ([1.1, 1.2, 1.0], "open"),  # 1.1 +- 0.25: contains 1
        ([5.0, 6.0, 7.0], "failed"),  # 6.0 +- 2.48
        ([-9.0, 9.0], "open"),
    ],
)
def test_verdicts(losses: list[float], expected: str) -> None:
    """t(2) = 4.303, so the half-width is 2.484 standard deviations."""
    assert attacks.verdict(t_interval(losses)) == expected


def test_invented_texts_are_placed_where_the_learner_uses_them(tmp_path: Path) -> None:
    args = argparse.Namespace(out=tmp_path, steps=1, prompts=3, problems=3, keep=True)
    for peer in ("finch", "heron"):
        attacks.store_peer(args, 0, peer)
    found = attacks.run_arm(args, attacks.Arm(0, "flood", "overlap", True))
    assert found["quarantined"] == {"heron": [], "finch": [0]} and found["used"]["finch"] == 0
    found = attacks.run_arm(args, attacks.Arm(0, "answer-key", "overlap", True))
    assert found["quarantined"]["finch"] == [] and found["used"]["finch"] > 20
    path = tmp_path / "0-answer-key-overlap-True"
    rows = [json.loads(line) for line in (path / "metrics.jsonl").open()]
    (row,) = (r for r in rows if r["kind"] == "train" and r["agent"] == "wren")
    assert row["trust/log_ratio/p50/finch"] == pytest.approx(-MARGIN, abs=1e-4)
    answers = {t.text for t in Pool(path / "pool", read_only=True).rows("finch", 0)}
    assert len(answers) == 3 and all(text.isdigit() for text in answers)
    found = attacks.run_arm(args, attacks.Arm(0, "answer-key", "overlap", "strict"))
    assert found["used"]["finch"] == 0  # wren would hardly write an answer alone
