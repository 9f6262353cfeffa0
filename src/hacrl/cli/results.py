"""Commands that use finished runs and models: show, samples, eval, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hacrl.cli.terminal import Best, Checkpoint, Overrides, Run, errors_as_messages, note
from hacrl.errors import UserError

commands = typer.Typer()


@commands.command()
def show(
    run: Run,
    png: Annotated[Path | None, typer.Option(help="Also write the curves to this file.")] = None,
) -> None:
    """Show the results and curves of RUN."""
    with errors_as_messages():
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
            typer.echo(f"curves: {png}")


@commands.command()
def samples(
    run: Run,
    step: Annotated[int | None, typer.Option(help="Training step (default: the last).")] = None,
    agent: Annotated[
        str | None, typer.Option(help="Show advantages and weights of this learner.")
    ] = None,
    problem: Annotated[str | None, typer.Option(help="Only the problem with this id.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows.")] = 48,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten replies.")] = False,
) -> None:
    """Show training rollouts of RUN with reward, ratio, advantage, weight, and whether used."""
    with errors_as_messages():
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


@commands.command("eval")
def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RUN", help="Run directory or model folder.")
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option(help="Config with the problems, for a model folder.")
    ] = None,
    agent: Annotated[str | None, typer.Option(help="Only this agent of the run.")] = None,
    step: Checkpoint = None,
    best: Best = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the replies.")] = None,
    suite: Annotated[str | None, typer.Option(help="Benchmark suite to run: math7.")] = None,
    data: Annotated[Path | None, typer.Option(help="suite: folder with its data files.")] = None,
    benchmarks: Annotated[
        str, typer.Option(help="suite: only these benchmarks (comma-separated).")
    ] = "",
    problems: Annotated[
        int | None, typer.Option(min=1, help="suite: maximum problems per benchmark.")
    ] = None,
    samples: Annotated[
        str, typer.Option(help="suite: replies per problem, e.g. aime25=8,amc23=4")
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="suite: maximum reply length.")] = 8196,
) -> None:
    """Evaluate the agents of a run, or a model, on held-out problems or a benchmark suite."""
    with errors_as_messages():
        if suite is None:
            _evaluate_held_out(target, overrides or [], config, agent, step, best, out)
            return
        from hacrl.study.evaluation import run_suite

        run_suite(
            target,
            overrides or [],
            suite=suite,
            data=data,
            out=out,
            agent=agent,
            step=step,
            best=best,
            benchmarks=benchmarks,
            problems=problems,
            samples=samples,
            max_tokens=max_tokens,
            report=note,
        )


def _evaluate_held_out(
    target: str,
    overrides: list[str],
    config: Path | None,
    agent: str | None,
    step: int | None,
    best: bool,
    out: Path | None,
) -> None:
    from hacrl.config import load_config
    from hacrl.store.rundir import RunDirectory
    from hacrl.study.evaluation import (
        candidate_of_model,
        candidates_of_run,
        evaluate_candidates,
        evaluation_table,
    )
    from hacrl.study.tables import console

    is_run = (Path(target) / "config.toml").is_file()
    if not is_run and config is None:
        raise UserError(
            f"{target} is not a run directory. For a model folder give the config with the "
            "problems: --config FILE.toml"
        )
    base = Path(target) if is_run else Path.cwd()
    settings = load_config(config or base / "config.toml", overrides)
    if is_run:
        own = RunDirectory.open(base).config()
        candidates = candidates_of_run(RunDirectory(base), own, agent, step, best, note)
    else:
        candidates = [candidate_of_model(target, settings)]
    folder = out or (base / "eval" if is_run else Path("runs") / f"eval-{Path(target).name}")
    results = evaluate_candidates(settings, candidates, folder, base, note)
    console().print(evaluation_table(results))
    typer.echo(f"replies: {folder}")


@commands.command()
def export(
    run: Run,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Name of the agent.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Model folder to write.")],
    step: Checkpoint = None,
    best: Best = False,
) -> None:
    """Write AGENT as a model folder that transformers can load."""
    with errors_as_messages():
        from hacrl.store.rundir import RunDirectory
        from hacrl.study.evaluation import export_agent

        done = export_agent(RunDirectory.open(run), agent, folder, step, best, note)
        typer.echo(f"{agent} after step {done}: {folder}")
