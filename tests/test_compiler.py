"""What mlx compiles reads its compiled header."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import mlx
import pytest
from compiler import FLAGS, HEADER, compile_header_once


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_program_of_mlx_reads_the_compiled_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    compile_header_once(tmp_path)
    (tmp_path / "x.cpp").write_text(f'#include "{HEADER}"\n')
    include = Path(next(iter(mlx.__path__)), "include")
    options = [*FLAGS.split(), "-shared", "-I", str(include), "-H", "x.cpp", "-o", "x.so"]
    ran = subprocess.run(["g++", *options], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0
    assert f"{HEADER}.gch" in ran.stderr.splitlines()[0]
