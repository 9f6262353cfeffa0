"""A finished run for all tests of the command line."""

from pathlib import Path

import pytest
from cli_helpers import accepted, write


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two agents and two steps."""
    folder = tmp_path_factory.mktemp("cli")
    out, err = accepted("train", write(folder / "team.toml"), "--run", folder / "run")
    assert "step 2 of 2" in out
    assert f"hacrl samples {folder / 'run'}" in out
    assert f"Training wren, finch with hacpo for 2 steps -> {folder / 'run'}" in err
    assert "reward wren" in err
    assert "held-out accuracy before training: wren" in err
    return folder / "run"
