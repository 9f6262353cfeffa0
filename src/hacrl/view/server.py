"""The web server of `hacrl view`: addresses, access and events. It answers GET and HEAD only."""

import asyncio
import hmac
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from typing import Any

from hacrl.errors import UserError, explain
from hacrl.store.files import to_json
from hacrl.view.hub import HubSource
from hacrl.view.page import ASSETS, POLICY, server_page
from hacrl.view.source import Source

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as error:
    raise UserError(
        f"`hacrl view` needs more packages: pip install 'hacrl[view]' ({error})"
    ) from error

COOKIE = "hacrl-view"
POLL = 0.5  # seconds between two looks at the files of a run that is open in a page
LOCAL = ("localhost", "127.0.0.1", "::1")
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


class Guard:
    """Refuses requests from other sites, without the token where one is needed, and else under a foreign
    Host name (DNS rebinding); adds HEADERS to every answer."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *extra]
            await send(message)

        answer = self._refusal(Request(scope)) or self.app
        await answer(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        own = request.headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        if not own and request.url.path != "/":
            return PlainTextResponse("requests from other sites are refused", 403)
        if not self.token:
            host = re.sub(r":\d+$", "", request.headers.get("host", ""))
            if host.strip("[]") in LOCAL:
                return None
            return PlainTextResponse("unknown Host name; use the address that was printed", 421)
        given = request.query_params.get("token", "")
        if request.url.path == "/" and self._right(given):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, given, httponly=True, samesite="strict")
            return answer
        if self._right(request.cookies.get(COOKIE, "")):
            return None
        return PlainTextResponse("open the address with ?token=... that `hacrl view` printed", 401)

    def _right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


def make_app(source: Source | HubSource, token: str = "") -> ASGIApp:
    """The application."""

    async def page(_: Request) -> Response:
        return Response(server_page(), media_type="text/html")

    async def answer(request: Request) -> Response:
        """/api/NAME?...: the data of a view."""
        try:
            call = source.calls.get(request.path_params["name"])
            if call is None:
                return PlainTextResponse("not found", 404)
            value = await run_in_threadpool(call, dict(request.query_params))
        except Exception as error:
            if (message := explain(error)) is None:
                raise
            return _json({"error": message}, 422)
        return _json(value)

    async def events(request: Request) -> Response:
        stream = _changes(source, dict(request.query_params), request.is_disconnected)
        return StreamingResponse(stream, media_type="text/event-stream")

    routes = [
        Route("/", page),
        Mount("/assets", StaticFiles(directory=str(ASSETS))),
        Route("/api/events", events),
        Route("/api/{name}", answer),
    ]
    return Guard(Starlette(routes=routes), token)


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


async def _changes(
    source: Source | HubSource, query: dict[str, str], gone: Callable[[], Any]
) -> AsyncIterator[str]:
    """Server-sent events: one now, and one whenever the watched thing changes."""
    last = None
    silent = 0.0
    while not await gone():
        try:
            now = to_json(await run_in_threadpool(source.pulse, query))
        except Exception as error:
            now = to_json({"error": explain(error) or "the run cannot be read"})
        if now != last or silent >= 15:  # a comment keeps the connection open
            yield f"data: {now}\n\n" if now != last else ": still here\n\n"
            last, silent = now, 0.0
        await asyncio.sleep(POLL)
        silent += POLL


def serve(
    source: Source | HubSource, host: str, port: int, token: str, ready: Callable[[str], None]
) -> None:
    """Run the server until it is stopped. `ready` is called with the address to open. An address that is
    not of this machine only gets a token."""
    host = host.strip("[]")
    token = token or ("" if host in LOCAL else secrets.token_urlsafe(24))
    with closing(_listening(host, port)) as listener:
        port = listener.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        config = uvicorn.Config(
            make_app(source, token),
            log_level="error",
            timeout_graceful_shutdown=1,
            server_header=False,
            limit_concurrency=200,
        )
        ready(f"http://{shown}:{port}/" + (f"?token={token}" if token else ""))
        uvicorn.Server(config).run(sockets=[listener])


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise UserError(
            f"--host {host} --port {port}: {reason}; choose another, e.g. --port 0 for a free port"
        ) from error
