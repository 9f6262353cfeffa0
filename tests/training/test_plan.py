import pytest

from hacrl.algorithms import Needs
from hacrl.errors import UserError
from hacrl.training.plan import make_plan, minibatch, replaced
from hacrl.types import Sample


def plan(
    prompts=128,
    team=None,
    minibatch_samples=512,
    *,
    peers="logprob",
    updates="own_first",
    **changes,
):
    settings = {"floor": 0.8, "last_floor": 0.875} | changes
    return make_plan(
        needs=Needs(peers, updates=updates),
        learner="a",
        prompts=prompts,
        samples_per_prompt=team or {"a": 8, "b": 8},
        minibatch_samples=minibatch_samples,
        **settings,
    )


def test_the_papers_numbers() -> None:
    """128 x 8 with minibatch 512: 2 updates alone, 4 in a team of two, floors 0.025 apart; GSPO x2
    (16 samples) makes 4 of the same size."""
    team = plan()
    assert team.parts == (("own", 2), ("peers", 2))
    assert team.floors == pytest.approx((0.8, 0.825, 0.85, 0.875))
    assert plan(peers="none").parts == (("own", 2),)
    assert plan(team={"a": 16}).parts == (("own", 4),)


@pytest.mark.parametrize(("agents", "updates"), [(1, 2), (2, 4), (3, 6), (5, 10)])
def test_floor_reaches_last_floor_for_any_team(agents: int, updates: int) -> None:
    made = plan(team=dict.fromkeys("abcde"[:agents], 8))
    assert len(made.floors) == updates
    assert made.floors[0] == 0.8
    assert made.floors[-1] == pytest.approx(0.875)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"updates": "peers_first"}, (("peers", 2), ("own", 2))),
        ({"updates": "mixed"}, (("mixed", 4),)),
        # own 4 a prompt: 512 samples, 1 part; peers 8 + 6: 1792 samples, 4 parts
        ({"team": {"a": 4, "b": 8, "c": 6}}, (("own", 1), ("peers", 4))),
        # as many updates as alone, with any number of peers
        ({"team": {"a": 8}, "updates": "with_own"}, (("mixed", 2),)),
        ({"team": {"a": 8, "b": 8, "c": 16}, "updates": "with_own"}, (("mixed", 2),)),
    ],
)
def test_parts(settings: dict, parts: tuple) -> None:
    assert plan(**settings).parts == parts


def test_every_problem_is_in_each_block_once_and_parts_are_equal() -> None:
    ids = [f"p{i}" for i in range(10)]
    updates = plan(prompts=10, minibatch_samples=32).updates(ids, seed=1, step=4)
    assert [u.part for u in updates] == ["own"] * 3 + ["peers"] * 3
    for block in (updates[:3], updates[3:]):
        assert sorted(p for u in block for p in u.problems) == sorted(ids)
        assert {len(u.problems) for u in block} == {3, 4}
    assert [u.index for u in updates] == list(range(6))


def test_order_depends_on_seed_and_step_only() -> None:
    ids = [f"p{i}" for i in range(32)]
    made = plan(prompts=32, minibatch_samples=256)
    one = [u.problems for u in made.updates(ids, 1, 4)]
    assert one == [u.problems for u in made.updates(reversed(ids), 1, 4)]
    assert one != [u.problems for u in made.updates(ids, 1, 5)]
    assert one != [u.problems for u in made.updates(ids, 2, 4)]


def test_minibatch_takes_its_block_in_plan_order() -> None:
    samples = [
        Sample(p, i, source, source == "a", (1,), (1,), 0.0)
        for p in ("p0", "p1")
        for source in ("a", "b")
        for i in (0, 1)
    ]
    own, peers = plan(prompts=2, minibatch_samples=32).updates(["p0", "p1"], 0, 0)
    assert {s.source for s in minibatch(samples, own)} == {"a"}
    assert {s.source for s in minibatch(samples, peers)} == {"b"}
    assert [s.problem_id for s in minibatch(samples, own)[::2]] == list(own.problems)


def test_a_minibatch_smaller_than_a_group_is_refused() -> None:
    with pytest.raises(UserError, match="at least 8"):
        plan(minibatch_samples=4, peers="none")


def test_replaced_problems_come_last_and_the_rest_stays_in_order() -> None:
    ids = [f"p{i}" for i in range(12)]
    made = plan(prompts=12, minibatch_samples=32, updates="with_own")
    plain = [p for u in made.updates(ids, seed=1, step=4) for p in u.problems]
    last = {plain[0], plain[5]}
    updates = made.updates(ids, seed=1, step=4, last=last)
    assert [p for u in updates for p in u.problems] == [
        *(p for p in plain if p not in last),
        plain[0],
        plain[5],
    ]
    assert [len(u.problems) for u in updates] == [4, 4, 4]


def test_replaced_are_the_problems_left_to_peers_alone() -> None:
    """p: own and peer's; q: peer's only; r: own only."""
    sources = [("p", "a"), ("p", "b"), ("q", "b"), ("q", "b"), ("r", "a")]
    samples = [Sample(p, i, s, s == "a", (1,), (1,), 0.0) for i, (p, s) in enumerate(sources)]
    assert replaced(samples) == {"q"}


def test_late_samples_have_updates_of_their_own_at_the_last_floor() -> None:
    """Up to 1,024 late samples: two more updates; the floors of the others stay."""
    late = plan(late_samples=1024)
    assert late.floors == pytest.approx((0.8, 0.825, 0.85, 0.875, 0.875, 0.875))
    assert late.parts == plan().parts and late.late == 2
    group = [Sample(f"p{i}", 0, "b", False, (1, 2), (0, 1), -1.0) for i in range(3)]
    updates = late.late_updates([[s, s] for s in group])
    assert [(u.index, u.part, u.floor, u.problems, len(batch)) for u, batch in updates] == [
        (4, "late", 0.875, ("p0", "p1"), 4),
        (5, "late", 0.875, ("p2",), 2),
    ]
    assert late.late_updates([]) == []
    for other in ({"peers": "none"}, {"peers": "text", "updates": "with_own"}):
        assert plan(late_samples=1024, **other).late == 0
