"""The talk between the pool and its workers: frames of (call number, payload) over a socket.

To the worker a payload is a pickle (columns may hold any value; the worker trusts the trainer).
Back comes JSON only: the worker runs code that may be anyone's, and nothing it sends can execute.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterator
from typing import Any

from hacrl.types import Message, Problem, Status, Verdict

_HEADER = struct.Struct(">II")
HELLO = 0xFFFFFFFF
"""Call number of a worker's first message: who it is, or why it cannot start."""
MOST_BACK = 1 << 20
"""No honest answer of a worker is longer (bytes)."""


def frame(number: int, payload: bytes) -> bytes:
    return _HEADER.pack(number, len(payload)) + payload


class Frames:
    """Cuts a byte stream into frames again.

    Example: Frames().feed(frame(7, b"ab")) yields (7, b"ab")
    """

    def __init__(self, most: int = 0xFFFFFFFF) -> None:
        self._most = most
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            number, length = _HEADER.unpack_from(self._buffer)
            if length > self._most:
                raise ValueError(f"a frame of {length} bytes")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield number, payload


def pack_call(reply: str, problem: Problem) -> bytes:
    messages = [(m.role, m.content) for m in problem.messages]
    row = (reply, problem.id, messages, problem.answer, problem.task, dict(problem.columns))
    return pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL)


def unpack_call(payload: bytes) -> tuple[str, Problem]:
    reply, id_, messages, answer, task, columns = pickle.loads(payload)
    turns = tuple(Message(role, content) for role, content in messages)
    return reply, Problem(id_, turns, answer, task, columns)


def pack_verdict(verdict: Verdict) -> bytes:
    return json.dumps([verdict.reward, verdict.status.value, verdict.detail]).encode()


def unpack_verdict(payload: bytes) -> Verdict:
    """ValueError if it is no verdict."""
    row = json.loads(payload)
    if not (
        isinstance(row, list)
        and len(row) == 3
        and isinstance(row[0], float | int)
        and isinstance(row[2], str)
    ):
        raise ValueError("not a verdict")
    return Verdict(float(row[0]), Status(row[1]), row[2])


def pack_start(kind: str, options: dict[str, Any], paths: list[str], limits: dict) -> bytes:
    return pickle.dumps({"kind": kind, "options": options, "paths": paths, **limits})
