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
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from resource import getpagesize
from typing import IO, Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import ClientDisconnect

from hacrl.errors import first_line
from hacrl.owners.batch import read_layout
from hacrl.owners.hub.gate import MOST_FAILURES, Gate
from hacrl.owners.hub.store import HubStore, Refused
from hacrl.owners.signing import Malformed, Signed, canonical, is_hex

MAX_LINE = 1 << 18
"""Most bytes of an envelope with the snapshot of a large team, of a skip or of an amendment."""
MAX_WAIT = 60.0
UPLOAD_SECONDS = 600.0
MOST_WAITS = 4  # of a member at a time
WORKERS = 4  # batches that are unpacked at a time; more would need more memory


class Hub:
    """The server's state outside the store: waiting requests, counts and limits."""

    def __init__(self, store: HubStore, note: Callable[[str], None]) -> None:
        self.store, self.note = store, note
        self.gate = Gate(store.charter.hub, store.clock)
        self.counts: Counter[str] = Counter()
        self.wake = asyncio.Event()  # set, and replaced, whenever a step closes or a batch arrives
        self.working = asyncio.Semaphore(WORKERS)
        self.uploading: set[str] = set()
        self.waiting: Counter[str] = Counter()

    def changed(self) -> None:
        """Wake waiting requests and the closer."""
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

    async def member(self, request: Request) -> str:
        """The member that signed the request."""
        query, store = request.url.query, self.store
        path = request.scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        sender = (request.headers, _address(request))
        return self.gate.verify(request.method, path, *sender, store.team, store.open)

    async def body(self, request: Request, most: int, file: IO[bytes], signed: bool = True) -> None:
        """Receive the body into a file; Refused unless it has the sha256 that was signed."""
        digest = hashlib.sha256()
        async with asyncio.timeout(UPLOAD_SECONDS):
            async for piece in request.stream():
                if file.tell() + len(piece) > most:
                    raise Refused(413, "size", f"at most {most} bytes are accepted")
                digest.update(piece)
                file.write(piece)
        self.counts["bytes_received"] += file.tell()
        if signed and digest.hexdigest() != request.headers["hacrl-body"]:
            raise Refused(400, "body", "the body does not have the sha256 that was signed")
        file.seek(0)

    async def record(self, request: Request, kind: str, signed: bool = True) -> Signed:
        """The signed record in the body."""
        with tempfile.SpooledTemporaryFile(MAX_LINE) as file:
            await self.body(request, MAX_LINE, file, signed)
            return Signed.decode(kind, file.read())

    async def put_batch(self, member: str, request: Request, step: int) -> Signed:
        """Receive and store a batch."""
        if member in self.uploading:
            raise Refused(429, "busy", f"another batch of {member!r} is being received")
        self.uploading.add(member)
        try:
            with tempfile.TemporaryFile(dir=self.store.folder) as file:
                await self.body(request, self.store.charter.max_batch_bytes + MAX_LINE, file)
                async with self.working:
                    receipt = await run_in_threadpool(self._store_batch, member, step, file)
        finally:
            self.uploading.discard(member)
        self.counts["late_batches" if receipt.content["late"] else "batches"] += 1
        self.changed()
        return receipt

    def _store_batch(self, member: str, step: int, file: IO[bytes]) -> Signed:
        line = file.readline(MAX_LINE)
        layout = read_layout(line.removesuffix(b"\n"))
        size = len(line) + sum(layout.sizes)
        if layout.envelope.step != step or os.fstat(file.fileno()).st_size != size:
            raise Malformed("the envelope's step or the sizes of the parts do not fit the request")
        parts = (file.read(layout.sizes[0]), file.read(layout.sizes[1]))
        return self.store.put(member, layout, parts)

    async def put_skip(self, member: str, request: Request, step: int) -> Signed:
        """Receive and store a skip."""
        signed = await self.record(request, "skip")
        if signed.content.get("step") != step:
            raise Malformed("the skip is of another step")
        receipt = await run_in_threadpool(self.store.skip, member, signed)
        self.counts["skips"] += 1
        self.changed()
        return receipt

    async def snapshot(self, member: str, request: Request, step: int, wait: float) -> Signed:
        """The snapshot of a step. Waits for it up to `wait` seconds while the member is connected."""
        if not 0 <= step < self.store.charter.steps:
            raise Refused(409, "step", f"the team has steps 1 to {self.store.charter.steps}")
        if self.waiting[member] >= MOST_WAITS:
            raise Refused(429, "busy", f"{MOST_WAITS} requests of {member!r} wait for a snapshot")
        self.waiting[member] += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    while self.store.open <= step and not await request.is_disconnected():
                        with suppress(TimeoutError):
                            async with asyncio.timeout(1.0):
                                await self.wake.wait()
        finally:
            self.waiting[member] -= 1
        return await run_in_threadpool(self.store.snapshot, member, step)

    def metrics(self) -> str:
        """Counts and gauges in the text format of Prometheus."""
        store = self.store
        values = {f"{name}_total": count for name, count in sorted(self.counts.items())}
        values |= {
            "open_step": store.open,
            "members": len(store.team.roster(min(store.open, store.charter.steps - 1))),
            "arrived": len(store.arrived()),
            "proofs": len(store.proofs()),
            "memory_bytes": _memory(),
        }
        return "".join(f"hacrl_hub_{name} {value}\n" for name, value in values.items())


def _memory() -> int:
    """Resident bytes of this process; 0 where /proc does not exist."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * getpagesize() if pages.exists() else 0


def make_app(
    store: HubStore, data_files: dict[str, Path], note: Callable[[str], None] = lambda text: None
) -> FastAPI:
    """The application of one team's hub."""
    hub = Hub(store, note)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        store.on_close = partial(asyncio.get_running_loop().call_soon_threadsafe, hub.changed)
        task = asyncio.create_task(hub.closer())
        yield
        task.cancel()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _refusals(app, hub)
    _public(app, hub)
    _for_members(app, hub, data_files)
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
    @app.exception_handler(ClientDisconnect)
    async def incomplete(_: Request, error: Exception) -> Response:
        return answer(408, "incomplete", f"no complete body in {UPLOAD_SECONDS:g} seconds")


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
        hub.gate.count((_address(request), "amend"), MOST_FAILURES, "too many amendments")
        signed = await hub.record(request, "amendment", signed=False)
        await run_in_threadpool(store.amend, signed)
        return _json(signed.encode())


def _for_members(app: FastAPI, hub: Hub, data_files: dict[str, Path]) -> None:
    store = hub.store
    Member = Annotated[str, Depends(hub.member)]
    Wait = Annotated[float, Query(ge=0, le=MAX_WAIT)]

    @app.get("/v1/state")
    async def state(member: Member) -> dict[str, Any]:
        arrived = await run_in_threadpool(store.arrived)
        newest = await run_in_threadpool(store.newest, member)
        value = {"open": store.open, "arrived": arrived, "amendments": store.team.head}
        return {**value, "newest": newest, "time": store.clock()}

    @app.put("/v1/steps/{step}/batch")
    async def put_batch(member: Member, request: Request, step: int) -> Response:
        return _json((await hub.put_batch(member, request, step)).encode())

    @app.put("/v1/steps/{step}/skip")
    async def put_skip(member: Member, request: Request, step: int) -> Response:
        return _json((await hub.put_skip(member, request, step)).encode())

    @app.get("/v1/steps/{step}/snapshot")
    async def snapshot(member: Member, request: Request, step: int, wait: Wait = 0.0) -> Response:
        return _json((await hub.snapshot(member, request, step, wait)).encode())

    @app.get("/v1/steps/{step}/envelopes")
    async def envelopes(member: Member, step: int) -> Response:
        return _json(canonical(await run_in_threadpool(store.listing, member, step)))

    @app.get("/v1/steps/{step}/parts/{digest}")
    async def part(member: Member, step: int, digest: str) -> Response:
        if not is_hex(digest, 32):
            raise Malformed("a digest has 64 hexadecimal digits")
        path = await run_in_threadpool(store.part, member, step, digest)
        return FileResponse(path, media_type="application/gzip")

    @app.get("/v1/data/{name:path}")
    async def data(member: Member, name: str) -> Response:
        if name not in data_files:
            raise Refused(404, "data", f"the hub does not serve {name[:100]!r}")
        return FileResponse(data_files[name], media_type="application/octet-stream")

    @app.get("/v1/proofs")
    async def proofs(member: Member) -> Response:
        return _json(f"[{','.join(await run_in_threadpool(store.proofs))}]".encode())


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")
