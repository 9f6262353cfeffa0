"""The suite file of `hacrl compare`, and the runs that it describes.

base = "../pocket.toml"
seeds = [1, 2, 3, 4, 5]
reference = "gspo_x2"

[[arms]]
name = "hacpo"

[[arms]]
name = "gspo_x2"
overrides = ["algorithm.name=gspo", "samples_per_prompt=16"]
factor = 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from hacrl.algorithms import make_algorithm
from hacrl.config import AgentConfig, Config, Table, parse_config
from hacrl.config_file import apply_overrides, explain, first_difference, merge, read_toml, set_key
from hacrl.errors import UserError
from hacrl.fingerprint import changed_files, config_by_key
from hacrl.store.reader import RunReader
from hacrl.study.benchmarks.catalogue import Benchmark, BenchmarkSettings, choose_benchmarks

if TYPE_CHECKING:
    from hacrl.study.compare.reading import AgentRun

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
DATA = "../../data"


class Arm(Table):
    name: str = Field(pattern=NAME)
    """Used in folder names and tables."""
    overrides: list[str] = Field(default_factory=list)
    """Changes to the base, as on the command line: key=value, or +FILE from its folder arms/."""
    agents: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Changes to single agents, by name, in the teams that have them (e.g. a learning rate)."""
    factor: float = Field(1.0, gt=0)
    """In every arm an agent draws equally many own rollouts in total, times this factor."""
    teams: list[str] | None = None
    """Train only these teams (default: all), e.g. when a method needs equal vocabularies. An agent that
    learns alone has the same run in every team, so other teams with it use the runs of an arm alone."""


class SuiteTeam(Table):
    name: str = Field(pattern=NAME)
    """Used in folder names and tables."""
    agents: list[str] | list[dict[str, Any]] | None = None
    """Names of agents of the base, or complete agent tables (default: the base's agents). An agent with
    replay = "{runs}/TEAM/ARM/seed-{seed}" publishes the batches of that run of the same suite."""
    overrides: list[str] = Field(default_factory=list)
    """Changes to the base for this team."""


class SuiteBenchmarks(BenchmarkSettings):
    """Benchmarks that end every run, with the settings of `hacrl eval --benchmarks`."""

    names: str = "math7"
    """math7, or benchmarks with commas."""
    data: Path = Path(DATA)
    """Folder with the data files, relative to the suite file (`hacrl data fetch` writes them)."""

    @property
    def chosen(self) -> tuple[Benchmark, ...]:
        return choose_benchmarks(self.names)


class Suite(Table):
    """A suite file, as read by `load_suite`."""

    base: dict[str, Any]
    """The config that every run starts from: in the file a path relative to it, or the tables."""
    overrides: list[str] = Field(default_factory=list)
    """Changes to the base for all runs."""
    seeds: list[int] = Field(min_length=1)
    """One run per seed, arm and team. With the same seed every arm has the same problems, initial
    weights and noise streams, so differences are taken seed by seed."""
    chosen_on: list[int] = Field(default_factory=list)
    """Seeds on which settings of this suite were chosen; `seeds` must not contain any of them."""
    parallel: int = Field(1, ge=1)
    """Number of runs to train at a time."""
    reference: str
    """The arm that all others are compared with."""
    alone: list[str] = Field(default_factory=list)
    """Arms of learning alone with growing budgets, e.g. ["gspo", "gspo_x2", "gspo_x4"]: the report then
    has the exchange rate of every other arm (study/compare/exchange.py)."""
    benchmarks: SuiteBenchmarks | None = None
    """Benchmarks at the end of every run: "math7", or a table. `benchmarks.KEY=VALUE` on the command
    line changes it."""
    published: dict[str, dict[str, dict[str, dict[str, float]]]] = Field(default_factory=dict)
    """Figures in percent to print with the results: team -> agent -> arm -> benchmark (or "mean")."""
    arms: list[Arm] = Field(min_length=1)
    """The ways of training to compare."""
    teams: list[SuiteTeam] = Field(default_factory=list)
    """The teams to train (default: one team, the base's agents)."""
    _path: Path = PrivateAttr(default=Path("suite.toml"))
    _folder: Path = PrivateAttr(default=Path())

    @model_validator(mode="after")
    def _consistent(self) -> Suite:
        named: dict[str, list[str]] = {
            "arms": [a.name for a in self.arms],
            "teams": [t.name for t in self.teams],
            "seeds": [str(seed) for seed in self.seeds],
        }
        for field, names in named.items():
            if twice := [n for n in names if names.count(n) > 1]:
                raise ValueError(f"{field}: {twice[0]!r} is listed twice")
        if used := set(self.seeds) & set(self.chosen_on):
            raise ValueError(
                f"seeds: {min(used)} is in chosen_on; report on seeds that chose no setting"
            )
        if self.reference not in named["arms"]:
            raise ValueError(f"reference = {self.reference!r} is not an arm; arms: {named['arms']}")
        for arm in self.arms:
            if unknown := set(arm.teams or ()) - {t.name for t in self.all_teams}:
                raise ValueError(f"arms: {arm.name!r} has the unknown team {min(unknown)!r}")
        factors = [self.arm(name, "alone:").factor for name in self.alone]
        if len(factors) == 1 or any(a >= b for a, b in pairwise(factors)):
            raise ValueError(
                f"alone = {self.alone} needs two arms or more with growing factors, not {factors}"
            )
        return self

    @property
    def path(self) -> Path:
        """The suite file."""
        return self._path

    @property
    def folder(self) -> Path:
        """The base's folder: relative paths and +FILE overrides start there."""
        return self._folder

    @property
    def all_teams(self) -> list[SuiteTeam]:
        return self.teams or [SuiteTeam(name="team")]

    def arm(self, name: str, option: str = "") -> Arm:
        """The arm with this name; `option` is the command-line option that names it."""
        if name not in (arms := {a.name: a for a in self.arms}):
            raise UserError(f"{option} {name}: no such arm; arms: {', '.join(arms)}")
        return arms[name]

    def wanted(self, runs: Sequence[Run], only: Sequence[str], teams: Sequence[str]) -> list[Run]:
        """The runs of these arms and teams; an empty list means all."""
        known = [team.name for team in self.all_teams]
        for name in only:
            self.arm(name, "--only")
        for name in set(teams) - set(known):
            raise UserError(f"--teams {name}: no such team; teams: {', '.join(known)}")
        return [r for r in runs if r.arm in (only or [r.arm]) and r.team in (teams or [r.team])]


@dataclass(frozen=True)
class Run:
    """One run of a suite: a team under an arm with a seed.

    Example: Run("pair", "hacpo", 1, Path("out/runs/pair/hacpo/seed-1"), config)
    """

    team: str
    arm: str
    seed: int
    folder: Path
    config: Config
    stored: tuple[AgentRun, ...] | None = None
    """The results of a finished run from a file (study/compare/finished.py)."""
    stored_environment: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        return f"{self.team}/{self.arm}/seed-{self.seed}"

    @property
    def reader(self) -> RunReader:
        return RunReader(self.folder)

    @property
    def environment(self) -> Mapping[str, Any]:
        """Versions and hardware of a finished run."""
        return self.stored_environment or self.reader.environment()

    @property
    def learners(self) -> list[str]:
        return [a.name for a in self.config.agents if a.learns]

    @property
    def replayed(self) -> set[Path]:
        """Run directories whose stored batches agents of this run publish."""
        return {Path(a.replay) for a in self.config.agents if a.replay}

    @property
    def finished(self) -> bool:
        """Whether the metrics contain the final evaluation of every learner."""
        if self.stored is not None:
            return True
        rows = self.reader.metric_rows("evaluation")
        done = {row["agent"] for row in rows if row["step"] == self.config.steps}
        return done >= set(self.learners)

    def check_stored(self) -> None:
        """Raise a UserError if the folder holds a run with other settings."""
        if self.stored is not None or not self.reader.config_path.is_file():
            return
        other = self.reader.config()
        if changed := first_difference(other.model_dump(), self.config.model_dump()):
            raise UserError(
                f"{self.folder} holds a run with other settings: {changed}. Choose another "
                "output folder, or delete that run"
            )

    def check_inputs(self) -> None:
        """Raise a UserError if a data, code or model file has changed since the run was trained: runs
        trained now would not be comparable with it."""
        if self.stored is None and (paths := changed_files(self.reader)):
            raise UserError(
                f"{paths[0]} has changed since {self.name} was trained. Restore it, choose another "
                "output folder, or delete that run; --report reports the finished runs as they are"
            )


def load_suite(path: Path, changes: Sequence[str] = ()) -> Suite:
    """Read a suite file and its base config. Of `changes` only those of `benchmarks` are used here."""
    tree, folder = read_toml(path), path.parent
    if isinstance(base := tree.get("base"), str):
        file = path.parent / Path(base).expanduser()
        if not file.is_file():
            raise UserError(f"{path}: base = {base!r}, but there is no file {file}")
        tree["base"], folder = read_toml(file), file.parent
    here = [change for change in changes if of_suite(change)]
    if here:
        tree.setdefault("benchmarks", {})
    if isinstance(tree.get("benchmarks"), str):
        tree["benchmarks"] = {"names": tree["benchmarks"]}
    if isinstance(table := tree.get("benchmarks"), dict):
        table["data"] = str(path.parent / Path(str(table.get("data", DATA))).expanduser())
    for change in here:
        set_key(tree, change)
    try:
        suite = Suite.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, Suite, tree)}") from error
    suite._path, suite._folder = path, folder
    return suite


def of_suite(change: str) -> bool:
    """Whether a change of the command line is one of the suite, not of the runs' configs."""
    return change.startswith("benchmarks.")


def make_runs(suite: Suite, out: Path, changes: Sequence[str] = ()) -> list[Run]:
    """All runs with their resolved configs and steps. They are ordered by seed, so that an
    interrupted suite has complete pairs."""
    reference = suite.arm(suite.reference)
    if reference.teams is not None and uses_peers(
        make_config(suite, suite.all_teams[0], reference, suite.seeds[0], changes)
    ):
        raise UserError(f"{suite.path}: reference = {suite.reference!r} must train every team")
    runs: list[Run] = []
    for seed in suite.seeds:
        for team in suite.all_teams:
            against = make_config(suite, team, reference, seed, changes)
            for arm in suite.arms:
                if arm.teams is not None and team.name not in arm.teams:
                    continue
                config = make_config(suite, team, arm, seed, changes)
                where = f"{suite.path}: arm {arm.name!r}, team {team.name!r}"
                if changed := first_difference(_measured(against), _measured(config)):
                    raise UserError(
                        f"{where}: {changed} (there: the reference). Arms that are evaluated in "
                        "different ways cannot be compared"
                    )
                steps = match_steps(config, against, arm.factor / reference.factor, where)
                agents = [_with_stored_run(a, out, seed) for a in config.agents]
                config = config.model_copy(update={"steps": steps, "agents": agents})
                folder = out / "runs" / team.name / arm.name / f"seed-{seed}"
                runs.append(Run(team.name, arm.name, seed, folder, config))
    _check_agent_names(suite, runs)
    return runs


def match_steps(config: Config, reference: Config, ratio: float, where: str) -> int:
    """The number of steps in which every learner of `config` draws `ratio` times the rollouts that it
    draws under `reference`."""
    if config.has_rounds and config.evaluation.every == 0:
        raise UserError(
            f"{where}: {config.algorithm.name!r} draws more rollouts in some steps, so it needs "
            "evaluations during training; set evaluation.every"
        )
    if reference.has_rounds:
        raise UserError(
            f"{where}: the reference needs a fixed number of rollouts, not algorithm.name = "
            f"{reference.algorithm.name!r}. Choose another reference"
        )
    mine, theirs = (
        {a.name: c.prompts_per_step * c.samples_of(a) for a in c.agents if a.learns}
        for c in (config, reference)
    )
    if mine.keys() != theirs.keys():
        raise UserError(f"{where}: the learners differ from those of the reference arm")
    wanted = {agent: ratio * reference.steps * theirs[agent] for agent in mine}
    steps = round(next(wanted[agent] / mine[agent] for agent in mine))
    for agent, count in wanted.items():
        if steps < 1 or abs(steps * mine[agent] - count) > 1e-6 * count:
            raise UserError(
                f"{where}: the budget is {count:g} rollouts of {agent!r}, and a step makes "
                f"{mine[agent]}: no number of steps fits every agent. Change steps, "
                "samples_per_prompt or the arm's factor"
            )
    return steps


def _with_stored_run(agent: AgentConfig, out: Path, seed: int) -> AgentConfig:
    """The agent with {runs} and {seed} of its `replay` filled in: it replays a run of this suite."""
    if agent.replay is None:
        return agent
    path = agent.replay.replace("{runs}", str((out / "runs").resolve()))
    return agent.model_copy(update={"replay": path.replace("{seed}", str(seed))})


def _measured(config: Config) -> dict[str, Any]:
    """The settings that decide about held-out problems and how their replies are judged."""
    task = ["kind", "operations", "gym", "columns", "subset", "held_out"]
    keys = ["evaluation.", "verifier.kind", "verifier.options", "verifier.rewards"]
    keys += [f"task.{key}" for key in (task if config.task.held_out else [*task, "train"])]
    found = {k: v for k, v in config_by_key(config).items() if k.startswith(tuple(keys))}
    limit = config.evaluation.max_response_tokens
    for agent in config.agents:
        limits = config.prompt_limit(agent), limit or config.response_limit(agent)
        found[f"held-out token limits of {agent.name}"] = list(limits)
    return found | {"evaluation.every": None}


def uses_peers(config: Config) -> bool:
    """Whether the algorithm uses anything of peers' replies."""
    return make_algorithm(config.algorithm, (0.0, 1.0)).needs.peers != "none"


def _check_agent_names(suite: Suite, runs: Sequence[Run]) -> None:
    """A misspelled name in an arm's `agents` would change nothing, without a warning."""
    for arm in suite.arms:
        known = {agent.name for run in runs if run.arm == arm.name for agent in run.config.agents}
        for name in arm.agents.keys() - known:
            where = f"{suite.path}: arm {arm.name!r} changes agent {name!r}"
            raise UserError(f"{where}, but its teams have only {sorted(known)}")


def make_config(
    suite: Suite, team: SuiteTeam, arm: Arm, seed: int, changes: Sequence[str]
) -> Config:
    """The config of one run; its steps are those of the base."""
    tree = deepcopy(suite.base)
    apply_overrides(tree, suite.overrides, suite.folder)
    if team.agents is not None:
        tree["agents"] = [_agent(tree, agent, team) for agent in team.agents]
    apply_overrides(tree, team.overrides, suite.folder)
    apply_overrides(tree, arm.overrides, suite.folder)
    _change_agents(tree.get("agents"), arm)
    of_runs = [change for change in changes if not of_suite(change)]
    apply_overrides(tree, [*of_runs, f"seed={seed}"], suite.folder)
    where = f"{suite.path}, arm {arm.name!r}, team {team.name!r}"
    config = parse_config(tree, where, suite.folder)
    if not config.evaluation.problems:
        raise UserError(f"{where}: evaluation.problems = 0 leaves nothing to compare")
    if suite.benchmarks and not config.checkpoint.save:
        raise UserError(f"{where}: benchmarks need checkpoints; remove checkpoint.save=false")
    if suite.benchmarks and config.has_rounds:
        over = f"the last step, where {config.algorithm.name!r} is over its budget"
        raise UserError(f"{where}: benchmarks measure {over}; leave out the arm or them")
    return config


def _change_agents(agents: Any, arm: Arm) -> None:
    """Apply the arm's changes to single agents. A value that is not a list of agents stays: the
    config's own check reports it."""
    for agent in agents if isinstance(agents, list) else []:
        if isinstance(agent, dict) and isinstance(name := agent.get("name"), str):
            merge(agent, deepcopy(arm.agents.get(name, {})))


def _agent(tree: dict[str, Any], agent: str | dict[str, Any], team: SuiteTeam) -> dict[str, Any]:
    if isinstance(agent, dict):
        return deepcopy(agent)
    found = {a.get("name"): a for a in tree.get("agents", [])}
    if agent not in found:
        raise UserError(f"team {team.name!r}: the base has no agent {agent!r}, only {[*found]}")
    return dict(found[agent])
