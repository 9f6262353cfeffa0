"""The verifiers by name. A new one is a file beside this one and an entry here, or an import path.

The classes of this package import nothing heavy when they are made; what is heavy is imported by
their `prepare()`, in the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from hacrl.errors import UserError
from hacrl.importing import import_object
from hacrl.verify.choice import ChoiceVerifier
from hacrl.verify.exact import ExactVerifier
from hacrl.verify.function import FunctionVerifier
from hacrl.verify.math_answers import MathVerifier
from hacrl.verify.number import NumberVerifier
from hacrl.verify.protocol import Verifier

if TYPE_CHECKING:
    from hacrl.verify.settings import VerifierConfig

VERIFIERS: dict[str, Callable[..., Verifier]] = {
    "exact": ExactVerifier,
    "number": NumberVerifier,
    "choice": ChoiceVerifier,
    "math": MathVerifier,
    "function": FunctionVerifier,
}


def make_verifier(settings: VerifierConfig) -> Verifier:
    """The verifier a config asks for, in this process and without limits (see VerifierPool)."""
    return build(settings.kind, settings.options)


def build(kind: str, options: Mapping[str, Any]) -> Verifier:
    """Makes and prepares a verifier. UserError for whatever the user can mend."""
    if kind in VERIFIERS:
        verifier = check_options(kind, options)
        assert verifier is not None
    else:
        factory = load(kind, "verifier.kind")
        try:
            verifier = factory(**options)
        except TypeError as error:
            raise UserError(f"verifier.options do not fit {kind!r}: {error}") from error
        _check_protocol(kind, verifier)
    prepare = getattr(verifier, "prepare", None)
    if prepare is not None:
        prepare()
    return verifier


def check_options(kind: str, options: Mapping[str, Any]) -> Verifier | None:
    """Validates the options of a built-in kind by making it; an import path is left to the
    worker, so that a user's module is not imported into the trainer."""
    if kind not in VERIFIERS:
        return None
    try:
        adapter: TypeAdapter[Verifier] = TypeAdapter(VERIFIERS[kind])  # type: ignore[arg-type]
        return adapter.validate_python(dict(options))
    except ValidationError as error:
        found = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})"
            for e in error.errors()
        )
        raise UserError(f"verifier.options do not fit kind {kind!r}: {found}") from error


def load(path: str, field: str) -> Callable[..., Any]:
    """What an import path names, if it can be called."""
    found = import_object(path, field)
    if not callable(found):
        raise UserError(f"{field} = {path!r} is a {type(found).__name__}, not something to call")
    return found


def _check_protocol(kind: str, verifier: Any) -> None:
    missing = [
        name for name in ("name", "version", "reward_range", "judge") if not hasattr(verifier, name)
    ]
    if missing:
        raise UserError(
            f"verifier.kind = {kind!r} made a {type(verifier).__name__} without "
            f"{', '.join(missing)}: see hacrl.verify.protocol.Verifier"
        )
