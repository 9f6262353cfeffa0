"""HTTP requests to a hub: signed, repeated while the hub is down, with a limit on answers."""

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hacrl.errors import UserError, first_line
from hacrl.owners.signing import REQUEST, Key, sha256
from hacrl.stopping import check

try:
    import httpx
except ImportError as error:
    raise UserError(f"this needs more packages: pip install 'hacrl[owners]' ({error})") from error

PATIENCE = 3600.0  # seconds to wait for a hub that cannot be reached
POLL = 5.0  # seconds that the hub holds a request for a snapshot that does not exist yet
MOST = 1 << 30  # largest answer in bytes
_AGAIN = {"rate", "busy", "database", "restarted", "amended", "incomplete"}
"""Codes of refusals after which the request is signed and sent again."""


class HubRefused(UserError):
    """The hub refused a request. `code` says why (hub/store.py)."""

    def __init__(self, code: str, message: str) -> None:
        if code in ("signature", "member"):
            message += ". Check --as and --key; a rotated key counts from its step on"
        super().__init__(f"the hub refused the request: {message}")
        self.code = code


@dataclass(frozen=True)
class Sender:
    """Who signs requests, and for which team and hub."""

    team: str
    hub: str
    name: str
    key: Key

    def headers(self, method: str, path: str, body: bytes) -> dict[str, str]:
        """The headers that the hub verifies (hub/gate.py)."""
        now, nonce, digest = time.time(), secrets.token_hex(16), sha256(body)
        values = (self.team, self.hub, self.name, method, path, digest, now, nonce)
        signed = self.key.sign("request", dict(zip(REQUEST, values, strict=True)))
        return {
            "Hacrl-Member": self.name,
            "Hacrl-Time": repr(now),
            "Hacrl-Nonce": nonce,
            "Hacrl-Body": digest,
            "Hacrl-Signature": signed.signature,
        }


@dataclass
class Connection:
    """Sends requests to one hub.

    Example: Connection("https://hub.example.org").send("GET", "/v1/charter")
    """

    url: str
    note: Callable[[str], None] = lambda text: None
    patience: float = 0.0  # seconds to repeat a request while the hub cannot be reached
    verify: str | bool = True  # a file with the certificate of a hub that signs its own
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        timeout = httpx.Timeout(POLL + 30, connect=10)
        self.http = httpx.Client(timeout=timeout, verify=self.verify)

    def send(
        self, method: str, path: str, body: bytes = b"", sender: Sender | None = None
    ) -> bytes:
        """Return the body of the answer; HubRefused if the hub refuses. Each repetition is signed
        again."""
        began, pause, noted = time.monotonic(), 0.2, False
        while True:
            check()
            headers = sender.headers(method, path, body) if sender else {}
            try:
                status, answer = self._once(method, path, body, headers)
                if status == 200:
                    if noted:
                        self.note("the hub answers again")
                    return answer
                code, reason = _refusal(status, answer)
                if code not in _AGAIN and status < 500:
                    raise HubRefused(code, reason)
            except httpx.InvalidURL as error:
                raise UserError(f"{self.url!r} is not the URL of a hub ({error})") from error
            except httpx.TransportError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    raise UserError(
                        f"{self.url}: {first_line(error)}. If the hub signs its own certificate, give "
                        "it with --certificate FILE"
                    ) from error
                reason = f"{self.url} does not answer ({first_line(error)})"
            if time.monotonic() - began >= self.patience:
                raise UserError(f"{reason}. Nothing is lost: start again when the hub is back")
            if not noted:
                self.note(f"{reason}; waiting for the hub")
                noted = True
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _once(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        """Status and body of one request."""
        url = self.url + path
        with self.http.stream(method, url, content=body, headers=headers) as answer:
            pieces, size = [], 0
            for piece in answer.iter_bytes():
                pieces.append(piece)
                size += len(piece)
                if size > MOST:
                    raise UserError(f"{self.url}: a response is longer than {MOST} bytes")
            return answer.status_code, b"".join(pieces)


def _refusal(status: int, answer: bytes) -> tuple[str, str]:
    """(code, sentence) of an answer that is not 200."""
    try:
        value = json.loads(answer[:10_000])
        return str(value["error"])[:40], str(value["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return "status", f"status {status}"
