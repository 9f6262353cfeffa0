"""Who may ask the server, and what bad input answers. No browser and no training."""

import json
import os
import socket
from pathlib import Path

import pytest
from cli_helpers import refused, team
from hub_process import free_port
from starlette.testclient import TestClient

from hacrl.config import parse_config
from hacrl.store.rundir import RunDirectory
from hacrl.view.page import one_file
from hacrl.view.server import make_app
from hacrl.view.source import Source


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with two rows of metrics that no process trains."""
    run = RunDirectory.create(tmp_path / "runs" / "team", parse_config(team(), "team", tmp_path))
    run.pool_path.mkdir()
    row = {"kind": "train", "step": 0, "reward": 0.5, "rollouts": 16, "peers/used": 0.25}
    run.add_metrics([{**row, "agent": agent} for agent in ("wren", "finch")])
    return run


def client(run: RunDirectory, token: str = "") -> TestClient:
    app = make_app(Source(run.path), token)
    return TestClient(app, base_url="http://127.0.0.1:8720", follow_redirects=False)


def test_every_answer_has_the_policy_and_foreign_requests_are_refused(run: RunDirectory) -> None:
    with client(run) as asked:
        for path in ("/", "/assets/app.js", "/api/runs", "/api/none", "/nothing"):
            headers = asked.get(path).headers
            assert headers["content-security-policy"].startswith("default-src 'none'")
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
        for host, status in (
            ("localhost:8720", 200),
            ("[::1]:8720", 200),
            ("evil.example:8720", 421),
            ("192.168.0.5:8720", 421),
            ("127.0.0.1.evil.example", 421),
            ("", 421),
        ):
            assert asked.get("/", headers={"host": host}).status_code == status, host
        assert asked.get("/api/runs", headers={"sec-fetch-site": "cross-site"}).status_code == 403
        assert asked.post("/api/runs").status_code == 405
        for name in ("../../etc/passwd", "..%2Fpage.py", "page.py"):
            assert asked.get(f"/assets/{name}").status_code == 404


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("run?id=../team", "no run '../team'"),
        ("run", "no run ''"),
        ("suite?id=none", "no suite 'none'"),
        ("problem?id=team", "step 0 has no problem ''"),
        ("problem?id=team&step=9&problem=x", "step 9 has no problem 'x'"),
        ("rollouts?id=team&step=-1", "step = '-1' is not a number"),
        ("rollouts?id=team&used=used&learner=owl", "'owl' is not a learner"),
    ],
)
def test_a_wrong_link_is_answered_with_one_sentence(
    run: RunDirectory, address: str, message: str
) -> None:
    with client(run) as asked:
        answer = asked.get(f"/api/{address}")
        assert (answer.status_code, message in answer.json()["error"]) == (422, True), answer.text


def test_a_token_is_asked_for_and_kept_in_a_cookie(run: RunDirectory) -> None:
    with client(run, "right") as asked:
        assert asked.get("/").status_code == asked.get("/?token=wrong").status_code == 401
        assert (
            asked.get("/api/runs?token=right").status_code == 401
        )  # only the page sets the cookie
        answer = asked.get("/?token=right")
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "strict" in cookie
        assert asked.get("/api/runs").status_code == 200


def test_new_rows_are_read_once_and_a_rewound_file_again(run: RunDirectory) -> None:
    with client(run) as asked:
        found = asked.get("/api/run", params={"id": "team"}).json()
        assert found["x"] == [1] and found["series"]["reward"] == {"wren": [0.5], "finch": [0.5]}
        row = {"kind": "train", "agent": "wren", "rollouts": 16}
        run.add_metrics([{**row, "step": 1, "reward": 0.75, "diagnostics/gain/finch": 0.1}])
        found = asked.get("/api/run", params={"id": "team"}).json()
        assert found["x"] == [1, 2] and found["series"]["reward"]["wren"] == [0.5, 0.75]
        assert found["series"]["reward"]["finch"] == [0.5, None]
        run.add_metrics([{**row, "step": step, "empty": None} for step in (2, 3, 4)])
        metrics = asked.get("/api/run", params={"id": "team"}).json()["metrics"]
        assert "diagnostics/gain/finch" in metrics and "empty" not in metrics
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
    assert "is not a folder" in refused("view", tmp_path / "none")
    assert "holds no run and no suite" in refused("view", tmp_path / "empty")
    assert "the hub does not answer" in refused("view", f"http://127.0.0.1:{free_port()}")
    assert "--export needs one run" in refused("view", run.path.parent, "--export", "x.html")
    metrics = run.metrics_path.read_bytes()
    run.metrics_path.write_bytes(metrics[: metrics.index(b"\n") + 1])
    assert "the end is missing: 1 of 2 rows" in refused("view", run.path)
    run.metrics_path.write_bytes(metrics)
    run.config_path.write_text("steps = ")
    assert "config.toml" in refused("view", run.path)
    (run.path / "environment.json").unlink()
    assert "was written by hacrl 0.1.x" in refused("view", run.path)


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
