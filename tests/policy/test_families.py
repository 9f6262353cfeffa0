"""Families with parts of their own: masks, convolutions, router noise, experts, scaled logits, ..."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from ratio_rows import UPDATE, algorithm, learn, policy, rows_of
from small_models import SMALL, WINDOWS, save_model, some_requests
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    DogeConfig,
    Gemma2Config,
    Gemma4TextConfig,
    GenerationConfig,
    GraniteConfig,
    Lfm2Config,
    MixtralConfig,
    Qwen3MoeConfig,
)

from hacrl.errors import UserError
from hacrl.policy.lora import merged_weights

ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LAYERED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
FAMILIES = {
    "granite": GraniteConfig(**SMALL, logits_scaling=4.0),
    "gemma2": Gemma2Config(**WINDOWS),  # its cap of 30 changes small logits little
    "gemma4": Gemma4TextConfig(  # layers of two head sizes, some without keys and values of their own
        **{**WINDOWS, **LAYERED}, global_head_dim=32, vocab_size_per_layer_input=300,
        hidden_size_per_layer_input=8, num_kv_shared_layers=2,
    ),
    "doge": DogeConfig(**SMALL),  # a mask that the model computes from its values
    "lfm2": Lfm2Config(**SMALL, full_attn_idxs=[1]),  # convolutions
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, router_jitter_noise=0.3),
    "qwen3moe": Qwen3MoeConfig(**SMALL, head_dim=16, **ROUTED),
    "deepseek": DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, **LATENT, v_head_dim=8, moe_intermediate_size=32,
        n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
        n_group=2, topk_group=1,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, llama: Path):
    """The folder of a family's model."""
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            to = tmp_path_factory.mktemp(family)
            made[family] = save_model(FAMILIES[family], to, llama)
        return made[family]

    return of


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_replies_are_those_of_the_models_own_forward(family: str, folder) -> None:
    """And a path that cannot be right is not tried: nothing warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="packed sequences")
        p, asked = policy(folder(family)), some_requests(3, 2)
    plain = AutoModelForCausalLM.from_pretrained(p.source, attn_implementation="eager")
    replies = p.sampler.sample(asked, 1.0)
    pairs = [(r.prompt_ids, reply.token_ids) for r, reply in zip(asked, replies, strict=True)]
    for (prompt, ids), score, reply in zip(pairs, p.score(pairs), replies, strict=True):
        logprobs = plain(torch.tensor([[*prompt, *ids]])).logits[0].double().log_softmax(1)
        wanted = logprobs[len(prompt) - 1 : -1][range(len(ids)), list(ids)].tolist()
        assert score == pytest.approx(wanted, abs=5e-6)
        assert list(reply.logprobs) == pytest.approx(wanted, abs=5e-6)


@pytest.mark.parametrize("family", ["granite", "mixtral", "deepseek"])
def test_checkpointing_recomputes_the_same_gradient(family: str, folder) -> None:
    """No router noise; every layer is computed again."""
    gradients, computed = [], []
    for checkpointing in (False, True):
        p = policy(folder(family), gradient_checkpointing=checkpointing)
        rows, calls = rows_of(p), []
        p.model.model.layers[0].self_attn.register_forward_hook(lambda *_, c=calls: c.append(1))
        gradients.append(p.gradient(rows, range(len(rows)), algorithm().loss, UPDATE))
        computed.append(len(calls))
    assert computed == [1, 2]
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradients[1][name], gradient, atol=1e-6), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3moe"])
def test_adapters_of_experts_are_in_the_export_and_in_a_sync(
    family: str, folder, tmp_path: Path
) -> None:
    p = policy(folder(family), lora={"rank": 4}, learning_rate=0.05)
    rows = rows_of(p)
    pairs = [(s.prompt_ids, s.token_ids[len(s.prompt_ids) :]) for s in rows]
    start = p.score(pairs)
    for _ in range(3):
        learn(p, rows)
    p.export(tmp_path)
    exported = policy(tmp_path)
    for found, wanted, before in zip(exported.score(pairs), p.score(pairs), start, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
        assert found != pytest.approx(before, abs=1e-3)
    synced, state = dict(merged_weights(p.model)), exported.model.state_dict()
    assert synced.keys() == state.keys()
    for name, tensor in synced.items():
        torch.testing.assert_close(tensor, state[name], atol=1e-6, rtol=0)
    bare, base = dict(merged_weights(p.model, merge=False)), policy(p.source).model.state_dict()
    assert all(torch.equal(bare[name], base[name]) for name in base)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_of_a_tied_tensor_is_refused(target: str, llama: Path, qwen: Path) -> None:
    with pytest.raises(UserError, match=rf"lora\.targets = .*{target}.*one tensor"):
        policy(llama, lora={"rank": 4, "targets": ["q_proj", target]})
    policy(qwen, lora={"rank": 4, "targets": ["q_proj", target]})  # not tied


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_keeps_the_dtypes_of_transformers(family: str, folder) -> None:
    p = policy(folder(family), dtype="bfloat16")
    wanted = AutoModelForCausalLM.from_pretrained(p.source, dtype=torch.bfloat16)
    found = {name: tensor.dtype for name, tensor in p.model.state_dict().items()}
    assert found == {name: tensor.dtype for name, tensor in wanted.state_dict().items()}


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"temperature": 0.6, "do_sample": False}, {"do_sample": True}),
        ({"top_p": 0.9}, {"do_sample": True}),
        ({"pad_token_id": -1}, {"pad_token_id": None}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "pad_token_id": 3}, {}),
    ],
)
def test_an_export_keeps_the_generation_config_as_far_as_it_can_be_saved(
    settings: dict, changes: dict, llama: Path, tmp_path: Path
) -> None:
    shutil.copytree(llama, tmp_path / "base")
    path = tmp_path / "base" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [2, 3], **settings}))
    policy(tmp_path / "base").export(tmp_path / "out")
    found = GenerationConfig.from_pretrained(tmp_path / "out").to_dict()
    wanted = {"eos_token_id": [2, 3], **settings, **changes}
    assert {name: found.get(name) for name in wanted} == wanted


def test_a_pad_token_without_an_embedding(llama: Path, tmp_path: Path) -> None:
    """It was added to the tokenizer only."""
    shutil.copytree(llama, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path / "model")
    p, asked = policy(tmp_path / "model", attention="eager"), some_requests(3, 1)
    asked = [r for r in asked if max(r.prompt_ids) < 258]
    assert len({len(r.prompt_ids) for r in asked}) > 1
    with_pad, without = (x.sampler.sample(asked, 1.0) for x in (p, policy(llama)))
    assert [r.token_ids for r in with_pad] == [r.token_ids for r in without]
