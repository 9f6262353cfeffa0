"""vLLM on the CPU (`make test-engines`). Without vLLM these tests fail; they are not skipped."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from team import member, team
from transformers import AutoModelForCausalLM
from vllm_policies import (
    NAMES,
    NO_EVALUATION,
    TEMPERATURE,
    VLLM,
    follow,
    gaps,
    make_policy,
    move,
    requests,
    wide_pocket,
    wide_team,
)

import hacrl
from hacrl.errors import RunStopped, UserError
from hacrl.pocket import pocket_path
from hacrl.sampling.base import Request
from hacrl.sampling.engine import BuiltinSampler
from hacrl.store.journal import Journal
from hacrl.store.rundir import RunDirectory
from hacrl.types import Message

pytestmark = pytest.mark.engines


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return wide_pocket(tmp_path_factory.mktemp("wide"))


# ---------------------------------------------------------------- the models of these tests


@pytest.mark.parametrize("name", NAMES)
def test_wider_heads_compute_the_same(wide: dict[str, Path], name: str) -> None:
    """See wide_pocket.py. Words that were never trained are left out: their embeddings are almost 0, so
    rounding changes them."""
    narrow = AutoModelForCausalLM.from_pretrained(pocket_path(name), dtype=torch.float32)
    wider = AutoModelForCausalLM.from_pretrained(wide[name], dtype=torch.float32)
    words = (narrow.get_input_embeddings().weight.norm(dim=1) > 0.1).nonzero().squeeze(1)
    ids = words[torch.arange(120).reshape(3, 40) * 7 % len(words)]
    with torch.no_grad():
        a, b = (m(input_ids=ids).logits.log_softmax(-1) for m in (narrow, wider))
    assert (a - b).abs().max() < 1e-4


# ---------------------------------------------------------------- one engine


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["whole", "lora"])
@pytest.mark.parametrize("name", NAMES)
def test_engine_follows_the_trainer(wide: dict[str, Path], name: str, lora: Any) -> None:
    """Small and large changes, each followed by a sync: replies agree to 1e-4 per token, and the probe's
    difference is much smaller than the change of the trainer."""
    policy = make_policy(wide[name], lora=lora)
    asked = requests(policy)
    for seed, by in enumerate((0.0, 1e-5, 1e-4, 1e-3)):
        move(policy, by, seed)
        replies = policy.sampler.sample(asked, TEMPERATURE)
        found = policy.sampler.agreement
        assert max(gaps(policy, asked, replies)) < 1e-4
        assert found.gap < 1e-5
        assert found.moved == 0.0 if by == 0 else found.moved > 10 * found.gap
    assert policy.sampler.syncs == 5  # at the start, and once for each change


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["whole", "lora"])
def test_engine_follows_in_bfloat16(wide: dict[str, Path], lora: Any) -> None:
    """Model weights in bfloat16, master weights in float32, adapters merged and rounded once: the mean
    difference stays within the default tolerance (0.05)."""
    policy = make_policy(wide["wren"], dtype="bfloat16", lora=lora)
    assert max(follow(policy, (0.0, 1e-3, 1e-2))) < 0.05


def test_the_cache_of_old_weights_is_dropped(wide: dict[str, Path]) -> None:
    """vLLM keeps keys and values of a prompt of 300 tokens for the next request."""
    policy = make_policy(wide["heron"])
    prompt = (policy.renderer.prompt((Message("user", "17+25"),)) * 50)[:300]
    asked = [Request(prompt, key, 20) for key in range(4)]
    for seed in range(2):
        move(policy, 1e-3, seed)
        assert max(gaps(policy, asked, policy.sampler.sample(asked, TEMPERATURE))) < 1e-4


def test_several_updates_cost_one_sync(wide: dict[str, Path]) -> None:
    policy = make_policy(wide["heron"])
    for seed in range(3):
        move(policy, 1e-4, seed)
    policy.sampler.sample(requests(policy), TEMPERATURE)
    policy.sampler.sample(requests(policy), TEMPERATURE)
    assert policy.sampler.syncs == 2


def test_replies(wide: dict[str, Path]) -> None:
    """Greedy replies equal the built-in sampler's. Sampled replies depend only on weights, prompt and
    key, and end at the first end token or at the limit."""
    policy = make_policy(wide["wren"])
    built_in = BuiltinSampler(policy.model, policy.renderer.end_ids, policy.renderer.pad_id, 512)
    asked = requests(policy)
    greedy = policy.sampler.sample(asked, 0.0)
    assert [r.token_ids for r in greedy] == [r.token_ids for r in built_in.sample(asked, 0.0)]

    drawn = policy.sampler.sample(asked, TEMPERATURE)
    assert len({r.token_ids for r in drawn}) > 6
    assert policy.sampler.sample(asked, TEMPERATURE) == drawn
    backwards = policy.sampler.sample(asked[::-1], TEMPERATURE)[::-1]
    alone = [policy.sampler.sample([r], TEMPERATURE)[0] for r in asked]
    assert [r.token_ids for r in backwards] == [r.token_ids for r in drawn]
    assert [r.token_ids for r in alone] == [r.token_ids for r in drawn]

    for reply in policy.sampler.sample(requests(policy, limit=6), TEMPERATURE):
        ends = [i in policy.renderer.end_ids for i in reply.token_ids]
        assert ends[-1] == reply.stopped and not any(ends[:-1])
        assert len(reply.token_ids) == len(reply.logprobs)
        assert reply.stopped or len(reply.token_ids) == 6


def test_the_process_is_left_as_it_was(wide: dict[str, Path]) -> None:
    """vLLM replaces torch.set_num_threads and sets environment variables."""
    before = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    threads = torch.get_num_threads()
    make_policy(wide["heron"])
    assert {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")} == before
    assert torch.get_num_threads() == threads
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_an_engine_outlives_the_others(wide: dict[str, Path]) -> None:
    """A collected engine must not destroy torch.distributed, which the others use."""
    gone, kept = make_policy(wide["wren"]), make_policy(wide["heron"])
    engine = weakref.ref(gone.sampler.engine)
    del gone
    gc.collect()
    assert engine() is None
    assert len(kept.sampler.sample(requests(kept), TEMPERATURE)) == 24
    make_policy(wide["wren"])


def test_unsupported_models_and_lengths(wide: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"vLLM cannot run .*head_dim=16.*sampler = 'builtin'"):
        make_policy(pocket_path("wren"))
    policy = make_policy(wide["heron"])
    with pytest.raises(UserError, match=r"sampler\.max_tokens = 4\d\d"):
        policy.sampler.sample(requests(policy, limit=400), TEMPERATURE)


# ---------------------------------------------------------------- stale weights


@pytest.mark.parametrize("rate", [1e-6, 2e-4])
@pytest.mark.parametrize("kind", ["SkipsSync", "MissesChanges", "LeavesTiedHead"])
def test_stale_weights_stop_the_run(
    wide: dict[str, Path], tmp_path: Path, kind: str, rate: float
) -> None:
    """After the first step, also at the paper's learning rate, which moves log-probabilities by less
    than the allowed 1e-4."""
    sampler = {**VLLM, "kind": f"broken_samplers:{kind}"}
    config = wide_team(wide, "wren", sampler=sampler, learning_rate=rate, **NO_EVALUATION)
    with pytest.raises(RunStopped, match="stale"):
        hacrl.train(config, tmp_path / "run")
    trained = RunDirectory.open(tmp_path / "run").metric_rows("train", "wren")
    assert [r["step"] for r in trained] == [0]


def test_a_sync_without_the_head_fails_at_the_start(wide: dict[str, Path]) -> None:
    """The engine starts with random weights. With the model's files it would agree until the first
    update."""
    with pytest.raises(RunStopped, match=r"stale or incomplete.*builtin"):
        make_policy(wide["wren"], "broken_samplers:NeverRenewsTiedHead")
    make_policy(wide["heron"], "broken_samplers:NeverRenewsTiedHead")  # not tied


def test_a_failed_reload_stops_the_run(wide: dict[str, Path], tmp_path: Path) -> None:
    sampler = {**VLLM, "kind": "broken_samplers:FailsToReload"}
    with pytest.raises(RunStopped, match=r"could not load the new weights .*no memory left"):
        hacrl.train(wide_team(wide, "wren", sampler=sampler, **NO_EVALUATION), tmp_path / "run")


# ---------------------------------------------------------------- whole runs


def test_the_pocket_team_improves(wide: dict[str, Path], tmp_path: Path) -> None:
    """Three agents; the probe of every step is in the metrics and below 1e-4."""
    config = wide_team(
        wide,
        *NAMES,
        steps=5,
        prompts_per_step=32,
        samples_per_prompt=8,
        minibatch_samples=128,
        max_response_tokens=48,
        evaluation={"every": 0, "problems": 100, "samples": 2},
        checkpoint={"save": False},
    )
    run = hacrl.train(config, tmp_path / "run")
    for name in NAMES:
        first, last = (r["accuracy"] for r in run.metric_rows("evaluation", name))
        assert last > first + 0.1, name
        for row in run.metric_rows("train", name):
            assert 0 < row["sync/gap"] < 1e-4
            assert row["sync/gap"] <= row["sync/max_gap"]
            assert row["agreement/mean_gap"] < 1e-4


def test_a_resumed_run_goes_on_with_the_restored_weights(
    wide: dict[str, Path], tmp_path: Path
) -> None:
    """Float32 on the CPU: a new engine samples the same replies as in an uninterrupted run."""
    config = wide_team(wide, "wren", "heron", steps=3, **NO_EVALUATION)
    whole = hacrl.train(config, tmp_path / "whole")
    hacrl.train({**config, "steps": 1}, tmp_path / "parts")
    parts = hacrl.resume(tmp_path / "parts", steps=3)
    for name in ("wren", "heron"):
        for step in range(3):
            a, b = (Journal(run.journal(name)).read(step)[0] for run in (whole, parts))
            assert [r.completion.token_ids for r in a] == [r.completion.token_ids for r in b]


def test_agents_of_two_kinds_in_one_team(wide: dict[str, Path], tmp_path: Path) -> None:
    """vLLM does not support wren's head size; wren keeps the built-in sampler."""
    heron = {"name": "heron", "model": str(wide["heron"]), "learning_rate": 2e-4}
    config = team(member("wren", sampler="builtin"), heron, sampler=VLLM, steps=2, **NO_EVALUATION)
    run = hacrl.train(config, tmp_path / "run")
    assert all("sync/gap" in r for r in run.metric_rows("train", "heron"))
    assert not any("sync/gap" in r for r in run.metric_rows("train", "wren"))


def test_the_same_on_ray(wide: dict[str, Path], tmp_path: Path) -> None:
    """One engine per process gives the same metrics as all engines in one process."""
    runs = [
        hacrl.train(
            wide_team(
                wide,
                "wren",
                "heron",
                steps=2,
                runtime={"kind": kind, "threads": 1, "device": "cpu"},
                **NO_EVALUATION,
            ),
            tmp_path / kind,
        )
        for kind in ("local", "ray")
    ]
    a, b = (sorted(run.metric_rows(), key=lambda r: (r["step"], r["agent"])) for run in runs)
    assert a == b
