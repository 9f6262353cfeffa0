"""Starts the hub of a team."""

import fcntl
import socket
from collections.abc import Callable
from pathlib import Path

from hacrl.errors import UserError
from hacrl.owners.charter import TeamRecord, load_charter
from hacrl.owners.signing import Key, sha256

try:
    import uvicorn

    from hacrl.owners.hub.app import make_app
    from hacrl.owners.hub.records import connect
    from hacrl.owners.hub.store import HubStore
except ImportError as error:
    raise UserError(
        f"`hacrl hub` needs more packages: pip install 'hacrl[owners]' ({error})"
    ) from error


def serve(
    charter: Path,
    database: str | None,
    listen: str,
    key: Path,
    data: Path,
    keep_steps: int | None,
    certificate: tuple[Path | None, Path | None],
    note: Callable[[str], None],
) -> None:
    """Run the hub until it is stopped."""
    team = load_charter(charter)
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--listen = {listen!r}: give HOST:PORT, e.g. 127.0.0.1:8700")
    data.mkdir(parents=True, exist_ok=True)
    with open(data / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"--data: another hub uses {data}; stop it first") from error
        url = database or f"sqlite:///{(data / 'hub.db').resolve()}"
        store = HubStore(team, Key.read(key), connect(url), data, keep_steps)
        files = _data_files(team, charter.parent, note)
        config = uvicorn.Config(
            make_app(store, files, note),
            log_level="warning",
            ssl_certfile=certificate[0],
            ssl_keyfile=certificate[1],
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            limit_concurrency=1000,
        )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host.strip("[]"), int(port)), family=family)
        except OSError as error:
            raise UserError(f"--listen = {listen}: {error.strerror}; choose another") from error
        with listener:
            note(f"team {team.charter.name}, id {team.id}")
            note(f"hub listens on {listen}; step {store.open + 1} of {team.charter.steps} is open")
            uvicorn.Server(config).run(sockets=[listener])


def _data_files(team: TeamRecord, folder: Path, note: Callable[[str], None]) -> dict[str, Path]:
    """The data files of the charter that exist in its folder, after a check of their sha256."""
    found = {}
    for name, digest in team.data.items():
        path = folder / name
        if not path.is_file():
            note(f"{path} does not exist: members need their own copy of {name}")
        elif sha256(path.read_bytes()) != digest:
            raise UserError(f"{path} is not the file that the charter was signed with; restore it")
        else:
            found[name] = path
    return found
