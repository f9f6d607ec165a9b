"""/admin/* with named keys is for admins, and what one client's commands over HTTP may do to the
others' models.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from models import save_model

from mlx_blockpool.errors import BlockpoolError
from mlx_blockpool.server.model import LoadedModel
from mlx_blockpool.server.options import admin_keys, named_keys
from server.serving import Client, blockpool_server, until

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
POOL = ("--pool-bytes", "30MB")
ADMIN_PATHS = [
    ("/admin/models", None),
    ("/admin/load", {"model": "0"}),
    ("/admin/unload", {"model": "1"}),
    ("/admin/none", None),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / str(seed), "llama", seed) for seed in range(2)]


@pytest.fixture
def serve(models: list[Path], tmp_path: Path) -> Iterator[Callable[..., Client]]:
    """serve(text): a server with this file of keys; None: without keys."""
    running: list[Any] = []

    def start(text: str | None, *options: str) -> Client:
        (tmp_path / "keys").write_text(text or "")
        keys = () if text is None else ("--api-key-file", str(tmp_path / "keys"))
        running.append(
            blockpool_server(
                models[0], "--allow-models", str(models[0].parent), *POOL, *keys, *options
            )
        )
        client: Client = running[-1].__enter__()
        client.generator.wait_until_loaded()
        return client

    yield start
    for each in running:
        each.__exit__(None, None, None)


def ask(client: Client, key: str | None, path: str, body: Any = None) -> tuple[int, Any]:
    return client.send(
        path, body, headers={} if key is None else {"Authorization": f"Bearer {key}"}
    )


def loads(client: Client) -> int:
    return int(client.generator.registry.counts["loads"])


# -- the rule --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "keys", "admins"),
    [
        ("ann:x\nbob:y", ["x", "y"], []),
        ("ann:x\nbob:y:admin", ["x", "y"], ["y"]),
        ("ann:x:admin\n\n bob:y:admin \ncarl:z", ["x", "y", "z"], ["x", "y"]),
        ("ann:x:y\nbob:x:y:z:admin", ["x:y", "x:y:z"], ["x:y:z"]),
        ("ann:admin\nbob:admin:admin\n", None, None),
        ("ann:admin\nbob:y", ["admin", "y"], []),
        ("ann:x:admin:admin\nbob:y", ["x:admin", "y"], ["x:admin"]),
        ("ann:x:Admin\nbob:y:admins", ["x:Admin", "y:admins"], []),
        ("ann:x:admin", ["x"], ["x"]),
        ("ann::admin\nbob:y", None, None),
        ("ann::admin", None, None),
        ("ann:x:admin\nbob:x", None, None),
        ("ann:x :admin\nbob:y", None, None),
        (":x:admin\nbob:y", None, None),
        ("admin\nbob:y", None, None),
    ],
)
def test_which_keys_are_admins(text: str, keys: list[str] | None, admins: list[str] | None) -> None:
    """None: the file is rejected."""
    if keys is None:
        with pytest.raises(BlockpoolError):
            named_keys(text)
    else:
        assert [key for _, key in named_keys(text)] == keys
        assert list(admin_keys(text)) == admins


@pytest.mark.parametrize(
    ("text", "admins", "others"),
    [
        ("ann:key-a\nbob:key-b\ncarl:key:c", ["key-a"], ["key-b", "key:c"]),
        ("ann:key-a\nbob:key-b:admin\ncarl:key:c:admin", ["key-b", "key:c"], ["key-a"]),
        ("ann:key-a\nann:key-b", ["key-a"], ["key-b"]),
    ],
)
def test_only_an_admins_key_reaches_admin_paths(
    serve: Callable[..., Client], text: str, admins: list[str], others: list[str]
) -> None:
    client = serve(text)
    for path, body in ADMIN_PATHS:
        for key in others:
            status, answer = ask(client, key, path, body)
            message = answer["error"]["message"]
            assert (status, answer["error"]["type"]) == (403, "permission_error")
            assert message.startswith(
                f"{path} needs the key of an admin. Send an admin's key, or end the line"
            )
            assert key not in message
        for key in admins:
            assert ask(client, key, path, body)[0] == (404 if path == "/admin/none" else 200), path
        assert ask(client, None, path, body)[0] == ask(client, "no key", path, body)[0] == 401
    assert loads(client) == 1, "nothing was loaded or unloaded"
    for key in (*admins, *others):
        assert ask(client, key, "/v1/chat/completions", CHAT)[0] == 200
        assert ask(client, key, "/v1/models")[0] == 200


def test_a_browser_may_ask_whether_it_may_use_an_admin_path(serve: Callable[..., Client]) -> None:
    client = serve("ann:key-a\nbob:key-b")
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=30)
    connection.request("OPTIONS", "/admin/load")
    assert connection.getresponse().status == 204
    connection.close()


@pytest.mark.parametrize(
    ("text", "key"), [(None, None), ("a-key-without-a-name", "a-key-without-a-name")]
)
def test_without_named_keys_every_client_is_an_admin(
    serve: Callable[..., Client], text: str | None, key: str | None
) -> None:
    client = serve(text)
    for path, body in ADMIN_PATHS:
        assert ask(client, key, path, body)[0] == (404 if path == "/admin/none" else 200), path
    assert ask(client, key, "/v1/chat/completions", CHAT)[0] == 200
    for _ in range(2):
        assert ask(client, key, "/api/generate", {"keep_alive": 0})[1]["done_reason"] == "unload"
        assert not client.generator.registry.loaded
    assert ask(client, key, "/admin/load", {"model": "1"})[1]["state"] == "loaded"
    assert ask(client, key, "/admin/unload", {"model": "1"})[1]["state"] == "available"


# -- loops -----------------------------------------------------------------------------------------


def test_loops_of_one_key_cost_another_no_load(serve: Callable[..., Client]) -> None:
    """bob sends everything that unloads a model, and ann's requests between find theirs loaded."""
    client = serve("root:key-r\nann:key-a\nbob:key-b")
    assert ask(client, "key-a", "/api/chat", {**CHAT, "stream": False, "model": "0"})[0] == 200
    for _ in range(4):
        assert ask(client, "key-b", "/admin/unload", {"model": "0"})[0] == 403
        assert ask(client, "key-b", "/admin/load", {"model": "1", "wait": False})[0] == 403
        assert (
            ask(client, "key-b", "/api/generate", {"model": "0", "keep_alive": 0})[1]["done_reason"]
            == "unload"
        )
        kept_for_no_time = {**CHAT, "stream": False, "keep_alive": 0, "options": {"num_predict": 1}}
        assert ask(client, "key-b", "/api/chat", kept_for_no_time)[0] == 200
        assert ask(client, "key-a", "/v1/chat/completions", CHAT)[0] == 200
    client.settle()
    assert client.generator.registry.counts == {"loads": 1, "unloads": 0, "swaps": 0, "failures": 0}


def test_without_names_a_loop_costs_another_client_one_load(serve: Callable[..., Client]) -> None:
    client = serve(None)
    for _ in range(6):
        assert ask(client, None, "/v1/chat/completions", CHAT)[0] == 200
        assert ask(client, None, "/admin/unload", {"model": "0", "wait": False})[0] == 202
        assert ask(client, None, "/api/generate", {"keep_alive": 0})[0] == 200
    client.settle()
    assert loads(client) == 2


def test_a_command_whose_client_hangs_up_is_dropped(
    serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve(None)
    stepping, goes_on = threading.Event(), threading.Event()
    step = LoadedModel.step

    def slow(self: LoadedModel) -> bool:
        stepping.set()
        goes_on.wait(0.05)
        return step(self)

    monkeypatch.setattr(LoadedModel, "step", slow)
    replying = threading.Thread(
        target=client.send, args=("/v1/chat/completions", {**CHAT, "max_tokens": 200})
    )
    replying.start()
    assert stepping.wait(30)
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=30)
    connection.request("POST", "/admin/load", json.dumps({"model": "1"}))
    queue = client.generator.registry.queue
    until(lambda: len(queue))
    connection.close()
    until(lambda: not len(queue))
    goes_on.set()
    replying.join()
    client.settle()
    assert loads(client) == 1
