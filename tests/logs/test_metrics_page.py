"""docs/metrics.md has every metric that a run writes, and the code has every metric of the page."""

import re
from pathlib import Path
from typing import Any

import pytest
import team

import hacrl

SRC = Path(hacrl.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
METRICS = re.findall(r"^\| `([^`]+)` \| \S", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
PATTERNS = [re.sub(r"[A-Z]+", "[^/]+", name.replace("TASK", ".+")) for name in METRICS]


@pytest.mark.parametrize(
    "settings",
    [
        {
            "diagnostics": {"every": 1, "problems": 2, "samples": 2},
            "trust": {"judge_again": True, "quarantine": True, "max_source_weight": 0.3},
        },
        {"algorithm": {"name": "gspo-dynamic"}},
    ],
)
def test_every_metric_of_a_run_has_a_meaning(tmp_path: Path, settings: dict[str, Any]) -> None:
    agents = team.member("wren"), team.member("finch", publish="successes")
    config = team.team(*agents, steps=2, evaluation={"problems": 4}, **settings)
    rows = hacrl.train(config, tmp_path / "run").metric_rows()
    names = {name for row in rows for name in row}
    assert len(names) > 50
    unknown = [n for n in names if not any(re.fullmatch(pattern, n) for pattern in PATTERNS)]
    assert sorted(unknown) == []


def test_every_metric_of_the_page_is_in_the_code() -> None:
    """Each part of the name before a placeholder, as text in the source."""
    source = "\n".join(p.read_text() for p in SRC.rglob("*.py"))
    assert len(METRICS) == len(set(METRICS)) > 100
    for name in METRICS:
        fixed = re.split(r"[A-Z]", name)[0]
        assert all(part in source for part in fixed.split("/")), name
