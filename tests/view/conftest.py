"""A real pocket run, a server over it as a process, and Chromium. Marked `page`: make test-page."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from cli_helpers import hacrl, write
from page_helpers import WIDTHS, publish_hostile, serving

from hacrl.store.pool import Pool

ARGS = ["--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the user's cache folder as it is."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/team: four steps of two agents, with diagnostics. One reply of finch becomes HOSTILE."""
    folder = tmp_path_factory.mktemp("page")
    config = write(
        folder / "team.toml",
        steps=4,
        evaluation={"every": 2, "problems": 20, "samples": 1},
        diagnostics={"every": 2, "problems": 2, "samples": 4},
        checkpoint={"save": False},
    )
    code, _, err = hacrl("train", config, "--run", folder / "runs" / "team")
    assert code == 0, err
    publish_hostile(Pool(folder / "runs" / "team" / "pool"), step=3)
    (folder / "runs" / "old" / "pool").mkdir(parents=True)  # as of hacrl 0.1
    (folder / "runs" / "old" / "config.toml").write_text("steps = 2\n")
    return folder / "runs"


@pytest.fixture(scope="session")
def address(runs: Path) -> Iterator[str]:
    with serving(runs) as url:
        yield url


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        assert not os.environ.get("REQUIRE_CHROMIUM"), "REQUIRE_CHROMIUM is set, but there is none"
        pytest.skip("no Chromium found: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield found
        found.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A new tab. The test fails if the page raises, breaks its policy or asks another host."""
    context = browser.new_context(viewport={"width": WIDTHS[0], "height": 900})
    page = context.new_page()
    page.set_default_timeout(60_000)
    faults: list[str] = []
    hosts: set[str] = set()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda m: faults.append(m.text) if "Content Security" in m.text else None)
    page.on("request", lambda r: hosts.add(urlsplit(r.url).hostname) if "http" in r.url else None)
    yield page
    assert faults == []
    assert hosts <= {"127.0.0.1"}, hosts
    context.close()
