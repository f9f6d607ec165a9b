"""The page in a real headless Chromium: what it shows, what its buttons do, and that nothing
from clients runs as code.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from models import save_model

from mlx_blockpool.commands import top, top_screen
from mlx_blockpool.formatting import client_settings
from server.serving import Client, blockpool_server, until

pytestmark = pytest.mark.server("--pool-bytes 30MB", model="llama", is_stored=True)

sync_api: Any = pytest.importorskip(
    "playwright.sync_api", reason="needs the extra `browser`: pip install -e '.[browser]'"
)
expect = sync_api.expect
# Other tests run beside these.
PATIENCE = 30_000
expect.set_options(timeout=PATIENCE)
# A browser logs each 401, by which the page knows that there is a key, and each 409 to what a
# person wants.
EXPECTED = "status of 4(01|09)"
VIOLATIONS = (
    "addEventListener('securitypolicyviolation', event => console.error('violated ' + "
    "event.violatedDirective))"
)
FOCUSED = (
    "(document.activeElement.getAttribute('aria-label') || "
    "document.activeElement.textContent).trim()"
)
# Notes the number of the last event that the page has received.
HEARING = """
const asked = fetch;
window.fetch = async (path, ...rest) => {
  const response = await asked(path, ...rest);
  if (!path.endsWith("/events")) return response;
  const [own, others] = response.body.tee();
  others.pipeThrough(new TextDecoderStream()).pipeTo(new WritableStream({ write(text) {
    for (const [, number] of text.matchAll(/^id: (\\d+)$/gm)) window.lastEvent = Number(number);
  } }));
  return new Response(own, response);
};
"""
LONG = (
    "a name that is so long that it does not fit into any column of any table at any width of any "
    "screen"
)
HOSTILE = "<img src=x onerror=alert(1)>\"'&amp;"
OPTIONS = ("--pool-bytes", "30MB")


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Any]]:
    """visit(client): a tab with the page. In the end no tab may have had an error, a violation of
    the policy or an alert.

    A test that starts a server of its own closes the tab before that server ends: a lost connection
    is an error of the tab.
    """
    faults: list[str] = []
    contexts = []

    def open_tab(client: Client, path: str = "/", has_clock: bool = False, **options: Any) -> Any:
        context = chromium.new_context(**options)
        if has_clock:
            context.clock.install()
            context.add_init_script(HEARING)
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        context.add_init_script(
            "addEventListener('securitypolicyviolation', e => console.error('violated ' + "
            "e.violatedDirective))"
        )
        tab = context.new_page()
        tab.on(
            "console",
            lambda said: (
                said.type == "error"
                and not re.search(EXPECTED, said.text)
                and faults.append(said.text)
            ),
        )
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
        tab.goto(f"http://127.0.0.1:{client.port}{path}")
        return tab

    yield open_tab
    for context in contexts:
        context.close()
    assert faults == []


def talk(server: Client, agent: str, text: str = "Hello", **options: Any) -> None:
    server.chat([{"role": "user", "content": text}], **{"max_tokens": 2, "user": agent, **options})


def names(tab: Any) -> Any:
    return tab.locator("#agent-table th[scope=row] .name")


def agent_of(server: Client, name: str) -> dict[str, Any]:
    return next(agent for agent in server.send("/v1/agents")[1]["agents"] if agent["name"] == name)


def confirm(tab: Any) -> None:
    tab.locator("#question-yes").click()
    expect(tab.locator("#question")).not_to_be_visible()


def map_of(server: Client) -> dict[str, Any]:
    return server.send("/v1/cache/map")[1]  # type: ignore[no-any-return]


def pinned_names(server: Client) -> list[str]:
    found = map_of(server)
    return [found["agents"][number] for number in found["pinned"]]


class Clock:
    """A tab's clock, which stands still but for pass_a_second(): no busy machine makes the page
    late, and no wait makes it early.

    Time passes in steps, and the page has the answers to what it has asked for before the next one.
    """

    def __init__(self, tab: Any) -> None:
        self._tab = tab
        self._open: set[Any] = set()
        tab.on(
            "request", lambda request: request.url.endswith("/events") or self._open.add(request)
        )
        for end in ("requestfinished", "requestfailed"):
            tab.on(end, lambda request: self._open.discard(request))
        tab.clock.pause_at(tab.evaluate("Date.now() + 1000"))
        self._settle()

    def pass_a_second(self, after: Client | None = None) -> None:
        """Let a second pass, after the events of a server have come."""
        if after is not None:
            number = after.generator.registry.log.end - 1
            until(lambda: self._tab.evaluate("window.lastEvent") >= number)
        for _ in range(10):
            self._tab.clock.run_for(100)
            self._settle()

    def _settle(self) -> None:
        self._tab.wait_for_timeout(20)
        while self._open:
            self._tab.wait_for_timeout(20)


def test_an_agent_is_shown_and_pinned_after_a_question(
    server: Client, visit: Callable[..., Any]
) -> None:
    talk(server, HOSTILE, f"{HOSTILE} says hello. " * 20)
    tab = visit(server, has_clock=True)
    expect(names(tab)).to_have_text([HOSTILE])
    expect(tab.locator("#tree .rows .name")).to_have_text([HOSTILE])
    expect(tab.locator("#state")).to_have_text("live")
    assert tab.locator("img[src=x]").count() == 0
    names(tab).first.click()
    tab.get_by_role("button", name="Pin", exact=True).click()
    expect(tab.locator("#question-title")).to_have_text(f"Pin {HOSTILE}?")
    assert not agent_of(server, HOSTILE)["pinned"]
    confirm(tab)
    assert agent_of(server, HOSTILE)["pinned"]
    expect(tab.locator("#agent-table .chip-pinned")).to_have_text("pinned")
    tab.get_by_role("button", name="Unpin", exact=True).click()
    confirm(tab)
    assert not agent_of(server, HOSTILE)["pinned"]
    expect(tab.locator("#agent-table .chip-pinned")).to_have_count(0)
    clock = Clock(tab)
    server.send(f"/v1/agents/{quote(HOSTILE, safe='')}/pin", {})
    until(lambda: HOSTILE in pinned_names(server))
    clock.pass_a_second()
    expect(tab.locator("#agent-table .chip-pinned")).to_have_text("pinned")


def test_the_page_connects_clients_and_chats(server: Client, visit: Callable[..., Any]) -> None:
    tab = visit(server)
    lines = client_settings(f"http://127.0.0.1:{server.port}")
    expect(tab.locator("#connect code")).to_have_text(list(lines.values()))
    tab.get_by_role("button", name="Copy the line for Codex").click()
    expect(tab.locator("#said")).to_contain_text(re.compile("copied|does not let"))
    tab.locator("#chat-input").fill(HOSTILE)
    tab.keyboard.press("Enter")
    expect(tab.locator("#chat-log .is-user p")).to_have_text(HOSTILE)
    expect(tab.locator("#chat-note")).to_contain_text("prompt tokens were cached")
    expect(tab.locator("#chat-send")).to_have_text("Send")
    tab.locator("#chat-clear").click()
    expect(tab.locator("#chat-log")).to_be_hidden()
    saved = server.send("/v1/cache")[1]["seconds_saved"]
    assert saved["since_installation"] >= saved["since_start"]
    expect(tab.locator(".tile", has_text="Prefill saved")).to_contain_text("since installation")
    tops = [
        tab.locator(f"#h-{name}").bounding_box()["y"] for name in ("running", "agents", "blocks")
    ]
    assert tops == sorted(tops)
    tab.locator("#agent-table").get_by_role("button", name="Tokens").click()
    expect(tab.locator("#agent-table [aria-sort=descending]")).to_have_text("Tokens")


@contextmanager
def stream(server: Client, agent: str, tokens: int = 30000) -> Iterator[socket.socket]:
    """A reply that says the same token again and again, until the client hangs up."""
    asked = {
        "prompt": f"{agent} goes on",
        "max_tokens": tokens,
        "stream": True,
        "user": agent,
        "logit_bias": {"65": 100},
    }
    body = json.dumps(asked).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: "
        f"close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + body)
        yield client


@contextmanager
def eight_streams(server: Client) -> Iterator[None]:
    """Eight sequences decode.

    A stream that has two blocks ends and begins again, so that the pool has room for others.
    """
    stop = threading.Event()

    def go_on(number: int) -> None:
        while not stop.is_set():
            with stream(server, f"stream {number}", 300) as client:
                while client.recv(1 << 16) and not stop.is_set():
                    pass

    threads = [threading.Thread(target=go_on, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.thorough
def test_each_change_is_shown_within_a_second_while_eight_sequences_decode(
    model: Path, tmp_path: Path, visit: Callable[..., Any]
) -> None:
    other = save_model(tmp_path / "other", "qwen2")
    options = (
        "--max-models",
        "2",
        "--allow-models",
        str(other),
        "--store-dir",
        str(tmp_path / "store"),
    )
    with blockpool_server(model, "--pool-bytes", "24MB", *options) as server, eight_streams(server):
        talk(server, "cold", "Cold begins. " * 40)
        tab = visit(server, has_clock=True)
        expect(tab.locator("#running .chip-decode")).to_have_count(8)
        clock = Clock(tab)

        def is_running(agent: str) -> bool:
            return any(request["agent"] == agent for request in map_of(server)["requests"])

        late = tab.locator("#running .who").get_by_text("late", exact=True)
        with stream(server, "late"):
            until(lambda: is_running("late"))
            clock.pass_a_second()
            expect(late).to_be_visible()
        until(lambda: not is_running("late"))
        clock.pass_a_second(after=server)
        expect(late).to_have_count(0)

        pinned = pin_until_full(server)
        until(lambda: pinned in pinned_names(server))
        clock.pass_a_second()
        row = tab.locator("#agent-table tr")
        expect(
            row.filter(has=tab.get_by_role("button", name=pinned, exact=True)).locator(
                ".chip-pinned"
            )
        ).to_be_visible()
        expect(tab.locator("#alarms")).to_contain_text("1 pinned agent may leave memory.")

        evict(server, "cold")
        clock.pass_a_second(after=server)
        cold = row.filter(has=tab.get_by_role("button", name="cold", exact=True))
        expect(cold.locator(".chip").get_by_text("on disk")).to_be_visible()

        assert server.send("/admin/load", {"model": other.name})[0] == 200
        clock.pass_a_second(after=server)
        expect(tab.locator("#models .chip-loaded")).to_have_count(2)
        tab.close()


def pin_until_full(server: Client) -> str:
    """Pin agents until the pins have all of their room in memory.

    Returns the name of the last one.
    """
    for number in count():
        talk(server, f"pinned-{number}", f"{number} stays. " * 200)
        if not server.send(f"/v1/agents/pinned-{number}/pin", {})[1]["pinned_in_memory"]:
            return f"pinned-{number}"
    raise AssertionError


def evict(server: Client, agent: str) -> None:
    """Fill the pool until all blocks of an agent are evicted."""
    number = 0
    while agent_of(server, agent)["tokens_in_memory"]:
        number += 1
        talk(server, f"filler-{number}", f"{number} fills. " * 240)


@pytest.mark.thorough
def test_acts_on_agents(server: Client, visit: Callable[..., Any]) -> None:
    talk(server, "ann", "Ann begins. " * 60)
    tab = visit(server)
    row = names(tab).get_by_text("ann", exact=True)
    row.click()

    def act(name: str) -> None:
        tab.locator(".acts").get_by_role("button", name=name, exact=True).click()

    act("Save")
    confirm(tab)
    expect(tab.locator("#said")).to_have_text("ann is on disk.")
    saved = agent_of(server, "ann")
    assert saved["tokens_on_disk"] == saved["tokens"]
    act("Fork")
    tab.locator("#question-input").fill("ann")
    tab.locator("#question-yes").click()
    expect(tab.locator("#question-error")).to_contain_text("An agent ann exists already")
    tab.locator("#question-input").fill("a fork & more")
    confirm(tab)
    assert agent_of(server, "a fork & more")["tokens"] == saved["tokens"]
    expect(tab.locator("#tree .is-shared").first).to_be_visible()
    act("Delete")
    tab.locator("#question-no").click()
    assert agent_of(server, "ann")
    act("Delete")
    confirm(tab)
    expect(names(tab).get_by_text("ann", exact=True)).to_have_count(0)
    assert "ann" not in [agent["name"] for agent in server.send("/v1/agents")[1]["agents"]]


def in_top(server: Client, name: str) -> str:
    """The figures of the line `memory` or `pool` of `mlx-blockpool top`."""
    facts = top.Server(f"http://127.0.0.1:{server.port}", None)
    facts.read()
    (line,) = [
        line
        for line in top_screen.text(facts.facts, facts.url).splitlines()
        if line.startswith(name)
    ]
    figures = line.partition("  ")[2].lstrip(" " + top_screen.FULL + top_screen.EMPTY)
    return figures.partition(",")[0]


@pytest.mark.thorough
def test_a_figure_that_is_shown_twice_is_the_same(model: Path, visit: Callable[..., Any]) -> None:
    """The tokens of an agent in the tree and in the table, and the memory on the page and in
    `top`.
    """
    with blockpool_server(model, "--pool-bytes", "4MB", "--preallocate") as client:
        talk(client, "gone", "gone begins. " * 100)
        tab = visit(client)
        expect(names(tab)).to_have_text(["gone"])
        cache = client.send("/v1/cache")[1]
        assert cache["used_bytes"] < cache["array_bytes"]
        tile = tab.locator(".tile").first
        assert in_top(client, "memory") == tile.locator(".value").inner_text()
        assert f"pool {in_top(client, 'pool')}" == tile.locator(".speed").inner_text()
        for number in count():
            evicted = agent_of(client, "gone")
            if evicted["tokens_in_memory"] < evicted["tokens"]:
                break
            talk(client, f"filler-{number}", f"{number} fills. " * 40)
        assert evicted["tokens_in_memory"] > 0
        tab.reload()
        for name in ("gone", "filler-0"):
            tokens = f"{agent_of(client, name)['tokens']:,}"
            expect(tab.locator("#tree .rows li", has_text=name).locator("span")).to_have_text(
                tokens
            )
            expect(
                tab.locator("#agent-table tr", has_text=name).locator(".figure").first
            ).to_have_text(tokens)
        evict(client, "gone")
        expect(tab.locator("#agent-table tr", has_text="gone").locator(".chip")).to_have_text(
            ["not cached"]
        )
        tab.close()


@pytest.mark.thorough
def test_a_model_is_unloaded_and_loaded(server: Client, visit: Callable[..., Any]) -> None:
    tab = visit(server)
    tab.get_by_role("button", name="Unload").click()
    confirm(tab)
    tab.get_by_role("button", name="Load", exact=True).click()
    expect(tab.locator("#serving")).to_have_text("no model is loaded")
    # The server has a store, and no figures of it.
    for number in (0, 1):
        expect(tab.locator(".tile").nth(number)).to_have_text(
            re.compile("^(Memory|Disk)\u2013no model is loaded$")
        )
    confirm(tab)
    expect(tab.locator("#models .chip-loaded")).to_have_text("loaded")
    server.settle()


@pytest.mark.thorough
def test_everything_is_reached_by_the_keyboard(server: Client, visit: Callable[..., Any]) -> None:
    talk(server, "keys", "Keys begin. " * 60)
    tab = visit(server)
    expect(names(tab).get_by_text("keys", exact=True)).to_be_visible()

    def press_until(key: str, wanted: str) -> None:
        for _ in range(80):
            tab.keyboard.press(key)
            if tab.evaluate(FOCUSED).startswith(wanted):
                return
        raise AssertionError(f"{wanted} is not reached by {key}")

    press_until("Tab", "Skip to the agents")
    press_until("Tab", "Block map of full")
    tab.keyboard.press("ArrowRight")
    expect(tab.locator("#block")).to_contain_text("Block 0:")
    tab.keyboard.press("End")
    tab.keyboard.press("Escape")
    expect(tab.locator("#block")).to_contain_text("Choose one")
    press_until("Shift+Tab", "Skip to the agents")
    tab.keyboard.press("Enter")
    press_until("Tab", "keys")
    tab.keyboard.press("Enter")
    press_until("Tab", "Pin")
    tab.keyboard.press("Enter")
    expect(tab.locator("#question")).to_be_visible()
    tab.keyboard.press("Escape")
    expect(tab.locator("#question")).not_to_be_visible()
    assert not agent_of(server, "keys")["pinned"]
    tab.keyboard.press("Enter")
    expect(tab.locator("#question-yes")).to_be_focused()
    tab.keyboard.press("Enter")
    expect(tab.locator("#question")).not_to_be_visible()
    assert agent_of(server, "keys")["pinned"]
    tab.keyboard.press("Enter")


@pytest.mark.thorough
def test_the_key_is_asked_for_once(model: Path, visit: Callable[..., Any]) -> None:
    with blockpool_server(model, *OPTIONS, "--api-key", "a secret key") as client:
        tab = visit(client)
        expect(tab.locator("#key")).to_be_visible()
        assert tab.locator("#tiles .tile").count() == 0
        tab.keyboard.press("Escape")
        expect(tab.locator("#key")).to_be_visible()
        for typed, error in (
            ("a wrong key", "The server does not know that key."),
            ("a secret key", None),
        ):
            tab.locator("#key-input").fill(typed)
            tab.keyboard.press("Enter")
            if error:
                expect(tab.locator("#key-error")).to_have_text(error)
        expect(tab.locator("#key")).not_to_be_visible()
        expect(tab.locator("#state")).to_have_text("live")
        tab.reload()
        expect(tab.locator("#state")).to_have_text("live")
        expect(tab.locator("#key")).not_to_be_visible()
        assert "secret" not in tab.url
        assert tab.evaluate("localStorage.length + document.cookie.length") == 0
        tab.locator("#forget").click()
        expect(tab.locator("#key")).to_be_visible()
        tab.close()


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1440])
def test_it_fits_and_has_contrast(
    server: Client, visit: Callable[..., Any], scheme: str, width: int
) -> None:
    talk(
        server,
        "a name that is so long that it does not fit into any column of any table at any width of "
        "any screen",
        "Long. " * 50,
    )
    tab = visit(server, color_scheme=scheme, viewport={"width": width, "height": 800})
    expect(names(tab).first).to_be_visible()
    assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    ink, paper = tab.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    lightness = [sum(map(int, colour[4:-1].split(","))) for colour in (ink, paper)]
    assert (lightness[0] < lightness[1]) == (scheme == "light")
    assert abs(lightness[0] - lightness[1]) > 500
    unnamed = (
        "[...document.querySelectorAll('button, input, canvas, svg, [role=img]')].filter(e => "
        "!e.closest('dialog') && "
    )
    unnamed += (
        "!e.textContent.trim() && !e.ariaLabel && e.ariaHidden !== 'true').map(e => e.outerHTML)"
    )
    assert tab.evaluate(unnamed) == []


@pytest.mark.thorough
def test_the_first_line_that_differs_is_shown_side_by_side(
    server: Client, visit: Callable[..., Any]
) -> None:
    for day in ("Monday <b>", "Tuesday <i>"):
        talk(server, "dated", f"{'Notes. ' * 60}\nToday is {day} in May.\nWhat now?")
    tab = visit(server)
    row = tab.locator("#requests tbody th .name").first
    expect(row).to_have_text("dated")
    row.click()
    expect(tab.locator("#requests figure pre")).to_have_text(
        ["Today is Monday <b> in May.", "Today is Tuesday <i> in May."]
    )
    expect(tab.locator("#requests figure mark")).to_have_text(["Monday <b", "Tuesday <i"])


@pytest.mark.thorough
def test_running_requests_are_shown_while_they_run(
    server: Client, visit: Callable[..., Any]
) -> None:
    tab = visit(server)
    expect(tab.locator("#state")).to_have_text("live")
    with stream(server, "runner"):
        expect(tab.locator("#running .who")).to_have_text(["runner"])
        expect(tab.locator("#running .chip")).to_have_text("decode")
        expect(
            tab.locator("#agent-table .chip-decode, #running .chip-decode").first
        ).to_be_visible()
    expect(tab.locator("#running")).to_contain_text("Nothing is running")
    server.settle()


@pytest.mark.thorough
def test_a_server_that_is_gone_is_an_alarm(model: Path, chromium: Any) -> None:
    with blockpool_server(model, *OPTIONS) as client:
        tab = chromium.new_page()
        tab.goto(f"http://127.0.0.1:{client.port}/")
        expect(tab.locator("#state")).to_have_text("live")
    # The server's threads outlive it for a moment in the process of the test.
    expect(tab.locator("#alarms .alarm")).to_contain_text(
        re.compile("^The (server does not answer|generation thread has ended)")
    )
    expect(tab.locator("#state")).to_have_text("no connection")
    tab.close()


def answering(content: Any) -> Callable[[Any], None]:
    """A route that answers with this JSON."""
    return lambda route: route.fulfill(json=content)


@pytest.mark.thorough
def test_what_needs_attention_is_said_in_words(server: Client, visit: Callable[..., Any]) -> None:
    talk(server, "ann")
    cache, models = server.send("/v1/cache")[1], server.send("/admin/models")[1]
    cache["health"] = {
        "status": "stalled",
        "doing": "prefill and decode",
        "restarts": 2,
        "seconds_since_progress": 130.0,
    }
    cache["alarm"] = "almost no known token is resumed"
    cache["kv_bits"] = {"keys": 8, "values": 4, "group_size": 64}
    cache["store"] |= {"problem": "No space left on device", "quarantine_bytes": 1000}
    agents = server.send("/v1/agents")[1]
    agents["agents"][0] |= {"pinned": True, "pinned_in_memory": False}
    models["models"][0]["failure"] = "out of <memory>"
    tab = visit(server)
    for path, answer in (("/v1/cache", cache), ("/v1/agents", agents), ("/admin/models", models)):
        tab.route(f"**{path}", answering(answer))
    for words in (
        "Nothing was computed for 2 min while requests wait.",
        "The generation thread was restarted 2 times.",
        "almost no known token is resumed",
        "No space left on device. Free disk space",
        "1.0 kB of damaged records",
        "1 pinned agent may leave memory.",
        "could not be loaded. out of <memory>",
    ):
        expect(tab.locator("#alarms")).to_contain_text(words)
    expect(tab.locator("#state")).to_have_text("stalled")
    expect(tab.locator(".tile").first).to_contain_text(", 8-bit keys and 4-bit values")


@pytest.mark.thorough
def test_blocks_are_coloured_by_state_or_by_agent(
    server: Client, visit: Callable[..., Any]
) -> None:
    for agent in ("left", "right"):
        talk(server, agent, "Both begin like this. " * 60 + agent * 90)
    tab = visit(server)
    legend = tab.locator("#legend")
    expect(legend).to_contain_text("cached, shared")
    tab.get_by_role("button", name="by agent").click()
    expect(legend).to_contain_text("several agents")
    expect(legend).to_contain_text("left")
    tab.get_by_role("button", name="by state").click()
    expect(legend).not_to_contain_text("several agents")
    tab.locator("#map canvas").click(position={"x": 4, "y": 4})
    expect(tab.locator("#block")).to_contain_text("Block 0:")
    expect(tab.locator("#block")).to_contain_text("Used by")
