"""Commands that train: train, resume, demo, compare."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hacrl.cli.terminal import (
    SETTINGS,
    AcceptChanged,
    Json,
    Overrides,
    OverridesAndArms,
    Run,
    TrustCode,
    errors_as_messages,
    print_json,
    program,
)

if TYPE_CHECKING:
    from hacrl.study.compare.results import Results

commands = typer.Typer()


@commands.command(context_settings=SETTINGS)
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Config of the team (TOML).")],
    overrides: OverridesAndArms = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Run directory to write (default: runs/NAME, or NAME-2)."),
    ] = None,
) -> None:
    """Train the team that CONFIG describes.

    Example: hacrl train team.toml steps=100
    """
    with errors_as_messages():
        from hacrl.config import load_config

        settings = load_config(config, overrides or [])
        from hacrl.runs import free_name, start
        from hacrl.study.diagnostics.check import HOOKS

        place = run or free_name(Path("runs") / config.stem)
    with errors_as_messages(place):
        from hacrl.cli.progress import ProgressLine

        with ProgressLine() as progress:
            start(settings, place, observer=progress, hooks=HOOKS)
        print_summary(place)


@commands.command(context_settings=SETTINGS)
def resume(
    run: Run,
    overrides: Overrides = None,
    accept_changed: AcceptChanged = False,
) -> None:
    """Continue RUN from its newest complete checkpoint.

    steps=N extends it to N steps. Changed data or models are an error, unless accepted.
    """
    with errors_as_messages(run):
        from hacrl.cli.progress import ProgressLine
        from hacrl.runs import resume as resume_run
        from hacrl.study.diagnostics.check import HOOKS

        with ProgressLine() as progress:
            resume_run(run, overrides or [], progress, HOOKS, accept_changed)
        print_summary(run)


@commands.command()
def demo(
    overrides: Overrides = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of each run.")] = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Folder to write (default: runs/demo).")
    ] = None,
) -> None:
    """Train three tiny models together and alone, and compare them.

    This takes a few minutes on a CPU.
    """
    with errors_as_messages():
        from hacrl.pocket import DEMO_SUITE
        from hacrl.runs import free_name
        from hacrl.study.compare import compare as run_suite

        folder = run or free_name(Path("runs") / "demo")
        changes = [*(overrides or []), *([f"steps={steps}"] if steps else [])]
        _print_results(run_suite(DEMO_SUITE, folder, changes), folder)


@commands.command(context_settings=SETTINGS)
def compare(
    suite: Annotated[Path, typer.Argument(metavar="SUITE", help="Arms, teams and seeds (TOML).")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write (default: runs/compare/NAME).")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Number of runs to train at the same time.")
    ] = None,
    only: Annotated[str, typer.Option(help="Train only these arms (comma-separated).")] = "",
    teams: Annotated[str, typer.Option(help="Train only these teams (comma-separated).")] = "",
    kept: Annotated[
        Path | None,
        typer.Option(
            help="File of finished runs: results are added, runs in it not trained again."
        ),
    ] = None,
    against: Annotated[
        str, typer.Option(help="Write a second report with this arm as the reference.")
    ] = "",
    report: Annotated[
        bool, typer.Option("--report", help="Do not train; build the report from finished runs.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Do not train; estimate rollouts, memory and GPU hours.")
    ] = False,
    as_json: Json = False,
    trust_code: TrustCode = False,
) -> None:
    """Train the unfinished runs of SUITE and compare its arms.

    A suite lists arms, teams and seeds. The report has differences with intervals and verdicts.
    """
    with errors_as_messages(trust_code=trust_code or not (report or plan)):
        from hacrl.study.compare import compare as run_suite
        from hacrl.study.compare import default_folder

        folder = out or default_folder(suite)
        arms, chosen = ([name for name in given.split(",") if name] for given in (only, teams))
        if plan:
            from hacrl.study.compare.plan import make_plan, plan_table
            from hacrl.study.tables import console

            rows = make_plan(suite, folder, overrides or [], arms, kept, chosen)
            if as_json:
                return print_json([asdict(row) for row in rows])
            return console().print(plan_table(rows))
        results = run_suite(
            suite, folder, overrides or [], parallel, arms, against, report, kept, chosen
        )
        if as_json:
            from hacrl.study.compare.report import as_json as results_json

            print_json(results_json(results))
        else:
            _print_results(results, folder, against)


def _print_results(results: Results, out: Path, against: str = "") -> None:
    """Print the table of a suite, its report, and the command that shows its first run that is here."""
    from hacrl.study.compare.report import tables
    from hacrl.study.tables import console

    console().print(*tables(results))
    report = out / "against" / against if against else out
    typer.echo(f"\nreport: {report / 'report.html'} (also report.md and results.json)")
    runs = (out / Path(file).parents[2] for row in results.rows for file in row.files)
    if run := next(filter(Path.is_dir, runs), None):  # --kept FILE has results without directories
        typer.echo(f"  {program()} show {run}")


def print_summary(run: Path) -> None:
    """Print the table of a finished run and the commands that show more."""
    from hacrl.store.rundir import RunDirectory
    from hacrl.study.inspect.summary import summarise
    from hacrl.study.tables import console, summary_table

    summary = summarise(RunDirectory.open(run))
    console().print(summary_table(summary))
    typer.echo(f"\nrun directory: {run}")
    learners = [a.name for a in summary.agents if a.learns]
    of_learners = [f"samples {run}", f"export {run} {learners[0]} DIR"] if learners else []
    for rest in (f"show {run}", f"view {run}", *of_learners):
        typer.echo(f"  {program()} {rest}")
