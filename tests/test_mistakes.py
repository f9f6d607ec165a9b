"""What people type or set up wrongly, and the sentence that each gets: what is wrong and what to
do.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import server_forks

# The command line, and what the last line says.
MISTAKES = {
    "a typo in a command": ("srve", "invalid choice: 'srve'.*Is it serve\\?"),
    "a typo in an option of serve": ("serve demo --prot 1", "--prot.*Is it --port\\?"),
    "a typo in an option": ("doctor --modle x", "--modle.*Is it --model\\?"),
    "two models": ("serve demo --model other", "the model is named twice"),
    "a port out of range": ("serve demo --port 70000", "between 0 and 65535 .got 70000"),
    "a port that is a word": ("serve demo --port http", "invalid int value: 'http'"),
    "a size without a unit": ("serve demo --pool-bytes lots", "--pool-bytes: 'lots' is not a size"),
    "bits that do not exist": ("serve demo --kv-bits 3", "--kv-bits.*3"),
    "a file of llama.cpp": ("serve m.gguf", "m.gguf has weights in the form GGUF.*safetensors"),
    "a repository of llama.cpp": ("serve a/B-GGUF", "a/B-GGUF has weights in the form GGUF"),
    "a folder without a model": (
        "serve {folder}",
        "is not the folder of a model: it has no config",
    ),
    "a store that is a file": ("serve demo --store-dir {file}", "--store-dir"),
    "a folder of a store that cannot be made": ("serve demo --store-dir /proc/x", "--no-store"),
    "a settings file that is not there": ("serve demo --config {folder}/no.toml", "no.toml"),
    "an unknown setting": ("serve demo --config {settings}", "unknown option prot. Is it port\\?"),
    "no server for the agents": (
        "demo --url {closed}",
        "does not answer.*Give --url a server",
    ),
    "no turns": ("demo --turns 0", "--turns must be at least 1"),
    "no server for top": ("top --url {closed}", "Start the server, or give --url another one"),
    "a URL without a scheme": ("top --url 127.0.0.1:1", "Cannot read http://127.0.0.1:1/health"),
    "a URL with a port that none can be": ("demo --url http://x:99999", "between 1 and 65535"),
    "a plan of a model that is not there": ("plan --model {folder}", "config.json"),
    "a name that no package can have": ("plugin new My_Arch", "lower-case letters"),
    "a typo in the demo's name": ("serve demoo", "Is it demo\\?"),
    "more shared tokens than there are": ("plan --shared 64k", "--shared must be less than"),
    "a GGUF to plan": ("plan --model m.gguf", "m.gguf has weights in the form GGUF"),
    "an unknown client": ("launch cluade", "invalid choice: 'cluade'"),
}


@pytest.fixture
def names(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What command lines name."""
    file, settings = tmp_path / "file", tmp_path / "settings.toml"
    file.write_text("")
    settings.write_text("prot = 1\n")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        folder = tmp_path / "folder"
        folder.mkdir()
        yield {
            "folder": str(folder),
            "file": str(file),
            "settings": str(settings),
            "closed": url,
        }


@pytest.mark.parametrize(("command", "sentence"), MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_gets_a_sentence(
    command: str, sentence: str, names: dict[str, str], tmp_path: Path
) -> None:
    arguments = command.format(**names).split()
    run = "import sys; from mlx_blockpool.cli import main; sys.exit(main(sys.argv[1:]))"
    ended = server_forks().run(run, *arguments, folder=tmp_path)
    assert ended.returncode in (1, 2)
    assert "Traceback" not in ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("mlx-blockpool")
    assert re.search(sentence, last), last
