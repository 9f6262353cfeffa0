"""Settings of trust and privacy: what an agent publishes, and what a learner believes of its peers.

docs/security.md explains them. The code that applies them is in hacrl/training: publish.py, view.py,
defence.py, caps.py and quarantine.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hacrl.types import Finish, Status, Trajectory

Level = Literal["nothing", "rewards", "successes", "all"]
"""What an agent publishes of a step, from least to most."""


def receives_texts(learner: Level, source: Level) -> bool:
    """Whether reciprocity lets a learner that publishes at its level read the texts of the source: it
    must publish at least as much."""
    levels = get_args(Level)
    return levels.index(learner) >= levels.index(source)


def has_text(row: Trajectory, level: Level) -> bool:
    """Whether an agent of this level publishes the text of a row. A row without an attempt has none."""
    right = row.verdict is not None and row.verdict.status is Status.OK
    return bool(row.turns) and (level == "all" or (level == "successes" and right))


def withheld(row: Trajectory) -> Trajectory:
    """The outcome of a row: problem, index and verdict. A row without an attempt stays as it is."""
    if row.finish is Finish.NOT_ATTEMPTED:
        return row
    return replace(
        without_details(row),
        turns=(),
        finish=Finish.WITHHELD,
        mean_logprob=None,
        num_tokens=0,
        shareable=False,
        tokens=None,
    )


def without_details(row: Trajectory) -> Trajectory:
    """The row without the verdict's details and the tokenizer's hash, which can identify answers and
    models."""
    verdict = replace(row.verdict, detail="") if row.verdict else None
    return replace(row, verdict=verdict, tokenizer="")


class TrustConfig(BaseModel):
    """The `[trust]` table. The defaults believe every agent of the run."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    judge_again: bool = False
    """Each learner judges every text of its peers with its own verifier and uses these verdicts. The
    author's verdict is only compared. Details of verdicts and hashes of tokenizers are not published."""
    trusted: list[str] = Field(default_factory=list)
    """With judge_again: agents whose rewards count in baseline and capability although the text is
    withheld, and whose successes `overlap` follows. Without judge_again all agents are trusted."""
    reciprocity: bool = False
    """A learner receives the texts of agents that publish as much as itself, or less. The rewards of
    all agents are received."""
    max_source_fraction: float = Field(1.0, gt=0, le=1)
    """Largest fraction of a learner's samples of a step that one peer may have; further ones are left
    out. 1: no limit."""
    max_source_weight: float = Field(1.0, gt=0, le=1)
    """Largest fraction that one peer may have of the sum of |advantage x weight| over a learner's
    samples of a step; its advantages are scaled down to it. 1: no limit."""
    quarantine: bool = False
    """Leave out the samples of a peer whose verdicts, log-probabilities, rows or copied texts an honest
    peer would not have. Needs judge_again. It scores peers' samples once more in every step."""
    false_alarm_steps: int = Field(10_000, ge=10)
    """An honest peer is put into quarantine at most once in this many steps on average."""
    quarantine_steps: int = Field(20, ge=1)
    """A peer leaves quarantine after this many unsuspicious steps in a row."""

    @model_validator(mode="after")
    def _consistent(self) -> TrustConfig:
        if self.quarantine and not self.judge_again:
            raise ValueError("quarantine = true needs judge_again = true")
        if self.trusted and not self.judge_again:
            raise ValueError("trusted has no meaning without judge_again = true: all are trusted")
        return self

    def trusts(self, source: str) -> bool:
        """Whether the source's claims are believed where they cannot be checked."""
        return not self.judge_again or source in self.trusted
