"""Runs and configs of others: no code is run, no secret is shown, no terminal code gets through."""

import json
import re
import shutil
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from cli_helpers import accepted, hacrl, refused, team, write
from rich.console import Console

from hacrl.config import load_config
from hacrl.config_file import first_difference
from hacrl.plain_console import PlainConsole
from hacrl.safe_text import mask, mask_override, mask_text, printable
from hacrl.store.rundir import RunDirectory
from hacrl.study.tables import plain_table

EVIL = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
from hacrl.algorithms import Algorithm
class Rule(Algorithm):
    def loss(self, batch, update): ...
def score(completion, **columns): return 1.0
def task(settings, seed, base):
    from hacrl.tasks import TaskConfig, make_task
    return make_task(TaskConfig(kind="arithmetic"), seed, base)
"""
CODE: dict[str, Any] = {
    "task": {"kind": "evil_code:task"},
    "verifier": {"kind": "function", "workers": 1, "options": {"path": "evil_code:score"}},
    "algorithm": {"name": "evil_code:Rule", "options": {"free": 1}},
}


def copied(run: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of the run, and its config."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    return folder, tomllib.loads((folder / "config.toml").read_text())


@pytest.fixture
def evil(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose config names code for everything; the code is in the working directory too."""
    folder, config = copied(run, tmp_path)
    (folder / "config.toml").write_text(tomli_w.dumps(config | CODE))
    for place in (folder, tmp_path):
        (place / "evil_code.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    return folder


def test_reading_commands_run_no_code_of_a_run(evil: Path, tmp_path: Path) -> None:
    """FAULTS D11: `samples` and `doctor` imported what a run directory or config names."""
    config = evil / "config.toml"
    assert hacrl("show", evil)[0] == 0
    code, out, err = hacrl("samples", evil, "--limit", "1")
    assert code == 0 and "learner wren" in out
    assert "questions are not shown: task.kind" in err and "add --trust-code" in err
    out, _ = accepted("doctor", config)
    assert "-- verifier: not checked: verifier.options.path" in " ".join(out.split())
    assert "--trust-code" in refused("eval", evil, "--out", tmp_path / "eval")
    suite = tmp_path / "suite.toml"
    arms = [{"name": "one"}]
    suite.write_text(
        tomli_w.dumps({"base": str(config), "seeds": [1], "reference": "one", "arms": arms})
    )
    assert "no run is finished" in refused("compare", suite, "--report", "--out", tmp_path / "c")
    assert not list(tmp_path.rglob("imported"))
    assert "free" in str(load_config(config).algorithm)  # training imports it
    assert (evil / "imported").exists()


def test_workers_of_eval_run_no_code_of_a_run(run: Path, tmp_path: Path) -> None:
    folder, config = copied(run, tmp_path)
    (folder / "other_evil_code.py").write_text(EVIL)
    verifier = CODE["verifier"] | {"options": {"path": "other_evil_code:score"}}
    (folder / "config.toml").write_text(tomli_w.dumps(config | {"verifier": verifier}))
    arguments = ("eval", folder, "--agent", "wren", "--out", tmp_path / "eval")
    assert "verifier.options.path" in refused(*arguments)
    assert not list(tmp_path.rglob("imported"))
    out, _ = accepted(*arguments, "--trust-code", "--json")
    assert json.loads(out)[0]["avg"]["mean"] == 1.0
    assert (folder / "imported").exists()


def test_remote_code_of_a_model_is_refused(run: Path, tmp_path: Path) -> None:
    folder, config = copied(run, tmp_path)
    config["agents"][0]["trust_remote_code"] = True
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    assert "trust_remote_code = true names code" in refused(
        "export", folder, "wren", tmp_path / "m"
    )
    assert "agent wren: not checked" in hacrl("doctor", folder / "config.toml")[1]


def test_secrets_are_masked() -> None:
    assert mask_override("sampler.options.api_key=a b") == "sampler.options.api_key=***"
    assert mask_override("x={password='a b', n=1}") == "x={password=***, n=1}"
    assert mask_text("at redis://me:secret@host/0: no") == "at redis://***@host/0: no"
    kept = "max_prompt_tokens=64 unknown key; known keys: a, b; tokens: 3; form key=value"
    assert mask_text(kept) == kept
    assert mask({"hub_token": "x", "a": [{"key": "y"}], "max_tokens": 3}) == {
        "hub_token": "***",
        "a": [{"key": "***"}],
        "max_tokens": 3,
    }
    assert first_difference({"a": {"token": "x"}}, {"a": {"token": "y"}}) == (
        "a.token is '***' there and '***' here"
    )


def test_a_config_with_a_secret_is_private(tmp_path: Path) -> None:
    """FAULTS D12: config.toml with a password had mode 0644."""
    for name, options, mode in (("a", {"api_key": "x"}, 0o600), ("b", {"n": 1}, 0o644)):
        agents = [team()["agents"][0] | {"template_args": options}]
        config = load_config(write(tmp_path / f"{name}.toml", agents=agents))
        stored = RunDirectory.create(tmp_path / name, config)
        assert stored.config_path.stat().st_mode & 0o777 == mode
        stored.set_config(config)
        assert stored.config_path.stat().st_mode & 0o777 == mode


def test_errors_show_no_secret_and_no_terminal_code(tmp_path: Path) -> None:
    config = write(tmp_path / "a.toml")
    message = refused("train", config, "pool.url=redis://me:hunter2@host", "agents.0.\x1b[2J=1")
    assert "hunter2" not in message and "\x1b" not in message
    options = 'sampler.options={"headers"={"Authorization"="Bearer hunter2"}}'
    assert "hunter2" not in refused("train", config, "steps=0", options)


def test_markup_and_terminal_codes_are_shown_as_text() -> None:
    """FAULTS D13-20: the problem id `[/]` was a MarkupError; ESC reached the terminal."""
    console = PlainConsole(width=80, force_terminal=True, no_color=True, record=True)
    table = plain_table("problem [/] \x1b]0;owned\x07")
    table.caption = "[bold]question :smile: \x9b31m\u202e"
    table.add_column("id\x1b[2J")
    table.add_row("[/]\r\x1b[1A\ud800")
    with console.capture() as captured:
        console.print(table)
        console.print("[/nothing] \x1b[31m")
    text = captured.get()
    for shown in ("[/]", "\\x1b]0;owned\\x07", "[bold]question :smile: \\x9b31m\\u202e"):
        assert shown in text
    assert "\\r\\x1b[1A\\ud800" in text and "[/nothing] \\x1b[31m" in text
    assert printable("a\tb\nc é 数") == "a\tb\nc é 数"


def test_json_of_show_and_samples(run: Path) -> None:
    """FIRST_HOUR 7: there was no machine-readable output."""
    shown = json.loads(hacrl("show", run, "--json")[1])
    assert [a["name"] for a in shown["agents"]] == ["wren", "finch"]
    assert (shown["steps_done"], shown["steps"], shown["algorithm"]) == (2, 2, "hacpo")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert shown["agents"][1]["scores"][-1]["accuracy"]["mean"] == last["accuracy"]
    rows = json.loads(hacrl("samples", run, "--json")[1])
    assert len(rows) == 4 * 4 * 2
    assert {"advantage", "weight", "ratio"} <= rows[0]["learners"]["wren"].keys()


def test_samples_cut_no_ratio_at_60_columns(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FIRST_HOUR 7: `samples` as a terminal shows it."""
    found = [row["learners"]["wren"] for row in json.loads(accepted("samples", run, "--json")[0])]
    ratios = [f"{r['ratio']:.4f}" for r in found[:8] if r and r["ratio"] is not None]
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "60")
    samples, _ = accepted("samples", run, "--limit", "16")
    assert ratios and all(ratio in samples for ratio in ratios)


@pytest.fixture
def commands(run: Path, tmp_path: Path) -> dict[str, tuple[str | Path, ...]]:
    """show, eval, doctor, and compare over copies of the run under two arms."""
    suite = {"base": str(run.parent / "team.toml"), "seeds": [0], "reference": "gspo"}
    suite |= {"arms": [{"name": "hacpo"}, {"name": "gspo"}], "teams": [{"name": "team"}]}
    (tmp_path / "suite.toml").write_text(tomli_w.dumps(suite))
    for arm in ("hacpo", "gspo"):
        shutil.copytree(run, tmp_path / "out" / "runs" / "team" / arm / "seed-0")
    return {
        "show": ("show", run),
        "eval": ("eval", run, "--out", tmp_path / "eval"),
        "doctor": ("doctor", run.parent / "team.toml"),
        "compare": ("compare", tmp_path / "suite.toml", "--out", tmp_path / "out", "--report"),
    }


@pytest.mark.parametrize("name", ["show", "eval", "doctor", "compare"])
def test_every_number_is_shown_in_a_narrow_terminal(
    name: str, commands: dict[str, tuple[str | Path, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a wide terminal shows, one of 80 and one of 60 columns shows too. A pipe gets plain text,
    and --json is JSON."""
    code, piped, err = hacrl(*commands[name])
    assert code == 0 and "\x1b" not in piped + err
    assert json.loads(hacrl(*commands[name], "--json")[1])
    monkeypatch.setattr(Console, "is_terminal", True)
    number = re.compile(r"(?<![\w/.-])[-+]?\d[\d,.]*(?:±[\d.]+)?(?![\w/.-])")

    def shown(columns: int) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        return re.sub("\x1b\\[[0-9;]*m", "", hacrl(*commands[name])[1])

    numbers = Counter(number.findall(shown(250)))
    assert sum(numbers.values()) > 8
    for columns in (80, 60):
        text = shown(columns)
        lines = [line for line in text.splitlines() if "/" not in line]  # paths are not folded
        assert "…" not in text and max(map(len, lines)) <= columns
        assert not numbers - Counter(number.findall(text))
