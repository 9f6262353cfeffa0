"""The `[verifier]` table of a config, and the verifiers by name.

A new verifier is one file in this package and one entry in VERIFIERS, or an import path in the config.
Creating a verifier imports nothing heavy; heavy imports belong in its `prepare()`, which runs in the
worker.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from hacrl.errors import UserError
from hacrl.importing import import_object, source_files
from hacrl.verify.choice import ChoiceVerifier
from hacrl.verify.exact import ExactVerifier
from hacrl.verify.function import FunctionVerifier
from hacrl.verify.math_answers import MathVerifier
from hacrl.verify.number import NumberVerifier
from hacrl.verify.protocol import Verifier
from hacrl.verify.weighted import SumVerifier

VERIFIERS: dict[str, Callable[..., Verifier]] = {
    "exact": ExactVerifier,
    "number": NumberVerifier,
    "choice": ChoiceVerifier,
    "math": MathVerifier,
    "function": FunctionVerifier,
}
SUM = "sum"  # the kind of several rewards, which `VerifierConfig.rewards` lists
CORES = "HACRL_CORES"
"""Environment variable: the number of cores for this process, if several run in parallel."""
MAX_DEFAULT_WORKERS = 16  # a verifier seldom needs more, and a `math` worker takes about 100 MB


class RewardConfig(BaseModel):
    """One reward of `verifier.kind = "sum"`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    kind: str
    """As verifier.kind."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the kind."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    name: str = Field(default="", pattern=r"^[\w.-]*$")
    """Its name in metrics (reward/NAME). Unset: the kind, or the name of the function."""

    @property
    def label(self) -> str:
        path = str(self.options.get("path", "")) if self.kind == "function" else self.kind
        return self.name or path.rpartition(":")[2] or self.kind


class VerifierConfig(BaseModel):
    """How replies are judged, and the limits of each call."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: str
    """exact, number, choice, math, function, sum (several rewards), or the import path
    "package.module:factory" of your own verifier."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the kind, e.g. { which = "first" } for `number`; see the class of each kind."""
    rewards: tuple[RewardConfig, ...] = ()
    """sum: the rewards to add. The first one decides whether a reply is right."""
    timeout: float = Field(default=5.0, gt=0)
    """Wall-clock seconds per call; a slower call is TIMEOUT and its process is killed."""
    workers: int | None = Field(default=None, ge=0)
    """Worker processes. Unset: one less than the cores of this process, at least 1, at most 16; a
    run of `hacrl compare` counts only its part of the cores. 0: judge in this process, without
    limits (tests and debugging only)."""
    memory_gb: float = Field(default=8.0, ge=0)
    """Memory limit of a worker (Linux). A call that needs more raises MemoryError and is ERROR. 0: no
    limit."""

    @model_validator(mode="after")
    def _known(self) -> VerifierConfig:
        if self.kind != SUM:
            if self.rewards:
                raise ValueError('verifier.rewards needs verifier.kind = "sum"')
            _check_kind(self, "verifier")
            return self
        if not self.rewards or self.options:
            raise ValueError('verifier.kind = "sum" needs verifier.rewards, and has no options')
        for i, reward in enumerate(self.rewards):
            _check_kind(reward, f"verifier.rewards.{i}")
        labels = [reward.label for reward in self.rewards]
        if not any(reward.weight for reward in self.rewards):
            raise ValueError("verifier.rewards: every weight is 0, so every reward would be 0")
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(
                f"verifier.rewards: {twice[0]!r} is used twice; give each reward its own name"
            )
        return self

    @property
    def num_workers(self) -> int:
        """`workers`, or the default for this machine."""
        if self.workers is not None:
            return self.workers
        return max(1, min(usable_cores() - 1, MAX_DEFAULT_WORKERS))


def usable_cores() -> int:
    """Cores for this process: HACRL_CORES if set, else those the system allows it to use."""
    if cores := os.environ.get(CORES):
        if not cores.isdecimal() or int(cores) < 1:
            raise UserError(
                f"{CORES} = {cores!r} in the environment: set a number of cores, or unset it"
            )
        return int(cores)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def make_verifier(config: VerifierConfig) -> Verifier:
    """Make and prepare the verifier of a config in this process, without limits (see VerifierPool).
    UserError for a mistake in the config."""
    verifier: Verifier
    if config.kind == SUM:
        verifier = SumVerifier([(r.label, r.weight, _make(r)) for r in config.rewards])
    else:
        verifier = _make(config)
    if prepare := getattr(verifier, "prepare", None):
        prepare()
    return verifier


def code_digests(config: VerifierConfig) -> dict[Path, str]:
    """The sha256 of the files with the user's code; empty for the verifiers of this package."""
    tables: tuple[VerifierConfig | RewardConfig, ...] = (config, *config.rewards)
    named = [str(t.options.get("path")) if t.kind == "function" else t.kind for t in tables]
    files = {file for path in named if ":" in path for file in source_files(path)}
    return {file: sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


def builtin_versions(config: VerifierConfig) -> list[str]:
    """The versions of the built-in verifiers in a config."""
    kinds = [table.kind for table in config.rewards or (config,)]
    return [str(vars(VERIFIERS[kind])["version"]) for kind in kinds if kind in VERIFIERS]


def judging_options(config: VerifierConfig) -> str:
    """The options of a verifier that decide on verdicts, as JSON, with the defaults of built-in kinds. A
    function's path is left out: the verifier's name has it without the folder."""
    found = []
    for table in config.rewards or (config,):
        options = dict(vars(_make(table)) if table.kind in VERIFIERS else table.options)
        if table.kind == "function":
            del options["path"]
        found.append(options)
    return json.dumps(found, sort_keys=True, default=str)


def _make(config: VerifierConfig | RewardConfig) -> Verifier:
    kind, options = config.kind, config.options
    if kind in VERIFIERS:
        try:
            adapter: TypeAdapter[Verifier] = TypeAdapter(VERIFIERS[kind])  # type: ignore[arg-type]
            return adapter.validate_python(options)
        except ValidationError as error:
            found = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: "
                + (
                    f"unknown option; options: {_options(VERIFIERS[kind])}"
                    if e["type"] == "unexpected_keyword_argument"
                    else f"{e['msg']} (got {e['input']!r})"
                )
                for e in error.errors()
            )
            raise UserError(f"verifier.options do not fit kind {kind!r}: {found}") from error
    factory = import_object(kind, "verifier.kind")
    try:
        verifier = factory(**options)
    except TypeError as error:
        raise UserError(
            f"verifier.kind = {kind!r} cannot be called with verifier.options: {error}"
        ) from error
    parts = ("name", "version", "reward_range", "judge")
    if missing := [part for part in parts if not hasattr(verifier, part)]:
        raise UserError(
            f"verifier.kind = {kind!r} made a {type(verifier).__name__} without "
            f"{', '.join(missing)}: see hacrl.verify.protocol.Verifier"
        )
    return verifier


def _options(kind: Callable[..., Verifier]) -> str:
    return ", ".join(inspect.signature(kind).parameters) or "none"


def _check_kind(config: VerifierConfig | RewardConfig, field: str) -> None:
    if config.kind in VERIFIERS:
        _make(config)
    elif ":" not in config.kind:
        raise ValueError(
            f"{field}.kind {config.kind!r} is unknown: choose one of {', '.join(VERIFIERS)}, {SUM}, "
            'or give the import path "package.module:factory" of your own'
        )
