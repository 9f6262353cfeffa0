"""The workload file, the floors, and the benchmark itself on the smallest shapes."""

import importlib.util
import json
import subprocess
import sys
from concurrent.futures import Future
from contextlib import closing
from math import exp
from pathlib import Path
from types import SimpleNamespace

import make_workload
import memory_shapes
import pytest
import torch
from luck import luck
from rounding import RoundsByShape
from speed.beside import OtherFailed, _results
from speed.floor import Ceilings, Cost, rollout_floor, score_floor, update_floor
from speed.measure import Log, Measurement
from speed.pocket import largest_difference
from speed.team import Team, choose_outside
from speed.together import PairCase, _learn, _pair_team
from speed.vllm_rollout import _engines
from speed.work import Case
from speed.workload import Trace, make_trace

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COST = Cost(body=10, head=4, width=3, layers=2, cache_bytes=5, weight_bytes=28)
TRACE = Trace("hand", prompts=((1, 2), (3,)), lengths=((2, 3), (1, 4)), rewards=((0, 1), (1, 0)))
ONE = Ceilings(bytes_per_s=1.0, operations_per_s=1.0)


def test_the_workload_is_what_its_script_makes() -> None:
    assert make_workload.content() == make_workload.FILE.read_text()


@pytest.mark.parametrize(("variant", "mean", "cap"), [("long", 700, 4096), ("short", 180, 512)])
def test_the_workload_has_the_lengths_it_claims(variant: str, mean: int, cap: int) -> None:
    columns = json.loads((BENCHMARKS / "workload.json").read_text())[variant]
    lengths = [n for row in columns["reply_tokens"] for n in row]
    assert sum(lengths) / len(lengths) == pytest.approx(mean, abs=1)
    assert max(lengths) == cap and min(lengths) >= 1
    for row in columns["rewards"]:
        assert 0 < sum(row[:8]) < 8 and 0 < sum(row[8:]) < 8


def test_rollout_floor_by_hand() -> None:
    """Rows decode 1, 2, 0 and 3 steps after their first token. Steps: 3 with four rows, and
    ceil(6 / 1) = 6 with one. Cache tokens read: prompts 2, 2, 1 each step, and what was written, the
    step's own token included: (2+1) + (2+1 + 2+2) + 0 + (1+1 + 1+2 + 1+3) = 19. Prefill: 2 x 10 x 3
    for the body, 2 x 4 x 2 for the head, attention 2 x 2 x 3 x (4 + 1) = 60: 136 operations."""
    assert rollout_floor(COST, TRACE, 4, ONE) == 3 * 28 + 19 * 5 + 136
    assert rollout_floor(COST, TRACE, 1, ONE) == 6 * 28 + 19 * 5 + 136


def test_score_and_update_floors_by_hand() -> None:
    """Prompts of 2 and 1 tokens, once each, and replies of 2, 3, 1 and 4: body 2 x 10 x 13, head 2 x 4
    x 10 reply tokens, attention 2 x 2 x 3 x (4 + 1 for prompts, 2(2+4) + 3(3+4) + 1(1+2) + 4(4+2) = 60
    for replies and what they follow) = 780."""
    assert score_floor(COST, TRACE, ONE) == 260 + 80 + 780
    assert update_floor(COST, TRACE, ONE) == 3 * (260 + 80 + 780)


def test_agents_of_a_trace_share_prompts_and_not_lengths() -> None:
    a, b = (make_trace("short", 4, 512, agent=i) for i in (0, 1))
    assert a.prompts == b.prompts and a.lengths != b.lengths
    assert len(a.rows) == 32 and a.tokens == sum(len(p) + n for p, n in a.rows)


@pytest.mark.parametrize("share", [0.0, 0.35, 0.6])
def test_the_chosen_share_lies_below_every_floor(share: float) -> None:
    """exp(score - behaviour) is inside [0.875, 1] or below 0.8, nothing between."""
    scores = {(str(i), 0): -11.0 - i / 100 for i in range(100)}
    ratios = [exp(scores[key] - b) for key, b in choose_outside(scores, share).items()]
    assert sum(r < 0.8 for r in ratios) == round(100 * share)
    assert all(r < 0.8 or 0.875 <= r <= 1 for r in ratios)


def test_the_error_of_the_agent_that_failed_is_raised() -> None:
    """Not that of the agent that waited for it."""
    waited, failed, done = (Future[int]() for _ in range(3))
    waited.set_exception(OtherFailed("another agent failed"))
    failed.set_exception(ValueError("out of memory"))
    done.set_result(3)
    with pytest.raises(ValueError, match="out of memory"):
        _results([waited, failed, done])
    assert _results([done]) == [3]


def test_metrics_that_differ_are_seen() -> None:
    rows = [{"step": 0, "loss": 0.5, "agreement/max_gap": 1.0, "kl": None}]
    same = [{"step": 0, "loss": 0.5, "agreement/max_gap": 2.0, "kl": None}]
    assert largest_difference(rows, same) == (0.0, 2)
    moved = [{**rows[0], "loss": 0.5001}]
    assert largest_difference(rows, moved)[0] == pytest.approx(1e-4)
    assert largest_difference(rows, [{**rows[0], "kl": 0.1}])[0] == float("inf")
    assert largest_difference(rows, [])[0] == float("inf")


def test_every_part_runs_on_the_smallest_shapes(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    ran = subprocess.run(
        [
            sys.executable,
            str(BENCHMARKS / "bench.py"),
            *("cpu", "--tiny", "--no-trl", "--repeats", "1", "--out", str(out)),
            *("--parts", "rollout,score,update,step,joint,pair"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(out.read_text())
    parts = [m["part"] for m in found["measurements"]]
    assert found["failed"] == []
    assert {"rollout", "score", "update", "step", "joint", "pair"} <= set(parts)
    for m in found["measurements"]:
        assert m["seconds"] > 0
        assert m["facts"].get("largest_gap", 0.0) < 1e-6
        assert m["facts"].get("outside_clip", 0.0) == 0
    joint = [m["facts"] for m in found["measurements"] if "peers_used_a" in m["facts"]]
    assert [round(f["peers_used_a"], 2) for f in joint] == [1.0, 0.66, 0.41]
    assert all(f["rest_a_s"] > 0 and f["view_a_s"] > 0 and f["alloc_retries"] == 0 for f in joint)
    fast = {"packs": True, "fused": False, "sampler": "transformers"}
    for m in found["measurements"]:
        if m["part"] in ("rollout", "step"):
            assert (
                fast.items() <= m["facts"].items()
                and "packed, not compiled, transformers" in m["note"]
            )
        if "rollout-" in m["case"] or "learn-" in m["case"]:
            assert (
                fast.items() <= m["facts"].items()
                and m["note"] == "packed, not compiled, transformers"
            )
        if "rollouts of both" in m["case"]:
            assert {f"{key}_b": value for key, value in fast.items()}.items() <= m["facts"].items()
            assert "b: packed" in m["note"]
        if m["part"] in ("score", "update"):
            assert m["facts"]["packs"] and "packed" in m["note"]


def test_agents_side_by_side_are_counted_together(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    arguments = ["cpu", "--tiny", "--no-trl", "--no-generate", "--repeats", "1", "--out", str(out)]
    parts = ["--parts", "rollout", "--shape", "tiny-a", "--beside", "2"]
    command = [sys.executable, str(BENCHMARKS / "bench.py"), *arguments, *parts]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (row,) = json.loads(out.read_text())["measurements"]
    assert row["tokens"] == 2 * make_trace("short", 2, 64, length=8).reply_tokens
    assert row["of_floor"] == pytest.approx(row["facts"]["floor_s"] / row["seconds"])


def test_the_price_of_a_million_tokens_by_hand() -> None:
    """3.6 an hour is 0.001 a second: 2 seconds for 500 tokens cost 0.002, a million tokens 4."""
    rows = [
        Measurement("rollout", "a", 2.0, 500, reply_tokens=500, against_vllm=1.5),
        Measurement("score", "b", 2.0, 500),
    ]
    assert [m.price_of_million(3.6) for m in rows] == [pytest.approx(4.0), None]
    log = Log(None, 3.6)
    log.measurements = rows
    head, _, first, second = log.table().splitlines()
    assert "price of 1M reply tokens" in head and "| 1.50 |" in first and "| 4 |" in first
    assert head.count("|") == first.count("|") == second.count("|")
    log.hourly = None
    assert "price" not in log.table() and "| 4 |" not in log.table()


def test_engines_of_the_vllm_part() -> None:
    """One for each number of rows, and one with vLLM's default for cases in which replies wait."""
    all_at_once, waiting = Case("tiny-a", 2, rows=16, length=8), Case("tiny-a", 4, rows=16)
    setting = SimpleNamespace(fields={})
    cases = [all_at_once, waiting]
    assert list(_engines(setting, cases)) == [(16, cases), (None, [waiting])]
    setting.fields = {"sampler_rows": 32}
    assert list(_engines(setting, cases)) == [(32, cases)]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_other_parts_continue(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    arguments = ["cpu", "--tiny", "--no-trl", "--no-generate", "--repeats", "1", "--out", str(out)]
    parts = ["--parts", "vllm,rollout", "--shape", "tiny-a", "--price", "2"]
    command = [sys.executable, str(BENCHMARKS / "bench.py"), *arguments, *parts]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "vllm: vLLM is not installed" in ran.stdout and "Traceback" not in ran.stdout
    found = json.loads(out.read_text())
    assert found["failed"] == ["vllm"] and found["environment"]["price_per_hour"] == 2
    (row,) = found["measurements"]
    assert row["part"] == "rollout"
    assert row["price_of_million"] == pytest.approx(2 / 3.6e3 / row["tokens_per_s"] * 1e6)


def test_in_half_precision_the_first_update_is_at_the_scores(tmp_path: Path) -> None:
    """As in a run: no own sample is outside a clip of 3e-4 at the weights that scored it, although other
    micro-batches round it differently. Agents that are created for each arm are marked as having scored
    it; without the mark they read the journal."""
    team = Team(
        {"a": "small-1M"},
        {"a": make_trace("short", 4, 4096, scale=0.1)},
        tmp_path,
        torch.device("cpu"),
        minibatch=16,
        fields={"a": {"dtype": "bfloat16", "microbatch_tokens": 200}},
    )
    with closing(team), RoundsByShape():
        agent = team.agents("gspo")["a"]
        agent.rollout(0)
        team.pool.close(0, ["a"])
        row = team.rollouts(agent, 0)[0]
        alone = agent.policy.score([(row.prompt_ids, row.completion.token_ids)])[0]
        assert alone != pytest.approx(row.completion.logprobs, abs=1e-3)
        _, facts, _ = _learn(team.agents("gspo"), team.device, repeats=2, number=0)
        assert facts["own_clipped_first_a"] == 0
        again = team.agents("gspo")["a"].learn(0)
        assert again["own/clipped_first"] == 0


@pytest.mark.parametrize(
    ("asked", "found"), [({}, [300, 200]), ({"microbatch_tokens": 90}, [90, 90])]
)
def test_each_agent_of_a_pair_has_its_own_microbatches(tmp_path: Path, asked, found) -> None:
    case = PairCase(("tiny-a", "tiny-b"), 2, 16, rows=16, scale=0.05, microbatch=(300, 200))
    setting = SimpleNamespace(device=torch.device("cpu"), fields=asked)
    with closing(_pair_team(setting, case, case.traces(), tmp_path)) as team:
        assert [p.agent.microbatch_tokens for p in team.policies.values()] == found
        assert [a.microbatch_tokens for a in team.config("hacpo").agents] == found


def test_a_memory_case_that_fails_leaves_the_others(tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "memory.json"
    cases = [memory_shapes.Case("none", ("no such shape",)), memory_shapes.TINY[0]]
    monkeypatch.setattr(memory_shapes, "TINY", cases)
    arguments = ["memory_shapes.py", "--tiny", "--device", "cpu", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert memory_shapes.main() == 1
    failed, done = json.loads(out.read_text())
    assert "no such shape" in failed["failed"] and done["predicted"] > 0
    assert "failed: none" in capsys.readouterr().out
    monkeypatch.setattr(memory_shapes, "TINY", cases[1:])
    assert memory_shapes.main() == 0


def test_luck_by_hand() -> None:
    """Answers 1, 1, 2; replies 1, 2 and nothing: one right. By the other two problems' answers the
    first is right once of two, the second once of two."""
    rows = [("p", "1", "1"), ("q", "1", "2."), ("r", "2", None)]
    replies = [{"problem": p, "answer": a, "detail": d} for p, a, d in rows]
    right, lucky = luck(replies)
    assert right == pytest.approx(1 / 3) and lucky == pytest.approx((1 + 1) / 2 / 3)
