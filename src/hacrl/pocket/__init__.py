"""The pocket team: three tiny but real model folders that come with the package.

They differ in size, family and tokenizer, know a little arithmetic, and learn by RL on a CPU within
a minute. `scripts/make_pocket_team.py` makes them and tells how.
"""

from __future__ import annotations

from pathlib import Path

from hacrl.errors import UserError

POCKET = ("wren", "finch", "heron")


def pocket_path(name: str) -> Path:
    """The model folder of one member, e.g. pocket_path("wren")."""
    if name not in POCKET:
        raise UserError(f"pocket model {name!r} is unknown; there are {', '.join(POCKET)}")
    return Path(__file__).parent / name
