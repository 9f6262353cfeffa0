"""The documents: their code runs, their names exist, their defaults are the code's."""

import importlib
import importlib.util
import json
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.main import get_command

import hacrl
from hacrl.algorithms import ALGORITHMS, AlgorithmSettings, make_algorithm
from hacrl.cli import app
from hacrl.config import load_config, parse_config
from hacrl.errors import UserError
from hacrl.store.journal import Journal
from hacrl.store.rundir import RunDirectory
from hacrl.training.plan import plan_of
from hacrl.types import Snapshot

ROOT = Path(__file__).resolve().parent.parent
DOCS = [ROOT / name for name in ("README.md", "docs/hacpo.md", "docs/extending.md")]
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks" / "README.md",
]

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """(title, text) of each fenced block in a language; the title may be empty."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(title, text) for lang, title, text in found if lang == language]


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


teams = load(ROOT / "tests" / "training" / "team.py")


def tiny(**tables: Any) -> dict[str, Any]:
    """One step of two members of the pocket team."""
    settings = {"steps": 1, "evaluation": {"problems": 0}, "checkpoint": {"every": 0}, **tables}
    return teams.team(teams.member("wren"), teams.member("finch"), **settings)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with every file that the documents show, to run from; forgotten afterwards."""
    modules = set(sys.modules)
    for page in DOCS:
        for language in ("python", "toml"):
            for title, text in blocks(page, language):
                if title:
                    (tmp_path / title).write_text(text, encoding="utf-8")
    (tmp_path / "team.toml").write_text(tomli_w.dumps(tiny()), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def fragment(folder: Path, name: str) -> dict[str, Any]:
    return tomllib.loads((folder / name).read_text(encoding="utf-8"))


def first_cut(run: RunDirectory) -> Snapshot:
    return teams.snapshots(run, 1)[0]


# ---------------------------------------------------------------- extending.md


def test_the_algorithm_of_the_page_trains(folder: Path) -> None:
    """Each sample's advantage is its reward less the mean of the other rewards of its problem."""
    run = hacrl.train(tiny(**fragment(folder, "algorithm.toml")), "run")
    rewards = {
        g.problem_id: {(t.agent, t.index): t.reward for t in g.judged}
        for g in first_cut(run).groups
    }
    sources = set()
    for agent in ("wren", "finch"):
        lines = (run.samples_folder(agent) / "step-000000.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert rows
        for row in rows:
            others = dict(rewards[row["problem"]])
            own = others.pop((row["source"], row["index"]))
            assert row["advantage"] == pytest.approx(own - sum(others.values()) / len(others))
            sources.add((agent, row["source"]))
    assert len(sources) == 4  # each learned from both
    with pytest.raises(UserError, match="did you mean 'cap'"):
        hacrl.train(tiny(algorithm={"name": "my_rules:LeaveOneOut", "cup": 1}), "bad")


def test_the_task_of_the_page_trains(folder: Path) -> None:
    evaluation = {"evaluation": {"problems": 6}}
    run = hacrl.train(tiny(**fragment(folder, "task.toml"), **evaluation), "run")
    asked = {g.problem_id for g in first_cut(run).groups}
    task = importlib.import_module("my_task").Doubles(run.config().task, 3, folder)
    assert asked == {p.id for p in task.batch(0, 6)}
    assert len(asked) == 6
    assert not {p.id for p in task.train} & {p.id for p in task.held_out(None)}
    scores = [r["accuracy/doubles"] for r in run.metric_rows() if r["kind"] == "evaluation"]
    assert len(scores) == 4  # two agents, before and after
    with pytest.raises(UserError, match="prompts_per_step"):
        task.batch(0, 91)


@pytest.mark.parametrize(
    ("name", "label"), [("function.toml", "function(rewards:score)/1"), ("verifier.toml", "near/1")]
)
def test_the_verifiers_of_the_page_judge(folder: Path, name: str, label: str) -> None:
    table = fragment(folder, name)
    table["verifier"]["workers"] = 1
    run = hacrl.train(tiny(**table), "run")
    judged = [t for g in first_cut(run).groups for t in g.judged]
    assert {t.verifier for t in judged} == {label}
    assert len(judged) == 48  # None failed
    assert 1.0 in {t.reward for t in judged}
    assert {t.reward for t in judged} <= {0.0, 0.5, 1.0}


def test_the_sampler_of_the_page_trains(folder: Path) -> None:
    """It counts the tokens of all replies so far, which are those of the journal."""
    run = hacrl.train(tiny(**fragment(folder, "sampler.toml")), "run")
    for agent in ("wren", "finch"):
        (row,) = [r for r in run.metric_rows() if r["agent"] == agent and r["step"] == 0]
        rollouts, _ = Journal(run.journal(agent)).read(0)
        assert row["written"] == sum(len(r.completion.token_ids) for r in rollouts) > 0


# ---------------------------------------------------------------- README


def test_the_config_of_the_readme_is_valid() -> None:
    [(_, text)] = blocks(ROOT / "README.md", "toml")
    config = parse_config(tomllib.loads(text))
    for agent in config.agents:
        assert agent.learning_rate == 2e-4  # at the default, 1e-6, tiny models do not learn
        if agent.learns:
            plan_of(config, agent, make_algorithm(config.algorithm))


def test_the_python_of_the_readme_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "team.toml").write_text(
        tomli_w.dumps(tiny(evaluation={"problems": 6}, checkpoint={"every": 1}))
    )
    runpy.run_path(str(folder / "first_run.py"))
    assert len(capsys.readouterr().out.splitlines()) == 5  # a header; two agents, before and after


def command_names() -> set[str]:
    names: set[str] = set()
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        if command.hidden:
            continue
        names |= {f"{name} {sub}" for sub in inner} if inner else {name}
    return names


def test_the_readme_names_every_command_and_only_those() -> None:
    text = (ROOT / "README.md").read_text()
    for name in command_names():
        assert re.search(rf"\bhacrl {name}\b", text), name
    for page in PAGES:
        for first, second in re.findall(
            r"(?:^ +|`)hacrl ([a-z]+)(?: ([a-z]+))?", page.read_text(), re.M
        ):
            assert {first, f"{first} {second}"} & command_names(), (page.name, first)


@pytest.mark.usefixtures("folder")  # holds the algorithm of extending.md
def test_overrides_in_the_documents_are_valid() -> None:
    """Every `hacrl train CONFIG key=value ...`, applied to the pocket team."""
    seen = 0
    for page in PAGES:
        for line in re.findall(
            r"hacrl train \S+\.toml((?: [a-z_.0-9]+=[^\s`]+)+)", page.read_text()
        ):
            load_config(ROOT / "configs" / "pocket.toml", line.split())
            seen += 1
    assert seen >= 2


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for name in re.findall(r"(?:`|^ +)make ([a-z]+)", page.read_text(), re.MULTILINE):
            assert name in targets, (page.name, name)


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            there = page.parent / target if target else page
            assert there.exists(), (page.name, target)
            assert not anchor or anchor in anchors(there), (page.name, target, anchor)


def test_the_changelog_knows_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(hacrl.__version__)}\]", text, re.MULTILINE)


# ---------------------------------------------------------------- hacpo.md

HACPO = ROOT / "docs" / "hacpo.md"


def test_the_worked_examples_hold() -> None:
    examples = blocks(HACPO, "python")
    assert len(examples) >= 2
    for _, text in examples:
        assert "assert" in text
        exec(compile(text, str(HACPO), "exec"), {"__name__": "example"})


def defines(path: Path, name: str) -> bool:
    """Whether a file defines every part of `name` or `Class.member`."""
    text = path.read_text(encoding="utf-8")
    return all(
        re.search(rf"^ *(?:(?:async )?def|class) {part}\b|^ *{part}(?:: .*)? =", text, re.MULTILINE)
        for part in name.split(".")
    )


def references(page: Path) -> list[tuple[str, str]]:
    return re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_function_named_exists(page: Path) -> None:
    """`file.py:function`, from src/hacrl or from the repository's root."""
    own = {title for title, _ in blocks(page, "python")}
    for file, name in references(page):
        if file in own:
            continue
        places = [ROOT / "src" / "hacrl" / file, ROOT / file]
        path = next((p for p in places if p.is_file()), None)
        assert path is not None, f"{page.name} names {file}, which does not exist"
        assert not name or defines(path, name), f"{page.name} names {file}:{name}"


def test_hacpo_md_has_every_setting_with_its_default() -> None:
    """Rows of the form | `field` | algorithms | `default as TOML` | ... |, or unset"""
    row = r"^\| `(\w+)` \| ([^|]+) \| (?:`([^`]+)`|unset) \|"
    rows = re.findall(row, HACPO.read_text(), re.MULTILINE)
    stated = {
        (name, field): tomllib.loads(f"v = {default}")["v"] if default else None
        for field, names, default in rows
        for name in (ALGORITHMS if names == "all" else re.findall(r"`([^`]+)`", names))
    }
    assert stated == {
        (name, key): field.get_default(call_default_factory=True)
        for name, kind in ALGORITHMS.items()
        for key, field in kind.Settings.model_fields.items()
    }


def test_every_algorithm_is_in_the_lists_of_names() -> None:
    """The field `name`, the row of `name` in hacpo.md and the first table of rivals.md."""
    name_row = re.search(r"^\| `name` \|.*$", HACPO.read_text(), re.MULTILINE)
    rivals = (ROOT / "docs" / "rivals.md").read_text().split("\n## ")[0]
    field = AlgorithmSettings.model_fields["name"].description or ""
    assert name_row is not None
    for name in ALGORITHMS:
        assert re.search(rf"(^|\s){name},", field), f"AlgorithmSettings.name lacks {name}"
        assert f"`{name}`" in name_row[0].replace('`"hacpo"`', "`hacpo`"), f"hacpo.md lacks {name}"
        assert f"\n| `{name}` |" in rivals, f"rivals.md lacks {name}"


# ---------------------------------------------------------------- the config's own docs


def test_the_reference_is_current() -> None:
    text = importlib.import_module("make_reference").reference()
    stale = "docs/reference.md is stale: run `python scripts/make_reference.py`"
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") == text, stale


def test_every_config_field_has_its_doc() -> None:
    """A row of the reference ends with the description of its key."""
    rows = re.findall(r"^\| `.*$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert len(rows) > 100
    assert [row for row in rows if re.search(r"\| *\|$", row)] == []
