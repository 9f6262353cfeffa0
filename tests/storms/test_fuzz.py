"""A short form of scripts/storms/fuzz.py."""

from storms.fuzz import storm


def test_malformed_configs_and_command_lines_end_with_a_message() -> None:
    assert storm(count=60, seed=2026) == []
