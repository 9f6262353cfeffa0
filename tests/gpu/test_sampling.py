"""CUDA graphs and Triton kernels of the sampler, compared with plain torch on the same GPU."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

from hacrl.config_agent import LoraSettings
from hacrl.noise import exponential_noise
from hacrl.policy.attention import Rule, Switch
from hacrl.policy.lora import add_adapter
from hacrl.sampling import decode as decode_module
from hacrl.sampling.base import Request
from hacrl.sampling.engine import BuiltinSampler
from hacrl.sampling.joined import Joined
from hacrl.sampling.transformers_cache import TransformersSampler

pytestmark = pytest.mark.gpu

SMALL = {
    "vocab_size": 3000,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 256,
}


def model_of(family: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    if family == "qwen":
        model = Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=4, head_dim=32))
    else:
        layers = ["sliding_attention", "full_attention"] * 2
        config = Gemma3TextConfig(
            **SMALL, num_key_value_heads=1, head_dim=64, sliding_window=48, layer_types=layers
        )
        model = Gemma3ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data *= 1.3
    return model.to("cuda", dtype).eval()


def some_requests(count: int = 96) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    asked: list[Request] = []
    for i in range(count):
        if i % 6 == 0:
            length = int(torch.randint(1, 150, (1,), generator=generator))
            prompt = tuple(torch.randint(10, 3000, (length,), generator=generator).tolist())
        limit = int(torch.randint(1, 90, (1,), generator=generator))
        asked.append(Request(prompt, i * 7919, limit))
    return asked


@pytest.mark.parametrize(
    ("heads", "groups", "size", "splits", "window", "cap", "dtype"),
    [
        (8, 2, 128, 1, None, None, torch.bfloat16),
        (3, 3, 64, 1, None, None, torch.bfloat16),
        (1, 4, 256, 8, 100, None, torch.bfloat16),
        (2, 4, 96, 4, None, 20.0, torch.float32),
        (4, 1, 32, 2, 33, None, torch.float32),
    ],
)
def test_attention_over_pages(heads, groups, size, splits, window, cap, dtype) -> None:
    from hacrl.sampling.kernels import decode_attention

    torch.manual_seed(0)
    rows, page, width = 24, 64, 8
    count = rows * width + 1
    keys = torch.randn(count, heads, page, size, device="cuda", dtype=dtype)
    values = torch.randn_like(keys)
    table = (torch.randperm(count - 1, device="cuda")[: rows * width] + 1).view(rows, width).int()
    position = torch.randint(0, width * page - 1, (rows,), device="cuda")
    query = torch.randn(rows, heads * groups, size, device="cuda", dtype=dtype)
    key = torch.randn(rows, heads, size, device="cuda", dtype=dtype)
    value = torch.randn_like(key)
    out = decode_attention(
        query, key, value, keys, values, table, position, Rule(size**-0.5, window, cap), splits
    )
    for r in range(rows):
        n = int(position[r])
        k, v = (
            x[table[r].long()].transpose(0, 1).reshape(heads, -1, size)[:, : n + 1].double()
            for x in (keys, values)
        )
        assert torch.equal(k[:, n], key[r].double())  # stored
        grouped = query[r].view(heads, groups, size).double()
        scores = grouped @ k.transpose(1, 2) * size**-0.5
        scores = cap * torch.tanh(scores / cap) if cap else scores
        if window:
            scores[..., : max(0, n + 1 - window)] = float("-inf")
        wanted = (scores.softmax(-1) @ v).reshape(heads * groups, size)
        error = (out[r].double() - wanted).norm() / wanted.norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("words", [49_152, 151_936, 1000])
def test_the_draw_kernel_uses_the_noise_of_noise_py(words: int) -> None:
    from hacrl.sampling.kernels import draw_and_advance

    torch.manual_seed(0)
    rows = 33
    logits = torch.randn(rows, words, device="cuda") * 3
    state = torch.zeros(6, rows, dtype=torch.int64, device="cuda")
    state[2] = torch.randint(-(2**63), 2**63 - 1, (rows,), device="cuda")
    state[3] = torch.arange(rows, device="cuda")
    state[4] = 99
    index = state[3].clone()
    names = ("token", "position", "key", "index", "limit", "done")
    token = torch.zeros(rows, 4, dtype=torch.int32, device="cuda")
    logprob = torch.zeros(rows, 4, device="cuda")
    draw_and_advance(
        logits,
        dict(zip(names, state, strict=True)),
        torch.tensor([1 / 0.7, 1.0], device="cuda"),
        torch.tensor([-7], dtype=torch.int32, device="cuda"),
        torch.tensor([2], dtype=torch.int32, device="cuda"),
        token,
        logprob,
    )
    wanted = (logits / 0.7).log_softmax(1)
    chosen = (wanted + exponential_noise(state[2], index, words).log_().neg_()).argmax(1)
    assert torch.equal(token[:, 2].long(), chosen)
    assert torch.allclose(logprob[:, 2], wanted.gather(1, chosen[:, None])[:, 0], atol=1e-5)
    assert torch.equal(state[0], chosen) and torch.equal(state[3], index + 1)


@pytest.mark.parametrize("family", ["qwen", "gemma3"])
@pytest.mark.parametrize("fuse_after", [10**9, 0, 37])
@pytest.mark.parametrize("rows", [96, 20])
def test_graphs_give_the_replies_of_transformers_cache(
    family, fuse_after, rows, monkeypatch
) -> None:
    """Float32, token for token: with replaced rows, sliding windows, and captures before, between and
    after steps of a round."""
    monkeypatch.setattr(decode_module, "FUSE_AFTER", fuse_after)
    model, asked, ends = model_of(family), some_requests(), (5, 6, 7)
    replies = BuiltinSampler(model, ends, 0, rows).sample(asked, 1.0)
    plain = TransformersSampler(model, ends, 0, 96).sample(asked, 1.0)
    assert [r.token_ids for r in replies] == [r.token_ids for r in plain]
    for a, b in zip(replies, plain, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_graphs_read_the_current_weights() -> None:
    """Updates overwrite the weights in place, so graphs are not captured again."""
    model, asked = model_of("qwen", torch.bfloat16), some_requests(24)
    sampler = BuiltinSampler(model, (5,), 0, 24)
    before = sampler.sample(asked, 1.0)
    assert sampler.sample(asked, 1.0) == before
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 1.1)
    after = sampler.sample(asked, 1.0)
    assert after != before
    assert after == BuiltinSampler(model, (5,), 0, 24).sample(asked, 1.0)


@pytest.mark.parametrize("family", ["qwen", "gemma3"])
@pytest.mark.parametrize("fuse_after", [10**9, 0])
def test_joined_linears_see_updates(family, fuse_after, monkeypatch, tmp_path) -> None:
    """Float32, compared with plain forward passes after each change; weights are saved as usual."""
    monkeypatch.setattr(decode_module, "FUSE_AFTER", fuse_after)
    model, asked, ends, written = model_of(family), some_requests(24), (5, 6, 7), []
    sampler = BuiltinSampler(model, ends, 0, 24)
    for _ in range(3):
        replies = [r.token_ids for r in sampler.sample(asked, 1.0)]
        plain = TransformersSampler(model, ends, 0, 24).sample(asked, 1.0)
        assert replies == [r.token_ids for r in plain]
        assert replies not in written
        written.append(replies)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "_proj" in name:
                    parameter.copy_(parameter + 0.02 * torch.randn_like(parameter))
    assert len(Joined(model).siblings) == 2 * 4
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), loaded[name])


def test_graphs_share_their_memory() -> None:
    """Smaller steps need no memory of their own: not for logits, and not for cuBLAS (on Hopper 32 MiB
    a stream)."""
    model = model_of("qwen")
    sampler = BuiltinSampler(model, (5,), 0, 96)
    sampler.sample(some_requests(), 1.0)
    decoder = sampler._chosen._decoder
    with torch.no_grad(), Switch(model).on():
        kept = [decoder._captured(96)]
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        kept += [decoder._captured(size) for size in (64, 48, 32, 24, 16)]
        torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 2**25
    assert len(kept) == 6


def test_a_single_request() -> None:
    model, asked = model_of("qwen"), [Request((11, 12, 13), 5, 300)]
    replies = BuiltinSampler(model, (5,), 0, 24).sample(asked, 1.0)
    assert [r.token_ids for r in replies] == [
        r.token_ids for r in TransformersSampler(model, (5,), 0, 24).sample(asked, 1.0)
    ]


def test_adapters() -> None:
    model = add_adapter(model_of("qwen"), LoraSettings(rank=4)).to("cuda")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    asked = some_requests(24)
    replies = BuiltinSampler(model, (5,), 0, 24).sample(asked, 1.0)
    plain = TransformersSampler(model, (5,), 0, 24).sample(asked, 1.0)
    assert [r.token_ids for r in replies] == [r.token_ids for r in plain]
