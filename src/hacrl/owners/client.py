"""A member's connection to the hub: signed requests, and verification of everything that comes back.

    FOLDER/team.json                   the signed charter; a hub with another one is refused
    FOLDER/amendments.json             the verified chain of amendments
    FOLDER/receipts/step-000003.json   the hub's signature on this member's batch or skip
    FOLDER/snapshots/step-000003.json  the hub's signed snapshots, each verified against the one before
    FOLDER/proofs/*.json               two records that contradict each other, with their signatures

While the hub cannot be reached, requests are repeated for `patience` seconds.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacrl.errors import RunStopped, UserError
from hacrl.owners.batch import Batch, Envelope, read_envelope, unpack
from hacrl.owners.charter import TeamRecord
from hacrl.owners.connection import PATIENCE, POLL, Connection, HubRefused, Sender
from hacrl.owners.signing import Key, Malformed, Signed, canonical, parse, sha256
from hacrl.store.files import write_atomic


class Contradiction(RunStopped):
    """The hub, or a member, signed two things that cannot both be true. The proof is in a file."""


@dataclass(frozen=True)
class Listed:
    """A verified envelope of a closed step."""

    envelope: Envelope
    signed: Signed
    late: bool


def newest_snapshot(folder: Path) -> Signed | None:
    """The newest verified snapshot in a member's folder."""
    files = sorted((folder / "snapshots").glob("step-*.json"))
    return Signed.decode("snapshot", files[-1].read_bytes()) if files else None


def chain_head(folder: Path) -> str:
    """The end of the member's chain of snapshots. Members compare it outside of hacrl: this is the only
    way to detect a hub that shows each of them a different chain."""
    head = newest_snapshot(folder)
    step, digest = (head.content["step"] + 1, head.digest) if head else (0, "none yet")
    return f"chain head after step {step}: {digest}"


def fetch_team(connection: Connection, team: str | None = None) -> TeamRecord:
    """Fetch and verify charter and amendments; UserError if they are not of the team."""
    try:
        charter = Signed.decode("charter", connection.send("GET", "/v1/charter"))
        record = TeamRecord.verified(charter, _chain(connection))
    except Malformed as error:
        raise UserError(f"{connection.url}: {error}") from error
    if team not in (None, record.id):
        raise UserError(
            f"{connection.url} is the hub of the team {record.id}, not of {team}: ask the founder for "
            "the URL and the team id"
        )
    return record


def _chain(connection: Connection) -> list[Signed]:
    values = parse(connection.send("GET", "/v1/amendments"))
    if not isinstance(values, list):
        raise Malformed("the amendments are not a list")
    return [Signed.of("amendment", value) for value in values]


class HubClient:
    """The connection of one member.

    Example: client = HubClient(url, "ant", Key.read(path), folder); client.put(batch)
    """

    def __init__(
        self,
        url: str,
        name: str,
        key: Key,
        folder: Path,
        note: Callable[[str], None] = lambda text: None,
        patience: float = PATIENCE,
        verify: str | bool = True,
    ) -> None:
        """`verify` may be a file with the certificate of a hub that signs its own."""
        self.connection = Connection(url, note, patience, verify)
        self.url, self.name, self.folder, self.note = self.connection.url, name, folder, note
        self.team = self._open_team()
        self.key = key.speaking(self.team.protocol)
        self.refresh()
        if not any(key.public in self.team.keys(name, step) for step in (0, 10**9)):
            raise UserError(
                f"{key.public} is not the key of {name!r} in the team {self.team.charter.name!r}: check "
                "--as and --key, or ask the founder for an amendment"
            )

    def close(self) -> None:
        self.connection.http.close()

    # ------------------------------------------------------------ the team

    def _open_team(self) -> TeamRecord:
        """The team of this folder; at first that of the hub."""
        stored, chain = self.folder / "team.json", self.folder / "amendments.json"
        offered = Signed.decode("charter", self.connection.send("GET", "/v1/charter"))
        if not stored.exists():
            TeamRecord.verified(offered)
            write_atomic(stored, offered.encode())
        known = Signed.decode("charter", stored.read_bytes())
        if known.digest != offered.digest:
            raise UserError(
                f"{self.url} is the hub of the team {offered.digest}, but {self.folder} belongs to "
                f"{known.digest}: check the URL, or choose another run directory"
            )
        records = parse(chain.read_bytes()) if chain.exists() else []
        return TeamRecord.verified(known, [Signed.of("amendment", r) for r in records])

    def refresh(self) -> None:
        """Fetch new amendments and verify that they continue the known chain."""
        found = _chain(self.connection)
        known = [a.digest for a in self.team.chain]
        if [a.digest for a in found[: len(known)]] != known:
            self._contradiction(
                "amendments",
                self.team.chain[-1],
                found[-1] if found else None,
                "chain of amendments",
            )
        team = self.team
        for signed in found[len(known) :]:
            team = team.amended(signed)
        if team is not self.team:
            write_atomic(
                self.folder / "amendments.json", canonical([a.plain() for a in team.chain])
            )
            self.team = team

    # ------------------------------------------------------------ publishing

    def put(self, batch: Batch) -> Signed:
        """Publish a batch; return the verified receipt. The same batch may be sent again."""
        envelope = read_envelope(batch.envelope)
        data = self._send("PUT", f"/v1/steps/{envelope.step}/batch", batch.encode())
        receipt = Signed.decode("receipt", data)
        content = receipt.check(self.team.charter.hub, "receipt")
        names = ("team", "agent", "step", "outcomes", "texts")
        if any(content.get(name) != getattr(envelope, name) for name in names):
            raise UserError(f"{self.url}: the receipt does not match the batch that was sent")
        self._store("receipts", envelope.step, receipt)
        return receipt

    def sent(self, step: int) -> bool:
        """Whether the hub has receipted this member's batch of a step."""
        return self._file("receipts", step).exists()

    def skip(self, step: int) -> Signed:
        """Skip a step: the team does not wait for this member, and the member may read the step."""
        content = {"team": self.team.id, "agent": self.name, "step": step}
        data = self._send("PUT", f"/v1/steps/{step}/skip", self.key.sign("skip", content).encode())
        receipt = Signed.decode("receipt", data)
        receipt.check(self.team.charter.hub, "receipt")
        return receipt

    # ------------------------------------------------------------ snapshots

    @property
    def head(self) -> Signed | None:
        """The newest verified snapshot."""
        return newest_snapshot(self.folder)

    def known(self, step: int) -> Signed | None:
        """The verified snapshot of a step, from the folder."""
        path = self._file("snapshots", step)
        return Signed.decode("snapshot", path.read_bytes()) if path.exists() else None

    def state(self) -> dict[str, Any]:
        """Open step, members that arrived, time of the hub."""
        found: dict[str, Any] = json.loads(self._send("GET", "/v1/state"))
        return found

    def snapshot(self, step: int, wait: bool = True) -> Signed | None:
        """The verified snapshot of a step, after those before it. With `wait` it returns when the step
        is closed, else None if it is open."""
        head = self.head
        for at in range(head.content["step"] + 1 if head else 0, step + 1):
            if (found := self._fetch(at, wait)) is None:
                return None
            self._accept(found, at)
        return self.known(step)

    def _fetch(self, step: int, wait: bool) -> Signed | None:
        while True:
            try:
                path = f"/v1/steps/{step}/snapshot" + (f"?wait={POLL:g}" if wait else "")
                return Signed.decode("snapshot", self._send("GET", path))
            except HubRefused as refused:
                if refused.code != "open":
                    raise
            if not wait:
                return None

    def _accept(self, found: Signed, step: int) -> None:
        """Verify a snapshot against the chain and the receipt, and store it."""
        content = found.check(self.team.charter.hub, f"snapshot of step {step + 1}")
        before = self.known(step - 1) if step else None
        if content.get("amendments") != self.team.head:
            self.refresh()
        team = self.team.until(str(content.get("amendments")))
        if (content.get("team"), content.get("step")) != (team.id, step):
            raise Malformed(f"the hub sent another snapshot than that of step {step + 1}")
        if not set(content["batches"]) <= set(team.roster(step)):
            raise Malformed(f"the snapshot of step {step + 1} has batches of strangers")
        if content.get("previous") != (before.digest if before else team.id):
            self._contradiction(f"fork-step-{step:06d}", before, found, "chain of snapshots")
        receipt = self._file("receipts", step)
        mine = Signed.decode("receipt", receipt.read_bytes()) if receipt.exists() else None
        if mine is not None and not mine.content["late"]:
            listed = content["batches"].get(self.name, {})
            if any(listed.get(part) != mine.content[part] for part in ("outcomes", "texts")):
                self._contradiction(
                    f"censored-step-{step:06d}", mine, found, "snapshot and receipt"
                )
        self._store("snapshots", step, found)

    # ------------------------------------------------------------ batches of others

    def envelopes(self, step: int) -> list[Listed]:
        """The verified envelopes of a closed step, also those of late batches. Envelopes that are not
        valid are left out. A head that contradicts this member's chain proves a fork of the hub."""
        header = self.known(step)
        assert header is not None, f"step {step + 1}: read the snapshot first"
        team = self.team.until(header.content["amendments"])
        roster, found = team.roster(step), []
        for value in parse(self._send("GET", f"/v1/steps/{step}/envelopes")):
            signed = Signed.of("envelope", value["envelope"])
            try:
                envelope = read_envelope(signed)
                author = roster[envelope.agent]
                if (envelope.team, envelope.step) != (team.id, step) or not signed.valid(
                    author.key
                ):
                    raise Malformed("of another team, step or key")
            except (Malformed, KeyError):
                self.note(f"step {step + 1}: an envelope is not valid and is left out")
                continue
            self._compare_head(envelope)
            listed = header.content["batches"].get(envelope.agent)
            if listed is None or listed["envelope"] == signed.digest:
                found.append(Listed(envelope, signed, listed is None))
        return found

    def _compare_head(self, envelope: Envelope) -> None:
        """Compare the snapshot that another member has seen with this member's."""
        if envelope.head is None:
            return
        theirs = Signed.of("snapshot", envelope.head)
        if not theirs.valid(self.team.charter.hub):
            self.note(f"{envelope.agent!r} names a snapshot that the hub did not sign")
            return
        step = theirs.content["step"]
        mine = self.known(step)
        if mine is not None and mine.content != theirs.content:
            self._contradiction(f"fork-step-{step:06d}", mine, theirs, "snapshots of one step")

    def part(self, step: int, digest: str) -> bytes:
        """The lines of a part, verified against its digest."""
        data = self._send("GET", f"/v1/steps/{step}/parts/{digest}")
        return unpack(data, self.team.charter.max_batch_bytes, digest)

    def data(self, name: str) -> bytes:
        """A data file of the task, verified against the charter."""
        data = self._send("GET", f"/v1/data/{name}")
        if sha256(data) != self.team.data.get(name):
            raise UserError(
                f"{self.url}: the hub's copy of {name} does not have the sha256 of the charter, "
                f"{self.team.data.get(name)}: ask the founder to restore it, or copy the right file "
                "into the folder of your config"
            )
        return data

    # ------------------------------------------------------------ requests and files

    def _send(self, method: str, path: str, body: bytes = b"") -> bytes:
        sender = Sender(self.team.id, self.team.charter.hub, self.name, self.key)
        return self.connection.send(method, path, body, sender)

    def _file(self, kind: str, step: int) -> Path:
        return self.folder / kind / f"step-{step:06d}.json"

    def _store(self, kind: str, step: int, signed: Signed) -> None:
        write_atomic(self._file(kind, step), signed.encode())

    def _contradiction(self, name: str, one: Signed | None, two: Signed | None, what: str) -> None:
        """Write both records to a file and stop."""
        path = self.folder / "proofs" / f"{name}.json"
        both = [{"kind": s.kind, **s.plain()} for s in (one, two) if s]
        write_atomic(path, canonical({"hub": self.team.charter.hub, "records": both}))
        raise Contradiction(
            f"{self.url}: two records that the hub signed contradict each other ({what}). The proof is "
            f"{path}: show it to the other members before anyone continues"
        )
