"""The command line. Each command reads its arguments, calls one function and prints the result.

Torch and transformers load inside the commands that need them: `hacrl --help` stays quick.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from hacrl import __version__
from hacrl.cli_models import Overrides, Run, commands
from hacrl.errors import UserError
from hacrl.failures import calm

app = typer.Typer(
    name="hacrl",
    help="Train a team of different language models together; run each one alone.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(commands)


def main() -> None:
    signal.signal(signal.SIGTERM, _terminated)
    app(prog_name="hacrl")


def _terminated(number: int, frame: object) -> None:
    """End as after Ctrl-C, so that children and files are closed as well."""
    raise KeyboardInterrupt


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hacrl {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


# ---------------------------------------------------------------- running


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file.")],
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Run directory; runs/NAME of the config by default."),
    ] = None,
) -> None:
    """Train the team that CONFIG describes, e.g. hacrl train team.toml steps=100"""
    with calm():
        from hacrl.config import load_config
        from hacrl.training.run import free_name

        settings = load_config(config, overrides or [])
        place = run or free_name(Path("runs") / config.stem)
    with calm(place):
        from hacrl.progress import ProgressLine
        from hacrl.training.run import start

        with ProgressLine() as progress:
            start(settings, place, observer=progress)
        _finish(place)


@app.command()
def resume(run: Run, overrides: Overrides = None) -> None:
    """Go on with RUN from its newest whole checkpoint; steps=N makes it longer."""
    with calm(run):
        from hacrl.progress import ProgressLine
        from hacrl.training.run import go_on

        with ProgressLine() as progress:
            go_on(run, _steps_only(overrides or []), observer=progress)
        _finish(run)


@app.command()
def demo(
    overrides: Overrides = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each half.")] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Where to write.")] = None,
) -> None:
    """Train the pocket team together and each alone, and compare: a few minutes on a CPU."""
    with calm():
        from hacrl.study.demo import free_place, run_demo

        changes = [*(overrides or []), *([f"steps={steps}"] if steps else [])]
        run_demo(run or free_place(Path("runs") / "demo"), changes)


# ---------------------------------------------------------------- looking


@app.command()
def show(
    run: Run,
    what: Annotated[
        str, typer.Argument(metavar="[samples]", help="samples: read training rollouts.")
    ] = "summary",
    png: Annotated[Path | None, typer.Option(help="Write the curves to this file.")] = None,
    step: Annotated[
        int | None, typer.Option(help="samples: of this step; the last by default.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="samples: as this agent learned from them.")
    ] = None,
    problem: Annotated[str | None, typer.Option(help="samples: of this problem id.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="samples: most rows.")] = 48,
    full: Annotated[bool, typer.Option("--full", help="samples: whole replies.")] = False,
) -> None:
    """Table and curves of RUN, or its training rollouts (hacrl show RUN samples)."""
    if what not in ("summary", "samples"):
        raise typer.BadParameter(f"{what!r}: leave it out, or say samples", param_hint="what")
    if what == "samples":
        return samples(run, step, agent, problem, limit, full)
    with calm():
        from hacrl.store.rundir import RunDirectory
        from hacrl.study.inspect.curves import run_curves, write_png
        from hacrl.study.inspect.summary import summarise
        from hacrl.study.tables import console, summary_table

        summary = summarise(RunDirectory.open(run))
        out = console()
        out.print(summary_table(summary))
        out.print(run_curves(summary, min(out.width, 100)))
        if png is not None:
            write_png(summary, png)
            out.print(f"curves: {png}", soft_wrap=True)


@app.command()
def samples(
    run: Run,
    step: Annotated[int | None, typer.Option(help="Of this step; the last by default.")] = None,
    agent: Annotated[str | None, typer.Option(help="As this agent learned from them.")] = None,
    problem: Annotated[str | None, typer.Option(help="Of this problem id.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most rows.")] = 48,
    full: Annotated[bool, typer.Option("--full", help="Whole replies.")] = False,
) -> None:
    """Read the training rollouts of RUN: reward, s, advantage, weight, and whether used."""
    with calm():
        from hacrl.store.rundir import RunDirectory
        from hacrl.study.inspect.samples import print_samples
        from hacrl.study.tables import console

        print_samples(
            console(),
            RunDirectory.open(run),
            step=step,
            agent=agent,
            problem=problem,
            limit=limit,
            full=full,
        )


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="A TOML file.")] = None,
    overrides: Overrides = None,
) -> None:
    """What is installed, which device, and whether CONFIG can run here."""
    with calm():
        from hacrl.config import load_config
        from hacrl.study.doctor.doctor import print_config, print_installation
        from hacrl.study.tables import console

        settings = load_config(config, overrides or []) if config else None
        out = console()
        print_installation(out)
        if settings is not None:
            missing = print_config(out, settings)
            if missing:
                names = ", ".join(f.what for f in missing)
                raise UserError(f"{config} cannot run here yet: see {names} above")


# ---------------------------------------------------------------- their parts


def _finish(run: Path) -> None:
    """The table at the end, and what to do next."""
    from hacrl.store.rundir import RunDirectory
    from hacrl.study.inspect.summary import summarise
    from hacrl.study.tables import console, summary_table

    summary = summarise(RunDirectory.open(run))
    out = console()
    out.print(summary_table(summary))
    agent = next(a.name for a in summary.agents if a.learns)
    out.print(f"\nrun directory: {run}", soft_wrap=True, highlight=False)
    for command in (
        f"hacrl show {run}",
        f"hacrl show {run} samples",
        f"hacrl export {run} {agent} DIR",
    ):
        out.print(f"  {command}", soft_wrap=True, highlight=False)


def _steps_only(overrides: list[str]) -> dict[str, object]:
    """resume takes steps=N alone; a wrong key is told by the runtime."""
    changed: dict[str, object] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise UserError(f"override {override!r} is not of the form key=value, e.g. steps=100")
        changed[key] = int(value) if value.lstrip("-").isdigit() else value
    return changed
