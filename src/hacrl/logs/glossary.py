"""What every metric in metrics.jsonl means. `scripts/make_reference.py` writes docs/metrics.md from it.

A word in capitals stands for a name: SOURCE and AGENT for an agent, TASK for a task, B for a baseline,
REASON for an entry of the same table.
"""

import re

METRICS: dict[str, dict[str, str]] = {
    "Every row": {
        "kind": "`train` for a training step, `evaluation` for an evaluation.",
        "step": "Training: the step, from 0. Evaluation: the number of steps done before it.",
        "agent": "The agent that the row is about.",
    },
    "Own replies of a training step": {
        "reward": "Mean reward of the agent's judged replies.",
        "reward/NAME": 'Mean of one reward of verifier.kind = "sum", before its weight.',
        "rollouts": "Replies that the agent sampled.",
        "not_attempted": "Problems whose prompt is longer than max_prompt_tokens.",
        "absent": "True in a step without this agent (`away`, or past the deadline).",
        "verdict/ok": "Replies with the largest reward.",
        "verdict/wrong": "Replies that were judged and have a smaller reward.",
        "verdict/unparsed": "Replies without a recognisable answer; they count with reward 0.",
        "verdict/timeout": "Replies that the verifier did not judge in time; left out.",
        "verdict/error": "Replies on which the verifier failed; left out.",
        "verdict/first_failure": "Status and message of the first reply that was not judged.",
        "reply_tokens": "Mean length of a reply in tokens.",
        "truncated": "Fraction of replies that ended at the token limit.",
        "not_shareable": "Replies whose text does not reproduce their tokens; peers cannot use them.",
        "behaviour_logprob": "Mean log-probability per token at sampling time; -entropy, roughly.",
        "withheld": "Replies whose text `publish` kept back.",
        "problems/tried": "Dynamic sampling: problems that were sampled.",
        "problems/mixed": "Dynamic sampling: those whose rewards were not all equal.",
    },
    "Sampler and trainer": {
        "agreement/max_gap": "Largest difference of a reply's mean log-probability between both.",
        "agreement/mean_gap": "Mean difference. Above `sampler.tolerance` the run stops.",
        "sync/gap": "vLLM: mean difference on replies of the step before, after new weights came.",
        "sync/max_gap": "vLLM: the largest of these differences.",
        "sync/moved": "vLLM: by how much the last update moved these log-probabilities.",
    },
    "Updates": {
        "loss": "Mean loss of the updates.",
        "grad_norm": "Mean gradient norm of the updates, before clipping.",
        "own/grad_norm": "The same for updates with own samples.",
        "peers/grad_norm": "The same for updates with peers' samples.",
        "mixed/grad_norm": "The same for updates with both.",
        "late/grad_norm": "The same for updates with samples of late batches.",
        "late/batches": "Late batches that were used (`staleness` of a team across owners).",
        "late/samples": "Samples of these batches.",
        "late/age": "Steps since the oldest of these batches.",
        "kl": "KL term to the start weights (`algorithm.beta`).",
        "learning_rate": "Learning rate of the last update.",
        "updates": "Optimizer updates that were made.",
        "updates_planned": "Optimizer updates of a full step.",
        "updates_skipped": "Updates left out because loss or gradient was not finite.",
        "pruned/forward": "Samples with advantage 0, which need no forward pass.",
    },
    "Own samples": {
        "own/samples": "Samples of the agent's own replies.",
        "own/advantage_zero": "Fraction with advantage 0. Near 1: the rewards give no signal.",
        "own/clipped": "Fraction whose gradient the clip removed.",
        "own/clipped_first": "The same in the first update: 0 but for rounding.",
        "own/ratio": "Mean ratio: own probability of a reply now, relative to sampling time, per token.",
    },
    "Peers' samples": {
        "peers/samples": "Samples of peers' replies.",
        "peers/forwarded": "Those that went through the model (advantage not 0).",
        "peers/below_floor": "Fraction of these whose ratio is below the floor.",
        "peers/above_one": "Fraction of these whose ratio is above 1.",
        "peers/used": "Fraction of these that have a gradient.",
        "peers/used/SOURCE": "The same for one source.",
        "peers/effective_samples": "Number of equally weighted samples with the same variance.",
        "peers/effective/SOURCE": "The same for one source, relative to its samples.",
        "ratio/SOURCE": "Mean ratio: own probability of the source's replies, relative to its own.",
        "ratio/SOURCE/short": "The same for replies up to the median length.",
        "ratio/SOURCE/long": "The same for longer replies.",
        "weight/SOURCE": "Mean weight of the source's samples.",
        "capability/AGENT": "Mean reward of the agent over the last steps.",
    },
    "From replies to samples": {
        "samples/kept": "Replies that became samples.",
        "samples/kept/SOURCE": "The same for one source.",
        "samples/dropped/SOURCE": "Replies of the source that became no sample.",
        "samples/truncated": "Peers' replies that were shortened to the learner's limit.",
        "samples/end_token": "The end token that finished peers' replies get.",
        "samples/token_ratio/SOURCE": "Tokens of the learner per token of the source.",
        "samples/same_tokenizer/SOURCE": "Kept samples of a source with the same tokenizer.",
        "samples/other_split/SOURCE": "Those of them that were split into other tokens.",
        "samples/filtered/failure": "Peers' wrong replies that `algorithm.peers` left out.",
        "samples/filtered/success": "Peers' right replies that `algorithm.peers` left out.",
        "samples/filtered/not_failed": "Left out because the learner has a right reply itself.",
        "samples/drop/not_attempted": "Dropped: the prompt was too long for the source.",
        "samples/drop/withheld": "Dropped: the source did not publish the text.",
        "samples/drop/not_judged": "Dropped: the verifier timed out or failed.",
        "samples/drop/truncated": "Dropped: ended at the token limit, and `mask_truncated` is set.",
        "samples/drop/not_shareable": "Dropped: the text does not reproduce the source's tokens.",
        "samples/drop/no_logprob": "Dropped: the source published no log-probability.",
        "samples/drop/begun_reply": "Dropped: it does not begin with the learner's `reply_start`.",
        "samples/drop/other_vocabulary": "Dropped: tokens are needed, but the vocabularies differ.",
        "samples/drop/not_renderable": "Dropped: the learner's tokenizer cannot reproduce the text.",
        "samples/drop/too_long": "Dropped: over the learner's token limits.",
        "samples/drop/empty": "Dropped: no token to learn from.",
        "samples/drop/quarantined": "Dropped: the source is in quarantine.",
        "samples/drop/ratio": "Dropped: over `trust.max_ratio`.",
        "samples/drop/unlikely": "Dropped: below `trust.min_own_quantile`.",
        "samples/drop/capped": "Dropped: over `trust.max_source_fraction`.",
        "samples/drop/invalid": "Dropped: a value that an honest source cannot publish.",
        "samples/drop/REASON/SOURCE": "Replies of the source dropped for this reason, if any.",
    },
    "Trust": {
        "trust/judged/SOURCE": "Texts of the source that the learner judged again.",
        "trust/unjudged/SOURCE": "Texts of the source that it could not judge.",
        "trust/disagree/SOURCE": "Those on which the verdicts differ.",
        "trust/missing/SOURCE": "Rows that the source had to publish and did not.",
        "trust/log_ratio/p10/SOURCE": "10th percentile of log s of its samples before the updates.",
        "trust/log_ratio/p50/SOURCE": "The median of the same.",
        "trust/log_ratio/p90/SOURCE": "The 90th percentile of the same.",
        "trust/factor/SOURCE": "Factor of its advantages under `trust.max_source_weight`.",
        "trust/quarantined/SOURCE": "1 while the source is in quarantine.",
        "trust/score/STATISTIC/SOURCE": "Evidence against the source; above a threshold: quarantine.",
    },
    "Evaluations": {
        "accuracy": (
            "Mean reward on held-out problems; the fraction of right replies if rewards are 0 and 1."
        ),
        "accuracy/low": "Lower end of its 95 % interval, over problems.",
        "accuracy/high": "Upper end of its 95 % interval.",
        "accuracy/TASK": "The same mean for one task.",
        "problems": "Held-out problems with a judged reply.",
    },
    "Diagnostics (docs/diagnostics.md)": {
        "diagnostics/cost/rollouts": "Replies that the check sampled.",
        "diagnostics/fresh/problems": "Problems of the step with fresh replies.",
        "diagnostics/fresh/reward": "Mean reward of the fresh replies.",
        "diagnostics/unseen/problems": "Problems on which the gain is measured.",
        "diagnostics/unseen/held_out": "1 if these are held-out problems.",
        "diagnostics/bias/B": "Bias of the baseline `own`, `pooled` or `capability`.",
        "diagnostics/bias_se/B": "Standard error of the bias.",
        "diagnostics/square_error/B": "Mean squared error of the baseline.",
        "diagnostics/variance/B": "Variance of the baseline.",
        "diagnostics/spread_squared/B": "Squared bias on a single problem.",
        "diagnostics/cosine/SOURCE": "Cosine of the source's gradient with the learner's own.",
        "diagnostics/gradient_norm/SOURCE": "Norm of the source's part of the gradient.",
        "diagnostics/update_norm/SOURCE": "Length of the move that the source's samples cause.",
        "diagnostics/gain/SOURCE": "First-order gain of reward that this move brings.",
        "diagnostics/gain_se/SOURCE": "Standard error of the gain.",
    },
}
"""Section -> name -> meaning."""


def meaning(name: str) -> str | None:
    """The meaning of a metric as a run writes it, e.g. ratio/finch; None if it is unknown."""
    for section in METRICS.values():
        if name in section:
            return section[name]
    for section in METRICS.values():
        for pattern, text in section.items():
            names = re.sub(r"[A-Z]+", "[^/]+", pattern.replace("TASK", ".+"))
            if re.fullmatch(names, name):
                return text
    return None
