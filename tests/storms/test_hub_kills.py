"""Short form of scripts/storms/hub_kills.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "storms" / "hub_kills.py"


@pytest.mark.hub
def test_killed_hubs_and_members_train_what_undisturbed_ones_train() -> None:
    options = ["--count", "6", "--runs", "2", "--steps", "3"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=580,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run 2 (postgres)" in done.stdout and "in 2 runs: 0 findings" in done.stdout
