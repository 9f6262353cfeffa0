"""Canonical JSON for everything the store keeps: trajectories, rollouts and snapshot records.

Encoding is exact (a float reads back as the same float) and canonical (equal values give equal
bytes: sorted keys, no spaces). Decoding refuses unknown keys, wrong types, other schema versions
and numbers that are not finite; the error names the field.
"""

from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from hacrl.errors import UserError
from hacrl.types import SCHEMA, Rollout, Trajectory

T = TypeVar("T")


class CodecError(UserError):
    """A value that cannot be stored, or stored text that is not valid. Names the field."""


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
        dumped = self._adapter.dump_python(checked, mode="json")
        if (verdict := dumped.get("verdict")) and not verdict["parts"]:
            del verdict["parts"]  # most verifiers have none
        try:
            return to_json(_sorted(dumped))
        except PydanticSerializationError as error:
            raise CodecError(f"{error}: {value!r}") from error  # a lone surrogate

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
        raise CodecError(f"field schema: {value.schema}, but this version of hacrl reads {SCHEMA}")
    for name in ("step", "index", "policy_version", "num_tokens"):
        if getattr(value, name, 0) < 0:
            raise CodecError(f"field {name}: must not be negative, is {getattr(value, name)}")
    tokens = getattr(value, "tokens", None)  # of a trajectory
    if tokens is not None and len(tokens.ids) != len(tokens.logprobs):
        raise CodecError("field tokens.logprobs: must be as many as tokens.ids")
    completion = getattr(value, "completion", None)  # of a rollout
    if completion is not None and len(completion.token_ids) != len(completion.logprobs):
        raise CodecError("field completion.logprobs: must be as many as completion.token_ids")


def _explain(error: ValidationError) -> CodecError:
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    reason = first["msg"]
    if first["type"] not in ("missing", "json_invalid"):  # for these the input is the whole row
        reason += f", not {first['input']!r}"
    return CodecError(f"field {field}: {reason}" if field else reason)


TRAJECTORY = Codec(Trajectory)
ROLLOUT = Codec(Rollout)
