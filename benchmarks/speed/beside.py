"""Rollouts of several agents at the same time on one device, each agent in a process of its own.

On a GPU start the multi-process service first (nvidia-cuda-mps-control -d); without it the processes
take turns.
"""

import multiprocessing
import time
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import median
from threading import BrokenBarrierError
from typing import Any

import torch

from speed.floor import cost_of, rollout_floor, synchronize
from speed.measure import Measurement, free, peak_gb
from speed.shapes import build_model, make_policy
from speed.work import Case, Setting, rows_of

LOADING = 600.0  # seconds that an agent waits for the others
Span = tuple[float, float]  # start and end; the clock is that of the machine
_start: Any = None  # the barrier at the start of every rollout


class OtherFailed(RuntimeError):
    """Another agent failed while this one waited for it."""


def beside(setting: Setting, cases: list[Case], count: int) -> None:
    """The cases of `rollout` by `count` agents at the same time; tokens and floor are those of all."""
    for case in cases:
        setting.log.say(f"rollout: {count} agents, {case.shape}")
        setting.log.add(_measure(setting, replace(case, rows=rows_of(setting, case)), count))


def _measure(setting: Setting, case: Case, count: int) -> Measurement:
    processes = multiprocessing.get_context("spawn")
    work = partial(_rollouts, case, str(setting.device), dict(setting.fields), setting.repeats)
    with ProcessPoolExecutor(
        count, processes, initializer=_keep, initargs=(processes.Barrier(count),)
    ) as pool:
        found = _results([pool.submit(work, agent) for agent in range(count)])
    rounds = zip(*(spans for spans, _ in found), strict=True)
    seconds = median(max(e for _, e in spans) - min(s for s, _ in spans) for spans in rounds)
    trace = case.trace()
    model = build_model(case.shape, setting.device)
    if setting.device.type == "cuda":
        model = model.to(torch.bfloat16)
    floor = count * rollout_floor(cost_of(model), trace, case.rows, setting.ceilings)
    del model
    free(setting.device)
    tokens, peaks = count * trace.reply_tokens, [peak for _, peak in found if peak is not None]
    return Measurement(
        "rollout",
        f"{count} x {case.shape} at the same time, {len(trace.rows)} replies each, {case.rows} rows, "
        f"{trace.name}",
        seconds,
        tokens,
        sum(peaks) if peaks else None,
        reply_tokens=tokens,
        of_floor=floor / seconds,
        facts={"floor_s": floor},
    )


def _results(futures: list[Future[Any]]) -> list[Any]:
    """The results of all agents. If agents failed, the error of the first that did not only wait for
    another one."""
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, OtherFailed)):
        raise error
    return [future.result() for future in futures]


def _keep(barrier: Any) -> None:
    global _start
    _start = barrier


def _rollouts(
    case: Case, device: str, fields: Mapping[str, Any], repeats: int, agent: int
) -> tuple[list[Span], float | None]:
    """One agent: when each of its rollouts started and ended, and its peak memory."""
    place, trace = torch.device(device), case.trace()
    if place.type == "cpu":
        torch.set_num_threads(1)
    try:
        policy = make_policy(case.shape, place, **{**fields, "sampler_rows": case.rows})
        spans = []
        for i in range(-2, repeats):  # two to warm up
            requests = trace.requests(max(i, 0), f"agent {agent}")
            _start.wait(LOADING)
            begin = time.perf_counter()
            policy.sampler.sample(requests, 1.0)
            synchronize(place)
            spans.append((begin, time.perf_counter()))
    except BrokenBarrierError:
        raise OtherFailed("another agent failed") from None
    except BaseException:
        _start.abort()
        raise
    return spans[2:], peak_gb(place)
