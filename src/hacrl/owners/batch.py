"""What a member publishes in a step: outcomes, texts and the envelope that its author signs.

    outcomes   every row without its text: problem, index, claimed verdict (Finish.WITHHELD)
    texts      the rows that the member publishes with their text

Both parts are trajectories as lines of canonical JSON (store/codec.py), ordered by problem and index.
A part is named by the sha256 of its uncompressed lines; compression is only storage and transport. On
the way to the hub a batch is

    {"envelope": {...}, "outcomes": BYTES, "texts": BYTES}\\n outcomes.gz texts.gz
"""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hacrl.owners.signing import Content, Hex64, Key, Malformed, Signed, canonical, parse, sha256
from hacrl.store.codec import TRAJECTORY
from hacrl.trust import Level
from hacrl.trust.publish import has_text, withheld, without_details
from hacrl.types import Trajectory

_LEVEL = 1  # of gzip, as in store/pool.py
_PIECE = 1 << 16  # bytes that are decompressed at a time


class Envelope(BaseModel):
    """Content of the signed envelope of a batch."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    team: Hex64
    agent: str
    step: int = Field(ge=0)
    policy_version: int = Field(ge=0)
    outcomes: Hex64
    texts: Hex64
    rows: int = Field(ge=0)
    """Number of outcomes."""
    published: int = Field(ge=0)
    """Number of texts."""
    head: dict[str, Any] | None
    """The newest snapshot that the author has seen, signed by the hub; None before the first. A hub
    that shows members different snapshots is found when one reads the other's envelope."""

    @property
    def same(self) -> tuple[Any, ...]:
        """What must not differ between two envelopes of one step."""
        return (self.outcomes, self.texts, self.rows, self.published, self.policy_version)


def read_envelope(signed: Signed) -> Envelope:
    """The content of an envelope whose signature is not verified yet."""
    try:
        return Envelope.model_validate(signed.content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise Malformed(f"envelope: field {first['loc']}: {first['msg']}") from error


@dataclass(frozen=True)
class Batch:
    """A signed batch.

    Example: Batch.build(key, team_id, "ant", 3, trajectories, level="all", head=None)
    """

    envelope: Signed
    outcomes: bytes  # lines
    texts: bytes

    @classmethod
    def build(
        cls,
        key: Key,
        team: str,
        agent: str,
        step: int,
        trajectories: Sequence[Trajectory],
        level: Level,
        head: Signed | None,
    ) -> Batch:
        """Split an agent's trajectories of a step into outcomes and texts, and sign the envelope."""
        rows = sorted(trajectories, key=lambda t: (t.problem_id, t.index))
        for row in rows:
            assert (row.agent, row.step) == (agent, step), row.key
        outcomes = _lines(withheld(t) for t in rows if level != "nothing")
        texts = _lines(t for t in rows if has_text(t, level))
        content: Content = {
            "team": team,
            "agent": agent,
            "step": step,
            "policy_version": max((t.policy_version for t in rows), default=0),
            "outcomes": sha256(outcomes),
            "texts": sha256(texts),
            "rows": outcomes.count(b"\n"),
            "published": texts.count(b"\n"),
            "head": head.plain() if head else None,
        }
        return cls(key.sign("envelope", content), outcomes, texts)

    def encode(self) -> bytes:
        """The bytes that are sent to the hub."""
        parts = [gzip.compress(part, _LEVEL, mtime=0) for part in (self.outcomes, self.texts)]
        sizes = {"outcomes": len(parts[0]), "texts": len(parts[1])}
        return canonical({"envelope": self.envelope.plain(), **sizes}) + b"\n" + b"".join(parts)


def _lines(rows: Iterable[Trajectory]) -> bytes:
    return b"".join(TRAJECTORY.encode(without_details(row)) + b"\n" for row in rows)


@dataclass(frozen=True)
class Layout:
    """The first line of a sent batch."""

    signed: Signed
    envelope: Envelope
    sizes: tuple[int, int]  # compressed bytes of outcomes and texts


def read_layout(line: bytes) -> Layout:
    """Parse the first line, without its line break."""
    value = parse(line)
    if not isinstance(value, dict) or set(value) != {"envelope", "outcomes", "texts"}:
        raise Malformed("the first line must have the keys envelope, outcomes and texts")
    sizes = (value["outcomes"], value["texts"])
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise Malformed("outcomes and texts must be numbers of bytes")
    signed = Signed.of("envelope", value["envelope"])
    return Layout(signed, read_envelope(signed), sizes)


def pieces(compressed: bytes, most: int) -> Iterator[bytes]:
    """Decompress a part in pieces; Malformed unless it is one gzip member of at most `most` bytes, in
    whole lines."""
    stream, file = zlib.decompressobj(wbits=31), io.BytesIO(compressed)
    size, last = 0, b"\n"
    try:
        while not stream.eof:
            data = stream.unconsumed_tail or file.read(_PIECE)
            piece = stream.decompress(data, _PIECE)
            if not (data or piece or stream.eof):
                raise Malformed("the compressed part is incomplete")
            size, last = size + len(piece), piece[-1:] or last
            if size > most:
                raise Malformed(f"the part is longer than {most} bytes")
            yield piece
    except zlib.error as error:
        raise Malformed("the part is not gzip") from error
    if stream.unused_data or file.read(1):
        raise Malformed("bytes follow the compressed part")
    if last != b"\n":
        raise Malformed("the last line is incomplete")


def unpack(compressed: bytes, most: int, digest: str) -> bytes:
    """The lines of a part; Malformed unless they have this digest."""
    lines = b"".join(pieces(compressed, most))
    if sha256(lines) != digest:
        raise Malformed(f"the part does not have the sha256 {digest[:16]}...")
    return lines


def measure(compressed: bytes, most: int) -> tuple[str, int, int]:
    """(digest, rows, bytes) of a part, without keeping its lines in memory."""
    digest, rows, size = hashlib.sha256(), 0, 0
    for piece in pieces(compressed, most):
        digest.update(piece)
        rows += piece.count(b"\n")
        size += len(piece)
    return digest.hexdigest(), rows, size
