"""Groups, samples and batches by hand, for the tests of the rivals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from hacrl.types import (
    Finish,
    Group,
    MicroBatch,
    Sample,
    Sampling,
    Status,
    Trajectory,
    Turn,
    Verdict,
)

VERDICTS = {
    "1": Verdict(1.0, Status.OK),
    "0": Verdict(0.0, Status.WRONG),
    "u": Verdict(0.0, Status.UNPARSED),
    "t": Verdict(0.0, Status.TIMEOUT),
}


def make_groups(replies: Mapping[str, Mapping[str, str]], step: int = 0) -> list[Group]:
    """{"q": {"a": "100", "b": "0t"}}: one letter a reply, see VERDICTS."""
    return [
        Group(
            problem,
            "t",
            tuple(
                Trajectory(
                    problem_id=problem,
                    task="t",
                    agent=agent,
                    index=i,
                    step=step,
                    policy_version=0,
                    turns=(Turn("assistant", "x", True),),
                    finish=Finish.STOP,
                    mean_logprob=-1.0,
                    num_tokens=1,
                    verdict=VERDICTS[letter],
                    verifier="test/1",
                    sampling=Sampling(1.0, 4),
                    shareable=True,
                )
                for agent in sorted(members)
                for i, letter in enumerate(members[agent])
            ),
        )
        for problem, members in replies.items()
    ]


def make_samples(groups: Sequence[Group], learner: str) -> list[Sample]:
    """What the learner's view holds when nothing is lost: own first, then by name and index."""
    return [
        Sample(t.problem_id, t.index, t.agent, t.agent == learner, (1, 2), (0, 1), -1.0)
        for g in groups
        for t in sorted(g.judged, key=lambda t: (t.agent != learner, t.agent, t.index))
    ]


def make_batch(
    logprobs: Sequence[Sequence[float]], own: Sequence[bool], **given: object
) -> MicroBatch:
    """Rows without padding unless `mask` says so; the minibatch is these rows."""
    logprobs_BT = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    mask_BT = torch.tensor(given.get("mask", [[1.0] * len(r) for r in logprobs])).double()

    def tensor(name: str, default: float | None) -> torch.Tensor | None:
        values = given.get(name, None if default is None else [default] * len(own))
        return None if values is None else torch.tensor(values, dtype=torch.float64)

    own_B = torch.tensor(own)
    return MicroBatch(
        logprobs_BT=logprobs_BT,
        mask_BT=mask_BT,
        behaviour_B=tensor("behaviour", -1.0),
        old_logprobs_BT=tensor("old", None),
        ref_logprobs_BT=tensor("ref", None),
        advantage_B=tensor("advantage", 0.0),
        weight_B=tensor("weight", 1.0),
        is_own_B=own_B,
        num_samples=len(own),
        num_own=sum(own),
        num_tokens=int(mask_BT.sum()),
        num_own_tokens=int(mask_BT[own_B].sum()),
        source_logprobs_BT=tensor("source", None),
    )


@pytest.fixture
def groups_of() -> Callable[..., list[Group]]:
    return make_groups


@pytest.fixture
def seen_by() -> Callable[[Sequence[Group], str], list[Sample]]:
    return make_samples


@pytest.fixture
def batch_of() -> Callable[..., MicroBatch]:
    return make_batch
