"""How a config chooses a sampler. vLLM itself is tested in tests/engines."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from team import member, team

import hacrl
from hacrl.config import AgentConfig, SamplerConfig, parse_config
from hacrl.errors import UserError
from hacrl.policy.load import load_model
from hacrl.policy.lora import merge_into, merged_weights
from hacrl.policy.policy import Policy

OWN = """
from hacrl.sampling.engine import BuiltinSampler

class Counting(BuiltinSampler):
    changes = 0

    def __init__(self, policy, settings):
        super().__init__(policy.model, policy.renderer.end_ids, policy.renderer.pad_id, 512)
        assert settings.options == {"colour": "red"} and settings.max_tokens == 64 + 24

    def weights_changed(self):
        Counting.changes += 1

    def facts(self):
        return {"changes": Counting.changes}
"""


def make_policy(folder: Path, sampler: dict[str, Any] | None = None, **agent: Any) -> Policy:
    return Policy(
        AgentConfig(name="it", model=str(folder), **agent),
        device="cpu",
        temperature=1.0,
        beta=0.0,
        sampler=SamplerConfig.model_validate(sampler) if sampler else None,
    )


def test_a_sampler_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named by import path for one agent: it is notified of all 4 updates of a step, and its facts are
    in the metrics. wren keeps the built-in sampler."""
    (tmp_path / "own_sampler.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    config = team(
        member("wren"),
        member("finch", sampler="own_sampler:Counting"),
        sampler={"options": {"colour": "red"}},
        evaluation={"problems": 0},
    )
    run = hacrl.train(config, tmp_path / "run")
    assert [r["changes"] for r in run.metric_rows() if r["agent"] == "finch"] == [0, 4, 8]
    assert not any("changes" in r for r in run.metric_rows() if r["agent"] == "wren")


def test_unknown_and_missing_samplers(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"sampler\.kind = 'vlm' is unknown: choose one of builtin"):
        make_policy(llama, {"kind": "vlm"})
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else found(name, *a)
    )
    with pytest.raises(UserError, match=r"needs vLLM.*hacrl\[vllm\].*'builtin'"):
        make_policy(llama, {"kind": "vllm"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": {"options": {"eager": True}}}, r"sampler\.options: the built-in"),
        ({"sampler": {"kind": "vllm"}, "ranks": 2}, r"'wren' has ranks = 2 and the sampler 'vllm'"),
        ({"own": "vllm", "ranks": 2}, r"another agent uses vllm; set runtime\.kind = 'ray'"),
    ],
)
def test_conflicting_settings(settings: dict[str, Any], message: str) -> None:
    wren, finch = member("wren", ranks=settings.pop("ranks", 1)), member("finch")
    finch["sampler"] = settings.pop("own", None)
    with pytest.raises(UserError, match=message):
        parse_config(team(wren, finch, **settings))


def test_merged_weights_are_those_of_an_export(llama: Path) -> None:
    """Names and values of the start weights with the adapters added, the tied head once."""
    policy = make_policy(llama, lora={"rank": 4})
    with torch.no_grad():
        for i, master in enumerate(policy.master.values()):
            master.add_(0.01 * (i + 1))
    merged = dict(merged_weights(policy.model))
    fresh = load_model(policy.source, policy.agent)
    start = {name: p.detach().clone() for name, p in fresh.named_parameters()}
    expected = dict(merge_into(fresh, policy.model).named_parameters())
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor.detach(), atol=1e-6, rtol=0)
    assert sum(not torch.equal(merged[n], start[n]) for n in start) == 14  # 7 linears in 2 layers
    bare = dict(merged_weights(policy.model, merge=False))
    assert all(torch.equal(bare[n], start[n]) for n in start)
