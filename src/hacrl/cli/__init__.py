"""The command `hacrl`. Each command reads its arguments, calls one function and prints the result.

training.py    train, resume, demo, compare
results.py     show, view, samples, eval, export
setup.py       init, schema, doctor, data fetch
owners.py      hub, key, charter
terminal.py    errors, hints and arguments that several commands use
progress.py    the line shown while a run is training

Commands import torch and transformers only when they need them, so `hacrl --help` is quick.
"""

import os
import sys
from contextlib import suppress
from typing import Annotated

import typer

from hacrl import __version__
from hacrl.cli import owners, results, setup, training
from hacrl.errors import EXIT_INTERRUPTED, EXIT_TERMINATED
from hacrl.stopping import remember_ctrl_c

app = typer.Typer(
    name="hacrl",
    help="Train a team of different language models together with reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (training, results, setup, owners):
    app.add_typer(group.commands)


def main() -> None:
    """The entry point of the console script."""
    remember_ctrl_c()
    try:
        app(prog_name="hacrl")
    except KeyboardInterrupt:  # before the command has begun
        os._exit(EXIT_INTERRUPTED)
    except SystemExit as end:
        if end.code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
            # Everything is closed. Python would collect all objects of torch and wait for threads.
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):
                    stream.flush()
            os._exit(end.code)
        raise


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hacrl {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None: ...
