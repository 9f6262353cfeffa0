"""Run as a process of its own: trains, and kills itself (SIGKILL) at a named moment.

python killed.py CONFIG.json RUN MOMENT
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_until_killed(config: dict[str, Any], run: Path, moment: str) -> None:
    """Train in a process of its own until it kills itself."""
    path = run.with_suffix(".json")
    path.write_text(json.dumps(config))
    command = [sys.executable, __file__, str(path), str(run), moment]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert found.returncode == -signal.SIGKILL, found.stderr


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(owner: Any, name: str, call: int, *, after: bool = False) -> None:
    """Kill at the call-th call of owner.name, before or after it has done its work."""
    real: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            die()
        result = real(*args, **kwargs)
        if calls == call:
            die()
        return result

    setattr(owner, name, counted)


def tear_metrics(line: int) -> None:
    """Die with half of a metrics line on disk."""
    from hacrl.store import rows

    real, lines = rows.append_line, 0

    def torn(path: Path, text: str, sync: bool = False) -> None:
        nonlocal lines
        lines += path.name == "metrics.jsonl"
        if path.name == "metrics.jsonl" and lines == line:
            with open(path, "a") as file:
                file.write(text[: len(text) // 2])
                file.flush()
            die()
        real(path, text, sync)

    rows.append_line = torn


def arm(moment: str) -> None:
    """Two agents, 3 steps, 4 updates a step, evaluation after 0, 2 and 3 steps."""
    from hacrl.policy.policy import Policy
    from hacrl.sampling import transformers_cache
    from hacrl.store import checkpoint
    from hacrl.store.journal import LearnerJournal
    from hacrl.store.pool import Pool
    from hacrl.training import evaluate

    if moment == "sampling":
        kill_at(transformers_cache, "draw", 100)  # step 1, second agent
    elif moment == "before publishing":
        kill_at(Pool, "publish", 4)  # step 1, second agent: journalled, not published
    elif moment == "between updates":
        kill_at(Policy, "update", 11, after=True)  # step 1, first agent, after its third update
    elif moment == "writing a checkpoint":
        kill_at(checkpoint, "_save_tensors", 7, after=True)  # second agent's second checkpoint
    elif moment == "evaluating":
        kill_at(evaluate, "judge", 4)  # second agent, after 2 steps
    elif moment == "writing metrics":
        tear_metrics(5)
    elif moment == "judging peers":
        kill_at(LearnerJournal, "write", 5)  # step 1, first agent: judged, not journalled
    elif moment == "between verdicts and quarantine":
        kill_at(LearnerJournal, "write", 5, after=True)
    elif moment == "after quarantine":
        kill_at(LearnerJournal, "write", 8, after=True)  # step 1, second agent: nothing learned yet
    else:
        raise SystemExit(f"unknown moment {moment}")


if __name__ == "__main__":
    config_path, run, moment = sys.argv[1:]
    arm(moment)
    import hacrl

    hacrl.train(json.loads(Path(config_path).read_text()), run)
    raise SystemExit("was never killed")
