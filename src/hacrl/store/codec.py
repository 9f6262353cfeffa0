"""Canonical JSON for everything the store keeps: trajectories, rollouts and snapshot records.

Encoding is exact (a float reads back as the same float) and canonical (equal values give equal
bytes: sorted keys, no spaces). Decoding refuses unknown keys, wrong types, other schema versions
and numbers that are not finite; the error names the field.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from hacrl.errors import UserError
from hacrl.types import SCHEMA, Rollout, Trajectory

T = TypeVar("T")


class CodecError(UserError):
    """A value that cannot be stored, or stored text that is not valid. Names the field."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"field {field}: {reason}" if field else reason)


class Codec(Generic[T]):
    """JSON encoding of one dataclass.

    Example: TRAJECTORY.decode(TRAJECTORY.encode(trajectory)) == trajectory
    """

    def __init__(self, type_: type[T]) -> None:
        self._adapter: TypeAdapter[T] = TypeAdapter(type_)

    def encode(self, value: T) -> bytes:
        """Return one line of canonical JSON, without the line break."""
        try:
            # Python does not enforce annotations: catch a nan or a numpy integer here.
            checked = self._adapter.validate_python(value, strict=True)
        except ValidationError as error:
            raise _explain(error) from error
        _check(checked)
        try:
            return to_json(_sorted(self._adapter.dump_python(checked, mode="json")))
        except PydanticSerializationError as error:
            if "surrogates not allowed" not in str(error):
                raise
            reason = f"a lone surrogate is not Unicode text and cannot be stored: {value!r}"
            raise CodecError("", reason) from error

    def decode(self, line: bytes) -> T:
        """Parse and validate one line."""
        try:
            value = self._adapter.validate_json(line, strict=True)
        except ValidationError as error:
            raise _explain(error) from error
        _check(value)
        return value


def _sorted(value: Any) -> Any:
    """Sort the keys of all objects. Long lists of numbers are not walked through."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_sorted(item) for item in value]
    return value


def _check(value: Any) -> None:
    """Check what the types cannot express."""
    if getattr(value, "schema", SCHEMA) != SCHEMA:
        raise CodecError("schema", f"{value.schema}, but this version of hacrl reads {SCHEMA}")
    if isinstance(value, Trajectory):
        if value.tokens is not None and len(value.tokens.ids) != len(value.tokens.logprobs):
            raise CodecError("tokens.logprobs", "must be as many as tokens.ids")
        _refuse_negative(value, "step", "index", "policy_version", "num_tokens")
    elif isinstance(value, Rollout):
        if len(value.completion.token_ids) != len(value.completion.logprobs):
            raise CodecError("completion.logprobs", "must be as many as completion.token_ids")
        _refuse_negative(value, "step", "index")


def _refuse_negative(value: object, *names: str) -> None:
    for name in names:
        if getattr(value, name) < 0:
            raise CodecError(name, f"must not be negative, is {getattr(value, name)}")


def _explain(error: ValidationError) -> CodecError:
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    whole = first["type"] in ("missing", "json_invalid")  # the input is the whole row: do not quote
    return CodecError(field, first["msg"] if whole else f"{first['msg']}, not {first['input']!r}")


TRAJECTORY = Codec(Trajectory)
ROLLOUT = Codec(Rollout)
