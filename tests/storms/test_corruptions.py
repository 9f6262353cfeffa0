"""Short form of scripts/storms/corruptions.py."""

from storms.corruptions import FINDINGS, storm


def test_damaged_files_are_noticed_repaired_or_harmless() -> None:
    outcomes = storm(count=6, seed=1)
    assert [str(outcome) for outcome in outcomes if outcome.kind in FINDINGS] == []
