"""`hacrl compare SUITE.toml`: arms x teams x seeds, run side by side, counted and judged.

OUT/suite.toml                         the suite, as it was run last
OUT/cells/TEAM/ARM/seed-N/             one cell: an ordinary run directory
OUT/cells/TEAM/ARM/seed-N.toml, .log   its config and what it said
OUT/results.json                       every figure of the report, with the files it came from
OUT/report.md, report.html             the same for people; the second is one file without a network
OUT/against/ARM/                       the last three, with ARM for the reference (--against ARM)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hacrl.errors import UserError
from hacrl.store.files import write_atomic
from hacrl.study.compare.run import Failed, run_cells
from hacrl.study.compare.suite import make_cells, read_suite


def compare(
    path: Path,
    out: Path,
    changes: Sequence[str] = (),
    parallel: int | None = None,
    only: Sequence[str] = (),
    against: str = "",
    report_only: bool = False,
) -> str:
    """Run what is missing of the suite at `path`, write the report into `out`, and return its
    verdicts. The report covers every finished cell, also where `only` ran a part of the arms, or
    `report_only` none. With `against`, a second one has that arm for its reference, and the verdicts
    are its."""
    suite = read_suite(path)
    judged = suite.against(against) if against else suite
    cells = make_cells(suite, out, changes)
    for name in only:
        suite.arm(name, "--only")
    for cell in cells:
        cell.check_stored()
    wanted = [cell for cell in cells if not only or cell.arm in only]
    failed: list[Failed] = []
    if not report_only:
        write_atomic(out / "suite.toml", path.read_bytes())
        failed = run_cells(wanted, parallel or suite.parallel)
    if not any(cell.finished for cell in cells):
        raise UserError(
            f"no cell is finished, so there is nothing to compare. {_told(failed)}".rstrip()
        )
    from hacrl.study.compare.report import write_report  # transformers: not before
    from hacrl.study.compare.results import collect

    verdicts = write_report(collect(suite, cells, changes), out)
    if against:
        verdicts = write_report(collect(judged, cells, changes), out / "against" / against)
    if failed:
        raise UserError(
            f"{len(failed)} of {len(wanted)} cells failed; {out / 'report.md'} covers the others. "
            f"{_told(failed)} The same command tries them again"
        )
    return verdicts


def _told(failed: Sequence[Failed]) -> str:
    return " ".join(f"{name}: {last} (all of it: {log})." for name, last, log in failed[:3])
