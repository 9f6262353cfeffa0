"""Dynamic sampling: the rounds by hand, and whole runs of gspo-dynamic against their files."""

import shutil
from pathlib import Path

import pytest
from team import member
from test_rivals import metrics, rows, train

import hacrl
from hacrl.config import load_config
from hacrl.errors import UserError
from hacrl.store.journal import Journal
from hacrl.store.rundir import RunDirectory
from hacrl.tasks import make_task
from hacrl.training.dynamic import mixed_problems, sample_rounds
from hacrl.types import Completion, Finish, Rollout, Status, Verdict

STATUS = {"1": Status.OK, "0": Status.WRONG, "t": Status.TIMEOUT}


def replies(problem: str, letters: str) -> list[Rollout]:
    done = Completion("x", (1,), (-1.0,), Finish.STOP)
    verdicts = [Verdict(float(letter == "1"), STATUS[letter]) for letter in letters]
    return [Rollout(problem, i, 0, (1,), done, v) for i, v in enumerate(verdicts)]


@pytest.mark.parametrize(
    ("outcomes", "wanted", "rounds"),
    [
        (["10", "01", "10", "10"], 3, ["abc"]),  # all mixed at once; d is not tried
        (["10", "11", "00", "10", "00", "01", "10"], 3, ["abc", "de", "f"]),
        (["00", "11", "00", "1t", "tt"], 2, ["ab", "cd", "e"]),  # the list ends first
        (["00", "11"], 3, ["ab"]),  # without dynamic sampling: one round
        ([], 3, [""]),  # every prompt is too long
    ],
)
def test_the_rounds(outcomes: list[str], wanted: int, rounds: list[str]) -> None:
    """A round tries as many prompts as groups are missing."""
    by_name = dict(zip("abcdefg", outcomes, strict=False))
    tried: list[str] = []

    def attempt(prompts: dict[str, tuple[int, ...]]) -> list[Rollout]:
        tried.append("".join(prompts))
        return [r for p in prompts for r in replies(p, by_name[p])]

    found = sample_rounds(dict.fromkeys(by_name, (1,)), wanted, attempt)
    assert tried == rounds
    assert [r.problem_id for r in found] == [p for p in "".join(rounds) for _ in range(2)]
    assert mixed_problems(found) <= wanted


def journalled(run: RunDirectory, agent: str) -> list[Rollout]:
    entry = Journal(run.journal(agent)).read(0)
    assert entry is not None
    return entry[0]


def dynamic(path: Path, *names: str, factor: int = 3, **settings: object) -> RunDirectory:
    algorithm = {"name": "gspo-dynamic", "list_factor": factor}
    return train(path, "", *map(member, names), algorithm=algorithm, **settings)


def test_a_run_fills_the_batch_with_mixed_groups(tmp_path: Path) -> None:
    """Twelve groups of 4, from a list of 36 problems that are tried in order."""
    run = dynamic(tmp_path / "run", "wren", "finch")
    config = load_config(run.config_path)
    listed = [p.id for p in make_task(config.task, config.seed, run.path).batch(0, 36)]
    tried = {}
    for agent in ("wren", "finch"):
        found, row = journalled(run, agent), metrics(run, agent)
        tried[agent] = list(dict.fromkeys(r.problem_id for r in found))
        count = len(tried[agent])
        assert tried[agent] == listed[:count] and 12 < count <= 36
        assert row["rollouts"] == len(found) == 4 * count  # every rollout counts
        assert row["problems/tried"] == count
        assert row["problems/mixed"] == mixed_problems(found)
        assert row["problems/mixed"] == 12 or count == 36
        by_problem: dict[str, set[float]] = {}
        for r in found:
            by_problem.setdefault(r.problem_id, set()).add(r.verdict.reward)
        trained = rows(run, agent)
        assert {r["problem"] for r in trained} == {p for p, x in by_problem.items() if len(x) > 1}
        assert len(trained) == 4 * row["problems/mixed"] and all(r["advantage"] for r in trained)
        assert {r["source"] for r in trained} == {agent}
        assert row["updates"] == row["updates_planned"] == 4
        if row["problems/mixed"] == 12:  # the last round was needed
            assert len(by_problem[tried[agent][-1]]) > 1
    assert tried["wren"] != tried["finch"]


def test_an_agent_learns_as_if_it_were_alone(tmp_path: Path) -> None:
    both, alone = (dynamic(tmp_path / str(n), *("wren", "finch")[:n]) for n in (2, 1))
    here, there = metrics(both, "wren"), metrics(alone, "wren")
    assert {k: here[k] for k in there} == there


def test_a_resumed_step_is_not_sampled_again(tmp_path: Path) -> None:
    """All checkpoints are lost: the journals are read, and the metrics are the same bytes. Without the
    journal of the last step the same rounds are sampled again."""
    run = dynamic(tmp_path / "run", "wren", steps=2)
    before, paths = run.metrics_path.read_bytes(), sorted(run.journal("wren").iterdir())
    stored = [(p.read_bytes(), p.stat().st_mtime_ns) for p in paths]
    shutil.rmtree(run.path / "checkpoints")
    hacrl.resume(run.path)
    assert run.metrics_path.read_bytes() == before
    assert [(p.read_bytes(), p.stat().st_mtime_ns) for p in paths] == stored
    shutil.rmtree(run.path / "checkpoints")
    paths[-1].unlink()
    hacrl.resume(run.path)
    assert run.metrics_path.read_bytes() == before
    assert [p.read_bytes() for p in paths] == [content for content, _ in stored]


def test_a_list_that_is_longer_than_the_task(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prompts_per_step = 12000 is not between .*list_factor"):
        dynamic(tmp_path / "run", "wren", factor=1000)
