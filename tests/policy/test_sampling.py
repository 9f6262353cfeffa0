"""The sampler's caches and its scheduling: slots on a CPU, pages on a GPU.

The paged path runs here uncaptured, with the two kernels replaced by plain torch (what they compute,
word for word); on a GPU the kernels themselves are compared in tests/gpu.
"""

from __future__ import annotations

import random

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hacrl.policy import cache as cache_module
from hacrl.policy import decode as decode_module
from hacrl.policy import sampler as sampler_module
from hacrl.policy.cache import PagedCache
from hacrl.policy.decode import DeviceDecoder, draw
from hacrl.policy.plain_sampler import PlainSampler
from hacrl.policy.sampler import Reply, Request, Sampler

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
ENDS = (5, 6, 7, 8)


def model_of(family: str):
    torch.manual_seed(0)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
    elif family == "qwen":
        model = Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16))
    elif family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4))
    else:  # windows that prompts and replies cross; scores of Gemma 2 are capped
        layers = ["sliding_attention", "sliding_attention", "full_attention"]
        kind = dict(SMALL, head_dim=16, sliding_window=6, layer_types=layers)
        if family == "gemma3":
            model = Gemma3ForCausalLM(Gemma3TextConfig(**kind))
        else:
            model = Gemma2ForCausalLM(
                Gemma2Config(**kind, attn_logit_softcapping=2.0, attn_implementation="eager")
            )
    for parameter in model.parameters():  # larger than the start of a training: words differ
        parameter.data *= 1.5
    return model.eval()


def some_requests(prompts: int = 6, each: int = 3, most: int = 14) -> list[Request]:
    """Groups that share a prompt, of lengths around the border of a page, down to a single token."""
    draw = random.Random(1)
    asked = []
    for p in range(prompts):
        prompt = tuple(draw.randrange(300) for _ in range((1, 3, 8, 9, 17, 20)[p % 6]))
        for _ in range(each):
            asked.append(
                Request(prompt, draw.randrange(-(2**63), 2**63), draw.choice((3, 10, most)))
            )
    return asked


def plainly(model, asked, temperature=1.0) -> list[Reply]:
    return [Reply(*r) for r in PlainSampler(model, ENDS, 0, 64).sample(asked, temperature)]


def same(one: list[Reply], other: list[Reply]) -> None:
    assert [r.token_ids for r in one] == [r.token_ids for r in other]
    assert [r.stopped for r in one] == [r.stopped for r in other]
    for a, b in zip(one, other, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)


# ---------------------------------------------------------------- slots


@pytest.mark.parametrize("family", ["llama", "qwen", "gemma3", "gemma2", "gpt2"])
def test_our_cache_and_the_librarys_give_the_same_replies(family: str) -> None:
    """The plain sampler knows nothing of our attention: it uses the library's cache and masks."""
    model, asked = model_of(family), some_requests()
    sampler = Sampler(model, ENDS, 0, 64)
    replies = sampler.sample(asked, 1.0)
    assert sampler._shape is not None  # ours was used
    same(replies, plainly(model, asked))
    assert any(r.stopped for r in replies) and any(not r.stopped for r in replies)
    same(sampler.sample(asked, 0.0), plainly(model, asked, 0.0))
    name = model.config._attn_implementation
    assert name in ("sdpa", "eager")  # given back for the trainer


@pytest.mark.parametrize("rows", [1, 4])
def test_waiting_requests_take_the_place_of_finished_ones(rows: int) -> None:
    model, asked = model_of("llama"), some_requests()
    sampler = Sampler(model, ENDS, 0, rows)
    steps = []
    whole = sampler_module.HostDecoder.run

    def counted(self, state, count, ticks):
        steps.append(count)
        return whole(self, state, count, ticks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module.HostDecoder, "run", counted)
        replies = sampler.sample(asked, 1.0)
    same(replies, plainly(model, asked))
    written = sum(len(r.token_ids) for r in replies)
    assert sum(steps) == written  # no row of any step was idle
    assert len(steps) <= -(-written // rows) + 14  # full until the queue is empty


def test_long_limits_take_fewer_rows_and_not_all_the_memory(monkeypatch) -> None:
    """3 layers x 2 heads x 8 numbers x 2 x 4 bytes = 384 bytes a token; 34 tokens at the longest."""
    model, asked = model_of("llama"), some_requests()
    monkeypatch.setattr(sampler_module, "_host_memory", lambda: 2 * 5 * 34 * 384)
    sampler = Sampler(model, ENDS, 0, 64, cache_share=0.5)
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
    sampler = Sampler(model, ENDS, 0, 8)
    assert sampler._find_shape() is None
    same(
        [Reply(*r) for r in PlainSampler(model_of("llama"), ENDS, 0, 8).sample(asked, 1.0)], wanted
    )


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


class PagedSampler(Sampler):
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
    monkeypatch.setattr(sampler_module, "PAGE", 8)
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
def test_a_prompt_is_prefilled_once_for_all_its_samples() -> None:
    model, asked = model_of("llama"), some_requests(prompts=6, each=8)
    sampler = PagedSampler(model, ENDS, 0, 6)  # fewer rows than a group has samples
    sampler.pages = 200
    read = []
    forward = sampler.forward
    sampler.forward = lambda ids, work: (read.append(len(ids)), forward(ids, work))
    same(sampler.sample(asked, 1.0), plainly(model, asked))
    assert sum(read) == 5  # six prompts, one of them a single token, which needs none


@pytest.mark.usefixtures("small_pages")
def test_rows_that_gave_way_go_on_where_they_were() -> None:
    """Twelve pages; four rows of 43 tokens would need 24: some must wait, none starts over."""
    model = model_of("llama")
    asked = [Request((9, 8, 7 + i), 1000 + i, 40) for i in range(6)]
    sampler = PagedSampler(model, (), 0, 4)  # nobody stops early
    sampler.pages = 12
    waits = []
    put_back = sampler_module._Writing._put_back

    def counted(self, row):
        waits.append(int(self.lengths[self.rows.request[row]]))
        put_back(self, row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module._Writing, "_put_back", counted)
        replies = sampler.sample(asked, 1.0)
    assert any(waits)  # some had written already
    wanted = [Reply(*r) for r in PlainSampler(model, (), 0, 64).sample(asked, 1.0)]
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
