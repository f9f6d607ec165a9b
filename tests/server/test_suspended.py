"""A reply that takes long does not keep another model out: it is suspended, and goes on as if
nothing had been.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from models import save_endless

from server.serving import Client, at_once, blockpool_server, until
from server.test_hang_ups import ask

BODY = {"prompt": "a long reply", "max_tokens": 300}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [save_endless(folder / "A"), save_endless(folder / "B", seed=2)]


def complete(client: Client, **body: Any) -> str:
    status, answer = client.send("/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["text"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def expected(models: list[Path]) -> str:
    with blockpool_server(models[0], "--pool-bytes", "60MB") as client:
        return complete(client, **BODY)


def serve(models: list[Path], patience: str) -> Any:
    return blockpool_server(
        models[0],
        "--pool-bytes",
        "60MB",
        "--swap-patience",
        patience,
        "--allow-models",
        str(models[1]),
    )


def test_a_long_reply_is_suspended_for_another_model_and_goes_on(
    models: list[Path], expected: str
) -> None:
    with serve(models, "0s") as client:
        client.generator.registry.queue.drain = 0.05

        def other() -> str:
            until(lambda: client.generator._live)
            return complete(client, prompt="another", max_tokens=3, model=str(models[1]))

        found, other_found = at_once([lambda: complete(client, **BODY), other])
        counts = client.generator.registry.counts
        client.settle()
    assert found == expected
    assert len(other_found) > 0
    assert counts["swaps"] >= 2


def test_the_loaded_model_serves_while_another_waits(models: list[Path]) -> None:
    with serve(models, "0s") as client:
        client.generator.registry.queue.drain = 3600.0
        running = ask(client, "/v1/completions", {**BODY, "max_tokens": 30_000})
        until(lambda: client.generator._live)
        waiting = ask(client, "/v1/completions", {**BODY, "model": str(models[1])})
        until(lambda: client.generator.registry.plan.unload is not None)
        assert client.send("/admin/models")[1]["change"]["stage"] == "draining"
        assert complete(client, prompt="at once", max_tokens=2)
        assert len(client.generator._live) == 1
        waiting.close()
        running.close()
        until(lambda: not client.generator._live and not len(client.generator.registry.queue))


def test_who_waits_too_long_for_a_model_is_told(
    models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(models, "1h") as client:
        running = ask(client, "/v1/completions", {**BODY, "max_tokens": 30_000})
        until(lambda: client.generator._live)
        answers: list[Any] = []
        body = {**BODY, "model": str(models[1])}
        thread = threading.Thread(
            target=lambda: answers.append(client.send("/v1/completions", body))
        )
        thread.start()
        line = client.generator.registry.queue
        until(lambda: len(line))
        clock = line.clock
        monkeypatch.setattr(
            line, "clock", lambda: clock() + client.generator.registry.config.wait_seconds + 1
        )
        thread.join()
        running.close()
        until(lambda: not client.generator._live)
    ((status, answer),) = answers
    assert status == 503
    assert "could not be loaded within 600 seconds" in answer["error"]["message"]
