"""The page at /: its files need no key and load nothing from elsewhere; what it reads needs the
key.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections import Counter
from email.message import Message
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from mlx_blockpool.config import AccessConfig
from mlx_blockpool.server import jobs
from mlx_blockpool.server.access import AccessPolicy, is_page
from mlx_blockpool.server.bodies import StatusError
from mlx_blockpool.server.jobs import Job
from mlx_blockpool.server.watch import cache_map, page
from mlx_blockpool.server.watch.cache_map import CacheMaps
from server.serving import Client, at_once

pytestmark = pytest.mark.server(
    "--pool-bytes 30MB", model="llama", keys="ann:key-of-ann\nbob:key-of-bob\n"
)

NAMES = sorted(page.TYPES)


def get(
    server: Client, path: str, method: str = "GET", **headers: str
) -> tuple[int, Message, bytes]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", headers=headers, method=method
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def text(name: str) -> str:
    return page.read(name).decode()


def test_all_files_are_served_without_a_key(server: Client) -> None:
    for path, name in page.PATHS.items():
        status, headers, body = get(server, path, Accept="text/html,*/*")
        assert (status, headers["Content-Type"], body) == (200, page.TYPES[name], page.read(name))
        assert is_page(path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        head = get(server, path, "HEAD", Accept="text/html,*/*")
        assert (head[0], head[1]["Content-Length"], head[2]) == (200, str(len(body)), b"")
    assert get(server, "/page/no.js")[0] == 404
    assert get(server, "/page/../__init__.py")[0] == 404
    assert get(server, "/", "POST")[0] == 401


def test_what_the_page_reads_needs_the_key(server: Client) -> None:
    for path in page.FIGURES:
        assert get(server, path)[0] == (200 if path == "/health" else 401)
        assert get(server, path, Authorization="Bearer key-of-ann")[0] == 200


def test_files_of_the_folder_are_those_that_are_served() -> None:
    # The README's picture of the page is not part of it.
    others = ("__pycache__", "picture.png")
    found = {
        entry.name
        for entry in files(page).iterdir()
        if not entry.name.endswith(".py") and entry.name not in others
    }
    assert found == set(NAMES)
    assert sum(len(page.read(name)) for name in NAMES) < 100_000


def test_nothing_is_inline_or_from_elsewhere() -> None:
    html = text("index.html")
    assert re.findall(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=|javascript:", html) == []
    for name in NAMES:
        assert [
            url for url in re.findall(r"https?://[^\"'\s]+", text(name)) if "www.w3.org" not in url
        ] == [], name
    assert {*re.findall(r"(?:src|href)=\"(?!#)([^\"]+)\"", html)} <= {
        path.removeprefix("/") for path in page.PATHS
    }


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".js")])
def test_text_is_never_parsed(name: str) -> None:
    assert (
        re.findall(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|DOMParser",
            text(name),
        )
        == []
    )
    imported = re.findall(r"from \"\./([^\"]+)\"", text(name))
    assert set(imported) <= set(NAMES)


def test_every_endpoint_that_the_page_names_is_one_of_the_server(server: Client) -> None:
    named = set(
        re.findall(r"[\"`]((?:v1|admin|health)[/\w]*)", "".join(text(name) for name in NAMES))
    )
    assert {f"/{path}".rstrip("/") for path in named} >= {
        path for path in page.FIGURES if path != "/health"
    }


def test_figures_that_are_read_again_and_again_are_not_logged(
    server: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in ("/v1/cache", "/v1/cache/nothing", "/v1/models"):
        get(server, path, Authorization="Bearer key-of-ann")
    logged = re.findall(r'"GET (\S+) HTTP', capfd.readouterr().err)
    assert logged == ["/v1/cache/nothing", "/v1/models"]


def headers_of(**headers: str) -> Message:
    message = Message()
    for name, value in headers.items():
        message[name] = value
    return message


def test_acts_of_the_own_page_pass_the_check_of_origins() -> None:
    def status(config: AccessConfig, origin: str, host: str) -> int | None:
        try:
            AccessPolicy(config).check(
                "POST", "/v1/agents/a/pin", headers_of(Host=host, Origin=origin)
            )
        except StatusError as error:
            return error.status
        return None

    remote = AccessConfig(host="0.0.0.0", allow_remote=True)
    assert status(remote, "http://192.168.1.7:8080", "192.168.1.7:8080") is None
    assert status(remote, "http://192.168.1.7:9090", "192.168.1.7:8080") == 403
    # A name that anybody may point at this machine.
    assert status(remote, "http://evil.example:8080", "evil.example:8080") == 403
    named = AccessConfig(host="0.0.0.0", allow_remote=True, allowed_hosts=("box.lan",))
    assert status(named, "http://box.lan:8080", "box.lan:8080") is None
    assert status(named, "http://evil.example", "box.lan:8080") == 403
    assert status(AccessConfig(), "http://localhost:8080", "localhost:8080") is None


def test_the_page_is_part_of_the_wheel() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (patterns,) = re.findall(r'"mlx_blockpool.server.watch.page" = \[(.*)\]', project)
    assert {f'"*{Path(name).suffix}"' for name in NAMES} == set(patterns.split(", "))


# -- figures ---------------------------------------------------------------------------------------


def ask(server: Client, who: str, path: str, body: Any = None) -> Any:
    status, answer = server.send(path, body, headers={"x-api-key": f"key-of-{who}"})
    assert status == 200, answer
    return answer


@pytest.fixture
def always_new(server: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every map is a new snapshot."""
    monkeypatch.setattr(cache_map, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(cache_map, "REST", 0)
    server.generator.maps = CacheMaps(server.generator)


def test_the_map_is_that_of_the_pool(server: Client, always_new: None) -> None:
    system = {"role": "system", "content": "All agents begin like this. " * 24}
    for who, name in (("ann", "one"), ("ann", "two"), ("bob", "one")):
        chat = {
            "messages": [system, {"role": "user", "content": f"{who} {name}"}],
            "max_tokens": 2,
            "user": name,
        }
        ask(server, who, "/v1/chat/completions", chat)
    server.settle()
    found = {who: ask(server, who, "/v1/cache/map") for who in ("ann", "bob")}
    (served,) = server.generator.registry.loaded.values()
    counts = served.prefix.pool.settle()[0]
    letters = Counter(found["ann"]["groups"][0]["states"].lower())
    assert (letters["f"], letters["c"] + letters["o"]) == (counts.free, counts.evictable)
    assert [found[who]["agents"] for who in ("ann", "bob")] == [["one", "two"], ["one"]]
    shared = [s for s in found["ann"]["trie"] if s["start"] == 0]
    assert len(shared) == 1
    assert shared[0]["end"] >= 512
    assert "C" in found["ann"]["groups"][0]["states"]
    assert "C" not in found["bob"]["groups"][0]["states"]
    assert found["bob"]["requests"] == []
    hour = ask(server, "bob", "/v1/cache/hour")
    assert list(hour["agents"]) == ["one"]
    assert hour["agents"]["one"]["cached_tokens"] >= 512
    assert hour["minutes"][-1]["ttft"]["median"] > 0
    assert ask(server, "ann", "/v1/cache/map?model=nothing")["model"] == found["ann"]["model"]
    assert server.send("/v1/cache/map")[0] == 401


def test_requests_in_progress_are_those_of_the_owner(server: Client, always_new: None) -> None:
    seen: list[Any] = []
    chat = {
        "messages": [{"role": "user", "content": "Go on. " * 40}],
        "max_tokens": 90,
        "user": "long",
    }

    def look() -> None:
        while not seen:
            seen.extend(
                request
                for request in ask(server, "ann", "/v1/cache/map")["requests"]
                if request["generated"]
            )
            assert ask(server, "bob", "/v1/cache/map")["requests"] == []

    at_once([lambda: ask(server, "ann", "/v1/chat/completions", chat), look])
    (request,) = seen[:1]
    assert (request["agent"], request["state"], request["most"]) == ("long", "decode", 90)
    assert request["done"] == request["prompt"] > 40


@pytest.mark.parametrize(("rest", "is_new"), [(0.0, True), (1e12, False)])
def test_the_next_snapshot_waits_for_a_multiple_of_what_the_last_one_took(
    server: Client, monkeypatch: pytest.MonkeyPatch, rest: float, is_new: bool
) -> None:
    monkeypatch.setattr(cache_map, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(cache_map, "REST", rest)
    put, jobs = server.generator.requests.put, []

    def counting(item: Any) -> None:
        jobs.append(item)
        put(item)

    maps, server.generator.requests.put = CacheMaps(server.generator), counting
    try:
        maps.answer("ann")
        first = len(jobs)
        at_once([lambda: maps.answer("ann")] * 4)
    finally:
        del server.generator.requests.put
    assert first >= 1
    assert (len(jobs) > first) == is_new


def test_a_snapshot_ends_where_models_change(
    server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "SLICE_SECONDS", -1.0)
    # A snapshot of several slices.
    ask(server, "ann", "/v1/completions", {"prompt": "A prompt. " * 40, "max_tokens": 1})
    generator, maps = server.generator, CacheMaps(server.generator)
    put = generator.requests.put

    def stopping(job: Any) -> None:
        put(job)
        if maps._pending is not None:
            # Between two slices of the snapshot, as a swap of models begins.
            put(Job(maps.stop))

    generator.requests.put = stopping
    try:
        answer = maps.answer(None)
    finally:
        del generator.requests.put
    assert (answer["model"], answer["seconds_ago"]) == (None, None)
    assert maps._last.ended is None
