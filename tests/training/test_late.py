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
from hacrl.errors import UserError
from hacrl.pocket import pocket_path
from hacrl.policy.policy import Policy
from hacrl.store.codec import TRAJECTORY
from hacrl.store.journal import Journal
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory
from hacrl.training.hooks import Hooks
from hacrl.types import Sample, Trajectory

HUB = {"url": "http://hub", "team": "t", "verifier": "number/1", "staleness": 2}


class LatePool(Pool):
    """finch's batches are those of a stored run. Those of the steps in `late` come one step late."""

    damage = b""  # further lines of every batch

    def __init__(self, folder: Path, stored: Pool, late: Sequence[int]) -> None:
        super().__init__(folder)
        self.stored, self.late_steps = stored, late

    def team(self, config: Config, step: int) -> Config:
        finch = AgentConfig(name="finch", model="another owner's", learn=False)
        return config.model_copy(update={"agents": [*config.agents, finch]})

    def close(self, step: int, members: Sequence[str]) -> None:
        if not self.closed(step):
            super().close(
                step, [*members, *([] if step in self.late_steps else [self.fetch(step)])]
            )

    def fetch(self, step: int) -> str:
        rows = self.stored.rows("finch", step)
        lines = b"".join(TRAJECTORY.encode(row) + b"\n" for row in rows)
        self.store_lines(step, "finch", lines + self.damage)
        return "finch"

    def late(self, step: int) -> dict[str, list[Trajectory]]:
        if step not in self.late_steps or not self.closed(step + 1):
            return {}
        return {self.fetch(step): list(self.rows("finch", step))}


def train(path: Path, late: Sequence[int], wren: dict[str, Any], **settings: Any) -> RunDirectory:
    """Two steps of wren with finch."""
    config = {**NO_EVALUATION, "steps": 2, **settings}
    hacrl.train(team(member("finch"), **config), path / "stored")
    own = parse_config({**team(wren, **config), "hub": HUB})
    return go_on(RunDirectory.create(path / "run", own), late)


def go_on(run: RunDirectory, late: Sequence[int]) -> RunDirectory:
    stored = Pool(run.path.parent / "stored" / "pool")

    def make_pool(run: RunDirectory, _: Any) -> Pool:
        return LatePool(run.pool_path, stored, late)

    runs.train_team(run.config(), run, Notes(), Hooks(), make_pool=make_pool)
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


def test_rows_of_late_batches_that_cannot_be_read_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As evidence and in the metrics, in the step that uses the batch."""
    monkeypatch.setattr(LatePool, "damage", b"damage\n" * 3)
    run = train(tmp_path, [0], member("wren"), trust={"judge_again": True, "quarantine": True})
    rows = run.metric_rows("train")
    assert [row.get("samples/invalid/unreadable", 0.0) for row in rows] == [0.0, 6.0]
    assert rows[1]["trust/score/invalid/finch"] > 0


def test_a_late_batch_that_is_damaged_is_copied_again(tmp_path: Path) -> None:
    run = train(tmp_path, [0], member("wren"), trust={"judge_again": True})
    before = run.metrics_path.read_bytes()
    [row] = [row for row in run.metric_rows("train") if row["step"] == 1]
    assert row["late/batches"] == 1 and row["late/samples"] > 0
    place = run.pool_path / "step-000000" / "finch"
    [batch] = place.iterdir()
    for damage in (lambda: shutil.rmtree(place), lambda: batch.write_bytes(b"")):
        damage()
        shutil.rmtree(run.checkpoints("wren") / "step-000002")
        assert go_on(run, [0]).metrics_path.read_bytes() == before
    shutil.rmtree(place)
    shutil.rmtree(run.checkpoints("wren") / "step-000002")
    with pytest.raises(UserError, match="batch of 'finch' of step 1, which came late, is missing"):
        go_on(run, [])
