"""Commands that prepare training: init, schema, doctor, data fetch."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from hacrl.cli.terminal import (
    AcceptChanged,
    Json,
    Overrides,
    TrustCode,
    errors_as_messages,
    note,
    print_json,
    program,
)
from hacrl.errors import UserError

commands = typer.Typer()
data = typer.Typer(help="Download the data sets of the paper.", no_args_is_help=True)
commands.add_typer(data, name="data")


@commands.command()
def init(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="File to write.")] = Path(
        "team.toml"
    ),
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model folder, hub name or pocket:NAME. Repeat it for each agent."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Data file, or `arithmetic` for built-in problems.")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="exact, number, choice, math, FILE.py:FUNCTION, or own (writes one)."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    question: Annotated[str | None, typer.Option(help="Column with the question.")] = None,
    answer: Annotated[str | None, typer.Option(help="Column with the answer.")] = None,
) -> None:
    """Write a commented CONFIG for your own team.

    In a terminal it asks for missing options.
    """
    with errors_as_messages(trust_code=False):
        from hacrl.study.init.team import start_team

        given = (config, model or [], data, reward, steps, question, answer)
        files = start_team(*given, _ask, typer.echo)
        for path in files:
            typer.echo(f"wrote {path}")
        trust = " --trust-code" if 'kind = "function"' in config.read_text("utf-8") else ""
        typer.echo("next:")
        typer.echo(f"  {program()} doctor {config}{trust}")
        typer.echo(f"  {program()} train {config}")


def _ask(flag: str, question: str, default: str | None) -> str:
    """The answer of a person at a terminal; elsewhere the default, or an error that names the flag."""
    if sys.stdin.isatty():
        return str(typer.prompt(question, default=default))
    if default is None or flag == "--model":
        raise UserError(
            f"{flag} is missing: give it, or run `hacrl init` in a terminal, which asks for it"
        )
    return default


@commands.command()
def schema() -> None:
    """Print the JSON schema of a config, for editors that check TOML."""
    with errors_as_messages(trust_code=False):
        from hacrl.study.init.schema import config_schema

        print_json(config_schema())


@commands.command("doctor")
def check(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="Config to check (TOML).")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
    trust_code: TrustCode = False,
) -> None:
    """Check the installation, and that CONFIG can run on this machine.

    Prints versions, extras and devices, then checks data, verifier, models and memory of CONFIG.
    """
    with errors_as_messages(trust_code=trust_code):
        from hacrl.config import load_config

        settings = load_config(config, overrides or []) if config else None
        from hacrl.study.doctor import doctor
        from hacrl.study.tables import console

        findings = list(doctor.check(settings)) if settings else []
        if as_json:
            print_json(doctor.as_json(settings, findings))
        else:
            doctor.print_installation(out := console())
            if settings is not None:
                doctor.print_config(out, settings, findings)
        if missing := [finding for finding in findings if finding.good is False]:
            names = ", ".join(finding.what for finding in missing)
            raise UserError(f"{config} cannot run here: see {names} above")


@data.command("fetch")
def fetch_data(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="Data sets to write, e.g. math_train, or `all`."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("data"),
    source: Annotated[
        str,
        typer.Option("--from", help="Folder or URL with the source files, in place of the hub."),
    ] = "",
    accept_changed: AcceptChanged = False,
) -> None:
    """Download data sets of the paper and write them as JSONL files.

    The sources are pinned; the number of rows and the sha256 of the result are checked.
    """
    with errors_as_messages():
        from hacrl.tasks.fetch import SOURCES, fetch

        for name in SOURCES if names == ["all"] else names:
            fetch(name, out, source, accept_changed, note)
