"""The page of `hacrl view` in Chromium, over a real run."""

import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import tomli_w
from cli_helpers import hacrl, start, write
from hub_process import HubProcess
from page_helpers import HOSTILE, keep_shots, serving
from process_table import wait_until

from hacrl.config import change_config
from hacrl.owners.signing import Key
from hacrl.store.reader import RunReader
from hacrl.store.rows import RowLog
from hacrl.store.rundir import RunDirectory

pytestmark = pytest.mark.page


def test_the_list_of_runs_and_their_overlay(tab: Any, address: str) -> None:
    tab.goto(address)
    tab.get_by_role("link", name="team").wait_for()
    assert tab.title() == "Runs · hacrl"
    row = tab.locator("tbody tr").first
    assert "finished" in row.inner_text() and "4 / 4" in row.inner_text()
    assert "was written by hacrl 0.1.x" in tab.locator("tbody tr").nth(1).inner_text()
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
    tab.goto(f"{address}#runs?sel=team|old")  # one of them cannot be drawn
    tab.locator("path.line").first.wait_for(state="attached")
    tab.goto(f"{address}#run?id=team")
    tab.locator(".facts").wait_for()
    assert tab.locator("figure:visible").count() >= 9
    chart = tab.get_by_label("Training reward. Last values")
    chart.hover()
    assert "wren" in tab.locator(".tip:visible").inner_text()
    phases = tab.get_by_label("Seconds by phase. Last values")
    phases.focus()
    tab.keyboard.press("ArrowLeft")  # the last step
    last = phases.get_attribute("aria-label").partition("Last values: ")[2].split(", ")
    tip = tab.locator(".tip:visible", has_text="sample").inner_text().splitlines()
    assert sorted(last) == sorted(tip[1:])
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


def test_a_run_grows_on_the_page_while_it_trains(tab: Any, tmp_path: Path) -> None:
    """A process trains; the page shows its steps without being loaded again."""
    config = write(tmp_path / "team.toml", steps=400, evaluation={"problems": 0})
    training = start("-m", "hacrl", "train", config, "--run", tmp_path / "runs" / "live")
    try:
        wait_until((tmp_path / "runs" / "live" / "metrics.jsonl").is_file)
        with serving(tmp_path / "runs" / "live") as url:
            tab.goto(f"{url}#run?id=live")
            tab.get_by_text("running").wait_for()
            tab.evaluate("window.loadedOnce = true")
            steps = "parseInt(document.querySelector('.facts b').textContent)"
            for _ in range(2):
                now = tab.evaluate(steps)
                tab.wait_for_function(f"() => {steps} > {now}", timeout=120_000)
            assert tab.evaluate("window.loadedOnce")
            keep_shots(tab, "run-live")
            training.terminate()
            training.communicate(timeout=60)
            tab.get_by_text("stopped").wait_for()
    finally:
        training.kill()
        training.communicate()


def test_rollouts_filters_search_and_links(tab: Any, address: str, browser: Any) -> None:
    tab.goto(f"{address}#rollouts?id=team")
    tab.get_by_text("1 to 50 of 128 replies").wait_for()  # 4 steps x 4 problems x 4 replies x 2
    keep_shots(tab, "rollouts")
    tab.get_by_label("author").select_option("wren")
    tab.get_by_text("of 64 replies").wait_for()
    tab.get_by_label("step", exact=True).fill("2")
    tab.get_by_label("step", exact=True).press("Enter")
    tab.get_by_text("of 16 replies").wait_for()
    tab.get_by_label("learner").select_option("finch")
    tab.wait_for_url("**learner=finch**")
    tab.get_by_label("used").select_option("none")
    tab.wait_for_url("**used=none**")
    tab.get_by_role("button", name="clear").click()
    tab.get_by_text("of 128 replies").wait_for()
    tab.keyboard.press("/")
    tab.keyboard.type("hacked")
    tab.keyboard.press("Enter")
    tab.get_by_text("1 to 1 of 1 replies").wait_for()
    other = browser.new_context().new_page()  # the link, sent to somebody else
    other.goto(tab.url)
    other.get_by_text("1 to 1 of 1 replies").wait_for()
    first = "table.replies tbody tr"
    assert other.locator(first).first.inner_text() == tab.locator(first).first.inner_text()
    other.context.close()


CHANGE = """async (changes) => {  // the answer to the search alone arrives last
  const real = window.fetch;
  window.fetch = async (address) => {
    const answer = await real(address);
    if (/q=/.test(address) && !/author=/.test(address)) await new Promise((r) => setTimeout(r, 800));
    return answer;
  };
  for (const [name, value] of changes) {
    const field = document.querySelector(`[name=${name}]`);
    field.value = value;
    field.dispatchEvent(new Event("change"));
  }
}"""


def test_filters_changed_back_to_back_are_all_kept(tab: Any, address: str) -> None:
    tab.goto(f"{address}#rollouts?id=team")
    tab.get_by_text("of 128 replies").wait_for()
    tab.evaluate(CHANGE, [["search", "hacked"], ["author", "wren"]])
    tab.get_by_text("No reply matches.").wait_for()  # the author is finch
    tab.wait_for_timeout(1000)
    assert "q=hacked" in tab.url and "author=wren" in tab.url
    assert tab.get_by_text("No reply matches.").is_visible()
    tab.go_back()
    tab.get_by_text("1 to 1 of 1 replies").wait_for()
    assert tab.get_by_label("author").input_value() == ""
    tab.locator("table.replies tbody td").last.click()  # anywhere on the row
    tab.locator("article.chosen").wait_for()


def test_a_hostile_reply_is_shown_as_text(tab: Any, address: str) -> None:
    tab.goto(f"{address}#rollouts?id=team&q=hacked")
    tab.locator("table.replies a").click()
    chosen = tab.locator("article.chosen")
    chosen.wait_for()
    text = chosen.locator("pre").inner_text()
    assert text == HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert "<b onmouseover=alert(1)>\\x1b]0;title\\x07" in chosen.inner_text()
    assert tab.title() == "team · hacrl" and tab.locator("main img, main script").count() == 0
    keep_shots(tab, "problem")


def test_replies_to_a_problem_side_by_side(tab: Any, address: str, runs: Path) -> None:
    """The numbers are those of samples/LEARNER and of the pool."""
    run = RunReader.open(runs / "team")
    row = next(r for r in run.sample_rows(1, "wren") if r["source"] == "finch" and r["ratio"])
    query = f"id=team&step=2&problem={row['problem']}&reply=finch-{row['index']}"
    tab.goto(f"{address}#problem?{query}")
    mine = tab.locator("article.chosen tr", has_text="wren").inner_text()
    assert tab.locator("section.column").count() == 2 and tab.locator("article").count() == 8
    assert f"{abs(row['advantage']):.2f}" in mine
    assert ("used" in mine) is bool(row["used"] and row["advantage"])
    assert "answer" in tab.locator("main").inner_text()
    tab.locator("a", has_text=re.compile("next →|← previous")).first.click()
    tab.wait_for_url(lambda url: row["problem"] not in url)


def test_who_teaches_whom(tab: Any, address: str, runs: Path) -> None:
    run = RunReader.open(runs / "team")
    rows = [row for step in range(4) for row in run.sample_rows(step, "wren")]
    used = [r for r in rows if r["source"] == "finch" and r["used"] and r["advantage"]]
    tab.goto(f"{address}#teach?id=team")
    cell = tab.locator("table.matrix tbody tr").first.locator("td").nth(1)
    cell.get_by_text("64").wait_for()
    assert f"used\n{len(used)} (" in cell.inner_text() and "gain" in cell.inner_text()
    keep_shots(tab, "teach")
    tab.get_by_label("over time").select_option("gain")
    tab.wait_for_url("**metric=gain")
    tab.locator("figure circle").nth(7).wait_for()  # 2 learners x 2 sources x 2 checks


def test_an_exported_run_needs_no_server(tab: Any, runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "team.html"
    code, _, err = hacrl("view", runs / "team", "--export", file)
    assert code == 0 and str(file) in err
    tab.goto(file.as_uri())
    tab.get_by_text("Held-out accuracy").wait_for()
    keep_shots(tab, "export")
    tab.get_by_role("link", name="Who teaches whom").click()
    tab.locator("table.matrix").wait_for()
    tab.get_by_role("link", name="Rollouts").click()
    tab.get_by_text("of 128 replies").wait_for()
    tab.get_by_label("search").fill("hacked")
    tab.keyboard.press("Enter")
    tab.get_by_text("of 1 replies").wait_for()
    tab.locator("table.replies a").click()
    tab.locator("article.chosen").wait_for()
    assert tab.title() == "team · hacrl"
    tab.go_back()
    tab.get_by_label("search").fill("beginning")
    tab.keyboard.press("Enter")
    tab.locator(".preview", has_text="Beginning").wait_for()


def test_mean_rewards_and_gains_without_a_standard_error(
    tab: Any, runs: Path, tmp_path: Path
) -> None:
    """A run whose verifier knows partial rewards, and whose checks have one problem each."""
    run = RunDirectory(shutil.copytree(runs / "team", tmp_path / "runs" / "odd"))
    function = 'verifier={kind="function",options={path="rewards:f"}}'
    run.set_config(change_config(run.config(), [function]))
    rows = [{k: v for k, v in r.items() if "gain_se" not in k} for r in run.metric_rows()]
    RowLog(run.metrics_path, "").replace(rows)
    with serving(tmp_path / "runs") as url:
        tab.goto(f"{url}#runs?sel=odd")
        tab.get_by_label("Selected runs. Last values").wait_for()
        assert "%" not in tab.get_by_label("Selected runs. Last values").text_content()
        tab.goto(f"{url}#teach?id=odd&metric=gain")
        tab.locator("figure circle").nth(7).wait_for()


def test_a_comparison_and_its_report(tab: Any, runs: Path, tmp_path: Path) -> None:
    """The page of a suite over real runs, and report.html of the same suite. A run that is gone has no
    link on the page."""
    out = compared(tmp_path, runs)
    shutil.rmtree(out / "runs" / "team" / "gspo")
    with serving(out) as url:
        tab.goto(url)
        tab.get_by_text("Difference to gspo").first.wait_for()
        keep_shots(tab, "suite")
        assert tab.get_by_text("against gspo: open: hacpo").count() == 2  # one per agent
        links = tab.locator("figure svg a, .report a")
        found = {link.get_attribute("href") for link in links.all()}
        assert found == {"#run?id=runs%2Fteam%2Fhacpo%2Fseed-0"}
        tab.locator("figure svg a").first.click()
        tab.wait_for_url("**#run?id=runs*")
        tab.locator(".facts").wait_for()
    tab.goto((out / "report.html").as_uri())
    tab.get_by_text("Difference to gspo").first.wait_for()
    assert tab.locator("figure svg a").first.get_attribute("href").startswith("runs/team/")
    assert tab.locator(".report a[href='runs/team/gspo/seed-0']").count() >= 1
    assert tab.get_by_role("heading", name="Settings").is_visible()
    keep_shots(tab, "report")


def compared(folder: Path, runs: Path) -> Path:
    """A suite of one seed: its runs are copies of one, with other names, so nothing is trained."""
    suite = {
        "base": str(runs.parent / "team.toml"),
        "seeds": [0],
        "reference": "gspo",
        "arms": [{"name": "hacpo"}, {"name": "gspo"}],
        "teams": [{"name": "team"}],
    }
    (folder / "small.toml").write_text(tomli_w.dumps(suite))
    for arm in ("hacpo", "gspo"):
        shutil.copytree(runs / "team", folder / "out" / "runs" / "team" / arm / "seed-0")
    code, _, err = hacrl("compare", folder / "small.toml", "--out", folder / "out", "--report")
    assert code == 0, err
    return folder / "out"


def test_members_arrivals_and_changes_of_a_hub(tab: Any, tmp_path: Path) -> None:
    """ant has arrived; cat is expelled; a batch of bee appears on the page when it arrives."""
    hub = HubProcess(tmp_path, steps=3)
    hub.start()
    try:
        publish(hub, "ant")
        expel = {"kind": "expel", "member": "cat", "step": 1, "signer": "founder"}
        change = hub.team.amend(hub.keys["founder"], **expel)
        httpx.post(f"{hub.url}/v1/amendments", content=change.encode()).raise_for_status()
        later = {"kind": "rotate", "member": "bee", "step": 2, "signer": "founder"}
        later["key"] = Key.new().public
        change = hub.team.amended(change).amend(hub.keys["founder"], **later)
        httpx.post(f"{hub.url}/v1/amendments", content=change.encode()).raise_for_status()
        with serving(hub.url) as url:
            tab.goto(url)
            tab.get_by_text("step 1 of 3 is open").wait_for()
            for name, state in (("ant", "arrived"), ("bee", "waiting"), ("cat", "from step 2")):
                assert state in tab.locator("tr", has_text=name).first.inner_text()
            key = hub.keys["bee"].public[:16]  # the new one counts from step 3 on
            assert key in tab.locator("tr", has_text="bee").first.inner_text()
            keep_shots(tab, "hub")
            publish(hub, "bee")
            tab.locator("tr", has_text="bee").get_by_text("arrived").wait_for()
    finally:
        hub.kill()


def publish(hub: HubProcess, name: str) -> None:
    client = hub.client(name)
    client.put(hub.batch(client, 0))
