"""Late batches in one process: wren learns with stored batches of finch, some of which come late.

`tests/owners/test_late_members.py` does the same with a hub and processes.
"""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from team import NO_EVALUATION, Notes, member, team

import hacrl
from hacrl import runs
from hacrl.config import Config, parse_config
from hacrl.config_agent import AgentConfig
from hacrl.pocket import pocket_path
from hacrl.policy.policy import Policy
from hacrl.store.journal import Journal
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory
from hacrl.training.hooks import Hooks
from hacrl.types import Sample, Trajectory

HUB = {"url": "http://hub", "team": "t", "verifier": "number/1", "staleness": 2}


class LatePool(Pool):
    """finch's batches are those of a stored run. Those of the steps in `late` come one step late."""

    def __init__(self, folder: Path, stored: Pool, late: Sequence[int]) -> None:
        super().__init__(folder)
        self.stored, self.late_steps, self.newest = stored, late, -1

    def team(self, config: Config, step: int) -> Config:
        finch = AgentConfig(name="finch", model="another owner's", learn=False)
        return config.model_copy(update={"agents": [*config.agents, finch]})

    def close(self, step: int, members: Sequence[str]) -> None:
        self.newest = max(self.newest, step)
        if not self.closed(step):
            super().close(
                step, [*members, *([] if step in self.late_steps else [self.fetch(step)])]
            )

    def fetch(self, step: int) -> str:
        self.publish(step, "finch", list(self.stored.rows("finch", step)))
        return "finch"

    def late(self, step: int) -> dict[str, list[Trajectory]]:
        if step not in self.late_steps or step >= self.newest:
            return {}
        return {self.fetch(step): list(self.rows("finch", step))}


def train(path: Path, late: Sequence[int], wren: dict[str, Any], **settings: Any) -> RunDirectory:
    """Two steps of wren with finch."""
    config = {**NO_EVALUATION, "steps": 2, **settings}
    stored = hacrl.train(team(member("finch"), **config), path / "stored")
    own = parse_config({**team(wren, **config), "hub": HUB})
    run = RunDirectory.create(path / "run", own)

    def make_pool(run: RunDirectory, _: Any) -> Pool:
        return LatePool(run.pool_path, Pool(stored.pool_path), late)

    runs.train_team(own, run, Notes(), Hooks(), make_pool=make_pool)
    return run


def test_late_replies_end_with_the_token_of_own_replies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wren has two end tokens, </s> of its template and "=". More of its replies end with "="."""
    model = shutil.copytree(pocket_path("wren"), tmp_path / "model")
    settings = json.loads((model / "generation_config.json").read_text())
    settings["eos_token_id"] = [2, 292]
    (model / "generation_config.json").write_text(json.dumps(settings))
    ends: dict[str, set[int]] = {"peers": set(), "late": set()}
    update = Policy.update

    def watched(self: Policy, samples: Sequence[Sample], loss: Any, planned: Any) -> Any:
        ends.get(planned.part, set()).update(s.token_ids[-1] for s in samples if not s.is_own)
        return update(self, samples, loss, planned)

    monkeypatch.setattr(Policy, "update", watched)
    wren = {**member("wren"), "model": str(model)}
    for name, late in (("peers", []), ("late", [0])):
        run = train(tmp_path / name, late, wren)
        found = Journal(run.journal("wren")).read(1)
        assert found is not None
        own = Counter(r.completion.token_ids[-1] for r in found[0])
        assert own[292] > own[2] > 0
    assert ends == {"peers": {292}, "late": {292}}
