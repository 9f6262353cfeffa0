"""Errors, hints, arguments and JSON that several commands use."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from hacrl.errors import Terminated, exit_code, explain, interruption
from hacrl.importing import code_allowed
from hacrl.safe_text import mask_text, printable

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, e.g. runs/team.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings of the config to override, e.g. steps=100"),
]
OverridesAndArms = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE|+ARM",
        help="Settings of the config to override, e.g. steps=100. +ARM applies all settings of "
        "arms/ARM.toml, in the folder of the config.",
    ),
]
SETTINGS = {"ignore_unknown_options": True}
"""For commands with overrides: `--steps 3` reaches them, and the error says to write steps=3."""
Checkpoint = Annotated[
    int | None, typer.Option(help="Use the checkpoint after this step (default: the newest).")
]
Best = Annotated[
    bool, typer.Option("--best", help="Use the checkpoint with the best held-out accuracy.")
]

TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Allow code that the config names, e.g. a reward function."),
]
AcceptChanged = Annotated[
    bool, typer.Option("--accept-changed", help="Continue even if data or settings have changed.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@contextmanager
def errors_as_messages(
    run: Path | None = None, trust_code: bool = True, again: str = ""
) -> Iterator[None]:
    """Turn an error into one message on standard error and an exit code.

    `run` is the directory that the command writes; after Ctrl-C the message says how to resume it,
    with `again` if that is not `hacrl resume`.
    Without `trust_code` the command runs no code that a config names (importing.py).
    An error that `explain` does not know is a bug in hacrl and keeps its traceback.
    """
    try:
        with code_allowed(trust_code):
            yield
    except typer.Exit:
        raise
    except (Exception, KeyboardInterrupt, Terminated) as error:
        if stop := interruption(error):
            started = run is not None and (run / "config.toml").is_file()
            again = again or f"`{program()} resume {run}`"
            note(f"stopped; continue with {again}" if started else "stopped")
            raise typer.Exit(exit_code(stop)) from error
        if (message := explain(error)) is None:
            raise
        note(f"error: {message}")
        raise typer.Exit(exit_code(error)) from error


def program() -> str:
    """The command that starts hacrl in this shell, e.g. `hacrl`, or `.venv/bin/hacrl` if the
    virtual environment is not active."""
    script = Path(sys.executable).with_name("hacrl")
    found = shutil.which("hacrl")
    if found and Path(found).parent.resolve() == script.parent.resolve():
        return "hacrl"
    command = script if script.is_file() else Path(sys.executable)
    path = str(command)
    with suppress(FileNotFoundError):  # the working directory was deleted
        path = os.path.relpath(command) if command.is_relative_to(Path.cwd()) else path
    return path if command == script else f"{path} -m hacrl"


def note(text: str) -> None:
    """Print a message on standard error, without secrets and control characters."""
    print(printable(mask_text(text)), file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print plain data on standard output. Numbers that are not finite become null."""
    finite = json.loads(json.dumps(value, default=str), parse_constant=lambda name: None)
    print(json.dumps(finite, indent=1))
