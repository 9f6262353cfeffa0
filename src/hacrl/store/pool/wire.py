"""The one place where stored things become JSON text and text becomes stored things again.

Writing is exact (every float comes back as the same float) and canonical (equal values give equal
text). Reading trusts nothing: an unknown key, a wrong type, another schema or a number that is not
finite is refused, by field.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from hacrl.errors import UserError
from hacrl.types import SCHEMA, Rollout, Trajectory

T = TypeVar("T")


class WireError(UserError):
    """A value that cannot be stored, or text that is not a stored value. Names the field."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"field {field}: {reason}" if field else reason)


class Wire(Generic[T]):
    """Text and back for one type."""

    def __init__(self, type_: type[T]) -> None:
        self._adapter: TypeAdapter[T] = TypeAdapter(type_)

    def to_json(self, value: T) -> str:
        """Canonical text; raises WireError for what could not be read back."""
        try:
            # The types are only promises until now: a nan or a numpy integer stops here.
            checked = self._adapter.validate_python(value, strict=True)
        except ValidationError as error:
            raise _refused(error) from error
        _check(checked)
        try:
            return self._adapter.dump_json(checked).decode()
        except PydanticSerializationError as error:
            if "surrogates not allowed" not in str(error):
                raise
            reason = f"a lone surrogate is not Unicode text and cannot be stored: {value!r}"
            raise WireError("", reason) from error

    def from_json(self, text: str | bytes) -> T:
        try:
            value = self._adapter.validate_json(text, strict=True)
        except ValidationError as error:
            raise _refused(error) from error
        _check(value)
        return value


def _check(value: object) -> None:
    """What the types alone do not say."""
    if isinstance(value, Trajectory):
        if value.schema != SCHEMA:
            raise WireError("schema", f"{value.schema}, but this version of hacrl reads {SCHEMA}")
        if value.tokens is not None and len(value.tokens.ids) != len(value.tokens.logprobs):
            raise WireError("tokens.logprobs", "must be as many as tokens.ids")
        if min(value.step, value.index, value.policy_version, value.num_tokens) < 0:
            _refuse_negative(value, "step", "index", "policy_version", "num_tokens")
    elif isinstance(value, Rollout):
        if len(value.completion.token_ids) != len(value.completion.logprobs):
            raise WireError("completion.logprobs", "must be as many as completion.token_ids")
        _refuse_negative(value, "step", "index")


def _refuse_negative(value: object, *names: str) -> None:
    for name in names:
        if getattr(value, name) < 0:
            raise WireError(name, f"must not be negative, is {getattr(value, name)}")


def _refused(error: ValidationError) -> WireError:
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    whole = first["type"] in ("missing", "json_invalid")  # then the input is the whole row
    return WireError(place, first["msg"] if whole else f"{first['msg']}, not {first['input']!r}")


TRAJECTORY = Wire(Trajectory)
ROLLOUT = Wire(Rollout)

to_json = TRAJECTORY.to_json
from_json = TRAJECTORY.from_json
