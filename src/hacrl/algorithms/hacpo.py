"""HACPO (arXiv 2603.02604): learn from every agent's verified rollouts.

Learner k, source j, n agents. Lines of code below carry the number of their equation.

    mu_k(q) = sum_j sum_i w(k,j) * R(y_j,i) / number of judged samples of q                    (7)
    A_k(y)  = (R(y) - mu_k(q)) / (std of all judged raw rewards of q, ddof 1, + 1e-6)          (6)
    s(k,j)  = exp( mean_k log pi_k(y) - mean_j log pi_j,old(y) )                              (11)
    own:    J = min( s A, clip(s, 1 - epsilon_low, 1 + epsilon_high) A )                   (47-49)
    peers:  t = clip(s, floor(m), 1);  J = t * stopgrad(t)^alpha * w(j,k) * A       (10, 12-14, 50-52)
    loss    = - mean over the samples of the minibatch of J   [+ beta * KL, own samples only]

w(a,b) is the capability of agent a divided by that of b, between ratio_min and ratio_max (8;
capability.py). floor(m) is the lower clip bound in update m of a step: it rises in equal steps from
`floor` to `last_floor` (14; training/plan.py).

A peer's sample outside [floor, 1] has exactly zero gradient. With one agent hacpo equals gspo. A prompt
whose rewards are all equal gives no signal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from hacrl.algorithms.base import Algorithm, AlgorithmSettings, Needs, PeerSettings, Step
from hacrl.algorithms.capability import Capability, CapabilitySettings
from hacrl.algorithms.functional import advantage, clipped, loss_output, mean, sequence_ratio
from hacrl.algorithms.gspo import GspoSettings
from hacrl.errors import UserError
from hacrl.types import Group, LossOutput, MicroBatch, Sample, Update


class HacpoSettings(CapabilitySettings, PeerSettings, GspoSettings):
    alpha: float = Field(1.0, ge=0)
    """Exponent of the importance weight of peers, t * stopgrad(t)^alpha (eq. 12)."""
    floor: float = Field(0.8, gt=0, lt=1)
    """Lower clip bound of peers' ratios at the first update of a step: 1 - delta (eq. 13). The paper's
    Table 5 prints this floor, 0.8 or 0.9, as delta."""
    last_floor: float = Field(0.875, gt=0)
    """Lower clip bound of peers' ratios at the last planned update. The bound rises in equal steps
    (eq. 14; the paper: 0.025)."""
    floor_for: Literal["all", "failures"] = "all"
    """Whose ratios the floor clips. failures: only those of samples with a negative advantage. A success
    that the learner finds unlikely then counts by its ratio, J = s * stopgrad(s)^alpha * w * A."""
    ceiling: float = Field(1.0, ge=1)
    """Upper clip bound of peers' ratios (eq. 13: 1). Far above 1, with a floor near 0: no clipping."""
    peer_advantage: Literal["learner", "source"] = "learner"
    """Advantage of a peer's sample: the learner's A_k (published codes) or the source's A_j (eq. 10)."""
    capability_baseline: bool = True
    """Scale each source's rewards to the learner's level in the baseline (eq. 7). Off: pooled mean."""
    capability_weight: bool = True
    """Weight a peer's sample by w(source, learner) (eq. 10). Off: 1."""
    baseline_guard: bool = True
    """A baseline above the largest reward falls back to the learner's own mean; otherwise even a right
    answer would have a negative advantage (eq. 7 has no guard)."""
    normaliser: Literal["mean", "paper"] = "mean"
    """Mixed order only. mean: one mean over all samples. paper: own and peer sums each over the
    learner's own count (eq. 53), so with n > 2 agents peers count n - 1 times."""

    @model_validator(mode="after")
    def _rising(self) -> HacpoSettings:
        if not self.floor <= self.last_floor < 1:
            raise ValueError(
                f"the peers' floor must rise and stay below 1, but floor = {self.floor} and "
                f"last_floor = {self.last_floor}. Set floor <= last_floor < 1, e.g. 0.8 and 0.875."
            )
        return self


class Hacpo(Algorithm):
    Settings = HacpoSettings
    settings: HacpoSettings
    needs = Needs("logprob")

    def __init__(self, settings: AlgorithmSettings, reward_range: tuple[float, float]) -> None:
        super().__init__(settings, reward_range)
        if reward_range[0] < 0:
            raise UserError(
                "hacpo needs rewards of at least 0, because capability is a ratio, but the verifier "
                f"declares reward_range = [{reward_range[0]:g}, {reward_range[1]:g}]. Shift the "
                "rewards, e.g. return (r + 1) / 2 for rewards of -1 and 1 and remove "
                "verifier.options.reward_range, or use algorithm.name=naive."
            )
        self.largest_reward = reward_range[1]

    def baseline(self, group: Group, capability: Capability, learner: str) -> float:
        """mu_k(q): the mean reward after scaling every source to the learner's level."""
        rewards = group.rewards()
        if min(rewards) == max(rewards):
            return rewards[0]
        if not self.settings.capability_baseline:
            return mean(rewards)
        w = {t.agent: capability.ratio(learner, t.agent, group.task) for t in group.judged}
        mu = mean([w[t.agent] * t.reward for t in group.judged])  # (7): w(k,j)
        if self.settings.baseline_guard and mu > self.largest_reward:
            return mean(group.rewards(learner) or rewards)
        return mu

    def credit(self, step: Step) -> list[Sample]:
        baselines: dict[tuple[str, str], float] = {}
        credited = []
        for sample in step.samples:
            group = step.group(sample)
            agent = sample.source if self.settings.peer_advantage == "source" else step.learner
            if (key := (sample.problem_id, agent)) not in baselines:
                baselines[key] = self.baseline(group, step.capability, agent)
            a = advantage(step.reward(sample), baselines[key], group.rewards())  # (6)
            w = step.capability.ratio(sample.source, step.learner, group.task)  # (8), (10): w(j,k)
            w = w if self.settings.capability_weight else 1.0
            credited.append(replace(sample, advantage=a, weight=w))
        return credited

    def loss(self, batch: MicroBatch, update: Update) -> LossOutput:
        low, high = self.settings.epsilon_low, self.settings.epsilon_high
        s_B = sequence_ratio(batch)  # (11)
        own_B, used_B = clipped(s_B, batch.advantage_B, low, high)  # (47-49)
        floor_B = s_B.new_full(s_B.shape, update.floor)  # (14)
        if self.settings.floor_for == "failures":
            floor_B = floor_B.where(batch.advantage_B < 0, 0.0)
        ceiling_B = s_B.new_full(s_B.shape, self.settings.ceiling)
        t_B = s_B.clamp(floor_B, ceiling_B)  # (13)
        exponential_B = t_B * t_B.detach() ** self.settings.alpha  # (12)
        peer_B = exponential_B * batch.weight_B * batch.advantage_B  # (10, 50-52)
        objective_B = own_B.where(batch.is_own_B, peer_B)
        paper = self.settings.normaliser == "paper" and update.part == "mixed" and batch.num_own
        divisor = batch.num_own if paper else batch.num_samples  # (53)
        inside_B = (s_B >= floor_B) & (s_B <= ceiling_B)
        peer_weight_B = exponential_B * batch.weight_B * inside_B
        weight_B = s_B.where(used_B, 0.0).where(batch.is_own_B, peer_weight_B)
        loss = -objective_B.sum() / divisor
        return loss_output(loss, batch, self.settings.beta, ratio_B=s_B, weight_B=weight_B)
