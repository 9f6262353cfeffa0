"""Files of problems, and the tasks that read them."""

import gzip
import json
from pathlib import Path
from typing import Any

from hacrl.tasks import TaskConfig, make_task
from hacrl.tasks.dataset import DatasetTask


def write_lines(path: Path, rows: list[Any]) -> None:
    text = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{i}", "question": f"{i} + 1?", "answer": str(i + 1)} for i in range(count)]


def task_of(folder: Path, data: list[Any], seed: int = 0, **settings: Any) -> DatasetTask:
    write_lines(folder / "train.jsonl", data)
    return made(TaskConfig(kind="jsonl", train="train.jsonl", **settings), folder, seed)


def made(config: TaskConfig, base: Path, seed: int = 0) -> DatasetTask:
    return make_task(config, seed, base)
