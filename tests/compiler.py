"""mlx compiles each fused operation on the CPU with g++ when it first runs on a machine. Most of
that is its header, which is compiled once here.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import mlx

HEADER = "mlx/backend/cpu/compiled_preamble.h"
# How mlx calls it, which a compiled header must agree with; else g++ reads the header itself.
FLAGS = "-std=c++17 -O3 -Wall -fPIC"


def compile_header_once(folder: Path) -> None:
    """Put a g++ into `folder` and before all others on the path, for this process and those that it
    starts. Its first call for mlx compiles the header.
    """
    compiler, include = shutil.which("g++"), Path(next(iter(mlx.__path__)), "include")
    if compiler is None or not (include / HEADER).exists():
        return
    compiled = folder / HEADER
    compiled.parent.mkdir(parents=True)
    gpp, theirs, mine, one = map(
        shlex.quote, map(str, (compiler, include, compiled, compiled.with_suffix(".lock")))
    )
    program = folder / "g++"
    program.write_text(f"""#!/bin/sh
case "$*" in *{theirs}*)
  if mkdir {one} 2>/dev/null; then
    {gpp} {FLAGS} -I {theirs} -x c++-header {theirs}/{HEADER} -o {mine}.new 2>/dev/null &&
      mv {mine}.new {mine}.gch
  fi
esac
exec {gpp} -I {shlex.quote(str(folder))} "$@"
""")
    program.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
