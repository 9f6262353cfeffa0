"""Benchmarks with pocket models on small files; figures counted by hand."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from team import member, team

from hacrl.config import AgentConfig, dump_config, parse_config
from hacrl.errors import UserError
from hacrl.policy.policy import Policy
from hacrl.replies import count
from hacrl.statistics import estimate_scores
from hacrl.store.rows import RowLog, read_object, read_rows, write_object
from hacrl.study.benchmarks.catalogue import (
    MATH7,
    Benchmark,
    BenchmarkSettings,
    choose_benchmarks,
    load_problems,
)
from hacrl.study.benchmarks.results import Summary, count_headline
from hacrl.study.benchmarks.run import evaluate_benchmarks
from hacrl.study.evaluation import Candidate, evaluate_held_out, find_candidates, model_name
from hacrl.verify import VerifierConfig

EASY, HARD = Benchmark("easy", "Easy"), Benchmark("hard", "Hard", 4, "best")
SUMS = (EASY, HARD)
NUMBER = VerifierConfig(kind="number", options={"which": "first"}, workers=1, timeout=300)
SETTINGS = BenchmarkSettings(max_response_tokens=24, prompt="{question}", verifier=NUMBER)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """easy: twelve one-digit sums; hard: five, gzip-packed, the last too long for a context of 512."""
    folder = tmp_path_factory.mktemp("data")
    easy = [(a, b) for a in (2, 3, 5) for b in (1, 4, 6, 7)]
    hard = [(17, 25), (38, 44), (61, 29), (13, 58)]
    for name, pairs in (("easy.jsonl", easy), ("hard.jsonl.gz", hard)):
        rows = [
            {"id": f"{name[:4]}-{i}", "question": f"{a}+{b}", "answer": str(a + b)}
            for i, (a, b) in enumerate(pairs)
        ]
        if name.startswith("hard"):
            rows.append({"id": "hard-long", "question": "1+" * 600 + "1", "answer": "601"})
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return folder


def pocket(name: str, **settings: Any) -> Candidate:
    agent = AgentConfig(name=name, model=f"pocket:{name}", learn=False, **settings)
    return Candidate(agent, 0, lambda: Policy(agent, device="cpu", temperature=1.0, beta=0.0))


def never(name: str) -> Candidate:
    """An agent that must not be loaded: calling None fails."""
    return replace(pocket(name), load=None)


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Summary, Path]:
    """Both benchmarks: the summary and its folder."""
    out = tmp_path_factory.mktemp("benchmarks") / "out"
    return evaluate_benchmarks([pocket("wren"), pocket("finch")], SUMS, data, out, SETTINGS), out


def row(problem: str, index: int, status: str | None, detail: str = "", **other: Any) -> dict:
    reward = {"ok": 1.0, "wrong": 0.0, "unparsed": 0.0, None: 0.0}.get(status)
    finish = "stop" if status else "not_attempted"
    base = {"problem": problem, "index": index, "status": status, "detail": detail, "task": "t"}
    return {**base, "reward": reward, "finish": finish, "tokens": 10 if status else 0, **other}


# ---------------------------------------------------------------- figures by hand


ROWS = [
    # p: right, wrong, wrong: avg 1/3, best 1; answers 5, 6, 6: the majority is wrong
    row("p", 0, "ok", "5", tokens=4),
    row("p", 1, "wrong", "6", finish="length", tokens=8),
    row("p", 2, "wrong", "6"),
    # q: one answer in three, and it is right: avg 1/3, best 1, majority 1
    row("q", 0, "unparsed", "no answer in the reply"),
    row("q", 1, "ok", "7"),
    row("q", 2, "unparsed", "no answer in the reply"),
    # r: one judged of three, wrong
    row("r", 0, "timeout", "no verdict within 5 s"),
    row("r", 1, "wrong", "1"),
    row("r", 2, "error", "ValueError"),
    # s: none judged: left out
    *(row("s", i, "timeout") for i in range(3)),
    # t: too long for the agent: not solved
    *(row("t", i, None) for i in range(3)),
]


def test_figures_by_hand() -> None:
    """Scores over p, q, r, t: avg (1/3, 1/3, 0, 0), best (1, 1, 0, 0), maj (0, 1, 0, 0). pass@1 is
    avg@1 of 0/1 rewards: 1/6. pass@2 over those with two judged replies (p, q, t):
    1 - C(2,2)/C(3,2) = 2/3 twice and 0: 4/9. pass@3: (1 + 1 + 0) / 3. 12 replies; one was truncated."""
    found = count(ROWS, estimate_scores)
    assert (found.problems, found.samples, found.replies) == (5, 3, 12)
    assert found.avg.mean == pytest.approx(1 / 6)
    assert found.avg.method == "bootstrap" and found.avg.count == 4
    assert (found.best.mean, found.best.method) == (0.5, "wilson")
    assert found.drawn.mean == pytest.approx(19 / 54)  # p and q: 1 - (2/3)^3 = 19/27
    assert found.majority.mean == 0.25
    assert dict(found.passes) == pytest.approx({1: 1 / 6, 2: 4 / 9, 3: 2 / 3})
    assert found.verdicts == {"ok": 2, "wrong": 3, "unparsed": 2, "timeout": 4, "error": 1}
    assert (found.not_attempted, found.unjudged) == (1, 1)
    assert found.reply_tokens == pytest.approx((4 + 8 + 10 * 10) / 12)
    assert found.truncated == pytest.approx(1 / 12)


def test_a_task_called_low_leaves_the_interval_alone() -> None:
    """The interval is that of 1 of 2, whatever the tasks are called."""
    right = [("p", "ok", "low"), ("q", "wrong", "high")]
    found = count([row(p, 0, status, task=task) for p, status, task in right]).metrics()
    other = count([row(p, 0, status) for p, status, _ in right]).metrics()
    ends = ("accuracy", "accuracy/low", "accuracy/high")
    assert [found[key] for key in ends] == [other[key] for key in ends]


def test_ties_go_to_the_first_index_not_to_the_first_line() -> None:
    tie = [row("p", 0, "wrong", "6"), row("p", 1, "ok", "5")]
    assert [count(rows).majority.mean for rows in (tie, tie[::-1])] == [0.0, 0.0]


def test_a_broken_verifier_is_no_zero() -> None:
    broken = [row("p", 0, "error", "boom"), row("q", 0, "error", "boom")]
    assert count(broken).avg is None and count(broken).metrics()["accuracy"] is None
    with pytest.raises(UserError, match=r"none of the 2 replies could be judged.*boom"):
        count_headline(broken, "avg")


# ---------------------------------------------------------------- whole benchmarks


def test_what_is_written(done: tuple[Summary, Path]) -> None:
    """avg@k and best@k once more in plain Python, from the replies on disk."""
    result, out = done
    assert result.agents == ["wren", "finch"] and result.benchmarks == ["easy", "hard"]
    easy, hard = result.result("easy", "wren"), result.result("hard", "wren")
    assert (easy.label, hard.label) == ("avg@1", "best@4")
    assert easy.settings["temperature"] == 0.0 and hard.settings["temperature"] == 1.0
    assert easy.verifier == "number/1"
    assert hard.figures.not_attempted == 1 and hard.figures.problems == 5
    assert hard.figures.replies == 16
    lines = [json.loads(x) for x in (out / "hard" / "wren" / "replies.jsonl").open()]
    assert len(lines) == 20  # the problem that is too long has its four empty lines
    assert [x["index"] for x in lines[:4]] == [0, 1, 2, 3]
    assert not list(out.rglob("*.partial.jsonl"))
    table = (out / "summary.md").read_text()
    assert "| wren" in table and "| finch" in table and "best@4" in table
    times = [json.loads(x) for x in (out / "times.jsonl").open()]
    assert sum(t["replies"] for t in times if t["benchmark"] == "easy") == 24
    for found in result.results:
        scores: dict[str, list[float]] = {}
        for reply in read_rows(out / found.benchmark / found.agent / "replies.jsonl", ""):
            scores.setdefault(reply["problem"], []).append(reply["reward"])
        assert found.figures.avg.mean == pytest.approx(fmean(map(fmean, scores.values())))
        assert found.figures.best.mean == pytest.approx(fmean(map(max, scores.values())))


def test_finished_benchmarks_are_not_run_again(done: tuple[Summary, Path], data: Path) -> None:
    """Other settings are refused."""
    result, out = done
    before = {p: p.stat().st_mtime_ns for p in out.rglob("re*.json*")}
    agents = [never("wren"), never("finch")]
    assert evaluate_benchmarks(agents, SUMS, data, out, SETTINGS) == result
    other = SETTINGS.model_copy(update={"max_response_tokens": 25})
    with pytest.raises(UserError, match="max_response_tokens is 24 there and 25 here"):
        evaluate_benchmarks(agents, SUMS, data, out, other)
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("re*.json*")}


def test_results_of_another_version_of_the_verifier_are_refused(
    done: tuple[Summary, Path], data: Path, tmp_path: Path
) -> None:
    """A result of an older version, and one from before versions were stored."""
    out = tmp_path / "out"
    shutil.copytree(done[1], out)
    path = out / "easy" / "wren" / "settings.json"
    settings = read_object(path, "")
    [version] = settings.pop("verifier_versions")
    for stored in ({**settings, "verifier_versions": ["0"]}, settings):
        write_object(path, stored, indent=2)
        with pytest.raises(UserError, match=f"verifier_versions.*{version}"):
            evaluate_benchmarks([never("wren"), never("finch")], SUMS, data, out, SETTINGS)


def test_other_weights_of_rewards_are_refused(data: Path, tmp_path: Path) -> None:
    def run(weight: float, agent: Candidate) -> Summary:
        rewards = [{"kind": "number"}, {"kind": "exact", "weight": weight}]
        verifier = VerifierConfig.model_validate({"kind": "sum", "rewards": rewards, "workers": 0})
        settings = SETTINGS.model_copy(update={"verifier": verifier, "problems": 1})
        return evaluate_benchmarks([agent], SUMS[:1], data, tmp_path, settings)

    assert run(0.5, pocket("wren")) == run(0.5, never("wren"))
    with pytest.raises(UserError, match=r"weight is 0\.5 there and 2\.0 here"):
        run(2.0, never("wren"))


def test_an_interrupted_benchmark_continues(
    done: tuple[Summary, Path], data: Path, tmp_path: Path
) -> None:
    """As a kill leaves it: some whole problems, one with two of four replies, and a torn line. Only
    the missing problems are asked, in smaller chunks, and the end is the unbroken one."""
    whole, out = done
    rows = read_rows(out / "hard" / "wren" / "replies.jsonl", "")
    folder = tmp_path / "hard" / "wren"
    folder.mkdir(parents=True)
    shutil.copy(out / "hard" / "wren" / "settings.json", folder)
    kept = {**rows[0], "reply": "kept"}
    RowLog(folder / "replies.partial.jsonl", "").replace([kept, *rows[1:6]])
    with open(folder / "replies.partial.jsonl", "a") as file:
        file.write(json.dumps(rows[6])[:20])
    said: list[str] = []
    wren = pocket("wren", sampler_rows=2)  # chunks of 8 replies
    result = evaluate_benchmarks([wren], [HARD], data, tmp_path, SETTINGS, said.append)
    assert said[0] == "wren, Hard: 4 of 5 problems x 4 to do"
    assert result.results[0].figures == whole.result("hard", "wren").figures
    assert read_rows(folder / "replies.jsonl", "") == [kept, *rows[1:]]


def test_a_begun_reply_is_judged_with_its_beginning(data: Path, tmp_path: Path) -> None:
    """The begun reply holds the number that the verifier reads first: every reply becomes wrong or
    right by it alone."""
    begun = pocket("wren", reply_start="42 ")
    short = SETTINGS.model_copy(update={"max_response_tokens": 8})
    evaluate_benchmarks([begun], [HARD], data, tmp_path, short)
    for line in (tmp_path / "hard" / "wren" / "replies.jsonl").open():
        reply = json.loads(line)
        if reply["finish"] != "not_attempted":
            assert reply["reward"] == float(reply["answer"] == "42")


# ---------------------------------------------------------------- problems


def test_the_sample_is_fixed_and_nested(data: Path) -> None:
    every = [p.id for p in load_problems(EASY, data)]
    five = [p.id for p in load_problems(EASY, data, most=5)]
    three = [p.id for p in load_problems(EASY, data, most=3)]
    assert len(five) == 5 and set(three) < set(five) < set(every)
    assert five == [p for p in every if p in five]  # the file's order
    assert five == [p.id for p in load_problems(EASY, data, most=5)]
    assert five != [p.id for p in load_problems(EASY, data, most=5, seed=1)]
    assert [p.id for p in load_problems(EASY, data, most=500)] == every

    problem = load_problems(EASY, data)[0]
    assert problem.messages[0].content == (
        "2+1\nReason step by step and put the final answer in \\boxed{}."
    )
    assert problem.task == "easy"


def test_math7_is_the_papers() -> None:
    assert choose_benchmarks("math7") == MATH7
    assert [b.name for b in MATH7] == [
        "math500", "math_test", "gsm8k_test", "aime25", "amc23", "minerva", "olympiadbench",
    ]  # fmt: skip
    figures = {b.name: (b.samples, b.headline) for b in MATH7}
    assert figures.pop("aime25") == (30, "drawn")
    assert set(figures.values()) == {(1, "avg")}
    assert BenchmarkSettings().max_response_tokens == 8196
    assert BenchmarkSettings().verifier.kind == "math"
    assert [b.name for b in choose_benchmarks("aime25,math500")] == ["math500", "aime25"]
    with pytest.raises(UserError, match=r"'math8' is unknown; there are math7 \(all\), math500"):
        choose_benchmarks("math8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": {"medium": 2}}, "'medium' is not one of the benchmarks easy, hard"),
        ({"prompt": "Hello"}, "names no column"),
    ],
)
def test_what_is_refused(change: dict, message: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        evaluate_benchmarks([never("wren")], SUMS, data, tmp_path, BenchmarkSettings(**change))
    with pytest.raises(UserError, match=r"has no easy\.jsonl or easy\.jsonl\.gz for Easy"):
        evaluate_benchmarks([never("wren")], SUMS, tmp_path, tmp_path / "out")


# ---------------------------------------------------------------- candidates


def test_a_model_as_it_stands() -> None:
    (found,) = find_candidates("pocket:heron", ["system=Be brief.", "sampler_rows=7"])
    assert (found.agent.name, found.agent.model, found.step) == ("heron", "pocket:heron", 0)
    assert (found.agent.system, found.agent.sampler_rows) == ("Be brief.", 7)
    assert not found.agent.learns
    (hub,) = find_candidates("Qwen/Qwen3-1.7B-Base")
    assert hub.agent.name == "Qwen3-1.7B-Base"
    assert model_name("models/my model:v1") == "my-model-v1"
    with pytest.raises(UserError, match="pocket:heron: sistem: unknown key; did you mean 'system'"):
        find_candidates("pocket:heron", ["sistem=x"])
    with pytest.raises(UserError, match="no agents and no checkpoints"):
        find_candidates("pocket:heron", step=3)


def test_a_model_with_the_settings_of_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hacrl eval MODEL --config FILE --agent NAME`: the named agent's settings, not the first's, and
    a folder without a colon."""
    agents = [member(name, "finch", reply_start=f"{name} ") for name in ("one", "two")]
    table = team(*agents, evaluation={"problems": 2, "samples": 1})
    config = tmp_path / "team.toml"
    config.write_text(dump_config(parse_config(table)))
    monkeypatch.chdir(tmp_path)
    for agent, expected in ((None, "one "), ("two", "two ")):
        [(found, result)], out = evaluate_held_out("pocket:wren", config=config, agent=agent)
        assert (found.agent.name, found.agent.model) == ("wren", "pocket:wren")
        assert found.agent.reply_start == expected
        assert out == Path("runs/eval-wren") and result.replies == 2
        assert (out / "held_out" / "wren" / "replies.jsonl").is_file()
    with pytest.raises(UserError, match="--agent 'three': the config has one, two"):
        evaluate_held_out("pocket:wren", config=config, agent="three")
    with pytest.raises(UserError, match="has no checkpoints"):
        evaluate_held_out("pocket:wren", config=config, best=True)
