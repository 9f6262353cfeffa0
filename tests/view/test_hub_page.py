"""The page of a hub: a real hub, and what is not a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from cli_helpers import refused
from hub_process import HubProcess, free_port
from page_helpers import keep_shots, serving


@pytest.mark.page
def test_members_arrivals_and_changes(tab: Any, tmp_path: Path) -> None:
    """ant has arrived; cat is expelled; a batch of bee appears on the page when it arrives."""
    hub = HubProcess(tmp_path, steps=3)
    hub.start()
    try:
        publish(hub, "ant")
        change = hub.team.amend(
            hub.keys["founder"], kind="expel", member="cat", step=1, signer="founder"
        )
        httpx.post(f"{hub.url}/v1/amendments", content=change.encode()).raise_for_status()
        with serving(hub.url) as url:
            tab.goto(url)
            tab.get_by_text("step 1 of 3 is open").wait_for()
            assert "arrived" in tab.locator("tr", has_text="ant").first.inner_text()
            assert "waiting" in tab.locator("tr", has_text="bee").first.inner_text()
            assert "expelled, from step 2" in tab.locator("tr", has_text="cat").first.inner_text()
            keep_shots(tab, "hub")
            publish(hub, "bee")
            tab.locator("tr", has_text="bee").get_by_text("arrived").wait_for()
    finally:
        hub.kill()


def publish(hub: HubProcess, name: str) -> None:
    client = hub.client(name)
    client.put(hub.batch(client, 0))
    client.close()


def test_what_is_not_a_hub() -> None:
    assert "the hub does not answer" in refused("view", f"http://127.0.0.1:{free_port()}")
    assert "--export needs" not in refused("view", "http://127.0.0.1:1", "--export", "x.html")
