"""Pages of other sites: they name no agent, pin nothing, load no model, and find out nothing
about what others have sent.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from models import save_endless, save_model
from thorough import only

from mlx_blockpool.prefix.salts import SALT_BYTES, SHARED, is_of_one_client, mark_of, salt_of
from mlx_blockpool.server.generator import BlockpoolGenerator
from mlx_blockpool.server.jobs import between_steps
from mlx_blockpool.server.models.http import ModelsEndpoint
from mlx_blockpool.server.models.queue import Claim
from mlx_blockpool.server.request import RequestOptions
from mlx_blockpool.server.scope import RequestScope
from mlx_blockpool.server.watch.explain import ExplanationReader
from server.serving import Client, at_once, blockpool_server, cached_tokens, with_access

EVIL, OTHER, HERE = "https://evil.example", "https://other.example", "http://localhost:3000"
# A sandboxed frame, a downloaded page in a web view, and a scheme that is not known.
OPAQUE = ("null", "file://", "unknown://page")
SECRET = "The safe in the cellar opens with the number 4711, and with no other number. " * 4
MESSAGES = [{"role": "user", "content": "A"}]
# A text of two blocks.
LONG = "A page and an agent may send the very same text. " * 11

NAMES: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"user": "agent-1"}, {}),
    ({"session_id": "agent-1"}, {}),
    ({"agent_id": "agent-1"}, {}),
    ({"prompt_cache_key": "agent-1"}, {}),
    ({}, {"X-Agent-Id": "agent-1"}),
    ({"prompt_cache_key": "agent-0"}, {"X-OpenAI-Subagent": "review", "Thread-Id": "agent-1"}),
    ({"priority": -9}, {}),
    ({"priority": 9}, {"X-Claude-Code-Agent-Id": "a1b2"}),
]
STOCK: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
    ("/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "A", "max_tokens": 1}),
]
# Open to pages of other sites with a key only, or with --allowed-origins '*'.
OWN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
    ("/v1/responses", {"input": "A", "max_output_tokens": 1}),
    (
        "/api/chat",
        {"messages": MESSAGES, "stream": False, "keep_alive": 0, "options": {"num_predict": 1}},
    ),
    (
        "/api/generate",
        {"prompt": "A", "stream": False, "keep_alive": 0, "options": {"num_predict": 1}},
    ),
]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    others = tmp_path_factory.mktemp("others")
    save_model(others / "another", "qwen2")
    options = ("--pool-bytes", "20MB", "--prefill-step-size", "128", "--allow-models", str(others))
    with blockpool_server(
        model, *options, "--store-dir", str(tmp_path_factory.mktemp("store"))
    ) as running:
        yield running
        running.settle()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[RequestOptions]:
    """The options of all requests, as the generation thread gets them."""
    found: list[RequestOptions] = []
    generate = BlockpoolGenerator.generate_choices

    def watching(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(request.options)
        return generate(self, request, *args, **kwargs)

    monkeypatch.setattr(BlockpoolGenerator, "generate_choices", watching)
    return found


def post(
    server: Client, origin: str | None, path: str, body: dict[str, Any], **headers: str
) -> tuple[int, Any]:
    """Status and JSON of a request as a page of `origin` sends it without a preflight; None: as
    another client sends it.
    """
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    own = {} if origin is None else {"Origin": origin, "Content-Type": "text/plain"}
    return server.send(path, body, headers={**own, **sent})


def cached(server: Client, origin: str | None, prompt: str, **options: Any) -> int:
    """The cached tokens of a completion."""
    status, answer = post(
        server, origin, "/v1/completions", {"prompt": prompt, "max_tokens": 1, **options}
    )
    assert status == 200, answer
    return cached_tokens(answer["usage"])


def agents(server: Client) -> dict[str, dict[str, Any]]:
    server.settle()
    return {agent["name"]: agent for agent in server.send("/v1/agents")[1]["agents"]}


# -- which requests are those of a foreign page ----------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("origin", [EVIL, "null"])
@pytest.mark.parametrize(("path", "body"), [*STOCK, *OWN])
def test_no_field_of_any_protocol_names_an_agent(
    server: Client, seen: list[RequestOptions], path: str, body: dict[str, Any], origin: str
) -> None:
    before = agents(server)
    with with_access(server, allowed_origins=("*",)):
        for fields, headers in NAMES:
            status, answer = server.send(path, body | fields, headers={"Origin": origin, **headers})
            assert status == 200, answer
    assert len(seen) == len(NAMES)
    for options in seen:
        assert (options.agent, options.conversation, options.name, options.priority) == (
            None,
            None,
            None,
            0,
        )
        assert (options.retention, options.may_pin, options.may_load) == (
            None if origin not in OPAQUE else "memory",
            False,
            False,
        )
        assert options.salt != SHARED
        # keep_alive has no effect: the model stays loaded as long as before.
        assert options.keep_seconds == float("inf")
    assert len({options.salt for options in seen}) == (len(seen) if origin in OPAQUE else 1)
    assert agents(server) == before
    assert server.generator.registry.loaded


@pytest.mark.parametrize(
    "origin", [None, HERE, "http://127.0.0.1:1", "vscode-webview://abc", "app://obsidian.md"]
)
def test_local_pages_and_apps_name_agents(
    server: Client, seen: list[RequestOptions], origin: str | None
) -> None:
    for path, body in STOCK + OWN[:2]:
        named = {"session_id": "local", "priority": -1}
        assert post(server, origin, path, body | named)[0] == 200
    for options in seen:
        assert (options.agent, options.priority, options.salt, options.may_pin) == (
            "local",
            -1,
            SHARED,
            True,
        )


def test_listed_origins_are_trusted_and_a_star_trusts_nobody(
    server: Client, seen: list[RequestOptions]
) -> None:
    path, body = STOCK[0][0], {**STOCK[0][1], "user": "trusted"}
    for allowed, origin, status, agent in (
        ((OTHER,), OTHER, 200, "trusted"),
        ((OTHER,), EVIL, 403, None),
        (("*",), EVIL, 200, None),
        (("*", OTHER), EVIL, 200, None),
        (("*", OTHER), OTHER, 200, "trusted"),
        (("null",), "null", 200, "trusted"),
    ):
        with with_access(server, allowed_origins=allowed):
            seen.clear()
            assert post(server, origin, path, body)[0] == status, (allowed, origin)
            assert [options.agent for options in seen] == ([agent] if status == 200 else [])


OPERATION = (
    "/v1/agents",
    "/v1/agents/agent-1/export",
    "/v1/cache",
    "/v1/cache/explain",
    "/v1/cache/map",
    "/v1/cache/hour",
)
OPERATION += ("/v1/cache/events", "/metrics", "/admin/models")


def test_no_foreign_page_reads_agents_and_figures_or_acts_on_them(server: Client) -> None:
    keys = {"api_key": "a key"}
    for changes in (
        {},
        keys,
        {"allowed_origins": ("*",)},
        {"allowed_origins": ("*",), **keys},
        {"allowed_origins": (OTHER,)},
    ):
        with with_access(server, **changes):
            for origin in (EVIL, "null"):
                for path in OPERATION:
                    status, answer = server.send(
                        path, headers={"Origin": origin, "x-api-key": "a key"}
                    )
                    assert (status, "--allowed-origins" in str(answer["error"])) == (403, True), (
                        changes,
                        path,
                    )
                for path in ("/v1/agents/agent-1/pin", "/admin/load", "/admin/unload"):
                    assert post(server, origin, path, {}, x_api_key="a key")[0] == 403, (
                        changes,
                        path,
                    )


def test_a_key_opens_all_protocols_to_pages_and_no_agent(
    server: Client, seen: list[RequestOptions]
) -> None:
    with with_access(server, api_keys=(("ann", "a key"),)):
        for path, body in STOCK + OWN:
            assert post(server, EVIL, path, {**body, "session_id": "agent-1"})[0] == 401
            assert (
                post(server, EVIL, path, {**body, "session_id": "agent-1"}, x_api_key="a key")[0]
                == 200
            )
        # The server's own page, under a name that is not listed.
        headers = {"Host": "box.lan:8080", "Origin": "http://box.lan:8080", "x-api-key": "a key"}
        with with_access(server, host="0.0.0.0"):
            assert server.send("/v1/agents", headers=headers)[0] == 200
    assert [(options.owner, options.name) for options in seen] == [("ann", None)] * len(STOCK + OWN)


def test_browsers_say_where_requests_without_an_origin_come_from(server: Client) -> None:
    image = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    for path in (*OPERATION, "/v1/agents/agent-1"):
        assert server.send(path, headers=image)[0] == 403, path
        assert (
            server.send(
                path, headers={**image, "Sec-Fetch-Dest": "iframe", "Sec-Fetch-Mode": "navigate"}
            )[0]
            == 403
        ), path
    # A link that somebody follows, the server's own page, and the address line.
    link = {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
    }
    for headers in (
        link,
        {**image, "Sec-Fetch-Site": "same-origin"},
        {**link, "Sec-Fetch-Site": "none"},
    ):
        assert server.send("/v1/agents", headers=headers)[0] == 200
    assert server.send("/v1/models", headers=image)[0] == 200


# -- what agents have ------------------------------------------------------------------------------


def turn(server: Client, text: str, **options: Any) -> dict[str, Any]:
    return server.chat([{"role": "user", "content": text}], user="agent-1", max_tokens=2, **options)


def test_a_page_takes_over_no_agent(server: Client) -> None:
    turn(server, LONG)
    server.settle()
    assert server.send("/v1/agents/agent-1/pin", {})[1]["pinned_in_memory"]
    before = agents(server)["agent-1"]
    assert before["tokens"] > len(LONG)
    for fields, headers in NAMES:
        for origin in (EVIL, "null"):
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}
            assert post(server, origin, "/v1/chat/completions", body, **headers)[0] == 200
    assert agents(server)["agent-1"] == before
    # Its next turn continues where the last one has ended.
    assert cached_tokens(turn(server, LONG)["usage"]) >= len(LONG)


def test_an_agents_request_is_not_ordered_after_a_pages_reply(server: Client) -> None:
    body = {
        "prompt": "A page goes on",
        "max_tokens": 20_000,
        "user": "agent-1",
        "stream": True,
        "logit_bias": {"65": 100},
    }
    with reply_to(server, EVIL, "/v1/completions", body) as page:
        page.recv(1)
        turn(server, "Now?")
        # The reply of the page runs on.
        states = [
            (request["agent"], request["state"])
            for request in server.send("/v1/cache/map")[1]["requests"]
        ]
    assert states == [(None, "decode")]


@contextmanager
def reply_to(
    server: Client, origin: str, path: str, body: dict[str, Any]
) -> Iterator[socket.socket]:
    """A stream whose client hangs up in the end."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\nContent-Length: "
        f"{len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(head.encode() + data)
        yield client


def test_a_pages_breakpoints_and_retention_keep_nothing(server: Client) -> None:
    def keeps(origin: str | None, text: str) -> tuple[int, bool]:
        part = {"type": "text", "text": f"{text} {LONG}", "cache_control": {"type": "ephemeral"}}
        body = {
            "messages": [{"role": "user", "content": [part]}],
            "max_tokens": 1,
            "prompt_cache_retention": "24h",
        }
        retention = server.generator.model.prefix.retention
        pins, days = len(retention.pins), len(retention.days)
        assert post(server, origin, "/v1/chat/completions", body)[0] == 200
        server.settle()
        return len(retention.pins) - pins, len(retention.days) > days

    assert keeps(EVIL, "Page's.") == keeps("null", "Frame's.") == (0, False)
    assert keeps(None, "Own.") == (1, True)


def test_a_page_loads_and_unloads_no_model(server: Client) -> None:
    def models() -> dict[str, str]:
        return {
            model["id"]: model["mlx_blockpool"]["state"]
            for model in server.send("/v1/models")[1]["data"]
        }

    cached(server, None, "x")
    before = models()
    assert before["another"] == "available"
    chat, text = STOCK[0][1], STOCK[2][1]
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
        status, answer = post(server, EVIL, path, {**body, "model": "another"})
        assert (status, "may use loaded models only" in answer["error"]["message"]) == (403, True)
    with with_access(server, allowed_origins=("*",)):
        for path, body in OWN:
            assert post(server, EVIL, path, {**body, "model": "another"})[0] == 403
        for path in ("/api/chat", "/api/generate"):
            for body in ({"model": "another"}, {"keep_alive": 0}):
                assert post(server, EVIL, path, body)[0] == 403
        for path in ("/v1/embeddings", "/api/embed"):
            assert post(server, EVIL, path, {"model": "another", "input": "A"})[0] == 403
    assert models() == before


def test_embeddings_for_a_page_unload_no_model_that_was_loaded_meanwhile(
    server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check and the command another client may have had its model loaded."""
    assert server.send("/admin/unload", {"model": "default_model"})[0] == 200
    claims: list[Claim] = []
    monkeypatch.setattr(
        ModelsEndpoint, "change", lambda *_, claim: claims.append(claim) or "default_model"
    )
    monkeypatch.setattr(RequestScope, "check_model", lambda *_: None)
    with with_access(server, allowed_origins=("*",)):
        for origin in (EVIL, None):
            post(server, origin, "/v1/embeddings", {"model": "default_model", "input": "A"})
    assert claims == [Claim.GUEST, Claim.REQUEST]


def test_a_page_may_load_a_model_while_none_is_loaded(server: Client) -> None:
    assert server.send("/admin/unload", {"model": "default_model"})[0] == 200
    assert not server.generator.registry.loaded
    assert cached(server, EVIL, "It takes no other model's place.") == 0


# -- what others have sent -------------------------------------------------------------------------


@pytest.mark.parametrize("origin", only([EVIL, *OPAQUE], EVIL))
def test_a_page_guesses_no_digit(server: Client, origin: str) -> None:
    """As a script would: what is cached grows with each right digit, where prefixes are shared."""
    cached(server, None, SECRET, user="agent-1")
    at = SECRET.index("4711")
    for place in range(4):
        known = SECRET[: at + place]
        # So that each guess finds what the page itself has sent, and no more.
        cached(server, origin, known)
        found = {digit: cached(server, origin, known + digit + "?") for digit in "0123456789"}
        assert len(set(found.values())) == 1, found
    assert cached(server, None, SECRET) >= len(SECRET) - 1


def test_pages_and_clients_share_nothing_in_any_pair(server: Client) -> None:
    clients = (None, EVIL, OTHER, f"{EVIL}:444", "http://evil.example")
    for number, first in enumerate(clients):
        prompt = f"{number}: {LONG}"
        assert cached(server, first, prompt) == 0
        assert [cached(server, client, prompt) for client in clients if client != first] == [0] * (
            len(clients) - 1
        )
        assert cached(server, first, prompt) >= len(prompt) - 1


@pytest.mark.parametrize("origin", only(OPAQUE, "null"))
def test_opaque_origins_share_nothing_among_themselves_and_store_nothing(
    server: Client, origin: str
) -> None:
    def records() -> int:
        server.settle()
        stored = server.generator.model.prefix.stored
        between_steps(server.generator, stored.write_tails)
        assert stored.store.flush()
        return int(between_steps(server.generator, lambda: stored.report()["records"]))

    before = records()
    prompt = f"{origin}: {LONG}"
    assert [cached(server, origin, prompt, session_id=name) for name in ("a", "a", "b")] == [
        0,
        0,
        0,
    ]
    assert records() == before
    assert cached(server, EVIL, prompt) == 0
    assert records() > before


def test_salts_of_requests_are_salts_within_an_origin(server: Client) -> None:
    prompt = f"Salted. {LONG}"
    salts = ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
    for _ in range(2):
        found = [
            cached(server, origin, prompt, **salt) for origin in (None, EVIL) for salt in salts
        ]
    assert min(found) >= len(prompt) - 1
    assert (
        len(
            {
                salt_of(key, salt, page)
                for key in (None, "k")
                for salt in (None, "a")
                for page in (None, EVIL, OTHER)
            }
        )
        == 12
    )
    salt = salt_of("k", "a", EVIL)
    assert (len(salt), mark_of(salt), is_of_one_client(salt)) == (SALT_BYTES, b"", False)


def test_a_page_waits_for_no_prefill_of_others(server: Client) -> None:
    """Of requests that arrive together, those of one scope compute their common beginning once."""

    def count(prompt: str, *origins: str | None) -> list[int]:
        return at_once(
            [lambda origin=origin: cached(server, origin, prompt * 60) for origin in origins]
        )

    assert count("#1 arrives with others. ", None, EVIL, OTHER, "null") == [0, 0, 0, 0]
    first, second = sorted(count("#2 arrives with others. ", EVIL, EVIL))
    assert first < 10 < 1000 < second


def test_explanations_show_a_page_nothing_of_others(server: Client) -> None:
    own = f"Explained. {LONG} It ends with 4711."
    guess = f"Explained. {LONG} It ends with 4712."
    cached(server, None, own, user="agent-1")
    headers = {"Origin": EVIL, "X-Explain": "1", "X-Agent-Id": "agent-1"}
    status, _ = server.send(
        "/v1/completions", {"prompt": guess, "max_tokens": 1, "user": "agent-1"}, headers=headers
    )
    assert status == 200
    found = server.generator.explanations
    (newest,) = found.latest(1, ExplanationReader("agent-1"))
    assert (newest.cause, newest.known_tokens, newest.cached_tokens, newest.difference) == (
        "new",
        0,
        0,
        None,
    )
    # A request that fails is not shown as the agent's either.
    bad = {"prompt": guess, "user": "agent-1", "chat_template_kwargs": {"chat_template": "x"}}
    assert server.send("/v1/completions", bad, headers=headers)[0] == 400
    assert [each.agent for each in found.latest(2, ExplanationReader("agent-1"))] == [None, None]


def test_a_page_gets_back_no_reply_that_others_have_received(
    server: Client, seen: list[RequestOptions]
) -> None:
    asked = {"role": "user", "content": f"Replayed. {LONG}"}
    said = server.chat([asked], max_tokens=4)["choices"][0]["message"]
    chat = {"messages": [asked, said, {"role": "user", "content": "Go on."}], "max_tokens": 1}

    def normalised(origin: str | None) -> tuple[str, ...]:
        assert post(server, origin, "/v1/chat/completions", chat, X_Normalise="replay")[0] == 200
        (newest,) = server.generator.explanations.latest(1, ExplanationReader("agent-1"))
        return newest.normalised

    assert [normalised(origin) for origin in (EVIL, "null", None)] == [(), (), ("replay",)]


def test_a_page_continues_no_response_of_others(server: Client) -> None:
    body = {"input": "The safe opens with 4711.", "max_output_tokens": 2}
    with with_access(server, allowed_origins=("*",)):
        ids = {
            origin: post(server, origin, "/v1/responses", body)[1]["id"]
            for origin in (None, EVIL, "null")
        }
        for by, name in ids.items():
            for origin in (None, EVIL, OTHER, "null"):
                # An opaque origin finds not even its own.
                mine = origin == by and origin != "null"
                headers = {} if origin is None else {"Origin": origin}
                assert server.send(f"/v1/responses/{name}", headers=headers)[0] == (
                    200 if mine else 404
                ), (by, origin)
                going_on = {"input": "?", "previous_response_id": name, "max_output_tokens": 1}
                assert post(server, origin, "/v1/responses", going_on)[0] == (
                    200 if mine else 400
                ), (by, origin)


def test_forms_are_compiled_anew_for_a_page(server: Client) -> None:
    """How long that takes would tell whether a client has sent the same schema."""
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"enum": ["4711", "4712"]}},
    }

    def counted(origin: str | None) -> dict[str, int]:
        before = dict(server.generator.forms.counts)
        body = {"messages": MESSAGES, "max_tokens": 1, "response_format": schema}
        assert post(server, origin, "/v1/chat/completions", body)[0] == 200
        return {
            name: count - before[name]
            for name, count in server.generator.forms.counts.items()
            if count != before[name]
        }

    assert counted(None) == {"compiled": 1}
    assert counted(EVIL) == {"compiled": 1}
    assert counted(EVIL) == counted(None) == {"cached": 1}


def test_a_page_is_drafted_nothing_that_others_have_sent(tmp_path: Path) -> None:
    with blockpool_server(
        save_endless(tmp_path), "--pool-bytes", "20MB", "--drafts", "4"
    ) as client:

        def drafted(origin: str | None) -> int:
            """Tokens drafted from replies of the same agent, or from what has followed the same
            prompt.
            """
            body = {
                "prompt": "Xyz",
                "max_tokens": 40,
                "user": "agent-1",
                "temperature": 1.0,
                "seed": 7,
            }

            def count() -> int:
                client.settle()
                sources = client.send("/v1/cache")[1]["drafts"]["sources"]
                return sum(
                    sources.get(name, {}).get("drafted", 0) for name in ("prefix", "replies")
                )

            before = count()
            assert post(client, origin, "/v1/completions", body)[0] == 200
            return count() - before

        client.capacity()
        drafted(None)
        assert drafted(None) > 0
        assert drafted(EVIL) == drafted("null") == 0
        assert drafted(EVIL) > 0


# -- restarts --------------------------------------------------------------------------------------


def test_prefixes_of_an_origin_stay_in_its_scope_on_disk(model: Path, tmp_path: Path) -> None:
    options = ("--pool-bytes", "20MB", "--store-dir", str(tmp_path))
    with blockpool_server(model, *options) as client:
        tokens = client.send("/tokenize", {"content": LONG})[1]["tokens"]
        for origin in (None, EVIL):
            assert cached(client, origin, LONG) == 0
        client.settle()
    with blockpool_server(model, *options) as client:
        client.capacity()
        prefix = client.generator.model.prefix

        def on_disk(origin: str | None) -> int:
            return int(
                between_steps(
                    client.generator, lambda: prefix.match(tokens, salt_of(origin=origin)).tokens
                )
            )

        assert on_disk(EVIL) == on_disk(None) >= 512
        assert on_disk(OTHER) == 0
        # A restart of theirs is a miss of its own for all others.
        assert [cached(client, origin, LONG) for origin in (OTHER, "null", HERE, None)][:2] == [
            0,
            0,
        ]
        assert {agent["name"] for agent in client.send("/v1/agents")[1]["agents"]} == set()
        client.settle()
