"""What `hacrl join` needs: a member's config, and its pool.

The member's file (mine.toml) is a config without what is common to the team: that comes from the
charter. It has one table `[agent]` instead of `[[agents]]`. Nothing in a charter is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hacrl.config import Config, parse_config
from hacrl.config_file import apply_overrides, read_toml
from hacrl.errors import UserError
from hacrl.owners.charter import Member, TeamRecord
from hacrl.owners.client import HubClient, chain_head, fetch_team
from hacrl.owners.connection import PATIENCE, Connection, HubRefused
from hacrl.owners.pool import HubPool
from hacrl.owners.signing import Key, sha256
from hacrl.store.files import write_atomic

COMMON = (
    "steps",
    "prompts_per_step",
    "samples_per_prompt",
    "temperature",
    "max_prompt_tokens",
    "max_response_tokens",
    "seed",
)
"""Settings that a charter and a config have under the same name."""
OWN_VERIFIER = ("workers", "timeout", "memory_gb")
"""Settings of `[verifier]` that belong to the member's machine."""


@dataclass(frozen=True)
class Membership:
    """One member of a team, before its run directory is opened.

    Example: Membership.find(url, "ant", Key.read(path)).config(Path("mine.toml"), Path("runs/ant"))
    """

    connection: Connection
    team: TeamRecord
    name: str
    key: Key

    @classmethod
    def find(
        cls,
        url: str,
        name: str,
        key: Key,
        note: Callable[[str], None] = lambda text: None,
        team: str | None = None,
        patience: float = PATIENCE,
        certificate: Path | None = None,
    ) -> Membership:
        """Ask the hub for the charter; UserError if it is of another team than `team`."""
        verify = str(certificate) if certificate else True
        connection = Connection(url, note, patience, verify)
        found = cls(connection, fetch_team(connection, team), name, key)
        found.member()  # an error if the name is unknown
        return found

    def member(self) -> Member:
        """This member, as the newest amendment that names it has it."""
        members: dict[str, Member] = {}
        for step in sorted({0, *(a.step for a in self.team.amendments)}):
            members |= self.team.roster(step)
        if self.name in members:
            return members[self.name]
        raise UserError(
            f"--as {self.name}: not a member of the team {self.team.charter.name!r}; the members are "
            f"{', '.join(members)}. A new member asks the founder for an amendment (join)"
        )

    def config(self, mine: Path, run: Path, overrides: Sequence[str] = ()) -> Config:
        """The config of the member's run: mine.toml with everything common from the charter."""
        tree = read_toml(mine)
        apply_overrides(tree, overrides, mine.parent)
        for name in ("trust", "hub", "verifier"):
            if not isinstance(tree.get(name, {}), dict):
                raise UserError(f"{mine}: {name} = {tree[name]!r}: give a table [{name}]")
        known = [m.name for m in self.team.charter.members]
        known += [a.member for a in self.team.amendments]
        trusted = tree.get("trust", {}).get("trusted", [])
        if isinstance(trusted, list) and (unknown := [n for n in trusted if n not in known]):
            raise UserError(
                f"{mine}: trust.trusted: {unknown[0]!r} is not one of {', '.join(sorted({*known}))}"
            )
        self._refuse_common(tree, str(mine))
        content = self.team.signed.content
        verifier, trust = dict(content["verifier"]), {"judge_again": True, **tree.get("trust", {})}
        judge = f"{verifier['kind']}/{verifier.pop('version')}"
        hub = {"url": self.connection.url, "team": self.team.id, "verifier": judge}
        hub |= {"staleness": content["staleness"], **tree.get("hub", {})}
        tree |= {name: content[name] for name in COMMON} | {
            "task": self._task(run),
            "verifier": {**tree.get("verifier", {}), **verifier},
            "trust": trust | {"reciprocity": content["reciprocity"]},
            "agents": [{**tree.pop("agent"), "name": self.name, "publish": self.member().publish}],
            "hub": hub,
        }
        return parse_config(tree, str(mine), mine.parent, overrides)

    def _refuse_common(self, tree: dict[str, Any], source: str) -> None:
        agent = tree.get("agent")
        if not isinstance(agent, dict) or "agents" in tree:
            raise UserError(
                f"{source}: give one table [agent] with the model; the team is the hub's"
            )
        tables = {"trust": ("reciprocity",), "agent": ("name", "samples_per_prompt")}
        found = [name for name in (*COMMON, "task") if name in tree]
        found += [f"hub.{key}" for key in tree.get("hub", {}) if key != "late_samples"]
        for table, keys in tables.items():
            found += [f"{table}.{key}" for key in keys if key in tree.get(table, {})]
        found += [f"verifier.{k}" for k in tree.get("verifier", {}) if k not in OWN_VERIFIER]
        if found:
            raise UserError(f"{source}: {found[0]} comes from the charter; remove it")
        level = self.member().publish
        if agent.get("publish", level) != level:
            raise UserError(
                f"{source}: agent.publish = {agent['publish']!r}, but the charter has {level!r}; remove "
                "it, or ask the founder for an amendment"
            )

    def _task(self, run: Path) -> dict[str, Any]:
        """The charter's task, with its files in the run directory."""
        task = dict(self.team.signed.content["task"])
        for key in ("train", "held_out", "exclude"):
            if task.get(key) in self.team.data:
                task[key] = str((run / "data" / task[key]).resolve())
        return task

    def pool(self, run: Path, beside: Path, note: Callable[[str], None]) -> HubPool:
        """The pool of the run, after its data files are fetched and checked. The member's own copies of
        these files are read from the folder `beside`."""
        client = HubClient(replace(self.connection, note=note), self.name, self.key, run / "hub")
        client.state()  # a signed request: a wrong clock is noticed before models are loaded
        for name, digest in self.team.data.items():
            _place(client, name, digest, run / "data" / name, beside / name)
        if client.head:
            note(chain_head(client.folder))
        return HubPool(run / "pool", client)


def _place(client: HubClient, name: str, digest: str, place: Path, own: Path) -> None:
    """Write a data file of the task into the run directory: the member's own copy, or the hub's."""
    if place.is_file() and sha256(place.read_bytes()) == digest:
        return
    if own.is_file():
        data = own.read_bytes()
        if (found := sha256(data)) != digest:
            raise UserError(
                f"{own} has the sha256 {found}, but the charter has {digest}: give the team's file, or "
                "remove yours to fetch it from the hub"
            )
    else:
        try:
            data = client.data(name)
        except HubRefused as refused:
            if refused.code != "data":
                raise
            raise UserError(
                f"the hub does not serve {name}: copy the file with the sha256 {digest} to {own}"
            ) from refused
    write_atomic(place, data)
