"""Who sent a request. The gate verifies the signature before anything of the body is read.

    Hacrl-Member: ant
    Hacrl-Time: 1790000000.25
    Hacrl-Nonce: 32 hexadecimal digits
    Hacrl-Body: sha256 of the body
    Hacrl-Signature: Ed25519, 128 hexadecimal digits

The signature covers team id, hub key, member, method, path with query, body, time and nonce. A request
is valid for WINDOW seconds around the hub's time, once. Nonces are in memory: after a restart, requests
that were signed before the start are refused. A request of a member whose clock is ahead may be accepted
once more after a restart; repeated requests change nothing.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping

from hacrl.owners.charter import TeamRecord
from hacrl.owners.hub.store import Refused
from hacrl.owners.signing import REQUEST, Signed, is_hex

WINDOW = 120.0  # seconds that the clocks of member and hub may differ
RATE_WINDOW = 10.0  # seconds
MOST_REQUESTS = 1000  # of a member in RATE_WINDOW
MOST_FAILURES = 100  # of an address and claimed member in RATE_WINDOW
HEADERS = ("member", "time", "nonce", "body", "signature")


class Gate:
    """Verifies requests.

    Example: name = gate.verify("GET", "/v1/state", headers, address, team, open_step)
    """

    def __init__(self, hub: str, clock: Callable[[], float]) -> None:
        self.hub, self.clock, self.started = hub, clock, clock()
        self._counts: Counter[object] = Counter()
        self._counted_from = 0.0
        self._nonces: set[tuple[str, str]] = set()
        self._times: deque[tuple[float, tuple[str, str]]] = deque()

    def count(self, what: object, most: int, message: str, add: int = 1) -> None:
        """Count something; Refused if it happened `most` times already in this RATE_WINDOW."""
        now = self.clock()
        if not 0 <= now - self._counted_from < RATE_WINDOW:
            self._counts.clear()
            self._counted_from = now
        if self._counts[what] >= most:
            raise Refused(429, "rate", f"{message}; wait {RATE_WINDOW:.0f} seconds")
        self._counts[what] += add

    def verify(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        address: str,
        team: TeamRecord,
        step: int,
    ) -> str:
        """Return the member that sent the request; Refused if it is not valid. `step` is the open
        step: it decides which keys are valid."""
        now = self.clock()
        member, time, nonce, body, signature = (
            headers.get(f"hacrl-{name}", "")[:256] for name in HEADERS
        )
        if not (keys := team.keys(member, step)):
            raise Refused(401, "member", f"no member {member[:64]!r} in this team")
        failures = ((address, member), MOST_FAILURES, "too many requests with wrong signatures")
        self.count(*failures, add=0)
        try:
            signed_at = float(time)
        except ValueError:
            signed_at = float("nan")
        if not (is_hex(nonce, 16) and is_hex(body, 32) and abs(signed_at - now) < float("inf")):
            raise Refused(401, "headers", "the headers Hacrl-Time, -Nonce or -Body are malformed")
        values = (team.id, self.hub, member, method, path, body, signed_at, nonce)
        signed = Signed("request", dict(zip(REQUEST, values, strict=True)), signature)
        if not any(signed.valid(key) for key in keys):
            self.count(*failures)
            raise Refused(401, "signature", f"the request is not signed by {member!r}'s key")
        if abs(signed_at - now) > WINDOW:
            raise Refused(
                401,
                "clock",
                f"the request was signed at {signed_at:.0f}, the hub's time is {now:.0f}: they differ "
                f"by more than {WINDOW:.0f} seconds, set the clock",
            )
        if signed_at < self.started:
            raise Refused(
                401, "restarted", "the hub was restarted after this was signed; sign again"
            )
        self.count(member, MOST_REQUESTS, "too many requests")
        self._remember((member, nonce), now)
        return member

    def _remember(self, use: tuple[str, str], now: float) -> None:
        """Refused if the nonce was used in the window before."""
        while self._times and self._times[0][0] < now:
            self._nonces.discard(self._times.popleft()[1])
        if use in self._nonces:
            raise Refused(401, "replay", "the request was sent before; sign again with a new nonce")
        self._nonces.add(use)
        self._times.append((now + 2 * WINDOW, use))
