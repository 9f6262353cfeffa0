"""The probe, with a second model in place of the engine."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hacrl.errors import RunStopped
from hacrl.sampling.probe import Agreement, Probe

WRITTEN = [(1, 2, 3, 4, 5), (200, 100, 50, 25)]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def shift(model: Any, by: float) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator).sign())


def engine_of(model: Any) -> Any:
    """Scores of an engine with these weights and a rounding error."""
    scores = Probe(model, "engine", None).score
    return lambda rows: [[x + 1e-6 for x in row] for row in scores(rows)]


def test_scores_are_log_probabilities_of_the_next_token(llama: Path) -> None:
    """The mean of the negative scores of a row is transformers' loss."""
    model = load(llama)
    (scores,) = Probe(model, "it", None).score([(1, 2, 3, 4)])
    ids = torch.tensor([[1, 2, 3, 4]])
    assert len(scores) == 3
    assert -sum(scores) / 3 == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), abs=1e-6)


def test_an_engine_that_follows_passes(llama: Path) -> None:
    """Off by 1e-6 everywhere: that is gap and largest; moved is the change of the trainer."""
    model = load(llama)
    probe = Probe(model, "it", None)
    first = probe.compare(engine_of(model))
    assert first.moved is None
    assert (first.gap, first.largest) == pytest.approx((1e-6, 1e-6), rel=1e-3)
    assert probe.compare(engine_of(model)).moved == 0.0
    probe.remember(WRITTEN)
    for by in (1e-6, 1e-4, 1e-2):
        shift(model, by)
        found = probe.compare(engine_of(model))
        assert found.gap == pytest.approx(1e-6, rel=1e-3)
        assert found.moved > 5 * found.gap


def test_no_sequence_is_longer_than_the_engine_can_score(llama: Path) -> None:
    model = load(llama)
    probe, seen = Probe(model, "it", None, 9), []

    def engine(rows: Any) -> Any:
        seen.extend(map(len, rows))
        return engine_of(model)(rows)

    probe.compare(engine)
    probe.remember([tuple(range(10)), (1, 2, 3)])
    probe.compare(engine)
    assert seen == [9, 9, 9, 9, 9, 3]


@pytest.mark.parametrize("by", [3e-6, 1e-3])
def test_weights_that_are_one_step_old_stop_the_run(llama: Path, by: float) -> None:
    """A change of 3e-6 moves log-probabilities by less than the allowed 1e-4."""
    model = load(llama)
    probe = Probe(model, "it", None)
    stale = engine_of(copy.deepcopy(model))
    probe.compare(stale)
    probe.remember(WRITTEN)
    shift(model, by)
    with pytest.raises(RunStopped, match="stale"):
        probe.compare(stale)


def test_a_configured_tolerance_is_the_only_limit(llama: Path) -> None:
    model = load(llama)
    probe = Probe(model, "it", 1e-3)
    stale = engine_of(copy.deepcopy(model))
    probe.compare(stale)
    shift(model, 3e-6)
    assert isinstance(probe.compare(stale), Agreement)
    shift(model, 1e-2)
    with pytest.raises(RunStopped, match=r"allowed: 0\.001.*set sampler\.tolerance above"):
        probe.compare(stale)


def test_nan_weights_have_their_own_message(llama: Path) -> None:
    model = load(llama)
    probe = Probe(model, "it", None)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(RunStopped, match="diverged"):
        probe.compare(engine_of(model))
