"""What a user writes into SUITE.toml, and the cells that follow from it.

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

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from hacrl.config import Config, Table, parse_config
from hacrl.errors import UserError
from hacrl.overrides import apply_override, lay_over, read_toml
from hacrl.store.rundir import RunDirectory, first_difference
from hacrl.study.compare.budget import match_steps

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class Arm(Table):
    name: str = Field(pattern=NAME)
    """Names folders and rows."""
    overrides: list[str] = Field(default_factory=list)
    """What this arm changes, as on the command line: key=value, or +FILE of the base's arms/."""
    agents: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """What this arm changes of an agent, by its name, in the teams that have it: a learning rate."""
    factor: float = Field(1.0, gt=0)
    """This arm's budget as a multiple of the suite's: 2 for "twice the rollouts"."""
    teams: list[str] | None = None
    """Only these teams; all where absent (a method may need equal vocabularies)."""


class Team(Table):
    name: str = Field(pattern=NAME)
    """Names folders and rows."""
    agents: list[str] | list[dict[str, Any]] | None = None
    """Names of the base's agents, or whole tables; the base's agents where absent."""
    overrides: list[str] = Field(default_factory=list)
    """What this team changes in the base."""


class Suite(Table):
    base: str | dict[str, Any]
    """The config that every cell starts from: a file beside this one, or the tables themselves."""
    overrides: list[str] = Field(default_factory=list)
    """Changes to the base, for all cells."""
    seeds: list[int] = Field(min_length=1)
    """One run of every arm and team for each. The same seed gives every arm the same problems, the
    same start weights and the same streams of noise: differences are taken seed by seed."""
    chosen_on: list[int] = Field(default_factory=list)
    """Seeds on which settings of this suite were chosen; none of them may be used again here."""
    parallel: int = Field(1, ge=1)
    """Cells side by side."""
    budget: Literal["rollouts", "updates", "time"] = "rollouts"
    """What is made equal: each agent's own rollouts, its parameter updates (both by the number of
    steps), or the training seconds of the team (by the evaluation that is read)."""
    reference: str
    """The arm that all others are compared with."""
    target: float | None = Field(None, gt=0, lt=1)
    """Accuracy for "rollouts to target"; where absent, the reference's mean final one."""
    arms: list[Arm] = Field(min_length=1)
    """What is compared."""
    teams: list[Team] = Field(default_factory=list)
    """Who is trained; the base's agents as they are where absent."""

    @model_validator(mode="after")
    def _consistent(self) -> Suite:
        named: dict[str, list[str]] = {
            "arms": [a.name for a in self.arms],
            "teams": [t.name for t in self.teams],
            "seeds": [str(seed) for seed in self.seeds],
        }
        for field, names in named.items():
            if twice := [n for n in names if names.count(n) > 1]:
                raise ValueError(f"{field}: {twice[0]!r} is there twice")
        if used := set(self.seeds) & set(self.chosen_on):
            raise ValueError(
                f"seeds: {min(used)} is in chosen_on; what was chosen on a seed must be reported on "
                "another"
            )
        arms = {a.name: a for a in self.arms}
        if self.reference not in arms:
            raise ValueError(f"reference = {self.reference!r} is no arm; there are {[*arms]}")
        if arms[self.reference].teams is not None:
            raise ValueError(f"reference = {self.reference!r} must run with every team")
        known = {t.name for t in self.all_teams}
        for arm in self.arms:
            if unknown := set(arm.teams or ()) - known:
                raise ValueError(f"arms: {arm.name!r} names no team {min(unknown)!r}")
        return self

    @property
    def all_teams(self) -> list[Team]:
        return self.teams or [Team(name="team")]

    def runs(self, arm: Arm, team: Team) -> bool:
        return arm.teams is None or team.name in arm.teams


@dataclass(frozen=True)
class LoadedSuite:
    """A suite with its base at hand.

    Example: read_suite(Path("configs/suites/pocket.toml")).suite.seeds == [1, 2, 3, 4, 5]
    """

    path: Path
    suite: Suite
    base: dict[str, Any]
    folder: Path
    """Where paths and +arms of the base are looked up."""
    instead_of: str = ""
    """The suite's own reference, where another was asked for."""

    def arm(self, name: str, option: str) -> Arm:
        """The arm that an option of the command line names."""
        if name not in (arms := {a.name: a for a in self.arms}):
            names = ", ".join(arms)
            raise UserError(f"{option} {name}: there is no such arm; there are {names}")
        return arms[name]

    def against(self, arm: str) -> LoadedSuite:
        """The same suite judged against another arm. Budgets are as they were."""
        if arm == self.suite.reference:
            return self
        if self.arm(arm, "--against").teams is not None:
            raise UserError(f"--against {arm}: it does not run with every team")
        if self.suite.budget == "time":
            raise UserError(
                f'--against {arm}: with budget = "time" every arm is read at the time of the '
                f"reference, {self.suite.reference!r}. Name another reference in the suite"
            )
        suite = self.suite.model_copy(update={"reference": arm})
        return replace(self, suite=suite, instead_of=self.suite.reference)

    @property
    def arms(self) -> list[Arm]:
        return self.suite.arms

    @property
    def parallel(self) -> int:
        return self.suite.parallel


@dataclass(frozen=True)
class Cell:
    """One run: a team under an arm with a seed.

    Example: Cell("pair", "hacpo", 1, Path("out/cells/pair/hacpo/seed-1"), config)
    """

    team: str
    arm: str
    seed: int
    folder: Path
    config: Config

    @property
    def name(self) -> str:
        return f"{self.team}/{self.arm}/seed-{self.seed}"

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.folder)

    @property
    def learners(self) -> list[str]:
        return [a.name for a in self.config.agents if a.learns]

    @property
    def finished(self) -> bool:
        """Every learner's last evaluation is in the metrics, the last thing a run writes before its
        final checkpoint."""
        done = {
            row["agent"]
            for row in self.run.metrics()
            if row["kind"] == "evaluation" and row["step"] == self.config.steps
        }
        return done >= set(self.learners)

    def check_stored(self) -> None:
        """A cell that lies there already must be of the same settings."""
        if not self.run.config_path.is_file():
            return
        stored = self.run.config()
        if changed := first_difference(stored.model_dump(), self.config.model_dump()):
            raise UserError(
                f"{self.folder} holds a run of other settings: {changed}. Choose another place with "
                "--out, or delete that folder"
            )


def read_suite(path: Path) -> LoadedSuite:
    if not path.is_file():
        raise UserError(f"suite {path} does not exist. Try configs/suites/pocket-small.toml")
    try:
        suite = Suite.model_validate(read_toml(path))
    except ValidationError as error:
        told = (f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors())
        raise UserError(f"{path}: {'; '.join(told)}") from error
    if isinstance(suite.base, dict):
        return LoadedSuite(path, suite, suite.base, path.parent)
    base = path.parent / Path(suite.base).expanduser()
    if not base.is_file():
        raise UserError(f"{path}: base = {suite.base!r}, but there is no file {base}")
    return LoadedSuite(path, suite, read_toml(base), base.parent)


def make_cells(loaded: LoadedSuite, out: Path, changes: Sequence[str] = ()) -> list[Cell]:
    """Every cell with its resolved config and its steps by the budget's rule. Seed by seed, so that
    a suite that was stopped half-way has whole pairs."""
    suite = loaded.suite
    reference = next(a for a in suite.arms if a.name == suite.reference)
    cells: list[Cell] = []
    for seed in suite.seeds:
        for team in suite.all_teams:
            against = _config(loaded, team, reference, seed, changes)
            for arm in suite.arms:
                if not suite.runs(arm, team):
                    continue
                config = _config(loaded, team, arm, seed, changes)
                where = f"{loaded.path}: arm {arm.name!r}, team {team.name!r}"
                ratio = arm.factor / reference.factor
                steps = match_steps(suite.budget, config, against, ratio, where)
                config = config.model_copy(update={"steps": steps})
                folder = out / "cells" / team.name / arm.name / f"seed-{seed}"
                cells.append(Cell(team.name, arm.name, seed, folder, config))
    _check_names(loaded, cells)
    return cells


def _check_names(loaded: LoadedSuite, cells: Sequence[Cell]) -> None:
    """A misspelt name in an arm's `agents` would change nothing, in silence."""
    for arm in loaded.arms:
        there = {
            agent.name for cell in cells if cell.arm == arm.name for agent in cell.config.agents
        }
        if unknown := arm.agents.keys() - there:
            raise UserError(
                f"{loaded.path}: arm {arm.name!r} changes agent {min(unknown)!r}, but its teams have "
                f"only {sorted(there)}"
            )


def _config(loaded: LoadedSuite, team: Team, arm: Arm, seed: int, changes: Sequence[str]) -> Config:
    tree = deepcopy(loaded.base)
    for override in loaded.suite.overrides:
        apply_override(tree, override, loaded.folder)
    if team.agents is not None:
        tree["agents"] = [_agent(tree, agent, team) for agent in team.agents]
    for override in (*team.overrides, *arm.overrides):
        apply_override(tree, override, loaded.folder)
    _change_agents(tree.get("agents"), arm)
    for override in (*changes, f"seed={seed}"):
        apply_override(tree, override, loaded.folder)
    where = f"{loaded.path}, arm {arm.name!r}, team {team.name!r}"
    config = parse_config(tree, where, loaded.folder)
    if not config.evaluation.problems:
        raise UserError(f"{where}: evaluation.problems = 0 leaves nothing to compare")
    return config


def _change_agents(agents: Any, arm: Arm) -> None:
    """As the arm says. What is no list of agents is left as it is: the config's check will tell."""
    for agent in agents if isinstance(agents, list) else []:
        for name, changed in arm.agents.items():
            if isinstance(agent, dict) and agent.get("name") == name:
                lay_over(agent, deepcopy(changed))
                break  # the name itself may have changed


def _agent(tree: dict[str, Any], agent: str | dict[str, Any], team: Team) -> dict[str, Any]:
    if isinstance(agent, dict):
        return deepcopy(agent)
    found = {a.get("name"): a for a in tree.get("agents", [])}
    if agent not in found:
        raise UserError(f"team {team.name!r}: the base has no agent {agent!r}, only {[*found]}")
    return dict(found[agent])
