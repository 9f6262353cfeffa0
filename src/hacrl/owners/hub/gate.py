"""Who sent a request. The gate verifies the signature before anything of the body is read.

    Hacrl-Member: ant
    Hacrl-Time: 1790000000.25
    Hacrl-Nonce: 32 hexadecimal digits
    Hacrl-Body: sha256 of the body
    Hacrl-Signature: Ed25519, 128 hexadecimal digits

The signature covers team id, hub key, member, method, path with query, body, time and nonce
(`request_content`). A request is valid for WINDOW seconds around the hub's time, once. Nonces are in
memory: after a restart, requests that were signed before the start are refused.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from threading import Lock

from hacrl.owners.charter import TeamRecord
from hacrl.owners.hub.store import Refused
from hacrl.owners.signing import is_hex, request_content, verify

WINDOW = 120.0  # seconds that the clocks of member and hub may differ
HEADERS = ("member", "time", "nonce", "body", "signature")


class Buckets:
    """Limits how often each name may do something: `rate` times a second, `burst` times at once."""

    def __init__(self, rate: float, burst: float, most: int = 10_000) -> None:
        self.rate, self.burst, self.most = rate, burst, most
        self._levels: OrderedDict[object, tuple[float, float]] = OrderedDict()
        self._lock = Lock()

    def level(self, name: object, now: float) -> float:
        level, at = self._levels.get(name, (self.burst, now))
        return min(self.burst, level + max(0.0, now - at) * self.rate)

    def take(self, name: object, now: float) -> bool:
        """Take one; False if the bucket is empty."""
        with self._lock:
            level = self.level(name, now)
            if level >= 1:
                self._levels[name] = (level - 1, now)
                self._levels.move_to_end(name)
                if len(self._levels) > self.most:
                    self._levels.popitem(last=False)
            return level >= 1

    def empty(self, name: object, now: float) -> bool:
        return self.level(name, now) < 1


class Gate:
    """Verifies requests.

    Example: name = gate.verify("GET", "/v1/state", headers, address, team, open_step)
    """

    def __init__(self, hub: str, clock: Callable[[], float], rate: float = 100) -> None:
        self.hub, self.clock, self.started = hub, clock, clock()
        self.members = Buckets(rate, 4 * rate)
        self.failures = Buckets(10, 100)
        """By address and claimed member: too many failed requests are refused unread."""
        self._nonces: set[tuple[str, str]] = set()
        self._times: deque[tuple[float, tuple[str, str]]] = deque()

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
        keys = team.keys(member, step)
        if not keys:
            raise Refused(401, "member", f"no member {member[:64]!r} in this team")
        origin = (address, member)
        if self.failures.empty(origin, now):
            raise Refused(429, "rate", "too many requests with wrong signatures; wait a minute")
        try:
            signed_at = float(time)
        except ValueError:
            signed_at = float("nan")
        if not (is_hex(nonce, 16) and is_hex(body, 32) and abs(signed_at - now) < float("inf")):
            raise Refused(401, "headers", "the headers Hacrl-Time, -Nonce or -Body are malformed")
        parts = (team.id, self.hub, member, method, path, body, signed_at, nonce)
        content = request_content(*parts)
        if not any(verify(key, "request", content, signature) for key in keys):
            self.failures.take(origin, now)
            raise Refused(401, "signature", f"the request is not signed by {member!r}'s key")
        self._check_time(signed_at, now)
        if not self.members.take(member, now):
            raise Refused(429, "rate", f"more than {self.members.rate:g} requests a second")
        self._remember((member, nonce), now)
        return member

    def _check_time(self, signed_at: float, now: float) -> None:
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

    def _remember(self, use: tuple[str, str], now: float) -> None:
        """Refused if the nonce was used in the window before."""
        while self._times and self._times[0][0] < now:
            self._nonces.discard(self._times.popleft()[1])
        if use in self._nonces:
            raise Refused(401, "replay", "the request was sent before; sign again with a new nonce")
        self._nonces.add(use)
        self._times.append((now + 2 * WINDOW, use))
