"""The charter of a team, and its amendments.

The founder writes charter.toml and signs it once; the sha256 of the canonical JSON of the signed
content is the team id. Later changes of the team are amendments: signed records in a hash chain that
begins with the team id. An amendment names the step from which it counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from hacrl.config import Table, TaskConfig
from hacrl.config_file import check_values, explain, read_toml
from hacrl.errors import UserError
from hacrl.owners.signing import PROTOCOL, SUPPORTED, Content, Hex64, Key, Malformed, Signed, sha256
from hacrl.trust import Level

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]


class Member(Table):
    """One member of the team.

    Example: Member(name="ant", key="ab12...", publish="all")
    """

    name: Name
    """Name of the member's agent."""
    key: Hex64
    """Public key of the member (`hacrl key show FILE`)."""
    publish: Level = "all"
    """all: every reply. successes: the rewards of all replies, the text of correct ones. rewards: no
    text. nothing: an empty batch."""


class JudgedBy(Table):
    """The team's verifier."""

    kind: Literal["exact", "number", "choice", "math"]
    """A verifier of hacrl. A charter names no code."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the kind."""
    version: str = Field(min_length=1, max_length=64)
    """Version of the verifier; a member whose hacrl has another one cannot join."""


class Charter(Table):
    """What is common to all members."""

    name: Name
    """Name of the team."""
    hub: Hex64
    """Public key of the hub."""
    founder: Hex64
    """Public key of the founder, who signs the charter and amendments."""
    task: TaskConfig
    """Where problems come from."""
    verifier: JudgedBy
    """How replies are judged."""
    members: list[Member] = Field(min_length=1, max_length=256)
    """The team at the first step: one table per member."""
    steps: int = Field(ge=1, le=10**6)
    """Number of steps to train."""
    prompts_per_step: int = Field(128, ge=1, le=10**5)
    """Problems per step, the same for every member."""
    samples_per_prompt: int = Field(8, ge=1, le=10**4)
    """Each member's replies to a problem."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Token limit of a prompt."""
    max_response_tokens: int = Field(4096, ge=1)
    """Token limit of a reply."""
    max_batch_bytes: int = Field(64 * 2**20, ge=1024, le=2**30)
    """Largest batch: bytes of its outcomes and texts together, before compression."""
    seed: int = 0
    """Determines the problems of every step."""
    deadline: float | None = Field(None, gt=0)
    """Seconds from the first batch of a step until the hub closes the step without the members that are
    missing. Unset: the hub waits for all."""
    staleness: int = Field(0, ge=0)
    """A batch that arrives after its step was closed is accepted for this many steps. 0: never."""
    reciprocity: bool = True
    """A member receives the texts of members that publish as much as itself, or less, in the steps in
    which it published. False: every member receives all texts."""

    @model_validator(mode="after")
    def _consistent(self) -> Charter:
        if len({m.name for m in self.members}) < len(self.members):
            raise ValueError("members: a name is used twice; names must be unique")
        if len({self.hub, *(m.key for m in self.members)}) <= len(self.members):
            raise ValueError("members, hub: one key is used twice; each needs its own key")
        if ":" in self.task.kind:
            raise ValueError(f"task.kind = {self.task.kind!r} names code; a charter names no code")
        if self.task.kind == "hub":
            train = self.task.train or ""
            if train.startswith(".") or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", train):
                raise ValueError(f"task.train = {train!r} is not the name of a dataset of the hub")
            if self.task.held_out or self.task.exclude:
                raise ValueError(
                    "task: held_out and exclude name files, which kind = 'hub' does not serve; give "
                    "held_out_split"
                )
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or {"\\", "\0"} & {*name}:
                raise ValueError(
                    f"task: {name!r} is not in the folder of the charter; copy it there and give "
                    "its name"
                )
        return self

    @property
    def files(self) -> tuple[str, ...]:
        """The data files that the task names, relative to the charter."""
        names = (self.task.train, self.task.held_out, self.task.exclude)
        return tuple(n for n in names if n) if self.task.kind in ("jsonl", "csv", "parquet") else ()


def read_charter(path: Path) -> Content:
    """Content of the charter in a TOML file."""
    tree = read_toml(path)
    charter = _validated(Charter, tree, str(path))
    # All fields, so that other defaults in another version do not change the team; the free tables as
    # they are written, so that new fields in another version do not make them unreadable.
    task = charter.task.model_dump(mode="json", exclude_unset=True)
    return {**charter.model_dump(mode="json"), "task": task}


def _validated(table: type[Any], tree: Any, source: str) -> Any:
    try:
        return table.model_validate(tree)
    except ValidationError as error:
        raise Malformed(f"{source}: {explain(error, table, tree)}") from error


class Amended(Table):
    """Content of an amendment."""

    team: str
    number: int = Field(ge=0)
    """Place in the chain, from 0."""
    previous: str
    """Digest of the amendment before; of the first one the team id."""
    kind: Literal["join", "leave", "expel", "rotate"]
    member: Name
    step: int = Field(ge=0)
    """The first step in which it counts."""
    key: Hex64 | None = None
    """join, rotate: the member's key from then on."""
    publish: Level | None = None
    """join: what the member publishes."""
    signer: Literal["founder", "member"] = "founder"
    """A member may sign its own leave and rotate; everything else is signed by the founder."""

    @model_validator(mode="after")
    def _consistent(self) -> Amended:
        if (self.key is not None) != (self.kind in ("join", "rotate")):
            raise ValueError("key is only for join and rotate")
        if (self.publish is not None) != (self.kind == "join"):
            raise ValueError("publish is only for join")
        if self.signer == "member" and self.kind not in ("leave", "rotate"):
            raise ValueError(f"only the founder can sign {self.kind}")
        return self


Roster = dict[str, Member]


@dataclass(frozen=True)
class TeamRecord:
    """A verified charter and its verified amendments.

    Example: TeamRecord.verified(signed_charter).roster(step=3)["ant"].publish == "all"
    """

    signed: Signed
    charter: Charter
    chain: tuple[Signed, ...] = ()

    @classmethod
    def verified(cls, signed: Signed, chain: Sequence[Signed] = ()) -> TeamRecord:
        """Check signatures, contents and the chain; Malformed names the first fault."""
        tree = dict(signed.content)
        if (protocol := tree.pop("protocol", None)) not in SUPPORTED:
            known = " and ".join(map(str, SUPPORTED))
            raise Malformed(
                f"the charter is of protocol version {protocol!r}, but this hacrl knows {known}: "
                "install the version of hacrl that the team uses"
            )
        data = tree.pop("data", None)
        try:
            check_values(tree, "charter")
        except UserError as error:
            raise Malformed(str(error)) from error
        charter: Charter = _validated(Charter, tree, "charter")
        signed.check(charter.founder, "charter")
        if not isinstance(data, dict) or set(data) != set(charter.files):
            raise Malformed("charter: data must have the sha256 of the files of the task")
        team = cls(signed, charter)
        for amendment in chain:
            team = team.amended(amendment)
        return team

    @property
    def protocol(self) -> int:
        """Version of the team's records."""
        return int(self.signed.content["protocol"])

    @property
    def id(self) -> str:
        return self.signed.digest

    @property
    def data(self) -> dict[str, str]:
        """File -> sha256."""
        return dict(self.signed.content["data"])

    @property
    def head(self) -> str:
        """Digest of the newest amendment; the team id without one."""
        return self.chain[-1].digest if self.chain else self.id

    @cached_property
    def amendments(self) -> tuple[Amended, ...]:
        return tuple(Amended.model_validate(signed.content) for signed in self.chain)

    @cached_property
    def effective(self) -> tuple[Amended, ...]:
        """The amendments without those that a member signed and the founder overruled later, for the
        same step or an earlier one: a member cannot prevent its expulsion by what it announces. leave
        and expel overrule all, rotate overrules rotates."""
        found: list[Amended] = []
        first: dict[tuple[str, str], int] = {}  # earliest step of the founder's, by member and kind
        for a in reversed(self.amendments):
            if a.signer == "member" and first.get((a.member, a.kind), a.step + 1) <= a.step:
                continue
            found.append(a)
            if a.signer == "founder" and a.kind != "join":  # a join follows a leave
                for kind in ("rotate",) if a.kind == "rotate" else ("rotate", "leave"):
                    other = (a.member, kind)
                    first[other] = min(a.step, first.get(other, a.step))
        return tuple(reversed(found))

    def until(self, head: str) -> TeamRecord:
        """The team as it was when the chain ended with `head`; Malformed if it never did."""
        for count in range(len(self.chain), -1, -1):
            team = TeamRecord(self.signed, self.charter, self.chain[:count])
            if team.head == head:
                return team
        raise Malformed(f"no amendment has the digest {head[:16]}...")

    def roster(self, step: int) -> Roster:
        """The members in a step, in the order in which they joined."""
        roster = {m.name: m for m in self.charter.members}
        for change in sorted(self.effective, key=lambda a: (a.step, a.number)):
            if change.step <= step:
                _apply(roster, change)
        return roster

    def keys(self, name: str, step: int) -> list[str]:
        """Keys that requests of a member may use while `step` is open: the present one, and those that
        amendments announce. A member that left keeps its last key, one that was expelled has none."""
        own = sorted(
            (a for a in self.effective if a.member == name), key=lambda a: (a.step, a.number)
        )
        past = [a for a in own if a.step <= step]
        coming = [a.key for a in own if a.key and a.step > step]
        if past and past[-1].kind == "expel":
            return coming
        first = [m.key for m in self.charter.members if m.name == name]
        return [*[*first, *(a.key for a in past if a.key)][-1:], *coming]

    def amended(self, signed: Signed) -> TeamRecord:
        """The team with one more amendment; Malformed if it is not valid."""
        new: Amended = _validated(Amended, signed.content, "amendment")
        if (new.team, new.number, new.previous) != (self.id, len(self.chain), self.head):
            raise Malformed(
                f"amendment: it must have number {len(self.chain)} and follow {self.head[:16]}...: "
                "another one was added in the meantime, sign again"
            )
        before = self.roster(new.step)
        if new.signer == "founder" or new.member in before:  # else the roster is Malformed
            signer = self.charter.founder if new.signer == "founder" else before[new.member].key
            signed.check(signer, f"amendment of {new.member!r}")
        team = TeamRecord(self.signed, self.charter, (*self.chain, signed))
        for step in {a.step for a in team.amendments if a.step >= new.step}:
            team.roster(step)  # Malformed if this one, or one for a later step, does not fit
        if new.key in {self.charter.hub, *(m.key for m in before.values())}:
            raise Malformed(
                "amendment: the key is in use; make a new one with `hacrl key new FILE`"
            )
        return team

    def amend(self, signing_key: Key, /, **fields: Any) -> Signed:
        """Sign the next amendment."""
        link = {"team": self.id, "number": len(self.chain), "previous": self.head}
        new: Amended = _validated(Amended, {**link, **fields}, "amendment")
        return signing_key.speaking(self.protocol).sign("amendment", new.model_dump(mode="json"))


def _apply(roster: Roster, change: Amended) -> None:
    """Change the roster. Malformed if a member that joins is in it, or any other member is not."""
    name = change.member
    if (name in roster) == (change.kind == "join"):
        verb = "already is" if name in roster else "is not"
        raise Malformed(f"amendment: {name!r} {verb} a member in step {change.step + 1}")
    if change.kind == "join":
        roster[name] = Member.model_validate(
            {"name": name, "key": change.key, "publish": change.publish}
        )
    elif change.kind == "rotate":
        roster[name] = roster[name].model_copy(update={"key": change.key})
    else:
        del roster[name]


def sign_charter(path: Path, key: Key) -> TeamRecord:
    """Sign charter.toml; the result is written by the caller as charter.json."""
    content = read_charter(path)
    if content["founder"] != key.public:
        raise UserError(
            f"{path}: founder = {content['founder']!r} is not the key given: {key.public}"
        )
    data = {}
    for name in Charter.model_validate(content).files:
        try:
            data[name] = sha256((path.parent / name).read_bytes())
        except FileNotFoundError as error:
            raise UserError(
                f"{path.parent / name} does not exist, but the task names it"
            ) from error
    content |= {"protocol": PROTOCOL, "data": data}
    return TeamRecord.verified(key.speaking(PROTOCOL).sign("charter", content))


def load_charter(path: Path) -> TeamRecord:
    """Read the signed charter, charter.json. `path` is that file, or charter.toml in the same folder."""
    signed = path.with_suffix(".json")
    sign = f"`hacrl charter sign {path.with_suffix('.toml')} --key FOUNDER.key`"
    if not signed.is_file():
        raise UserError(f"{signed} does not exist: the charter is not signed. Run {sign}")
    try:
        team = TeamRecord.verified(Signed.decode("charter", signed.read_bytes().strip()))
    except Malformed as error:
        raise UserError(f"{signed}: {error}. The founder signs again with {sign}") from error
    content = team.signed.content
    if path.suffix == ".toml" and {**content, **read_charter(path)} != content:
        raise UserError(
            f"{path} was changed after the charter was signed. Undo the change, or start a new team: "
            f"{sign}"
        )
    return team
