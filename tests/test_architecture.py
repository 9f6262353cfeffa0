"""docs/architecture.md: its tables are complete, and the walk to the optimizer is that of a real run.
Files have at most 400 lines, functions at most 60 (CONTRIBUTING.md)."""

import ast
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import ROOT, hacrl, write

SRC = ROOT / "src" / "hacrl"


def test_the_walk_is_the_stack_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of hacrl between cli.train and optimizer.step(): at most 8, as listed in the document."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^\d\. `([\w/]+\.py):(?:\w+\.)?(\w+)`", text, re.MULTILINE)
    seen: list[list[tuple[str, str]]] = []
    step = torch.optim.AdamW.step

    def record(self: Any, *args: Any, **options: Any) -> Any:
        frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(SRC)]
        seen.append([(str(Path(f.filename).relative_to(SRC)), f.name) for f in frames])
        return step(self, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    config = write(tmp_path / "a.toml", steps=1, evaluation={"problems": 0})
    code, _, err = hacrl("train", config, "--run", tmp_path / "run")
    assert code == 0, err
    assert len(listed) <= 8
    assert seen and all(stack == listed for stack in seen)


def test_the_tables_name_every_package_and_module_once() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    tables = text.split("## Packages")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", tables, re.MULTILINE)
    named = [name.rstrip("/") for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    found = {p.name for p in SRC.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert sorted(named) == sorted(found - {"__init__.py", "__main__.py"})


def test_files_have_at_most_400_lines_and_functions_60() -> None:
    """Also outside the package: tests, scripts, benchmarks and examples."""
    folders = ("src", "tests", "scripts", "benchmarks", "examples")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    long = []
    for file in files:
        text = file.read_text()
        long += [str(file)] if len(text.splitlines()) > 400 else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                long += [f"{file}: {node.name}"] if lines > 60 else []
    assert long == []
