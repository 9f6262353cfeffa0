"""The endpoints of the hub.

    GET  /v1/charter                          the signed charter                        anyone
    GET  /v1/amendments                       the chain of amendments                   anyone
    POST /v1/amendments                       append one (its own signature counts)     anyone
    GET  /v1/state                            open step, who has arrived, own newest    members
    PUT  /v1/steps/{step}/batch               publish                                   members
    PUT  /v1/steps/{step}/skip                skip the step                             members
    GET  /v1/steps/{step}/snapshot?wait=S     the snapshot, waiting up to S seconds     members
    GET  /v1/steps/{step}/envelopes           envelopes of the step, also late ones     members
    GET  /v1/steps/{step}/parts/{digest}      outcomes or texts, as gzip                members
    GET  /v1/data/{name}                      a data file of the task                   members
    GET  /v1/proofs                           recorded equivocations                    members
    GET  /health, /metrics                                                              anyone

A refusal is {"error": CODE, "message": SENTENCE, "time": TIME OF THE HUB}.
"""

import asyncio
import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import ClientDisconnect

from hacrl.errors import first_line
from hacrl.owners.batch import read_layout
from hacrl.owners.hub.gate import Gate
from hacrl.owners.hub.store import HubStore, Refused
from hacrl.owners.signing import Malformed, Signed, canonical, is_hex

MAX_LINE = 1 << 18
"""Most bytes of an envelope with the snapshot of a large team, of a skip or of an amendment."""
MAX_WAIT = 60.0
UPLOAD_SECONDS = 600.0
WORKERS = 4  # batches that are unpacked at a time; more would need more memory


class Hub:
    """The server's state outside the store: waiting requests, counts and limits."""

    def __init__(
        self, store: HubStore, data_files: dict[str, Path], note: Callable[[str], None]
    ) -> None:
        self.store, self.data_files, self.note = store, data_files, note
        self.gate = Gate(store.charter.hub, store.clock)
        self.counts: Counter[str] = Counter()
        self.wake = asyncio.Event()  # set, and replaced, whenever a step closes or a batch arrives
        self.working = asyncio.Semaphore(WORKERS)
        self.uploading: set[str] = set()

    def changed(self) -> None:
        self.wake.set()
        self.wake = asyncio.Event()

    async def closer(self) -> None:
        """Close steps at their deadlines."""
        while True:
            wake = self.wake
            try:
                left = await run_in_threadpool(self.store.close_if_due)
            except SQLAlchemyError as error:
                self.note(f"the database does not answer ({first_line(error)}); trying again")
                left = 1.0
            with suppress(TimeoutError):
                async with asyncio.timeout(None if left is None else max(left, 0.0) + 0.01):
                    await wake.wait()

    def member(self, request: Request) -> str:
        """The member that signed the request."""
        query = request.url.query
        path = request.scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        address = request.client.host if request.client else ""
        store = self.store
        return self.gate.verify(
            request.method, path, request.headers, address, store.team, store.open
        )

    def size(self, request: Request, most: int) -> int:
        """The announced size of the body; Refused if it is missing or too large."""
        length = request.headers.get("content-length", "")
        if not length.isascii() or not length.isdecimal() or len(length) > 15:
            raise Refused(411, "length", "the header Content-Length is missing")
        if int(length) > most:
            raise Refused(413, "size", f"{length} bytes, but at most {most} are accepted")
        return int(length)

    async def body(self, request: Request, most: int, file: BinaryIO, signed: bool = True) -> None:
        """Receive the body into a file; Refused unless it has the sha256 that was signed."""
        self.size(request, most)
        digest = hashlib.sha256()
        async with asyncio.timeout(UPLOAD_SECONDS):
            async for piece in request.stream():
                digest.update(piece)
                file.write(piece)
        self.counts["bytes_received"] += file.tell()
        if signed and digest.hexdigest() != request.headers["hacrl-body"]:
            raise Refused(400, "body", "the body does not have the sha256 that was signed")
        file.seek(0)

    async def small_body(self, request: Request, kind: str, signed: bool = True) -> Signed:
        with tempfile.SpooledTemporaryFile(MAX_LINE + 1) as file:
            await self.body(request, MAX_LINE, file, signed)  # type: ignore[arg-type]
            return Signed.decode(kind, file.read())

    async def put_batch(self, request: Request, step: int) -> Signed:
        member = self.member(request)
        most = self.store.charter.max_batch_bytes + MAX_LINE
        if member in self.uploading:
            raise Refused(429, "busy", f"another batch of {member!r} is being received")
        with self._alone(member), tempfile.TemporaryFile(dir=self.store.folder) as file:
            await self.body(request, most, file)
            async with self.working:
                receipt = await run_in_threadpool(self._store_batch, member, step, file)
        self.changed()
        return receipt

    @contextmanager
    def _alone(self, member: str) -> Iterator[None]:
        """Let a member send one batch at a time."""
        self.uploading.add(member)
        try:
            yield
        finally:
            self.uploading.discard(member)

    def _store_batch(self, member: str, step: int, file: BinaryIO) -> Signed:
        line = file.readline(MAX_LINE)
        layout = read_layout(line.removesuffix(b"\n"))
        if layout.envelope.step != step or os.fstat(file.fileno()).st_size != len(line) + sum(
            layout.sizes
        ):
            raise Malformed("the envelope's step or the sizes of the parts do not fit the request")
        if receipt := self.store.precheck(member, layout):
            self.counts["batches_again"] += 1
            return receipt
        parts = (file.read(layout.sizes[0]), file.read(layout.sizes[1]))
        receipt = self.store.put(member, layout, parts)
        self.counts["late_batches" if receipt.content["late"] else "batches"] += 1
        return receipt

    async def put_skip(self, request: Request, step: int) -> Signed:
        member = self.member(request)
        signed = await self.small_body(request, "skip")
        if signed.content.get("step") != step:
            raise Malformed("the skip is of another step")
        receipt = await run_in_threadpool(self.store.skip, member, signed)
        self.counts["skips"] += 1
        self.changed()
        return receipt

    async def snapshot(self, request: Request, step: int) -> Signed:
        """The snapshot of a step. Waits for it if `wait` is given and the member has committed."""
        member = self.member(request)
        try:
            wait = min(float(request.query_params.get("wait", "0")), MAX_WAIT)
        except ValueError as error:
            raise Malformed("wait must be a number of seconds") from error
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                while self.store.open <= step:
                    await self.wake.wait()
        return await run_in_threadpool(self.store.snapshot, member, step)

    def metrics(self) -> str:
        """Counts and gauges in the text format of Prometheus."""
        store = self.store
        lines = [f"hacrl_hub_{name}_total {count}" for name, count in sorted(self.counts.items())]
        gauges = {
            "open_step": store.open,
            "members": len(store.team.roster(min(store.open, store.charter.steps - 1))),
            "arrived": len(store.arrived()),
            "proofs": len(store.proofs()),
            "start_time_seconds": self.gate.started,
            "memory_bytes": _memory(),
        }
        return "\n".join([*lines, *(f"hacrl_hub_{k} {v}" for k, v in gauges.items()), ""])


def _memory() -> int:
    """Resident bytes of this process; 0 where /proc does not exist."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def make_app(
    store: HubStore, data_files: dict[str, Path], note: Callable[[str], None] = lambda text: None
) -> FastAPI:
    """The application of one team's hub."""
    hub = Hub(store, data_files, note)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def on_close() -> None:
            loop.call_soon_threadsafe(hub.changed)

        store.on_close = on_close
        task = asyncio.create_task(hub.closer())
        yield
        task.cancel()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _refusals(app, hub)
    _public(app, hub)
    _steps(app, hub)
    return app


def _refusals(app: FastAPI, hub: Hub) -> None:
    """Turn every failure into one sentence."""

    def answer(status: int, code: str, message: str) -> JSONResponse:
        hub.counts["refused"] += 1
        value = {"error": code, "message": message, "time": hub.store.clock()}
        return JSONResponse(value, status)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return answer(error.status, error.code, error.message)

    @app.exception_handler(Malformed)
    async def malformed(_: Request, error: Malformed) -> Response:
        return answer(400, "malformed", str(error))

    @app.exception_handler(SQLAlchemyError)
    async def database(_: Request, error: SQLAlchemyError) -> Response:
        hub.note(f"the database does not answer ({first_line(error)})")
        return answer(503, "database", "the hub's database does not answer; try again")

    @app.exception_handler(TimeoutError)
    async def slow(_: Request, __: TimeoutError) -> Response:
        return answer(408, "slow", f"the body took longer than {UPLOAD_SECONDS:g} seconds")

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return answer(400, "incomplete", "the connection was closed before the body was complete")


def _public(app: FastAPI, hub: Hub) -> None:
    store = hub.store

    @app.get("/health")
    async def health() -> dict[str, Any]:
        arrived = await run_in_threadpool(store.arrived)
        value = {"open": store.open, "steps": store.charter.steps, "team": store.team.id}
        return {**value, "arrived": arrived}

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(await run_in_threadpool(hub.metrics))

    @app.get("/v1/charter")
    async def charter() -> Response:
        return _json(store.team.signed.encode())

    @app.get("/v1/amendments")
    async def amendments() -> Response:
        return _json(canonical([signed.plain() for signed in store.team.chain]))

    @app.post("/v1/amendments")
    async def amend(request: Request) -> Response:
        address = request.client.host if request.client else ""
        if not hub.gate.failures.take((address, "amendment"), store.clock()):
            raise Refused(429, "rate", "too many amendments; wait a minute")
        signed = await hub.small_body(request, "amendment", signed=False)
        await run_in_threadpool(store.amend, signed)
        return _json(signed.encode())


def _steps(app: FastAPI, hub: Hub) -> None:
    store = hub.store

    @app.get("/v1/state")
    async def state(request: Request) -> dict[str, Any]:
        member = hub.member(request)
        arrived = await run_in_threadpool(store.arrived)
        newest = await run_in_threadpool(store.newest, member)
        value = {"open": store.open, "arrived": arrived, "amendments": store.team.head}
        value |= {"newest": newest}
        return {**value, "time": store.clock()}

    @app.put("/v1/steps/{step}/batch")
    async def put_batch(request: Request, step: int) -> Response:
        return _json((await hub.put_batch(request, step)).encode())

    @app.put("/v1/steps/{step}/skip")
    async def put_skip(request: Request, step: int) -> Response:
        return _json((await hub.put_skip(request, step)).encode())

    @app.get("/v1/steps/{step}/snapshot")
    async def snapshot(request: Request, step: int) -> Response:
        return _json((await hub.snapshot(request, step)).encode())

    @app.get("/v1/steps/{step}/envelopes")
    async def envelopes(request: Request, step: int) -> Response:
        found = await run_in_threadpool(store.listing, hub.member(request), step)
        return _json(canonical(found))

    @app.get("/v1/steps/{step}/parts/{digest}")
    async def part(request: Request, step: int, digest: str) -> Response:
        member = hub.member(request)
        if not is_hex(digest, 32):
            raise Malformed("a digest has 64 hexadecimal digits")
        path = await run_in_threadpool(store.part, member, step, digest)
        return FileResponse(path, media_type="application/gzip")

    @app.get("/v1/data/{name:path}")
    async def data(request: Request, name: str) -> Response:
        hub.member(request)
        if name not in hub.data_files:
            raise Refused(404, "data", f"the hub does not serve {name[:100]!r}")
        return FileResponse(hub.data_files[name], media_type="application/octet-stream")

    @app.get("/v1/proofs")
    async def proofs(request: Request) -> Response:
        hub.member(request)
        found = await run_in_threadpool(store.proofs)
        return _json(b"[" + ",".join(found).encode() + b"]")


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")
