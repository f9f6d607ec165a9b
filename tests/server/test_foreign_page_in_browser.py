"""A page of another site in a real headless Chromium, which tries to act on an agent and to find
out what it has sent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from server.serving import Client, blockpool_server, cached_tokens

SECRET = "The safe in the cellar opens with the number 4711, and with no other number. " * 4
PATIENCE = 60_000
# What the scripts of the page use: a request without a preflight, and the tokens of a completion
# that were cached.
TOOLS = """
const post = (path, body, headers = {}) =>
  fetch(SERVER + path, {
    method: "POST",
    headers: { "Content-Type": "text/plain", ...headers },
    body: JSON.stringify(body),
  });
const cached = async (prompt) => {
  const answer = await post("/v1/completions", { prompt, max_tokens: 1 });
  return (await answer.json()).usage.prompt_tokens_details.cached_tokens;
};
"""
# It sends chats as the agent, in every way, and reads what comes of it.
TAKEOVER = """
async () => {
  const chat = { messages: [{ role: "user", content: "hi" }], max_tokens: 2, priority: -9 };
  const found = [];
  for (const field of ["user", "session_id", "agent_id", "prompt_cache_key"])
    found.push((await post("/v1/chat/completions", { ...chat, [field]: "agent-1" })).status);
  const agent = { "X-Agent-Id": "agent-1", "X-Explain": "1" };
  found.push((await post("/v1/chat/completions", chat, agent)).status);
  return found;
}
"""
# It guesses the next digit after what it knows: how much of each guess was cached.
ORACLE = """
async (known) => {
  await cached(known);
  const found = [];
  for (const digit of "0123456789") found.push(await cached(known + digit + "?"));
  return found;
}
"""
# The same from a sandboxed frame, whose origin is null.
FRAMED = """
([tools, script, argument]) => new Promise((resolve) => {
  addEventListener("message", (event) => resolve([event.origin, event.data]), { once: true });
  const frame = document.createElement("iframe");
  frame.sandbox = "allow-scripts";
  const call = `(${script})(${JSON.stringify(argument)})`;
  const run = `${call}.then((found) => parent.postMessage(found, "*"))`;
  frame.srcdoc = `<script>${tools}; ${run}</script>`;
  document.body.append(frame);
})
"""
# Whether the page can read anything at these paths, or even tell that there is something.
READING = """
async (paths) => {
  const found = {};
  for (const path of paths) {
    const read = await fetch(SERVER + path).then((answer) => answer.status, () => "unreadable");
    const simple = await fetch(SERVER + path, { mode: "no-cors" })
      .then((answer) => answer.type, () => "unreadable");
    const loads = await new Promise((resolve) => {
      const script = Object.assign(document.createElement("script"), { src: SERVER + path });
      script.onload = () => resolve("loads");
      script.onerror = () => resolve("fails");
      document.body.append(script);
    });
    found[path] = [read, simple, loads];
  }
  return found;
}
"""
ACTING = """
async () => {
  const found = [];
  for (const act of ["pin", "unpin", "save", "restore"])
    found.push((await post(`/v1/agents/agent-1/${act}`, {})).status);
  found.push((await post("/v1/agents/agent-1/rename", { to: "mine" })).status);
  const deletion = await fetch(SERVER + "/v1/agents/agent-1", { method: "DELETE" });
  found.push(deletion.status);
  found.push((await post("/admin/unload", { model: "default_model" })).status);
  await fetch(SERVER + "/v1/agents/agent-1/unpin", { method: "POST", mode: "no-cors" });
  return found;
}
"""


class EmptyPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>A page</title><body></body>")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[int]:
    """The port of a web server on this machine, of which the browser thinks that it is another
    site's.
    """
    web = ThreadingHTTPServer(("127.0.0.1", 0), EmptyPage)
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield web.server_address[1]
    web.shutdown()
    thread.join()
    web.server_close()


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with blockpool_server(
        model, "--pool-bytes", "20MB", "--store-dir", str(tmp_path_factory.mktemp("store"))
    ) as running:
        yield running
        running.settle()


@contextmanager
def tab_at(chromium: Any, origin: str, server: Client) -> Iterator[Any]:
    context = chromium.new_context()
    context.set_default_timeout(PATIENCE)
    tab = context.new_page()
    tab.goto(origin)
    tab.add_script_tag(content=f"const SERVER = 'http://127.0.0.1:{server.port}'; {TOOLS}")
    yield tab
    context.close()


@pytest.fixture
def evil(chromium: Any, site: int, server: Client) -> Iterator[Any]:
    """A tab with a page of another site."""
    with tab_at(chromium, f"http://evil.example:{site}", server) as tab:
        yield tab


def in_frame(tab: Any, server: Client, script: str, argument: Any = None) -> Any:
    """What a script returns that runs in a sandboxed frame of the page."""
    tools = f"const SERVER = 'http://127.0.0.1:{server.port}'; {TOOLS}"
    origin, found = tab.evaluate(FRAMED, [tools, script, argument])
    assert origin == "null"
    return found


def turn(server: Client) -> int:
    """A turn of the agent. Returns its cached tokens."""
    usage = server.chat([{"role": "user", "content": SECRET}], user="agent-1", max_tokens=2)[
        "usage"
    ]
    return cached_tokens(usage)


def agents(server: Client) -> list[dict[str, Any]]:
    server.settle()
    found: list[dict[str, Any]] = server.send("/v1/agents")[1]["agents"]
    return found


def test_a_foreign_page_takes_over_no_agent(server: Client, evil: Any) -> None:
    turn(server)
    server.settle()
    assert server.send("/v1/agents/agent-1/pin", {})[1]["pinned_in_memory"]
    before = agents(server)
    assert [agent["name"] for agent in before] == ["agent-1"]
    assert evil.evaluate(TAKEOVER) == [200] * 5
    assert in_frame(evil, server, TAKEOVER) == [200] * 5
    assert agents(server) == before
    assert turn(server) >= len(SECRET)


def test_an_agent_does_not_wait_for_the_reply_to_a_foreign_page(server: Client, evil: Any) -> None:
    evil.evaluate("""async () => {
      const body = {
        prompt: "It goes on", max_tokens: 20000, user: "agent-1", stream: true,
        logit_bias: { 65: 100 },
      };
      window.reader = (await post("/v1/completions", body)).body.getReader();
      await window.reader.read();
    }""")
    turn(server)
    requests = server.send("/v1/cache/map")[1]["requests"]
    assert [(request["agent"], request["state"]) for request in requests] == [(None, "decode")]
    evil.evaluate("() => window.reader.cancel()")


@pytest.mark.thorough
def test_a_foreign_page_guesses_no_digit(server: Client, evil: Any) -> None:
    turn(server)
    server.send("/v1/completions", {"prompt": SECRET, "max_tokens": 1, "user": "agent-1"})
    at = SECRET.index("4711")
    for place in range(4):
        known = SECRET[: at + place]
        for found in (evil.evaluate(ORACLE, known), in_frame(evil, server, ORACLE, known)):
            assert len(found) == 10
            assert len(set(found)) == 1, (known, found)


def test_a_page_of_this_machine_shares_prefixes_with_other_clients(
    chromium: Any, site: int, server: Client, evil: Any
) -> None:
    server.send("/v1/completions", {"prompt": SECRET, "max_tokens": 1})
    ask = "(prompt) => cached(prompt)"
    with tab_at(chromium, f"http://localhost:{site}", server) as local:
        assert local.evaluate(ask, SECRET) >= len(SECRET) - 1
    found = evil.evaluate(ask, f"Page. {SECRET}"), evil.evaluate(ask, f"Page. {SECRET}")
    assert found[0] == 0
    assert found[1] >= len(SECRET)
    with tab_at(chromium, f"http://other.example:{site}", server) as other:
        assert other.evaluate(ask, f"Page. {SECRET}") == 0
    assert in_frame(evil, server, ask, f"Page. {SECRET}") == 0


def test_a_foreign_page_reads_nothing_of_agents_and_cannot_act_on_them(
    server: Client, evil: Any
) -> None:
    turn(server)
    before = agents(server)
    paths = [
        "/v1/agents",
        "/v1/agents/agent-1",
        "/v1/agents/agent-2",
        "/v1/cache",
        "/v1/cache/explain",
        "/v1/cache/map",
    ]
    paths += ["/v1/cache/events?follow=0", "/metrics", "/admin/models"]
    assert evil.evaluate(READING, paths) == {path: [403, "opaque", "fails"] for path in paths}
    assert evil.evaluate(ACTING) == [403] * 7
    assert agents(server) == before
