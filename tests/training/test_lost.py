"""Lost and late agents, in one process: executors that lose calls or hold them back.

`tests/engines/test_ray_nodes.py` does the same with processes and machines.
"""

import asyncio
import selectors
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from team import Notes, member, team

import hacrl
from hacrl.config import Config, parse_config
from hacrl.errors import RunStopped, UserError
from hacrl.logs.metrics_log import MetricsLog
from hacrl.store.checkpoint import Checkpoints
from hacrl.store.pool import Pool
from hacrl.store.rundir import RunDirectory
from hacrl.training.hooks import Hooks
from hacrl.training.local import LocalExecutor
from hacrl.training.loop import AgentLost, Team
from hacrl.training.repair import damaged_batches

TEAM = team(
    member("wren"),
    member("finch"),
    steps=4,
    evaluation={"every": 2, "problems": 6},
    checkpoint={"every": 2},
)
DEADLINE = 0.2
GO_ON = {"kind": "ray", "threads": 1, "device": "cpu", "deadline": DEADLINE, "late": "go_on"}


class Losing(LocalExecutor):
    """Loses an agent, with its weights, before or after the named calls are carried out."""

    lose: dict[tuple[str, str, str], str]

    async def call(self, name: str, method: str, *args: Any) -> Any:
        when = self.lose.pop((name, method, str(args[0])), None)
        result = None if when == "before" else await super().call(name, method, *args)
        if when:
            self.agents[name] = self.make(name)
            raise AgentLost("killed")
        return result


class Always(dict):
    """Loses an agent whenever it learns step 1."""

    def __init__(self, name: str) -> None:
        self.name = name

    def pop(self, key: tuple[str, str, str], default: object = None) -> str | None:
        return "before" if key == (self.name, "learn", "1") else None


class Holding(LocalExecutor):
    """Holds calls back while `held` says so."""

    held: Callable[[LocalExecutor, str, str, tuple], bool]

    async def call(self, name: str, method: str, *args: Any) -> Any:
        while self.held(self, name, method, args):
            await asyncio.sleep(0.01)
        return await super().call(name, method, *args)


class Slow:
    """Holds back an agent's calls with this argument until `seconds` after the first of them."""

    def __init__(self, name: str, seconds: float = 3 * DEADLINE, step: int = 1) -> None:
        self.wanted, self.seconds, self.end, self.asked = (name, (step,)), seconds, 0.0, 0.0

    def __call__(self, executor: LocalExecutor, name: str, method: str, args: tuple) -> bool:
        if (name, args) != self.wanted:
            return False
        self.asked = asyncio.get_running_loop().time()
        self.end = self.end or self.asked + self.seconds
        return self.asked < self.end


class IdleClock(asyncio.SelectorEventLoop):
    """An event loop whose clock advances only while nothing runs, by as long as it would wait. So a
    deadline does not depend on the speed of the machine."""

    def __init__(self) -> None:
        super().__init__(selector := selectors.SelectSelector())
        self.now, select = 1.0, selector.select

        def skip(timeout: float | None = None) -> list:
            self.now += timeout or 0.0
            return select(None if timeout is None else 0)

        selector.select = skip

    def time(self) -> float:
        return self.now


def train(kind: type[LocalExecutor], settings: dict, place: Path, **attributes: Any) -> tuple:
    config: Config = parse_config(settings)
    run, notes = RunDirectory.create(place, config), Notes()
    with ExitStack() as stack:
        executor = kind(config, run, notes, Hooks())
        executor.open(stack)
        for name, value in attributes.items():
            setattr(executor, name, value)
        executor.pool = Pool(run.pool_path)
        team = Team(config, run, executor.pool, executor, MetricsLog(run, notes))
        with asyncio.Runner(loop_factory=IdleClock) as runner:
            runner.run(team.train())
    return run, notes.notes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_member_lost_at_any_call_changes_no_number(dtype: str, tmp_path: Path) -> None:
    """In step 1 wren before learning, finch after its rollouts; in step 2 finch after learning and
    while it saves; wren while it evaluates. Each comes back from a checkpoint or the beginning."""
    lose = {
        ("wren", "learn", "1"): "before",
        ("finch", "rollout", "1"): "after",
        ("finch", "learn", "2"): "after",
        ("wren", "evaluate", "4"): "before",
        ("finch", "save", "2"): "before",
    }
    config = {**TEAM, "agents": [{**agent, "dtype": dtype} for agent in TEAM["agents"]]}
    run, notes = train(Losing, config, tmp_path / "lost", lose=lose)
    assert not lose and len(notes) == 5
    ends = Counter(note.partition("It restarts from ")[2] for note in notes)
    assert ends == {"the beginning, without a checkpoint.": 3, "the checkpoint of step 2.": 2}
    unbroken = hacrl.train(config, tmp_path / "unbroken")
    assert run.metrics_path.read_bytes() == unbroken.metrics_path.read_bytes()
    for name in ("wren", "finch"):
        mine, theirs = (Checkpoints(r.checkpoints(name), 2).load(4).model for r in (run, unbroken))
        assert all(mine[key].equal(theirs[key]) for key in theirs)


def test_a_frozen_member_restarts_where_it_was(tmp_path: Path) -> None:
    agents = [member("wren"), member("finch", learn=False)]
    lose = {("finch", "rollout", "2"): "before"}
    config = {**TEAM, "agents": agents, "steps": 3, "evaluation": {"problems": 0}}
    run, notes = train(Losing, config, tmp_path / "run", lose=lose)
    assert run.steps_done() == 3
    assert notes == [
        "agent 'finch' was lost in step 3 (killed). It restarts from this step: it does not learn."
    ]


def test_a_member_that_is_always_lost_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match=r"'finch' was lost in step 2 .* for the 5th time"):
        train(Losing, TEAM, tmp_path / "run", lose=Always("finch"))


@pytest.mark.parametrize("publish", ["all", "successes"])
def test_a_late_member_is_not_waited_for_and_catches_up(publish: str, tmp_path: Path) -> None:
    """finch's step 1 comes when steps 1 and 2 are closed without it: its rows are kept as late, it
    learns both snapshots from wren's rows alone, and takes part in step 3."""

    def held(executor: LocalExecutor, name: str, method: str, args: tuple) -> bool:
        return (name, method, args) == ("finch", "rollout", (1,)) and not executor.pool.closed(2)

    agents = [member("wren"), member("finch", publish=publish)]
    settings = {**TEAM, "agents": agents, "runtime": GO_ON, "evaluation": {"problems": 0}}
    run, notes = train(Holding, settings, tmp_path / "run", held=held)
    pool = Pool(run.pool_path, read_only=True)
    members = [pool.snapshot(step).members for step in range(4)]
    assert members == [("wren", "finch"), ("wren",), ("wren",), ("wren", "finch")]
    assert pool.arrived(1) == ("finch", "wren")  # finch's batch came late and is kept
    assert len(list(pool.rows("finch", 1))) == 24
    assert pool.arrived(2) == ("wren",)  # not even sampled
    assert "step 2 continues without finch" in notes[0] and "step 3 continues without" in notes[1]
    rows = {(row["step"], row["agent"]): row for row in run.metric_rows()}
    assert len(rows) == len(run.metric_rows()) == 8
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
    # A damaged snapshot is written again with the agents that took part, without the late one.
    place = run.pool_path / "step-000001" / "snapshot.json"
    before = place.read_bytes()
    place.write_bytes(before[:-20])
    notes.clear()
    assert not damaged_batches(run.config(), run, Pool(run.pool_path), 4, notes.append)
    assert place.read_bytes() == before and "1 damaged or missing file," in notes[0]
    shutil.rmtree(place.with_name("wren"))
    place.unlink()
    with pytest.raises(UserError, match=r"The batches of wren are missing.*backup"):
        damaged_batches(run.config(), run, Pool(run.pool_path), 4, notes.append)


def test_the_end_reports_all_stragglers_once(tmp_path: Path) -> None:
    """wren finishes the run; finch and heron hang in the last step."""

    def held(executor: LocalExecutor, name: str, method: str, args: tuple) -> bool:
        return name != "wren" and (method, args) == ("learn", (1,))

    agents = [member("wren"), member("finch"), member("heron")]
    settings = {**TEAM, "agents": agents, "steps": 2, "runtime": GO_ON}
    _, notes = train(Holding, settings, tmp_path / "run", held=held)
    assert len(notes) == 1
    assert (
        "the end of the run does not wait for finch, heron, which missed the deadline (0.2 s"
        in notes[0]
    )


def test_under_wait_the_deadline_only_writes_a_note(tmp_path: Path) -> None:
    held = Slow("finch")
    runtime = {**GO_ON, "late": "wait"}
    settings = {**TEAM, "steps": 2, "runtime": runtime}
    run, notes = train(Holding, settings, tmp_path / "run", held=held)
    [note] = notes
    assert "step 2 is still waiting for finch, which missed the deadline (0.2 seconds" in note
    unhurried = hacrl.train({**TEAM, "steps": 2}, tmp_path / "unhurried")
    assert run.metrics_path.read_bytes() == unhurried.metrics_path.read_bytes()


def test_a_step_waits_for_a_learner_after_the_deadline(tmp_path: Path) -> None:
    """The frozen finch has published step 1 and the deadline is over, but wren is not there: the step
    waits for it, without asking all the time."""
    held = Slow("wren")
    members = [member("wren"), member("finch", learn=False)]
    settings = {**TEAM, "agents": members, "runtime": GO_ON, "evaluation": {"problems": 0}}
    run, notes = train(Holding, settings, tmp_path / "run", held=held)
    assert notes == [] and len(run.metric_rows()) == 8


def test_metrics_of_the_others_are_written_when_an_agent_is_given_up(tmp_path: Path) -> None:
    settings = {**TEAM, "runtime": {**GO_ON, "deadline": 3600.0}}
    run, notes = train(Losing, settings, tmp_path / "run", lose=Always("finch"))
    assert "The other agents continue without it" in notes[-1]
    wren = [(r["kind"], r["step"]) for r in run.metric_rows() if r["agent"] == "wren"]
    assert wren == [
        ("evaluation", 0),
        *(("train", 0), ("train", 1), ("evaluation", 2)),
        *(("train", 2), ("train", 3), ("evaluation", 4)),
    ]


def test_a_late_member_finds_the_checkpoints_of_its_own_steps(tmp_path: Path) -> None:
    """finch is more checkpoints behind than are kept, and catches up little by little. At every moment
    one step must be complete for both, or a resume would start from step 0. So wren keeps the steps that
    finch has yet to reach."""

    def held(executor: LocalExecutor, name: str, method: str, args: tuple) -> bool:
        until = {"rollout (1,)": 3, "learn (2,)": 5}.get(f"{method} {args}")
        return name == "finch" and until is not None and not executor.pool.closed(until)

    class Watched(Holding):
        common: list[int]

        async def call(self, name: str, method: str, *args: Any) -> Any:
            result = await super().call(name, method, *args)
            folders = [agent.checkpoints for agent in self.agents.values()]
            steps = set.intersection(*(set(f.steps()) for f in folders))
            self.common.append(max(steps, default=0))
            return result

    settings = {
        **TEAM,
        "steps": 8,
        "prompts_per_step": 3,
        "runtime": GO_ON,
        "evaluation": {"problems": 0},
        "checkpoint": {"every": 1, "keep": 1},
    }
    common: list[int] = []
    run, _ = train(Watched, settings, tmp_path / "run", held=held, common=common)
    assert common == sorted(common)
    assert [Checkpoints(run.checkpoints(n), 1).steps() for n in ("wren", "finch")] == [[8], [8]]


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        ({"deadline": 5.0}, "no effect with kind = 'local'"),
        ({"kind": "ray", "late": "go_on"}, "needs a deadline"),
    ],
)
def test_settings_that_do_not_apply_are_refused(runtime: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_config(team(member("wren"), runtime=runtime))
