"""Anthropic's own client against our server: messages, streams, tools, thinking, usage, and
clients that leave.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import mlx.core as mx
import mlx_lm.server
import openai
import pytest

from mlx_blockpool.server.model import LoadedModel
from server import scripted
from server.scripted import (
    ADD,
    CALL,
    LOOK_UP,
    SYSTEM,
    Say,
    anthropic_client,
    content,
    save_agent,
    total,
)
from server.serving import Client, at_once, blockpool_server

pytestmark = pytest.mark.server("--pool-bytes 20MB --prefill-step-size 128", model="agent")


@pytest.fixture
def small(agent: Path) -> Iterator[Client]:
    """A server whose pool holds 3,840 tokens of one sequence."""
    with blockpool_server(agent, "--pool-bytes", "2MB", "--prefill-step-size", "512") as running:
        running.chat([{"role": "user", "content": "x"}], max_tokens=1)
        yield running


def raw_events(server: Client, **body: Any) -> list[dict[str, Any]]:
    return scripted.raw_events(server, "/v1/messages", **{"max_tokens": 40, **body})


def ask(claude: anthropic.Anthropic, *messages: Any, **options: Any) -> Any:
    """The answer to messages, of which texts are the user's."""
    said = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    return claude.messages.create(
        **{"model": "default_model", "max_tokens": 40, "messages": said, **options}
    )


# -- messages and streams --------------------------------------------------------------------------


def test_the_reply_is_that_of_the_other_protocol(
    server: Client, claude: anthropic.Anthropic
) -> None:
    message = ask(claude, "What is a pool?", system=SYSTEM, max_tokens=12)
    gpt = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0)
    said: Any = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What is a pool?"},
    ]
    other = gpt.chat.completions.create(model="default_model", messages=said, max_tokens=12)
    assert content(message) == [{"type": "text", "text": other.choices[0].message.content}]
    assert (message.role, message.type, message.model) == ("assistant", "message", "default_model")
    assert other.usage is not None
    assert total(message.usage) == other.usage.prompt_tokens
    assert message.usage.output_tokens == other.usage.completion_tokens


@pytest.mark.parametrize(
    "text",
    [
        "Plain text.",
        f"Let me see.\n{CALL}",
        "<think>\nHm.\nSo.\n</think>\n\nYes.",
        f"<think>Look.</think>{CALL}\n{CALL}",
        "",
    ],
)
def test_a_stream_adds_up_to_the_message(claude: anthropic.Anthropic, say: Say, text: str) -> None:
    say(text)
    asked: Any = {
        "model": "default_model",
        "max_tokens": 400,
        "tools": [LOOK_UP],
        "messages": [{"role": "user", "content": "Go."}],
    }
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert content(streamed) == content(whole)
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert total(streamed.usage) == total(whole.usage)
    assert [getattr(b, "signature", None) for b in streamed.content] == [
        getattr(b, "signature", None) for b in whole.content
    ]


def test_the_events_come_in_the_protocols_order(server: Client, say: Say) -> None:
    say(f"<think>\nHm.\n</think>\n\nOk.\n{CALL}")
    events = raw_events(
        server, messages=[{"role": "user", "content": "Go."}], tools=[LOOK_UP], max_tokens=400
    )
    shown = [e for e in events if e["type"] != "ping"]
    kinds = [
        e.get("delta", {}).get("type") or e.get("content_block", {}).get("type") or e["type"]
        for e in shown
    ]
    assert [
        kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before
    ] == [
        "message_start",
        "thinking",
        "thinking_delta",
        "signature_delta",
        "content_block_stop",
        "text",
        "text_delta",
        "content_block_stop",
        "tool_use",
        "input_json_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [e["index"] for e in shown if e["type"] == "content_block_start"] == [0, 1, 2]
    start, delta = events[0]["message"], shown[-2]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == (
        [],
        None,
        0,
    )
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert total_of(delta["usage"]) == total_of(start["usage"]) > 0


def total_of(usage: dict[str, int]) -> int:
    return (
        usage["input_tokens"]
        + usage["cache_creation_input_tokens"]
        + usage["cache_read_input_tokens"]
    )


def test_pings_while_a_long_prompt_is_computed(server: Client) -> None:
    events = raw_events(
        server,
        messages=[{"role": "user", "content": "A prompt of several chunks. " * 30}],
        max_tokens=2,
    )
    first_block = next(i for i, e in enumerate(events) if e["type"] == "content_block_start")
    assert sum(e["type"] == "ping" for e in events[:first_block]) >= 5


def test_a_long_tool_call_is_sent_as_it_is_written(server: Client, say: Say) -> None:
    """A packet for the name, one for the key, one for each character and one for the end."""
    say(f'<tool_call>\n{{"name": "look_up", "arguments": {{"word": "{"x" * 200}"}}}}\n</tool_call>')
    events = raw_events(
        server, messages=[{"role": "user", "content": "Go."}], tools=[LOOK_UP], max_tokens=400
    )
    kinds = [e["type"] for e in events]
    begin = kinds.index("content_block_start")
    assert "ping" not in kinds[begin:]
    parts = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
    assert json.loads("".join(parts)) == {"word": "x" * 200}
    assert [part for part in parts if part == "x"] == ["x"] * 200
    assert (parts[0], parts[-1], "".join(parts[1:-202])) == ("{", "}", '"word": "')


# -- how a reply ends ------------------------------------------------------------------------------


def test_ends_of_replies(claude: anthropic.Anthropic, say: Say) -> None:
    say("One, two, three.")
    ended = ask(claude, "Count.")
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
    cut = ask(claude, "Count.", max_tokens=8)
    assert (cut.stop_reason, content(cut)[0]["text"], cut.usage.output_tokens) == (
        "max_tokens",
        "One, two",
        8,
    )
    stopped = ask(claude, "Count.", stop_sequences=["four", ", thr", " t"])
    assert (stopped.stop_reason, stopped.stop_sequence, content(stopped)[0]["text"]) == (
        "stop_sequence",
        " t",
        "One,",
    )
    longer = ask(claude, "Count.", stop_sequences=[", thr"])
    assert (longer.stop_sequence, content(longer)[0]["text"]) == (", thr", "One, two")


def test_what_begins_like_a_stop_sequence_and_is_none_is_told(
    claude: anthropic.Anthropic, say: Say
) -> None:
    say("One < two, th")
    ended = ask(claude, "Count.", stop_sequences=[", three"])
    assert (ended.stop_reason, content(ended)[0]["text"]) == ("end_turn", "One < two, th")


def test_a_message_without_a_word_has_an_empty_block(claude: anthropic.Anthropic, say: Say) -> None:
    say("")
    assert content(ask(claude, "Say nothing.")) == [{"type": "text", "text": ""}]


def test_more_tokens_than_the_pool_has_room_for(small: Client, say: Say) -> None:
    capacity = small.capacity()
    say("x" * 100)
    message = ask(anthropic_client(small), "y" * (capacity - 60), max_tokens=1000)
    assert message.stop_reason == "model_context_window_exceeded"
    assert total(message.usage) + message.usage.output_tokens == capacity


def test_no_tokens_only_compute_the_prompt(claude: anthropic.Anthropic) -> None:
    warmed = ask(claude, "Warm this up, please. " * 5, max_tokens=0)
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
    used = ask(claude, "Warm this up, please. " * 5, max_tokens=2).usage
    assert used.cache_read_input_tokens == total(used) - 1


def test_a_reply_goes_on_from_what_the_assistant_has_begun(
    server: Client, claude: anthropic.Anthropic, say: Say
) -> None:
    begun = {"role": "assistant", "content": "It is "}
    say("a pool.")
    message = ask(claude, "What is it?", begun)
    assert content(message) == [{"type": "text", "text": "a pool."}]
    asked = [{"role": "user", "content": "What is it?"}]
    without = claude.messages.count_tokens(
        model="default_model", messages=asked, thinking={"type": "disabled"}
    )
    assert total(message.usage) == without.input_tokens + len("It is ")


# -- tools -----------------------------------------------------------------------------------------


def test_a_tool_is_called_and_its_result_comes_back(
    server: Client, claude: anthropic.Anthropic, say: Say
) -> None:
    say(f"Let me see.\n{CALL}", "A pool holds blocks.")
    first = ask(claude, "What is a pool?", tools=[LOOK_UP], system=SYSTEM, max_tokens=200)
    assert first.stop_reason == "tool_use"
    assert content(first) == [
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "name": "look_up", "input": {"word": "pool"}},
    ]
    called = first.content[1].id
    assert called.startswith("toolu_")
    result = {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": called, "content": "pool: holds blocks"}
        ],
    }
    said = ["What is a pool?", {"role": "assistant", "content": first.content}, result]
    second = ask(claude, *said, tools=[LOOK_UP], system=SYSTEM)
    assert content(second) == [{"type": "text", "text": "A pool holds blocks."}]
    # Written as it was generated, the call is known up to its end.
    assert (
        second.usage.cache_read_input_tokens >= total(first.usage) + first.usage.output_tokens - 1
    )


def test_several_calls_and_their_results_in_one_message(
    claude: anthropic.Anthropic, say: Say
) -> None:
    say(f'{CALL}\n<tool_call>\n{{"name": "add", "arguments": {{"a": 1}}}}\n</tool_call>', "Done.")
    first = ask(claude, "Both.", tools=[LOOK_UP, ADD], max_tokens=300)
    assert [(b.name, b.input) for b in first.content] == [
        ("look_up", {"word": "pool"}),
        ("add", {"a": 1}),
    ]
    results: Any = [
        {
            "type": "tool_result",
            "tool_use_id": first.content[0].id,
            "content": [{"type": "text", "text": "found"}],
        },
        {
            "type": "tool_result",
            "tool_use_id": first.content[1].id,
            "content": "no such number",
            "is_error": True,
        },
        {"type": "text", "text": "Go on."},
    ]
    said = [
        "Both.",
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    assert content(ask(claude, *said, tools=[LOOK_UP, ADD])) == [{"type": "text", "text": "Done."}]


def test_one_call_is_enough_where_calls_must_not_be_parallel(
    claude: anthropic.Anthropic, say: Say
) -> None:
    say(f"{CALL}\n{CALL}")
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    message = ask(claude, "Twice.", tools=[LOOK_UP], tool_choice=choice, max_tokens=300)
    assert [b.type for b in message.content] == ["tool_use"]
    assert message.stop_reason == "tool_use"


def test_what_is_no_call_is_told_as_text(claude: anthropic.Anthropic, say: Say) -> None:
    say("<tool_call>\nlook up the pool\n</tool_call>")
    message = ask(claude, "Go.", tools=[LOOK_UP], max_tokens=300)
    assert content(message) == [
        {"type": "text", "text": "<tool_call>\nlook up the pool\n</tool_call>"}
    ]
    assert message.stop_reason == "end_turn"
    say(CALL)
    assert content(ask(claude, "Nobody offered a tool.", max_tokens=300)) == [
        {"type": "text", "text": CALL}
    ]
    cut = ask(claude, "Go.", tools=[LOOK_UP], max_tokens=20)
    assert (cut.stop_reason, cut.content[0].type) == ("max_tokens", "text")


def test_a_call_that_must_be_made_is_begun_for_the_model(
    claude: anthropic.Anthropic, say: Say
) -> None:
    say('\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>')
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        message = ask(claude, "Go.", tools=[LOOK_UP, ADD], tool_choice=choice, max_tokens=300)
        assert content(message) == [{"type": "tool_use", "name": "add", "input": {"a": 2}}]
        assert message.stop_reason == "tool_use"


def test_where_no_call_may_be_made_none_can_be_begun(
    server: Client, claude: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tools stay in the prompt, whose beginning is known with them; the token of a call is
    never drawn.
    """
    call = server.generator.model_provider.tokenizer.tool_call_start_tokens[0]
    drawn: list[float] = []

    def most_likely(logprobs: mx.array) -> mx.array:
        drawn.append(logprobs[0, call].item())
        return mx.argmax(logprobs, axis=-1)

    monkeypatch.setattr(mlx_lm.server, "_make_sampler", lambda args, tokenizer: most_likely)
    asked: Any = {"tools": [LOOK_UP], "max_tokens": 4}
    may, never = (
        ask(claude, "Go.", tool_choice={"type": kind}, **asked) for kind in ("auto", "none")
    )
    assert total(never.usage) == total(may.usage)
    assert never.usage.cache_read_input_tokens == total(may.usage) - 1
    assert [logprob < -1000 for logprob in drawn if logprob != 0][-4:] == [True] * 4
    assert not any(logprob < -1000 for logprob in drawn[:4])


# -- thinking --------------------------------------------------------------------------------------


def test_thinking_comes_out_and_goes_in_again(
    server: Client, claude: anthropic.Anthropic, say: Say
) -> None:
    say("<think>\nA pool.\n</think>\n\nIt holds blocks.", "Yes.")
    first = ask(claude, "What is a pool?", max_tokens=200)
    assert content(first) == [
        {"type": "thinking", "thinking": "A pool."},
        {"type": "text", "text": "It holds blocks."},
    ]
    assert first.content[0].signature
    assert 0 < first.usage.output_tokens_details.thinking_tokens < first.usage.output_tokens
    second = ask(
        claude, "What is a pool?", {"role": "assistant", "content": first.content}, "Sure?"
    )
    assert (
        second.usage.cache_read_input_tokens >= total(first.usage) + first.usage.output_tokens - 1
    )


def test_thinking_that_is_not_shown_is_carried_by_its_signature(
    claude: anthropic.Anthropic, say: Say
) -> None:
    say("<think>\nA pool.\n</think>\n\nIt holds blocks.", "Yes.")
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    first = ask(claude, "What is a pool good for?", max_tokens=200, thinking=thinking)
    assert content(first) == [
        {"type": "thinking", "thinking": ""},
        {"type": "text", "text": "It holds blocks."},
    ]
    second = ask(
        claude,
        "What is a pool good for?",
        {"role": "assistant", "content": first.content},
        "Sure?",
        thinking=thinking,
    )
    assert (
        second.usage.cache_read_input_tokens >= total(first.usage) + first.usage.output_tokens - 1
    )


def test_thinking_can_be_switched_off(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "default_model", "messages": [{"role": "user", "content": "Go."}]}
    on, adaptive, off = (
        claude.messages.count_tokens(**asked, thinking=thinking).input_tokens
        for thinking in (
            {"type": "enabled", "budget_tokens": 1024},
            {"type": "adaptive"},
            {"type": "disabled"},
        )
    )
    assert on == adaptive == claude.messages.count_tokens(**asked).input_tokens
    assert off == on + len("T\n\nT\n\n")


# -- conversations ---------------------------------------------------------------------------------


def test_system_messages_inside_of_a_conversation(claude: anthropic.Anthropic, say: Say) -> None:
    """This template takes none, as Qwen's; they become the user's, where they stand."""
    say("Yes.")
    later: Any = {"role": "system", "content": "Agents: none."}
    first = ask(claude, "Hello.", later, system="Be brief.")
    assert content(first) == [{"type": "text", "text": "Yes."}]
    asked = claude.messages.count_tokens(
        model="default_model",
        system="Be brief.",
        messages=[{"role": "user", "content": "Hello.\n\nAgents: none."}],
    )
    assert total(first.usage) == asked.input_tokens
    second = ask(
        claude,
        "Hello.",
        later,
        {"role": "assistant", "content": "Yes."},
        "And?",
        system="Be brief.",
    )
    assert second.usage.cache_read_input_tokens >= total(first.usage)


def test_messages_of_one_role_are_one_turn(claude: anthropic.Anthropic) -> None:
    def count(*messages: Any) -> int:
        said = [{"role": role, "content": text} for role, text in messages]
        return claude.messages.count_tokens(model="default_model", messages=said).input_tokens  # type: ignore[arg-type]

    assert count(("user", "One"), ("user", "Two")) == count(("user", "One\n\nTwo"))


def test_three_clients_at_once_are_told_what_each_is_told_alone(
    server: Client, claude: anthropic.Anthropic
) -> None:
    def talk(i: int) -> list[Any]:
        client, said, told = anthropic_client(server), [], []
        for turn in range(3):
            said.append({"role": "user", "content": f"Client {i} asks {turn}."})
            with client.messages.stream(
                model="default_model", max_tokens=16, system=SYSTEM, messages=said
            ) as stream:
                message = stream.get_final_message()
            told.append(content(message))
            said.append({"role": "assistant", "content": message.content})
        return told

    assert at_once([lambda i=i: talk(i) for i in range(3)]) == [talk(i) for i in range(3)]


def test_turns_read_what_the_turns_before_have_computed(claude: anthropic.Anthropic) -> None:
    said: list[Any] = [{"role": "user", "content": "First."}]
    first = ask(claude, *said, system=SYSTEM + "Nobody else has this prompt.")
    said += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "Second."},
    ]
    second = ask(claude, *said, system=SYSTEM + "Nobody else has this prompt.").usage
    assert second.cache_read_input_tokens >= total(first.usage)
    assert second.cache_creation_input_tokens == total(second) - second.cache_read_input_tokens
    assert second.input_tokens == 0


def test_a_client_that_hangs_up_ends_its_reply(
    server: Client, claude: anthropic.Anthropic, say: Say
) -> None:
    say("word " * 2000)
    asked: Any = {
        "model": "default_model",
        "max_tokens": 9000,
        "messages": [{"role": "user", "content": "Never mind."}],
    }
    with claude.messages.stream(**asked) as stream:
        for _ in range(10):
            next(stream)
    server.settle()
    counts = server.send("/v1/cache")[1]["engine"]
    say("Here.")
    assert content(ask(claude, "Still there?")) == [{"type": "text", "text": "Here."}]
    assert server.send("/v1/cache")[1]["engine"]["tokens"] < counts["tokens"] + 20


def test_a_client_that_hangs_up_while_its_prompt_is_computed(
    server: Client, claude: anthropic.Anthropic
) -> None:
    text = "A long prompt that nobody waits for. " * 80
    body = json.dumps(
        {"max_tokens": 500, "stream": True, "messages": [{"role": "user", "content": text}]}
    ).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = (
            f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        received = b""
        while received.count(b"event: ping") < 3:
            received += connection.recv(4096)
    server.settle()
    usage = ask(claude, text, max_tokens=1).usage
    assert 256 <= usage.cache_read_input_tokens < total(usage) - 1


def test_replies_are_remembered_for_the_normaliser_that_puts_them_back(
    claude: anthropic.Anthropic, say: Say
) -> None:
    """The call was written without spaces, and the template would write it with them."""
    call = '{"name":"look_up","arguments":{"word":"pool"}}'
    written = f"<think>\nHm.\n</think>\n\n<tool_call>{call}</tool_call>"
    say(written, "Done.")
    first = ask(claude, "Replay this.", tools=[LOOK_UP], max_tokens=200)
    result = {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "found"}
        ],
    }
    asked = ["Replay this.", {"role": "assistant", "content": first.content}, result]
    read = [
        ask(
            claude, *asked, tools=[LOOK_UP], extra_headers={"X-Normalise": name}
        ).usage.cache_read_input_tokens
        for name in ("none", "replay")
    ]
    assert read[0] < total(first.usage) + first.usage.output_tokens - 1 <= read[1]


def test_requests_that_run_one_by_one_through_mlx_lm(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those with images do: no batches, and the token that stops a reply brings its text."""
    monkeypatch.setattr(LoadedModel, "open_engine", lambda self: None)
    with blockpool_server(save_agent(tmp_path / "agent")) as server:
        claude = anthropic_client(server)
        say("One, two, three.")
        stopped = ask(claude, "Count.", stop_sequences=[", thr"])
        assert (stopped.stop_sequence, content(stopped)[0]["text"]) == (", thr", "One, two")
        say(f"Ok.\n{CALL}")
        called = ask(claude, "Count.", tools=[LOOK_UP], max_tokens=200, system=SYSTEM)
        assert [block["type"] for block in content(called)] == ["text", "tool_use"]
        say("a pool.")
        begun: Any = ["What is it?", {"role": "assistant", "content": "It is "}]
        message = ask(
            claude,
            *begun,
            tools=[LOOK_UP],
            system=[{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
        )
        assert content(message)[0]["text"] == "a pool."
        assert 0 < message.usage.input_tokens < 60
        with claude.messages.stream(
            model="default_model", max_tokens=9, messages=[{"role": "user", "content": "Go."}]
        ) as stream:
            assert stream.get_final_text() == "a pool."


def test_agents_are_named_by_a_header_as_elsewhere(
    server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents: list[Any] = []
    generate_choices = type(server.generator).generate_choices

    def watching(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        agents.append(request.options.agent)
        return generate_choices(self, request, *args, **kwargs)

    monkeypatch.setattr(type(server.generator), "generate_choices", watching)
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    assert server.send("/v1/messages", body, headers={"X-Agent-Id": "scout"})[0] == 200
    assert server.send("/v1/messages", body)[0] == 200
    assert agents == ["scout", None]


# -- usage and marks -------------------------------------------------------------------------------


def test_counted_tokens_are_those_of_the_request(claude: anthropic.Anthropic) -> None:
    asked: Any = {
        "model": "default_model",
        "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": " And kind."}],
        "tools": [LOOK_UP],
        "tool_choice": {"type": "any"},
        "messages": [
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": "Ok"},
            {"role": "user", "content": "Go on."},
        ],
    }
    counted = claude.messages.count_tokens(**asked).input_tokens
    assert counted == total(claude.messages.create(max_tokens=2, **asked).usage)


def test_a_prompt_that_does_not_fit_can_be_counted(small: Client) -> None:
    text = "y" * (small.capacity() + 100)
    counted = anthropic_client(small).messages.count_tokens(
        model="default_model", messages=[{"role": "user", "content": text}]
    )
    assert counted.input_tokens > len(text)


def test_usage_says_what_was_kept_up_to_the_last_mark(claude: anthropic.Anthropic) -> None:
    hour: Any = {"type": "ephemeral", "ttl": "1h"}
    system: Any = [
        {"type": "text", "text": "Marked for an hour.", "cache_control": hour},
        {"type": "text", "text": "Not marked."},
    ]
    first: Any = [
        {"type": "text", "text": "Old. ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "New."},
    ]
    usage = ask(claude, {"role": "user", "content": first}, system=system, max_tokens=1).usage
    hour_tokens = len("S") + len("system\n" + "Marked for an hour.")
    marked = hour_tokens + len("Not marked.\n") + len("E\nSuser\nOld. ")
    assert (
        usage.cache_creation.ephemeral_1h_input_tokens
        == hour_tokens - usage.cache_read_input_tokens
        > 0
    )
    assert usage.cache_creation_input_tokens == marked - usage.cache_read_input_tokens
    assert usage.input_tokens == len("New.E\nSassistant\n")
    again = ask(claude, {"role": "user", "content": first}, system=system, max_tokens=1).usage
    assert (again.cache_read_input_tokens, again.cache_creation_input_tokens) == (
        total(again) - 1,
        0,
    )
    assert again.input_tokens == 1


# -- errors, headers, models -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", ""),
        ("GET", ""),
        ("GET", "/msgbatch_1"),
        ("GET", "/msgbatch_1/results"),
        ("POST", "/msgbatch_1/cancel"),
        ("DELETE", "/x"),
    ],
)
def test_batches_are_not_there_in_the_protocols_words(
    server: Client, method: str, path: str
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(method, f"/v1/messages/batches{path}", "{}" if method == "POST" else None)
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    assert (answer.status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")
    assert body["error"]["message"].startswith(
        f"{method} /v1/messages/batches{path}: there are only POST /v1/messages"
    )
    assert body["request_id"] == answer.headers["request-id"]


def test_a_client_looks_whether_a_server_is_there(server: Client) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    for method, body in (("HEAD", b""), ("GET", b'{"message": "hello"}')):
        connection.request(method, "/api/hello")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, body)
    connection.close()


def test_errors_have_the_protocols_shape(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        ask(claude, {"role": "robot", "content": "x"})
    assert bad.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert "messages.0.role: Input should be 'user' or 'assistant' or 'system'" in bad.value.message
    assert bad.value.request_id
    assert bad.value.body["request_id"] == bad.value.request_id  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="messages: Input should not be empty"):
        ask(claude)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        ask(claude, "x", model="nobody/has-this")
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    source = {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}
    look: Any = {
        "role": "user",
        "content": [{"type": "text", "text": "Look."}, {"type": "image", "source": source}],
    }
    with pytest.raises(
        anthropic.BadRequestError, match=r"messages\.0\.content\.1: this model takes no images"
    ):
        ask(claude, look)


def test_a_prompt_that_does_not_fit_is_told_in_the_words_that_clients_look_for(
    small: Client,
) -> None:
    capacity = small.capacity()
    with pytest.raises(
        anthropic.BadRequestError, match=rf"prompt is too long: \d+ tokens > {capacity} maximum"
    ):
        ask(anthropic_client(small), "y" * (capacity + 10))


def test_a_body_that_is_too_large(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.APIStatusError, match="Request exceeds the maximum size") as large:
        ask(claude, "y" * (33 << 20))
    assert (large.value.status_code, large.value.body["error"]["type"]) == (
        413,
        "request_too_large",
    )  # type: ignore[index]


def test_a_failure_in_mid_stream_is_an_error_event(
    claude: anthropic.Anthropic, fourth_word_fails: Callable[[Exception], None]
) -> None:
    fourth_word_fails(RuntimeError("no word for this"))
    asked: Any = {
        "model": "default_model",
        "max_tokens": 10,
        "messages": [{"role": "user", "content": "Speak."}],
    }
    with (
        claude.messages.stream(**asked) as stream,
        pytest.raises(anthropic.APIStatusError) as failed,
    ):
        stream.until_done()
    assert failed.value.body["error"] == {"type": "api_error", "message": "no word for this"}  # type: ignore[index]


def test_a_server_without_room_is_overloaded(
    claude: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_blockpool.errors import PoolExhaustedError
    from mlx_blockpool.server.scope import RequestScope

    def full(*args: Any, **kwargs: Any) -> Any:
        raise PoolExhaustedError(3, 1, 1, "full")

    monkeypatch.setattr(RequestScope, "generate_choices", full)
    with pytest.raises(anthropic.OverloadedError) as overloaded:
        ask(claude, "x")
    assert overloaded.value.status_code == 529


def test_betas_queries_and_keys_are_taken(server: Client, claude: anthropic.Anthropic) -> None:
    said: Any = [{"role": "user", "content": "Go."}]
    message = claude.beta.messages.create(
        model="default_model", max_tokens=2, messages=said, betas=["anything-2026-01-01"]
    )
    assert message.usage.output_tokens == 2
    assert claude.beta.messages.count_tokens(model="default_model", messages=said).input_tokens > 0
    answer = httpx2.post(
        f"http://127.0.0.1:{server.port}/v1/messages", json={"max_tokens": 1, "messages": said}
    )
    assert (answer.status_code, answer.headers["request-id"][:4]) == (200, "req_")
    missing = httpx2.post(f"http://127.0.0.1:{server.port}/v1/messages/batches", json={})
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


def test_models_are_listed_as_each_protocol_lists_them(
    server: Client, claude: anthropic.Anthropic
) -> None:
    models = list(claude.models.list())
    assert [claude.models.retrieve(model.id) for model in models] == models
    assert [model["id"] for model in server.send("/v1/models")[1]["data"]] == [
        model.id for model in models
    ]
    assert "default_model" in [model.id for model in models]
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("nobody/has-this")
    with pytest.raises(anthropic.BadRequestError):
        claude.models.list(limit=0)


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/models?limit=5"])
def test_a_look_at_the_headers_alone(server: Client, path: str) -> None:
    for headers in ({}, {"anthropic-version": "2023-06-01"}):
        answer = httpx2.head(f"http://127.0.0.1:{server.port}{path}", headers=headers)
        assert (answer.status_code, answer.content) == (200, b"")


def test_shutting_down_is_told(agent: Path) -> None:
    with blockpool_server(agent, "--pool-bytes", "20MB") as server:
        client = anthropic_client(server)
        server.generator.stop_and_join()
        with pytest.raises(anthropic.InternalServerError) as ended:
            ask(client, "x")
        assert ended.value.body["error"]["type"] == "api_error"  # type: ignore[index]
