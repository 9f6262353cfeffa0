"""Canonical JSON, Ed25519 keys and signed records.

A signature covers the bytes

    hacrl-KIND-v1\\n{canonical JSON}

with the protocol version of the team, which its charter names. hacrl supports its own protocol version
and the one before, so members and hub may be one version apart. KIND is request, envelope, skip,
snapshot, charter, amendment or receipt: a signature of one kind is never valid for another.
Canonical JSON has sorted keys, no spaces, UTF-8 and finite numbers: equal values have equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hacrl.errors import UserError
from hacrl.store.files import write_atomic

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )
except ImportError as error:
    raise UserError(
        f"keys and hubs need more packages: pip install 'hacrl[owners]' ({error})"
    ) from error

PROTOCOL = 1  # version of the records and of the hub's endpoints
SUPPORTED = tuple(version for version in (PROTOCOL, PROTOCOL - 1) if version)

REQUEST = ("team", "hub", "member", "method", "path", "body", "time", "nonce")
"""What the signature of a request covers. The path includes the query, the body is its sha256."""

Content = dict[str, Any]
Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A sha256 or a public key."""


class Malformed(UserError):
    """Data from another party that is not valid."""


def canonical(value: Any) -> bytes:
    """Canonical JSON of plain data. ValueError for anything that JSON cannot represent exactly.

    Example: canonical({"b": 1, "a": ["x"]}) == b'{"a":["x"],"b":1}'
    """
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()  # UnicodeEncodeError, a ValueError, for a lone surrogate


def parse(data: bytes) -> Any:
    """Parse canonical JSON of someone else; Malformed for any other spelling, so that each value has
    one form in bytes."""
    try:
        value = json.loads(data.decode())
        same = canonical(value) == data
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {str(error)[:100]}") from error
    if not same:
        raise Malformed("not canonical JSON: sorted keys, no spaces, no key twice")
    return value


def sha256(data: bytes) -> str:
    """The digest in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def is_hex(value: Any, size: int) -> bool:
    """Whether the value is lower-case hexadecimal text of `size` bytes."""
    return isinstance(value, str) and bool(re.fullmatch(f"[0-9a-f]{{{2 * size}}}", value))


def signed_bytes(kind: str, content: Content, protocol: int = PROTOCOL) -> bytes:
    """The bytes that a signature of this kind covers."""
    return f"hacrl-{kind}-v{protocol}\n".encode() + canonical(content)


@dataclass(frozen=True)
class Signed:
    """A record and its signature.

    Example: Signed.decode("charter", data).check(founder, "the charter")
    """

    kind: str
    content: Content
    signature: str

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON of the content."""
        return sha256(canonical(self.content))

    def plain(self) -> Content:
        return {"content": self.content, "signature": self.signature}

    def encode(self) -> bytes:
        """One line of canonical JSON, without the line break."""
        return canonical(self.plain())

    @classmethod
    def decode(cls, kind: str, data: bytes) -> Signed:
        return cls.of(kind, parse(data))

    @classmethod
    def of(cls, kind: str, value: Any) -> Signed:
        """The record in parsed JSON. The signature is not verified."""
        if not isinstance(value, dict) or set(value) != {"content", "signature"}:
            raise Malformed(f"{kind}: must be an object with the keys content and signature")
        content, signature = value["content"], value["signature"]
        if not isinstance(content, dict) or not is_hex(signature, 64):
            raise Malformed(f"{kind}: content must be an object, signature 128 hexadecimal digits")
        return cls(kind, content, signature)

    def valid(self, public: str) -> bool:
        """Whether the owner of the public key signed this, in a supported protocol version."""
        if not (is_hex(public, 32) and is_hex(self.signature, 64)):
            return False
        for protocol in SUPPORTED:
            with suppress(InvalidSignature, ValueError):
                key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
                data = signed_bytes(self.kind, self.content, protocol)
                key.verify(bytes.fromhex(self.signature), data)
                return True
        return False

    def check(self, public: str, what: str) -> Content:
        """Return the content; Malformed if the signature is not by this key."""
        if not self.valid(public):
            raise Malformed(f"{what}: the signature is not by the key {public[:16]}...")
        return self.content


class Key:
    """A private Ed25519 key.

    Example: Key.new().sign("skip", {"step": 3}).valid(key.public)
    """

    def __init__(self, private: Ed25519PrivateKey, protocol: int = PROTOCOL) -> None:
        """`protocol` is the version of the team that the key signs for."""
        self._private, self.protocol = private, protocol
        self.public = private.public_key().public_bytes_raw().hex()
        """The public key: 64 hexadecimal digits."""

    @classmethod
    def new(cls) -> Key:
        return cls(Ed25519PrivateKey.generate())

    def speaking(self, protocol: int) -> Key:
        """The same key for a team of this protocol version."""
        return Key(self._private, protocol)

    def sign(self, kind: str, content: Content) -> Signed:
        data = signed_bytes(kind, content, self.protocol)
        return Signed(kind, content, self._private.sign(data).hex())

    def write(self, path: Path) -> None:
        """Write the key to a new file that only its owner can read."""
        pem = self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        try:
            write_atomic(path, pem, replace=False, mode=0o600)
        except FileExistsError as error:
            raise UserError(f"{path} exists: choose another name") from error

    @classmethod
    def read(cls, path: Path) -> Key:
        """Read a key file; UserError if others can read it."""
        if not path.is_file():
            raise UserError(f"{path} does not exist: make a key with `hacrl key new {path}`")
        if path.stat().st_mode & 0o077:
            raise UserError(f"{path} can be read by others: run `chmod 600 {path}`")
        try:
            private = load_pem_private_key(path.read_bytes(), None)
        except (ValueError, TypeError):
            private = None
        if not isinstance(private, Ed25519PrivateKey):
            raise UserError(f"{path} is not a key file of `hacrl key new`")
        return cls(private)
