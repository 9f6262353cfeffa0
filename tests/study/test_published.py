"""docs/results/equal-updates.md: the kept runs fit what the page says about them."""

import subprocess
import sys

import publish_results
import pytest
from publish_results import exchange, report


@pytest.mark.parametrize(
    ("suite", "size", "cases"),
    [("equal-updates", 2, 20), ("equal-updates-three", 3, 12), ("equal-updates-four", 4, 12)],
)
def test_all_arms_of_equal_updates_make_as_many_updates(suite: str, size: int, cases: int) -> None:
    """Four rules and the agents of the teams, with GSPO alone at 1, 2 and 4 times the rollouts."""
    _, results = report(suite)
    assert {row.updates for row in results.rows} == {10 * size}
    rates = [row.exchange for row in results.rows if row.exchange]
    assert len(rates) == cases
    assert {(rate.n, rate.multiples, rate.seeds) for rate in rates} == {(size, (1, 2, 4), 10)}


def test_the_accuracies_alone_have_a_cell_for_each_budget() -> None:
    """Team three is also in the suite of pairs, without rules of sharing."""
    table = exchange("equal-updates", "equal-updates-three").partition("alone | x1 | x2 | x4 |")[2]
    rows = [line for line in table.splitlines() if " / " in line]
    assert len(rows) == 8 and {row.count("|") for row in rows} == {5}


@pytest.mark.parametrize(
    ("words", "message"),
    [(["figure"], "python scripts/publish_results.py page"), (["page", "none"], "no file")],
)
def test_unknown_words_are_refused(words: list[str], message: str) -> None:
    command = [sys.executable, publish_results.__file__, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_the_command_of_a_page_names_no_folder_of_the_machine() -> None:
    text, _ = report("equal-updates-three")
    assert "Command: hacrl compare " in text and "--out" not in text and "--kept" not in text
