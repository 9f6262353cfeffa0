"""The settings of trust and privacy."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Level = Literal["nothing", "rewards", "successes", "all"]
"""What an agent publishes of a step, from least to most."""


class TrustConfig(BaseModel):
    """The `[trust]` table. By default, every agent of the run is trusted."""

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
    max_ratio: float | None = Field(None, gt=1)
    """Largest ratio s of a peer's sample at the start of a step; samples above it are left out. Under
    `naive` s is the weight of a failure, and a claimed log-probability that is too low makes it large.
    Unset: no limit. Peers' samples are scored once more in every step."""
    min_own_quantile: float | None = Field(None, ge=0, lt=1)
    """Leave out peers' samples that are less likely for the learner, per token, than this quantile of
    its own samples of the step. Published log-probabilities are not used. 0: the least likely own
    sample. Unset: no limit."""
    quarantine: bool = False
    """Leave out the samples of a peer whose verdicts, log-probabilities, rows or copied texts an honest
    peer would not have, until it was unsuspicious for 20 steps. Needs judge_again. It scores peers'
    samples once more in every step."""

    @model_validator(mode="after")
    def _consistent(self) -> TrustConfig:
        if self.quarantine and not self.judge_again:
            raise ValueError("quarantine = true needs judge_again = true")
        if self.trusted and not self.judge_again:
            raise ValueError("trusted has no meaning without judge_again = true: all are trusted")
        return self

    @property
    def scores_peers(self) -> bool:
        """Whether a learner needs its own log-probabilities of its peers' samples."""
        limits = (self.max_ratio, self.min_own_quantile)
        return self.quarantine or any(limit is not None for limit in limits)

    def trusts(self, source: str) -> bool:
        """Whether the source's claims are believed where they cannot be checked."""
        return not self.judge_again or source in self.trusted
