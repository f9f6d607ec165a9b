"""instructor asks a random model for a form, in an environment of its own: see ask_instructor.py. Only with --clients."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from server.serving import Client

from clients.forms import Bounded
from clients.programs import install

PACKAGE = "instructor==1.17.0"
ASK = Path(__file__).parent / "ask_instructor.py"


def test_instructor(server: Client, installed: Path) -> None:
    python = install(PACKAGE, installed / "instructor") / "python"
    ran = subprocess.run([str(python), str(ASK), str(server.port)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert len(found) == 4
    for replies in found.values():
        assert [Bounded.model_validate(reply).model_dump() for reply in replies] == replies
