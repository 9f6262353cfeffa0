"""Ask a policy problems, judge its replies, count the rewards.

Training, `hacrl eval` and benchmarks evaluate with this module. The sampling noise of an evaluation
does not depend on the step, so two evaluations of an agent differ only by its weights and can be
compared problem by problem.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hacrl.config import Config
from hacrl.errors import RunStopped
from hacrl.noise import stream_key
from hacrl.policy.policy import Policy
from hacrl.replies import Evaluation, Row, count, failure_text, judged_counts
from hacrl.sampling.base import Request
from hacrl.stopping import stoppable
from hacrl.store.rows import write_object, write_rows
from hacrl.types import Completion, Finish, Problem, Rollout
from hacrl.verify import VerifierPool

EVALUATION = -1  # stands for the step in the noise streams of evaluations


def evaluate(
    policy: Policy,
    config: Config,
    problems: Sequence[Problem],
    verifier: VerifierPool,
    folder: Path,
    when: str = "",
    way_out: str = "Fix it and repeat the command.",
) -> Evaluation:
    """Evaluate a policy as config.evaluation says. Writes replies.jsonl, then result.json, unless no
    reply could be judged (see `stop_if_unjudged`)."""
    settings, agent = config.evaluation, policy.agent
    rows = ask(
        policy,
        problems,
        verifier,
        seed=config.seed,
        samples=settings.samples,
        temperature=settings.temperature,
        prompt_limit=config.prompt_limit(agent),
        limit=settings.max_response_tokens or config.response_limit(agent),
    )
    result = count(rows)
    begin = f"{agent.name} cannot be evaluated{when}"
    stop_if_unjudged(result.metrics(), begin, config.verifier.kind, way_out)
    write_rows(folder / "replies.jsonl", rows)
    write_object(folder / "result.json", asdict(result), indent=2)
    return result


@stoppable()
def ask(
    policy: Policy,
    problems: Sequence[Problem],
    verifier: VerifierPool,
    *,
    seed: int,
    samples: int,
    temperature: float,
    prompt_limit: int,
    limit: int,
) -> list[Row]:
    """Sample and judge `samples` replies to each problem. Returns one row per reply, by problem.

    A problem whose prompt is longer than `prompt_limit` gets rows with an empty reply and reward 0.
    """
    longest = min(prompt_limit, policy.context - 1) if policy.context else prompt_limit
    prompts = short_prompts(policy, problems, longest)
    rollouts = attempt(
        policy,
        prompts,
        seed=seed,
        step=EVALUATION,
        samples=samples,
        temperature=temperature,
        limit=limit,
    )
    judged = judge(rollouts, problems, verifier, policy.agent.reply_start)
    found = {(r.problem_id, r.index): r for r in judged}
    return [_row(p, i, found.get((p.id, i))) for p in problems for i in range(samples)]


def _row(problem: Problem, index: int, rollout: Rollout | None) -> Row:
    """A line of replies.jsonl. No rollout: the prompt was too long."""
    verdict, completion = (rollout.verdict, rollout.completion) if rollout else (None, None)
    judged = verdict is not None and verdict.judged
    return {
        "problem": problem.id,
        "task": problem.task,
        "question": problem.messages[-1].content,
        "answer": problem.answer,
        "index": index,
        "reply": completion.text if completion else "",
        "finish": completion.finish if completion else Finish.NOT_ATTEMPTED,
        "tokens": len(completion.token_ids) if completion else 0,
        "reward": verdict.reward if verdict and judged else None if rollout else 0.0,
        "status": verdict.status if verdict else None,
        "detail": verdict.detail if verdict else None,
        **({"rewards": dict(verdict.parts)} if verdict and verdict.parts else {}),
    }


# ---------------------------------------------------------------- shared with training rollouts


def short_prompts(
    policy: Policy, problems: Sequence[Problem], limit: int
) -> dict[str, tuple[int, ...]]:
    """The prompts of at most `limit` tokens, by problem id."""
    prompts = {p.id: policy.renderer.prompt(p.messages) for p in problems}
    return {problem_id: ids for problem_id, ids in prompts.items() if len(ids) <= limit}


def attempt(
    policy: Policy,
    prompts: dict[str, tuple[int, ...]],
    *,
    seed: int,
    step: int,
    samples: int,
    temperature: float,
    limit: int,
    purpose: str = "",
) -> list[Rollout]:
    """Sample `samples` replies to every prompt, of at most `limit` tokens, and fewer where the model's
    context ends earlier. Another `purpose` has other noise streams."""
    if not prompts:
        return []
    wanted = [(problem_id, i) for problem_id in prompts for i in range(samples)]
    context = policy.context or 1 << 30
    stream = policy.agent.name + purpose
    keys = [stream_key(seed, stream, step, problem_id, i) for problem_id, i in wanted]
    replies = policy.sampler.sample(
        [
            Request(prompts[p], key, min(limit, context - len(prompts[p])))
            for (p, _), key in zip(wanted, keys, strict=True)
        ],
        temperature,
    )
    texts = policy.renderer.texts(
        (prompts[p], reply.token_ids) for (p, _), reply in zip(wanted, replies, strict=True)
    )
    rollouts = []
    for (problem_id, i), reply, (text, shareable) in zip(wanted, replies, texts, strict=True):
        finish = Finish.STOP if reply.stopped else Finish.LENGTH
        completion = Completion(text, reply.token_ids, reply.logprobs, finish)
        rollouts.append(
            Rollout(problem_id, i, step, prompts[problem_id], completion, None, shareable)
        )
    return rollouts


def stop_if_unjudged(row: Row, begin: str, verifier_kind: str, way_out: str) -> None:
    """Raise RunStopped if no reply of a metrics row could be judged: there is no result to store."""
    judged, unjudged = judged_counts(row)
    if unjudged and not judged:
        raise RunStopped(f"{begin}: {failure_text(row, verifier_kind)}. {way_out}")


def judge(
    rollouts: Sequence[Rollout],
    problems: Sequence[Problem],
    verifier: VerifierPool,
    reply_start: str,
) -> list[Rollout]:
    """Add verdicts to the rollouts. The verifier reads `reply_start` and the reply together."""
    by_id = {p.id: p for p in problems}
    items = [(reply_start + r.completion.text, by_id[r.problem_id]) for r in rollouts]
    verdicts = verifier.judge_all(items)
    return [replace(r, verdict=v) for r, v in zip(rollouts, verdicts, strict=True)]
