"""The public state of a hub: its team, who has arrived in the open step, changes of the team, proofs.

Only addresses that the hub answers to anyone are read. A hub is untrusted: every value is checked for
its type, and the page shows texts as texts.
"""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from hacrl.errors import UserError, first_line

SECONDS = 10.0
MOST_BYTES = 8 << 20
EVERY = 2.0
"""Seconds for which an answer of the hub is kept."""
_PROOFS = re.compile(r"^hacrl_hub_proofs (\d+)$", re.MULTILINE)


class HubSource:
    """The data of a hub's page.

    Example: HubSource("https://hub.example:8700").calls["hub"]({})
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._lock = threading.Lock()
        self._kept: tuple[float, dict[str, Any]] = (0.0, {})
        self.calls: dict[str, Callable[[Mapping[str, str]], Any]] = {
            "start": lambda query: {"kind": "hub", "id": None},
            "hub": lambda query: self.state(),
        }
        self.state()

    def pulse(self, query: Mapping[str, str]) -> Any:
        state = self.state()
        return {"version": [state["open"], state["arrived"], len(state["amendments"])]}

    def state(self) -> dict[str, Any]:
        """Everything on the page. A UserError if the hub does not answer, or not like a hub."""
        with self._lock:
            if time.monotonic() >= self._kept[0]:
                self._kept = (time.monotonic() + EVERY, self._read())
            return self._kept[1]

    def _read(self) -> dict[str, Any]:
        try:
            health = json.loads(self._get("/health"))
            charter = json.loads(self._get("/v1/charter"))["content"]
            chain = [record["content"] for record in json.loads(self._get("/v1/amendments"))]
            members = {m["name"]: _member(m) for m in charter["members"]}
            now = int(health["open"])
            return {
                "amendments": [_apply(members, change, now) for change in chain],
                "url": self.url,
                "name": str(charter["name"]),
                "team": str(health["team"]),
                "open": now + 1,
                "steps": int(health["steps"]),
                "arrived": sorted(str(name) for name in health.get("arrived", [])),
                "deadline": charter.get("deadline"),
                "members": list(members.values()),
                "proofs": sum(map(int, _PROOFS.findall(self._get("/metrics")))),
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.url} is not a hacrl hub ({error!r})") from error

    def _get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(self.url + path, timeout=SECONDS) as answer:
                data: bytes = answer.read(MOST_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or first_line(error)
            raise UserError(
                f"{self.url}: the hub does not answer ({reason}); check the address"
            ) from error
        if len(data) > MOST_BYTES:
            raise UserError(f"{self.url}{path}: more than {MOST_BYTES} bytes; this is not a hub")
        return data.decode()


def _member(found: Mapping[str, Any], step: int = 0) -> dict[str, Any]:
    name, key, publish = found["name"], found["key"], found.get("publish", "all")
    texts = {"name": str(name), "key": str(key), "publish": str(publish)}
    return {**texts, "state": "member", "since": step + 1}


def _apply(members: dict[str, Any], change: Mapping[str, Any], now: int) -> dict[str, Any]:
    """Change the list of members by one amendment and return the amendment; one that counts later is
    announced."""
    found = {key: str(change.get(key, "")) for key in ("kind", "member", "signer")}
    name, kind, step = found["member"], found["kind"], int(change["step"])
    if kind == "join":
        members[name] = _member({**change, "name": name}, step)
        if step > now:
            members[name]["state"] = f"joins in step {step + 1}"
    elif kind == "rotate":
        if step <= now:
            members[name]["key"] = str(change["key"])
    else:
        past = {"leave": "left", "expel": "expelled"}.get(kind, kind)
        members[name]["state"] = past + ("" if step <= now else f", from step {step + 1}")
    return {**found, "number": int(change["number"]) + 1, "step": step + 1}
