"""Real SDKs ask a random model for forms: what they parse is what their users' types say.

The model draws at temperature 1 and would keep no form by chance. A reply that the token limit has
cut off is not parsed; most of them end by themselves.
"""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel
from thorough import only

from clients.forms import LIMIT, MODEL, Answer, Bounded, Weather, ended

ASKED: Any = [{"role": "user", "content": "How is the weather?"}]


def is_cut(completion: Any) -> bool:
    return bool(completion.choices[0].finish_reason == "length")


def is_incomplete(response: Any) -> bool:
    return bool(response.status == "incomplete")


def at_limit(message: Any) -> bool:
    return bool(message.stop_reason == "max_tokens")


@pytest.mark.parametrize("form", only([Answer, Bounded], Answer))
def test_chat_completions_are_parsed(gpt: openai.OpenAI, form: type[BaseModel]) -> None:
    def ask(seed: int) -> Any:
        return gpt.chat.completions.parse(
            model=MODEL,
            messages=ASKED,
            response_format=form,
            max_tokens=LIMIT,
            temperature=1,
            seed=seed,
        )

    assert isinstance(
        ended(ask, is_cut, openai.LengthFinishReasonError).choices[0].message.parsed, form
    )


@pytest.mark.thorough
def test_streams_of_chat_completions_are_parsed(gpt: openai.OpenAI) -> None:
    def ask(seed: int) -> Any:
        with gpt.chat.completions.stream(
            model=MODEL,
            messages=ASKED,
            response_format=Answer,
            max_tokens=LIMIT,
            temperature=1,
            seed=seed,
        ) as stream:
            return stream.get_final_completion()

    assert isinstance(
        ended(ask, is_cut, openai.LengthFinishReasonError).choices[0].message.parsed, Answer
    )


@pytest.mark.thorough
def test_strict_functions_of_chat_completions_are_parsed(gpt: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather)

    def ask(seed: int) -> Any:
        return gpt.chat.completions.parse(
            model=MODEL,
            messages=ASKED,
            tools=[tool],
            tool_choice="required",
            max_tokens=LIMIT,
            temperature=1,
            seed=seed,
        )

    choice = ended(ask, is_cut, openai.LengthFinishReasonError).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    assert all(
        isinstance(call.function.parsed_arguments, Weather) for call in choice.message.tool_calls
    )


def test_responses_are_parsed(gpt: openai.OpenAI) -> None:
    def ask(_: int) -> Any:
        return gpt.responses.parse(
            model=MODEL,
            input="How is it?",
            text_format=Bounded,
            max_output_tokens=LIMIT,
            temperature=1,
        )

    assert isinstance(ended(ask, is_incomplete).output_parsed, Bounded)


@pytest.mark.thorough
def test_strict_functions_of_responses_are_parsed(gpt: openai.OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "name": "weather",
        "strict": True,
        "parameters": {**openai.pydantic_function_tool(Weather)["function"]["parameters"]},
    }

    def ask(_: int) -> Any:
        return gpt.responses.parse(
            model=MODEL,
            input="How is it?",
            tools=[tool],
            tool_choice="required",
            max_output_tokens=LIMIT,
            temperature=1,
        )

    calls = [item for item in ended(ask, is_incomplete).output if item.type == "function_call"]
    assert calls
    assert all(Weather.model_validate(call.parsed_arguments) for call in calls)


@pytest.mark.thorough
def test_messages_are_parsed(claude: anthropic.Anthropic) -> None:
    def ask(_: int) -> Any:
        return claude.messages.parse(
            model=MODEL,
            messages=ASKED,
            output_format=Answer,
            max_tokens=LIMIT,
            extra_body={"temperature": 1},
        )

    assert isinstance(ended(ask, at_limit).parsed_output, Answer)


def test_strict_tools_of_messages_are_called_as_their_schema_says(
    claude: anthropic.Anthropic,
) -> None:
    tool: Any = {
        "name": "weather",
        "strict": True,
        "input_schema": anthropic.transform_schema(Weather),
    }

    def ask(_: int) -> Any:
        return claude.messages.create(
            model=MODEL,
            messages=ASKED,
            tools=[tool],
            tool_choice={"type": "any"},
            max_tokens=LIMIT,
            extra_body={"temperature": 1},
        )

    message = ended(ask, at_limit)
    calls = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use"
    assert calls
    assert all(Weather.model_validate(call.input) for call in calls)
