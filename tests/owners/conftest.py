"""Databases and hubs for the tests of teams across owners."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_clients import MakeHub
from hub_process import HubProcess, postgres_server
from member_process import MemberProcess


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """A PostgreSQL server; the function makes a new database and returns its URL."""
    with postgres_server(tmp_path_factory.mktemp("postgres")) as database:
        yield database


@pytest.fixture
def make_hub(tmp_path: Path) -> Iterator[MakeHub]:
    """Makes a hub on SQLite, or on the database that is given, and starts it."""
    made: list[HubProcess] = []

    def make(start: bool = True, database: str | None = None, **charter: Any) -> HubProcess:
        folder = tmp_path / f"team{len(made)}"
        folder.mkdir(exist_ok=True)
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


@pytest.fixture
def members() -> Iterator[Callable[..., MemberProcess]]:
    """Makes members, which are killed at the end."""
    made: list[MemberProcess] = []

    def make(*args: Any) -> MemberProcess:
        made.append(MemberProcess(*args))
        return made[-1]

    yield make
    for member in made:
        member.kill()
