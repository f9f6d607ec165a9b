"""Bodies of Anthropic's protocol against conversations of OpenAI's: the same prompts, marks, and
errors that name their place.
"""

from __future__ import annotations

import copy
import json
import random
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.server import CompletionRequest, ResponseGenerator
from mlx_lm.tokenizer_utils import load as load_tokenizer
from thorough import only, tried

from mlx_blockpool.config import FormConfig, ImageConfig
from mlx_blockpool.server.api.anthropic_request import parse
from mlx_blockpool.server.api.errors import anthropic_status
from mlx_blockpool.server.api.thinking import signature_of, thinking_in
from mlx_blockpool.server.bodies import InvalidRequestError
from mlx_blockpool.server.forms import Forms
from mlx_blockpool.server.preparation import PromptCounted, PromptPreparation
from mlx_blockpool.server.prompts import encoding
from mlx_blockpool.server.prompts.breakpoints import Breakpoint, message_breakpoints
from mlx_blockpool.server.prompts.renderer import PromptRenderer
from mlx_blockpool.server.provider import ModelKey
from mlx_blockpool.server.request import ParsedRequest
from server.scripted import ADD, LOOK_UP, TEMPLATE, save_agent
from server.serving import Client

pytestmark = pytest.mark.server("--pool-bytes 20MB --prefill-step-size 128", model="agent")

OPTIONS = Namespace(
    temp=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    num_draft_tokens=3,
    chat_template_args={},
    use_default_chat_template=False,
)
# Tools before the system text, as GLM's; a system message anywhere.
TOOLS_FIRST = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}{% endfor "
    "%}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Tokenizing:
    """The part of a generator that makes prompts, with its worker's part in this process."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.model_provider = Namespace(processor=None, cli_args=OPTIONS)
        registry: Any = Namespace(
            template=Namespace(_tokenizer_config={}, cli_args=OPTIONS), loaded={}
        )
        workers: Any = Namespace(prepare=PromptRenderer(self.tokenizer).render)
        self.preparation = PromptPreparation(workers, ImageConfig(), registry, Forms(FormConfig()))
        self.folder = folder

    def ours(self, body: dict[str, Any]) -> tuple[list[int], Any]:
        """The prompt of a body, and its request."""
        parsed = parse({"max_tokens": 5, **body}, OPTIONS)
        self.prepare(parsed)
        return list(parsed.request.prepared.tokens), parsed.request

    def prepare(self, parsed: ParsedRequest) -> None:
        self.preparation.prepare(
            parsed.request, replace(parsed.arguments, model=ModelKey(str(self.folder)))
        )

    def text(self, body: dict[str, Any], tokens: int | None = None) -> str:
        return str(self.tokenizer.decode(self.ours(body)[0][:tokens]))

    def theirs(self, messages: list[Any], tools: list[Any] | None) -> list[int]:
        """mlx-lm's prompt of a conversation in OpenAI's shape."""
        request = CompletionRequest("chat", "", messages, tools, None)
        return list(
            ResponseGenerator._tokenize(
                self, self.tokenizer, request, Namespace(chat_template_kwargs=None)
            )[0]
        )


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Tokenizing:
    return Tokenizing(save_agent(tmp_path_factory.mktemp("agent")))


@pytest.fixture(scope="module")
def tools_first(tmp_path_factory: pytest.TempPathFactory) -> Tokenizing:
    return Tokenizing(save_agent(tmp_path_factory.mktemp("tools first"), TOOLS_FIRST))


# -- the same conversation in both protocols -------------------------------------------------------

TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=12)
PARTS = st.lists(TEXT, min_size=1, max_size=3)
JSON = st.dictionaries(
    TEXT,
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT | st.lists(TEXT, max_size=2),
    max_size=3,
)
CONTROL = st.none() | st.just({"type": "ephemeral"}) | st.just({"type": "ephemeral", "ttl": "1h"})


class Both:
    """A conversation that is written down in both protocols at once."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.marks = 0
        self.messages: list[Any] = []
        self.others: list[Any] = []

    def marked(self, block: dict[str, Any]) -> dict[str, Any]:
        control = self.draw(CONTROL) if self.marks < 4 else None
        self.marks += control is not None
        return block if control is None else {**block, "cache_control": control}

    def texts(self) -> tuple[Any, Any]:
        """Content as text or in blocks, in both."""
        parts = self.draw(PARTS)
        if self.draw(st.booleans()):
            return "".join(parts), "".join(parts)
        return [self.marked({"type": "text", "text": part}) for part in parts], [
            {"type": "text", "text": p} for p in parts
        ]

    def user(self, calls: list[tuple[str, str]]) -> None:
        blocks = []
        for called, name in calls:
            result, other = self.texts()
            blocks.append(
                self.marked({"type": "tool_result", "tool_use_id": called, "content": result})
            )
            self.others.append(
                {"role": "tool", "tool_call_id": called, "name": name, "content": other}
            )
        if not calls or self.draw(st.booleans()):
            content, other = self.texts()
            self.others.append({"role": "user", "content": other})
            if not calls:
                self.messages.append({"role": "user", "content": content})
                return
            blocks += content if isinstance(content, list) else [{"type": "text", "text": content}]
        self.messages.append({"role": "user", "content": blocks})

    def assistant(self, number: int) -> list[tuple[str, str]]:
        content, other = self.texts()
        calls = [
            (f"toolu_{number}_{i}", self.draw(TEXT), self.draw(JSON))
            for i in range(self.draw(st.integers(0, 2)))
        ]
        thinking = self.draw(st.none() | TEXT)
        message = {"role": "assistant", "content": other}
        if thinking is not None or calls:
            content = content if isinstance(content, list) else [{"type": "text", "text": content}]
        if thinking is not None:
            content = [{"type": "thinking", "thinking": thinking, "signature": "s"}, *content]
            message["reasoning_content"] = thinking
        if calls:
            content = [
                *content,
                *(
                    self.marked({"type": "tool_use", "id": i, "name": n, "input": a})
                    for i, n, a in calls
                ),
            ]
            written = [
                {"id": i, "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
                for i, n, a in calls
            ]
            message["tool_calls"] = written
        self.messages.append({"role": "assistant", "content": content})
        self.others.append(message)
        return [(i, n) for i, n, _ in calls]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[dict[str, Any], list[Any], list[Any] | None]:
    """(a body, the messages and the tools of the other protocol)."""
    both = Both(draw)
    body: dict[str, Any] = {}
    tools = None
    if draw(st.booleans()):
        body["system"], other = both.texts()
        both.others.append({"role": "system", "content": other})
    if draw(st.booleans()):
        body["tools"] = [both.marked(LOOK_UP), both.marked(ADD)]
        functions = [
            {"name": t["name"], **_described(t), "parameters": t["input_schema"]}
            for t in (LOOK_UP, ADD)
        ]
        tools = [{"type": "function", "function": function} for function in functions]
    both.user([])
    for number in range(draw(st.integers(0, 3))):
        both.user(both.assistant(number))
    return {**body, "messages": both.messages}, both.others, tools


def _described(tool: Any) -> dict[str, Any]:
    return {"description": tool["description"]} if "description" in tool else {}


@tried(60, 1000)
@given(conversations())
def test_any_conversation_has_the_prompt_that_it_has_in_the_other_protocol(
    prompts: Tokenizing, both: Any
) -> None:
    body, messages, tools = both
    before = copy.deepcopy(body)
    tokens, request = prompts.ours(body)
    assert tokens == prompts.theirs(messages, tools)
    assert body == before, "the client's own body was changed"
    marks = request.prepared.breakpoints
    assert all(0 < end <= len(tokens) for end, _ in marks)
    assert [end for end, _ in marks] == sorted({end for end, _ in marks})
    assert len(marks) <= json.dumps(body).count("cache_control")
    assert bool(marks) == ("cache_control" in json.dumps(body))


@tried(30, 500)
@given(conversations())
def test_what_is_marked_is_a_beginning_of_the_next_turns_prompt_too(
    tools_first: Tokenizing, both: Any
) -> None:
    body, _, _ = both
    tokens, request = tools_first.ours(body)
    more = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
    later, _ = tools_first.ours({**body, "messages": [*body["messages"], *more]})
    for end, _ in request.prepared.breakpoints:
        assert later[:end] == tokens[:end]


# -- where marks stand -----------------------------------------------------------------------------

MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
ASKED: Any = [{"role": "user", "content": "Go."}]


def marked(prompts: Tokenizing, body: dict[str, Any]) -> list[tuple[str, int]]:
    tokens, request = prompts.ours(body)
    return [
        (prompts.tokenizer.decode(tokens[:end]), seconds)
        for end, seconds in request.prepared.breakpoints
    ]


def test_marks_in_the_system_prompt_and_in_messages(prompts: Tokenizing) -> None:
    body: dict[str, Any] = {
        "system": [
            {"type": "text", "text": "One.", **HOUR},
            {"type": "text", "text": "Two.", **MARK},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Three.", **MARK},
                    {"type": "text", "text": "Four."},
                ],
            },
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "add", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "a", "content": "5", **MARK}],
            },
        ],
    }
    text = prompts.text(body)
    ends = [
        "One.",
        "Two.\n<|im_end|>\n<|im_start|>user\n",
        "Three.",
        "<|im_start|>tool\n5<|im_end|>\n",
    ]
    assert marked(prompts, body) == [
        (text[: text.index(end) + len(end)], seconds)
        for end, seconds in zip(ends, (3600, 300, 300, 300), strict=True)
    ]


def test_a_mark_on_a_tool_stands_behind_it_whatever_the_template_puts_first(
    prompts: Tokenizing, tools_first: Tokenizing
) -> None:
    body: dict[str, Any] = {
        "system": "Be brief.",
        "tools": [{**LOOK_UP, **HOUR}, ADD],
        "messages": ASKED,
    }
    for each in (prompts, tools_first):
        text = each.text(body)
        ((found, seconds),) = marked(each, body)
        assert seconds == 3600
        assert found.startswith(text[: text.index("]}}}") + 4])
        assert "add" not in found
        assert ("Be brief." in found) == (each is prompts)
    last = {**body, "tools": [LOOK_UP, {**ADD, **MARK}]}
    ((found, _),) = marked(tools_first, last)
    assert found.endswith('"integer"}}}}}<|im_end|>\n<|im_start|>')


def test_the_mark_of_the_request_stands_at_the_end(prompts: Tokenizing) -> None:
    body = {"system": "Be brief.", "messages": ASKED, **MARK}
    assert marked(prompts, body) == [
        (prompts.text(body).removesuffix("<|im_start|>assistant\n"), 300)
    ]
    request = parse({"max_tokens": 1, **body}, OPTIONS).request
    assert [*request.tool_breakpoints, *message_breakpoints(request.messages)] == [
        Breakpoint(1, None, 300)
    ]


def test_a_tokenizer_that_encodes_whole_texts_gives_the_same_breakpoints(
    prompts: Tokenizing, monkeypatch: pytest.MonkeyPatch
) -> None:
    body: dict[str, Any] = {
        "system": [{"type": "text", "text": "One.", **HOUR}, {"type": "text", "text": "Two."}],
        "messages": ASKED,
    }
    expected = marked(prompts, body)
    monkeypatch.setattr(encoding, "splitting_tokens", lambda tokenizer: {})
    assert marked(prompts, body) == expected


# -- what has no counterpart -----------------------------------------------------------------------


def test_errors_of_tools_are_told_to_the_model(prompts: Tokenizing) -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": "no such file",
        "is_error": True,
    }
    assert "<|im_start|>tool\nError: no such file<|im_end|>" in prompts.text(
        {"messages": [{"role": "user", "content": [result]}]}
    )


def test_documents_of_text_and_references_to_tools_are_text(prompts: Tokenizing) -> None:
    document = {
        "type": "document",
        "title": "Notes",
        "source": {"type": "text", "media_type": "text/plain", "data": "A pool."},
    }
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": [{"type": "tool_reference", "tool_name": "look_up"}],
    }
    text = prompts.text({"messages": [{"role": "user", "content": [result, document]}]})
    assert "<|im_start|>tool\nlook_up<|im_end|>\n<|im_start|>user\nNotes\nA pool.<|im_end|>" in text


def test_images_are_given_on_as_mlx_lm_takes_them() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    url = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    body = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}, url]}]}
    request = parse({"max_tokens": 1, **body}, OPTIONS).request
    assert request.image_at == "messages.0.content.0"
    assert request.messages[0]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}},
    ]


def test_system_messages_are_the_users_only_where_the_template_takes_none(
    prompts: Tokenizing, tools_first: Tokenizing
) -> None:
    body = {"messages": [*ASKED, {"role": "system", "content": "Agents: none."}]}
    assert "<|im_start|>user\nGo.\n\nAgents: none.<|im_end|>" in prompts.text(body)
    assert "<|im_start|>system\nAgents: none.<|im_end|>" in tools_first.text(body)


def test_a_beginning_ends_the_thinking_that_the_template_begins(tmp_path: Path) -> None:
    begins = TEMPLATE.replace(
        "{% if not enable_thinking %}<think>\\n\\n</think>\\n\\n{% endif %}", "<think>\\n"
    )
    begins = begins.replace(
        "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}", "<think>\n"
    )
    thinks = Tokenizing(save_agent(tmp_path, begins))
    assert thinks.text({"messages": [*ASKED, {"role": "assistant", "content": "It is"}]}).endswith(
        "<think>\n</think>\n\nIt is"
    )
    forced = {"messages": ASKED, "tools": [ADD], "tool_choice": {"type": "any"}}
    assert thinks.text(forced).endswith("<think>\n</think>\n\n<tool_call>")


def test_choices_that_a_model_without_tool_calls_can_be_held_to(tools_first: Tokenizing) -> None:
    body = {"messages": ASKED, "tools": [ADD]}
    assert "add" not in tools_first.text({**body, "tool_choice": {"type": "none"}})
    with pytest.raises(ValueError, match="this model cannot be made to call a tool"):
        tools_first.ours({**body, "tool_choice": {"type": "any"}})


def test_efforts_and_thinking_are_arguments_of_the_template() -> None:
    def kwargs(**body: Any) -> Any:
        return parse(
            {"max_tokens": 1, "messages": ASKED, **body}, OPTIONS
        ).arguments.chat_template_kwargs

    assert kwargs() is None
    assert kwargs(output_config={"effort": "max"}) == {"reasoning_effort": "high"}
    assert kwargs(thinking={"type": "between_tools"}) == {"enable_thinking": True}
    assert kwargs(
        thinking={"type": "enabled", "budget_tokens": 9}, tools=[ADD], tool_choice={"type": "any"}
    ) == {"enable_thinking": False}


def test_unknown_values_of_optional_fields_have_no_effect_and_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    newer: list[tuple[dict[str, Any], str]] = [
        ({"thinking": {"type": "adaptive", "display": "updates"}}, "thinking.display: 'updates'"),
        ({"thinking": {"type": "deep"}}, "thinking.type: 'deep'"),
        ({"output_config": {"effort": "some"}}, "output_config.effort: 'some'"),
        ({"cache_control": {"type": "lasting", "ttl": "1d"}}, "cache_control.ttl: '1d'"),
    ]
    for body, logged in newer:
        caplog.clear()
        with caplog.at_level("INFO"):
            found = parse({"max_tokens": 1, "messages": ASKED, **body}, OPTIONS)
        assert logged in caplog.text
        assert found.body.shows_thinking
        assert found.arguments.chat_template_kwargs == (
            {"enable_thinking": True} if "display" in str(body) else None
        )


def test_sampling_and_stops_are_given_on() -> None:
    body = {
        "messages": ASKED,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "stop_sequences": ["a", "b", "a"],
        "model": "m",
    }
    args = parse({"max_tokens": 9, **body}, OPTIONS).arguments
    assert (args.sampling.temperature, args.sampling.top_p, args.sampling.top_k) == (0.5, 0.9, 7)
    assert (args.stop_words, args.max_tokens, args.model.model) == (["a", "b"], 9, "m")


def test_only_counting_ends_with_the_count(prompts: Tokenizing) -> None:
    tokens, _ = prompts.ours({"messages": ASKED})
    counting = parse({"messages": ASKED}, OPTIONS, counts=True)
    with pytest.raises(PromptCounted) as counted:
        prompts.prepare(counting)
    assert counted.value.tokens == len(tokens)


@pytest.mark.parametrize("thinking", ["", "Hm.", "ä\n\ud83d" * 9])
def test_signatures_carry_thinking_that_was_not_shown(thinking: str) -> None:
    assert thinking_in("", signature_of(thinking, shown=False)) == thinking
    assert thinking_in(thinking, signature_of(thinking, shown=True)) == thinking
    assert thinking_in("", "packed:nonsense") == thinking_in("", "ErUB...") == ""


# -- errors ----------------------------------------------------------------------------------------


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [*ASKED, {"role": role, "content": list(blocks)}]}


def asked(**body: Any) -> dict[str, Any]:
    return {"messages": ASKED, **body}


USED = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "messages: Field required"),
    ({"messages": {}}, "messages: Input should be a valid list"),
    ({"messages": []}, "messages: Input should not be empty"),
    ({"messages": ["x"]}, "messages.0: Input should be a valid dictionary"),
    ({"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
    (
        {"messages": [{"role": "tool"}]},
        "messages.0.role: Input should be 'user' or 'assistant' or 'system'; found 'tool'",
    ),
    ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
    (
        {"messages": [{"role": "user", "content": 7}]},
        "messages.0.content: Input should be a valid list",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x"}]},
        "messages: at least one user message is required",
    ),
    (said(), "messages.1.content: Input should not be empty"),
    (said("x"), "messages.1.content.0: Input should be a valid dictionary"),
    (said({}), "messages.1.content.0.type: Field required"),
    (said({}, role="assistant"), "messages.1.content.0.type: Field required"),
    (said({"type": "text"}), "messages.1.content.0.text: Field required"),
    (
        said({"type": "text", "text": 7}),
        "messages.1.content.0.text: Input should be a valid string",
    ),
    (said({"type": "tool_result"}), "messages.1.content.0.tool_use_id: Field required"),
    (said({"type": "video"}), "messages.1.content.0.type: Input should be 'text' or 'image'"),
    (
        said({"type": "image", "source": {"type": "file"}}),
        "messages.1.content.0.source.type: Input should be 'base64' or 'url'",
    ),
    (
        said({"type": "document", "source": {"type": "url"}}),
        "messages.1.content.0.source.type: Input should be 'text'",
    ),
    (said({"type": "thinking"}, role="assistant"), "messages.1.content.0.thinking: Field required"),
    (
        said({**USED, "input": "x"}, role="assistant"),
        "messages.1.content.0.input: Input should be a valid dictionary",
    ),
    (
        said(USED, role="assistant"),
        "messages: the last message is the assistant's, and has tool_use or thinking",
    ),
    (
        said({"type": "text", "text": "x", "cache_control": {"type": 7}}),
        "messages.1.content.0.cache_control.type: Input",
    ),
    (
        asked(system=[{"type": "text", "text": "x", **MARK}] * 5),
        "system.4.cache_control: A maximum of 4 blocks",
    ),
    (asked(system=7), "system: Input should be a valid list"),
    (asked(system=[{"type": "image"}]), "system.0.type: Input should be 'text'; found 'image'"),
    (asked(max_tokens=True), "max_tokens: Input should be a valid integer"),
    (asked(max_tokens=None), "max_tokens: Field required"),
    (asked(max_tokens=-1), "max_tokens: Input should be greater than or equal to 0"),
    (asked(temperature=float("nan")), "temperature: Input should be a finite number"),
    (asked(top_p=2), "top_p: Input should be less than or equal to 1; found 2"),
    (asked(top_k=1.5), "top_k: Input should be a valid integer"),
    (asked(stop_sequences=["x", ""]), "stop_sequences.1: Input should not be empty"),
    (asked(stream="yes"), "stream: Input should be a valid boolean"),
    (asked(metadata={"user_id": 7}), "metadata.user_id: Input should be a valid string"),
    (asked(tools=[{"name": "a"}]), "tools.0.input_schema: Field required"),
    (asked(tools=[{"name": "", "input_schema": {}}]), "tools.0.name: Input should not be empty"),
    (asked(tools=[ADD, ADD]), "tools: Tool names must be unique; found 'add' twice"),
    (
        asked(tools=[{"type": "web_search_20250305", "name": "w"}]),
        "tools.0.type: 'web_search_20250305' is not supported; only",
    ),
    (
        asked(tool_choice={"type": "any"}),
        "tool_choice: 'any' needs tools that are functions, and there are none",
    ),
    (
        asked(tools=[ADD], tool_choice={"type": "tool", "name": "b"}),
        "tool_choice.name: Tool 'b' not found in tools",
    ),
    (asked(thinking={"type": ["deep"]}), "thinking.type: Input should be a valid string"),
    (
        asked(mcp_servers=[{"type": "url"}]),
        "mcp_servers: a list is not supported; this server reaches no other",
    ),
    (asked(output_config={"effort": 7}), "output_config.effort: Input should be a valid string"),
]


@pytest.mark.parametrize(("body", "message"), BAD)
def test_errors_name_their_place(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        parse({"max_tokens": 5, **body}, OPTIONS)
    assert str(error.value).startswith(message)


def test_the_servers_own_failures_alone_are_5xx() -> None:
    answers = [
        anthropic_status(error)[0]
        for error in (
            ValueError("x"),
            RecursionError("x"),
            FileNotFoundError("x"),
            RuntimeError("x"),
        )
    ]
    assert answers == [400, 400, 404, 500]


ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    10**12,
    1.5,
    "",
    "text",
    [],
    [1],
    [[]],
    {},
    {"a": 1},
    {"type": "text"},
    float("inf"),
    "\ud800",
]
GOOD: dict[str, Any] = {
    "model": "default_model",
    "max_tokens": 2,
    "system": [{"type": "text", "text": "Be brief.", **MARK}],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "stop_sequences": ["x"],
    "stream": False,
    "metadata": {"user_id": "u"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tools": [{**LOOK_UP, **HOUR}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Go."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "Ok."},
                {"type": "tool_use", "id": "a", "name": "look_up", "input": {"word": "pool"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "text", "text": "found"}],
                    "is_error": False,
                },
                {"type": "text", "text": "And?", **MARK},
            ],
        },
        {"role": "system", "content": "Now."},
    ],
}


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside of a value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [place for key, inner in items for place in ((value, key), *places(inner))]


def spoilt(rng: random.Random) -> Any:
    """A good body that has changed in a few places."""
    body = copy.deepcopy(GOOD)
    for _ in range(rng.randrange(4)):
        container, key = rng.choice(places(body) or [(body, "messages")])
        if rng.random() < 0.3 and not isinstance(container, list):
            del container[key]
        else:
            container[key] = copy.deepcopy(rng.choice([*ODD, rng.choice(places(GOOD))[0]]))
    return body


@pytest.mark.parametrize("count", only([60, 500], 60))
def test_spoilt_bodies(server: Client, count: int) -> None:
    rng = random.Random(11)
    statuses = []
    for _ in range(count):
        path = rng.choice(["/v1/messages", "/v1/messages", "/v1/messages/count_tokens?beta=true"])
        raw = (
            rng.choice([b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000])
            if rng.random() < 0.05
            else None
        )
        body = spoilt(rng)
        if isinstance(body, dict) and body.get("stream") is True:
            body["stream"] = False
        status, answer = server.send(path, body, raw)
        statuses.append(status)
        assert status < 500, answer
        if status != 200:
            assert answer["type"] == "error"
            assert answer["error"]["type"] in (
                "invalid_request_error",
                "not_found_error",
                "request_too_large",
            )
            assert answer["error"]["message"]
    assert min(statuses.count(200), statuses.count(400)) > count // 10
    server.settle()
    assert server.send("/health")[1]["status"] == "ok"


def test_a_sample_of_the_models_calls_comes_with_prompts_whose_calls_are_held(
    prompts: Tokenizing,
) -> None:
    tool = {"name": "look_up", "input_schema": {"type": "object", "properties": {}}}
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    for strict in (True, False):
        _, request = prompts.ours({**body, "tools": [{**tool, "strict": strict}]})
        assert (
            '"name": "sample_function"' in request.prepared.call_spelling,
            request.compiled is not None,
        ) == (strict, strict)
