"""Groups, samples and micro-batches by hand."""

from collections.abc import Mapping, Sequence

import torch
from rows import make_row

from hacrl.algorithms import Algorithm, Step, make_algorithm, make_settings
from hacrl.algorithms.capability import Capability
from hacrl.types import Group, LossOutput, MicroBatch, Sample, Status, Trajectory, Verdict

LETTERS = {"1": Status.OK, "0": Status.WRONG, "u": Status.UNPARSED, "t": Status.TIMEOUT}


def rule(name: str, **settings: object) -> Algorithm:
    return make_algorithm(make_settings(name, **settings))


def reply(
    agent: str,
    reward: float,
    index: int = 0,
    *,
    problem: str = "q",
    task: str = "t",
    step: int = 0,
    status: Status = Status.OK,
) -> Trajectory:
    verdict = Verdict(reward, status)
    fields = {"task": task, "verdict": verdict, "mean_logprob": -1.0, "num_tokens": 1}
    return make_row(agent, problem, index, step, "x", policy_version=0, **fields)


def groups_of(replies: Mapping[str, Mapping[str, str]], step: int = 0) -> list[Group]:
    """{"q": {"a": "100", "b": "0t"}}: one letter per reply, see LETTERS."""
    return [
        Group(
            problem,
            "t",
            tuple(
                reply(x, float(r == "1"), i, problem=problem, step=step, status=LETTERS[r])
                for x in sorted(members)
                for i, r in enumerate(members[x])
            ),
        )
        for problem, members in replies.items()
    ]


def seen_by(groups: Sequence[Group], learner: str) -> list[Sample]:
    """The learner's samples if none is dropped: own first, then by name and index."""
    return [
        Sample(t.problem_id, t.index, t.agent, t.agent == learner, (1, 2), (0, 1), -1.0)
        for g in groups
        for t in sorted(g.judged, key=lambda t: (t.agent != learner, t.agent, t.index))
    ]


def step_of(
    groups: Sequence[Group] | Mapping[str, Mapping[str, str]],
    samples: Sequence[Sample] | None = None,
    learner: str = "a",
    **capability: float,
) -> Step:
    """A step with these groups, or with `groups_of` them, and with all samples unless given."""
    groups = groups_of(groups) if isinstance(groups, Mapping) else groups
    values = {(agent, ""): p for agent, p in capability.items()}
    seen = seen_by(groups, learner) if samples is None else samples
    return Step(learner, seen, groups, Capability(values))


def batch_of(
    logprobs: Sequence[Sequence[float]], own: Sequence[bool] | None = None, **given: object
) -> MicroBatch:
    """Rows without padding unless `mask` is given; the minibatch has no other rows."""
    logprobs_BT = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    mask_BT = torch.tensor(given.get("mask", [[1.0] * len(r) for r in logprobs])).double()
    own = [True] * len(logprobs) if own is None else own

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


def gradient(output: LossOutput, batch: MicroBatch) -> list[list[float]]:
    """Of the loss by the log-probabilities."""
    (found,) = torch.autograd.grad(output.loss, batch.logprobs_BT)
    return found.tolist()
