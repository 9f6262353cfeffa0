"""TensorBoard, W&B and trackio, each for real and offline: one run, then a resume."""

import io
import json
import shutil
import struct
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from team import member, rows, team

import hacrl
from hacrl.config import parse_config
from hacrl.logs.loggers import ALIASES, COLUMNS, _markdown, numbers, wandb_id
from hacrl.logs.observer import Observer
from hacrl.store.rundir import RunDirectory

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> hacrl.Run:
    """One step of two agents with every logger, then a resume with one more. Results are on stdout, so
    the loggers print nothing there. (trackio reads its folder when it is imported.)"""
    folder = tmp_path_factory.mktemp("logs")
    log = {"tensorboard": True, "wandb": "birds", "trackio": "birds", "table_rows": 2}
    agents = member("wren"), member("finch")
    config = team(*agents, steps=1, log=log, evaluation={"every": 1, "problems": 3})
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        pytest.importorskip("wandb")
        assert folder / "trackio" == pytest.importorskip("trackio").utils.TRACKIO_DIR
        found = hacrl.train(config, folder / "run")
        hacrl.resume(found.path, steps=2)
    assert out.getvalue() == ""
    return found


def expected(run: RunDirectory) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of two metrics and an alias of every agent, from metrics.jsonl."""
    names = {"loss": "train/{}/loss", "reply_tokens": "train/{}/completions/mean_length"}
    names["accuracy"] = "evaluation/{}/accuracy"
    return {
        name.format(agent): [(r["step"], r[key]) for r in rows(run, agent, name.split("/")[0])]
        for agent in ("wren", "finch")
        for key, name in names.items()
    }


def table(run: RunDirectory, step: int) -> list[dict[str, Any]]:
    """The first two replies of wren, as the tables show them."""
    path = run.evaluation(step, "wren") / "replies.jsonl"
    replies = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: reply[name] for name in COLUMNS} for reply in replies[:2]]


def test_tensorboard_has_the_agents_of_a_team_in_one_chart(run: RunDirectory) -> None:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    for key, values in expected(run).items():
        kind, agent, name = key.split("/", 2)
        events = EventAccumulator(str(run.path / "tensorboard" / agent))
        events.Reload()
        scalars = events.Tensors(f"{kind}/{name}")
        found = [(e.step, make_ndarray(e.tensor_proto).item()) for e in scalars]
        assert found == [(step, pytest.approx(value)) for step, value in values], key
        files = [path.name for path in (run.path / "tensorboard" / agent).iterdir()]
        assert len(files) == len({name.split(".")[3] for name in files}) == 2  # of two seconds
        texts = events.Tensors("evaluation/replies/text_summary")
        assert [event.step for event in texts] == [0, 1, 2]
        assert texts[0].tensor_proto.string_val[0].decode().startswith("| problem | question |")


def test_a_table_of_hostile_replies_is_plain_text() -> None:
    reply = "<script>x</script> | [a](javascript:b) `c` **d**\n\x1b[31m"
    cells = dict.fromkeys(COLUMNS, "1") | {"reply": reply, "reward": 0.5}
    lines = _markdown([cells]).splitlines()
    assert len(lines) == 3 and lines[2].count("|") == len(COLUMNS) + 1
    assert not any(mark in lines[2] for mark in ("<script", "](", "`", "**", "\x1b"))


def records(path: Path) -> Iterator[Any]:
    """The records of an offline file of W&B: blocks of 32 KiB, each with pieces of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # the last piece
            yield Record.FromString(whole)
            whole = b""


def test_wandb_offline(run: RunDirectory) -> None:
    files = sorted(run.path.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime)
    assert len(files) == 2 and len({path.name for path in files}) == 1  # one run at W&B
    found: dict[str, list[tuple[int, float]]] = {}
    tables = []
    for record in (record for path in files for record in records(path)):
        items = record.history.item
        values = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
        for key, value in values.items():
            if isinstance(value, float | int):
                found.setdefault(key, []).append((values["step"], value))
        if any(key.startswith("evaluation/wren/replies") for key in values):
            tables.append(values["step"])
    assert {key: found.get(key) for key in expected(run)} == expected(run)
    assert tables == [0, 1, 2]
    stored = sorted(run.path.glob("wandb/offline-run-*/files/media/table/evaluation/wren/*.json"))
    assert len(stored) == 3
    wanted = [list(row.values()) for row in table(run, 0)]
    assert any(json.loads(path.read_text())["data"] == wanted for path in stored)


def test_a_new_run_at_the_path_of_an_old_one_has_another_id(tmp_path: Path) -> None:
    """W&B continues a run with a known id."""
    run = RunDirectory.create(tmp_path / "run", parse_config(team(member("wren"))))
    first = wandb_id(run)
    run.add_metrics([{"kind": "train", "step": 0, "agent": "wren"}])
    assert wandb_id(run) == first
    shutil.rmtree(run.path)
    run = RunDirectory.create(tmp_path / "run", parse_config(team(member("wren"))))
    assert wandb_id(run) != first


def test_trackio_in_a_local_folder(run: RunDirectory) -> None:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (stored,) = trackio.Api().runs("birds")
    logs = SQLiteStorage.get_logs("birds", stored.name)
    found = {key: [(row["step"], row[key]) for row in logs if key in row] for key in expected(run)}
    assert found == expected(run)
    tables = [row["evaluation/wren/replies"] for row in logs if "evaluation/wren/replies" in row]
    assert [t["_value"] for t in tables] == [table(run, step) for step in range(3)]


@pytest.mark.parametrize("aliases", [["trl"], []])
def test_names_of_trl(aliases: list[str]) -> None:
    config = parse_config(team(member("wren"), log={"aliases": aliases}))
    values = {"reward": 0.5, "reward/brief": 0.25, "truncated": 0.1}
    others = {"rewards/brief/mean": 0.25, "completions/clipped_ratio": 0.1} if aliases else {}
    assert numbers({"kind": "train", "step": 3, **values}, config) == values | others
    assert numbers({"kind": "evaluation", "step": 3, **values}, config) == values
    text = (ROOT / "docs" / "logging.md").read_text()
    assert all(f"`{ours}` | `{theirs}`" in text for ours, theirs in ALIASES.items())


def test_a_logger_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    """A file stands where TensorBoard needs a folder; the next resume logs again."""

    notes: list[str] = []

    class Notes(Observer):
        def note(self, text: str) -> None:
            notes.append(text)

    log = {"tensorboard": True}
    config = team(member("wren"), member("finch"), steps=1, log=log, evaluation={"problems": 0})
    run = hacrl.train(config, tmp_path / "run")
    folder, away = run.path / "tensorboard" / "wren", tmp_path / "away"
    folder.rename(away)
    folder.write_text("")
    hacrl.resume(run.path, steps=2, observer=Notes())
    assert [row["step"] for row in rows(run, "wren", "train")] == [0, 1]
    [note] = [text for text in notes if "log." in text]
    assert note.startswith("log.tensorboard failed and is off until the run is resumed (")
    folder.unlink()
    away.rename(folder)
    before = len(list(folder.iterdir()))
    hacrl.resume(run.path, steps=3)
    assert len(list(folder.iterdir())) == before + 1
