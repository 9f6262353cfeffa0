"""The `[verifier]` table of a run's config."""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hacrl.errors import UserError
from hacrl.verify.kinds import VERIFIERS, check_options

CORES = "HACRL_CORES"
"""Set in the environment of a process that has only so many cores for itself."""

MOST_DEFAULT_WORKERS = 16
"""A verifier seldom needs more, and a warm `math` worker holds about 100 MB."""


class VerifierConfig(BaseModel):
    """What is right, and how long finding out may take."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: str
    """exact, number, choice, math, function, or the import path "package.module:factory" of your
    own verifier."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the kind, e.g. { which = "first" } for `number`; see the class of each kind."""
    timeout: float = Field(default=5.0, gt=0)
    """Wall-clock seconds one call may take; then its process is killed and the call is TIMEOUT."""
    workers: int | None = Field(default=None, ge=0)
    """Worker processes. Unset: one less than the cores this process may use, at least 1, at most
    16; a cell of `hacrl compare` has its share. 0: in this very process, without any limit (tests
    and debugging only)."""
    memory_gb: float | None = Field(default=8.0, gt=0)
    """Memory one worker may allocate (Linux): more is a MemoryError, so ERROR for that call, before
    the machine runs out. Unset it ("none" on the command line) if your verifier needs more."""

    @model_validator(mode="after")
    def _known(self) -> VerifierConfig:
        if self.kind not in VERIFIERS and ":" not in self.kind:
            raise ValueError(
                f"verifier.kind {self.kind!r} is unknown: choose one of {', '.join(VERIFIERS)}, "
                'or give the import path "package.module:factory" of your own'
            )
        check_options(self.kind, self.options)
        return self

    @property
    def num_workers(self) -> int:
        """`workers`, or what the machine suggests."""
        if self.workers is not None:
            return self.workers
        return max(1, min(usable_cores() - 1, MOST_DEFAULT_WORKERS))


def usable_cores() -> int:
    """Cores this process may run on: its share where several run side by side, else what the system
    tells (a container's share, where it does)."""
    if share := os.environ.get(CORES):
        if not share.isdecimal() or int(share) < 1:
            raise UserError(
                f"{CORES} = {share!r} in the environment: give a number of cores, or unset it"
            )
        return int(share)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
