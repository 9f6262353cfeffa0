"""The sampler's caches and its scheduling: slots on a CPU, pages on a GPU.

The paged path runs here uncaptured, with the two kernels replaced by plain torch (what they compute,
word for word); on a GPU the kernels themselves are compared in tests/gpu.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from small_models import ENDS, SMALL, model_of, plainly, same, some_requests
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hacrl.errors import UserError
from hacrl.noise import gumbel_noise
from hacrl.pocket import pocket_path
from hacrl.policy import attention as attention_module
from hacrl.policy.logprobs import LogProbs
from hacrl.sampling import cache as cache_module
from hacrl.sampling import decode as decode_module
from hacrl.sampling import engine as engine_module
from hacrl.sampling.base import Reply, Request
from hacrl.sampling.cache import PAGE, PagedCache
from hacrl.sampling.decode import DeviceDecoder, draw
from hacrl.sampling.engine import BuiltinSampler
from hacrl.sampling.lean import LeanForward
from hacrl.sampling.transformers_cache import TransformersSampler

# ---------------------------------------------------------------- slots


@pytest.mark.parametrize("family", ["llama", "qwen", "gemma3", "gemma2", "gpt2"])
def test_our_cache_and_the_librarys_give_the_same_replies(family: str) -> None:
    """The plain sampler knows nothing of our attention: it uses the library's cache and masks."""
    model, asked = model_of(family), some_requests()
    sampler = BuiltinSampler(model, ENDS, 0, 64)
    replies = sampler.sample(asked, 1.0)
    assert sampler.cache_kind == "slots"  # ours was used
    same(replies, plainly(model, asked))
    assert any(r.stopped for r in replies) and any(not r.stopped for r in replies)
    same(sampler.sample(asked, 0.0), plainly(model, asked, 0.0))
    name = model.config._attn_implementation
    assert name in ("sdpa", "eager")  # given back for the trainer


@pytest.mark.parametrize("rows", [1, 4])
def test_waiting_requests_take_the_place_of_finished_ones(rows: int) -> None:
    model, asked = model_of("llama"), some_requests()
    sampler = BuiltinSampler(model, ENDS, 0, rows)
    steps = []
    whole = engine_module.HostDecoder.run

    def counted(self, state, count, ticks):
        steps.append(count)
        return whole(self, state, count, ticks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module.HostDecoder, "run", counted)
        replies = sampler.sample(asked, 1.0)
    same(replies, plainly(model, asked))
    written = sum(len(r.token_ids) for r in replies)
    assert sum(steps) == written  # no row of any step was idle
    assert len(steps) <= -(-written // rows) + 14  # full until the queue is empty


def test_long_limits_take_fewer_rows_and_not_all_the_memory(monkeypatch) -> None:
    """3 layers x 2 heads x 8 numbers x 2 x 4 bytes = 384 bytes a token; 34 tokens at the longest."""
    model, asked = model_of("llama"), some_requests()
    monkeypatch.setattr(engine_module, "_host_memory", lambda: 2 * 5 * 34 * 384)
    sampler = BuiltinSampler(model, ENDS, 0, 64, cache_share=0.5)
    sampler._shape, sampler._known = sampler._find_shape(), True
    assert sampler._shape.token_bytes == 384
    _, _, rows = sampler._set_up(sampler._shape, asked, 1.0)
    assert rows == 5
    same(sampler.sample(asked, 1.0), plainly(model, asked))


def test_a_model_with_attention_of_its_own_falls_back() -> None:
    model, asked = model_of("llama"), some_requests(2, 2)
    wanted = plainly(model, asked)
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Own", (layer.self_attn.__class__,), {"layer_idx": 0})
        del layer.self_attn.layer_idx
        layer.self_attn.__dict__["layer_idx"] = "first"
    sampler = BuiltinSampler(model, ENDS, 0, 8)
    with pytest.warns(UserWarning, match="the library's own cache"):
        assert sampler._find_shape() is None
    same(TransformersSampler(model_of("llama"), ENDS, 0, 8).sample(asked, 1.0), wanted)


def test_slots_grow_with_the_rows_that_are_written() -> None:
    """Head size 16: a step reads at least 400 / 16 = 25 tokens, so slots begin with 32. 3 + 100 tokens
    then need 48, 64, 80, 96, 112 (each at most a quarter and a block more), not 112 from the start."""
    model = model_of("qwen")
    asked = [Request((9, 8, 7 + i), 100 + i, 100 - 30 * i) for i in range(3)]
    sampler = BuiltinSampler(model, (), 0, 4)
    lengths = []
    run = engine_module.HostDecoder.run

    def watched(self, rows, count, ticks):
        lengths.append(self.cache.keys[0].shape[2])
        return run(self, rows, count, ticks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module.HostDecoder, "run", watched)
        replies = sampler.sample(asked, 1.0)
    assert sorted(set(lengths)) == [32, 48, 64, 80, 112]
    same(replies, TransformersSampler(model, (), 0, 4).sample(asked, 1.0))


def test_rows_that_begin_the_same_prompt_are_computed_once(monkeypatch) -> None:
    """Six prompts of three samples each, four rows: only samples that begin together are one."""
    model, asked, step = model_of("llama"), some_requests(), LeanForward.__call__
    for rows, first in ((64, 6), (4, 2)):
        sampler = BuiltinSampler(model, ENDS, 0, rows)
        sampler._shape, sampler._known = sampler._find_shape(), True
        computed = []

        def counted(self, token, position, computed=computed):
            computed.append(len(token))
            return step(self, token, position)

        with monkeypatch.context() as patch:
            patch.setattr(LeanForward, "__call__", counted)
            replies = sampler.sample(asked, 1.0)
        same(replies, plainly(model, asked))
        assert computed[0] == first
        assert sum(computed) < sum(len(r.token_ids) for r in replies)


# ---------------------------------------------------------------- the draw


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_the_draw_is_gumbel_max(temperature: float) -> None:
    """Logits from flat to sharp, some words impossible."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(0.1, 30, 500).unsqueeze(1)
    logits = torch.randn(500, 300, generator=generator) * spread
    logits[:, 7] = -torch.inf
    key = torch.randint(-(2**62), 2**62, (500,), generator=generator)
    index = torch.arange(500) % 40
    token, logprob = draw(logits, key, index, temperature)
    wanted = (logits / (temperature or 1.0)).double().log_softmax(1)
    noise = gumbel_noise(key, index, 300).double() if temperature else 0.0
    assert torch.equal(token, (wanted + noise).argmax(1))
    chosen = wanted.gather(1, token.unsqueeze(1)).squeeze(1)
    assert (logprob - chosen).abs().max() < 2e-6


# ---------------------------------------------------------------- pages


def plain_attention(
    query, key, value, keys, values, table, position, *, scale, window, cap, splits
):
    """decode_attention, row by row."""
    rows, heads, size = query.shape
    out = torch.empty_like(query)
    for r in range(rows):
        n = int(position[r])
        page, offset = int(table[r, n // keys.shape[2]]), n % keys.shape[2]
        keys[page, :, offset], values[page, :, offset] = key[r], value[r]
        mine = table[r].long()
        k, v = (x[mine].transpose(0, 1).reshape(x.shape[1], -1, size) for x in (keys, values))
        first = max(0, n + 1 - window) if window else 0
        k, v = (x[:, first : n + 1].repeat_interleave(heads // x.shape[0], 0) for x in (k, v))
        scores = (k @ query[r].unsqueeze(2)).squeeze(2) * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        out[r] = (scores.softmax(1).unsqueeze(1) @ v).squeeze(1)
    return out


def plain_draw(logits, rows, settings, ends, tick, out_token, out_logprob) -> None:
    """draw_and_advance."""
    temperature = float(1 / settings[0]) if settings[1] else 0.0
    token, logprob = draw(logits, rows["key"], rows["index"].long(), temperature)
    out_token[: len(token), int(tick)], out_logprob[: len(token), int(tick)] = token.int(), logprob
    live = rows["done"] == 0
    for name in ("index", "position"):
        rows[name] += live
    rows["token"][live] = token[live]
    ended = torch.isin(token, ends.long()) | (rows["index"] >= rows["limit"])
    rows["done"][live] = ended.long()[live]


class PagedSampler(BuiltinSampler):
    """The GPU's path with so many pages, on this machine's memory."""

    pages = 0

    def _set_up(self, shape, requests, temperature):
        self._pages = self._pages or PagedCache(shape, torch.device("cpu"), self.rows)
        longest = max(len(r.prompt_ids) + r.limit for r in requests)
        self._pages.reserve(self.pages, -(-longest // cache_module.PAGE) + 1)
        decoder = DeviceDecoder(self.model, self._pages, self.end_ids, self.rows, capture=False)
        decoder.set_temperature(temperature)
        return self._pages, decoder, min(self.rows, len(requests))


@pytest.fixture
def small_pages(monkeypatch) -> None:
    monkeypatch.setattr(cache_module, "PAGE", 8)
    monkeypatch.setattr(engine_module, "PAGE", 8)
    monkeypatch.setattr(DeviceDecoder, "ticks", 4)
    monkeypatch.setattr(cache_module.Arena, "_of", {})
    monkeypatch.setattr(decode_module, "page_kernels", lambda: (plain_attention, plain_draw))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2"])
@pytest.mark.parametrize(
    ("rows", "pages"),
    [(64, 200), (5, 40), (5, 9)],  # all at once; refilled; so few pages that rows must wait again
)
@pytest.mark.usefixtures("small_pages")
def test_pages_give_the_same_replies(family: str, rows: int, pages: int) -> None:
    model, asked = model_of(family), some_requests()
    sampler = PagedSampler(model, ENDS, 0, rows)
    sampler.pages = pages
    replies = sampler.sample(asked, 1.0)
    same(replies, plainly(model, asked))
    assert sampler._pages.free == pages  # everything was given back
    same(sampler.sample(asked, 0.0), plainly(model, asked, 0.0))


@pytest.mark.usefixtures("small_pages")
def test_a_prompt_is_prefilled_once_for_all_its_samples(monkeypatch) -> None:
    model, asked = model_of("llama"), some_requests(prompts=6, each=8)
    sampler = PagedSampler(model, ENDS, 0, 6)  # fewer rows than a group has samples
    sampler.pages = 200
    counts, read = [], DeviceDecoder.read

    def counted(self, ids, work) -> None:
        counts.append(len(ids))
        read(self, ids, work)

    monkeypatch.setattr(DeviceDecoder, "read", counted)
    same(sampler.sample(asked, 1.0), plainly(model, asked))
    assert sum(counts) == 5  # six prompts, one of them a single token, which needs none


@pytest.mark.usefixtures("small_pages")
def test_rows_that_gave_way_go_on_where_they_were() -> None:
    """Twelve pages; four rows of 43 tokens would need 24: some must wait, none starts over."""
    model = model_of("llama")
    asked = [Request((9, 8, 7 + i), 1000 + i, 40) for i in range(6)]
    sampler = PagedSampler(model, (), 0, 4)  # nobody stops early
    sampler.pages = 12
    waits = []
    put_back = engine_module._Writing._put_back

    def counted(self, row):
        waits.append(int(self.lengths[self.rows.request[row]]))
        put_back(self, row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module._Writing, "_put_back", counted)
        replies = sampler.sample(asked, 1.0)
    assert any(waits)  # some had written already
    wanted = TransformersSampler(model, (), 0, 64).sample(asked, 1.0)
    same(replies, wanted)


def test_the_arena_is_one_for_all_samplers_of_a_device(monkeypatch) -> None:
    """A larger need replaces it, and whoever held views is told to take new ones."""
    monkeypatch.setattr(cache_module.Arena, "_of", {})
    shape = cache_module.CacheShape(layers=2, heads=1, size=4, dtype=torch.float32)
    one, two = (PagedCache(shape, torch.device("cpu"), rows=2) for _ in range(2))
    assert one.reserve(4, 2) and not one.reserve(3, 1)
    first = one.pages
    assert two.reserve(3, 2)
    assert two.pages.data_ptr() == first.data_ptr()
    assert two.reserve(9, 2)
    assert one.pages is None and one.reserve(4, 2)
    assert one.pages.data_ptr() == two.pages.data_ptr()


@pytest.mark.parametrize("limits", [(0,), (0, 5, 1)])
@pytest.mark.usefixtures("small_pages")
def test_a_limit_of_nothing_is_kept(limits: tuple[int, ...]) -> None:
    model = model_of("llama")
    asked = [Request((1, 2, 3), i, limit) for i, limit in enumerate(limits)]
    paged = PagedSampler(model, (), 0, 4)
    paged.pages = 40
    for replies in (
        paged.sample(asked, 1.0),
        BuiltinSampler(model, (), 0, 4).sample(asked, 1.0),
        TransformersSampler(model, (), 0, 4).sample(asked, 1.0),
    ):
        assert tuple(len(r.token_ids) for r in replies) == limits


@pytest.mark.usefixtures("small_pages")
def test_a_step_that_is_tried_out_leaves_no_trace(monkeypatch) -> None:
    """A capture, which can come between any two steps, begins with trial steps."""
    model, asked = model_of("llama"), some_requests()
    step = DeviceDecoder._step

    def tried(self, size: int) -> None:
        self._try_out(size)
        step(self, size)

    monkeypatch.setattr(DeviceDecoder, "_step", tried)
    sampler = PagedSampler(model, ENDS, 0, 64)
    sampler.pages = 200
    same(sampler.sample(asked, 1.0), plainly(model, asked))


@pytest.mark.usefixtures("small_pages")
def test_prepared_prompts_give_way_to_one_that_nobody_makes_room_for() -> None:
    """One row, 24 pages: while it writes, fifteen of the small prompts behind the large one are
    prefilled; the large one needs 11 + 1 of the 9 pages that are left then."""
    model = model_of("llama")
    large = tuple(range(10, 94))
    small = [tuple(range(i, i + 9)) for i in range(100, 120)]
    asked = [Request(p, i, 4) for i, p in enumerate([(1, 2, 3), large, *small])]
    sampler = PagedSampler(model, ENDS, 0, 1)
    sampler.pages = 24
    same(sampler.sample(asked, 1.0), plainly(model, asked))


@pytest.mark.usefixtures("small_pages")
def test_an_interrupted_call_leaves_nothing_behind(monkeypatch) -> None:
    monkeypatch.setattr(cache_module, "PREFILL_TOKENS", {"cpu": 20, "cuda": 20})
    model, asked = model_of("llama"), some_requests()
    sampler = PagedSampler(model, ENDS, 0, 6)
    sampler.pages = 60
    read, seen = DeviceDecoder.read, []

    def interrupted(self, ids, work) -> None:
        seen.append(ids)
        if len(seen) == 2:
            raise KeyboardInterrupt
        read(self, ids, work)

    monkeypatch.setattr(DeviceDecoder, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sampler.sample(asked, 1.0)
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.setattr(DeviceDecoder, "read", read)
    same(sampler.sample(asked[::-1], 1.0), plainly(model, asked[::-1]))


def test_one_request_needs_no_more_than_its_own_pages(monkeypatch) -> None:
    """Sizes alone: the model has no memory, and the GPU that is asked for its own is not there."""
    sampler = BuiltinSampler(model_of("llama"), ENDS, 0, 64)
    shape = sampler._find_shape()
    sampler.model = model_of("llama").to("meta")
    monkeypatch.setattr(cache_module.Arena, "_of", {})
    whole = SimpleNamespace(total_memory=100 * PAGE * shape.token_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: whole)
    asked = [Request((1, 2, 3), 1, 500)]  # 8 pages and one more, of the 20 that a fifth is
    assert sampler._set_up(shape, asked, 1.0)[2] == 1
    with pytest.raises(UserError, match=r"sampler\.cache_fraction = 0\.2"):
        sampler._set_up(shape, [Request((1, 2, 3), 1, 700)], 1.0)
    sampler.rows = 200
    assert sampler._set_up(shape, asked * 150, 1.0)[0].table.shape[0] == 200


# ---------------------------------------------------------------- which models


def trainer_gap(model, asked: list[Request], replies: list[Reply]) -> float:
    """Largest difference from the log-probabilities of the model's own forward."""
    gaps = []
    for request, reply in zip(asked, replies, strict=True):
        ids = torch.tensor([*request.prompt_ids, *reply.token_ids])
        logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(1).gather(1, ids[1:, None])[len(request.prompt_ids) - 1 :, 0]
        gaps.append((logprobs - torch.tensor(reply.logprobs)).abs().max().item())
    return max(gaps)


@torch.no_grad()
@pytest.mark.parametrize("family", ["falcon", "lfm2"])
def test_a_layer_that_keeps_more_than_keys_and_values_falls_back(family: str) -> None:
    """Falcon-H1 has attention in every layer, and beside it a state that no cache of ours holds."""
    torch.manual_seed(0)
    if family == "falcon":
        sizes = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1}
        model = FalconH1ForCausalLM(
            FalconH1Config(**SMALL, **sizes, mamba_d_state=8, mamba_chunk_size=16)
        )
    else:
        model = Lfm2ForCausalLM(Lfm2Config(**SMALL, full_attn_idxs=[0]))
    for parameter in model.parameters():
        parameter.data *= 1.5
    sampler = BuiltinSampler(model.eval(), (), 0, 4)
    asked = some_requests(3, 2)
    assert sampler.cache_kind == "unknown"
    with pytest.warns(UserWarning, match="the library's own cache") as told:
        replies = sampler.sample(asked, 1.0)
    assert told[0].filename == engine_module.__file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.sample(asked, 1.0)  # told once
    assert sampler.cache_kind == "library"
    assert trainer_gap(model, asked, replies) < 2e-5


@torch.no_grad()
def test_a_window_that_only_the_mask_knows_falls_back() -> None:
    """Longer than what the sampler tries out at first, so that no comparison would tell."""
    torch.manual_seed(0)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **SMALL,
            **sizes,
            shared_expert_intermediate_size=32,
            use_sliding_window=True,
            sliding_window=10,
            max_window_layers=3,
            initializer_range=0.1,
        )
    ).eval()
    assert "sliding_attention" in model.config.layer_types
    sampler, asked = BuiltinSampler(model, (), 0, 4), some_requests()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the model is of that kind: nothing disagrees
        replies = sampler.sample(asked, 1.0)
    assert sampler.cache_kind == "library"
    assert trainer_gap(model, asked, replies) < 2e-5
    assert not LogProbs(model, 1.0).packs


@torch.no_grad()
@pytest.mark.parametrize("name", ["wren", "finch", "heron"])
def test_what_rounding_explains_is_what_the_library_rounds_itself(name: str, monkeypatch) -> None:
    """Two kinds of attention of the library lie apart by rounding alone, and ours may lie twice as far.
    They are only compared where ours lies farther than is usual, with the limit of that put to 0 here
    (large models reach it): 4 forward passes, not 3. A cache that has lost what came before is refused
    all the same."""
    model = AutoModelForCausalLM.from_pretrained(
        pocket_path(name), dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert BuiltinSampler(model, ENDS, 0, 8)._find_shape() is not None and len(passes) == 3
        monkeypatch.setattr(engine_module, "ROUNDED", 0.0)
        assert BuiltinSampler(model, ENDS, 0, 8)._find_shape() is not None and len(passes) == 3 + 4
    whole = attention_module.causal

    def forgetful(query, key, value, rule):
        queries = query.shape[2]
        return whole(query, key[:, :, -queries:], value[:, :, -queries:], rule)

    monkeypatch.setattr(attention_module, "causal", forgetful)
    for limit in (0.0, 0.05):
        monkeypatch.setattr(engine_module, "ROUNDED", limit)
        with pytest.warns(UserWarning, match="several times slower"):
            assert BuiltinSampler(model, ENDS, 0, 8)._find_shape() is None
    # the library's other attention is no measure where it leaves out what the model has
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attends_to_nothing)
    with pytest.warns(UserWarning, match=r"rounding explains 0\.15"):
        assert BuiltinSampler(model, ENDS, 0, 8)._find_shape() is None


def attends_to_nothing(module, query, *_, **__):
    return torch.zeros_like(query).transpose(1, 2), None


@torch.no_grad()
def test_scores_are_capped_for_sampler_and_trainer_alike() -> None:
    """transformers' own sdpa, the default, leaves the cap out."""
    model = model_of("gemma2")
    for parameter in model.parameters():
        parameter.data *= 3  # so that scores reach the cap
    model.config._attn_implementation = "sdpa"
    sampler, asked = BuiltinSampler(model, (), 0, 8), some_requests(3, 2)
    replies = sampler.sample(asked, 1.0)
    assert sampler._shape is not None and LogProbs(model, 1.0).packs
    model.config._attn_implementation = "eager"
    assert trainer_gap(model, asked, replies) < 2e-5


def test_frequencies_that_follow_positions_are_not_captured() -> None:
    scaled = {"rope_type": "dynamic", "factor": 2.0}
    model = LlamaForCausalLM(LlamaConfig(**SMALL, rope_scaling=scaled))
    assert not engine_module._steady(model)
    assert engine_module._steady(model_of("gemma3"))
