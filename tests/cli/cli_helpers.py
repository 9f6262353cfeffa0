"""A small team, and hacrl as a command in this process or in a new one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w
from team import member
from team import team as pocket_team
from typer.testing import CliRunner

from hacrl.cli import app

ROOT = Path(__file__).parents[2]


def team(**settings: Any) -> dict[str, Any]:
    small: dict[str, Any] = {
        "seed": 0,
        "steps": 2,
        "prompts_per_step": 4,
        "minibatch_samples": 16,
        "max_response_tokens": 16,
        "evaluation": {"every": 1, "problems": 6, "samples": 2},
    }
    return pocket_team(member("wren"), member("finch"), **{**small, **settings})


def write(path: Path, **settings: Any) -> Path:
    path.write_text(tomli_w.dumps(team(**settings)))
    return path


def hacrl(*args: str | Path) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a command in this process."""
    result = CliRunner().invoke(app, [str(a) for a in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception  # a bug: would be a traceback
    return result.exit_code, result.stdout, result.stderr


def accepted(*args: str | Path) -> tuple[str, str]:
    """(standard output, standard error) of a command that must end well."""
    code, out, err = hacrl(*args)
    assert code == 0, out + err
    return out, err


def refused(*args: str | Path) -> str:
    """The message of a command that must fail as the user's mistake."""
    code, _, message = hacrl(*args)
    assert code == 2, message
    assert message.startswith("error: ")
    assert "Traceback" not in message
    assert "pydantic" not in message
    return message


def start(*args: str | Path, **options: Any) -> subprocess.Popen[str]:
    """`python ARGS` as a child process, e.g. start("-m", "hacrl", "--help")."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )
