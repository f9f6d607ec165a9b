"""Every command and example of the READMEs is run; the hooks, options and endpoints that they
show are those of the package.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import mlx_lm.server
import pytest
from documents import ROOT, TEXTS, blocks, commands, section
from forks import server_forks
from mlx_blockpool_plugins import volatile
from server.processes import process, written
from thorough import only

from mlx_blockpool import cli, hooks
from mlx_blockpool.drafts.curve import CONTEXT
from mlx_blockpool.kv import measuring, path_measuring
from mlx_blockpool.server.options import CHANGED_OPTIONS, add_options

BIN = Path(sys.executable).parent
COMMANDS = commands()
EXAMPLES = [block for block in blocks("python") if "import" in block]
SERVER = "mlx_blockpool/server/README.md"
DECODE_PATHS = "mlx_blockpool/server/decode-paths.md"


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in a text, without their heads."""
    lines = text.splitlines()
    heads = {
        number
        for line in range(len(lines))
        if lines[line].startswith("|---")
        for number in (line - 1, line)
    }
    body = [
        line for number, line in enumerate(lines) if line.startswith("|") and number not in heads
    ]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body]


def anchors(text: str) -> set[str]:
    """The names under which the headings of a document can be linked to."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_newcomer_has_250_lines_to_read() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 250


@pytest.mark.parametrize("document", TEXTS)
def test_links_lead_somewhere(document: str) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", TEXTS[document], flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if path.startswith("https://"):
            continue
        found = (ROOT / document).parent / path if path else ROOT / document
        if not found.exists() or (
            anchor and anchor not in anchors(found.read_text(encoding="utf-8"))
        ):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("document", TEXTS)
def test_files_that_are_named_are_there(document: str) -> None:
    named = re.findall(
        r"[ `]((?:tests|benchmarks|mlx_blockpool|patches|plugins)/[\w./-]*\w)", TEXTS[document]
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    assert rows(section("README.md", "Figures"))
    assert [
        row
        for row in rows(section("README.md", "Figures"))
        if row not in rows(TEXTS["benchmarks/README.md"])
    ] == []


def test_every_benchmark_has_a_question() -> None:
    named = {row[0].strip("`") for row in rows(section("benchmarks/README.md", "Run"))}
    assert named == {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}


def test_the_options_are_those_of_the_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def options(main: Callable[[], Any]) -> set[str]:
        with pytest.raises(SystemExit):
            main()
        return set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE))

    shown = {
        name
        for row in rows(section(SERVER, "Options"))
        for name in re.findall(r"^`(--[\w-]+)", row[0])
    }
    settings = {
        name
        for row in rows(section(SERVER, "Settings for experiments"))
        for name in re.findall(r"^`([\w-]+)", row[0])
    }
    monkeypatch.setattr(sys, "argv", ["mlx_lm.server", "--help"])
    theirs, serve = options(mlx_lm.server.main), options(lambda: cli.main(["serve", "--help"]))
    assert len(serve) <= 45
    parser = argparse.ArgumentParser()
    add_options(parser)
    ours = {action.option_strings[0] for action in parser._actions} - {"-h"}
    assert shown == (serve - theirs) | CHANGED_OPTIONS.keys() & serve
    assert {f"--{name}" for name in settings} == (ours | CHANGED_OPTIONS.keys()) - serve


@pytest.mark.parametrize(
    ("command", "folder"), [("mlx-blockpool", ""), ("mlx-blockpool store", "store/")]
)
def test_every_command_has_a_line(
    command: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command.split()[1:], "--help"])
    names = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    lines = " ".join(
        row[0] for row in rows(section(f"mlx_blockpool/{folder}README.md", "Commands"))
    )
    assert names
    assert [name for name in names if f"{command.split()[-1]} {name}" not in lines] == []


def test_what_is_measured_is_as_many_as_the_page_says() -> None:
    pages = (
        TEXTS["mlx_blockpool/server/drafts.md"],
        *TEXTS[DECODE_PATHS].split("\n## When a model is measured\n"),
    )
    drafts, paths, when = (" ".join(text.split()) for text in pages)
    rows, alone = (
        measuring.ROWS[-1],
        max(count for count in measuring.ROWS if count <= measuring.ROWS_OF_MEMBER),
    )
    assert (
        f"plain steps of 1 to {measuring.MEMBERS[-1]} requests, and forwards with 1 to {rows} "
        "tokens" in drafts
    )
    assert f"or with 1 to {alone} for models whose sequences are verified alone" in drafts
    kernel, rows = len(path_measuring.KERNEL_SHAPES), len(path_measuring.ROWS)
    assert (
        f"for {len(path_measuring.SHAPES)} kinds of batches, and where there is a kernel for "
        f"{kernel + rows} more" in paths
    )
    assert f"for up to {len(path_measuring.WINDOWS) + rows} kinds of batches" in paths
    slow = f"a forward of one token takes more than {measuring.SLOW * measuring.SECONDS:g} seconds"
    assert slow in drafts
    assert slow in when
    assert (
        f"{measuring.MEMBERS[-1]} requests and a context of {CONTEXT + measuring.MORE_CONTEXT:,} "
        "tokens" in when
    )


def test_messages_to_look_up_are_those_of_the_package() -> None:
    sources = (ROOT / "mlx_blockpool").rglob("*.py")
    said = [
        node.value
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    messages = [
        part.strip()
        for heading in ("It does not start", "It is slow")
        for row in rows(section("mlx_blockpool/troubleshooting.md", heading))
        for message in re.findall(r"`([^`]* [^`]*)`", row[0])
        # The system's own words follow the dots of this one.
        for part in re.split(r" \.\. (?:Address already in use)?|DIR", message)
        if part.strip()
    ]
    assert len(messages) >= 8
    assert [part for part in messages if not any(part in text for text in said)] == []


def test_the_normalisers_are_those_of_the_package() -> None:
    shown = [
        row[0].strip("`")
        for row in rows(section("mlx_blockpool/server/explanations.md", "Normalisers"))
    ]
    assert shown == [normaliser.name for normaliser in volatile.prompt_normalisers()]


def test_ci_runs_the_set_up_and_the_test_command() -> None:
    script = (ROOT / ".ci/run").read_text()
    set_up, test = commands("README.md")[:2], ".venv/bin/pytest"
    assert set_up[0].startswith("python3 -m venv")
    assert test in commands("README.md")
    lines = script.replace("run_tests ", "").splitlines()
    assert [command for command in (*set_up, test) if command not in lines] == []


def test_every_command_is_one_that_a_test_runs() -> None:
    tested = (
        "python3 -m venv",
        ".venv/bin/pip",
        ".venv/bin/mlx-blockpool",
        ".venv/bin/pytest",
        "curl",
        "patch -p1",
        "diff -u",
    )
    tested += (
        ".venv/bin/mlx_lm.server",
        ".venv/bin/python benchmarks/bench_",
        ".venv/bin/python -m benchmarks --quick ",
        ".venv/bin/aiperf profile",
        ".venv/bin/python -m mlx_blockpool.demo.",
    )
    # In tests/test_gpu.py.
    tested += ("benchmarks/gpu.sh",)
    # In tests of the server of several ranks, with the command that it starts again.
    (loop,) = (c for c in COMMANDS if c.startswith("while "))
    assert [c for c in COMMANDS if not c.startswith(tested) and c not in loop] == []


@contextmanager
def serving(command: str, env: dict[str, str] | None = None) -> Iterator[int]:
    """The server that a command starts, on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*installed(command), "--port", str(port)], env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        # For as long as the busiest machine may take.
        for _ in range(6000):
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            except OSError:
                time.sleep(0.05)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


def installed(command: str) -> list[str]:
    """A command with the programs of this environment."""
    first, *rest = shlex.split(command.replace(".venv/bin", str(BIN)))
    return [sys.executable, *rest] if first == f"{BIN}/python" else [first, *rest]


def curl(command: str, port: int) -> str:
    return subprocess.run(
        shlex.split(command.replace("8080", str(port))), capture_output=True, text=True, check=True
    ).stdout


SERVE = next(c for c in COMMANDS if " serve " in c)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[int, dict[str, Any]]]:
    """The server of the README, and what it answers to each request that a document shows."""
    with serving(SERVE) as port:
        answers = {
            command: curl(command, port) for command in COMMANDS if command.startswith("curl")
        }
        yield (
            port,
            {
                command: json.loads(text) if text.startswith("{") else text
                for command, text in answers.items()
            },
        )


@pytest.fixture
def port(served: tuple[int, dict[str, Any]]) -> int:
    return served[0]


def run(example: str) -> str:
    """What an example prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(example, {"__name__": "__main__"})
    return out.getvalue()


def test_clients_of_the_readme_get_an_answer(port: int) -> None:
    (example,) = blocks("python client")
    answers = run(example.replace("8080", str(port))).splitlines()
    # From OpenAI's SDK and from Anthropic's.
    assert ["256 tokens" in answer for answer in answers] == [True, True]


def status_of(
    method: str, url: str, body: dict[str, Any] | None = None, **headers: str
) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


# What ends a stream that would go on.
ENDS = {"/v1/cache/events": "?follow=0"}


def test_the_endpoints_are_those_of_the_server(port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    asked = {"input": "What is a block?", "max_output_tokens": 1, "prompt_cache_key": "ann"}
    names = {
        "/v1/responses": json.loads(status_of("POST", f"{url}/v1/responses", asked)[1])["id"],
        "/v1/agents": "ann",
    }
    names["/v1/models"] = json.loads(status_of("GET", f"{url}/v1/models")[1])["data"][0]["id"]
    names["/v1/cache"] = json.loads(status_of("GET", f"{url}/v1/cache/explain")[1])["requests"][0][
        "id"
    ]
    listed = [
        match
        for row in rows(section(SERVER, "Endpoints"))
        for match in re.findall(r"`(GET|POST|DELETE) (/\S+)`", row[0])
    ]
    assert len(listed) == len({*listed}) > 20
    statuses = {}
    # Nobody is there to be asked about after the deletion.
    for method, path in sorted(listed, key=lambda endpoint: endpoint[0] == "DELETE"):
        known = next((name for start, name in names.items() if path.startswith(start)), "")
        filled = (
            path.replace("/NAME", f"/{known}").replace("/ID", f"/{known}").replace("/ACT", "/pin")
        )
        statuses[method, path], _ = status_of(
            method, url + filled + ENDS.get(path, ""), {} if method == "POST" else None
        )
    assert {endpoint for endpoint, status in statuses.items() if status == 404} == set()
    assert status_of("GET", f"{url}/v1/nothing") == (404, ANY)


def test_the_requests_are_answered(served: tuple[int, dict[str, Any]]) -> None:
    def answer(*parts: str) -> Any:
        """What the only request with all these parts was answered."""
        (found,) = (
            given
            for command, given in served[1].items()
            if all(part in f"{command} " for part in parts)
        )
        return found

    assert (
        "256 tokens"
        in answer("/v1/chat/completions", "a block?")["choices"][0]["message"]["content"]
    )
    assert json.loads(answer("response_format")["choices"][0]["message"]["content"]) in (
        "yes",
        "no",
    )
    assert answer("/v1/cache ")["backend"] == "blockpool"
    assert answer("/health")["status"] == "ok"
    assert "slab" in answer("X-Agent-Id: ann")["choices"][0]["message"]["content"]
    assert "ann" in [agent["name"] for agent in answer("/v1/agents ")["agents"]]
    assert (answer("/save")["agent"], answer("/save")["saved"]) == ("ann", True)
    assert (answer("/fork")["agent"], answer("/fork")["of"]) == ("bob", "ann")
    assert (answer("DELETE")["agent"], answer("DELETE")["clean"]) == ("bob", True)
    assert [request["agent"] for request in answer("/v1/cache/explain ")["requests"]].count(
        "ann"
    ) == 1
    assert "256 tokens" in answer("/api/chat")["message"]["content"]
    assert answer("/api/tags ")["models"][0]["name"] == "demo"
    assert "".join(pair["piece"] for pair in answer("/tokenize")["tokens"]) == "What is a block?"
    assert "What is a block?" in answer("/apply-template")["prompt"]
    kinds = re.findall("^event: (.*)$", answer("/v1/cache/events"), re.MULTILINE)
    assert kinds[0] == "all_cleared"
    assert "vllm:generation_tokens_total" in answer("/metrics")
    assert [model["state"] for model in answer("/admin/models ")["models"]] == ["loaded"]
    assert (answer("/admin/load")["state"], answer("/admin/unload")["state"]) == (
        "loaded",
        "available",
    )


@pytest.mark.parametrize("command", [c for c in COMMANDS if "blockpool store" in c])
def test_store_commands_run(command: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        installed(command),
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout


@pytest.fixture
def copied_mlx_lm(tmp_path: Path) -> dict[str, str]:
    """An environment whose mlx-lm is a copy that may be patched."""
    found = find_spec("mlx_lm")
    assert found is not None
    assert found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0])
    shutil.copytree(folder, tmp_path / "mlx_lm")
    for info in folder.parent.glob("mlx_lm-*.dist-info"):
        shutil.copytree(info, tmp_path / info.name)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize("start", only(["command", "module"], "command"))
def test_patched_mlx_lm_serves_from_the_pool_and_goes_back_to_the_byte(
    copied_mlx_lm: dict[str, str], start: str
) -> None:
    server = Path(copied_mlx_lm["PYTHONPATH"]) / "mlx_lm/server.py"
    before = server.read_bytes()
    status, apply, revert = (installed(c) for c in COMMANDS if "mlx-blockpool patch" in c)
    assert subprocess.run(status, env=copied_mlx_lm, check=True, capture_output=True).stdout
    subprocess.run(apply, env=copied_mlx_lm, check=True)
    assert server.read_bytes() != before
    command = next(c for c in COMMANDS if "--cache-backend" in c)
    if start == "module":
        command = command.replace(".venv/bin/mlx_lm.server", ".venv/bin/python -m mlx_lm server")
    with serving(command, copied_mlx_lm) as port:
        assert (
            json.loads(curl("curl -s http://127.0.0.1:8080/v1/cache", port))["backend"]
            == "blockpool"
        )
    subprocess.run(revert, env=copied_mlx_lm, check=True)
    assert server.read_bytes() == before


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs the program patch")
def test_a_patch_made_by_hand_is_the_same(copied_mlx_lm: dict[str, str], tmp_path: Path) -> None:
    site = Path(copied_mlx_lm["PYTHONPATH"])
    server = site / "mlx_lm/server.py"
    stock = server.read_bytes()
    (find,) = re.findall(r"`(python -c [^`]*)`", TEXTS["patches/README.md"])
    found = subprocess.run(
        installed(find.replace("python", ".venv/bin/python", 1)),
        env=copied_mlx_lm,
        capture_output=True,
    )
    assert found.stdout.decode() == f"{site}\n"
    apply, revert, diff = (c for c in COMMANDS if c.startswith(("patch", "diff")))
    env = {**copied_mlx_lm, "PATCHES": str(ROOT / "patches")}
    subprocess.run(apply, shell=True, cwd=site, env=env, check=True, capture_output=True)
    patched = server.read_bytes()
    subprocess.run(revert, shell=True, cwd=site, env=env, check=True, capture_output=True)
    assert server.read_bytes() == stock != patched
    for folder, content in (("a", stock), ("b", patched)):
        (tmp_path / folder / "mlx_lm").mkdir(parents=True)
        (tmp_path / folder / "mlx_lm/server.py").write_bytes(content)
    assert subprocess.run(diff, shell=True, cwd=tmp_path).returncode == 1
    assert (tmp_path / "server.py.patch").read_bytes() == (
        ROOT / "patches/mlx-lm-0.32.2/server.py.patch"
    ).read_bytes()


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example: str) -> None:
    assert run(example)
    lines = [line for line in example.splitlines() if line and not re.match("from|import", line)]
    assert len(lines) <= 11


def test_the_second_run_of_a_script_goes_on_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = [e for e in EXAMPLES if "open_prefix(" in e]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = run(example)
    again = server_forks().run(example, folder=Path("/"))
    assert again.stderr == ""
    found = [
        re.fullmatch(r"(\d+) of (\d+) tokens cached(.*)", out, re.DOTALL)
        for out in (first, again.stdout)
    ]
    hits, lengths, replies = zip(*(match.groups() for match in found if match), strict=True)
    assert (hits[0], int(hits[1])) == ("0", int(lengths[1]) - 1)
    assert [reply.partition("<|im_start|>")[2] for reply in replies] == [
        replies[0].partition("<|im_start|>")[2]
    ] * 2
    assert "256 tokens" in replies[1]
    assert list(tmp_path.glob("mlx-blockpool/models/*/blocks/*/*.safetensors"))


EXAMPLE = next(c for c in COMMANDS if "demo --url" in c)


def agents_talk(port: int, turns: int) -> dict[tuple[str, str], int]:
    """What the example prints: the cached tokens of each agent's turns."""
    command = [*installed(EXAMPLE), "--url", f"http://127.0.0.1:{port}", "--turns", str(turns)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return {
        (agent, turn): int(cached.replace(",", ""))
        for agent, turn, cached in re.findall(r"(\w+) +turn (\d): +([\d,]+) of", out)
    }


def drain(server: Any) -> None:
    """Read the server's log as it comes, until it has ended: a full pipe would stop it."""
    threading.Thread(target=server.stderr.read, daemon=True).start()


@pytest.mark.thorough
def test_several_agents_talk_and_go_on_after_a_kill(tmp_path: Path) -> None:
    with process(Path("demo"), tmp_path) as (port, server):
        drain(server)
        before = agents_talk(port, 2)
        assert len(before) == 10
        assert sum(before.values()) > 9 * 256
        written(port)
        server.kill()
    with process(Path("demo"), tmp_path) as (port, server):
        drain(server)
        browser = urllib.request.Request(
            f"http://127.0.0.1:{port}/", headers={"Accept": "text/html"}
        )
        assert b"mlx-blockpool" in urllib.request.urlopen(browser).read()
        assert len(json.loads(curl("curl -s http://127.0.0.1:8080/v1/agents", port))["agents"]) == 5
        assert min(agents_talk(port, 2).values()) >= 768
        server.kill()


BENCHMARKS = [c for c in COMMANDS if "python" in c and "benchmarks" in c]


@pytest.mark.parametrize("command", only(BENCHMARKS, BENCHMARKS[0]))
def test_benchmarks_run(command: str) -> None:
    ran = subprocess.run(installed(command), capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert all(json.loads(line)["bench"] for line in ran.stdout.splitlines())


@pytest.mark.thorough
@pytest.mark.skipif(not (BIN / "aiperf").exists(), reason="needs the extra bench")
def test_aiperf_measures_the_server(port: int, tmp_path: Path) -> None:
    (command,) = (c for c in COMMANDS if "aiperf" in c and "pip" not in c)
    ran = subprocess.run(
        [*installed(command.replace("8080", str(port))), "--artifact-dir", str(tmp_path)], cwd=ROOT
    )
    assert ran.returncode == 0
    (exported,) = tmp_path.rglob("profile_export_aiperf.json")
    assert json.loads(exported.read_text())["request_count"]["avg"] == 20


def test_hooks_are_those_of_the_package() -> None:
    shown = [block.strip() for block in blocks("python") if block.startswith("def ")]
    specs = [
        f
        for f in vars(hooks).values()
        if inspect.isfunction(f) and hasattr(f, "mlx_blockpool_spec")
    ]
    assert shown == [f"def {f.__name__}{inspect.signature(f)}".replace("'", "") for f in specs]
