"""The pocket team as shipped: small, different, complete, and able to begin."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hacrl.config import load_config
from hacrl.errors import UserError
from hacrl.pocket import POCKET, POCKET_CONFIG, POCKET_VARIANTS, pocket_path
from hacrl.tasks.arithmetic import ArithmeticTask

FILES = {"config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"}
FILES |= {"tokenizer.json", "tokenizer_config.json"}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(pocket_path(name))
    return tokenizer


def test_folders_are_complete_and_small() -> None:
    total = 0
    for name in POCKET + POCKET_VARIANTS:
        files = {f.name: f.stat().st_size for f in pocket_path(name).iterdir()}
        assert set(files) == FILES
        total += sum(files.values())
    assert total < 4_000_000


def test_the_config_in_the_package_is_the_one_of_the_repository() -> None:
    copy = Path(__file__).parents[1] / "configs" / "pocket.toml"
    assert POCKET_CONFIG.read_text() == copy.read_text()
    assert [agent.name for agent in load_config(POCKET_CONFIG).agents] == list(POCKET)


def test_unknown_name() -> None:
    with pytest.raises(UserError, match="'eagle' is unknown; there are wren, finch, heron, gold"):
        pocket_path("eagle")


def test_families_sizes_and_tokenizers_differ() -> None:
    configs = {n: json.loads((pocket_path(n) / "config.json").read_text()) for n in POCKET}
    assert {c["model_type"] for c in configs.values()} == {"llama", "qwen3"}
    assert {c["tie_word_embeddings"] for c in configs.values()} == {True, False}
    assert any(c["num_key_value_heads"] < c["num_attention_heads"] for c in configs.values())
    weights = [(pocket_path(n) / "model.safetensors").stat().st_size for n in POCKET]
    assert weights == sorted(weights) and weights[2] > 1.5 * weights[1] > 1.5 * 1.5 * weights[0]
    vocabularies = {n: tokenizer_of(n).get_vocab() for n in POCKET}
    assert vocabularies["finch"] == vocabularies["heron"] != vocabularies["wren"]
    for name, config in configs.items():
        assert config["vocab_size"] == len(vocabularies[name])


@pytest.mark.parametrize(
    ("name", "model"), [(v, v.split("-")[0] if "-" in v else "finch") for v in POCKET_VARIANTS]
)
def test_a_variant_is_the_model_with_other_weights(name: str, model: str) -> None:
    """Same body, tokenizer and template; so pairs of them differ by training alone."""
    for file in sorted(FILES - {"model.safetensors"}):
        assert (pocket_path(name) / file).read_bytes() == (pocket_path(model) / file).read_bytes()
    weights = {(pocket_path(n) / "model.safetensors").read_bytes() for n in (name, model)}
    assert len(weights) == 2


@pytest.mark.parametrize("name", POCKET)
def test_sampled_accuracy_at_the_start(name: str) -> None:
    """Neither helpless nor finished: RL needs right replies to amplify and wrong ones to drop."""
    tokenizer = tokenizer_of(name)
    model = AutoModelForCausalLM.from_pretrained(pocket_path(name), dtype=torch.float32)
    problems = ArithmeticTask(0).held_out(48)
    chats = [[{"role": "user", "content": p.messages[0].content}] for p in problems]
    how = {"padding": True, "return_tensors": "pt", "tokenizer_kwargs": {"padding_side": "left"}}
    rows = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True, **how)
    ids, mask = rows["input_ids"], rows["attention_mask"]
    torch.manual_seed(0)
    sizes = {"max_new_tokens": 24, "num_return_sequences": 4}
    replies = model.generate(input_ids=ids, attention_mask=mask, **sizes)[:, ids.shape[1] :]
    ended = (replies == tokenizer.eos_token_id).any(1).float().mean().item()
    assert ended > 0.97
    texts = tokenizer.batch_decode(replies, skip_special_tokens=True)
    answers = [problem.answer for problem in problems for _ in range(4)]
    right = [re.findall(r"\d+", x)[-1:] == [a] for x, a in zip(texts, answers, strict=True)]
    assert 0.05 < sum(right) / len(right) < 0.6
