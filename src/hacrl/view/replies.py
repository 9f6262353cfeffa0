"""Filtered lists of replies from the index, and all replies to one problem from the run's files."""

from collections.abc import Mapping
from typing import Any

from hacrl.config import Config
from hacrl.errors import UserError
from hacrl.store.pool import Pool
from hacrl.store.rows import Row
from hacrl.types import Finish, Group, Problem, Trajectory
from hacrl.view.curves import short
from hacrl.view.index import CLIPPED, NONE, USED, ZERO, Index, use_of
from hacrl.view.live import LiveRun

PAGE = 50  # rows of a list that are sent at a time
USES = {"used": USED, "clipped": CLIPPED, "zero": ZERO, "none": NONE}
"""What a learner did with a reply, as the page names it."""
NAMES = {letter: name for name, letter in USES.items()}
REWARDS = {"positive": "reward > 0", "zero": "reward <= 0", "none": "reward IS NULL"}
COLUMNS = (
    "step",
    "problem",
    "author",
    "number",
    "reward",
    "status",
    "finish",
    "tokens",
    "uses",
    "text",
)


def list_replies(index: Index, query: Mapping[str, str]) -> dict[str, Any]:
    """The replies that match the filters, newest step first: step, learner, author, problem, reward,
    status, finish, used (by the learner), q (words of the text), offset."""
    if query.get("step"):
        index.ensure(_number(query, "step") - 1)
    where, values = _where(index, query)
    offset = _number(query, "offset")
    with index.reading() as db:
        total = db.execute(f"SELECT count(*) FROM replies {where}", values).fetchone()[0]
        chosen = f"SELECT {', '.join(COLUMNS)} FROM replies {where}"
        order = "ORDER BY step DESC, id LIMIT ? OFFSET ?"
        rows = db.execute(f"{chosen} {order}", (*values, PAGE, offset)).fetchall()
    found = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    for row in found:
        row["step"] += 1
        letters = zip(index.learners, row["uses"], strict=False)
        row["uses"] = {learner: NAMES[letter] for learner, letter in letters}
    return {"rows": found, "total": total, "offset": offset, "index": index.progress()}


def _where(index: Index, query: Mapping[str, str]) -> tuple[str, list[Any]]:
    parts: list[str] = []
    values: list[Any] = []
    if query.get("step"):
        parts.append("step = ?")
        values.append(_number(query, "step") - 1)
    for column in ("author", "problem", "finish", "status"):
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
        if index.searchable:
            parts.append("id IN (SELECT rowid FROM texts WHERE texts MATCH ?)")
            values.append(" ".join('"{}"*'.format(word.replace('"', '""')) for word in words))
        else:
            parts += ["id IN (SELECT rowid FROM texts WHERE text LIKE ?)"] * len(words)
            values += [f"%{word}%" for word in words]
    return ("WHERE " + " AND ".join(parts) if parts else ""), values


def _number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name) or "0"
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise UserError(f"{name} = {text[:20]!r} is not a number")
    return int(text)


def show_problem(
    run: LiveRun, query: Mapping[str, str], problems: Mapping[str, Problem]
) -> dict[str, Any]:
    """All agents' replies to one problem of a step, with what each learner did with them."""
    step = _number(query, "step") - 1
    name = query.get("problem", "")
    groups = Pool(run.pool_path, read_only=True).snapshot(step).groups
    place = next((i for i, group in enumerate(groups) if group.problem_id == name), None)
    if place is None:
        raise UserError(f"step {step + 1} has no problem {name!r}")
    return problem_data(run, step, groups[place], sample_tables(run, step), problems) | {
        "before": groups[place - 1].problem_id if place else None,
        "after": groups[place + 1].problem_id if place + 1 < len(groups) else None,
        "place": [place + 1, len(groups)],
    }


Tables = dict[str, dict[tuple[str, str, int], Row]]
"""Learner -> (problem, author, index) -> the row of its sample."""


def sample_tables(run: LiveRun, step: int) -> Tables:
    learners = [agent.name for agent in run.config().agents if agent.learns]
    return {
        name: {(r["problem"], r["source"], r["index"]): r for r in run.sample_rows(step, name)}
        for name in learners
    }


def problem_data(
    run: LiveRun, step: int, group: Group, tables: Tables, problems: Mapping[str, Problem]
) -> dict[str, Any]:
    """The data of one problem's page."""
    config, problem = run.config(), problems.get(group.problem_id)
    drops = {row["agent"]: _reasons(row) for row in run.metric_rows("train") if row["step"] == step}
    return {
        "step": step + 1,
        "problem": group.problem_id,
        "task": group.task,
        "question": problem.messages[-1].content if problem else None,
        "answer": problem.answer if problem else None,
        "agents": [agent.name for agent in config.agents],
        "learners": list(tables),
        "stored": bool(any(tables.values())),
        "replies": [
            {
                "author": t.agent,
                "number": t.index,
                "reward": t.reward if t.judged else None,
                "status": t.verdict.status.value if t.verdict else "",
                "detail": t.verdict.detail if t.verdict else "",
                "finish": t.finish.value,
                "tokens": t.num_tokens,
                "logprob": short(t.mean_logprob),
                "reply_start": t.reply_start,
                "text": t.text,
                "learners": {
                    name: _use(config, t, name, rows.get((t.problem_id, t.agent, t.index)), drops)
                    for name, rows in tables.items()
                },
            }
            for t in group.trajectories
        ],
    }


def _use(
    config: Config, t: Trajectory, learner: str, row: Row | None, drops: Mapping[str, list[str]]
) -> dict[str, Any]:
    """Numbers of a learner's sample, and whether it was used or why not."""
    if row is None:
        return {"use": "none", "why": why_dropped(config, t, learner, drops.get(learner, []))}
    use = NAMES[use_of(row)]
    low = row["ratio"] is not None and row["ratio"] < row["floor"] and row["source"] != learner
    reasons = {
        "used": "",
        "zero": "advantage 0",
        "clipped": "ratio below the floor" if low else "clipped",
    }
    numbers = {key: short(row[key]) for key in ("ratio", "advantage", "weight", "floor")}
    return {"use": use, "why": reasons[use], "update": row["update"] + 1, **numbers}


def why_dropped(config: Config, t: Trajectory, learner: str, reasons: list[str]) -> str:
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
    fitting = [
        r for r in reasons if r not in ("not_attempted", "withheld", "not_judged", "not_shareable")
    ]
    if fitting:
        return " or ".join(fitting).replace("_", " ")
    return (
        f"{config.algorithm.name} does not train on it"
        if t.agent != learner
        else "no sample stored"
    )


def _reasons(row: Row) -> list[str]:
    """Reasons for which a learner dropped or left out replies in a step."""
    found = [
        key.split("/", 2)[2]
        for key, count in row.items()
        if key.startswith(("samples/drop/", "samples/filtered/")) and count
    ]
    return [reason for reason in found if "/" not in reason]
