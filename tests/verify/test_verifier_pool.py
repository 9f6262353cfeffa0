"""The pool against verifiers that hang, crash, raise and make noise, in real processes."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_table import running, wait_until

from hacrl.errors import UserError
from hacrl.types import Message, Problem, Status
from hacrl.verify import VerifierConfig, VerifierPool
from hacrl.verify.process import WorkerProcess

LIMIT = 60.0  # as in bad_verifiers.py


def problem(answer: str = "42", **columns: object) -> Problem:
    return Problem("p", (Message("user", "?"),), answer, "test", columns)


def make_pool(kind: str, workers: int = 1, **settings: Any) -> VerifierPool:
    return VerifierPool(VerifierConfig(kind=kind, timeout=LIMIT, workers=workers, **settings))


@pytest.fixture(autouse=True, scope="module")
def _importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder with the seconds that actors take; their worker's clock is moved back by as much."""
    notes, real = tmp_path_factory.mktemp("actor"), WorkerProcess.receive

    def receive(worker: WorkerProcess) -> Any:
        note = notes / str(worker._process.pid)
        taken = float(note.read_text()) if note.exists() else 0.0
        found = real(worker)  # answers to earlier calls have arrived and set the clock
        if taken:
            worker.clock -= taken
            note.unlink()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerProcess, "receive", receive)
        yield notes


@pytest.fixture(scope="module")
def actor(_importable: None, folder: Path) -> Iterator[VerifierPool]:
    """One pool for all tests: a test may break its workers, and the next must not notice."""
    options = {"folder": str(folder)}
    with make_pool("bad_verifiers:Actor", 2, options=options, memory_gb=0.25) as pool:
        pool.wait_ready()
        yield pool


def happens(condition: Callable[[], object], seconds: float = 60) -> bool:
    """Whether the condition comes true within this time."""
    with contextlib.suppress(AssertionError):
        wait_until(condition, seconds)
    return bool(condition())


def all_gone(pids: Iterable[int]) -> bool:
    return happens(lambda: running().keys().isdisjoint(pids))


def kill_workers(pool: VerifierPool) -> None:
    for worker in pool._workers:
        os.kill(worker._process.pid, signal.SIGKILL)
        worker._process.wait()


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process of its own that can import bad_verifiers."""
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        text=True,
    )


@pytest.mark.parametrize(
    ("act", "status", "detail"),
    [
        ("spin", Status.TIMEOUT, "no verdict within 60 s"),
        ("deep_hang", Status.TIMEOUT, "no verdict within 60 s"),
        ("crash", Status.ERROR, "exit code 7"),
        ("shoot", Status.ERROR, "SIGSEGV"),
        ("leave", Status.ERROR, "SystemExit: 3"),
        ("complain", Status.ERROR, "KeyError: 'no such column'"),
        ("odd", Status.ERROR, "Odd"),
        ("hungry", Status.ERROR, "MemoryError"),
        ("ask", Status.ERROR, "EOFError"),
        ("fork_and_die", Status.ERROR, "exit code 1"),
    ],
)
def test_bad_call_costs_itself_only(
    actor: VerifierPool, act: str, status: Status, detail: str
) -> None:
    """Twelve calls, the fifth bad: only this one is not judged, the order stays, calls behind it go
    to another worker, and the next batch is complete."""
    replies = [f"r{i}" for i in range(12)]
    replies[4] = act
    verdicts = actor.judge_all([(r, problem(str(i))) for i, r in enumerate(replies)])
    assert verdicts[4].status is status and detail in verdicts[4].detail
    assert not verdicts[4].judged
    for i in (0, 1, 2, 3, *range(5, 12)):
        assert verdicts[i].status is Status.OK and verdicts[i].detail == f"{i}:r{i}"
    later = actor.judge_all([("a", problem()), ("b", problem())])
    assert [v.detail for v in later] == ["42:a", "42:b"]


def test_no_memory_limit() -> None:
    config = VerifierConfig(kind="number", workers=1, memory_gb=0)
    with VerifierPool(config) as pool:
        assert pool.judge_all([("42", problem())])[0].status is Status.OK


def test_many_hangs_are_each_charged_once(actor: VerifierPool) -> None:
    """Five hangs among 25 calls: these five are TIMEOUT, all others OK."""
    replies = ["spin" if i % 5 == 0 else f"r{i}" for i in range(25)]
    verdicts = actor.judge_all([(r, problem(str(i))) for i, r in enumerate(replies)])
    expected = [Status.TIMEOUT if i % 5 == 0 else Status.OK for i in range(25)]
    assert [v.status for v in verdicts] == expected


def test_each_call_has_its_own_clock(actor: VerifierPool) -> None:
    """16 naps of 24 s: up to five are sent to a worker, together longer than the limit of 60 s."""
    assert all(v.status is Status.OK for v in actor.judge_all([("nap", problem())] * 16))


def test_output_of_the_verifier_is_discarded(actor: VerifierPool) -> None:
    verdicts = actor.judge_all([("noise", problem()), ("quiet", problem())] * 4)
    assert [v.detail for v in verdicts] == ["42:noise", "42:quiet"] * 4


@pytest.mark.parametrize("act", ["with_child", "with_session"])
def test_timeout_kills_what_the_verifier_started(
    actor: VerifierPool, folder: Path, act: str
) -> None:
    """FAULTS D13-20: also a child in a session of its own."""
    (verdict,) = actor.judge_all([(act, problem())])
    assert verdict.status is Status.TIMEOUT
    children = [int(pid) for pid in (folder / "children").read_text().split()]
    (folder / "children").unlink()
    assert len(children) == 2  # the call was repeated once
    assert all_gone(children)


def test_idle_death_costs_no_call(actor: VerifierPool) -> None:
    """A worker killed between two batches (by the system, out of memory) is replaced."""
    kill_workers(actor)
    assert all(v.status is Status.OK for v in actor.judge_all([("a", problem())] * 6))


def test_a_leak_costs_no_verdict(actor: VerifierPool) -> None:
    """FAULTS D3: a worker without memory is replaced and the call is repeated."""
    verdicts = actor.judge_all([("leak", problem())] * 30)
    assert [v.status for v in verdicts] == [Status.OK] * 30


def test_a_worker_killed_from_outside_costs_no_verdict(actor: VerifierPool, folder: Path) -> None:
    """FAULTS D7: SIGKILL while a call runs."""

    def kill() -> None:
        note = folder / "kill_me"
        if happens(lambda: note.exists() and note.read_text(), LIMIT / 2):
            os.kill(int(note.read_text()), signal.SIGKILL)

    threading.Thread(target=kill).start()
    replies = ["a", "wait_for_a_kill", *"bcdef"]
    verdicts = actor.judge_all([(reply, problem()) for reply in replies])
    assert [v.detail for v in verdicts] == [f"42:{reply}" for reply in replies]


PAUSED = """
import sys
from hacrl.types import Problem
from hacrl.verify import VerifierConfig, VerifierPool
settings = VerifierConfig(kind="bad_verifiers:Pauses", timeout=2, workers=1)
with VerifierPool(settings) as pool:
    pool.wait_ready()
    print(pool._workers[0]._process.pid, flush=True)
    print(*(v.status for v in pool.judge_all([("", Problem("p", (), "42", "t"))] * 8)))
"""


def test_a_pause_of_all_processes_costs_no_verdict() -> None:
    """FAULTS D7: trainer and worker are stopped for longer than the time limit (a laptop that
    sleeps, a debugger, a scheduler)."""
    trainer = start(PAUSED)
    pids = [trainer.pid, int(trainer.stdout.readline())]
    time.sleep(0.5)  # the second of eight calls runs
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2.5)
    for pid in pids:  # the trainer first, so that it finds a call without an answer
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
    assert trainer.communicate()[0].split() == ["ok"] * 8


def test_a_slow_verifier_is_reported_once(folder: Path) -> None:
    """FIRST_HOUR 2: a reward that sleeps is named while it sleeps, not after the step."""
    with make_pool("bad_verifiers:Actor", options={"folder": str(folder)}) as pool:
        pool.report = (notes := list[str]()).append
        pool.judge_all([("a", problem()), ("spin", problem()), ("spin", problem())])
    assert len(notes) == 1
    assert "the verifier is slow: 1 of 3 replies have a verdict" in notes[0]
    assert "verifier.timeout = 60 s" in notes[0] and "no verdict within 60 s" in notes[0]


def test_a_slow_start_counts_for_no_call(folder: Path) -> None:
    """Neither for the first worker nor for its replacement after a kill."""
    options = {"folder": str(folder), "slow_start": 1.1 * LIMIT}
    with make_pool("bad_verifiers:Actor", options=options) as pool:
        assert pool.judge_all([("a", problem())])[0].status is Status.OK
        assert pool.judge_all([("spin", problem())])[0].status is Status.TIMEOUT
        assert pool.judge_all([("a", problem())])[0].status is Status.OK


def test_large_and_strange_replies() -> None:
    """A megabyte, lone surrogates, NUL, and columns that JSON could not carry."""
    with make_pool("exact", 2) as pool:
        strange = ["x" * (1 << 20), "a\ud800b\udfff", "\x00\u2028é𝔸", "ﬁ\r\n\tend"]
        items = [(r, problem(r, when=time.gmtime(), raw=b"\xff", s={1})) for r in strange * 8]
        assert all(v.status is Status.OK for v in pool.judge_all(items))
        unsendable = problem("a", oops=threading.Lock())
        verdicts = pool.judge_all([("a", problem("a")), ("a", unsendable), ("a", problem("a"))])
        assert [v.status for v in verdicts] == [Status.OK, Status.ERROR, Status.OK]
        assert "cannot be sent" in verdicts[1].detail


def test_thousand_calls_are_quick() -> None:
    """About 0.06 s when measured. The bound is loose because test machines are busy."""
    with make_pool("number", 2) as pool:
        pool.wait_ready()
        best = LIMIT
        for _ in range(5):
            began = time.monotonic()
            verdicts = pool.judge_all([(f"it is {i}", problem()) for i in range(1000)])
            best = min(best, time.monotonic() - began)
        assert [i for i, v in enumerate(verdicts) if v.status is Status.OK] == [42]
        assert verdicts[7].detail == "7"
        assert best < 3.0


def test_interrupt_leaves_a_usable_pool(actor: VerifierPool, folder: Path) -> None:
    """Ctrl-C during a batch: late answers must not become answers to the next batch."""

    def interrupt() -> None:
        if happens((folder / "waits").exists, LIMIT / 2):  # the batch does not end by itself
            signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        actor.judge_all([("wait", problem())] * 2 + [("late", problem())] * 20)
    assert [v.detail for v in actor.judge_all([("new", problem())] * 4)] == ["42:new"] * 4


def test_range_and_label() -> None:
    with make_pool("number", 0) as pool:  # in this process
        assert pool.label == "number/1" and pool.reward_range == (0.0, 1.0)
        assert pool.judge_all([("42", problem())])[0].status is Status.OK
        assert pool._workers == []
    with make_pool("bad_verifiers:Penalty") as pool:
        assert pool.label == "penalty/1" and pool.reward_range == (-1.0, 1.0)
        assert pool.judge_all([("", problem())])[0].reward == -1.0
    with make_pool("bad_verifiers:TooMuch") as pool:
        verdicts = pool.judge_all([(r, problem()) for r in ("1", "1.5", "nan", "-0.1", "0.5")])
    assert [v.status.value for v in verdicts] == ["ok", "error", "error", "error", "ok"]
    assert "1.5 is outside the declared range [0, 1]" in verdicts[1].detail


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no_such_module:thing", "no_such_module"),
        ("bad_verifiers:nothing", "nothing"),
        ("bad_verifiers:NOT_CALLABLE", "int"),
        ("bad_verifiers:Incomplete", "without version, reward_range, judge"),
    ],
)
def test_what_cannot_start_is_named(kind: str, words: str, workers: int) -> None:
    with pytest.raises(UserError, match=words), make_pool(kind, workers) as pool:
        pool.judge_all([("a", problem())])


def test_a_worker_that_dies_while_starting_stops_the_run() -> None:
    pool = make_pool("bad_verifiers:unmakeable")
    with pool, pytest.raises(UserError, match="does not start: exit code 5"):
        pool.judge_all([("a", problem())])


def test_code_that_is_edited_during_a_run_is_noticed(tmp_path: Path) -> None:
    """A worker that replaces another one would judge with the new code, the others with the old."""
    rewards = tmp_path / "edited_rewards.py"
    rewards.write_text("def score(reply):\n    return 1.0\n")
    options = {"path": f"{tmp_path}/edited_rewards:score"}
    with make_pool("function", options=options) as pool:
        assert pool.judge_all([("a", problem())])[0].reward == 1.0
        rewards.write_text("def score(reply):\n    return 0.0\n")
        assert pool.judge_all([("a", problem())])[0].reward == 1.0
        kill_workers(pool)
        with pytest.raises(UserError, match=r"edited_rewards\.py was changed.*--accept-changed"):
            pool.judge_all([("a", problem())])


def test_close_ends_the_workers() -> None:
    with make_pool("exact", 2) as pool:
        assert pool.judge_all([]) == []
        pids = [worker._process.pid for worker in pool._workers]
        assert running().keys() >= set(pids)
    assert running().keys().isdisjoint(pids)
    with pytest.raises(ValueError, match="closed"):
        pool.judge_all([])


PARENT = """
import sys, threading
from hacrl.types import Problem
from hacrl.verify import VerifierConfig, VerifierPool

def start():
    global pool
    options = {"folder": sys.argv[3]}
    settings = {"timeout": 60, "workers": 2, "options": options}
    pool = VerifierPool(VerifierConfig(kind="bad_verifiers:Actor", **settings))
    pool.wait_ready()

if sys.argv[2] == "thread":
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
else:
    start()
print(*(w._process.pid for w in pool._workers), flush=True)
if sys.argv[1]:
    pool.judge_all([(sys.argv[1], Problem("p", (), "42", "t"))] * 2)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("act", "thread"),
    [
        ("", "main"),
        ("spin", "main"),
        ("deep_hang", "main"),
        ("spin", "thread"),
        ("with_session", "main"),
        ("with_session", "thread"),
    ],
)
def test_no_orphans_after_kill_9(tmp_path: Path, act: str, thread: str) -> None:
    """Idle, in a Python loop, in C code that blocks all threads, and in a program in a session of its
    own; also for a pool that was made in a thread: the end of the thread must not end the workers."""
    parent = start(PARENT, act, thread, str(tmp_path))
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    if act == "with_session":
        children = tmp_path / "children"
        assert happens(lambda: children.exists() and children.read_text().count("\n") == 2)
        pids += map(int, children.read_text().split())
    time.sleep(0.4)
    assert running().keys() >= set(pids)
    with parent:
        parent.kill()
    assert all_gone(pids)
