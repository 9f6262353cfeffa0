from dataclasses import replace
from pathlib import Path

import pytest
import ratio_rows
import torch
from ratio_rows import learn, rows_of
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    LlamaConfig,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from hacrl.config_agent import AgentConfig, LoraSettings
from hacrl.noise import stream_key
from hacrl.policy import head
from hacrl.policy.batch import make_inputs
from hacrl.policy.load import load_model, longest_sequence
from hacrl.policy.logprobs import LogProbs
from hacrl.policy.lora import adapter_layers
from hacrl.policy.policy import Policy
from hacrl.sampling.base import Request
from hacrl.types import Message

TEMPERATURE = 0.9


def policy(model: Path, beta: float = 0.0, **changes) -> Policy:
    return ratio_rows.policy(model, beta, TEMPERATURE, **changes)


def requests(p: Policy, count: int = 12, limit: int = 20) -> list[Request]:
    made = []
    for i in range(count):
        prompt = p.renderer.prompt([Message("user", "x" * (i % 5) + "?")])
        made.append(Request(prompt, stream_key(0, "a", 0, f"p{i}", 0), limit + i % 3))
    return made


# ---------------------------------------------------------------- scores and replies


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_score_is_the_log_softmax_of_the_models_own_logits(family: str, request) -> None:
    p = policy(request.getfixturevalue(family))
    prompt, reply = p.renderer.prompt([Message("user", "hello")]), (70, 71, 72, 256)
    (score,) = p.score([(prompt, reply)])
    model = AutoModelForCausalLM.from_pretrained(p.source, dtype=torch.float32)
    logits = model(torch.tensor([[*prompt, *reply]])).logits[0].double() / TEMPERATURE
    wanted = logits.log_softmax(1)[range(len(prompt) - 1, len(prompt) + 3), list(reply)]
    assert score == pytest.approx(wanted.tolist(), abs=1e-5)


def test_score_does_not_depend_on_padding_packing_or_chunks(llama: Path, monkeypatch) -> None:
    p = policy(llama)
    asked = requests(p)
    replies = p.sampler.sample(asked, TEMPERATURE)
    pairs = [(r.prompt_ids, reply.token_ids) for r, reply in zip(asked, replies, strict=True)]
    whole = p.score(pairs)
    alone = [p.score([pair])[0] for pair in pairs]
    p.agent = p.agent.model_copy(update={"microbatch_tokens": 70})
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", 3 * 258 * 12)  # three tokens at a time
    small = p.score(pairs)
    for a, b, c in zip(whole, alone, small, strict=True):
        assert a == pytest.approx(b, abs=2e-6)
        assert a == pytest.approx(c, abs=2e-6)


def test_limits_and_end_tokens(llama: Path) -> None:
    """Every reply ends at its limit or at an end token, which is its last and only one."""
    p = policy(llama)
    asked = requests(p, 60, limit=30)
    p.sampler.end_ids = (*p.sampler.end_ids, 65, 66, 67, 68)  # several end tokens
    replies = p.sampler.sample(asked, TEMPERATURE)
    assert {r.stopped for r in replies} == {True, False}
    for request, reply in zip(asked, replies, strict=True):
        ends = [t in p.sampler.end_ids for t in reply.token_ids]
        assert not any(ends[:-1])
        assert ends[-1] == reply.stopped
        assert len(reply.token_ids) == request.limit or reply.stopped
        assert len(reply.logprobs) == len(reply.token_ids)


# ---------------------------------------------------------------- loading


def test_dropout_is_off_in_training_mode(tmp_path: Path) -> None:
    """Under any config name. A model with gradient checkpointing is in training mode."""
    sizes = {"vocab_size": 99, "hidden_size": 16, "ffn_dim": 16, "num_attention_heads": 2}
    config = OPTConfig(**sizes, num_hidden_layers=1, word_embed_proj_dim=16, dropout=0.5)
    OPTForCausalLM(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), AgentConfig(name="a", model=str(tmp_path))).train()
    ids = torch.arange(9).unsqueeze(0)
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_with_longrope_the_context_is_the_original_length() -> None:
    """Beyond it, a longer sequence changes the log-probabilities of the other rows."""
    assert longest_sequence(LlamaConfig(max_position_embeddings=512)) == 512
    images = Gemma3Config(text_config={"max_position_embeddings": 512})
    assert longest_sequence(images) == 512
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    config = Phi3Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, pad_token_id=0,
        num_attention_heads=4, max_position_embeddings=128, original_max_position_embeddings=64,
        rope_scaling=factors, initializer_range=0.3, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    assert longest_sequence(config) == 64
    torch.manual_seed(0)
    logprobs = LogProbs(Phi3ForCausalLM(config).eval(), 1.0)

    def of_first(*lengths: int) -> torch.Tensor:
        ids = [[(7 * i + 1) % 61 for i in range(n)] for n in lengths]
        rows = make_inputs(ids, [[0] + [1] * (n - 1) for n in lengths], 0, torch.device("cpu"))
        return logprobs(rows)[0, : lengths[0] - 1]

    assert torch.allclose(of_first(30), of_first(30, 64), atol=1e-5)
    assert not torch.allclose(of_first(30), of_first(30, 65), atol=1e-2)


# ---------------------------------------------------------------- updates


def test_a_loss_that_fails_leaves_the_model_as_it_was(llama: Path) -> None:
    p = policy(llama, gradient_checkpointing=True)

    def broken(batch, update):
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        p.update(rows_of(p), broken, ratio_rows.UPDATE)
    assert not any(m.training for m in p.model.modules())
    assert p.model.config._attn_implementation == "sdpa"


def test_warm_up_and_gradient_clip(llama: Path) -> None:
    p = policy(llama, warmup_updates=4, max_grad_norm=1e-9)
    rates = [learn(p, rows_of(p)).learning_rate for _ in range(6)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])
    total = sum(float((m.grad**2).sum()) for m in p.master.values()) ** 0.5
    assert total == pytest.approx(1e-9, rel=1e-3)


def test_a_non_finite_update_is_skipped_and_counted(llama: Path) -> None:
    p = policy(llama)
    rows = rows_of(p)
    before = {n: m.detach().clone() for n, m in p.master.items()}
    broken = [replace(rows[1], advantage=float("nan")), *rows[2:]]
    for count in (1, 2):
        assert learn(p, broken).skipped
        assert p.skipped_in_a_row == count
    assert p.updates_made == 0
    assert all(torch.equal(before[n], m) for n, m in p.master.items())
    assert not learn(p, rows).skipped
    assert p.skipped_in_a_row == 0


def test_a_restored_policy_continues_bit_for_bit(llama: Path) -> None:
    a, b = policy(llama), policy(llama)
    rows = rows_of(a)
    learn(a, rows)
    b.restore(a.checkpoint(1))
    for p in (a, b):
        learn(p, rows)
    assert all(torch.equal(a.master[n], b.master[n]) for n in a.master)
    assert a.updates_made == b.updates_made == 2


def test_bfloat16_has_a_float32_master(llama: Path) -> None:
    """Steps of 1e-6 vanish in bfloat16; the master keeps them, and the model is a copy of it. Rotary
    frequencies stay in float32: 2^-9 of an angle of 500 is most of a radian."""
    p = policy(llama, dtype="bfloat16", learning_rate=1e-6)
    start = {n: m.detach().clone() for n, m in p.master.items()}
    rows = rows_of(p)
    for _ in range(3):
        learn(p, rows)
    resident = dict(p.model.named_parameters())
    for name, master in p.master.items():
        assert master.dtype == torch.float32
        assert resident[name].dtype == torch.bfloat16
        assert not torch.equal(master, start[name])
        assert torch.equal(resident[name], master.to(torch.bfloat16))
    assert p.sampler.model is p.model  # no sync step
    frequencies = dict(policy(llama).model.named_buffers())
    assert any("inv_freq" in name for name in frequencies)
    for name, buffer in p.model.named_buffers():
        assert torch.equal(buffer, frequencies[name])


# ---------------------------------------------------------------- saving and adapters


@pytest.mark.parametrize("template", [None, "plain"])
def test_export_is_an_ordinary_model_folder(
    llama: Path, tmp_path: Path, template: str | None
) -> None:
    p = policy(llama, template=template)
    learn(p, rows_of(p))
    p.export(tmp_path / "out")
    again = policy(tmp_path / "out")
    prompt = p.renderer.prompt([Message("user", "hello")])
    assert again.renderer.prompt([Message("user", "hello")]) == prompt
    assert again.score([(prompt, (70, 71))])[0] == pytest.approx(p.score([(prompt, (70, 71))])[0])


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_lora_trains_adapters_and_exports_base_plus_adapter(family: str, request, tmp_path) -> None:
    folder = request.getfixturevalue(family)
    p = policy(folder, beta=0.1, lora=LoraSettings(rank=4), learning_rate=0.05)
    prompt, reply = p.renderer.prompt([Message("user", "hello")]), (70, 71, 72)
    start = policy(p.source).score([(prompt, reply)])[0]
    assert p.score([(prompt, reply)])[0] == pytest.approx(start, abs=1e-6)
    assert all("lora_" in name for name in p.master)
    assert {layer.scaling["default"] for _, layer in adapter_layers(p.model)} == {2.0}
    kls = [learn(p, rows_of(p), beta=0.1).kl for _ in range(3)]
    assert kls[0] == pytest.approx(0.0, abs=1e-7)
    assert kls[2] > 1e-4  # against the start weights, without a second copy
    trained = p.score([(prompt, reply)])[0]
    assert abs(trained[0] - start[0]) > 1e-3
    p.export(tmp_path / "out")
    exported = policy(tmp_path / "out").score([(prompt, reply)])[0]
    assert exported == pytest.approx(trained, abs=1e-5)
