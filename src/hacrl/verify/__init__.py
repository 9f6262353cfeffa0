"""What is right: verifiers and the process pool they run in. Nothing here imports torch."""

from __future__ import annotations

from hacrl.verify.kinds import VERIFIERS, make_verifier
from hacrl.verify.pool import VerifierPool
from hacrl.verify.protocol import Verifier, count_statuses
from hacrl.verify.settings import VerifierConfig

__all__ = [
    "VERIFIERS",
    "Verifier",
    "VerifierConfig",
    "VerifierPool",
    "count_statuses",
    "make_verifier",
]
