from pathlib import Path

import pytest

from hacrl.algorithms import make_settings
from hacrl.config import dump_config, load_config, parse_config
from hacrl.config_file import apply_overrides
from hacrl.errors import UserError

TEXT = """
steps = 4
[task]
kind = "arithmetic"
[verifier]
kind = "number"
[[agents]]
name = "wren"
model = "pocket:wren"
[[agents]]
name = "finch"
model = "pocket:finch"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "team.toml"
    file.write_text(TEXT)
    return file


def test_the_papers_defaults(path: Path) -> None:
    """arXiv 2603.02604, settings of section 5 and appendix."""
    c = load_config(path)
    a, agent = c.algorithm, c.agents[0]
    assert (c.prompts_per_step, c.samples_per_prompt, c.minibatch_samples) == (128, 8, 512)
    assert (a.name, a.alpha, a.floor, a.last_floor) == ("hacpo", 1, 0.8, 0.875)
    assert (a.capability_window, a.epsilon_low, a.epsilon_high) == (5, 3e-4, 4e-4)
    assert (agent.learning_rate, agent.weight_decay, agent.max_grad_norm) == (1e-6, 0.01, 1.0)
    assert agent.betas == (0.9, 0.999)
    assert (c.max_prompt_tokens, c.max_response_tokens) == (1024, 4096)


def test_overrides(path: Path) -> None:
    changes = ["steps=9", "agents.0.learning_rate=2e-6", "agents.finch.learn=false"]
    changes += ["algorithm.name=gspo", "agents.wren.template_args.enable_thinking=false"]
    config = load_config(path, changes)
    assert config.steps == 9
    assert config.agent("wren").learning_rate == 2e-6
    assert config.agent("wren").template_args == {"enable_thinking": False}
    assert not config.agent("finch").learns
    assert config.algorithm.name == "gspo"
    config = load_config(path, ["agents.*.lora={rank=8}", "agents.0.lora.rank=4"])
    assert [agent.lora.rank for agent in config.agents] == [4, 8]


def test_an_agent_whose_name_has_dots(path: Path) -> None:
    names = ["agents.0.name=qwen2.5", "agents.1.name=qwen2"]
    changes = ["agents.qwen2.5.learning_rate=0.5", "agents.qwen2.lora.rank=4"]
    one, other = load_config(path, [*names, *changes]).agents
    assert (one.learning_rate, one.lora) == (0.5, None)
    assert other.learning_rate != 0.5 and other.lora is not None and other.lora.rank == 4
    with pytest.raises(UserError, match=r"agents\.0\.5: unknown key"):
        load_config(path, ["agents.0.name=qwen2", "agents.qwen2.5.learning_rate=0.5"])


def test_what_is_written_reads_back_as_the_same(path: Path, tmp_path: Path) -> None:
    config = load_config(path, ["agents.0.lora.rank=4", "algorithm.alpha=3"])
    (tmp_path / "again.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.toml") == config


def test_paths_are_relative_to_the_file_or_begin_at_home(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    task = load_config(path, ['task={kind="jsonl", train="~/train.jsonl"}']).task
    assert task.train == str(tmp_path.resolve() / "train.jsonl")
    config = load_config(path, ["agents.0.model=models", "agents.1.model=org/name"])
    assert config.agents[0].model == str((tmp_path / "models").resolve())
    assert config.agents[1].model == "org/name"  # a hub name


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algoritm.alpha=1", ["algoritm: unknown key; did you mean 'algorithm'"]),
        ("agents.0.learning_rat=1e-6", ["unknown key; did you mean 'learning_rate'"]),
        ("steps=many", ["override steps=many: steps: ", "valid integer", "'many'"]),
        ("agents.finch.threads=x", ["override agents.finch.threads=x: agents.1.threads"]),
        ("steps=0", ["override steps=0: ", "greater than or equal to 1"]),
        ("agents.0.name=finch", ["'finch' is used twice"]),
        ("agents.7.learn=false", ["agents.7", "'7'", "0 to 1", "wren"]),
        ("agents.0.name=a/b", ["agents.0.name"]),
        ("agents.0.betas=[0.9]", ["agents.0.betas.1"]),
        ("agents.0.replay=runs/x", ["either `model` or `replay`"]),
        ("agents.*.learn=false", ["no agent learns"]),
        ("agents.*.name.x=1", ["agents.*.name is a value"]),
        ("algorithm.*.x=1", ["algorithm.*"]),
        ("nonsense", ["key=value"]),
        ("algorithm.name=hocpo", ["algorithm.name = 'hocpo'", "did you mean 'hacpo'", "overlap"]),
        ("algorithm.name=3", ["algorithm.name = 3 is unknown"]),
        ("algorithm.alhpa=2", ["unknown key; did you mean 'alpha'"]),
        ("algorithm.tis_cap=3", ["algorithm.tis_cap belongs to f-tis, not hacpo"]),
        ("algorithm.last_floor=1.0", ["algorithm: ", "= 1.0", "floor <= last_floor < 1"]),
        ("algorithm.ratio_min=20", ["algorithm: ratio_min = 20 is above ratio_max = 10"]),
        ("algorithm.overlap_power=1", ["algorithm.overlap_power: write algorithm.power"]),
        # FAULTS D13-20: these were tracebacks, or took for ever.
        ("agents.0.template_args.x=[nan]", ["agents.0.template_args.x.0: nan is not a finite"]),
        (f"seed={2**63}", ["override seed=", "seed: the number is too large"]),
        ("runtime.threads=100000", ["runtime.threads", "less than or equal to 1024"]),
        (f"prompts_per_step={2**53}", ["prompts_per_step", "less than or equal to 1000000"]),
        ("agents.².name=x", ["there is no '²'"]),
        ("agents=[[1]]", ["agents.0"]),
        ("algorithm.name=[1]", ["algorithm.name = [1] is unknown"]),
        ("algorithm.name=json:loads", ["json:loads' is not an algorithm"]),
        ("a." * 2000 + "=1", ["levels of tables"]),
        ("x=" + "[" * 3000, ["override x=...", "...: x: unknown key"]),
        (
            'task.gym=[{name="a", lable="b"}]',
            ["task.gym.0.lable: unknown key; did you mean 'label'"],
        ),
        ("evaluation.problems=no", ["evaluation.problems: Input should be 'all' (given: 'no')"]),
        (
            "agents.0.lora=true",
            ["agents.0.lora: must be a table, e.g. { key = value } (given: True)"],
        ),
        ('agents={name="a"}', ["agents: must be a list of tables: write [[agents]]"]),
        (
            'verifier.rewards={kind="number"}',
            ["verifier.rewards: must be a list of tables: write [[verifier.rewards]]"],
        ),
        (
            "task.operations=[add,sub]",
            [
                'task.operations: Input should be a valid list, e.g. ["a", "b"] (given: ',
                "[add,sub]",
            ],
        ),
        ("task.operations.0=sub", ["task.operations: Input should be a valid list, e.g."]),
        (
            "agents.0.model=~nobody_here/m",
            [
                "agents.wren.model = '~nobody_here/m'",
                "there is no user ~nobody_here; write ./~nobod",
            ],
        ),
        ("agents.0.betas=[0.9]", ["agents.0.betas.1: missing; add it"]),
        ("agents.0.lora.alpha=0", ["agents.0.lora.alpha: Input should be greater than 0"]),
        ("agents.0.name=snapshot.json", ["'snapshot.json' is a file of the pool"]),
        ("agents.0.frozen=true", ["agents.0.frozen: unknown key; write learn = false"]),
        ("agents.0.name=finch", ["agents.0.name=finch: agents: the name"]),
    ],
)
def test_what_is_wrong_is_named(path: Path, override: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load_config(path, [override])
    for word in words:
        assert word in str(error.value)


def test_the_known_keys_of_a_table_are_listed_once(path: Path) -> None:
    with pytest.raises(UserError) as error:
        load_config(path, ["agents.*.xx=1", "evaluation.yy=1"])
    text = str(error.value)
    assert text.count("known keys: name, model") == text.count("known keys: every, problems") == 1
    assert "agents.1.xx: unknown key" in text


def test_the_verifier_s_memory_limit_can_be_unset(path: Path, tmp_path: Path) -> None:
    config = load_config(path, ["verifier.memory_gb=0"])
    (tmp_path / "again.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.toml").verifier.memory_gb == 0


def test_a_mistake_in_the_file_names_the_file(path: Path) -> None:
    path.write_text(f"stepz = 2\n{TEXT}")
    with pytest.raises(UserError, match=rf"^{path}: stepz: unknown key; did you mean 'steps'\?$"):
        load_config(path)


@pytest.mark.parametrize("overrides", [[], ["steps=3"], ["algorithm.alpha=2"]])
@pytest.mark.parametrize("text", ['algorithm = "gspo"\n%s', '%s\n[[algorithm]]\nname = "gspo"'])
def test_an_algorithm_that_is_no_table_is_refused(
    text: str, overrides: list[str], path: Path
) -> None:
    path.write_text(text % TEXT)
    with pytest.raises(UserError, match=r"algorithm: must be a table"):
        load_config(path, overrides)


def test_another_algorithm_drops_the_settings_it_does_not_have(path: Path) -> None:
    path.write_text(f"{TEXT}\n[algorithm]\nalpha = 2.0\nepsilon_low = 0.1\nbeta = 0.2\n")
    both = {"epsilon_low": 0.1, "beta": 0.2}
    assert load_config(path).algorithm == make_settings(alpha=2.0, **both)
    gspo = make_settings("gspo", **both)
    assert load_config(path, ["algorithm.name=gspo"]).algorithm == gspo
    tree = load_config(path).model_dump(mode="json", exclude_none=True)
    apply_overrides(tree, {"algorithm.name": "gspo"}, path.parent)  # as hacrl.train does
    assert parse_config(tree).algorithm == gspo
    arms = path.parent / "arms"
    arms.mkdir()
    (arms / "tis.toml").write_text('[algorithm]\nname = "f-tis"\ntis_cap = 3.0\n')
    assert load_config(path, ["+tis"]).algorithm == make_settings("f-tis", tis_cap=3.0, beta=0.2)
    for overrides in (
        ["algorithm.name=gspo", "algorithm.alpha=1"],
        ["+tis", "algorithm.name=gspo"],
    ):
        with pytest.raises(UserError, match=r"algorithm\.\w+ belongs to (hacpo|f-tis), not gspo"):
            load_config(path, overrides)
    path.write_text(f'{TEXT}\n[algorithm]\nname = "gspo"\nalpha = 2.0\n')
    with pytest.raises(UserError, match=r"algorithm\.alpha belongs to hacpo, not gspo"):
        load_config(path)  # in the file it is an error


def test_settings_of_an_imported_algorithm(path: Path, tmp_path: Path) -> None:
    """Import paths start at the config's folder, and the stored config keeps that folder."""
    (tmp_path / "my_rule.py").write_text(
        "from hacrl.algorithms import Algorithm\n"
        "class Free(Algorithm):\n"
        "    def loss(self, batch, update): ...\n"
        "class Own(Free):\n"
        "    class Settings(Algorithm.Settings):\n"
        "        cap: float = 2.0\n"
    )
    free = load_config(path, ["algorithm.name=my_rule:Free", "algorithm.options.mine=[1, 2]"])
    assert free.algorithm.options == {"mine": [1, 2]}
    own = load_config(path, ["algorithm.name=my_rule:Own", "algorithm.cap=3"])
    assert own.algorithm.cap == 3.0
    assert own.algorithm.name == f"{tmp_path}/my_rule:Own"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(dump_config(own))
    assert load_config(tmp_path / "run" / "config.toml") == own
    options = ["verifier.kind=function", "verifier.options={path='../my_rule:f'}"]
    other = load_config(tmp_path / "run" / "config.toml", options)
    assert other.verifier.options == {"path": f"{tmp_path}/my_rule:f"}
    with pytest.raises(UserError, match=r"algorithm\.cup: unknown key; did you mean 'cap'"):
        load_config(path, ["algorithm.name=my_rule:Own", "algorithm.cup=3"])


def test_a_module_of_another_folder_is_not_taken_for_the_config_s(path: Path) -> None:
    """A module that is already imported, here the standard library's, has the same name."""
    (path.parent / "json.py").write_text("class Rule: ...\n")
    with pytest.raises(UserError, match=r"another 'json' was found first .*json/__init__\.py"):
        load_config(path, ["algorithm.name=json:Rule"])


def test_odd_files(path: Path, tmp_path: Path) -> None:
    """FIRST_HOUR 19: a byte order mark, a directory; also binary files and deep tables."""
    text = path.read_bytes()
    path.write_bytes(b"\xef\xbb\xbf" + text)
    assert load_config(path, [f"steps={2**62}"]).steps == 2**62
    with pytest.raises(UserError, match=r"is a directory\. Give a TOML file"):
        load_config(tmp_path)
    for content in (b"\xff\x00", b"a = " + b"[" * 5000, b"a." * 3000 + b"b = 1", b"a"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"not valid TOML|levels of tables"):
            load_config(path)


def test_first_hour_20_the_module_beside_the_config_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory, which `python -m hacrl` searches first, has a module of this name too."""
    from hacrl.importing import add_folder, import_object, source_file

    for place in ("here", "team", "other"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "own_rewards.py").write_text(f"def score(): return {place!r}\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "here")
    for place in ("team", "other", "team", "here"):
        path = add_folder("own_rewards:score", tmp_path / place)
        assert source_file(path) == tmp_path / place / "own_rewards.py"
        assert import_object(path, "verifier.options.path")() == place
