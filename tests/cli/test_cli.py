"""The command line, as a person meets it: good runs, and bad input with a way out.

Commands run in this process, through the same app and error handling. test_processes.py has the tests
that need a process: exit codes, signals, full disks, imported modules.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from cli_helpers import ROOT, accepted, hacrl, refused, write
from matplotlib.figure import Figure

from hacrl.config import load_config
from hacrl.pocket import pocket_path

ARMS = {"together": "hacpo", "alone": "gspo"}


# ---------------------------------------------------------------- looking at a run


def test_samples_show_what_the_files_say(run: Path) -> None:
    """The first learner's first problem at step 2, each number against samples/wren and the pool."""
    out, _ = accepted("samples", run, "--step", "2", "--agent", "wren", "--limit", "8")
    shown = [line.split() for line in out.splitlines() if line.startswith(("wren ", "finch "))]
    problem = re.search(r"step 2, problem (\S+), learner wren", out)
    assert problem
    stored = [json.loads(x) for x in (run / "samples/wren/step-000001.jsonl").open()]
    rows = {(r["source"], str(r["index"])): r for r in stored if r["problem"] == problem[1]}
    assert len(shown) == 8
    assert rows
    for author, index, _, _, ratio, advantage, weight, used, *_ in shown:
        row = rows.get((author, index))
        if row is None:
            assert [ratio, advantage, weight] == ["-", "-", "-"]
            continue
        if row["ratio"] is None:  # advantage 0: the model never saw it
            assert (ratio, row["advantage"]) == ("-", 0)
        else:
            assert float(ratio) == pytest.approx(row["ratio"], abs=5e-5)
        assert float(advantage) == pytest.approx(row["advantage"], abs=5e-3)
        assert float(weight) == pytest.approx(row["weight"], abs=5e-3)
        assert used == ("yes" if row["used"] and row["advantage"] else "no")


def test_replies_that_are_not_judged_are_on_every_screen(tmp_path: Path) -> None:
    """FIRST_HOUR 1: a reward function that raises on some replies. Count and first message are in the
    progress, in show and in samples, the count beside every accuracy."""
    (tmp_path / "rewards.py").write_text(
        "def score(completion, **columns):\n"
        "    if len(completion) % 2:\n        raise ValueError('boom [b]')\n    return 0.5\n"
    )
    verifier = {"kind": "function", "workers": 1, "options": {"path": "rewards:score"}}
    config, run = write(tmp_path / "team.toml", verifier=verifier), tmp_path / "run"
    _, err = accepted("train", config, "--run", run)
    count = r"\(of \d+ judged, \d+ not\)"
    assert re.search(rf"before training: wren 50.0±0.0 {count}  finch 50.0±0.0 {count}", err)
    failed = r"your reward function failed on \d+ of \d+ replies \(\d+ error; first error: ValueErr"
    assert len(re.findall(rf"note: \w+, evaluation before training: {failed}", err)) == 2
    out, _ = accepted("show", run)
    assert len(re.findall(rf"50.0±0.0 {count}", out)) == 4 and re.search(failed, out), out
    out, _ = accepted("samples", run)
    assert re.match(rf"step 2: {failed}or: boom \[b\]\)", out), out
    out, _ = accepted("eval", run, "--trust-code", "--out", tmp_path / "eval")
    assert len(re.findall(rf"50.0±0.0 {count}", out)) == 2


def test_show_names_the_error_that_ended_a_run(tmp_path: Path) -> None:
    config, run = write(tmp_path / "team.toml"), tmp_path / "run"
    assert hacrl("train", config, "max_prompt_tokens=1", "--run", run)[0] == 2
    out, _ = accepted("show", run)
    assert re.search(
        r"\nfailed: UserError: agent 'wren': every prompt of the first \d+ problems", out
    )
    assert out.splitlines()[-1].startswith("failed; continue with `")


def test_samples_of_what_is_not_there(run: Path) -> None:
    """A run may be read-only: nothing is written."""
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    accepted("samples", run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert "--step 7: the run has samples of steps 1 to 2" in refused("samples", run, "--step", "7")
    assert "wren, finch" in refused("samples", run, "--agent", "emu")
    assert "add-0-0" in refused("samples", run, "--problem", "add-0-0")


def test_first_hour_14_steps_count_from_1(run: Path) -> None:
    """In samples, show and the rows of --json; step 0 is the model before training."""
    _, first, _ = hacrl("samples", run, "--step", "1", "--agent", "wren", "--limit", "1")
    assert "step 1" in first and "step 0" not in first
    assert "--step 0: the run has samples of steps 1 to 2" in refused("samples", run, "--step", "0")
    shown = json.loads(hacrl("show", run, "--json")[1])["agents"][0]
    assert [step for step, _ in shown["rewards"]] == [1, 2]
    assert [score["step"] for score in shown["scores"]] == [0, 1, 2]


def test_first_hour_16_axes_have_whole_numbers_inside_the_picture(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`show` has a row of figures and a curve for every agent."""
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (drawn.append(f), save(f, *a, **k)))
    out, _ = accepted("show", run, "--png", tmp_path / "run.png")
    rows = [line for line in out.splitlines() if line.startswith(("wren", "finch"))]
    assert len(rows) == 4 and all(" 32 " in row for row in rows[:2])  # 2 steps x 4 x 4 rollouts
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    [figure] = drawn
    for axes in figure.axes:
        labels = [x for x in axes.get_xticklabels() if axes.get_xlim()[0] <= x.get_position()[0]]
        inside = [x for x in labels if x.get_position()[0] <= axes.get_xlim()[1]]
        assert inside and all(
            float(x.get_text().replace("\u2212", "-")).is_integer() for x in inside
        )
        assert all(x.get_window_extent().x1 <= figure.bbox.x1 for x in inside)


def test_eval_repeats_the_run_s_own_evaluation(run: Path, tmp_path: Path) -> None:
    """Same weights, same problems, same noise: the very same replies as after the last step."""
    out, _ = accepted("eval", run, "--agent", "wren", "--out", tmp_path)
    assert "wren" in out
    own = (run / "evaluation/step-000002/wren/replies.jsonl").read_text()
    assert (tmp_path / "held_out/wren/replies.jsonl").read_text() == own


def test_export_makes_a_folder_that_loads_and_can_be_evaluated(run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "model"
    out, _ = accepted("export", run, "finch", folder, "--step", "1")
    assert "finch after step 1" in out
    for path in (folder / "model.safetensors", *run.rglob("*.safetensors")):
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask()  # FIRST_HOUR 17: was 0600
    AutoTokenizer.from_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder)
    config = run.parent / "team.toml"
    out, _ = accepted("eval", folder, "--config", config, "--out", tmp_path / "eval")
    assert "model" in out
    assert "not empty" in refused("export", run, "finch", folder)
    assert "is a file" in refused("export", run, "finch", folder / "config.json")
    assert "wren, finch" in refused("export", run, "emu", tmp_path / "emu")
    assert "at step 9" in refused("export", run, "wren", tmp_path / "wren", "--step", "9")


def umask() -> int:
    os.umask(mask := os.umask(0o022))
    return mask


def test_messages_of_the_first_hour(run: Path, tmp_path: Path) -> None:
    """FIRST_HOUR 19."""
    config = write(tmp_path / "a.toml")
    code, _, err = hacrl("train", config, "--steps", "3")
    assert code == 2 and "steps=VALUE" in err
    assert "is a directory" in refused("train", tmp_path)
    assert "does not exist" in refused("train", tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("steps = = 3\n")
    assert "line 1" in refused("train", tmp_path / "broken.toml")
    data = tmp_path / "d.jsonl"
    data.write_text('{"question": "1 + 1", "answer": null}\n')
    task = write(tmp_path / "b.toml", task={"kind": "jsonl", "train": str(data)})
    message = refused("train", task, "--run", tmp_path / "b")
    assert f"{data}, line 1: column 'answer'" in message and "is null" in message
    frozen = tmp_path / "run"
    shutil.copytree(run, frozen)
    text = (frozen / "config.toml").read_text()
    (frozen / "config.toml").write_text(text.replace("learn = true", "learn = false", 1))
    assert "'wren' does not train" in refused("samples", frozen, "--agent", "wren")


def test_wandb_without_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FIRST_HOUR 19: it was a traceback of 25 frames."""

    def init(**_: object) -> None:
        raise RuntimeError("api_key not configured (no-tty)")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = write(tmp_path / "a.toml", log={"tensorboard": False, "wandb": "project"})
    message = refused("train", config, "--run", tmp_path / "run")
    assert "api_key not configured" in message and "wandb login" in message


def test_resume_goes_on_and_a_corrupted_checkpoint_is_told(run: Path, tmp_path: Path) -> None:
    """Newest checkpoint of wren damaged: the run falls back to step 1, says so, and ends well."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    before = (copy / "metrics.jsonl").read_text()
    weights = copy / "checkpoints/wren/step-000002/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    out, err = accepted("resume", copy, "steps=3")
    assert "step 2 is corrupted" in err
    assert "using step 1 instead" in err
    assert "continues from the checkpoint after step 1; replies that are in the journals" in err
    assert "step 3 of 3" in out
    _, err = accepted("resume", copy)
    assert f"All 3 steps are done ({copy}); `" in err
    assert f"hacrl resume {copy} steps=N` adds more" in err
    assert (copy / "metrics.jsonl").read_text().startswith(before)
    assert "seed: 0 -> 1. Restore" in refused("resume", copy, "seed=1")
    assert "is not of the form key=value" in refused("resume", copy, "seed")
    assert "step: unknown key; did you mean 'steps'" in refused("resume", copy, "step=9")
    assert "is not a run directory" in refused("resume", tmp_path)
    config = run.parent / "team.toml"
    assert f"hacrl resume {run}" in refused("train", config, "--run", run)


def test_doctor_names_what_is_missing(tmp_path: Path) -> None:
    out, _ = accepted("doctor", ROOT / "configs/pocket.toml")
    for word in (
        "torch",
        "device",
        "pip install 'hacrl[vllm]'",
        "KV cache",
        "own + ",
        "heron",
        "ok  task",
    ):
        assert word in out
    config = write(tmp_path / "a.toml")
    code, out, err = hacrl("doctor", config, f"agents.wren.model={tmp_path / 'nowhere'}")
    assert code == 2
    assert "no  agent wren" in out
    assert "agent wren" in err


def test_doctor_without_the_models(tmp_path: Path) -> None:
    """A name with one slash may be a hub name or a folder that is missing. There is no empty table."""
    models = [f"agents.{name}.model=models/{name}" for name in ("wren", "finch", "heron")]
    out, _ = accepted("doctor", ROOT / "configs/pocket.toml", *models)
    assert "models/wren is no folder here; the run downloads the model of this name" in out
    assert "memory of each agent" not in out


def test_doctor_reads_the_data_once(tmp_path: Path) -> None:
    """The checks of the task, the verifier and three agents share one task."""
    path, opened = tmp_path / "problems.jsonl", tmp_path / "opened"
    rows = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = f"""
import sys
from pathlib import Path
sys.addaudithook(
    lambda event, args: event == "open" and str(args[0]) == {str(path)!r}
    and open({str(opened)!r}, "a").write("x")
)
from hacrl.config import load_config
from hacrl.study.doctor.doctor import check
changes = ["task.kind=jsonl", "task.train={path}"]
found = list(check(load_config(Path({str(ROOT / "configs/pocket.toml")!r}), changes)))
print(*found, sep="\\n")
assert all(f.good for f in found if f.what in ("task", "verifier"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert opened.read_text() == "x"


def test_the_demo_compares_both_arms(tmp_path: Path) -> None:
    """One short step; the same command again trains nothing."""
    small = ["prompts_per_step=4", "minibatch_samples=16", "evaluation.problems=6"]
    command = ("demo", *small, "--steps", "1", "--run", tmp_path / "demo")
    out, _ = accepted(*command)
    agents = ("wren", "finch", "heron")
    rows = [line.split() for line in out.splitlines() if line.startswith("team / ")]
    assert [row[2:5] for row in rows[1:]] == [[a, arm, "32"] for a in agents for arm in ARMS]
    for arm, algorithm in ARMS.items():
        config = load_config(tmp_path / "demo/runs/team" / arm / "seed-0/config.toml")
        assert config.algorithm.name == algorithm
    assert (tmp_path / "demo/report.html").is_file()
    code, again, err = hacrl(*command)
    assert code == 0 and again == out and "2 runs, 2 already finished" in err


def test_a_benchmark(tmp_path: Path) -> None:
    rows = [{"id": f"g-{i}", "question": f"{i}+1", "answer": str(i + 1)} for i in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "gsm8k_test.jsonl").write_text(lines)
    command = ("eval", "pocket:wren", "--benchmarks", "gsm8k_test")
    assert "--data" in refused(*command)
    assert "--config does not go" in refused(*command, "--data", tmp_path, "--config", "a.toml")
    assert "--problems needs --benchmarks" in refused("eval", "pocket:wren", "--problems", "5")
    where = ("--data", tmp_path, "--max-tokens", "8", "--out", tmp_path / "out")
    assert "GSM8K" in accepted(*command, *where)[0]
    assert (tmp_path / "out/gsm8k_test/wren/replies.jsonl").is_file()


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("agents.0.learning_rat=1e-4", ["agents.0.learning_rat", "did you mean 'learning_rate'"]),
        ("steps=many", ["override steps=many: steps: ", "valid integer", "'many'"]),
        ("algorithm.name=hocpo", ["algorithm.name", "'hocpo'", "hacpo, gspo"]),
        ("task.kind=arithmetics", ["task.kind", "arithmetics", "jsonl"]),
        ("runtime.device=cuda:99", ["cuda:99", "cpu"]),
        ("agents.0.model=/no/such/folder", ["agent 'wren'", "/no/such/folder", "does not exist"]),
        ("pool.url=redis://x", ["pool: no longer exists", "RUN/pool", "delete"]),
        ("steps", ["'steps'", "key=value"]),
    ],
)
def test_bad_settings(tmp_path: Path, override: str, words: list[str]) -> None:
    message = refused("train", write(tmp_path / "a.toml"), override, "--run", tmp_path / "run")
    for word in words:
        assert word in message


def test_model_folders_that_cannot_be_used(tmp_path: Path) -> None:
    no_tokenizer, no_end = tmp_path / "no_tokenizer", tmp_path / "no_end"
    for folder in (no_tokenizer, no_end):
        shutil.copytree(pocket_path("wren"), folder)
    for path in no_tokenizer.glob("*token*"):
        path.unlink()
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((no_end / name).read_text())
        content = {k: v for k, v in content.items() if not k.startswith("eos_token")}
        (no_end / name).write_text(json.dumps(content))
    config = write(tmp_path / "a.toml")
    for folder, word in ((no_tokenizer, "tokenizer"), (no_end, "end token")):
        message = refused("train", config, f"agents.0.model={folder}", "--run", tmp_path / "run")
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        assert "agent 'wren'" in message
        assert word in message
