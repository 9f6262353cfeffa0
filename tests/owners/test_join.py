"""Members as processes: `hacrl join` trains what the same team trains in one process, with new keys,
other versions, damaged files and a hub that is away, too."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import tomli_w
from cli_helpers import hacrl as command
from cli_helpers import refused
from hub_clients import MakeHub
from hub_process import HubProcess
from member_process import TEAM, MemberProcess, difference, mine, one_process, until

import hacrl
from hacrl.owners.client import chain_head
from hacrl.owners.signing import Key
from hacrl.store.files import steps_in
from hacrl.store.pool import Pool

pytestmark = pytest.mark.hub
MakeMember = Callable[..., MemberProcess]
NO_EVALUATION = {"evaluation": {"problems": 0}, "checkpoint": {"every": 1}}
NEXT_VERSION = """
import sys
import hacrl.owners.signing as signing

signing.PROTOCOL, signing.SUPPORTED = 2, (2, 1)
"""


def test_members_train_what_the_team_in_one_process_trains(
    make_hub: MakeHub, members: MakeMember, tmp_path: Path
) -> None:
    """Three levels of publishing with reciprocity; one member is killed and starts again."""
    levels = {"ant": "all", "bee": "successes", "cat": "rewards"}
    hub = make_hub(levels=levels, **TEAM)
    models = {"ant": "wren", "bee": "finch", "cat": "wren-2"}
    team = [members(hub, name, mine(model)) for name, model in models.items()]
    for member in team:
        member.start()
    until(lambda: len(steps_in(team[0].run / "journal" / "ant", ".jsonl")) == 2)
    team[0].kill()
    team[0].start()
    reference = hacrl.train(one_process(team), tmp_path / "one")
    for member in team:
        member.wait()
        assert difference(member.name, member.reader(), reference) == ""
    heads = {chain_head(member.run / "hub") for member in team}
    assert len(heads) == 1 and heads.pop() in team[0].log
    team[1].start()
    team[1].wait()
    assert "All 4 steps are done" in team[1].log
    assert "Continue it with `hacrl join" in refused("resume", team[1].run)


def alone(hub: HubProcess, *options: str, settings: dict[str, Any] | None = None) -> list[Any]:
    """Arguments of `hacrl join` for the only member of a team."""
    file = hub.folder / "mine.toml"
    file.write_text(tomli_w.dumps(settings or mine("wren", **NO_EVALUATION)))
    given = ["--as", "ant", "--key", hub.folder / "ant.key", "--run", hub.folder / "run"]
    return ["join", hub.url, file, *given, "--patience", "0", *options]


def test_data_comes_from_the_hub_or_is_checked(make_hub: MakeHub, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"question": f"{i}+{i}", "answer": 2 * i}) + "\n" for i in range(60))
    (tmp_path / "team0").mkdir()
    (tmp_path / "team0" / "train.jsonl").write_text(rows)
    task = {"kind": "jsonl", "train": "train.jsonl"}
    hub = make_hub(**{**TEAM, "steps": 1}, names=("ant",), task=task)
    own = tmp_path / "owner"
    own.mkdir()
    (own / "train.jsonl").write_text("other\n")
    arguments = alone(hub)
    mine_file = (own / "mine.toml").write_text(arguments[2].read_text()) and own / "mine.toml"
    arguments[2] = mine_file
    assert "but the charter has" in refused(*arguments)
    assert not (hub.folder / "run").exists()
    (own / "train.jsonl").unlink()
    assert command(*arguments)[0] == 0
    assert (hub.folder / "run" / "data" / "train.jsonl").read_text() == rows


def test_mistakes_are_one_sentence_with_a_way_out(
    make_hub: MakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = make_hub(**{**TEAM, "steps": 1}, names=("ant", "bee"))
    run = hub.folder / "run"

    def message(*options: Any, **tables: Any) -> str:
        settings = mine("wren", **{**NO_EVALUATION, **tables})
        text = refused(*alone(hub, *options, settings=settings))
        assert not run.exists() and text.count("\n") <= 2
        return text

    assert "is not the key of 'ant'" in message("--key", hub.folder / "bee.key")
    assert "the members are ant, bee" in message("--as", "dog")
    assert "is the hub of the team" in message("--team", "0" * 64)
    assert "steps comes from the charter; remove it" in message(steps=3)
    assert "trust.reciprocity comes from the charter" in message(trust={"reciprocity": True})
    assert "verifier.kind comes from the charter" in message(verifier={"kind": "exact"})
    assert "but the charter has 'all'" in message(agent={"publish": "rewards"})
    assert "'dog' is not one of ant, bee" in message(trust={"trusted": ["dog"]})
    assert "give a table [verifier]" in message("verifier=3")
    assert "needs another algorithm" in message(algorithm={"name": "gspo-dynamic"})
    assert "runs in one process" in message(runtime={"kind": "ray"})
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr("hacrl.owners.connection.time.time", lambda: real() - 300)
        assert "set the clock" in message()
    hub.kill()
    assert "Nothing is lost: start again when the hub is back" in message()


def test_another_version_of_the_verifier(make_hub: MakeHub) -> None:
    hub = make_hub(**TEAM, names=("ant",), verifier={"kind": "number", "version": "7"})
    assert "the team judges with number/7, but this hacrl has" in refused(*alone(hub))
    assert not (hub.folder / "run").exists()


def test_a_lost_run_directory(make_hub: MakeHub, members: MakeMember) -> None:
    """The hub has batches that the new directory does not have: nothing is signed twice. With a new key
    the member goes on at a later step."""
    hub = make_hub(**{**TEAM, "steps": 3, "deadline": 1.0}, names=("ant", "bee"))
    bee = hub.client("bee")
    ant = members(hub, "ant", mine("wren", **NO_EVALUATION))
    ant.start()
    until(lambda: hub.metrics()["hacrl_hub_open_step"] >= 1)
    ant.kill()
    ant.run.rename(ant.folder / "lost")
    ant.start()
    assert ant.wait(expect=2) and "ask the founder for an amendment (rotate)" in ant.log
    open_step = bee.state()["newest"] or int(hub.metrics()["hacrl_hub_open_step"])
    code, key, _ = command("key", "new", ant.folder / "new.key")
    amend = ["charter", "amend", hub.url, "rotate", "ant", "--member-key", key.strip()]
    options = ["--key", hub.folder / "founder.key", "--step"]
    while (code := command(*amend, *options, str(open_step + 1))[0]) and open_step < 3:
        open_step += 1
    assert code == 0
    ant.key = ant.folder / "new.key"
    ant.run = ant.folder / "run-2"
    run = ant.train()
    steps = [row["step"] for row in run.metric_rows("train", "ant")]
    assert steps == list(range(open_step, 3)) and steps
    assert json.loads(hub.client("bee")._send("GET", "/v1/proofs")) == []


def test_a_frozen_member_without_log_probabilities(
    make_hub: MakeHub, members: MakeMember, tmp_path: Path
) -> None:
    """sgt learns from its texts; hacpo needs log-probabilities and counts what it leaves out."""
    settings = mine("wren", **NO_EVALUATION, algorithm={"name": "sgt"})
    hub = make_hub(**{**TEAM, "steps": 2}, names=("ant", "bee", "cat"))
    stored = hacrl.train(
        {**one_process([members(hub, "ant", settings)]), "algorithm": {"name": "gspo"}},
        tmp_path / "stored",
    )
    pool = Pool(stored.pool_path)
    texts = [replace(t, mean_logprob=None) for t in pool.rows()]
    plain = Pool(tmp_path / "plain" / "pool")
    for step in range(2):
        plain.publish(step, "ant", [t for t in texts if t.step == step])
    for name in ("config.toml", "environment.json"):
        (tmp_path / "plain" / name).write_bytes((stored.path / name).read_bytes())
    replayed = {**settings, "agent": {"replay": str(tmp_path / "plain")}}
    team = [
        members(hub, "ant", settings),
        members(hub, "bee", mine("finch", **NO_EVALUATION)),
        members(hub, "cat", replayed),
    ]
    for member in team:
        member.start()
    for member in team:
        member.wait()
    ant, bee = (m.reader().metric_rows("train", m.name) for m in team[:2])
    assert [row["samples/kept/cat"] > 0 for row in ant] == [True, True]
    assert [row["samples/kept/cat"] for row in bee] == [0.0, 0.0]
    assert all(row["samples/drop/no_logprob"] > 0 for row in bee)


def test_a_rotated_key_a_damaged_pool_and_a_hub_that_is_away(
    make_hub: MakeHub, members: MakeMember, tmp_path: Path
) -> None:
    """The old key ends at its step with a sentence; the new one continues the run. The hub is away for a
    while, and a batch of a peer is damaged. The run is that of the team in one process."""
    hub = make_hub(**TEAM, names=("ant", "bee"))
    ant, bee = members(hub, "ant", mine("wren")), members(hub, "bee", mine("finch"))
    Key.new().write(ant.folder / "new.key")
    new = Key.read(ant.folder / "new.key").public
    amend = ["charter", "amend", hub.url, "rotate", "ant", "--member-key", new, "--step", "3"]
    assert command(*amend, "--key", ant.key)[0] == 0  # a member signs its own
    for member in (ant, bee):
        member.start()
    reference = hacrl.train(one_process([ant, bee]), tmp_path / "one")
    assert ant.wait(expect=2) == 2
    assert "Check --as and --key; a rotated key counts from its step on" in ant.log
    hub.kill()
    batch = next((ant.run / "pool" / "step-000000" / "bee").iterdir())
    batch.write_bytes(b"damaged")
    ant.key = ant.folder / "new.key"
    ant.start()
    until(lambda: "waiting for the hub" in ant.log)
    hub.start()
    for member in (ant, bee):
        member.wait()
        assert difference(member.name, member.reader(), reference) == ""
    assert steps_in(ant.run / "hub" / "envelopes", ".json") == [0, 1, 2, 3]


def test_one_protocol_version_apart(make_hub: MakeHub, tmp_path: Path) -> None:
    """A hub and a member of the next version speak the version of the charter. A charter of the next
    version is refused by this one with a sentence."""
    hub = make_hub(start=False, names=("ant", "bee"))
    program = NEXT_VERSION + "from hacrl.cli import app\napp()"
    hub.program = ["-c", program]
    hub.start()
    ant = hub.client("ant")
    ant.put(hub.batch(ant, 0))
    script = NEXT_VERSION + (
        "from hub_process import rows\n"
        "from pathlib import Path\n"
        "from hacrl.owners.batch import Batch\n"
        "from hacrl.owners.client import Connection, HubClient\n"
        "url, key, folder = sys.argv[1:]\n"
        "bee = HubClient(Connection(url), 'bee', signing.Key.read(Path(key)), Path(folder))\n"
        "bee.put(Batch.build(bee.key, bee.team.id, 'bee', 0, rows('bee', 0), 'all', None))\n"
        "bee.snapshot(0)\n"
    )
    arguments = [hub.url, str(hub.folder / "bee.key"), str(tmp_path / "bee")]
    path = {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, env=path)
    assert set(ant.snapshot(0).content["batches"]) == {"ant", "bee"}
    assert ant.envelopes(0)[1].envelope.agent == "bee"
    sign = ["charter", "sign", str(hub.charter), "--key", str(hub.folder / "founder.key")]
    (hub.folder / "charter.json").unlink()
    subprocess.run([sys.executable, "-c", program, *sign], check=True, capture_output=True)
    code, _, message = command("hub", hub.charter, "--key", hub.folder / "hub.key")
    assert code == 2 and "is of protocol version 2, but this hacrl knows 1" in message


def test_a_member_comes_back_with_another_level(make_hub: MakeHub) -> None:
    """It publishes rewards in the first two steps, then it leaves and joins again with all replies. The
    amendments are there before the first step."""
    hub = make_hub(names=("ant",), levels={"ant": "rewards"}, **TEAM)
    team, back = hub.team, {"kind": "join", "key": hub.keys["ant"].public, "publish": "all"}
    for change in ({"kind": "leave"}, back):
        signed = team.amend(hub.keys["founder"], member="ant", step=2, **change)
        team = team.amended(signed)
        httpx.post(f"{hub.url}/v1/amendments", content=signed.encode()).raise_for_status()
    code, _, err = command(*alone(hub))
    assert code == 0, err
    files = sorted((hub.folder / "run" / "hub" / "envelopes").iterdir())
    published = [json.loads(file.read_text())["content"]["published"] for file in files]
    assert published == [0, 0, 24, 24]
