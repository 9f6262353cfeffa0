"""Short form of scripts/storms/signals.py."""

import json
from pathlib import Path

from storms.signals import storm


def test_signals_stop_a_run(tmp_path: Path) -> None:
    results = tmp_path / "shots.jsonl"
    shots = storm(count=2, seed=0, longest=8.0, results=results)
    assert [str(shot) for shot in shots if shot.findings] == []
    stored = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["signal"] for row in stored] == ["SIGINT", "SIGTERM"] * 2
    assert all(0 <= row["seconds"] <= 5 for row in stored)


def test_no_shot_begins_after_the_time_limit() -> None:
    assert storm(count=2, seed=0, within=0.0) == []
