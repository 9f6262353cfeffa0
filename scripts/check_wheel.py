"""Build the wheel, install it into an empty environment outside the repository, and use it there.

    python scripts/check_wheel.py python3.11                  # with all dependencies: also trains
    python scripts/check_wheel.py python3.12 --without-torch  # with the light ones: what needs no torch

A plain install of torch for Linux brings several GB of CUDA packages; --index-url of pip.conf or
PIP_EXTRA_INDEX_URL may point to CPU builds.
"""

import argparse
import json
import os
import subprocess
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "safetensors", "tokenizers")


def call(*command: str | Path, cwd: Path, fails: int = 0) -> str:
    """Run a command without the repository on its path; an error if its exit code is another."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True
    )
    output = done.stdout + done.stderr
    if done.returncode != fails or "Traceback" in output:
        raise SystemExit(f"{' '.join(map(str, command))} -> {done.returncode}\n{output[-3000:]}")
    return output


def check(python: str, folder: Path, torch: bool, run: Path | None) -> None:
    call(python, "-m", "venv", folder / "venv", cwd=folder)
    bin_ = folder / "venv" / "bin"
    pip = [bin_ / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    call(*pip[:3], "wheel", ROOT, "--no-deps", "--quiet", "-w", folder, cwd=folder)
    (wheel,) = folder.glob("hacrl-*.whl")
    limits = ["-c", ROOT / "constraints.txt"]
    if torch:
        call(*pip, wheel, *limits, cwd=folder)
    else:
        wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        light = [d for d in wanted if not d.startswith(HEAVY)]
        call(*pip, "--no-deps", wheel, cwd=folder)
        call(*pip, *light, *limits, cwd=folder)
    hacrl = bin_ / "hacrl"
    version = call(bin_ / "python", "-V", cwd=folder).strip()
    print(f"{version}: {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB")
    for arguments in (("--help",), ("schema",)):
        call(hacrl, *arguments, cwd=folder)
    assert "hacrl init" in call(hacrl, "train", "none.toml", cwd=folder, fails=2)
    call(bin_ / "python", "-c", "import hacrl; hacrl.Run, hacrl.train", cwd=folder)
    rows = ({"question": f"{a}+{b}", "answer": a + b} for a in range(9) for b in range(9))
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = ("--model", "pocket:wren", "--model", "pocket:finch")
    call(hacrl, "init", *models, "--data", "sums.jsonl", "--steps", "2", cwd=folder)
    if torch:
        call(hacrl, "doctor", "team.toml", cwd=folder)
        call(hacrl, "train", "team.toml", cwd=folder)
        call(hacrl, "samples", "runs/team", cwd=folder)
        call(hacrl, "export", "runs/team", "wren", "wren-rl", cwd=folder)
        run = folder / "runs" / "team"
    else:
        assert "is not installed" in call(hacrl, "train", "team.toml", cwd=folder, fails=2)
    if run:
        call(hacrl, "show", run.resolve(), cwd=folder)
    print("ok: help, schema, import, init, errors", *(["show"] if run else []), end="")
    print(", doctor, train, samples, export" if torch else " (without torch)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="interpreter, e.g. python3.12")
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--run", type=Path, help="without torch: a run directory to show")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        check(options.python, Path(name), not options.without_torch, options.run)
