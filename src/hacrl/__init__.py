"""hacrl: train a team of different language models together with reinforcement learning.

    import hacrl
    run = hacrl.train("team.toml", steps=20)

In a terminal or notebook the calls show their progress. Ctrl-C stops them at a safe point. The functions
are in hacrl/api.py. Importing this package is quick: torch and transformers are imported by the first
call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hacrl.api import Comparison, Run, compare, evaluate, resume, train

__version__ = "0.1.0"
__all__ = [
    "Comparison",
    "Run",
    "__version__",
    "compare",
    "evaluate",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is used first."""
    if name not in __all__:
        raise AttributeError(f"module 'hacrl' has no attribute {name!r}")
    from hacrl import api

    return getattr(api, name)
