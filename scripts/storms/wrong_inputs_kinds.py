"""The kinds of wrong inputs of scripts/storms/wrong_inputs.py: reward functions, data files, configs.

A kind says what must happen. `says` is a pattern that the screen must show; `same` means that the run
ends with the metrics of a run with sound inputs; `runs` means that it ends without an error.
"""

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Kind:
    """Example: Kind("reward none", says="returned None", files={"rewards.py": "def score(c): ..."})"""

    name: str
    says: str = ""
    same: bool = False
    runs: bool = False
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    """Overrides of the config, on the command line."""
    teams: tuple[str, ...] = ("one",)
    """The teams to try it with: one (an agent, gspo), two (two agents, hacpo)."""
    command: tuple[str, ...] = ()
    """Arguments in the place of `train CONFIG --run RUN`."""


HEAD = '''
import asyncio, os, random, re, shutil, signal, subprocess, sys, tempfile, threading, time, zlib
calls, leaked = [], []
def right(completion, answer):
    return 1.0 if (re.findall(r"-?[0-9]+", completion) or [""])[-1] == answer else 0.0
def odd(completion):
    return zlib.crc32(completion.encode()) % 2 == 1
def once(completion):
    """True the first time that a quarter of the replies is judged."""
    number = zlib.crc32(completion.encode())
    path = os.path.join(FOLDER, str(number))
    if number % 4 or os.path.exists(path):
        return False
    open(path, "w").close()
    return True
'''
SCORE = "def score(completion, answer, **columns):\n    {}\n    return right(completion, answer)\n"
BOTH = ("one", "two")


def _reward(name: str, code: str, says: str = "", *overrides: str, **fields: Any) -> Kind:
    """A reward function: the whole of it, or lines before `return right(completion, answer)`."""
    code = code if "def score" in code or "score =" in code else SCORE.format(code)
    files = {"rewards.py": HEAD + code}
    fields = {"teams": BOTH, "same": not says, **fields}
    return Kind(f"reward {name}", says, files=files, overrides=overrides, **fields)


def _returns(name: str, value: str, says: str, *overrides: str) -> list[Kind]:
    """A function that always returns the value, and one that returns it for half of the replies."""
    failed = "your reward function failed on {}.*" + says
    always = f"def score(completion):\n    return {value}\n"
    return [
        _reward(f"{name} always", always, failed.format("all"), *overrides),
        _reward(
            f"{name} for half",
            f"if odd(completion): return {value}",
            failed.format(r"\d+ of \d+"),
            *overrides,
        ),
    ]


def _does(name: str, line: str, says: str, *overrides: str) -> list[Kind]:
    """A function that always fails like this, and one that fails for half of the replies."""
    failed = "your reward function failed on {}.*" + says
    return [
        _reward(f"{name} always", line, failed.format("all"), *overrides),
        _reward(
            f"{name} for half",
            f"if odd(completion): {line}",
            failed.format(r"\d+ of \d+"),
            *overrides,
        ),
    ]


TRL = (
    "def score({}):\n    rewards = [right(c, a) for c, a in zip(completions, {})]\n    return {}\n"
)
RANGE = r"outside verifier.options.reward_range = \[0, 1\]"
# fmt: off
REWARDS = [
    # sound, although unusual: the numbers must be those of the plain function
    _reward("bool", "return bool(right(completion, answer))"),
    _reward("int", "return int(right(completion, answer))"),
    _reward("numpy", "import numpy; return numpy.float32(right(completion, answer))"),
    _reward("TRL list", TRL.format("completions, answer, **kwargs", "answer", "rewards")),
    _reward("TRL prompts", TRL.format("prompts, completions, **kw", "kw['answer']", "rewards")),
    _reward("TRL tuple", TRL.format("*, completions, answer", "answer", "tuple(rewards)")),
    _reward("lambda", "score = lambda text, answer: right(text, answer)\n"),
    _reward("other name", "def score(text, answer, *, question=''):\n    return right(text, answer)"),
    _reward("object",
            "class S:\n    def __call__(self, c, answer): return right(c, answer)\nscore = S()\n"),
    _reward("prints much", "print('x' * 10**6); os.write(1, b'y' * 10**6)"),
    _reward("closes output", "sys.stdout.close() if not calls else None; calls.append(1)"),
    _reward("closes descriptors", "[os.close(i) for i in (0, 1, 2) if not calls]; calls.append(1)"),
    _reward("reads input", "sys.stdin.read()"),
    _reward("changes folder", "os.chdir('/')"),
    _reward("deletes its folder", "os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd())"),
    _reward("deletes the run's folder", "shutil.rmtree(WORK, ignore_errors=True)"),
    _reward("deletes the run's folder and dies", "shutil.rmtree(WORK, ignore_errors=True); os._exit(1)",
            "was changed or deleted while the run uses it"),
    _reward("leaks", "leaked.append(bytearray(15 << 20))", "", "verifier.memory_gb=0.2"),
    _reward("killed once", "once(completion) and os.kill(os.getpid(), 9)"),
    _reward("stopped once", "once(completion) and os.kill(os.getpid(), 19)", "", "verifier.timeout=1"),
    _reward("starts threads", "threading.Thread(target=time.sleep, args=(60,)).start()"),
    _reward("forks", "if os.fork() == 0: time.sleep(60)"),
    _reward("own session", "subprocess.Popen(['sleep', '600'], start_new_session=True)"),
    _reward("ignores signals", "[signal.signal(s, signal.SIG_IGN) for s in (2, 15)]"),
    _reward("changes environment", "os.environ.clear(); sys.path.clear()"),
    _reward("is slow", "time.sleep(0.3)"),
    _reward("is slow to import", f"time.sleep(2)\n{SCORE.format('pass')}"),
    _reward("seeds", "random.seed(0); sys.setrecursionlimit(200)"),
    _reward(
        "own range",
        "return 2 * right(completion, answer)",
        "",
        "verifier.options.reward_range=[0, 2]",
        same=False,
        runs=True,
    ),
    _reward("warns", "import warnings; warnings.warn('x' * 10**5)"),
    # wrong: the screen must name it
    *_returns("-1", "-1", RANGE + r".*\(r \+ 1\) / 2"),
    *_returns("17", "17.0", f"reward 17 is {RANGE}"),
    *_returns("nan", "float('nan')", f"reward nan is {RANGE}.*finite"),
    *_returns("inf", "float('inf')", f"reward inf is {RANGE}.*finite"),
    *_returns("None", "None", "returned None"),
    *_returns("text", "'yes'", "returned 'yes', not a number"),
    *_returns("number as text", "'0.5'", "returned '0.5', not a number"),
    *_returns("list", "[1.0, 0.0]", r"returned \[1.0, 0.0\], not a number"),
    *_returns("dict", "{'reward': 1}", "not a number"),
    *_returns("complex", "1j", "returned 1j, not a number"),
    *_does("raises", "raise ValueError('boom')", "first error: ValueError: boom"),
    *_does("raises colours", r"raise ValueError('\x1b[31mboom\x07')", r"ValueError: \\x1b\[31mboom"),
    *_does("raises lines", r"raise KeyError('a' * 10**6 + '\n' * 99)", "KeyError: 'aaa"),
    *_does("exits", "sys.exit(3)", "SystemExit: 3"),
    *_does("interrupts", "raise KeyboardInterrupt", "KeyboardInterrupt"),
    *_does("recurses", "return (f := lambda: f())()", "RecursionError"),
    *_does("eats memory", "bytearray(1 << 40)", "MemoryError"),
    *_does("exits at once", "os._exit(7)", "exit code 7"),
    *_does("segfaults", "os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    *_does("sleeps", "time.sleep(60)", "no verdict within 0.3 s", "verifier.timeout=0.3"),
    *_does("spins", "[0 for _ in iter(int, 1)]", "no verdict within 0.3 s", "verifier.timeout=0.3"),
    _reward("raises later", "calls.append(1)\n    if len(calls) > 12: raise OSError('late')",
            "your reward function failed on .*OSError: late"),
    _reward("no argument", "def score():\n    return 1.0", "TypeError: score.. takes 0 positional"),
    _reward("unknown column", "def score(c, level):\n    return 1.0", "needs 'level', which is no"),
    _reward("async", "async def score(completion):\n    return 1.0", "coroutine.*not a number"),
    _reward("generator", "def score(completion):\n    yield 1.0", "generator.*not a number"),
    _reward("TRL number", "def score(completions, **kw):\n    return 1.0", "not a list of one reward"),
    _reward("TRL messages",
            "def score(completions, **kw):\n    return [c[0]['content'] for c in completions]",
            "lists of plain text"),
    _reward("is a number", "score = 3", "is a int, not a function"),
    _reward("is missing", "def scores(c): pass\nx = 'score ='", "has no 'score'"),
    _reward("syntax error", "def score(c:\n    return 1.0", "SyntaxError"),
    _reward("raises on import", "raise OSError('no model')\nx = 'def score'", "OSError: no model"),
    _reward("exits on import", "os._exit(5)\nx = 'def score'", "does not start: exit code 5"),
    _reward("imports nothing", "import no_such_module\nx = 'def score'", "no_such_module"),
    _reward("hacpo range", "pass", r"reward_range = \[-1, 1\].*\(r \+ 1\) / 2",
            "verifier.options.reward_range=[-1, 1]", teams=("two",)),
    _reward("range reversed", "pass", "reward_range = .*smallest must come first",
            "verifier.options.reward_range=[1, 0]"),
    _reward("path without colon", "pass", "not an import path", "verifier.options.path=rewards"),
    _reward("path of nothing", "pass", "nowhere", "verifier.options.path=nowhere:score"),
    _reward("always 0", "return 0.0", "no training signal", "steps=6", teams=("one",)),
    _reward("always 1", "return 1", "no training signal", "steps=6", teams=("one",)),
]
# fmt: on

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(2, 9) for b in range(11, 19)]


def _lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _data(name: str, content: Any, says: str = "", *overrides: str, **fields: Any) -> Kind:
    """A data file: its rows, or its text or bytes."""
    content = _lines(content) if isinstance(content, list) else content
    fields = {"same": not says and not fields.get("runs"), **fields}
    name_of_file = fields.pop("file", "data.jsonl")
    overrides = ("task.kind=jsonl", f"task.train={name_of_file}", *overrides)
    files = {name_of_file: content} if content is not None else {}
    return Kind(f"data {name}", says, files=files, overrides=overrides, **fields)


def _each(**values: Any) -> list[dict[str, Any]]:
    return [{**row, **values} for row in ROWS]


def _one(**values: Any) -> list[dict[str, Any]]:
    """Only row 8 has these values."""
    return [{**row, **values} if i == 7 else row for i, row in enumerate(ROWS)]


TEXT = _lines(ROWS)
CSV = "question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in ROWS)
TOO_LONG = "max_prompt_tokens"
# fmt: off
DATA = [
    _data("byte order mark", b"\xef\xbb\xbf" + TEXT.encode()),
    _data("CRLF", TEXT.replace("\n", "\r\n")),
    _data("blank lines", TEXT.replace("\n", "\n\n  \n")),
    _data("no last newline", TEXT.rstrip("\n")),
    _data("gzip", gzip.compress(TEXT.encode()), file="data.jsonl.gz", runs=True),
    _data("numbers as answers", [{**r, "answer": int(r["answer"])} for r in ROWS], runs=True),
    _data("more columns", _each(level=3, tags=["a"]), runs=True),
    _data("equal answers", _each(answer="7"), runs=True),
    _data("ids", [{**r, "id": f"[/] \x1b[2J {i}"} for i, r in enumerate(ROWS)], runs=True),
    _data("control characters", _one(question="a\x00\x1b[31m\x07\u202e"), runs=True),
    _data("private characters", _one(question="\uf8f00\uf8f1 <|im_end|>"), runs=True),
    _data("repeated rows", ROWS + ROWS[:9], "9 rows of 65 .*the same as another row"),
    _data("empty", "", "data.jsonl: the file is empty"),
    _data("missing", None, "data.jsonl: no such file"),
    _data("a folder", None, "is a folder", "task.train=."),
    _data("other ending", CSV, "data.txt: not a .jsonl", file="data.txt"),
    _data("CSV in jsonl", CSV, "line 1: not JSON"),
    _data("JSON array", json.dumps(ROWS), "line 1: a list; every line must be one JSON object"),
    _data("pretty JSON", json.dumps(ROWS, indent=2), "line 1: not JSON"),
    _data("a string a line", _lines(["a", "b"]), "line 1: a str; every line"),
    _data("truncated", TEXT[:-9], "line 56: not JSON"),
    _data("a web page", "<!DOCTYPE html><html></html>", "line 1: not JSON"),
    _data("UTF-16", TEXT.encode("utf-16"), "line 1: not UTF-8"),
    _data("Latin-1", TEXT.replace("2+11", "é").encode("latin-1"), "line 1: not UTF-8"),
    _data("half a character", TEXT.replace('"2+11="', '"\\ud800"'), "line 1: half of a surrogate"),
    _data("broken gzip", gzip.compress(TEXT.encode())[:-20], "gzip", file="data.jsonl.gz"),
    _data("no gzip", TEXT, "gzip", file="data.jsonl.gz"),
    _data("no parquet", TEXT, "Parquet", file="data.parquet"),
    _data("other columns", [{"q": "1", "a": "2"}] * 9, "column 'question'.*does not exist.*: q, a"),
    _data("no answer", [{"question": "1"}] * 9, "column 'answer'.*does not exist"),
    _data("answer missing once", [*ROWS[:7], {"question": "1"}], "line 8: column 'answer'"),
    _data("null answer", _one(answer=None), "line 8: column 'answer' .*is null"),
    _data("null question", _one(question=None), "line 8: column 'question' .*is null"),
    _data("number as question", _one(question=5), "line 8: 'question' must be text, not 5"),
    _data("list as question", _one(question=["a"]), "line 8: 'question' must be text"),
    _data("messages as question", _each(question=[{"role": "user", "content": "1"}]), "must be text"),
    _data("empty question", _one(question=" "), "line 8: 'question' must be text"),
    _data("empty answer", _one(answer=""), "line 8: 'answer' must be text or a number"),
    _data("bool as answer", _one(answer=True), "line 8: 'answer' must be text or a number"),
    _data("list as answer", _one(answer=[1]), "line 8: 'answer' must be text or a number"),
    _data("unreadable answers", _each(answer="ten"), "verifier 'number' failed on all.*'ten'"),
    _data("one unreadable answer", [{**r, "answer": r["answer"] if i % 3 else "ten"}
                                    for i, r in enumerate(ROWS)], "verifier 'number' failed on .*'ten'"),
    _data("repeated ids", _each(id="a"), "line 2: id 'a' is already used at .*line 1"),
    _data("null id", _one(id=None), "line", "task.columns.id=id"),
    _data("wrong column setting", ROWS, "column 'problem'", "task.columns.question=problem"),
    _data("unknown column in prompt", ROWS, "task.prompt.*level", "task.prompt={question} {level}"),
    _data("braces in prompt", ROWS, "task.prompt", "task.prompt={question} \\boxed{}"),
    _data("few rows", ROWS[:2], "prompts_per_step = 3", "evaluation.problems=0"),
    _data("one row", ROWS[:1], "prompts_per_step|held-out|no training problems"),
    _data("held out is training", ROWS, "no training problems left", "task.held_out=data.jsonl"),
    _data("held out is missing", ROWS, "nothing.jsonl: no such file", "task.held_out=nothing.jsonl"),
    _data("nothing held out", ROWS, "no held-out problems", "task.held_out_fraction=0.0"),
    _data("long prompts", [{**r, "question": r["question"] + "1+" * 99} for r in ROWS], TOO_LONG),
    _data("some long prompts", [r if i % 2 else {**r, "question": f"{i}+" * 40}
                                for i, r in enumerate(ROWS)], TOO_LONG, "evaluation.problems=0"),
    _data("huge row", _one(question="1+1 " * 10**6), TOO_LONG, "prompts_per_step=40", "steps=1"),
    _data("few held-out problems", ROWS, "evaluation.problems = 500, but", "evaluation.problems=500"),
]
# fmt: on


def _config(name: str, says: str, *overrides: str, **fields: Any) -> Kind:
    return Kind(f"config {name}", says, overrides=overrides, **fields)


def _file(name: str, says: str, content: str | bytes, *more: str) -> Kind:
    command = ("train", "bad.toml", *more)
    return Kind(f"config {name}", says, files={"bad.toml": content}, command=command)


SIGNAL = "no training signal"
# fmt: off
CONFIGS = [
    _config("too many prompts", "prompts_per_step = 500000", "prompts_per_step=500000"),
    _config("learning rate 1e3", "has become worse|diverged|non-finite", "agents.wren.learning_rate=1e3",
            "evaluation.problems=60", "evaluation.every=1", "steps=3"),
    _config("learning rate -1", "learning_rate", "agents.wren.learning_rate=-1"),
    _config("learning rate nan", "learning_rate", "agents.wren.learning_rate=nan"),
    _config("temperature 0", "temperature", "temperature=0"),
    _config("temperature nan", "temperature", "temperature=nan"),
    _config("no steps", "steps", "steps=0"),
    _config("text as steps", "steps", "steps=many"),
    _config("half a step", "steps", "steps=1.5"),
    _config("unknown key", "stepss.*steps", "stepss=3"),
    _config("unknown key of a table", "evaluation.*problem", "evaluation.problem=3"),
    _config("unknown key of an agent", "learnig_rate.*learning_rate", "agents.wren.learnig_rate=1"),
    _config("unknown agent", "heron", "agents.heron.learning_rate=1e-4"),
    _config("unknown algorithm", "algorithm.*hacpoo", "algorithm.name=hacpoo"),
    _config("unknown verifier", "verifier.kind.*nubmer", "verifier.kind=nubmer"),
    _config("unknown option", "whcih", "verifier.options={whcih='last'}"),
    _config("unknown task", "task.kind.*algebra", "task.kind=algebra"),
    _config("unknown operation", "operations.*pow", "task.operations=['pow']"),
    _config("unknown pocket model", "emu", "agents.wren.model=pocket:emu"),
    _config("missing model", "/nowhere", "agents.wren.model=/nowhere"),
    _config("empty model", "model", "agents.wren.model="),
    _config("bad name of an agent", "name", "agents.wren.name=a b"),
    _config("two agents of one name", "wren", "agents.finch.name=wren", teams=("two",)),
    _config("no learner", "learn", "agents.wren.learn=false"),
    _config("no agents", "agents", "agents=[]"),
    _config("missing device", "cuda", "runtime.device=cuda:99"),
    _config("unknown device", "abacus", "runtime.device=abacus"),
    _config("no threads", "threads", "runtime.threads=0"),
    _config("no time for the verifier", "timeout", "verifier.timeout=0"),
    _config("fewer than no workers", "workers", "verifier.workers=-1"),
    _config("no memory for the verifier", "", "verifier.memory_gb=0.001", runs=True),
    _config("prompt limit 1", TOO_LONG, "max_prompt_tokens=1"),
    _config("reply limit 1", "max_response_tokens = 1", "max_response_tokens=1", "steps=6"),
    _config("more than the context", "reads at most", "max_response_tokens=999999"),
    _config("one sample a prompt", SIGNAL, "samples_per_prompt=1", "steps=6"),
    _config("negative evaluation", "evaluation.problems|evaluation.every", "evaluation.every=-1"),
    _config("evaluation after the end", "", "evaluation.every=99", runs=True),
    _config("large minibatch", "", "minibatch_samples=99999", runs=True),
    _config("minibatch of 1", "minibatch_samples = 1 is smaller", "minibatch_samples=1"),
    _config("negative seed", "", "seed=-5", runs=True),
    _config("huge seed", "seed", "seed=" + "9" * 30),
    _config("broken template", "template", "agents.wren.template={% for %}"),
    _config("failing template", "template", "agents.wren.template={{ 1 / 0 }}"),
    _config("template without messages", "template = 'hello'", "agents.wren.template=hello"),
    _config("floor over 1", "floor", "algorithm.floor=2.0", teams=("two",)),
    _config("clip below 0", "epsilon_low", "algorithm.epsilon_low=-1", teams=("two",)),
    _config("no equals sign", "steps", "steps"),
    _config("option for an override", "steps=VALUE", "--steps", "3"),
    _config("unknown option of train", "--nope", "--nope"),
    _config("run is a file", "bad.toml", "--run", "bad.toml", files={"bad.toml": ""}),
    _config("run holds other files", "is not empty", "--run", ".", files={"mine.txt": ""}),
    _file("empty", "agents|task|steps", ""),
    _file("not TOML", "bad.toml", "steps: 3\n"),
    _file("binary", "bad.toml", bytes(range(256))),
    _file("UTF-16", "bad.toml", "steps = 3\n".encode("utf-16")),
    Kind("config missing", "nothing.toml", command=("train", "nothing.toml")),
    Kind("config a folder", "is a directory", command=("train", ".")),
    Kind("config a data file", "data.jsonl",
         files={"data.jsonl": TEXT}, command=("train", "data.jsonl")),
    Kind("resume nothing", "not a run", command=("resume", "nothing")),
    Kind("show nothing", "not a run", command=("show", "nothing")),
    Kind("samples nothing", "not a run", command=("samples", "nothing")),
]
# fmt: on
KINDS = [*REWARDS, *DATA, *CONFIGS]
