"""Algorithms: one file each, one entry in `ALGORITHMS`. START HERE: base.py has the interface."""

import difflib
from typing import Any

from hacrl.algorithms.base import Algorithm, AlgorithmSettings, Needs, Step
from hacrl.algorithms.f_tis import FTis
from hacrl.algorithms.graft import Graft
from hacrl.algorithms.grpo import Grpo
from hacrl.algorithms.gspo import Gspo
from hacrl.algorithms.gspo_dynamic import GspoDynamic
from hacrl.algorithms.hacpo import Hacpo
from hacrl.algorithms.luffy import Luffy
from hacrl.algorithms.naive import Naive
from hacrl.algorithms.overlap import Overlap
from hacrl.algorithms.sapo import Sapo
from hacrl.algorithms.sft_success import SftSuccess
from hacrl.algorithms.sgt import Sgt
from hacrl.algorithms.xgrpo import Xgrpo
from hacrl.errors import UserError
from hacrl.importing import import_object, refuses_code

__all__ = ["ALGORITHMS", "Algorithm", "AlgorithmSettings", "Needs", "Step", "make_algorithm"]

ALGORITHMS: dict[str, type[Algorithm]] = {
    "hacpo": Hacpo,
    "gspo": Gspo,
    "grpo": Grpo,
    "naive": Naive,
    "sgt": Sgt,
    "graft": Graft,
    "f-tis": FTis,
    "overlap": Overlap,
    "xgrpo": Xgrpo,
    "sapo": Sapo,
    "luffy": Luffy,
    "sft-success": SftSuccess,
    "gspo-dynamic": GspoDynamic,
}


def algorithm_class(name: Any) -> type[Algorithm]:
    """Return the class of a built-in algorithm, or the one at an import path."""
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    field = f"algorithm.name = {name!r}"
    if not isinstance(name, str) or ":" not in name:
        near = difflib.get_close_matches(str(name), ALGORITHMS, n=1)
        raise UserError(
            f"{field} is unknown{f'; did you mean {near[0]!r}?' if near else '.'} Choose one of: "
            f"{', '.join(ALGORITHMS)}; or give an import path like 'my_module:MyAlgorithm'."
        )
    found = import_object(name, "algorithm.name")
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise UserError(f"{field} is not an algorithm: derive it from hacrl.algorithms.Algorithm.")
    if missing := sorted(found.__abstractmethods__):
        raise UserError(f"{field}: define {' and '.join(missing)} in the class.")
    return found


class UnreadSettings(AlgorithmSettings, extra="allow"):
    """Settings of an algorithm that a reading command does not import. They are not validated."""


def make_settings(name: str = "hacpo", **values: Any) -> AlgorithmSettings:
    """Validate the settings of an algorithm.

    Example: make_settings("f-tis", tis_cap=3.0)
    """
    if ":" in str(name) and refuses_code():
        return UnreadSettings(name=name, **values)
    return algorithm_class(name).Settings(name=name, **values)


def make_algorithm(
    settings: AlgorithmSettings, reward_range: tuple[float, float] = (0.0, 1.0)
) -> Algorithm:
    """Build the algorithm that the settings name for rewards in `reward_range`."""
    return algorithm_class(settings.name)(settings, reward_range)
