"""Operations with real processes: new keys, other versions, damaged files, a hub that is away."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import hacrl as command
from hub_process import HubProcess
from member_process import TEAM, MemberProcess, difference, mine, one_process, until

import hacrl
from hacrl.owners.signing import Key
from hacrl.store.files import steps_in

pytestmark = pytest.mark.hub
MakeHub = Callable[..., HubProcess]
MakeMember = Callable[..., MemberProcess]
NEXT_VERSION = """
import sys
import hacrl.owners.signing as signing

signing.PROTOCOL, signing.SUPPORTED = 2, (2, 1)
"""


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
