"""Settings of the algorithms, one flat table so that `algorithm.name=gspo` is a one-word baseline.

Each algorithm reads the fields it needs. Sections and equations are those of arXiv 2603.02604 v1.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hacrl.types import Order


class AlgorithmSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str = "hacpo"
    """hacpo, gspo, grpo, naive, sgt, graft, f-tis, overlap, or an import path
    `package.module:Class` of your own algorithm."""

    # The clip of own samples.
    epsilon_low: float = Field(3e-4, gt=0, lt=1)
    """Sequence-ratio clip below 1 for own samples (eq. 47-49; GSPO's)."""
    epsilon_high: float = Field(4e-4, gt=0)
    """Sequence-ratio clip above 1 for own samples."""
    token_epsilon_low: float = Field(0.2, gt=0, lt=1)
    """Token-ratio clip below 1; grpo, sgt and graft only."""
    token_epsilon_high: float = Field(0.28, gt=0)
    """Token-ratio clip above 1; grpo, sgt and graft only."""

    # The four mechanisms of HACPO.
    alpha: float = Field(1.0, ge=0)
    """Exponent of the importance weight of peers, t * stopgrad(t)^alpha (section 4.3, eq. 12)."""
    floor: float = Field(0.8, gt=0, lt=1)
    """Peers' ratios below it are clipped at the first update of a step: 1 - delta (section 4.4). The
    paper's Table 5 prints this floor, 0.8 or 0.9, as delta."""
    last_floor: float = Field(0.875, gt=0)
    """The floor of the last planned update; the floors between rise in equal steps (eq. 14; with
    four updates a step the default is the paper's delta_step of 0.025)."""
    ceiling: float = Field(1.0, ge=1)
    """Peers' ratios above it are clipped (section 4.4: 1). Far above 1, with a floor near 0: no
    clipping, for ablations."""
    capability_window: int = Field(5, ge=1)
    """K: how many steps the capability of an agent is averaged over (eq. 9)."""
    capability_by: Literal["run", "task"] = "run"
    """Measure capability over the whole run, or for each task by itself (open point)."""
    window_includes_step: bool = True
    """Whether the window includes the current step (eq. 9). Off: the ratio does not depend on the
    current rewards, as the unbiasedness theorem assumes; the first step then uses ratio 1."""
    ratio_min: float = Field(0.1, gt=0)
    """Lower guard of the capability ratio (eq. 8 has none)."""
    ratio_max: float = Field(10.0, gt=0)
    """Upper guard of the capability ratio."""
    peer_advantage: Literal["learner", "source"] = "learner"
    """Whose advantage a peer's sample carries: the learner's A_k (both published codes) or the
    source's A_j (eq. 10 as printed)."""
    capability_baseline: bool = True
    """Bring every source's rewards to the learner's level in the baseline (section 4.1, eq. 7). Off:
    the plain pooled mean, for ablations."""
    capability_weight: bool = True
    """Weigh a peer's sample by w(source, learner) (section 4.2, eq. 10). Off: 1, for ablations."""
    baseline_guard: bool = True
    """A baseline above the verifier's largest reward falls back to the learner's own mean: otherwise
    even a right answer would be punished (open point; section 4.1)."""

    # The plan of a step.
    order: Literal["auto", Order] = "auto"
    """Order of a step's updates (open point; the published codes differ). auto: the algorithm's own,
    mixed for overlap and own_first for the others here. Without meaning for sgt and graft, where peers'
    samples join the own updates."""
    normaliser: Literal["mean", "paper"] = "mean"
    """hacpo in mixed order only. mean: one mean over the mixture. paper: own and peer sums each over the
    learner's own count (eq. 53), so with n > 2 agents peers weigh n - 1 times."""

    # The rivals.
    sgt_lambda: float = Field(0.1, ge=0)
    """sgt: weight of the imitation of a peer's success (arXiv 2605.07244)."""
    graft_threshold: float = Field(0.8, ge=0)
    """graft: a peer's sample with a ratio s at or below it has weight 0 (arXiv 2609.37868)."""
    graft_cap: float = Field(1.0, gt=0)
    """graft: largest weight of a peer's sample."""
    tis_cap: float = Field(2.0, gt=0)
    """f-tis: the token weights are truncated here (arXiv 2605.22537)."""
    tis_kl_threshold: float = Field(50.0, ge=0)
    """f-tis: a peer's sample of negative advantage is dropped if its log-probability, summed over its
    tokens, lies further than this below the source's."""

    # Overlap.
    overlap_power: float = Field(1.0, ge=0, le=1)
    """overlap: exponent of the ratio of whole texts; 1 is the exact one, 0 every peer's sample full."""
    overlap_tokens: int = Field(32, ge=1)
    """overlap: a longer reply's ratio is taken as that of so many tokens; of a long text the exact one
    is nearly always 0."""
    overlap_follow: bool = True
    """overlap: where the learner's own replies to a problem all failed, a peer's success counts in full,
    however unlikely it is to the learner. Off: it counts by its ratio too, for ablations."""

    # The KL term.
    beta: float = Field(0.0, ge=0)
    """Weight of the KL term to the start weights, own samples only (the paper's runs: 0.001)."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Free settings of an algorithm given by import path."""
