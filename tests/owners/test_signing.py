"""Canonical JSON, keys and signatures."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl.errors import UserError
from hacrl.owners.signing import Key, Malformed, Signed, canonical, parse, signed_bytes

pytestmark = pytest.mark.hub

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)
KEY = Key.new()


def test_canonical_json_by_hand() -> None:
    value = {"b": [1, 2.5, None, True], "a": {"é": "\n", "Z": ""}, "": -0.0}
    assert canonical(value) == '{"":-0.0,"a":{"Z":"","é":"\\n"},"b":[1,2.5,null,true]}'.encode()
    assert signed_bytes("skip", {"step": 3}) == b'hacrl-skip-v1\n{"step":3}'


@given(PLAIN)
def test_canonical_json_is_exact(value: Any) -> None:
    data = canonical(value)
    assert json.loads(data) == value
    assert canonical(parse(data)) == data
    assert b"\n" not in data
    if isinstance(value, dict):
        assert canonical(dict(reversed(value.items()))) == data


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), ["\ud800"], b"x", {"a": {1, 2}}],
)
def test_values_without_one_form_are_refused(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        canonical(value)


@pytest.mark.parametrize(
    "data",
    [
        *(b'{"a": 1}', b'{"b":1,"a":1}', b'{"a":1,"a":1}', b"NaN", b"1e5", b'"\\u0061"', b"\xff"),
        *(b"[" * 100_000, b"9" * 10_000, b'"\\ud800"', b"", b"1\n"),
    ],
)
def test_other_spellings_are_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse(data)


@settings(max_examples=50)
@given(st.dictionaries(TEXT, PLAIN), st.data())
def test_a_signature_covers_every_byte(content: dict[str, Any], draw: st.DataObject) -> None:
    signed = KEY.sign("envelope", content)
    assert Signed.decode("envelope", signed.encode()) == signed
    assert signed.valid(KEY.public)
    assert not signed.valid(Key.new().public)
    for kind in ("request", "envelope", "skip", "snapshot"):
        assert Signed(kind, content, signed.signature).valid(KEY.public) == (kind == "envelope")
    assert not Signed("envelope", {**content, "": [content]}, signed.signature).valid(KEY.public)
    bit = draw.draw(st.integers(0, 511))
    flipped = (int(signed.signature, 16) ^ 1 << bit).to_bytes(64, "big").hex()
    assert not Signed("envelope", content, flipped).valid(KEY.public)
    data = bytearray(signed.encode())
    data[draw.draw(st.integers(0, len(data) - 1))] ^= draw.draw(st.integers(1, 255))
    with suppress(Malformed):
        assert not Signed.decode("envelope", bytes(data)).valid(KEY.public)


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    KEY.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Key.read(path).public == KEY.public
    with pytest.raises(UserError, match="choose another name"):
        KEY.write(path)
    for mode, content, message in (
        (0o644, b"", "chmod 600"),
        (0o600, b"x", "not a key file"),
    ):
        path.write_bytes(content)
        path.chmod(mode)
        with pytest.raises(UserError, match=message):
            Key.read(path)
    with pytest.raises(UserError, match="hacrl key new"):
        Key.read(tmp_path / "none.key")
