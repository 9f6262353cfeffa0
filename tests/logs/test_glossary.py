"""Every metric that a run writes has a meaning in the glossary, and the code has every entry."""

import re
from pathlib import Path
from typing import Any

import pytest
import team

import hacrl
from hacrl.logs.glossary import METRICS, meaning

SRC = Path(hacrl.__file__).parent


@pytest.mark.parametrize(
    "settings",
    [
        {
            "diagnostics": {"every": 1, "problems": 2, "samples": 2},
            "trust": {"judge_again": True, "quarantine": True, "max_source_weight": 0.3},
        },
        {"algorithm": {"name": "gspo-dynamic"}, "sampler": {"behaviour": "sampler"}},
    ],
)
def test_every_metric_of_a_run_has_a_meaning(tmp_path: Path, settings: dict[str, Any]) -> None:
    agents = team.member("wren", away=[[1, 2]]), team.member("finch", publish="successes")
    config = team.team(*agents, steps=2, evaluation={"problems": 4}, **settings)
    rows = hacrl.train(config, tmp_path / "run").metrics()
    names = {name for row in rows for name in row}
    assert len(names) > 50
    assert sorted(name for name in names if meaning(name) is None) == []


def test_every_entry_is_in_the_code() -> None:
    """Each part of the name before a placeholder, as text in the source."""
    source = "\n".join(p.read_text() for p in SRC.rglob("*.py") if p.name != "glossary.py")
    for name in (name for section in METRICS.values() for name in section):
        fixed = re.split(r"[A-Z]", name)[0]
        assert all(part in source for part in fixed.split("/")), name


@pytest.mark.parametrize("name", ["ratio/a.b-c", "ratio/x/short", "accuracy/gym/sums", "loss"])
def test_names_stand_for_their_pattern(name: str) -> None:
    assert meaning(name)


def test_an_unknown_name_has_no_meaning() -> None:
    assert meaning("rewards") is None
    assert "short" not in str(meaning("ratio/x"))
