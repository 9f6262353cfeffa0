"""`hacrl export`: the adapter alone, and a model card that says what the agent learned from whom."""

import re
from pathlib import Path

import pytest
import torch
from cli_helpers import accepted, refused
from team import member, rows, team

import hacrl
from hacrl.store.checkpoint import Checkpoints
from hacrl.store.rundir import RunDirectory
from hacrl.study.evaluation import candidates_of_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    wren = member("wren", lora={"rank": 4}, learning_rate=2e-3, system='Be "brief".')
    return hacrl.train(team(wren, member("finch"), steps=2), tmp_path_factory.mktemp("x") / "run")


def exported(run: RunDirectory, agent: str, folder: Path, *options: str) -> str:
    accepted("export", run.path, agent, folder, *options)
    return (folder / "README.md").read_text()


def test_an_adapter_loads_with_peft(run: RunDirectory, tmp_path: Path) -> None:
    """The base model with the adapter has the logits of the agent and those of the merged export."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    card = exported(run, "wren", tmp_path / "adapter", "--adapter")
    assert "library_name: peft" in card and "as a LoRA adapter" in card
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    AutoTokenizer.from_pretrained(tmp_path / "adapter")
    (candidate,) = candidates_of_run(run, run.config(), agent="wren")
    policy = candidate.load()
    base = AutoModelForCausalLM.from_pretrained(policy.source, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7]])
    before = base(ids).logits
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    exported(run, "wren", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        found = loaded(ids).logits
        torch.testing.assert_close(found, policy.model(ids).logits)
        torch.testing.assert_close(found, merged(ids).logits, atol=1e-4, rtol=1e-4)
    assert (found - before).abs().max() > 1e-3  # it has learned

    message = refused("export", run.path, "finch", tmp_path / "f", "--adapter")
    assert "agent 'finch' trained all its weights" in message


def test_the_card_says_what_was_learned_from_whom(run: RunDirectory, tmp_path: Path) -> None:
    """Own samples: 2 steps, 6 problems, 4 replies. Peers' samples are counted in samples/."""
    card = exported(run, "wren", tmp_path / "wren")
    peers = sum(s["source"] == "finch" for i in range(2) for s in run.sample_rows(i, "wren"))
    assert 0 < peers <= 48
    for line in (
        "library_name: transformers",
        "pocket:wren after 2 steps of `hacpo` in a team of 2",
        "| wren (itself) | pocket:wren | 48 |",
        f"| finch | pocket:finch | {peers} |",
        f"48 samples of its own and {peers} of its peers, in 8 updates.",
        "Problems are from `arithmetic`. Replies were judged by the verifier `number`.",
        'the system message `"Be \\"brief\\"."`',
        f"`{run.digest()}`",
    ):
        assert line in card, card
    first, last = (rows(run, "wren", "evaluation")[i] for i in (0, -1))
    for row in (first, last):
        figures = [100 * row[key] for key in ("accuracy", "accuracy/low", "accuracy/high")]
        result = "{:.1f} [{:.1f}, {:.1f}]".format(*figures)
        assert f"| {row['step']} | {result} | 12 | 12 | 0 |" in card
    assert str(run.path) not in card and not re.search(r"\n\n\n", card)
    early = exported(run, "finch", tmp_path / "finch", "--step", "1")
    assert re.search(r"on 24 samples of its own and \d+ of its peers, in 4 updates", early)
    assert "| 2 |" not in early  # later evaluations are not this checkpoint's


def test_the_card_of_the_model_before_training(run: RunDirectory, tmp_path: Path) -> None:
    assert Checkpoints(run.checkpoints("wren"), 2).steps() == [1, 2]
    card = exported(run, "wren", tmp_path / "start", "--step", "0")
    assert "pocket:wren before training" in card and "0 samples of its own" in card
