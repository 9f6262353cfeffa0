"""Rollouts are journalled before they are published, and a journalled step is not sampled again."""

import shutil
from pathlib import Path

from team import NO_EVALUATION, member, team

import hacrl
from hacrl.store.journal import Journal
from hacrl.store.pool import Pool


def test_rollouts_are_on_disk_before_anyone_sees_them(tmp_path: Path, monkeypatch) -> None:
    """At every publication the journal of that agent and step is whole, verdicts and all."""
    real, seen = Pool.publish, []

    def watched(self, step, agent, trajectories) -> str:
        entry = Journal(tmp_path / "run" / "journal" / agent).read(step)
        assert entry is not None, f"{agent} published step {step} before journalling it"
        assert [r.verdict for r in entry[0]] == [t.verdict for t in trajectories]
        seen.append((agent, step))
        return real(self, step, agent, trajectories)

    monkeypatch.setattr(Pool, "publish", watched)
    hacrl.train(team(member("wren"), member("finch"), steps=2, **NO_EVALUATION), tmp_path / "run")
    assert seen == [("wren", 0), ("finch", 0), ("wren", 1), ("finch", 1)]


def test_what_is_journalled_is_never_sampled_or_judged_again(tmp_path: Path, monkeypatch) -> None:
    """All checkpoints lost: the whole run is learned again from the journal alone."""
    run = hacrl.train(team(member("wren"), member("finch"), **NO_EVALUATION), tmp_path / "run")
    before = run.metrics_path.read_bytes()
    shutil.rmtree(run.path / "checkpoints")

    def refuse(*args, **kwargs):
        raise AssertionError("sampled or judged what the journal holds")

    monkeypatch.setattr("hacrl.training.agent.attempt", refuse)
    monkeypatch.setattr("hacrl.training.agent.judge", refuse)
    hacrl.resume(run.path)
    assert run.metrics_path.read_bytes() == before
