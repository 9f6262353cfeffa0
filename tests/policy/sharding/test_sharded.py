"""Two ranks on the CPU, in two processes, compared with an unsharded policy."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import ratio_rows
import torch
from ratio_rows import UPDATE, algorithm, learn, rows_of

from hacrl.config import AgentConfig
from hacrl.errors import UserError
from hacrl.noise import stream_key
from hacrl.policy.policy import Policy
from hacrl.policy.sharding import process_group
from hacrl.policy.sharding.process_group import RankGroup, join_group, leave_world, open_store
from hacrl.policy.sharding.sharded import ShardedPolicy
from hacrl.policy.sharding.split import balance, split_rows
from hacrl.policy.update import UpdateReport
from hacrl.sampling.base import Request
from hacrl.types import Message

TIMEOUT = timedelta(minutes=5)
"""Instead of half an hour, so that ranks out of step give an error and not a hanging test."""
FOLLOWER = """
import sys
from datetime import timedelta
from hacrl.policy.sharding import process_group
from hacrl.policy.sharding.sharded import follow

process_group.DATA_TIMEOUT = process_group.CONTROL_TIMEOUT = timedelta(minutes=5)
group = process_group.join_group(1, 2, sys.argv[1])
while True:
    follow(group, "cpu")
"""


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    """This process is rank 0; the other one follows one policy after the other until this one leaves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "DATA_TIMEOUT", TIMEOUT)
        patch.setattr(process_group, "CONTROL_TIMEOUT", TIMEOUT)
        store = open_store()
        address = f"127.0.0.1:{store.port}"
        command = [sys.executable, "-c", FOLLOWER, address]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        group = join_group(0, 2, address, agent="a", store=store)
        try:
            yield group
        finally:
            leave_world(group)
            _, errors = process.communicate(timeout=300)
    assert "rank 0 of the process group is gone" in errors.decode()  # and no other error before


@pytest.fixture
def pair(group: RankGroup):
    """Makes a policy twice: sharded over the two ranks, and whole."""
    made: list[ShardedPolicy] = []

    def make(model: Path, beta: float = 0.0, **changes) -> tuple[ShardedPolicy, Policy]:
        agent = AgentConfig(**{"name": "a", "model": str(model), "learning_rate": 1e-3, **changes})
        made.append(ShardedPolicy(agent, group=group, device="cpu", temperature=1.0, beta=beta))
        return made[-1], Policy(agent, device="cpu", temperature=1.0, beta=beta)

    yield make
    for policy in made:
        policy.close()


SPECS = ratio_rows.SPECS[:-1]  # 9 rows of advantage other than 0: the ranks get 5 and 4
CLIPPED = [SPECS[i] for i in (1, 2, 6)]


def assert_same_report(one: UpdateReport, two: UpdateReport) -> None:
    assert one.loss == pytest.approx(two.loss, abs=1e-6)
    assert one.grad_norm == pytest.approx(two.grad_norm, abs=1e-6, rel=1e-5)
    assert one.kl == pytest.approx(two.kl, abs=1e-6, rel=1e-5)
    assert one.ratios == pytest.approx(two.ratios, abs=1e-5)
    assert one.weights == pytest.approx(two.weights, abs=1e-5)
    assert (one.skipped, one.learning_rate) == (two.skipped, two.learning_rate)


def assert_same_state(sharded: ShardedPolicy, whole: Policy, tolerance: float) -> None:
    """Weights, moments and counters; and the copy for sampling has the weights of the shards."""
    one, two = sharded.checkpoint(1), whole.checkpoint(1)
    assert one.state == two.state
    assert list(one.model) == list(two.model) and list(one.optimizer) == list(two.optimizer)
    for mine, theirs in ((one.model, two.model), (one.optimizer, two.optimizer)):
        for name, tensor in mine.items():
            assert torch.allclose(tensor, theirs[name], atol=tolerance, rtol=0), name
    copy = dict(sharded.model.named_parameters())
    for name, tensor in one.model.items():
        assert torch.equal(copy[name].cpu(), tensor.to(copy[name].dtype)), name


# ---------------------------------------------------------------- an update


@pytest.mark.parametrize(
    ("family", "beta", "changes", "specs"),
    [
        ("llama", 0.0, {"microbatch_tokens": 30}, SPECS),  # tied embeddings
        ("llama", 0.0, {"microbatch_tokens": 1}, SPECS),  # one empty micro-batch on rank 1
        ("qwen", 0.1, {"microbatch_tokens": 30}, SPECS),  # a second, frozen, sharded model
        ("llama", 0.1, {"lora": {"rank": 4}, "microbatch_tokens": 1}, SPECS),
        ("qwen", 0.0, {"gradient_checkpointing": True, "warmup_updates": 3}, SPECS),
        ("llama", 0.1, {}, SPECS[:1]),  # fewer rows than ranks
        # Rank 0, and both ranks, have only clipped rows: no rank waits for the other.
        ("llama", 0.0, {"microbatch_tokens": 1}, CLIPPED[:1] + SPECS[:1] + CLIPPED[1:]),
        ("llama", 0.0, {"microbatch_tokens": 1, "weight_decay": 0.5}, CLIPPED),
        ("llama", 0.0, {"max_grad_norm": 1e-9}, SPECS),  # clipped by the norm of all shards
    ],
)
def test_updates_are_those_of_the_whole_policy(
    pair, family: str, beta: float, changes: dict, specs: list, request
) -> None:
    sharded, whole = pair(request.getfixturevalue(family), beta, **changes)
    rows = rows_of(whole, specs)
    for _ in range(2):  # the second with moments, and with a KL that is not zero
        mine, theirs = (learn(p, rows, beta=beta) for p in (sharded, whole))
        assert_same_report(mine, theirs)
        assert_same_state(sharded, whole, 1e-5)
        # AdamW can turn rounding of gradients into whole steps: continue from the same weights.
        whole.restore(sharded.checkpoint(1))
    assert (mine.kl > 0) == (beta > 0)
    if specs in (SPECS, CLIPPED):
        assert (mine.grad_norm > 1e-3) == (specs is SPECS)


def test_gradients_are_summed_over_ranks_not_averaged(pair, llama: Path) -> None:
    """Also if one rank has none of the rows."""
    sharded, whole = pair(llama)
    rows, loss = rows_of(whole, SPECS), algorithm().loss
    for chosen in (range(len(rows)), [4]):
        mine, theirs = (p.gradient(rows, chosen, loss, UPDATE) for p in (sharded, whole))
        assert list(mine) == list(theirs)
        for name, gradient in theirs.items():
            assert torch.allclose(mine[name], gradient, atol=1e-6, rtol=0), name
        assert max(g.abs().max() for g in mine.values()) > 1e-3
    assert sharded.updates_made == 0


def test_a_non_finite_update_is_skipped_by_all_ranks(pair, llama: Path) -> None:
    """Only one rank has the row with advantage nan."""
    sharded, whole = pair(llama)
    rows = rows_of(whole, SPECS)
    before = sharded.checkpoint(0)
    broken = [replace(rows[0], advantage=float("nan")), *rows[1:]]
    for count in (1, 2):
        assert learn(sharded, broken).skipped
        assert sharded.skipped_in_a_row == count
    after = sharded.checkpoint(0)
    assert all(torch.equal(before.model[n], after.model[n]) for n in before.model)
    assert not learn(sharded, rows).skipped
    learn(whole, rows)
    assert_same_state(sharded, whole, 1e-6)
    assert sharded.skipped_in_a_row == 0 and sharded.updates_made == 1


def test_a_shard_counts_its_own_memory_and_is_never_offloaded(pair, llama: Path) -> None:
    """Moments are 8 bytes per parameter of this rank, counted before the first update."""
    sharded, whole = pair(llama, offload="optimizer")
    here = sum(m.to_local().numel() for m in sharded.master.values())
    assert 0 < here < sum(m.numel() for m in sharded.master.values())
    assert sharded.offloader.absent_bytes() == 8 * here
    for _ in range(2):
        learn(sharded, rows_of(whole, SPECS))
        sharded.offload()
        assert sharded.offloader.absent_bytes() == 0 and not sharded.offloader.offloaded


def test_bfloat16_has_float32_shards(pair, llama: Path) -> None:
    """Steps of 1e-6 vanish in bfloat16; the shards keep them."""
    sharded, whole = pair(llama, dtype="bfloat16", learning_rate=1e-6)
    rows = rows_of(whole, SPECS)
    start = sharded.checkpoint(0)
    for _ in range(2):
        mine, theirs = (learn(p, rows, epsilon_low=0.9, epsilon_high=9.0) for p in (sharded, whole))
    assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=0.03)
    assert mine.loss == pytest.approx(theirs.loss, abs=0.02)
    assert next(sharded.model.parameters()).dtype == torch.bfloat16
    after = sharded.checkpoint(2)
    resident = dict(sharded.model.named_parameters())
    for name, tensor in after.model.items():
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, start.model[name])
        assert torch.allclose(tensor, whole.checkpoint(2).model[name], atol=1e-5, rtol=0)
        assert torch.equal(resident[name], tensor.to(torch.bfloat16))


# ---------------------------------------------------------------- scoring and sampling


@pytest.mark.parametrize("learns", [True, False])
def test_scores_and_replies_equal_those_of_the_whole_policy(pair, llama: Path, learns) -> None:
    """Also after an update: the copies for sampling have the new weights."""
    sharded, whole = pair(llama, microbatch_tokens=40, learn=learns)
    rows = rows_of(whole, SPECS)
    prompts = [whole.renderer.prompt([Message("user", "x" * i + "?")]) for i in range(5)]
    asked = [
        Request(prompts[i // 3], stream_key(0, "a", 0, f"p{i // 3}", i % 3), 12 + i % 3)
        for i in range(15)
    ]
    for _ in range(2 if learns else 1):
        for some, temperature in ((asked, 1.0), (asked[:3], 1.0), (asked[:1], 0.0), ([], 1.0)):
            mine, theirs = (p.sampler.sample(some, temperature) for p in (sharded, whole))
            assert [r.token_ids for r in mine] == [r.token_ids for r in theirs]
            pairs = [(a.prompt_ids, r.token_ids) for a, r in zip(some, theirs, strict=True)]
            for one, two in zip(sharded.score(pairs), whole.score(pairs), strict=True):
                assert one == pytest.approx(two, abs=1e-5)
        if learns:
            learn(sharded, rows)
            whole.restore(sharded.checkpoint(1))


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 4}}])
def test_a_checkpoint_moves_from_two_ranks_to_one_and_back(
    pair, llama: Path, qwen: Path, tmp_path: Path, changes: dict
) -> None:
    sharded, whole = pair(llama, **changes)
    rows = rows_of(whole, SPECS)
    for one, other in ((sharded, whole), (whole, sharded)):
        learn(one, rows)
        other.restore(one.checkpoint(1))
        assert_same_state(sharded, whole, 0.0)
        for p in (sharded, whole):
            learn(p, rows)
        assert_same_state(sharded, whole, 1e-5)
    sharded.export(tmp_path / "out")
    exported = ratio_rows.policy(tmp_path / "out")
    pairs = [(rows[0].token_ids[:3], rows[0].token_ids[3:])]
    assert exported.score(pairs)[0] == pytest.approx(whole.score(pairs)[0], abs=1e-5)
    with pytest.raises(UserError, match="another model"):
        sharded.restore(ratio_rows.policy(qwen).checkpoint(1))
    assert sharded.score(pairs)[0] == pytest.approx(whole.score(pairs)[0], abs=1e-5)  # still usable


# ---------------------------------------------------------------- splitting rows


def test_rows_are_split_evenly() -> None:
    assert balance([5, 9, 4, 8], 2) == [[1, 2], [0, 3]]
    assert balance([3], 3) == [[0], [], []]
    assert balance([], 2) == [[], []]
    assert balance([7, 1, 1, 1, 1, 1, 1, 1], 2) == [[0], [1, 2, 3, 4, 5, 6, 7]]


def test_rows_of_one_prompt_stay_together() -> None:
    prompts = [(i // 4,) for i in range(12)]
    assert split_rows(prompts, [10] * 12, 2) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]
    assert split_rows(prompts[:4], [10] * 4, 2) == [[0, 2], [1, 3]]  # one prompt, on both ranks
    # The 20 tokens of a prompt count once: 20 + 4 x 1 against 1 + 4 x 5.
    costs = [1] * 4 + [5] * 4
    assert split_rows([(5,) * 20] * 4 + [(6,)] * 4, costs, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    by_rows = split_rows(prompts, [10] * 12, 2, min_prompts=2)  # 3 prompts are too few for 2 ranks
    assert sorted(map(len, by_rows)) == [6, 6] and by_rows[0] != [0, 1, 2, 3, 8, 9]
