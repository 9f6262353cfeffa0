"""The pocket team: tiny but real model folders that come with the package, and the demo's suite.

wren, finch and heron differ in size, family and tokenizer. They know some arithmetic and improve by
RL on a CPU within a minute. The others are variants for the suites: goldfinch is finch with a better
second stage of pretraining, linnet has finch's architecture and is strong where finch is weak, and
wren-2 to wren-5 are wren with ever shorter pretraining. `scripts/make_pocket_team.py` makes them.
"""

from pathlib import Path

from hacrl.errors import UserError

POCKET = ("wren", "finch", "heron")
POCKET_VARIANTS = ("goldfinch", "linnet", "wren-2", "wren-3", "wren-4", "wren-5")

POCKET_CONFIG = Path(__file__).parent / "pocket.toml"
"""The config of the pocket team; configs/pocket.toml in the repository is a copy."""
DEMO_SUITE = Path(__file__).parent / "demo.toml"  # the suite of `hacrl demo`


def pocket_path(name: str) -> Path:
    """The model folder of one model, e.g. pocket_path("wren")."""
    if name not in POCKET + POCKET_VARIANTS:
        known = ", ".join(POCKET + POCKET_VARIANTS)
        raise UserError(f"pocket model {name!r} is unknown; there are {known}")
    return Path(__file__).parent / name
