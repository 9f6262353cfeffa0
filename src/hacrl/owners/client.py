"""A member's connection to the hub: signed requests, and verification of everything that comes back.

    FOLDER/team.json                   the signed charter; a hub with another one is refused
    FOLDER/amendments.json             the verified chain of amendments
    FOLDER/receipts/step-000003.json   the hub's signature on this member's batch or skip
    FOLDER/snapshots/step-000003.json  the hub's signed snapshots, each verified against the one before
    FOLDER/proofs/*.json               two records that contradict each other, with their signatures

While the hub cannot be reached, requests are repeated (connection.py).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacrl.errors import RunStopped, UserError
from hacrl.owners.batch import Batch, Envelope, read_envelope, unpack
from hacrl.owners.charter import TeamRecord
from hacrl.owners.connection import POLL, Connection, HubRefused, Sender
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
        charter, chain = _fetch_records(connection, team)
        return TeamRecord.verified(charter, chain)
    except Malformed as error:
        raise UserError(f"{connection.url}: {error}") from error


def _fetch_records(connection: Connection, team: str | None) -> tuple[Signed, list[Signed]]:
    """The charter and its amendments, not verified; UserError if they are not of the team."""
    charter = Signed.decode("charter", connection.send("GET", "/v1/charter"))
    if team not in (None, charter.digest):
        raise UserError(
            f"{connection.url} is the hub of the team {charter.digest}, not of {team}: check the URL, "
            "the team id and the run directory"
        )
    return charter, _amendments(connection.send("GET", "/v1/amendments"))


def _amendments(data: bytes) -> list[Signed]:
    values = parse(data)
    if not isinstance(values, list):
        raise Malformed("the amendments are not a list")
    return [Signed.of("amendment", value) for value in values]


class HubClient:
    """The connection of one member.

    Example: client = HubClient(Connection(url), "ant", Key.read(path), folder); client.put(batch)
    """

    def __init__(self, connection: Connection, name: str, key: Key, folder: Path) -> None:
        self.connection, self.name, self.folder = connection, name, folder
        self.url, self.note = connection.url, connection.note
        stored, chain = folder / "team.json", folder / "amendments.json"
        if stored.exists():
            known = _amendments(chain.read_bytes()) if chain.exists() else []
            self.team = TeamRecord.verified(Signed.decode("charter", stored.read_bytes()), known)
            self.refresh()
        else:
            self.team = fetch_team(connection)
            write_atomic(stored, self.team.signed.encode())
            self._store_chain()
        self.key = key.speaking(self.team.protocol)
        if not any(key.public in self.team.keys(name, step) for step in (0, 10**9)):
            raise UserError(
                f"{key.public} is not the key of {name!r} in the team {self.team.charter.name!r}: check "
                "--as and --key, or ask the founder for an amendment"
            )

    def refresh(self) -> None:
        """Fetch new amendments and verify that they continue the known chain."""
        known, team = self.team.chain, self.team
        try:
            _, found = _fetch_records(self.connection, team.id)
            for number, (mine, theirs) in enumerate(zip(known, found, strict=False)):
                if mine.digest != theirs.digest:
                    TeamRecord(team.signed, team.charter, known[:number]).amended(theirs)  # valid
                    self._contradiction("amendments", mine, theirs, "two amendments of one number")
            if len(found) < len(known):
                raise UserError(
                    f"{self.url}: the hub lacks amendments that this member has, so it was restored "
                    "from an old backup: restore a newer one, or sign the same amendments again"
                )
            for amendment in found[len(known) :]:
                team = team.amended(amendment)
        except Malformed as error:
            raise UserError(f"{self.url}: {error}") from error
        if len(found) > len(known):
            self.team = team
            self._store_chain()

    def _store_chain(self) -> None:
        chain = canonical([a.plain() for a in self.team.chain])
        write_atomic(self.folder / "amendments.json", chain)

    # ------------------------------------------------------------ publishing

    def put(self, batch: Batch) -> Signed:
        """Publish a batch; return the verified receipt. The same batch may be sent again."""
        sent, step = batch.envelope.content, batch.envelope.content["step"]
        receipt = self._receipt(f"/v1/steps/{step}/batch", batch.encode())
        names = ("team", "agent", "step", "outcomes", "texts")
        if any(receipt.content.get(name) != sent[name] for name in names):
            raise UserError(f"{self.url}: the receipt does not match the batch that was sent")
        self._store("receipts", step, receipt)
        return receipt

    def sent(self, step: int) -> bool:
        """Whether the hub has receipted this member's batch of a step."""
        return self._file("receipts", step).exists()

    def skip(self, step: int) -> Signed:
        """Skip a step: the team does not wait for this member, and the member may read the step."""
        content = {"team": self.team.id, "agent": self.name, "step": step}
        return self._receipt(f"/v1/steps/{step}/skip", self.key.sign("skip", content).encode())

    def _receipt(self, path: str, body: bytes) -> Signed:
        receipt = Signed.decode("receipt", self._send("PUT", path, body))
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

    def snapshot(self, step: int) -> Signed:
        """The verified snapshot of a step, after those before it. Returns when the step is closed."""
        head = self.head
        for at in range(head.content["step"] + 1 if head else 0, step + 1):
            self._accept(self._fetch(at), at)
        found = self.known(step)
        assert found is not None
        return found

    def _fetch(self, step: int) -> Signed:
        while True:
            try:
                data = self._send("GET", f"/v1/steps/{step}/snapshot?wait={POLL:g}")
                return Signed.decode("snapshot", data)
            except HubRefused as refused:
                if refused.code != "open":
                    raise

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
            self._contradiction(f"fork-step-{step:06d}", before, found, "two snapshots of the hub")
        receipt = self._file("receipts", step)
        mine = Signed.decode("receipt", receipt.read_bytes()) if receipt.exists() else None
        listed = content["batches"].get(self.name, {})
        if (
            mine
            and not mine.content["late"]
            and any(listed.get(part) != mine.content[part] for part in ("outcomes", "texts"))
        ):
            self._contradiction(
                f"censored-step-{step:06d}", mine, found, "snapshot and receipt of the hub"
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
            try:
                signed = Signed.of("envelope", value["envelope"])
                envelope = read_envelope(signed)
                signed.check(roster[envelope.agent].key, "envelope")
                if (envelope.team, envelope.step) != (team.id, step):
                    raise Malformed("of another team or step")
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
            self._contradiction(f"fork-step-{step:06d}", mine, theirs, "two snapshots of the hub")

    def part(self, step: int, digest: str) -> bytes:
        """The lines of a part, verified against its digest."""
        data = self._send("GET", f"/v1/steps/{step}/parts/{digest}")
        return unpack(data, self.team.charter.max_batch_bytes, digest)

    def data(self, name: str) -> bytes:
        """A data file of the task, verified against the charter."""
        data = self._send("GET", f"/v1/data/{name}")
        if sha256(data) != self.team.data.get(name):
            raise UserError(
                f"{self.url}: the hub's copy of {name} does not have the sha256 of the charter: copy "
                "the right file into the folder of your config"
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
            f"{self.url}: {what} contradict each other. Both are in {path}: show them to the other "
            "members before anyone continues"
        )
