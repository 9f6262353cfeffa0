"""Charters, amendments, and the commands that make them."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hub_clients import MakeHub
from hub_process import NAMES, HubProcess
from typer.testing import CliRunner

from hacrl.cli import app
from hacrl.errors import UserError
from hacrl.owners.charter import TeamRecord, load_charter, read_charter
from hacrl.owners.client import HubRefused
from hacrl.owners.signing import Key, Malformed, Signed, canonical, sha256

pytestmark = pytest.mark.hub


@pytest.fixture
def hub(tmp_path: Path) -> HubProcess:
    """A team whose hub is not started."""
    return HubProcess(tmp_path)


def amend(hub: HubProcess, team: TeamRecord, by: str = "founder", /, **fields: Any) -> TeamRecord:
    return team.amended(team.amend(hub.keys[by], **fields))


def test_team_id_and_signature(hub: HubProcess) -> None:
    team = load_charter(hub.charter)
    content = {**read_charter(hub.charter), "protocol": 1, "data": {}}
    assert team.id == sha256(canonical(content))
    assert list(team.roster(0)) == list(NAMES)
    forged = Signed("charter", {**team.signed.content, "seed": 1}, team.signed.signature)
    with pytest.raises(Malformed, match="signature"):
        TeamRecord.verified(forged)
    newer = hub.keys["founder"].sign("charter", {**team.signed.content, "protocol": 2})
    with pytest.raises(Malformed, match="protocol version 2"):
        TeamRecord.verified(newer)
    hub.charter.write_text(hub.charter.read_text().replace("steps = 6", "steps = 7"))
    with pytest.raises(UserError, match=r"charter\.toml was changed after the charter was signed"):
        load_charter(hub.charter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verifier": {"kind": "os:system", "version": "1"}}, "verifier.kind"),
        ({"verifier": {"kind": "function", "version": "1"}}, "verifier.kind"),
        (
            {"task": {"kind": "jsonl", "train": "../secret.jsonl"}},
            "not in the folder of the charter",
        ),
        ({"task": {"kind": "jsonl", "train": "/etc/passwd"}}, "not in the folder of the charter"),
        ({"task": {"kind": "jsonl", "train": "none.jsonl"}}, "does not exist"),
        ({"task": {"kind": "os:system"}}, "names code"),
        *(
            ({"task": {"kind": "hub", "train": train}}, "is not the name of a dataset")
            for train in ("~/private", "/etc", "../other", ".", "a/b/c")
        ),
        ({"task": {"kind": "hub", "train": "a/b", "exclude": "x"}}, "give held_out_split"),
        ({"nmae": "x"}, "did you mean 'name'"),
        ({"members": []}, "members"),
        ({"members": [{"name": "a", "key": "00" * 32}] * 2}, "used twice"),
        ({"members": [{"name": n, "key": "00" * 32} for n in "ab"]}, "its own key"),
    ],
)
def test_charters_that_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        HubProcess(tmp_path, **change)


def test_membership_follows_from_the_chain(hub: HubProcess) -> None:
    new, rotated = Key.new(), Key.new()
    hub.keys["dan"] = new
    team = amend(
        hub, hub.team, kind="join", member="dan", step=3, key=new.public, publish="rewards"
    )
    team = amend(hub, team, "bee", kind="leave", member="bee", step=2, signer="member")
    team = amend(hub, team, kind="join", member="bee", step=4, key=Key.new().public, publish="all")
    team = amend(
        hub, team, "cat", kind="rotate", member="cat", step=1, key=rotated.public, signer="member"
    )
    team = amend(hub, team, kind="expel", member="ant", step=5)
    rosters = [" ".join(team.roster(step)) for step in range(6)]
    assert rosters[:3] == ["ant bee cat", "ant bee cat", "ant cat"]
    assert rosters[3:] == ["ant cat dan", "ant cat dan bee", "cat dan bee"]
    assert team.roster(0)["cat"].key == hub.keys["cat"].public
    assert team.roster(1)["cat"].key == rotated.public
    assert team.keys("ant", 4) == [hub.keys["ant"].public] and team.keys("ant", 5) == []
    assert team.keys("cat", 0) == [hub.keys["cat"].public, rotated.public]
    assert team.keys("cat", 1) == [rotated.public]
    assert team.keys("bee", 3)[0] == hub.keys["bee"].public  # it may still read step 1
    assert team.until(hub.team.id).chain == () and team.until(team.head) == team
    assert TeamRecord.verified(team.signed, team.chain) == team
    for broken in (team.chain[1:], team.chain[::-1], (*team.chain, team.chain[-1])):
        with pytest.raises(Malformed):
            TeamRecord.verified(team.signed, broken)


def test_the_founder_overrules_what_a_member_announced(hub: HubProcess) -> None:
    """A rotate or leave of bee for step 6 prevents neither its expulsion nor a new key before, and the
    announced key ends with it. A later join gives an expelled member its new key only."""
    hub.keys["stolen"] = thief = Key.new()
    new = Key.new().public
    fields = {"member": "bee", "step": 5, "signer": "member"}
    rotated = amend(hub, hub.team, "bee", kind="rotate", key=thief.public, **fields)
    left = amend(hub, hub.team, "bee", kind="leave", **fields)
    assert thief.public in rotated.keys("bee", 0)
    for announced in (rotated, left):
        expelled = amend(hub, announced, kind="expel", member="bee", step=3)
        assert [" ".join(expelled.roster(s)) for s in (2, 3, 5)] == [
            "ant bee cat",
            *["ant cat"] * 2,
        ]
        assert expelled.keys("bee", 3) == []
        back = amend(hub, expelled, kind="join", member="bee", step=5, key=new, publish="all")
        assert back.keys("bee", 3) == back.keys("bee", 5) == [new]
        other = amend(hub, announced, kind="rotate", member="bee", step=0, key=new)
        assert other.keys("bee", 0) == [new] and other.roster(4)["bee"].key == new
        assert ("bee" in other.roster(5)) is (announced is rotated)  # it still leaves


@pytest.mark.parametrize(
    ("by", "fields"),
    [
        ("ant", {"kind": "expel", "member": "bee"}),
        ("ant", {"kind": "leave", "member": "bee", "signer": "member"}),
        ("bee", {"kind": "rotate", "member": "ant", "key": "ab" * 32, "signer": "member"}),
        ("founder", {"kind": "leave", "member": "dog"}),
        ("founder", {"kind": "join", "member": "ant", "key": "ab" * 32, "publish": "all"}),
        ("founder", {"kind": "join", "member": "dog", "key": "ab" * 32}),
        ("founder", {"kind": "rotate", "member": "ant"}),
        ("founder", {"kind": "dance", "member": "ant"}),
    ],
)
def test_amendments_that_are_refused(hub: HubProcess, by: str, fields: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        amend(hub, hub.team, by, step=1, **fields)


def test_a_member_joins_and_one_leaves_by_command(make_hub: MakeHub) -> None:
    """While the team runs; closed steps cannot be amended."""
    hub = make_hub()
    run = CliRunner()

    def command(*words: str, key: str = "founder.key") -> str:
        words = ("charter", "amend", hub.url, *words, "--key", str(hub.folder / key))
        result = run.invoke(app, words)
        return result.stdout + result.stderr

    made = run.invoke(app, ["key", "new", str(hub.folder / "dan.key")])
    hub.keys["dan"] = Key.read(hub.folder / "dan.key")
    assert made.stdout.strip() == hub.keys["dan"].public
    assert run.invoke(app, ["key", "show", str(hub.folder / "dan.key")]).stdout == made.stdout
    clients = {name: hub.client(name) for name in NAMES}
    for client in clients.values():
        client.put(hub.batch(client, 0))
    join = ("join", "dan", "--member-key", hub.keys["dan"].public)
    assert "step 1 is closed" in command(*join, "--step", "1")
    assert "the team has steps 1 to 6" in command(*join, "--step", "7")
    rotate = ("rotate", "cat", "--member-key", Key.new().public, "--step")
    assert len(command(*rotate, "6", key="cat.key").strip()) == 64
    rotate = ("rotate", "cat", "--member-key", Key.new().public, "--step")
    assert "has announced a new key already" in command(*rotate, "5", key="cat.key")
    assert "only the founder can sign join" in command(*join, "--step", "2", key="ant.key")
    assert len(command(*join, "--step", "2").strip()) == 64
    assert len(command("leave", "bee", "--step", "2", key="bee.key").strip()) == 64
    bee = clients.pop("bee")
    bee.snapshot(0)  # a member that left still reads its last step
    with pytest.raises(HubRefused):
        bee.put(hub.batch(bee, 1))
    hub.kill()
    hub.start()
    clients["dan"] = hub.client("dan")
    for client in clients.values():
        client.put(hub.batch(client, 1))
    (found,) = {client.snapshot(1).encode() for client in clients.values()}
    assert sorted(Signed.decode("snapshot", found).content["batches"]) == ["ant", "cat", "dan"]


def test_signing_by_command(tmp_path: Path) -> None:
    run = CliRunner()
    data = tmp_path / "train.jsonl"
    data.write_text("{}")
    hub = HubProcess(tmp_path, task={"kind": "jsonl", "train": "train.jsonl"})
    (tmp_path / "charter.json").unlink()
    words = ["charter", "sign", str(hub.charter), "--key"]
    unsigned = run.invoke(app, ["hub", str(hub.charter)])
    assert unsigned.exit_code == 2 and "not signed" in unsigned.stderr
    wrong = run.invoke(app, [*words, str(tmp_path / "ant.key")])
    assert wrong.exit_code == 2 and "is not the key given" in wrong.stderr
    assert run.invoke(app, [*words, str(tmp_path / "founder.key")]).stdout.strip() == hub.team.id
    data.write_text("{ }")
    options = ["--key", str(tmp_path / "hub.key"), "--data", str(tmp_path / "data")]
    changed = run.invoke(app, ["hub", str(hub.charter), *options])
    assert f"{data} is not the file that the charter was signed with" in changed.stderr


@pytest.mark.parametrize("package", ["cryptography", "sqlalchemy"])
def test_a_missing_extra_is_one_sentence(tmp_path: Path, package: str) -> None:
    hub = HubProcess(tmp_path)
    words = ["key", "new", "x"] if package == "cryptography" else ["hub", str(hub.charter)]
    code = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = {words!r}; import hacrl.cli; "
    )
    command = [sys.executable, "-c", code + "hacrl.cli.main()"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'hacrl[owners]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_hub_that_cannot_start_and_one_that_is_stopped(make_hub: MakeHub) -> None:
    hub = make_hub()
    run = CliRunner()
    words = ["hub", str(hub.charter), "--key", str(hub.folder / "hub.key"), "--data"]
    data, other = str(hub.folder / "data"), str(hub.folder / "other")
    listen = ["--listen", f"127.0.0.1:{hub.port}"]
    assert "another hub uses" in run.invoke(app, [*words, data]).stderr
    assert "; choose another" in run.invoke(app, [*words, other, *listen]).stderr
    assert "give HOST:PORT" in run.invoke(app, [*words, other, "--listen", "x"]).stderr
    assert (
        "give sqlite:///FILE"
        in run.invoke(app, [*words, other, "--database", "mysql://x/y"]).stderr
    )
    nowhere = ["--database", "postgresql://127.0.0.1:1/x"]
    assert "cannot open it" in run.invoke(app, [*words, other, *nowhere]).stderr
    words[3] = str(hub.folder / "ant.key")
    assert "give the hub's key" in run.invoke(app, [*words, other]).stderr
    assert hub.process is not None
    hub.process.terminate()
    assert hub.process.wait(20) in (143, -signal.SIGTERM)
    assert "Traceback" not in (hub.folder / "hub.log").read_text()
