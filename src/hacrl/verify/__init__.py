"""What is right: verifiers judge replies, in worker processes with time and memory limits.

    exact, number, choice, math, function    the verifiers, one file each
    protocol                                 what a verifier is; write your own with it
    pool, process, worker                    the worker processes

The `math` verifier uses extract (find the answer in a reply), latex (one spelling, exact numbers) and
symbolic (algebra). Nothing here imports torch.
"""

from hacrl.verify.pool import VerifierPool
from hacrl.verify.protocol import Verifier, count_statuses
from hacrl.verify.settings import VERIFIERS, VerifierConfig, make_verifier

__all__ = [
    "VERIFIERS",
    "Verifier",
    "VerifierConfig",
    "VerifierPool",
    "count_statuses",
    "make_verifier",
]
