"""The page of `hacrl view` in Chromium, over a real run."""

import time
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import start, write
from page_helpers import keep_shots, serving

pytestmark = pytest.mark.page


def test_the_list_of_runs_and_their_overlay(tab: Any, address: str) -> None:
    tab.goto(address)
    tab.get_by_role("link", name="team").wait_for()
    assert tab.title() == "Runs · hacrl"
    row = tab.locator("tbody tr").first
    assert "finished" in row.inner_text() and "4 / 4" in row.inner_text()
    keep_shots(tab, "runs")
    tab.get_by_role("checkbox").check()
    tab.get_by_label("metric").select_option("reward")
    tab.wait_for_url("**#runs?sel=team&metric=reward")
    assert tab.locator("path.line").count() == 2  # an agent each
    keep_shots(tab, "overlay")
    tab.keyboard.press("Escape")  # leaves the select, so that keys act on the page
    tab.keyboard.press("j")
    tab.keyboard.press("Enter")
    tab.wait_for_url("**#run?id=team")


def test_a_run_and_its_keys(tab: Any, address: str) -> None:
    tab.goto(f"{address}#run?id=team")
    tab.get_by_text("Held-out accuracy").wait_for()
    assert tab.locator("figure:visible").count() >= 9
    chart = tab.get_by_label("Training reward. Last values")
    chart.hover()
    assert "wren" in tab.locator(".tip:visible").inner_text()
    tab.get_by_label("another metric").select_option("learning_rate")
    tab.wait_for_url("**metric=learning_rate")
    tab.locator("figure", has_text="learning_rate").locator("path.line").first.wait_for(
        state="attached"
    )
    keep_shots(tab, "run")
    before = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.locator("h1").click()
    tab.keyboard.press("t")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != before
    keep_shots(tab, "run-dark")
    tab.reload()
    tab.get_by_text("Held-out accuracy").wait_for()
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    tab.keyboard.press("?")
    assert tab.locator("dialog").is_visible()


def test_a_run_grows_on_the_page_while_it_trains(tab: Any, tmp_path: Path, runs: Path) -> None:
    """A process trains; the page shows its steps without being loaded again."""
    config = write(tmp_path / "team.toml", steps=400, evaluation={"problems": 0})
    training = start("-m", "hacrl", "train", config, "--run", tmp_path / "runs" / "live")
    try:
        with serving_when_begun(tmp_path / "runs" / "live") as url:
            tab.goto(f"{url}#run?id=live")
            tab.get_by_text("running").wait_for()
            tab.evaluate("window.loadedOnce = true")
            for _ in range(2):
                now = steps_shown(tab)
                tab.wait_for_function(
                    "n => Number(document.querySelector('.facts b').textContent.split(' ')[0]) > n",
                    arg=now,
                    timeout=120_000,
                )
            assert tab.evaluate("window.loadedOnce")
            keep_shots(tab, "run-live")
            training.terminate()
            training.communicate(timeout=60)
            tab.get_by_text("stopped").wait_for()
    finally:
        training.kill()
        training.communicate()


def steps_shown(tab: Any) -> int:
    return int(tab.locator(".facts b").first.inner_text().split(" ")[0])


def serving_when_begun(run: Path) -> Any:
    """The server, as soon as the run has written a step."""
    until = time.monotonic() + 120
    while not (run / "metrics.jsonl").is_file():
        assert time.monotonic() < until, "never trained a step"
        time.sleep(0.2)
    return serving(run)
