"""Forks of a process that has imported much: what `python -c code arguments...` does, without its imports each time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Each line of input is a job. A fork ends without the ends of its parent's modules.
MAIN = """
import json, os, sys, traceback
{imports}
for line in sys.stdin:
    job = json.loads(line)
    if not (child := os.fork()):
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(os.path.join(job["files"], name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(job["folder"])
        sys.argv = ["-c", *job["arguments"]]
        status = 0
        try:
            exec(job["code"], {{"__name__": "__main__"}})
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            status = traceback.print_exc() or 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """Runs one job after the other. Their output goes through files in `files`."""

    def __init__(self, process: subprocess.Popen[str], files: Path) -> None:
        self.process = process
        self.files = files

    def run(self, code: str, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        assert self.process.stdin
        assert self.process.stdout
        job = {"code": code, "arguments": arguments, "files": str(self.files), "folder": str(folder or self.files)}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        status = int(self.process.stdout.readline())
        return subprocess.CompletedProcess([], status, (self.files / "out").read_text(), (self.files / "err").read_text())


@contextmanager
def forks(imports: str, files: Path, **environment: str) -> Iterator[Forks]:
    """Forks of a process that has run the statements `imports`."""
    command = [sys.executable, "-c", MAIN.format(imports=imports)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, **environment}, cwd=files, text=True, **pipes) as process:
        yield Forks(process, files)
