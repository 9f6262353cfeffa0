"""A server as a process, hostile text in a run, screenshots."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cli_helpers import ROOT, start

from hacrl.store.pool import Pool
from hacrl.types import Status, Turn, Verdict

SHOTS = ROOT / "build" / "page"
WIDTHS = (1300, 700)
HOSTILE = (
    '<script>document.title="hacked"</script><img src=x onerror="document.title=1">'
    "\x1b[31mred\u202e"
)


def publish_hostile(pool: Pool, step: int) -> None:
    """Write the step's batch of finch again: hostile text in one reply, a reply_start in another."""
    first, second, *rest = pool.rows("finch", step)
    hostile = replace(
        first,
        turns=(Turn("assistant", HOSTILE, True),),
        verdict=Verdict(0.0, Status.WRONG, "<b onmouseover=alert(1)>\x1b]0;title\x07"),
    )
    members = pool.members(step)
    pool.reopen(step)
    shutil.rmtree(pool.folder / f"step-{step:06d}" / "finch")
    begun = replace(second, turns=(Turn("assistant", "Beginning", False), *second.turns))
    pool.publish(step, "finch", [hostile, begun, *rest])
    pool.close(step, members)


@contextmanager
def serving(target: object, *options: str) -> Iterator[str]:
    """The address of `hacrl view TARGET` as a process."""
    process = start("-m", "hacrl", "view", str(target), "--port=0", "--no-browser", *options)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"is shown at (http://\S+)", line)
        assert found, line + (process.communicate(timeout=10)[1] if process.poll() else "")
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=20)


def keep_shots(page: Any, name: str) -> None:
    """Screenshots of the whole page at both widths, in both schemes at the first."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(150)
        page.screenshot(path=SHOTS / f"{name}-{width}.png", full_page=True)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{name}: {wide} px wide in a window of {width}"
    page.set_viewport_size({"width": WIDTHS[0], "height": 900})
