"""hacrl in real processes: imported modules, exit codes, a full disk, Ctrl-C."""

import resource
import signal
from pathlib import Path

import pytest
from cli_helpers import ROOT, hacrl, start, write
from process_table import wait_until

HEAVY = {"torch", "transformers", "numpy", "matplotlib", "ray"}
LIST_MODULES = "import sys, atexit; atexit.register(lambda: print('MODULES', *sys.modules)); "
MAIN = LIST_MODULES + "from hacrl.cli import main; main()"


def loaded(code: str, *args: str | Path) -> tuple[int, str, set[str]]:
    """Exit code, standard error and the heavy packages that `code` has imported at its end."""
    child = start("-c", code, *args)
    out, err = child.communicate(timeout=300)
    modules = out.splitlines()[-1].split()
    assert modules[0] == "MODULES"
    return child.returncode, err, HEAVY & set(modules)


@pytest.mark.parametrize("command", ["--help", "--version", "train --help", "data"])
def test_help_imports_nothing_heavy(command: str) -> None:
    assert loaded(MAIN, *command.split())[2] == set()


def test_imports_without_torch() -> None:
    """The config, the algorithms and everything that is stored load no torch."""
    store = (p.relative_to(ROOT / "src") for p in (ROOT / "src/hacrl/store").rglob("*.py"))
    names = [".".join(path.with_suffix("").parts) for path in store]
    modules = ["hacrl", "hacrl.config", "hacrl.algorithms", "hacrl.statistics", *names]
    code, err, heavy = loaded(f"{LIST_MODULES}import {', '.join(modules)}")
    assert code == 0, err
    assert heavy <= {"numpy"}


@pytest.mark.parametrize("command", ["show", "samples"])
def test_looking_at_a_run_imports_no_torch(run: Path, command: str) -> None:
    code, err, heavy = loaded(MAIN, command, run)
    assert code == 0, err
    assert heavy <= {"numpy"}


def test_a_typo_ends_with_2(tmp_path: Path) -> None:
    """Without torch: a typo costs a fraction of a second."""
    code, err, heavy = loaded(MAIN, "train", write(tmp_path / "a.toml"), "sedd=3")
    assert code == 2, err
    assert "did you mean 'seed'" in err
    assert len(err.splitlines()) == 1
    assert heavy <= {"numpy"}


def test_full_disk(tmp_path: Path) -> None:
    """No file may exceed 100 kB, as on a full disk: the first checkpoint does not fit."""

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    config = write(tmp_path / "a.toml", evaluation={"problems": 0})
    child = start("-m", "hacrl", "train", config, "--run", tmp_path / "run", preexec_fn=small_files)
    _, err = child.communicate(timeout=300)
    assert child.returncode == 2, err
    assert "Traceback" not in err
    assert "error: " in err
    assert str(tmp_path / "run") in err
    assert "free space" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopping_says_how_to_continue(tmp_path: Path, number: int, code: int) -> None:
    """FIRST_HOUR 19: SIGTERM exits with 143, not 130."""
    config = write(tmp_path / "a.toml", steps=500, evaluation={"problems": 0})
    child = start("-m", "hacrl", "train", config, "--run", tmp_path / "run")
    metrics = tmp_path / "run/metrics.jsonl"
    wait_until(
        lambda: child.poll() is not None or (metrics.exists() and metrics.stat().st_size), 300
    )
    child.send_signal(number)
    _, err = child.communicate(timeout=300)
    assert child.returncode == code
    last = err.splitlines()[-1]
    assert last.startswith("stopped; continue with `")
    assert last.endswith(f"hacrl resume {tmp_path / 'run'}`")
    code, out, err = hacrl("show", tmp_path / "run")
    assert code == 0, err
    assert out.splitlines()[-1].endswith(f"hacrl resume {tmp_path / 'run'}`")
    assert out.splitlines()[-1].startswith("stopped; continue with `")
    assert "Traceback" not in err
