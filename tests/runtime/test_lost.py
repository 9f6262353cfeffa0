"""Members that are lost or late, without any engine: a crew in one process that loses them.

`tests/engines/test_ray_nodes.py` does the same with processes and machines.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from team import member, team

import hacrl
from hacrl.checkpoint import Checkpoints
from hacrl.config import Config, parse_config
from hacrl.errors import RunStopped
from hacrl.pool import open_pool
from hacrl.report.observer import Quiet
from hacrl.rundir import RunDirectory
from hacrl.runtime.local import LocalCrew
from hacrl.runtime.logbook import Logbook
from hacrl.runtime.seat import Answer, Seat
from hacrl.runtime.team import Lost, Team

TEAM = team(
    member("wren"),
    member("finch"),
    steps=4,
    evaluation={"every": 2, "problems": 6},
    checkpoint={"every": 2},
)


class Losing(LocalCrew):
    """Loses a member at the named calls, before or after they are carried out, with its weights."""

    lose: dict[tuple[str, str, str], str]

    def next(self, seconds: float | None) -> tuple[str, Answer | Lost]:
        name, call = self.calls.popleft()
        when = self.lose.pop((name, call.method, str(call.args[0])), None)
        answer = None
        if when != "before":
            answer = self.seats[name].answer(call.method, *call.args)
        if when or answer is None:
            old = self.seats[name]
            self.seats[name] = Seat(old.config, name, old.run, old.shared)
            return name, Lost("killed")
        return name, answer


class Holding(LocalCrew):
    """finch's rollouts of step 1 are carried out only when wren has closed step 2 without it."""

    def next(self, seconds: float | None) -> tuple[str, Answer | Lost] | None:
        late = self.calls[0][0] == "finch" and self.calls[0][1].args == (1,)
        if late and not self.pool.closed(2):
            self.calls.rotate(-1)
            if self.calls[0][0] == "finch":
                assert seconds is not None, "nobody would ever come"
                time.sleep(seconds)
                return None
        return super().next(seconds)


class Notes(Quiet):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def train(kind: type[LocalCrew], settings: dict, place: Path, **attributes) -> tuple:
    config: Config = parse_config(settings)
    run, notes = RunDirectory.create(place, config), Notes()
    with ExitStack() as stack:
        crew = kind(config, run, stack)
        for name, value in attributes.items():
            setattr(crew, name, value)
        Team(config, run, notes).train(crew, stack)
    return run, notes.notes


def test_a_member_lost_at_any_call_changes_no_number(tmp_path: Path) -> None:
    """In step 1 wren before learning, finch after its rollouts; in step 2 finch after learning and
    while it saves; wren while it evaluates. Each comes back from a checkpoint or the beginning."""
    lose = {
        ("wren", "learn", "1"): "before",
        ("finch", "rollout", "1"): "after",
        ("finch", "learn", "2"): "after",
        ("wren", "evaluate", "4"): "before",
        ("finch", "save", "2"): "before",
    }
    run, notes = train(Losing, TEAM, tmp_path / "lost", lose=lose)
    assert not lose and len(notes) == 5
    unbroken = hacrl.train(TEAM, tmp_path / "unbroken")
    assert run.metrics_path.read_bytes() == unbroken.metrics_path.read_bytes()
    for name in ("wren", "finch"):
        mine, theirs = (Checkpoints(r.checkpoints(name), 2).load(4).model for r in (run, unbroken))
        assert all(mine[key].equal(theirs[key]) for key in theirs)


def test_a_member_that_is_always_lost_stops_the_run(tmp_path: Path) -> None:
    class Hopeless(dict):
        def pop(self, key, default=None):
            return "before" if key == ("finch", "learn", "1") else None

    with pytest.raises(RunStopped, match=r"'finch' was lost in step 1 .* for the 5th time"):
        train(Losing, TEAM, tmp_path / "run", lose=Hopeless())


def test_a_late_member_is_not_waited_for_and_catches_up(tmp_path: Path) -> None:
    """finch's step 1 comes when steps 1 and 2 are closed without it: its rows are kept as late, it
    learns both cuts from wren's rows alone, and takes part in step 3."""
    runtime = {"kind": "ray", "threads": 1, "device": "cpu", "deadline": 0.2, "late": "go_on"}
    settings = {**TEAM, "runtime": runtime, "evaluation": {"problems": 0}}
    run, notes = train(Holding, settings, tmp_path / "run")
    pool = open_pool("sqlite:///pool.db", run.path, create=False)
    members = [pool.gather(step).members for step in range(4)]
    assert members == [("wren", "finch"), ("wren",), ("wren",), ("wren", "finch")]
    assert [pool.late(step) for step in range(4)] == [0, 24, 0, 0]  # step 2: not even sampled
    assert not list(pool.rows("finch", 2))
    pool.dispose()
    assert "step 1 goes on without finch" in notes[0] and "step 2 goes on without" in notes[1]
    rows = {(row["step"], row["agent"]): row for row in run.metrics()}
    assert len(rows) == len(run.metrics()) == 8
    for step in (1, 2):
        finch, wren = rows[step, "finch"], rows[step, "wren"]
        assert finch["absent"] and finch["own/samples"] == 0 and finch["peers/samples"] > 0
        assert finch["updates"] > 0 and finch["capability/wren"] > 0
        assert wren["peers/samples"] == 0 and "absent" not in wren
    back = rows[3, "finch"]
    assert back["own/samples"] > 0 and back["peers/samples"] > 0
    # finch was present in steps 0 and 3 only: its late rewards of step 1 are in no capability.
    rewards = (rows[0, "finch"]["reward"] + back["reward"]) / 2
    assert back["capability/finch"] == pytest.approx(rewards)


def test_under_wait_the_deadline_only_tells(tmp_path: Path) -> None:
    class Slow(LocalCrew):
        def next(self, seconds):
            if self.calls[0][0] == "finch" and seconds:
                time.sleep(seconds)
                return None
            return super().next(seconds)

    runtime = {"kind": "ray", "threads": 1, "device": "cpu", "deadline": 0.05}
    settings = {**TEAM, "steps": 2, "runtime": runtime}
    run, notes = train(Slow, settings, tmp_path / "run")
    assert any("step 1 still waits for finch" in note for note in notes)
    unhurried = hacrl.train({**TEAM, "steps": 2}, tmp_path / "unhurried")
    assert run.metrics_path.read_bytes() == unhurried.metrics_path.read_bytes()


def test_only_the_wanted_checkpoints_stay(tmp_path: Path) -> None:
    checkpoint = {"every": 1, "keep": 1}
    settings = {**TEAM, "evaluation": {"problems": 0}, "checkpoint": checkpoint}
    run = hacrl.train(settings, tmp_path / "run")
    assert [Checkpoints(run.checkpoints(n), 1).steps() for n in ("wren", "finch")] == [[4], [4]]


def test_rows_are_written_in_order_whoever_reports_first(tmp_path: Path) -> None:
    book = Logbook(RunDirectory(tmp_path), Quiet(), [])
    book.expect("train", 0, ["a", "b"])
    book.expect("evaluation", 1, ["a", "b"])
    for kind, step, name in (
        ("evaluation", 1, "b"),
        ("train", 0, "b"),
        ("evaluation", 1, "a"),
        ("evaluation", 1, "a"),
    ):
        book.add(kind, step, name, {"accuracy": None, "reward": 0.0})
        assert book.run.metrics() == []
    book.add("train", 0, "a", {"reward": 0.0})
    written = [(r["kind"], r["step"], r["agent"]) for r in book.run.metrics()]
    assert written == [(k, s, n) for k, s in (("train", 0), ("evaluation", 1)) for n in "ab"]
    book.expect("train", 1, ["a", "b"])
    book.add("train", 1, "b", {"reward": 0.0})
    book.release(["a"])  # b's row does not wait any more; a's is written when it comes
    assert [r["agent"] for r in book.run.metrics()[4:]] == ["b"]
    book.add("train", 1, "a", {"reward": 0.0})
    assert [r["agent"] for r in book.run.metrics()[4:]] == ["b", "a"]
