"""A comparison of `hacrl compare`, as data for its page and for report.html."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.view.page import one_file


def suite_answer(folder: Path, links: Mapping[str, str]) -> dict[str, Any]:
    """results.json and report.md of a suite's folder; both None before a run is finished. `links` has
    the address of each run, by TEAM/ARM/SEED."""
    results, report = folder / "results.json", folder / "report.md"
    try:
        found = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else None
    except ValueError as error:
        raise UserError(
            f"{results}: not JSON ({error}). `hacrl compare --report` writes it"
        ) from error
    text = report.read_text(encoding="utf-8") if report.is_file() else None
    return {"results": found, "report": text, "links": dict(links)}


def report_page(title: str, results: Mapping[str, Any], report: str, up: str) -> str:
    """report.html: the page of a comparison as one file. `up` leads to the suite's folder."""
    links = {
        f"{row['team']}/{row['arm']}/{seed}": f"{up}runs/{row['team']}/{row['arm']}/seed-{seed}"
        for row in results["rows"]
        for seed in row["seeds"]
    }
    answer = {"results": results, "report": report, "links": links}
    return one_file(title, suite_data(answer))


def suite_data(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What the file of a comparison embeds, from the answer for its view."""
    return {"start": "#suite", "answers": {"suite": answer}, "problems": [], "partial": ""}
