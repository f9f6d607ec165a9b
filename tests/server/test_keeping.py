"""What is kept for whom, over HTTP: marks and their time, retention, quotas of agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import save_model
from thorough import only

from server.serving import Client, at_once, blockpool_server, cached_tokens, parse, until

SYSTEM = "You keep what you were told to keep, and nothing else. " * 8
MINUTES = 300.0
HOUR = 3600.0
# Small pools: a few thousand tokens are more than they hold.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("1MB", {}),
    "gemma3_text": ("1MB", {"num_hidden_layers": 2}),
    "lfm2": ("600KB", {}),
}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module", params=MODELS)
def each_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """Of a model with full layers, with windows, with states."""
    pool, changes = MODELS[request.param]
    model = save_model(tmp_path_factory.mktemp(request.param), request.param, **changes)
    with blockpool_server(model, "--pool-bytes", pool, "--prefill-step-size", "512") as running:
        running.chat([{"role": "user", "content": "x"}], max_tokens=1)
        yield running


@pytest.fixture
def clean(each_server: Client) -> Iterator[Client]:
    """With nothing pinned from before; afterwards no block is held and all figures are right."""
    yield each_server
    each_server.settle()
    timed(each_server).now += 2 * 24 * HOUR


def keeping(client: Client) -> Any:
    return client.generator.model.prefix.retention


def timed(client: Client) -> Clock:
    """A clock of this server that moves only by hand."""
    kept = keeping(client)
    if not isinstance(kept.pins.clock, Clock):
        kept.pins.clock = kept.days.clock = Clock()
    return kept.pins.clock  # type: ignore[no-any-return]


def message(client: Client, system: Any, text: str, **options: Any) -> dict[str, int]:
    """The usage of one message, of which the system prompt is `system`."""
    body = {
        "max_tokens": 3,
        "system": system,
        "messages": [{"role": "user", "content": text}],
        **options,
    }
    status, answer = client.send("/v1/messages", body)
    assert status == 200, answer
    return answer["usage"]  # type: ignore[no-any-return]


def marked(text: str, **control: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral", **control}}]


def press(client: Client, name: str) -> None:
    """Others ask for more than the pool can hold."""
    size = client.capacity() // 3
    for n in range(4):
        client.chat(
            [{"role": "user", "content": f"{n} {name} " + chr(65 + n) * size}], max_tokens=1
        )


LLAMA = pytest.mark.parametrize("each_server", ["llama"], indirect=True)


@pytest.mark.parametrize("each_server", only(MODELS, "lfm2"), indirect=True)
def test_a_marked_beginning_is_still_known_after_others_needed_the_pool_and_not_after_its_time(
    clean: Client,
) -> None:
    clock = timed(clean)
    first = message(clean, marked(SYSTEM), "one")
    assert (
        first["cache_creation"]["ephemeral_5m_input_tokens"]
        == first["cache_creation_input_tokens"]
        > len(SYSTEM)
    )
    press(clean, "before")
    again = message(clean, marked(SYSTEM), "two")
    assert again["cache_read_input_tokens"] >= len(SYSTEM)
    assert again["cache_creation_input_tokens"] < 10
    clock.now += MINUTES - 10
    # Its use makes it stay for its time again.
    assert message(clean, marked(SYSTEM), "three")["cache_read_input_tokens"] >= len(SYSTEM)
    clock.now += MINUTES - 10
    press(clean, "then")
    assert message(clean, marked(SYSTEM), "four")["cache_read_input_tokens"] >= len(SYSTEM)
    clock.now += MINUTES
    press(clean, "after")
    late = message(clean, SYSTEM, "five")
    assert late["cache_read_input_tokens"] < 100


@LLAMA
def test_an_hour_is_an_hour(clean: Client) -> None:
    clock = timed(clean)
    system = "For an hour. " + SYSTEM
    assert message(clean, marked(system, ttl="1h"), "one")["cache_creation"][
        "ephemeral_1h_input_tokens"
    ] > len(system)
    clock.now += HOUR - 1
    press(clean, "hour")
    assert message(clean, system, "two")["cache_read_input_tokens"] >= len(system)


@pytest.mark.parametrize("each_server", only(MODELS, "llama"), indirect=True)
def test_marks_on_openais_messages_do_the_same(clean: Client) -> None:
    clock = timed(clean)
    system = "In the other protocol. " + SYSTEM[:300]
    parts: Any = [{"role": "system", "content": marked(system)}, {"role": "user", "content": "one"}]
    plain: Any = [{"role": "system", "content": system}, {"role": "user", "content": "one"}]
    told = clean.chat(parts, max_tokens=3)["choices"][0]["message"]
    assert clean.chat(plain, max_tokens=3)["choices"][0]["message"] == told
    press(clean, "openai")
    used = clean.chat([plain[0], {"role": "user", "content": "two"}], max_tokens=3)["usage"]
    assert cached_tokens(used) >= len(system)
    clock.now += MINUTES + 1
    press(clean, "openai again")
    used = clean.chat([plain[0], {"role": "user", "content": "three"}], max_tokens=3)["usage"]
    assert cached_tokens(used) < 100


@pytest.mark.parametrize("each_server", only(MODELS, "lfm2"), indirect=True)
def test_a_pool_full_of_marks_serves_everybody(clean: Client) -> None:
    """What is pinned is bounded, and gives way; who does not fit beside the others waits."""
    size = clean.capacity() // 4

    def job(n: int) -> Any:
        return lambda: message(clean, marked(f"{n} " + chr(97 + n) * size), "and?", max_tokens=8)

    usages = at_once([job(n) for n in range(6)])
    assert all(usage["output_tokens"] > 0 for usage in usages)
    large = clean.chat([{"role": "user", "content": "z" * (4 * size - 200)}], max_tokens=2)
    assert large["usage"]["prompt_tokens"] >= 4 * size - 200
    clean.settle()
    keeping(clean).pins.check()
    figures = clean.send("/v1/cache")[1]["pinned"]
    assert figures["pinned_bytes"] <= figures["most_pinned_bytes"]
    assert figures["gave_way"] + figures["refused"] > 0


# -- agents, and the disk --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("stored")
    model = save_model(folder / "llama", "llama")
    options = ["--pool-bytes", "20MB", "--store-dir", str(folder / "store"), "--store-bytes", "2MB"]
    with blockpool_server(model, *options, "--agent-bytes", "300KB") as running:
        yield running


def figures(client: Client) -> dict[str, Any]:
    """GET /v1/cache once everything so far is in it."""
    client.settle()
    seen = client.generator.model.report
    until(lambda: client.generator.model.report is not seen)
    return client.send("/v1/cache")[1]  # type: ignore[no-any-return]


def records(client: Client, text: str) -> list[bool]:
    """Which blocks of a prompt are on disk, once all that is to be written is."""
    client.settle()
    stored = client.generator.model.prefix.stored
    until(lambda: not (stored.report()["pending"] or stored.report()["queued_bytes"]))
    tokens = client.generator.model_provider.tokenizer.encode(text, add_special_tokens=False)
    return [node.on_disk for node in stored.index.trie.match(tokens).full_nodes]


def chat(client: Client, text: str, **options: Any) -> int:
    """How many tokens of a prompt were known."""
    answer = client.chat([{"role": "user", "content": text}], max_tokens=2, **options)
    return cached_tokens(answer["usage"])


def test_what_only_requests_for_memory_have_computed_is_never_written(stored: Client) -> None:
    text = "Not a word of this on any disk. " * 30
    begun = f"<|im_start|>user\n{text}"
    chat(stored, text, prompt_cache_retention="in_memory")
    assert chat(stored, text, prompt_cache_retention="in_memory") > len(text)
    assert records(stored, begun) == [False] * 3
    # Somebody who does not mind goes on from there.
    assert chat(stored, text + "And so on. " * 40) >= len(text)
    assert records(stored, begun) == [True] * 3


def test_a_prompt_for_a_day_is_spared_on_disk(stored: Client) -> None:
    text = "This is to be there tomorrow. " * 20
    chat(stored, text, prompt_cache_retention="24h")
    report = figures(stored)
    assert report["kept_for_a_day"] == 1
    for n in range(6):
        chat(stored, f"{n} passes by. " * 80)
    assert all(records(stored, f"<|im_start|>user\n{text}"))
    report = figures(stored)["store"]
    assert report["dropped"] > 0
    assert report["pinned_bytes"] > 0
    assert report["bytes"] == report["model_bytes"] <= report["store_bytes"] == 2_000_000


def test_an_agent_has_its_quota_and_takes_nothing_from_others(stored: Client) -> None:
    other = "Of the other agent. " * 20
    chat(stored, other, prompt_cache_key="other")
    for n in range(4):
        chat(stored, f"{n} of the greedy one. " * 40, prompt_cache_key="greedy")
    report = figures(stored)
    assert 0 < report["agents"]["greedy"] <= report["agent_bytes"] == 300_000
    assert report["agents"]["other"] > 0
    assert list(report["agents"].values()) == sorted(report["agents"].values(), reverse=True)
    assert chat(stored, other, prompt_cache_key="other") > len(other)


def test_a_request_longer_than_its_agents_quota_is_served(stored: Client) -> None:
    answer = stored.chat(
        [{"role": "user", "content": "long " * 200}], max_tokens=3, prompt_cache_key="long"
    )
    assert answer["usage"]["prompt_tokens"] > 1000
    assert figures(stored)["agents"]["long"] <= 300_000


def test_options_that_are_no_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        parse(["--model", str(tmp_path), "--agent-bytes", "many"])
