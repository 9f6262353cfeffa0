"""Short form of scripts/storms/signals.py."""

from storms.signals import storm


def test_signals_stop_a_run(tmp_path) -> None:
    shots = storm(count=2, seed=0, longest=8.0)
    assert [str(shot) for shot in shots if shot.findings] == []
