"""Commands that use runs and models: show, view, samples, eval, export."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hacrl.cli.terminal import (
    Best,
    Checkpoint,
    Json,
    Overrides,
    Run,
    TrustCode,
    errors_as_messages,
    note,
    print_json,
    program,
)
from hacrl.errors import UserError
from hacrl.safe_text import printable

commands = typer.Typer()


@commands.command()
def show(
    run: Run,
    png: Annotated[Path | None, typer.Option(help="Also write the curves to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Show the results and curves of RUN."""
    with errors_as_messages(trust_code=False):
        from hacrl.store.rundir import RunDirectory
        from hacrl.study.inspect import summary as inspect
        from hacrl.study.plots import reward_lines, run_figure
        from hacrl.study.tables import console, notes_text, summary_table

        directory = RunDirectory.open(run)
        summary = inspect.summarise(directory)
        if as_json:
            print_json(inspect.as_json(summary))
        else:
            out = console()
            out.print(summary_table(summary))
            out.print(reward_lines(summary))
            out.print(notes_text(summary))
            if summary.state in ("stopped", "failed"):
                join = f"the same `{program()} join` command"
                again = join if summary.config.hub else f"`{program()} resume {run}`"
                if summary.state == "failed":
                    error = directory.error_path.read_text(encoding="utf-8", errors="replace")
                    typer.echo(f"failed: {printable(error.strip())}")
                typer.echo(f"{summary.state}; continue with {again}")
        if png is not None:
            run_figure(summary).savefig(png, dpi=150, format="png")
            note(f"curves: {png}")


@commands.command()
def view(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="Run, folder of runs or of a suite, or URL of a hub."
        ),
    ] = "runs",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")
    ] = 8720,
    browser: Annotated[
        bool, typer.Option("--open/--no-browser", help="Open a browser, if in a terminal.")
    ] = True,
    export: Annotated[
        Path | None, typer.Option(help="Write the page to this HTML file; start no server.")
    ] = None,
    token: Annotated[
        str,
        typer.Option(
            envvar="HACRL_VIEW_TOKEN",
            help="Token that the browser must send (default: none on localhost, else random).",
        ),
    ] = "",
) -> None:
    """Show runs, suites or a hub as a web page.

    With --export, write the page to a file instead.
    """
    with errors_as_messages(trust_code=False):
        from hacrl.view.source import open_source

        source = open_source(target)
        if export is not None:
            from hacrl.view.export import write_export

            return note(f"page: {write_export(source, export)}")
        from hacrl.view.server import serve

        def ready(address: str) -> None:
            print(f"{target} is shown at {address}  (Ctrl-C stops)", flush=True)
            if browser and sys.stderr.isatty():
                import webbrowser

                webbrowser.open(address)

        serve(source, host, port, token, ready)


@commands.command()
def samples(
    run: Run,
    step: Annotated[
        int | None, typer.Option(help="Show this training step (default: the last).")
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="Show the advantages and weights of this learner.")
    ] = None,
    problem: Annotated[str | None, typer.Option(help="Show only the problem with this id.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of rows (default: 48; JSON: all).")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten replies.")] = False,
    as_json: Json = False,
    trust_code: TrustCode = False,
) -> None:
    """Show replies of RUN with reward, ratio, advantage and weight."""
    with errors_as_messages(trust_code=trust_code):
        from hacrl.store.rundir import RunDirectory
        from hacrl.study.inspect import samples as inspect
        from hacrl.study.tables import console

        found = inspect.find_samples(RunDirectory.open(run), step, agent, problem, note)
        if as_json:
            print_json(inspect.as_json(found)[:limit])
        else:
            inspect.print_samples(console(), found, limit or 48, full)


@commands.command("eval")
def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN", help="Model folder, hub name, pocket:NAME or run directory."
        ),
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option(help="For a model: config with the held-out problems.")
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(help="Only this agent of the run. For a model: use this agent's settings."),
    ] = None,
    step: Checkpoint = None,
    best: Best = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write the replies to.")] = None,
    benchmarks: Annotated[
        str, typer.Option(help="Evaluate on these benchmarks (comma-separated); math7 means all.")
    ] = "",
    data: Annotated[
        Path | None, typer.Option(help="With --benchmarks: folder with the data files.")
    ] = None,
    problems: Annotated[
        int | None, typer.Option(min=1, help="With --benchmarks: maximum problems of each.")
    ] = None,
    samples: Annotated[
        str, typer.Option(help="With --benchmarks: replies per problem, e.g. aime25=8,amc23=4")
    ] = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="With --benchmarks: maximum tokens of a reply (default: 8196)."),
    ] = None,
    as_json: Json = False,
    trust_code: TrustCode = False,
) -> None:
    """Evaluate a model, or each agent of a run alone.

    The problems are the held-out ones of the config, or those of --benchmarks.
    """
    # A config on the command line is the user's own, like that of `train`.
    with errors_as_messages(trust_code=trust_code or config is not None):
        chosen: dict[str, Any] = {"agent": agent, "step": step, "best": best, "report": note}
        given: dict[str, Any] = {"target": target, "overrides": overrides or [], "out": out}
        sizes = {"--problems": problems, "--samples": samples, "--max-tokens": max_tokens}
        _check_options(benchmarks, config, {"--data": data, **sizes})
        if benchmarks:
            limits: dict[str, Any] = {"problems": problems, "samples": _numbers(samples)}
            limits |= {"max_response_tokens": max_tokens} if max_tokens else {}
            found, table, folder = _evaluate_benchmarks(benchmarks, data, limits, **given, **chosen)
        else:
            found, table, folder = _evaluate(config=config, **given, **chosen)
        from hacrl.study.tables import console

        print_json(found) if as_json else console().print(table)
        note(f"replies: {folder}")


def _check_options(benchmarks: str, config: Path | None, of_benchmarks: dict[str, Any]) -> None:
    """A UserError for an option that would have no effect."""
    if benchmarks and config:
        raise UserError("--config does not go with --benchmarks; give settings as key=value")
    if not benchmarks and (given := [name for name, value in of_benchmarks.items() if value]):
        raise UserError(
            f"{given[0]} needs --benchmarks; settings of held-out evaluations are overrides, e.g. "
            "evaluation.problems=100"
        )


def _evaluate(target: str, overrides: list[str], **given: Any) -> tuple[Any, Any, Path]:
    """Plain data and table of an evaluation on held-out problems, and the folder with the replies."""
    from hacrl.study.evaluation import config_of, evaluate_held_out, evaluation_table

    results, folder = evaluate_held_out(target, overrides, **given)
    used = config_of(target, given["config"], overrides)
    found = [{"agent": c.agent.name, "step": c.step, **asdict(r)} for c, r in results]
    return found, evaluation_table(results, used.verifier.kind), folder


def _evaluate_benchmarks(
    names: str,
    data: Path | None,
    limits: dict[str, Any],
    target: str,
    overrides: list[str],
    out: Path | None,
    **chosen: Any,
) -> tuple[Any, Any, Path]:
    """The same on benchmarks."""
    from hacrl.study.benchmarks.catalogue import BenchmarkSettings, choose_benchmarks
    from hacrl.study.benchmarks.results import summary_table
    from hacrl.study.benchmarks.run import evaluate_benchmarks
    from hacrl.study.evaluation import find_candidates, output_folder

    if data is None:
        raise UserError("--benchmarks needs --data DIR, the folder with the data files")
    wanted, settings = choose_benchmarks(names), BenchmarkSettings(**limits)
    candidates = find_candidates(target, overrides, **chosen)
    folder = out or output_folder(target, "benchmarks")
    summary = evaluate_benchmarks(candidates, wanted, data, folder, settings, chosen["report"])
    return asdict(summary), summary_table(summary), folder


def _numbers(text: str) -> dict[str, int]:
    """The value of --samples, e.g. aime25=8,amc23=4, as a dict."""
    numbers: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if not value.isdigit() or int(value) < 1:
            raise UserError(f"--samples {part!r} is not of the form NAME=NUMBER, e.g. aime25=8")
        numbers[key] = int(value)
    return numbers


@commands.command()
def export(
    run: Run,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Name of the agent.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Model folder to write.")],
    step: Checkpoint = None,
    best: Best = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the LoRA adapter, for peft.")
    ] = False,
    trust_code: TrustCode = False,
) -> None:
    """Write AGENT of RUN as an ordinary model folder.

    transformers can load the folder. It contains a model card.
    """
    with errors_as_messages(trust_code=trust_code):
        from hacrl.store.rundir import RunDirectory
        from hacrl.study.evaluation import export_agent

        done = export_agent(RunDirectory.open(run), agent, folder, step, best, note, adapter)
        when = f"after step {done}" if done else "before training"
        typer.echo(f"wrote {agent} {when} to {folder}")
