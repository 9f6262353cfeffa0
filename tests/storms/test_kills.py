"""Short form of scripts/storms/kills.py."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "storms" / "kills.py"


def test_killed_and_paused_runs_equal_undisturbed_ones() -> None:
    """In a process of its own: the script forks, and this one may have used torch's threads."""
    command = [sys.executable, str(SCRIPT), "--count", "3", "--setups", "gspo"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 interruptions" in done.stdout
