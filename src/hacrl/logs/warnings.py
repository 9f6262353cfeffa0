"""Warnings about a run's metrics: data that is lost, learners that learn nothing or become worse."""

import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Any

from hacrl.config import Config
from hacrl.replies import failure_text, judged_counts, score_name
from hacrl.safe_text import plural
from hacrl.statistics import Z95
from hacrl.store.rundir import RunDirectory

Row = Mapping[str, Any]

NEARLY_NONE = 0.05
"""Fraction of peers' samples with a gradient below which a learner does not learn from peers."""
BELOW_FLOOR = 0.5
"""If at least this fraction of peers' samples is below the floor, the warning names the floor."""
STEPS = 5  # steps that are averaged
UNJUDGED = (
    0.05,
    0.5,
)  # a warning when the fraction of unjudged replies first exceeds each of these
MANY_DROPPED = 0.5  # fraction of peers' replies that became no sample
MANY_TRUNCATED = 0.25  # fraction of an agent's replies that reached the token limit
COLLAPSE_POINTS, COLLAPSE_ERRORS, COLLAPSE_PROBLEMS = 0.05, 3.0, 10
"""An accuracy is far below the start if it is lower by this much and by this many standard errors,
over at least this many problems."""


def idle(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """A step without an update."""
    row = rows[-1]
    masked = round(row.get("samples/drop/truncated", 0))
    return (
        f"agent {agent!r} made no update in step {row['step'] + 1}: {judged_counts(row)[1]} of "
        f"{row['rollouts']} rollouts could not be judged, {plural(row['not_attempted'], 'prompt')} too "
        f"long, {plural(masked, 'truncated sample')} left out (mask_truncated), "
        f"{plural(row['updates_skipped'], 'update')} skipped because not finite."
    )


def unused_peers(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """Nearly no peer sample had a gradient."""
    used, below = _mean(rows, "peers/used"), _mean(rows, "peers/below_floor")
    if used >= NEARLY_NONE or len(rows) < STEPS:
        return None
    text = (
        f"{agent} learns almost nothing from its peers: only {100 * used:.1f} % of their samples "
        f"had a gradient in {_span(rows)}. "
    )
    if below >= BELOW_FLOOR:
        text += (
            f"{100 * below:.0f} % had a ratio below the floor. Algorithms without a floor use such "
            "samples (algorithm.name=naive or overlap). "
        )
    return text + "`hacrl compare` measures whether peers help (docs/diagnostics.md)."


def dropped_peers(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """More than half of the peers' replies became no sample."""
    kept, dropped = (sum(n) for n in zip(*map(_of_peers, rows), strict=True))
    if dropped <= MANY_DROPPED * (kept + dropped):
        return None
    reasons = Counter[str]()
    for row in rows:
        for key, n in row.items():
            found = re.fullmatch("(samples/drop/[^/]+)/(.+)", key)
            if found and found[2] != agent:  # own samples may be dropped, too
                reasons[found[1]] += n
    (reason, count), *_ = reasons.most_common(1)
    way = "Raise max_response_tokens, or set too_long = 'truncate'" if "too_long" in reason else ""
    return (
        f"agent {agent!r} could not use {dropped:.0f} of its peers' {kept + dropped:.0f} replies in "
        f"{_span(rows)}. Most frequent reason: {reason} ({plural(count, 'time')}). "
        + (way or "docs/metrics.md explains it.")
    )


def false_claims(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """A learner's verdicts on a peer's texts are not those that the peer claims."""
    row, start = rows[-1], "trust/disagree/"
    wrong, key = max((n, key) for key, n in row.items() if key.startswith(start))
    source = key.removeprefix(start)
    if not wrong:
        return None
    return (
        f"agent {agent!r} disagrees with the verdicts of {source!r} on {wrong:.0f} of "
        f"{row[f'trust/judged/{source}']:.0f} replies in step {row['step'] + 1} and uses its own "
        "verdicts. Either the two verifiers differ, or the published verdicts are false."
    )


def long_prompts(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """Problems were left out, or count as not solved, because their prompt is too long."""
    row = rows[-1]
    count, step = row["not_attempted"], row["step"] + 1
    limit = f"longer than max_prompt_tokens = {config.prompt_limit(config.agent(agent))}"
    if row["kind"] == "evaluation":
        prompts = plural(count, "held-out prompt")
        return f"agent {agent!r}: {prompts} {limit}, counted as not solved in its accuracy."
    of = f"{count} of {config.problems_per_step} problems in step {step}"
    if "replayed" in row:
        return f"agent {agent!r} has no stored reply to {of}."
    return (
        f"agent {agent!r} left out {of}: prompts {limit}. Raise max_prompt_tokens to use them; "
        "`hacrl show` counts them."
    )


def truncated(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """Many replies reached the token limit."""
    fraction = sum(row["truncated"] for row in rows) / len(rows)
    if fraction <= MANY_TRUNCATED:
        return None
    return (
        f"agent {agent!r}: {100 * fraction:.0f} % of its replies in {_span(rows)} reached "
        f"max_response_tokens = {config.response_limit(config.agent(agent))} and were truncated, often "
        "before an answer. Raise it if correct replies need more tokens."
    )


def truncated_held_out(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """Replies to held-out problems are truncated earlier than in training."""
    limit, trained = (
        config.evaluation.max_response_tokens,
        config.response_limit(config.agent(agent)),
    )
    if limit is None or limit >= trained:
        return None
    return (
        f"agent {agent!r}: {100 * rows[-1]['truncated']:.0f} % of its replies to held-out problems "
        f"reached evaluation.max_response_tokens = {limit} and were truncated, often before an answer. "
        f"The limit in training is {trained}."
    )


def never_right(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """Replies get rewards, but none the largest one, which alone counts as right."""
    if any(row["verdict/ok"] for row in rows) or not any(row["reward"] for row in rows):
        return None
    best = max(row["reward"] or 0.0 for row in rows)
    return (
        f"agent {agent!r}: no reply in {_span(rows)} got the largest reward of the verifier, so none "
        f"counts as right (largest mean reward of a step: {best:.3g}). If the reward function cannot "
        "reach the upper end of its reward_range, lower that end."
    )


def no_signal(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """All advantages were 0 for some steps: the rewards of each group are equal."""
    if any(r["own/advantage_zero"] != 1 or r.get("peers/forwarded") for r in rows):
        return None
    if config.samples_of(config.agent(agent)) == 1:
        return (
            f"agent {agent!r} had no training signal in {_span(rows)}: with samples_per_prompt = 1 "
            f"{config.algorithm.name} has no other reply to compare a reward with. Raise it."
        )
    reward = sum(row["reward"] for row in rows) / len(rows)
    return (
        f"agent {agent!r} had no training signal in {_span(rows)}: all replies to a problem got the "
        f"same reward (mean reward {reward:.3g}), so all advantages are 0. Check the reward function, "
        "or choose problems that the agent solves sometimes."
    )


def collapse(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """Held-out accuracy is far below the start."""
    start, now = rows[0], rows[-1]
    errors = ((r["accuracy/high"] - r["accuracy/low"]) / 2 / Z95 for r in (start, now))
    lost = start["accuracy"] - now["accuracy"]
    if start["step"] or lost < COLLAPSE_POINTS or lost <= COLLAPSE_ERRORS * hypot(*errors):
        return None
    rate = config.agent(agent).learning_rate
    name, unit = score_name(config.verifier.kind)
    return (
        f"agent {agent!r} has become worse: {name} {100 * now['accuracy']:.1f}{unit} after "
        f"step {now['step']}, but {100 * start['accuracy']:.1f}{unit} before training. A lower "
        f"learning_rate (now {rate:g}) may prevent this. `hacrl export --best` writes the best "
        "weights so far."
    )


@dataclass(frozen=True)
class Rule:
    """A warning about an agent. `text` gets the agent's last `steps` rows of a kind for which `counts`
    is true (0: all of them; a run of fewer steps: those that it has) and returns None for no warning.

    Example: Rule("train", lambda row: row.get("peers/forwarded"), 5, unused_peers)
    """

    kind: str
    counts: Callable[[Row], Any]
    steps: int
    text: Callable[[Config, str, Sequence[Row]], str | None]


RULES = (
    Rule("train", lambda row: row.get("updates") == 0 and not row.get("absent"), 1, idle),
    Rule("train", lambda row: row.get("peers/forwarded"), STEPS, unused_peers),
    Rule("train", lambda row: any(_of_peers(row)), STEPS, dropped_peers),
    Rule("train", lambda row: any(k.startswith("trust/disagree/") for k in row), 1, false_claims),
    Rule("train", lambda row: row.get("not_attempted"), 1, long_prompts),
    Rule("evaluation", lambda row: row.get("not_attempted"), 1, long_prompts),
    Rule("train", lambda row: row.get("truncated") is not None, STEPS, truncated),
    Rule("evaluation", lambda row: row.get("truncated", 0) > MANY_TRUNCATED, 1, truncated_held_out),
    Rule("train", lambda row: "verdict/ok" in row, STEPS, never_right),
    Rule("train", lambda row: row.get("own/samples"), STEPS, no_signal),
    Rule("evaluation", lambda row: row.get("problems", 0) >= COLLAPSE_PROBLEMS, 0, collapse),
)


class AgentWatch:
    """Applies the rules to metrics rows. A rule warns once per agent, also across a resume."""

    def __init__(self, run: RunDirectory) -> None:
        self.config = run.config()
        self._rows: dict[tuple[Rule, str], deque[Row]] = {}
        self._warned: set[tuple[Rule, str]] = set()
        self.look(run.metric_rows())

    def look(self, rows: Sequence[Row]) -> list[str]:
        """Warnings about new rows."""
        found = (self._apply(rule, row) for rule in RULES for row in rows)
        return [text for text in found if text]

    def _apply(self, rule: Rule, row: Row) -> str | None:
        key = (rule, row["agent"])
        if key in self._warned or row["kind"] != rule.kind or not rule.counts(row):
            return None
        last = self._rows.setdefault(key, deque(maxlen=rule.steps or None))
        last.append(row)
        enough = len(last) >= min(rule.steps, self.config.steps)
        text = rule.text(self.config, row["agent"], last) if enough else None
        if text:
            self._warned.add(key)
        return text


class VerifierWatch:
    """Warns that replies of an agent were not judged: any reply in the first step, more than 5 % later,
    and again above 50 %. A resumed run does not repeat a warning."""

    def __init__(self, run: RunDirectory) -> None:
        self._kind = run.config().verifier.kind
        self._level: dict[str, int] = {}
        self.look(run.metric_rows())

    def look(self, rows: Sequence[Row]) -> list[str]:
        found = []
        for row in rows:
            judged, unjudged = judged_counts(row)
            fraction = unjudged / max(1, judged + unjudged)
            limits = (UNJUDGED[0] if row["step"] else 0.0, *UNJUDGED)
            level = sum(fraction > limit for limit in limits)
            if level > self._level.get(row["agent"], 0):
                self._level[row["agent"]] = level
                found.append(
                    f"{row['agent']}, {_place(row)}: {failure_text(row, self._kind)}. These replies "
                    "count neither in the reward nor in the accuracy."
                )
        return found


WATCHES = (VerifierWatch, AgentWatch)


def _span(rows: Sequence[Row]) -> str:
    last = f"step {rows[-1]['step'] + 1}"
    return last if len(rows) == 1 else f"the {len(rows)} steps up to {last}"


def _of_peers(row: Row) -> tuple[float, float]:
    """Kept and dropped samples of peers."""
    kept, dropped = (
        sum(n for key, n in row.items() if key.startswith(start) and key != start + row["agent"])
        for start in ("samples/kept/", "samples/dropped/")
    )
    return kept, dropped


def _place(row: Row) -> str:
    """When a row was measured, e.g. "step 1" or "evaluation before training"."""
    if row["kind"] == "train":
        return f"step {row['step'] + 1}"
    return f"evaluation {'after step ' + str(row['step']) if row['step'] else 'before training'}"


def _mean(rows: Sequence[Row], name: str) -> float:
    """Mean over samples: each step counts by its number of forwarded peer samples."""
    total = sum(row["peers/forwarded"] for row in rows)
    return float(sum(row["peers/forwarded"] * row[name] for row in rows) / total)
