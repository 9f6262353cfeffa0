"""CPU time of a pocket run with all checks against the same run without them, in alternating pairs.

    python benchmarks/check_cost.py --pairs 5
    python benchmarks/check_cost.py --pairs 5 --old OLD/src     # an older tree instead of "without"

"Without" means: no fingerprints, no watches, no checks of peers' rows, no check values in JSON files
and no digests of checkpoints. User CPU time of the command and of its workers, start-up included, is
compared, because it depends less on other processes than elapsed time does.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "from hacrl.cli import main; main()"
WITHOUT = """
import hacrl.fingerprint, hacrl.runs, hacrl.store.checkpoint, hacrl.store.rows, hacrl.trust.validate
hacrl.runs.check_inputs = lambda *args, **kwargs: None
hacrl.runs.WATCHES = ()
hacrl.trust.validate.Checker.check = lambda self, snapshot, problems: (snapshot, [])
rows, zeros = hacrl.store.rows, "0" * 12
rows._closed = lambda body, before: f'{body}{"" if body == "{" else ", "}{rows._KEY}{zeros}"}}'
hacrl.store.checkpoint.sha256 = lambda path: "0" * 64
"""


def user_seconds(code: str, source: Path, steps: int) -> float:
    """User CPU seconds of one pocket run of this source tree, its workers included."""
    with tempfile.TemporaryDirectory() as folder:
        config = str(ROOT / "configs" / "pocket.toml")
        arguments = ["train", config, f"steps={steps}", "--run", f"{folder}/run"]
        env = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        with open(f"{folder}/log", "w+") as log:
            child = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                stdout=log,
                stderr=log,
                env=env,
                cwd=folder,
            )
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = status
            log.seek(0)
            assert status == 0, log.read()[-2000:]
    return usage.ru_utime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--old", type=Path, help="folder `src` of the tree to compare with")
    args = parser.parse_args()
    base = (COMMAND, args.old.resolve()) if args.old else (WITHOUT + COMMAND, ROOT / "src")
    ratios = []
    for i in range(args.pairs):
        pair = [(COMMAND, ROOT / "src"), base]
        seconds = [user_seconds(*one, args.steps) for one in pair[:: -1 if i % 2 else 1]]
        new, old = seconds[:: -1 if i % 2 else 1]
        ratios.append(new / old)
        print(f"pair {i + 1}: {new:.2f} s against {old:.2f} s, ratio {ratios[-1]:.4f}", flush=True)
    ratios.sort()
    print(
        f"user CPU time, {args.steps} steps, {args.pairs} pairs: median ratio "
        f"{statistics.median(ratios):.4f} ({ratios[0]:.4f} to {ratios[-1]:.4f})"
    )


if __name__ == "__main__":
    main()
