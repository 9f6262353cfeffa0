"""The processes of this machine (Linux), for storms and tests of kills."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def running() -> dict[int, tuple[int, str]]:
    """Process id -> parent and command line, with spaces between its words; no zombies."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended in the meantime
            state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if state != "Z":
                found[int(entry.name)] = (int(parent), command)
    return found


def family(parent: int) -> dict[int, tuple[int, str]]:
    """The process and all its descendants, as in `running`."""
    everyone, found = running(), {parent}
    while more := {pid for pid, (its, _) in everyone.items() if its in found} - found:
        found |= more
    return {pid: everyone[pid] for pid in found if pid in everyone}


def marked(mark: str) -> list[str]:
    """Command lines of the processes with the mark in their environment."""
    found = []
    for pid, (_, command) in running().items():
        with suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(command)
    return found


def wait_until(condition: Callable[[], Any], seconds: float = 120, every: float = 0.05) -> Any:
    """Wait until the condition is true and return its value; AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not true after {seconds:g} seconds"
        time.sleep(every)
    return found
