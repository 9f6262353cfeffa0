"""The Python interface: runs as objects, callbacks, functions as rewards, the example notebook."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
import pandas
import pytest
from nbclient import NotebookClient
from team import member, team

import hacrl
from hacrl.config import dump_config, parse_config
from hacrl.errors import UserError
from hacrl.importing import give_function
from hacrl.store.pool import Pool

ROOT = Path(__file__).resolve().parents[1]


def config(**settings: Any) -> dict[str, Any]:
    settings = {"steps": 2, **settings}
    base = team(member("wren"), member("finch"), evaluation={"problems": 4}, **settings)
    return {key: value for key, value in base.items() if key != "verifier"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> hacrl.Run:
    """A run whose reward is a local function, which no worker could import: the length of a reply."""
    unit = 1 / 24

    def length(completion: str) -> float:
        return min(1.0, len(completion) * unit)

    calls: list[tuple[str, int]] = []

    class Counter:
        def started(self, config: Any, run: Any, step: int) -> None:
            calls.append(("started", step))

        def evaluated(self, step: int, rows: Any) -> None:
            calls.append(("evaluated", step))

    path = tmp_path_factory.mktemp("api") / "run"
    made = hacrl.train(
        config(),
        path,
        reward=length,
        callbacks=[Counter(), lambda step, rows: calls.append(("", len(rows)))],
    )
    assert calls == [("started", 0), ("evaluated", 0), ("", 2), ("", 2), ("evaluated", 2)]
    return made


def test_a_local_function_is_the_reward(run: hacrl.Run) -> None:
    replies = [t for g in Pool(run.pool_path, read_only=True).snapshot(0).groups for t in g.judged]
    assert len(replies) == 2 * 6 * 4
    for reply in replies:
        assert reply.reward == pytest.approx(min(1.0, len(reply.text) / 24))
    assert {r.verifier for r in replies} == {
        f"function(<python>:length)/{run.config().verifier.options['version']}"
    }


def test_a_run_shows_itself(run: hacrl.Run) -> None:
    again = hacrl.Run(str(run.path))
    assert repr(again) == f"Run({str(run.path)!r}: hacpo, wren + finch, step 2 of 2, finished)"
    frame = again.metrics("train", "wren")
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["step"]) == [0, 1] and frame["rollouts"].sum() == 2 * 6 * 4
    samples = again.samples(step=1, agent="finch")
    assert len(samples) == 2 * 6 * 4 and set(samples["learners"][0]) == {"finch"}
    assert len(again.plot().axes) == 2
    with pytest.raises(UserError, match="not a run directory"):
        hacrl.Run(run.path.parent)


def test_a_run_stays_the_same_in_another_folder(
    run: hacrl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.path.parent)
    again = hacrl.Run("run")
    monkeypatch.chdir(tmp_path)
    assert again.metric_rows() == run.metric_rows() != []


def test_without_pandas(run: hacrl.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for table in (run.metrics, run.samples, run.evaluate):
        with pytest.raises(UserError, match=r"pip install 'hacrl\[notebook\]'"):
            table()


def test_a_resume_asks_for_the_function_and_notices_another(run: hacrl.Run) -> None:
    def length(completion: str) -> float:
        return 0.5

    with pytest.raises(UserError, match=r"verifier.options.version.*--accept-changed"):
        run.resume(steps=3, reward=length)
    from hacrl import importing

    importing._GIVEN.clear()  # as in a new session
    with pytest.raises(
        UserError, match=r"Give it again, e.g. hacrl.resume\(RUN, reward=FUNCTION\)"
    ):
        run.resume(steps=3)
    found = run.evaluate(reward=length, **{"evaluation.problems": 3})
    assert found[["agent", "accuracy", "problems"]].values.tolist()[0] == ["wren", 0.5, 3]
    assert run.export("wren", run.path.parent / "wren").joinpath("model.safetensors").is_file()


def made(body: str) -> Any:
    """A function without a source file."""
    names: dict[str, Any] = {}
    exec(f"def score(completion): return {body}", names)
    return names["score"]


def points(completion: str, bonus: float = 0.0) -> float:
    return bonus


@pytest.mark.parametrize(
    ("one", "again", "other"),
    [
        (made("1.0"), made("1.0"), made("0.5")),
        (made("{'a', 'b', 'c'}"), made("{'c', 'b', 'a'}"), made("{'a', 'b'}")),
        (points, points, lambda completion: 0.0),
        (*[lambda text: 1.0] * 2, lambda text: 0.5),
    ],
)
def test_a_function_has_a_hash_of_what_it_does(one: Any, again: Any, other: Any) -> None:
    versions = [give_function(function, "reward")[1] for function in (one, again, other)]
    assert versions[0] == versions[1] != versions[2]


def test_two_lambdas_are_two_rewards(tmp_path: Path) -> None:
    """Each run is judged with its own, although both functions have the same name."""
    full = hacrl.train(config(steps=1), tmp_path / "full", reward=lambda completion: 1.0)
    half = hacrl.train(config(steps=1), tmp_path / "half", reward=lambda completion: 0.5)
    for run, reward in ((full, 1.0), (half, 0.5)):
        assert list(run.evaluate(agent="wren")["accuracy"]) == [reward]


@pytest.mark.parametrize(
    ("reward", "settings", "message"),
    [
        ("rewards:score", {}, "reward is a str, not a function"),
        (partial(points, bonus=1.0), {}, "is a partial, not a function; give a def or lambda"),
        (
            lambda completion: sys.stdin.readline(),
            {"runtime": {"kind": "ray"}},
            "needs runtime.kind = 'local'",
        ),
    ],
)
def test_a_reward_that_cannot_be_used(
    tmp_path: Path, reward: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        hacrl.train(config(**settings), tmp_path / "run", reward=reward)


def test_a_function_and_the_runtime_of_the_overrides(tmp_path: Path) -> None:
    """What counts is the runtime with overrides. An evaluation has none."""
    with pytest.raises(UserError, match=r"needs runtime\.kind = 'local', not 'processes'"):
        hacrl.train(config(), tmp_path / "a", reward=points, **{"runtime.kind": "processes"})
    place = {"kind": "ray", "threads": 1, "device": "cpu"}
    made = hacrl.train(
        config(steps=1, runtime=place), tmp_path / "b", reward=points, **{"runtime.kind": "local"}
    )
    text = made.config_path.read_text()
    made.config_path.write_text(text.replace('kind = "local"', 'kind = "ray"'))
    found = made.evaluate(reward=points, **{"evaluation.problems": 3})
    assert list(found["problems"]) == [3, 3]


def test_a_function_with_a_range_of_rewards(tmp_path: Path) -> None:
    """As docs/python.md writes it. The verifier of the config, which has no such option, is replaced."""
    made = hacrl.train(
        team(member("wren"), steps=1, evaluation={"problems": 0}, algorithm={"name": "gspo"}),
        tmp_path / "run",
        reward=lambda completion: (-1) ** len(completion),
        **{"verifier.options.reward_range": [-1, 1]},
    )
    replies = [t for g in Pool(made.pool_path, read_only=True).snapshot(0).groups for t in g.judged]
    assert [t.reward for t in replies] == [(-1) ** len(t.text) for t in replies]


def test_an_evaluation_takes_any_value(tmp_path: Path) -> None:
    """None unsets a key: without the system message the start of the run is the plain model. One token
    was the limit of an evaluation."""
    settings = {"steps": 1, "evaluation": {"problems": 4, "max_response_tokens": 1}}
    plain = parse_config(team(member("wren"), **settings))
    (tmp_path / "plain.toml").write_text(dump_config(plain))
    made = hacrl.train(team(member("wren", system="Be brief."), **settings), tmp_path / "run")
    made.evaluate(step=0, out=tmp_path / "a", **{"agents.wren.system": None})
    hacrl.evaluate("pocket:wren", tmp_path / "plain.toml", out=tmp_path / "b")
    one, other = (tmp_path / name / "held_out/wren/replies.jsonl" for name in "ab")
    assert one.read_text() == other.read_text()
    rewards = [{"kind": "number", "weight": 0.5}, {"kind": "exact"}]
    changes = {"verifier.kind": "sum", "verifier.options": {}, "verifier.rewards": rewards}
    found = made.evaluate(**{"evaluation.max_response_tokens": None}, **changes)
    assert found["reply_tokens"][0] > 1 and "reward/exact" in found


def test_a_member_of_a_team_across_owners_does_not_train_alone(tmp_path: Path) -> None:
    hub = {"url": "http://x", "team": "t", "verifier": "number/1"}
    alone = team(member("wren"), hub=hub)
    with pytest.raises(UserError, match=r"hacrl join http://x MINE\.toml --as wren"):
        hacrl.train(alone, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_function_with_an_open_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w") as file, pytest.raises(UserError, match="cannot be sent"):
        hacrl.train(config(), tmp_path / "run", reward=lambda completion: file.write(completion))


@pytest.mark.parametrize("callback", [None, "print", Path("x")])
def test_a_callback_that_would_never_be_called_is_refused(tmp_path: Path, callback: Any) -> None:
    with pytest.raises(UserError, match=r"has none of the methods started, phase, stepped"):
        hacrl.train(config(), tmp_path / "run", reward=points, callbacks=[callback])


def test_callbacks_are_a_list(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"give one, e.g. callbacks=\[FUNCTION\]"):
        hacrl.train(config(), tmp_path / "run", reward=points, callbacks=print)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_a_callback_that_raises_stops_the_run(tmp_path: Path) -> None:
    def stop(step: int, rows: Any) -> None:
        raise KeyError(step)

    with pytest.raises(KeyError):
        hacrl.train(config(), tmp_path / "run", reward=lambda completion: 1, callbacks=[stop])


def test_compare_returns_rows_and_verdicts(tmp_path: Path) -> None:
    suite = tmp_path / "suite.toml"
    arms = """[[arms]]
name = "together"
[[arms]]
name = "alone"
overrides = ["algorithm.name=gspo"]
"""
    base = ROOT / "configs" / "pocket.toml"
    suite.write_text(f'base = "{base}"\nseeds = [0]\nreference = "alone"\n{arms}')
    found = hacrl.compare(
        suite,
        tmp_path / "out",
        steps=1,
        prompts_per_step=4,
        minibatch_samples=16,
        **{"evaluation.problems": 4},
    )
    assert len(found.rows) == 6 and set(found.rows["arm"]) == {"together", "alone"}
    assert found.report.is_file() and found.verdicts[0] in repr(found)
    rows = found.rows.pivot(index="agent", columns="arm")
    gains = rows["after"]["together"] - rows["after"]["alone"]  # one seed, all replies judged
    assert rows["difference"]["together"].tolist() == pytest.approx(gains.tolist(), abs=1e-9)


def test_the_notebook_runs() -> None:
    notebook = nbformat.read(ROOT / "examples" / "first_team.ipynb", as_version=4)
    shown = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert any("image/png" in output.get("data", {}) for outputs in shown for output in outputs)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
