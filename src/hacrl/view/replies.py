"""Filtered lists of replies from the index, and all replies to a problem from the run's files."""

from collections.abc import Iterator, Mapping
from typing import Any

from hacrl.config import Config
from hacrl.errors import UserError
from hacrl.store.pool import Pool
from hacrl.store.rows import Row
from hacrl.types import Finish, Problem, Trajectory
from hacrl.view.curves import short
from hacrl.view.index import CLIPPED, NONE, USED, ZERO, Index, use_of
from hacrl.view.live import LiveRun, Samples

PAGE = 50  # rows of a list that are sent at a time
USES = {"used": USED, "clipped": CLIPPED, "zero": ZERO, "none": NONE}
"""What a learner did with a reply, as the page names it."""
NAMES = {letter: name for name, letter in USES.items()}
REWARDS = {"positive": "reward > 0", "zero": "reward <= 0", "none": "reward IS NULL"}
COLUMNS = "step, problem, author, number, reward, status, finish, tokens, uses, text"
DECIDED = {"not_attempted", "withheld", "not_judged", "not_shareable"}
"""Reasons of a dropped reply that the reply itself shows."""


def list_replies(index: Index, query: Mapping[str, str]) -> dict[str, Any]:
    """The replies that match the filters, newest step first: step, learner, author, problem, reward,
    finish, used (by the learner), q (words of the text), offset."""
    where, values = _where(index, query)
    offset = number_in(query, "offset")
    with index.reading() as db:
        total = db.execute(f"SELECT count(*) FROM replies {where}", values).fetchone()[0]
        chosen = f"SELECT {COLUMNS} FROM replies {where} ORDER BY step DESC, id LIMIT ? OFFSET ?"
        rows = db.execute(chosen, (*values, PAGE, offset)).fetchall()
    found = [dict(zip(COLUMNS.split(", "), row, strict=True)) for row in rows]
    for row in found:
        row["step"] += 1
        letters = zip(index.learners, row["uses"], strict=False)
        row["uses"] = {learner: NAMES[letter] for learner, letter in letters}
    return {"rows": found, "total": total, "offset": offset, "index": index.progress()}


def _where(index: Index, query: Mapping[str, str]) -> tuple[str, list[Any]]:
    parts, values = ["1"], list[Any]()
    if query.get("step"):
        parts.append("step = ?")
        values.append(number_in(query, "step") - 1)
    for column in ("author", "problem", "finish"):
        if query.get(column):
            parts.append(f"{column} = ?")
            values.append(query[column])
    if query.get("reward"):
        parts.append(REWARDS.get(query["reward"], "0"))
    if query.get("used"):
        learner = query.get("learner") or next(iter(index.learners), "")
        if learner not in index.learners:
            raise UserError(f"{learner!r} is not a learner of the run")
        parts.append("substr(uses, ?, 1) = ?")
        values += [index.learners.index(learner) + 1, USES.get(query["used"], "")]
    if words := query.get("q", "").split():
        parts.append("id IN (SELECT rowid FROM texts WHERE texts MATCH ?)")
        values.append(" ".join('"{}"*'.format(word.replace('"', '""')) for word in words))
    return f"WHERE {' AND '.join(parts)}", values


def number_in(query: Mapping[str, str], name: str) -> int:
    """A number of the query; 0 without it."""
    text = query.get(name) or "0"
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise UserError(f"{name} = {text[:20]!r} is not a number")
    return int(text)


def step_problems(
    run: LiveRun, step: int, problems: Mapping[str, Problem], missing: str = ""
) -> Iterator[dict[str, Any]]:
    """Each problem of a step with all agents' replies and what each learner did with them. `missing`
    says why there are no `problems`."""
    config = run.config()
    groups = Pool(run.pool_path, read_only=True).snapshot(step).groups
    ids = [None, *(group.problem_id for group in groups), None]
    stored = run.has_samples(step)
    tables = {a.name: run.samples(step, a.name) for a in config.agents if a.learns}
    metrics = {row["agent"]: row for row in run.metric_rows("train") if row["step"] == step}
    for place, group in enumerate(groups, start=1):
        problem = problems.get(group.problem_id)
        yield {
            "step": step + 1,
            "problem": group.problem_id,
            "before": ids[place - 1],
            "after": ids[place + 1],
            "place": [place, len(groups)],
            "task": group.task,
            "question": problem.messages[-1].content if problem else None,
            "answer": problem.answer if problem else None,
            "missing": missing,
            "agents": [agent.name for agent in config.agents],
            "learners": list(tables),
            "stored": stored,
            "replies": [
                {
                    **_reply(t),
                    "learners": {
                        name: _use(config, t, name, rows, metrics.get(name, {}))
                        if stored
                        else {"use": "", "why": "samples are not stored"}
                        for name, rows in tables.items()
                    },
                }
                for t in group.trajectories
            ],
        }


def _reply(t: Trajectory) -> dict[str, Any]:
    return {
        "author": t.agent,
        "number": t.index,
        "reward": t.reward if t.judged else None,
        "status": t.verdict.status.value if t.verdict else "",
        "detail": t.verdict.detail if t.verdict else "",
        "finish": t.finish.value,
        "tokens": t.num_tokens,
        "reply_start": t.reply_start,
        "text": t.text,
    }


def _use(config: Config, t: Trajectory, learner: str, samples: Samples, metrics: Row) -> Row:
    """Numbers of a learner's sample, and whether it was used or why not."""
    row = samples.get((t.problem_id, t.agent, t.index))
    use, why = NAMES[use_of(row)], ""
    if row is None:
        return {"use": use, "why": _why_dropped(config, t, learner, metrics)}
    if use == "zero":
        why = "advantage 0"
    elif use == "clipped":
        low = row["ratio"] is not None and row["ratio"] < row["floor"] and t.agent != learner
        why = "ratio below the floor" if low else "clipped"
    return {"use": use, "why": why} | {k: short(row[k]) for k in ("ratio", "advantage", "weight")}


def _why_dropped(config: Config, t: Trajectory, learner: str, metrics: Row) -> str:
    """Why a reply became no sample of the learner: from the reply itself where that decides it, else the
    reasons that the learner counted in this step."""
    if t.finish is Finish.NOT_ATTEMPTED:
        return "not attempted: the prompt is too long"
    if t.finish is Finish.WITHHELD:
        return "its author withheld the text"
    if not t.judged:
        return "not judged by the verifier"
    if t.agent != learner and not t.shareable:
        return "its text does not reproduce its tokens"
    keys = [key.split("/") for key, count in metrics.items() if count]
    dropped = [k[2] for k in keys if k[:2] == ["samples", "drop"] and k[3:] == [t.agent]]
    filtered = [k[2] for k in keys if k[:2] == ["samples", "filtered"] and t.agent != learner]
    if reasons := [why for why in (*dropped, *filtered) if why not in DECIDED]:
        return " or ".join(reasons).replace("_", " ")
    name = config.algorithm.name
    return "no sample stored" if t.agent == learner else f"{name} does not train on it"
