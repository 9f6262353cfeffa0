"""`hacrl compare --kept FILE`: finished runs as one small file.

FILE has JSON lines. A run takes a few kilobytes: learning curves, the scores of the last evaluation by
problem, mean metrics, theory checks, settings, versions and hashes of the models. A run in FILE is
finished for `compare`: it is not trained again, and the report reads it from there. So a suite can be
trained in several sittings or on several machines; `cat A B > FILE` merges two files.
"""

import fcntl
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import hacrl
from hacrl.config import Config
from hacrl.config_file import first_difference
from hacrl.errors import UserError
from hacrl.fingerprint import change_kind, config_by_key, model_folder
from hacrl.store.checkpoint import sha256
from hacrl.study.compare.reading import AgentRun, Point, read_run
from hacrl.study.compare.suite import Run

_AGENT_FIELDS = "updates", "metrics", "checks", "failure"
"""Fields of AgentRun that are stored as they are."""
_TOKENIZER = "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"


class FinishedRuns:
    """The file of finished runs. Without a path it is empty and stores nothing.

    Example: FinishedRuns(Path("docs/results/real-pair.jsonl")).with_results(runs)
    """

    def __init__(self, path: Path | None) -> None:
        """Read the file, if it exists."""
        self.path = path
        self._runs: dict[str, dict[str, Any]] = {}
        self._models: dict[str, tuple[str, str]] = {}  # model of a team: (digest, a run with it)
        self._problems: dict[str, list[str]] = {}
        self._read()

    def _read(self) -> None:
        try:
            there = self.path is not None and self.path.exists()
            lines = self.path.read_text("utf-8").splitlines() if self.path and there else ()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"--kept {self.path} is not a file of `hacrl compare` ({error}). Choose another file."
            ) from error
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if "problems" in row:
                    self._problems[row["id"]] = row["problems"]
                    continue
                run, models = row["run"], row.get("models", {})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"--kept {self.path}: line {number} is not a run of `hacrl compare` ({error}). "
                    "Delete the line, or choose another file."
                ) from error
            self._check(run, models)
            self._runs[run] = row

    def _check(self, run: str, models: dict[str, str]) -> None:
        """UserError if another run was trained from other files of the same model."""
        for model, digest in models.items():
            known, other = self._models.setdefault(model, (digest, run))
            if digest != known:
                raise UserError(
                    f"--kept {self.path}: {other} and {run} have different files of the model {model} "
                    "(weights or tokenizer), so they cannot be compared. Restore the files, choose "
                    "another file and --out, or delete the lines of one kind."
                )

    def check_models(self, runs: Iterable[Run]) -> None:
        """UserError if a run that is not in the file would be trained from other files of a model."""
        for run in runs:
            if self.path and run.name not in self._runs:
                self._check(run.name, model_digests(run))

    def add(self, run: Run) -> None:
        """Append a finished run that is not in the file yet."""
        if self.path is None or run.name in self._runs:
            return
        agents = read_run(run)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as out:
            fcntl.flock(out, fcntl.LOCK_EX)
            self._read()
            if run.name in self._runs:  # another command has added it in the meantime
                return
            rows: list[dict[str, Any]] = []
            row: dict[str, Any] = {
                "run": run.name,
                "settings": settings(run.config),
                "environment": run.environment,
                "source": source_digest(),
                "models": model_digests(run),
                "agents": {a.agent: self._stored(a, rows) for a in agents},
            }
            self._check(run.name, row["models"])
            self._runs[run.name] = row
            lines = (json.dumps(r, separators=(",", ":")) for r in [*rows, row])
            out.writelines(f"{line}\n" for line in lines)

    def with_results(self, runs: Sequence[Run]) -> list[Run]:
        """The runs, with their stored results where the file has them. UserError for other settings."""
        return [self._with_results(r) if r.name in self._runs else r for r in runs]

    def _with_results(self, run: Run) -> Run:
        row = self._runs[run.name]
        given = config_by_key(run.config, exclude_defaults=True)
        # A run from before a setting existed is a run with its default.
        then = {k: v for k, v in row["settings"].items() if not _removed(k, v)}
        now = {k: v for k, v in settings(run.config).items() if k in then or k in given}
        for key in then.keys() & now.keys():
            if key.endswith(".replay") and "/" not in then[key]:  # older files have seed-N only
                now[key] = Path(now[key]).name
        if changed := first_difference(then, now):
            raise UserError(
                f"--kept {self.path}: {run.name} has other settings: {changed}. Choose another file, "
                "or delete its line."
            )
        try:
            run = replace(run, stored_environment=row["environment"])
            stored = [self._agent(run, name, row["agents"][name]) for name in run.learners]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"--kept {self.path}: {run.name} or its line of problems is incomplete ({error!r}). "
                "Restore the file, or delete the line of the run."
            ) from error
        return replace(run, stored=tuple(stored))

    def _agent(self, run: Run, agent: str, stored: dict[str, Any]) -> AgentRun:
        ids = self._problems[stored["problems"]]
        curve = tuple(Point(**{**p, "judged": tuple(p["judged"])}) for p in stored["curve"])
        scores = {p: s for p, s in zip(ids, stored["scores"], strict=True) if s is not None}
        fields = {name: stored[name] for name in _AGENT_FIELDS}
        return AgentRun(run, agent, curve, scores, **fields)

    def _stored(self, agent: AgentRun, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The agent's part of a run's row. Problems that the file does not have are added to `rows`."""
        ids = list(agent.scores)
        name = hashlib.sha256("\n".join(ids).encode()).hexdigest()[:12]
        if name not in self._problems:
            self._problems[name] = ids
            rows.append({"id": name, "problems": ids})
        scores = [int(s) if s == int(s) else s for s in agent.scores.values()]
        fields = {name: getattr(agent, name) for name in _AGENT_FIELDS}
        curve = [asdict(point) for point in agent.curve]
        return {"curve": curve, "problems": name, "scores": scores, **fields}


def model_digests(run: Run) -> dict[str, str]:
    """The hash of the weights and the tokenizer of each model folder of a run, by team, agent and the
    folder's name. Models of a hub are not included."""
    found = {}
    for agent in run.config.agents:
        if folder := model_folder(agent.model) if agent.model else None:
            files = {*folder.glob("*.safetensors"), *(folder / name for name in _TOKENIZER)}
            present = sorted(path for path in files if path.is_file())
            found[f"{run.team}/{agent.name}/{folder.name}"] = _digest(tuple(present))
    return found


@cache
def _digest(files: tuple[Path, ...]) -> str:
    parts = [(path.name, sha256(path)) for path in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def settings(config: Config) -> dict[str, Any]:
    """The settings that change results, by dotted key. Models and reward functions count by
    their names, stored runs by team, arm and seed, because their places differ between machines."""
    found = {k: v for k, v in config_by_key(config).items() if change_kind(k) == "results"}
    for key, value in found.items():
        if value and key.endswith((".model", ".options.path")):
            found[key] = Path(value).name
        if value and key.endswith(".replay"):
            parts = Path(value).parts  # .../TEAM/ARM/seed-N if it is a run of a suite
            found[key] = "/".join(parts[-3 if parts[-1].startswith("seed-") else -1 :])
    found |= {"steps": config.steps, "evaluation.every": config.evaluation.every}
    return dict(json.loads(json.dumps(found)))


REMOVED = {
    "agents.away": [],
    "sampler.behaviour": "score",
    "sampler.check_samples": 32,
    "skip_limit": 5,
    "trust.max_source_norm": 1.0,
    "trust.false_alarm_steps": 10_000,
    "trust.quarantine_steps": 20,
}
"""Setting that does not exist any more -> the value that stands for today's behaviour."""


def _removed(key: str, value: Any) -> bool:
    """Whether a setting of a stored run does not exist any more and had today's meaning."""
    table, _, rest = key.partition(".")
    name = f"agents.{rest.partition('.')[2]}" if table == "agents" else key
    return name in REMOVED and value == REMOVED[name]


def source_digest() -> str:
    """A hash of the package's Python files: which code trained a run."""
    root = Path(hacrl.__file__).parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]
