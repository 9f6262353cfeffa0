"""Members of a hub in this process: what the hub refuses them, and their pools."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hub_process import NAMES, HubProcess

from hacrl.owners.client import HubRefused
from hacrl.owners.connection import Sender
from hacrl.owners.pool import HubPool

MakeHub = Callable[..., HubProcess]


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(HubRefused) as found:
        call()
    return found.value.code


def raw(
    hub: HubProcess, headers: dict[str, str], body: bytes = b"", path: str = "/v1/state"
) -> str:
    """The code of the refusal of one request; "" if it is accepted."""
    method = "PUT" if body else "GET"
    answer = httpx.request(method, hub.url + path, content=body, headers=headers)
    return "" if answer.status_code == 200 else str(answer.json()["error"])


def sender(process: HubProcess, name: str = "ant", **fields: Any) -> Sender:
    team, key = process.team, process.keys["ant"]
    return Sender(**{"team": team.id, "hub": team.charter.hub, "name": name, "key": key} | fields)


def pools(hub: HubProcess, names: tuple[str, ...] = NAMES) -> dict[str, HubPool]:
    return {name: HubPool(hub.folder / name / "pool", hub.client(name)) for name in names}
