"""A comparison of `hacrl compare`, as data for its page and for report.html."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.view.page import one_file


def read_suite(folder: Path) -> dict[str, Any]:
    """results.json and report.md of a suite's folder; None for one that is not written yet."""
    found = {}
    for key, name in (("results", "results.json"), ("report", "report.md")):
        path = folder / name
        found[key] = path.read_text(encoding="utf-8") if path.is_file() else None
    try:
        return {**found, "results": json.loads(found["results"] or "null")}
    except ValueError as error:
        raise UserError(
            f"{folder / 'results.json'}: not JSON ({error}). `hacrl compare --report` writes it"
        ) from error


def report_page(title: str, results: Mapping[str, Any], report: str, up: str) -> str:
    """report.html: the page of a comparison as one file. `up` leads to the suite's folder."""
    answer = {"results": results, "report": report, "base": up}
    return one_file(title, {"start": "#suite", "answers": {"suite": answer}})
