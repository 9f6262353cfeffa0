"""Who may ask the server, and what bad input answers. No browser and no training."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest
from cli_helpers import refused, team
from starlette.testclient import TestClient

from hacrl.config import parse_config
from hacrl.store.rundir import RunDirectory
from hacrl.view.library import Library
from hacrl.view.page import one_file
from hacrl.view.server import host_allowed, make_app
from hacrl.view.source import Source


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with two rows of metrics that no process trains."""
    run = RunDirectory.create(tmp_path / "runs" / "team", parse_config(team(), "team", tmp_path))
    row = {"kind": "train", "step": 0, "reward": 0.5, "rollouts": 16, "peers/used": 0.25}
    run.add_metrics([{**row, "agent": agent} for agent in ("wren", "finch")])
    return run


def client(run: RunDirectory, host: str = "127.0.0.1", token: str = "") -> TestClient:
    app = make_app(Source(Library.open(run.path)), host, token)
    return TestClient(app, base_url="http://127.0.0.1:8720", follow_redirects=False)


@pytest.mark.parametrize(
    ("header", "listening", "allowed"),
    [
        ("127.0.0.1:8720", "127.0.0.1", True),
        ("localhost:8720", "127.0.0.1", True),
        ("[::1]:8720", "::1", True),
        ("evil.example:8720", "127.0.0.1", False),
        ("192.168.0.5:8720", "127.0.0.1", False),
        ("192.168.0.5:8720", "0.0.0.0", True),
        ("evil.example", "0.0.0.0", False),
        ("box.lan:80", "box.lan", True),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("", "127.0.0.1", False),
    ],
)
def test_host_names(header: str, listening: str, allowed: bool) -> None:
    assert host_allowed(header, listening) is allowed


def test_every_answer_has_the_policy_and_foreign_requests_are_refused(run: RunDirectory) -> None:
    with client(run) as asked:
        for path in ("/", "/assets/app.js", "/api/runs", "/api/none", "/nothing"):
            headers = asked.get(path).headers
            assert headers["content-security-policy"].startswith("default-src 'none'")
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
        assert asked.get("/", headers={"host": "evil.example"}).status_code == 421
        assert asked.get("/api/runs", headers={"sec-fetch-site": "cross-site"}).status_code == 403
        assert asked.post("/api/runs").status_code == 405
        for name in ("../../etc/passwd", "..%2Fconfig.toml", "page.py"):
            assert asked.get(f"/assets/{name}").status_code == 404
        answer = asked.get("/api/run", params={"id": "../team"})
        assert (answer.status_code, "no run '../team'" in answer.json()["error"]) == (422, True)


def test_a_token_is_asked_for_and_kept_in_a_cookie(run: RunDirectory) -> None:
    with client(run, "0.0.0.0", "right") as asked:
        assert asked.get("/").status_code == asked.get("/?token=wrong").status_code == 401
        assert (
            asked.get("/api/runs?token=right").status_code == 401
        )  # only the page sets the cookie
        bearer = {"authorization": "Bearer right"}
        assert asked.get("/api/runs", headers=bearer).status_code == 200
        answer = asked.get("/?token=right")
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert (
            "HttpOnly" in answer.headers["set-cookie"] and "strict" in answer.headers["set-cookie"]
        )
        assert asked.get("/api/runs").status_code == 200


def test_new_rows_are_read_once_and_a_rewound_file_again(run: RunDirectory) -> None:
    with client(run) as asked:
        found = asked.get("/api/run", params={"id": "team"}).json()
        assert found["x"] == [1] and found["series"]["reward"] == {"wren": [0.5], "finch": [0.5]}
        row = {"kind": "train", "agent": "wren", "rollouts": 16}
        run.add_metrics([{**row, "step": 1, "reward": 0.75}])
        found = asked.get("/api/run", params={"id": "team"}).json()
        assert found["x"] == [1, 2] and found["series"]["reward"]["wren"] == [0.5, 0.75]
        assert found["series"]["reward"]["finch"] == [0.5, None]
        run.rewind(1)
        assert asked.get("/api/run", params={"id": "team"}).json()["x"] == [1]


def test_embedded_data_cannot_leave_its_element() -> None:
    hostile = "</script><script>alert(1)</script><!--\u2028"
    html = one_file("</title><script>", {"answers": {"x": hostile}})
    assert html.count("</script>") == 2 and "alert(1)</script>" not in html
    start = html.index('id="data">') + len('id="data">')
    assert json.loads(html[start : html.index("</script>", start)]) == {"answers": {"x": hostile}}


# ---------------------------------------------------------------- bad input: one sentence, exit 2


def test_what_is_not_a_run(tmp_path: Path, run: RunDirectory) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "file.txt").write_text("x")
    assert "is not a folder" in refused("view", tmp_path / "none")
    assert "holds no run and no suite" in refused("view", tmp_path / "empty")
    (run.path / "environment.json").unlink()
    assert "was written by hacrl 0.1.x" in refused("view", run.path)


def test_a_half_written_run(run: RunDirectory) -> None:
    metrics = run.metrics_path.read_bytes()
    run.metrics_path.write_bytes(metrics[: metrics.index(b"\n") + 1])
    assert "the end is missing: 1 of 2 rows" in refused("view", run.path)
    run.metrics_path.write_bytes(metrics.replace(b"0.5", b"0.9", 1))
    assert "line 1" in refused("view", run.path)
    run.metrics_path.write_bytes(metrics)
    run.config_path.write_text("steps = ")
    assert "config.toml" in refused("view", run.path)


def test_a_taken_port_and_a_bad_host(run: RunDirectory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = refused("view", run.path, "--port", port, "--no-browser")
        assert f"--port {port}: Address already in use" in message
    message = refused("view", run.path, "--host", "203.0.113.1", "--port", "0", "--no-browser")
    assert "--host 203.0.113.1" in message


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_no_permission(run: RunDirectory) -> None:
    run.path.parent.chmod(0o700)
    os.seteuid(65534)
    try:
        message = refused("view", run.path.parent)
    finally:
        os.seteuid(0)
    assert "permission denied" in message


def test_a_missing_extra(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    monkeypatch.delitem(sys.modules, "hacrl.view.server", raising=False)
    assert "pip install 'hacrl[view]'" in refused("view", run.path)
