"""Warnings about a run's metrics: data that is lost, learners that learn nothing or become worse."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import hypot
from typing import Any

from hacrl.config import Config
from hacrl.replies import failure_text, judged_counts, score_name
from hacrl.safe_text import plural
from hacrl.statistics import Z95
from hacrl.store.rundir import RunDirectory

Row = Mapping[str, Any]
Counts = Callable[[Row], Any]
Text = Callable[[Config, str, Sequence[Row]], str | None]

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
DROPPED = {
    "not_attempted": "the prompt was too long for the peer (its max_prompt_tokens)",
    "withheld": "the peer published no text (`publish`), or trust.reciprocity hides the text",
    "not_judged": "the verifier failed or ran out of time",
    "truncated": "the reply was truncated, and mask_truncated is set",
    "not_shareable": "the peer's text does not reproduce its tokens",
    "no_logprob": "the peer published no log-probability",
    "begun_reply": "the reply does not start with this agent's reply_start",
    "other_vocabulary": "the algorithm exchanges tokens, but the vocabularies differ",
    "not_renderable": "this agent's tokenizer cannot represent the text",
    "too_long": "in this agent's tokens the reply is longer than max_response_tokens; raise it, or "
    'set too_long = "truncate"',
    "empty": "the reply has no token",
    "quarantined": "the peer is in quarantine; a note names the reason",
    "ratio": "the ratio to the published log-probability is above trust.max_ratio",
    "unlikely": "the reply is less likely for this agent than trust.min_own_quantile allows",
    "capped": "the peer has more samples than trust.max_source_fraction allows",
    "invalid": "the peer published impossible values",
}
"""Reason in training/samples.py -> why a peer's reply became no sample, in words."""


class AgentWatch:
    """Looks at the rows of each agent and warns once per agent, also across a resume."""

    def __init__(
        self, kind: str, counts: Counts, steps: int, text: Text, run: RunDirectory
    ) -> None:
        self.config, self.kind, self.counts, self.steps = run.config(), kind, counts, steps
        self.text = text
        self._rows: dict[str, deque[Row]] = defaultdict(lambda: deque(maxlen=steps or None))
        self._warned: set[str] = set()
        self.look(run.metric_rows())

    def look(self, rows: Sequence[Row]) -> list[str]:
        found = []
        for row in rows:
            agent, last = row["agent"], self._rows[row["agent"]]
            if agent in self._warned or row["kind"] != self.kind or not self.counts(row):
                continue
            last.append(row)
            if len(last) >= self.steps and (sentence := self.text(self.config, agent, last)):
                self._warned.add(agent)
                found.append(sentence)
        return found


def warn(kind: str, counts: Counts, steps: int = 1) -> Callable[[Text], partial[AgentWatch]]:
    """Turn a function that writes a warning into a watch. The function gets the agent's last `steps`
    rows of this kind for which `counts(row)` is true (0: all of them); it returns None for no warning.

    Example: unused_peers(run).look(rows) == [] or one sentence per agent
    """
    return lambda text: partial(AgentWatch, kind, counts, steps, text)


@warn("train", lambda row: row.get("updates") == 0 and not row.get("absent"))
def idle(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """A step without an update."""
    row = rows[-1]
    unjudged = row["verdict/timeout"] + row["verdict/error"]
    masked = round(row.get("samples/drop/truncated", 0))
    return (
        f"agent {agent!r} made no update in step {row['step'] + 1}: {unjudged} of {row['rollouts']} "
        f"rollouts could not be judged, {plural(row['not_attempted'], 'prompt')} too long, "
        f"{plural(masked, 'truncated sample')} left out (mask_truncated), "
        f"{plural(row['updates_skipped'], 'update')} skipped because not finite."
    )


@warn("train", lambda row: row.get("peers/forwarded"), STEPS)
def unused_peers(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """Nearly no peer sample had a gradient."""
    used, below = _mean(rows, "peers/used"), _mean(rows, "peers/below_floor")
    if used >= NEARLY_NONE:
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


@warn("train", lambda row: any(_of_peers(row)), STEPS)
def dropped_peers(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """More than half of the peers' replies became no sample."""
    kept, dropped = (sum(n) for n in zip(*map(_of_peers, rows), strict=True))
    if dropped <= MANY_DROPPED * (kept + dropped):
        return None
    reasons = Counter[str]()
    for row in rows:
        reasons.update({why: row.get(f"samples/drop/{why}", 0) for why in DROPPED})
    (reason, count), *_ = reasons.most_common(1)
    return (
        f"agent {agent!r} could not use {dropped:.0f} of its peers' {kept + dropped:.0f} replies in "
        f"{_span(rows)}. Most frequent reason ({reason}, {plural(count, 'time')}): {DROPPED[reason]}."
    )


@warn("train", lambda row: any(_false_claims(row)))
def false_claims(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """A learner's verdicts on a peer's texts are not those that the peer claims."""
    source, wrong, judged = max(_false_claims(rows[-1]), key=lambda found: found[1])
    return (
        f"agent {agent!r} disagrees with the verdicts of {source!r} on {wrong:.0f} of {judged:.0f} "
        f"replies in step {rows[-1]['step'] + 1} and uses its own verdicts. Either the two verifiers "
        "differ, or the published verdicts are false."
    )


@warn("train", lambda row: row.get("not_attempted"))
def long_prompts(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """Problems were left out because their prompt is too long."""
    row, limit = rows[-1], config.prompt_limit(config.agent(agent))
    of = f"{row['not_attempted']} of {config.problems_per_step} problems in step "
    if "replayed" in row:
        return f"agent {agent!r} has no stored reply to {of}{row['step'] + 1}."
    return (
        f"agent {agent!r} left out {of}{row['step'] + 1}: prompts longer than "
        f"max_prompt_tokens = {limit}. Raise max_prompt_tokens to use them; `hacrl show` counts them."
    )


@warn("evaluation", lambda row: row.get("not_attempted"))
def long_held_out(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """Held-out problems count as not solved because their prompt is too long."""
    return (
        f"agent {agent!r}: {plural(rows[-1]['not_attempted'], 'held-out prompt')} longer than "
        f"max_prompt_tokens = {config.prompt_limit(config.agent(agent))}, counted as not solved in its "
        "accuracy."
    )


@warn("train", lambda row: row.get("truncated") is not None, STEPS)
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


@warn("evaluation", lambda row: row.get("truncated", 0) > MANY_TRUNCATED)
def truncated_held_out(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """Replies to held-out problems are truncated earlier than in training."""
    limit = config.evaluation.max_response_tokens
    if limit is None or limit >= config.response_limit(config.agent(agent)):
        return None
    return (
        f"agent {agent!r}: {100 * rows[-1]['truncated']:.0f} % of its replies to held-out problems "
        f"reached evaluation.max_response_tokens = {limit} and were truncated, often before an answer. "
        f"The limit in training is {config.response_limit(config.agent(agent))}."
    )


@warn("train", lambda row: row.get("reward") is not None, STEPS)
def never_right(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """Replies get rewards, but none the largest one, which alone counts as right."""
    if any(row["verdict/ok"] for row in rows) or not any(row["reward"] for row in rows):
        return None
    best = max(row["reward"] for row in rows)
    return (
        f"agent {agent!r}: no reply in {_span(rows)} got the largest reward of the verifier, so none "
        f"counts as right (largest mean reward of a step: {best:.3g}). If the reward function cannot "
        "reach the upper end of its reward_range, lower that end."
    )


@warn("train", lambda row: row.get("own/samples"), STEPS)
def no_signal(config: Config, agent: str, rows: Sequence[Row]) -> str | None:
    """All advantages were 0 for some steps: the rewards of each group are equal."""
    if any(r["own/advantage_zero"] != 1 or r.get("peers/forwarded") for r in rows):
        return None
    reward = sum(row["reward"] for row in rows) / len(rows)
    return (
        f"agent {agent!r} had no training signal in {_span(rows)}: all replies to a problem got the "
        f"same reward (mean reward {reward:.3g}), so all advantages are 0. Check the reward function, "
        "or choose problems that the agent solves sometimes."
    )


@warn("evaluation", lambda row: row.get("problems", 0) >= COLLAPSE_PROBLEMS, 0)
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


WATCHES = (
    idle,
    VerifierWatch,
    unused_peers,
    dropped_peers,
    false_claims,
    long_prompts,
    long_held_out,
    truncated,
    truncated_held_out,
    never_right,
    no_signal,
    collapse,
)


def _span(rows: Sequence[Row]) -> str:
    return f"the {len(rows)} steps up to step {rows[-1]['step'] + 1}"


def _of_peers(row: Row) -> tuple[float, float]:
    """Kept and dropped samples of peers."""
    kept, dropped = (
        sum(n for key, n in row.items() if key.startswith(start) and key != start + row["agent"])
        for start in ("samples/kept/", "samples/dropped/")
    )
    return kept, dropped


def _false_claims(row: Row) -> list[tuple[str, float, float]]:
    """(source, texts with another verdict, judged texts) of each source with any."""
    start = "trust/disagree/"
    names = [key.removeprefix(start) for key, n in row.items() if key.startswith(start) and n]
    return [(name, row[start + name], row[f"trust/judged/{name}"]) for name in names]


def _place(row: Row) -> str:
    """When a row was measured, e.g. "step 1" or "evaluation before training"."""
    if row["kind"] == "train":
        return f"step {row['step'] + 1}"
    return f"evaluation {'after step ' + str(row['step']) if row['step'] else 'before training'}"


def _mean(rows: Sequence[Row], name: str) -> float:
    """Mean over samples: each step counts by its number of forwarded peer samples."""
    total = sum(row["peers/forwarded"] for row in rows)
    return float(sum(row["peers/forwarded"] * row[name] for row in rows) / total)
