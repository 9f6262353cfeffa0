"""Commands for teams across owners: key, charter, hub, join."""

from pathlib import Path
from typing import Annotated

import typer

from hacrl.cli.terminal import SETTINGS, AcceptChanged, Overrides, errors_as_messages, note
from hacrl.errors import UserError

commands = typer.Typer()
keys = typer.Typer(
    help="Make or show the key of a member, a founder or a hub.", no_args_is_help=True
)
charters = typer.Typer(
    help="Sign the charter of a team across owners, or change its members.", no_args_is_help=True
)
commands.add_typer(keys, name="key")
commands.add_typer(charters, name="charter")

CharterFile = Annotated[Path, typer.Argument(metavar="CHARTER", help="Charter of the team (TOML).")]
TeamId = Annotated[
    str | None, typer.Option(help="Expected team id; a hub of another team is an error.")
]
KeyFile = Annotated[
    Path, typer.Option("--key", help="Your private key, written by `hacrl key new`.")
]
PrivateKey = Annotated[Path, typer.Argument(metavar="FILE", help="File of the private key.")]


@keys.command("new")
def key_new(file: PrivateKey) -> None:
    """Write a new private key to FILE and print the public key."""
    with errors_as_messages(trust_code=False):
        from hacrl.owners.signing import Key

        key = Key.new()
        key.write(file)
        print(key.public)


@keys.command("show")
def key_show(file: PrivateKey) -> None:
    """Print the public key that belongs to the private key in FILE."""
    with errors_as_messages(trust_code=False):
        from hacrl.owners.signing import Key

        print(Key.read(file).public)


@charters.command("sign")
def charter_sign(charter: CharterFile, key: KeyFile) -> None:
    """Sign CHARTER with the founder's key, write charter.json and print the team id."""
    with errors_as_messages(trust_code=False):
        from hacrl.owners.charter import sign_charter
        from hacrl.owners.signing import Key
        from hacrl.store.files import write_atomic

        team = sign_charter(charter, Key.read(key))
        write_atomic(charter.with_suffix(".json"), team.signed.encode() + b"\n")
        print(team.id)


@charters.command("amend")
def charter_amend(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the hub.")],
    kind: Annotated[str, typer.Argument(metavar="KIND", help="join, leave, expel or rotate.")],
    member: Annotated[str, typer.Argument(metavar="NAME", help="Name of the member.")],
    step: Annotated[
        int, typer.Option(min=1, help="First step for which the amendment is valid, from 1.")
    ],
    key: KeyFile,
    member_key: Annotated[
        str | None, typer.Option(help="For join and rotate: the member's new public key.")
    ] = None,
    publish: Annotated[
        str | None, typer.Option(help="For join: all (default), successes, rewards or nothing.")
    ] = None,
    team: TeamId = None,
) -> None:
    """Sign a change of the members (an amendment) and send it to the hub.

    The founder may sign every kind; a member may sign its own leave and rotate.
    """
    with errors_as_messages(trust_code=False):
        from hacrl.owners.client import fetch_team
        from hacrl.owners.connection import Connection
        from hacrl.owners.signing import Key

        signer = Key.read(key)
        connection = Connection(url)
        record = fetch_team(connection, team)
        signed = record.amend(
            signer,
            kind=kind,
            member=member,
            step=step - 1,
            key=member_key,
            publish=publish or ("all" if kind == "join" else None),
            signer="founder" if signer.public == record.charter.founder else "member",
        )
        record.amended(signed)  # an error here is clearer than the hub's
        connection.send("POST", "/v1/amendments", signed.encode())
        print(signed.digest)


@commands.command(context_settings=SETTINGS)
def join(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the hub.")],
    mine: Annotated[
        Path,
        typer.Argument(metavar="MINE", help="Your agent, algorithm and trust settings (TOML)."),
    ],
    name: Annotated[str, typer.Option("--as", help="Your name in the charter.")],
    key: KeyFile,
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Run directory (default: runs/TEAM-NAME).")
    ] = None,
    team: TeamId = None,
    certificate: Annotated[
        Path | None, typer.Option(help="PEM file with the hub's self-signed certificate.")
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a hub that does not answer.")
    ] = 3600.0,
    accept_changed: AcceptChanged = False,
) -> None:
    """Train your agent in the team of the hub at URL.

    Run the same command again to continue.
    """
    with errors_as_messages():
        from hacrl.owners.join import Membership
        from hacrl.owners.signing import Key

        member = Membership.find(url, name, Key.read(key), note, team, patience, certificate)
        place = run or Path("runs") / f"{member.team.charter.name}-{name}"
        config = member.config(mine, place, overrides or [])
        print(f"team {member.team.charter.name}, id {member.team.id}", flush=True)
    with errors_as_messages(place, again="the same command"):
        from hacrl import runs
        from hacrl.cli.progress import ProgressLine
        from hacrl.cli.training import print_summary
        from hacrl.owners.client import chain_head
        from hacrl.study.diagnostics.check import HOOKS

        with ProgressLine() as progress:
            runs.join(
                config,
                place,
                lambda directory, tell: member.pool(directory.path, mine.parent, tell),
                progress,
                HOOKS,
                accept_changed,
            )
        print_summary(place)
        print(chain_head(place / "hub"))


@commands.command()
def hub(
    charter: CharterFile,
    key: KeyFile = Path("hub.key"),
    database: Annotated[
        str | None,
        typer.Option(
            envvar="HACRL_HUB_DATABASE",
            help="postgresql://... or sqlite:///FILE (default: DATA/hub.db).",
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on.")
    ] = "127.0.0.1:8700",
    data: Annotated[Path, typer.Option(help="Folder for batches.")] = Path("hub-data"),
    keep_steps: Annotated[
        int | None, typer.Option(min=1, help="Keep the batches of the last N steps (default: all).")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="PEM file with the TLS certificate chain.")
    ] = None,
    certificate_key: Annotated[
        Path | None, typer.Option(help="PEM file with the key of the TLS certificate.")
    ] = None,
) -> None:
    """Run the hub (server) of a team across owners.

    It runs until Ctrl-C or SIGTERM.
    """
    with errors_as_messages(trust_code=False):
        if (certificate is None) != (certificate_key is None):
            raise UserError("give both --certificate and --certificate-key, or neither")
        from hacrl.owners.hub.server import serve

        tls = (certificate, certificate_key)
        serve(charter, database, listen, key, data, keep_steps, tls, note)
