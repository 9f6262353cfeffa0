"""vLLM on the rollouts of part `rollout`: the same weights, prompts and reply lengths.

Each engine is a process of its own, with vLLM's own settings of graphs, compilation and scheduling:

    python -m speed.vllm_rollout TASK.json     (started by `vllm`)

The prefix cache is emptied before each run, since in training the weights have changed. Replies are not
decoded to text and have no seeds of their own, which is fastest for vLLM; hacrl seeds each reply.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hacrl.sampling.base import Reply
from hacrl.sampling.probe import Probe
from speed.floor import cost_of, rollout_floor
from speed.measure import Measurement, free, timed
from speed.shapes import build_model
from speed.work import Case, Setting, agreement, measure_rollout, policy_of, rows_of

MODES: dict[str, dict[str, Any]] = {
    "log-probabilities": {"logprobs": 0, "flat_logprobs": True},  # vLLM's faster form of them
    "ids only": {},
}
CHECKED = 32  # replies whose log-probabilities are compared with the model's
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # One machine, also without a network.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


class EngineFailed(Exception):
    """vLLM is missing, or its process failed; the message is all that a reader needs."""


def vllm(setting: Setting, cases: list[Case]) -> None:
    """hacrl and vLLM on the same rollouts: vLLM with hacrl's number of rows and with its own default."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineFailed("vLLM is not installed: pip install 'hacrl[vllm]', or docs/scale.md.")
    errors = []
    for shape in dict.fromkeys(case.shape for case in cases):
        mine = [case for case in cases if case.shape == shape]
        ours = _hacrl(setting, mine)
        free(setting.device)
        for rows, chosen in _engines(setting, mine):
            try:
                _vllm(setting, rows, chosen, ours)
            except EngineFailed as error:
                errors.append(str(error))
            free(setting.device)
    if errors:
        raise EngineFailed("\n".join(errors))


def _hacrl(setting: Setting, cases: list[Case]) -> dict[Case, Measurement]:
    setting.log.say(f"vllm: hacrl on {cases[0].shape}")
    policy = policy_of(setting, cases[0])
    return {case: setting.log.add(measure_rollout(setting, case, policy)) for case in cases}


def _engines(setting: Setting, cases: list[Case]) -> Iterator[tuple[int | None, list[Case]]]:
    """(rows, or None for vLLM's default, and cases) of each engine. The default is left out for cases in
    which all replies have a row anyway."""
    for rows in dict.fromkeys(rows_of(setting, case) for case in cases):
        yield rows, [case for case in cases if rows_of(setting, case) == rows]
    if waiting := [c for c in cases if len(c.trace().rows) > rows_of(setting, c)]:
        yield None, waiting


def _vllm(
    setting: Setting, rows: int | None, cases: list[Case], ours: dict[Case, Measurement]
) -> None:
    """One engine on these cases."""
    shape, dtype = (
        cases[0].shape,
        torch.bfloat16 if setting.device.type == "cuda" else torch.float32,
    )
    setting.log.say(f"vllm: engine for {shape} with {rows or 'its default number of'} rows")
    model = build_model(shape, setting.device).to(dtype)
    free(setting.device)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        task = {
            "folder": folder,
            "cases": [asdict(case) for case in cases],
            "rows": rows,
            "repeats": setting.repeats,
            "device": setting.device.type,
        }
        lines, error = _run(task, Path(folder))
    for line in lines:
        case = Case(**line.pop("case"))
        _add(setting, case, line, model, ours[case])
    if error:
        raise EngineFailed(f"vLLM, {shape}, {rows or 'default'} rows: {error}")


def _run(task: dict[str, Any], folder: Path) -> tuple[list[dict[str, Any]], str]:
    """The lines that the engine's process wrote, and how it failed, if it did."""
    (folder / "task.json").write_text(json.dumps(task))
    paths = [str(Path(__file__).parents[1]), *(p for p in sys.path if p)]
    # On a CPU a second process would take a core from the engine.
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if task["device"] == "cpu" else {}
    environment = {**ENVIRONMENT, **alone, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with open(folder / "log", "w+") as log:
        command = [sys.executable, "-m", "speed.vllm_rollout", str(folder / "task.json")]
        code = subprocess.run(command, env=environment, stdout=log, stderr=log).returncode
        log.seek(0)
        tail = "".join(log.readlines()[-25:])
    out = folder / "lines.jsonl"
    lines = [json.loads(x) for x in out.read_text().splitlines()] if out.exists() else []
    return lines, f"exit code {code}\n{tail}" if code else ""


def _add(setting: Setting, case: Case, line: dict[str, Any], model: Any, ours: Measurement) -> None:
    trace = case.trace()
    floor = rollout_floor(cost_of(model), trace, line["rows"], setting.ceilings)
    faster = line["seconds"] / ours.seconds
    facts, note = {**line["facts"], "floor_s": floor, "hacrl_s": ours.seconds}, ""
    if replies := [Reply(tuple(ids), tuple(values), False) for ids, values in line["replies"]]:
        prompts = [p for p, _ in trace.rows[: len(replies)]]
        whole = [(*p, *r.token_ids) for p, r in zip(prompts, replies, strict=True)]
        scores = Probe(model, "vllm", None).score(whole)
        own = [s[-len(r.token_ids) :] for s, r in zip(scores, replies, strict=True)]
        facts |= agreement(replies, own)
        note = f"gap {facts['mean_gap']:.1e}, largest {facts['largest_gap']:.1e}"
    name = f"{case.shape}, {len(trace.rows)} replies, {line['rows']} rows, {trace.name}"
    setting.log.add(
        Measurement(
            "rollout by vLLM",
            f"{name}, {line['mode']}",
            line["seconds"],
            trace.reply_tokens,
            against_vllm=faster,
            of_floor=floor / line["seconds"],
            reply_tokens=trace.reply_tokens,
            note=note,
            facts=facts,
        )
    )
    if line["mode"] == "log-probabilities" and line["rows"] == rows_of(setting, case):
        ours.against_vllm = faster


# ---------------------------------------------------------------- in the engine's process


def main() -> None:
    """Measure the cases of a task and write a line after each."""
    task = json.loads(Path(sys.argv[1]).read_text())
    cases = [Case(**case) for case in task["cases"]]
    engine, facts = _start(task, cases)
    with open(Path(task["folder"]) / "lines.jsonl", "w", buffering=1) as out:
        for case in cases:
            for mode in MODES:
                line = _measure(engine, case, mode, task["repeats"])
                line["facts"] |= facts
                rows = engine.llm_engine.vllm_config.scheduler_config.max_num_seqs
                out.write(json.dumps({"case": asdict(case), "rows": rows, **line}) + "\n")


def _start(task: dict[str, Any], cases: list[Case]) -> tuple[Any, dict[str, Any]]:
    """The engine, and facts about it."""
    from vllm import LLM, __version__

    longest = max(len(p) + n for case in cases for p, n in case.trace().rows)
    settings: dict[str, Any] = {"max_num_seqs": task["rows"]} if task["rows"] else {}
    if task["device"] == "cpu":
        settings |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28, "dtype": "float32"}
    else:
        settings |= {"gpu_memory_utilization": 0.8, "dtype": "bfloat16"}
    begin = time.perf_counter()
    engine = LLM(
        model=task["folder"],
        skip_tokenizer_init=True,
        max_model_len=longest + 1,
        enable_prefix_caching=True,
        seed=0,
        **settings,
    )
    config = engine.llm_engine.vllm_config
    return engine, {
        "vllm": __version__,
        "start_s": time.perf_counter() - begin,
        "graphs": str(config.compilation_config.cudagraph_mode),
        "batched_tokens": config.scheduler_config.max_num_batched_tokens,
    }


def _measure(engine: Any, case: Case, mode: str, repeats: int) -> dict[str, Any]:
    from vllm import SamplingParams

    trace = case.trace()
    prompts = [{"prompt_token_ids": list(p)} for p, _ in trace.rows]
    make = partial(SamplingParams, temperature=1.0, ignore_eos=True, detokenize=False)
    parameters = [make(max_tokens=n, **MODES[mode]) for _, n in trace.rows]

    def empty() -> None:
        if not engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")

    found = timed(
        lambda _: engine.generate(prompts, parameters, use_tqdm=False),
        torch.device("cpu"),  # nothing to wait for: the ids have arrived
        repeats=repeats,
        before=empty,
    )
    replies = [o.outputs[0] for o in found.result]
    assert [len(r.token_ids) for r in replies] == [n for _, n in trace.rows], "other lengths"
    checked = replies[:CHECKED] if MODES[mode] else []
    return {
        "mode": mode,
        "seconds": found.seconds,
        "facts": {
            "first_s": found.first,
            "spread": found.spread,
            # Of prompts that follow an equal one in the same run.
            "cached_tokens": sum(o.num_cached_tokens or 0 for o in found.result),
        },
        # The log-probability of the drawn token is the first at its position.
        "replies": [
            (list(r.token_ids), [r.logprobs.logprobs[i] for i in r.logprobs.start_indices])
            for r in checked
        ],
    }


if __name__ == "__main__":
    main()
