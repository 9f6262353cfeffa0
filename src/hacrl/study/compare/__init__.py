"""`hacrl compare SUITE.toml`: train every arm, team and seed of a suite and compare the arms.

OUT/suite.toml                        a copy of the suite file
OUT/runs/TEAM/ARM/seed-N/             one run: an ordinary run directory
OUT/runs/TEAM/ARM/seed-N.toml, .log   its config and its output
OUT/runs/TEAM/ARM/seed-N/benchmarks/  its agents on the suite's benchmarks, if it names some
OUT/results.json                      every number of the report and the files behind it
OUT/report.md, report.html            the report; report.html is one file and needs no network
OUT/against/ARM/                      the last three with ARM as the reference (--against ARM)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hacrl.errors import UserError
from hacrl.plain_console import PlainConsole
from hacrl.store.files import write_config
from hacrl.study.compare.benchmarks import check_data, evaluate_runs
from hacrl.study.compare.finished import FinishedRuns
from hacrl.study.compare.runner import Failed, train_runs
from hacrl.study.compare.suite import Run, Suite, load_suite, make_runs
from hacrl.tasks import TASKS, make_task

if TYPE_CHECKING:
    from hacrl.study.compare.results import Results


def compare(
    path: Path,
    out: Path,
    changes: Sequence[str] = (),
    parallel: int | None = None,
    only: Sequence[str] = (),
    against: str = "",
    report_only: bool = False,
    kept: Path | None = None,
    teams: Sequence[str] = (),
) -> Results:
    """Train the runs of the suite at `path` that are not finished, and write the report into `out`.

    `only` and `teams` train only these arms and teams; `report_only` trains nothing. The report always
    covers every finished run. `kept` is a file of finished runs (study/compare/finished.py). With
    `against` a second report has that arm as its reference, and its results are returned.
    """
    suite = load_suite(path, changes)
    if against:
        suite.arm(against, "--against")
    finished = FinishedRuns(kept)
    runs = finished.with_results(make_runs(suite, out, changes))
    for run in runs:
        run.check_stored()
    wanted = suite.wanted(runs, only, teams)
    unfinished = [run for run in wanted if not run.finished]
    failed: list[Failed] = []
    if not report_only:
        for run in runs if unfinished else ():
            run.check_inputs()
        if suite.benchmarks:
            check_data(suite.benchmarks)
        check_tasks(unfinished)
        finished.check_models(unfinished)
        write_config(out / "suite.toml", path.read_text(encoding="utf-8"))
        failed = train_runs(wanted, parallel or suite.parallel, finished.add, runs)
        if suite.benchmarks:
            evaluate_runs(suite.benchmarks, wanted, PlainConsole(stderr=True).print)
    if not any(run.finished for run in runs):
        lost = f", and there is no file {kept}" if kept and not kept.exists() else ""
        raise UserError(
            f"no run is finished{lost}, so there is no report. {_text(failed)}".rstrip()
        )
    for run in runs:
        if run.finished:
            finished.add(run)
    options = [] if out == default_folder(path) else ["--out", str(out)]
    options += ["--kept", str(kept)] if kept else []
    results = _report(suite, runs, changes, out, against, options)
    if failed:
        raise UserError(
            f"{len(failed)} of {len(wanted)} runs failed; {out / 'report.md'} covers the others. "
            f"{_text(failed)} The same command tries them again"
        )
    return results


def _report(
    suite: Suite,
    runs: Sequence[Run],
    changes: Sequence[str],
    out: Path,
    against: str,
    options: Sequence[str],
) -> Results:
    """Write the report, and with `against` a second one; returns the results of the last."""
    from hacrl.study.compare.report import write_report  # jinja2 and matplotlib
    from hacrl.study.compare.results import collect

    results = collect(suite, runs, changes, options=options)
    write_report(results, out)
    if against:
        results = collect(suite, runs, changes, against, options)
        write_report(results, out, f"against/{against}")
    return results


def default_folder(suite: Path) -> Path:
    """Where the command writes without --out."""
    return Path("runs") / "compare" / suite.stem


def check_tasks(runs: Sequence[Run]) -> None:
    """Build each built-in task of the runs once: a missing data file is an error before the first run
    starts. Custom tasks are built in their run only, because they may use its directory."""
    tasks = {run.config.task.model_dump_json(): run.config for run in runs}
    for config in tasks.values():
        if config.task.kind in TASKS:
            make_task(config.task, config.seed, Path.cwd())


def _text(failed: Sequence[Failed]) -> str:
    """One sentence per error message, of at most three, with the first runs that end with it."""
    runs: dict[str, list[Failed]] = {}
    for run in failed:
        runs.setdefault(run[1], []).append(run)
    sentences = []
    for last, alike in list(runs.items())[:3]:
        names = ", ".join(name for name, _, _ in alike[:3])
        more = f" and {len(alike) - 3} more" if len(alike) > 3 else ""
        log = f" (log: {alike[0][2]})" if alike[0][2].is_file() else ""
        sentences.append(f"{names}{more}: {last}{log}.")
    return " ".join(sentences)
