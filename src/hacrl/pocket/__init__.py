"""The pocket team: tiny but real model folders that come with the package.

Three differ in size, family and tokenizer, know a little arithmetic, and learn by RL on a CPU within
a minute. The others are those taught otherwise, for the suites: goldfinch is finch after a better
second lesson, linnet has finch's body and is strong where finch is weak, wren-2 to wren-5 are wren
with a first lesson broken off ever earlier. `scripts/make_pocket_team.py` makes them and tells how.
"""

from __future__ import annotations

from pathlib import Path

from hacrl.errors import UserError

POCKET = ("wren", "finch", "heron")
POCKET_VARIANTS = ("goldfinch", "linnet", "wren-2", "wren-3", "wren-4", "wren-5")


def pocket_path(name: str) -> Path:
    """The model folder of one model, e.g. pocket_path("wren")."""
    if name not in POCKET + POCKET_VARIANTS:
        known = ", ".join(POCKET + POCKET_VARIANTS)
        raise UserError(f"pocket model {name!r} is unknown; there are {known}")
    return Path(__file__).parent / name
