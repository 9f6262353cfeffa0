"""The paged engine: KV cache, continuous batching and preemption.

It runs here without CUDA graphs and with torch in place of the two kernels; tests/gpu compares the
kernels themselves.
"""

import pytest
import torch
from small_models import ENDS, model_of, plainly, same, some_requests

from hacrl.errors import UserError
from hacrl.sampling import cache as cache_module
from hacrl.sampling import decode as decode_module
from hacrl.sampling import paged as paged_module
from hacrl.sampling.base import Request
from hacrl.sampling.cache import PagedCache
from hacrl.sampling.compatibility import find_cache_shape
from hacrl.sampling.decode import GraphDecoder
from hacrl.sampling.paged import PagedSampler
from hacrl.sampling.transformers_cache import TransformersSampler, draw


def torch_attention(query, key, value, keys, values, table, position, rule, splits):
    """decode_attention, row by row."""
    rows, heads, size = query.shape
    out = torch.empty_like(query)
    for r in range(rows):
        n = int(position[r])
        page, offset = int(table[r, n // keys.shape[2]]), n % keys.shape[2]
        keys[page, :, offset], values[page, :, offset] = key[r], value[r]
        mine = table[r].long()
        k, v = (x[mine].transpose(0, 1).reshape(x.shape[1], -1, size) for x in (keys, values))
        first = max(0, n + 1 - rule.window) if rule.window else 0
        k, v = (x[:, first : n + 1].repeat_interleave(heads // x.shape[0], 0) for x in (k, v))
        scores = (k @ query[r].unsqueeze(2)).squeeze(2) * rule.scale
        scores = rule.cap * torch.tanh(scores / rule.cap) if rule.cap else scores
        out[r] = (scores.softmax(1).unsqueeze(1) @ v).squeeze(1)
    return out


def torch_draw(logits, rows, settings, ends, tick, out_token, out_logprob) -> None:
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


@pytest.fixture(autouse=True)
def small_pages(monkeypatch) -> None:
    monkeypatch.setattr(cache_module, "PAGE", 8)
    monkeypatch.setattr(GraphDecoder, "steps", 4)
    monkeypatch.setattr(cache_module, "ARENAS", {})
    monkeypatch.setattr(decode_module, "page_kernels", lambda: (torch_attention, torch_draw))


@pytest.fixture
def paged(monkeypatch):
    """Makes a PagedSampler on a device with memory for `pages` pages."""

    def make(model, rows: int, pages: int = 200, ends=ENDS) -> PagedSampler:
        sampler = PagedSampler(model, find_cache_shape(model), ends, 0, rows, cache_fraction=0.5)
        memory = 2 * pages * sampler.cache.page_bytes
        monkeypatch.setattr(paged_module, "device_memory", lambda device: memory)
        return sampler

    return make


@pytest.fixture
def prefills(monkeypatch) -> list[tuple[int, int]]:
    """Rows and tokens of every prefill pass."""
    shapes: list[tuple[int, int]] = []
    prefill = cache_module.prefill

    def watched(model, ids, work) -> None:
        shapes.append(tuple(ids.shape))
        prefill(model, ids, work)

    monkeypatch.setattr(cache_module, "prefill", watched)
    return shapes


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2"])
@pytest.mark.parametrize(("rows", "pages"), [(64, 200), (5, 40), (5, 12)])
def test_replies_equal_those_with_transformers_cache(family, rows, pages, paged) -> None:
    """All requests at once; with waiting requests; with so few pages that rows are preempted."""
    model, asked = model_of(family), some_requests()
    sampler = paged(model, rows, pages)
    same(sampler.sample(asked, 1.0), plainly(model, asked))
    assert sampler.cache.free == sampler.cache.pages.shape[2] - 1  # all but page 0
    same(sampler.sample(asked, 0.0), plainly(model, asked, 0.0))
    assert model.config._attn_implementation in ("sdpa", "eager")  # restored for the trainer


def test_a_prompt_is_prefilled_once_for_all_its_samples(paged, prefills) -> None:
    model, asked = model_of("llama"), some_requests(prompts=6, each=8)
    sampler = paged(model, rows=6)  # fewer rows than samples of a prompt
    same(sampler.sample(asked, 1.0), plainly(model, asked))
    assert sum(rows for rows, _ in prefills) == 5  # the sixth prompt is a single token


def test_preempted_rows_continue_where_they_were(paged, prefills) -> None:
    """Four rows of 43 tokens need 24 pages, but there are 14: some rows are preempted, and continue
    with a prefill of prompt and partial reply."""
    model = model_of("llama")
    asked = [Request((9, 8, 7 + i), 1000 + i, 40) for i in range(6)]
    replies = paged(model, rows=4, pages=14, ends=()).sample(asked, 1.0)
    same(replies, TransformersSampler(model, (), 0, 64).sample(asked, 1.0))
    assert any(tokens > 2 for _, tokens in prefills)


def test_finished_rows_are_replaced_at_once(paged, monkeypatch) -> None:
    """Steps of the host one by one: no row of any step is idle."""
    monkeypatch.setattr(GraphDecoder, "steps", 1)
    model, asked, counts = model_of("llama"), some_requests(), []
    decode = GraphDecoder.run
    monkeypatch.setattr(
        GraphDecoder, "run", lambda self, *given: counts.append(given[1]) or decode(self, *given)
    )
    replies = paged(model, rows=4).sample(asked, 1.0)
    sampled = sum(len(r.token_ids) for r in replies)
    assert sum(counts) == sampled
    assert len(counts) <= -(-sampled // 4) + 14  # full until no request waits


def test_a_prompt_that_needs_the_pages_of_prefilled_ones(paged) -> None:
    """One row, 24 pages: small prompts are prefilled while they wait, and give their pages to the
    large one, which needs 12."""
    model = model_of("llama")
    large = tuple(range(10, 94))
    small = [tuple(range(i, i + 9)) for i in range(100, 120)]
    asked = [Request(p, i, 4) for i, p in enumerate([(1, 2, 3), large, *small])]
    same(paged(model, rows=1, pages=24).sample(asked, 1.0), plainly(model, asked))


def test_an_interrupted_call_leaves_nothing_behind(paged, monkeypatch) -> None:
    monkeypatch.setattr(cache_module, "PREFILL_TOKENS", 20)
    model, asked = model_of("llama"), some_requests()
    sampler = paged(model, rows=6, pages=60)
    prefill, calls = cache_module.prefill, []

    def interrupted(model, ids, work) -> None:
        calls.append(ids)
        if len(calls) == 2:
            raise KeyboardInterrupt
        prefill(model, ids, work)

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "prefill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sampler.sample(asked, 1.0)
    assert model.config._attn_implementation == "sdpa"
    same(sampler.sample(asked[::-1], 1.0), plainly(model, asked[::-1]))


def test_memory_for_two_sequences_is_enough(paged) -> None:
    """Of 20 pages a sequence of 63 tokens needs 9, one of 83 needs 12."""
    model = model_of("llama")
    sampler = paged(model, rows=64, pages=20)
    assert len(sampler.sample([Request((1, 2, 3), 1, 60)] * 5, 1.0)) == 5
    with pytest.raises(UserError, match=r"83 tokens needs .* sampler\.cache_fraction = 0\.5"):
        sampler.sample([Request((1, 2, 3), 1, 80)], 1.0)


@pytest.mark.parametrize("limits", [(0,), (0, 5, 1)])
def test_a_limit_of_zero_gives_an_empty_reply(limits: tuple[int, ...], paged) -> None:
    model = model_of("llama")
    asked = [Request((1, 2, 3), i, limit) for i, limit in enumerate(limits)]
    for sampler in (paged(model, 4, ends=()), TransformersSampler(model, (), 0, 4)):
        assert tuple(len(r.token_ids) for r in sampler.sample(asked, 1.0)) == limits


def test_all_samplers_of_a_device_use_one_arena() -> None:
    """A larger need reallocates it, which every cache notices."""
    shape = cache_module.CacheShape(layers=2, heads=1, size=4, dtype=torch.float32)
    one, two = (PagedCache(shape, torch.device("cpu"), rows=2) for _ in range(2))
    assert one.reserve(4, 2) and not one.reserve(3, 1)
    first = one.pages.data_ptr()
    assert two.reserve(3, 2)
    assert two.pages.data_ptr() == first
    assert two.reserve(9, 2) and not two.reserve(9, 2)
    assert one.reserve(4, 2)
    assert one.pages.data_ptr() == two.pages.data_ptr()
