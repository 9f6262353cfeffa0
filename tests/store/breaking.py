"""Kill a process that writes at every file operation."""

import os
import subprocess
import sys
from pathlib import Path

import hacrl.store.files

SRC = Path(hacrl.store.files.__file__).parents[2]

# Copies a folder for every moment n and runs a job in the copy that kills itself (SIGKILL) after its
# n-th file operation, until a job reaches its end. One process, forked for each moment.
KILLER = """
import os, shutil, signal, sys
from pathlib import Path
{imports}

CHANGES = set("open write __exit__ serialize_file mkdir rename link replace unlink rmdir".split())

def job(folder):
{job}

base, copies = Path(sys.argv[1]), Path(sys.argv[2])
for moment in range(1, 400):
    folder = copies / str(moment)
    shutil.copytree(base, folder)
    child = os.fork()
    if not child:
        left = moment
        def after_each_call(frame, event, called):
            global left
            if event == "c_return" and called.__name__ in CHANGES:
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.setprofile(after_each_call)
        job(folder)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        print(moment - 1)
        break
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(script: str, *arguments: object) -> str:
    process = start(script, *arguments)
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return out


def kill_everywhere(base: Path, copies: Path, imports: str, job: str) -> list[Path]:
    """The folders left by kills at every moment of a job; the last one is of the finished job."""
    copies.mkdir()
    body = "\n".join("    " + line for line in job.splitlines())
    moments = int(output(KILLER.format(imports=imports, job=body), base, copies))
    return [copies / str(n) for n in range(1, moments + 2)]


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())
