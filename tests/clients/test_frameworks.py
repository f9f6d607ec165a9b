"""Frameworks for agents get what they ask a random model for: outputs of a type, and calls of their
functions.

Every form here, of one call at a time, has an end that the token limit leaves room for, so that
each run has to succeed. Only with --thorough: importing the frameworks takes longer than the rest
of a quick test.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from server.serving import Client

from clients.forms import LIMIT, MODEL, Bounded, Finite

pytestmark = pytest.mark.thorough
# Read when openai-agents is imported: it would send traces to its maker.
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
QUESTION = "How is the weather?"
RUNS = 4


class Called:
    """A function for models to call, and the arguments that it was called with."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []

    def weather(self, city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
        """Looks the weather up."""
        self.found.append((city, days))
        return "warm"

    def check(self) -> None:
        assert self.found
        assert all(city in ("Paris", "Rome") and days in (1, 2, 3) for city, days in self.found)


def openai_of(server: Client) -> Any:
    import openai

    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1",
        api_key="any",
        max_retries=0,
        http_client=http,
    )


@pytest.mark.parametrize("protocol", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(server: Client, protocol: str) -> None:
    import agents

    called = Called()
    agent = agents.Agent(
        name="Forecaster",
        model=getattr(agents, protocol)(MODEL, openai_of(server)),
        model_settings=agents.ModelSettings(
            temperature=1, max_tokens=LIMIT, tool_choice="required", parallel_tool_calls=False
        ),
        tools=[agents.function_tool(called.weather)],
        output_type=Bounded,
    )

    async def run() -> list[Any]:
        return [await agents.Runner.run(agent, QUESTION, max_turns=50) for _ in range(RUNS)]

    assert all(isinstance(result.final_output, Bounded) for result in asyncio.run(run()))
    called.check()


def pydantic_models(server: Client) -> dict[str, Callable[[], Any]]:
    """The models of pydantic-ai, by protocol."""
    from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    def claude() -> Any:
        http = DefaultAsyncHttpxClient(verify=False)
        client = AsyncAnthropic(
            base_url=f"http://127.0.0.1:{server.port}",
            api_key="any",
            max_retries=0,
            http_client=http,
        )
        return AnthropicModel(
            "claude-opus-4-6", provider=AnthropicProvider(anthropic_client=client)
        )

    return {
        "chat": lambda: OpenAIChatModel(
            MODEL, provider=OpenAIProvider(openai_client=openai_of(server))
        ),
        "responses": lambda: OpenAIResponsesModel(
            MODEL, provider=OpenAIProvider(openai_client=openai_of(server))
        ),
        "messages": claude,
    }


@pytest.mark.parametrize("output", ["NativeOutput", "ToolOutput"])
@pytest.mark.parametrize(
    ("protocol", "form"), [("chat", Bounded), ("responses", Bounded), ("messages", Finite)]
)
def test_pydantic_ai(server: Client, protocol: str, form: type[BaseModel], output: str) -> None:
    import pydantic_ai

    called = Called()
    agent = pydantic_ai.Agent(
        pydantic_models(server)[protocol](),
        output_type=getattr(pydantic_ai, output)(form, strict=True),
        tools=[pydantic_ai.Tool(called.weather, strict=True)],
        model_settings={"temperature": 1, "max_tokens": LIMIT, "parallel_tool_calls": False},
        retries=0,
    )

    async def run() -> list[Any]:
        return [await agent.run(QUESTION) for _ in range(RUNS)]

    assert all(isinstance(result.output, form) for result in asyncio.run(run()))
    assert all(city in ("Paris", "Rome") and days in (1, 2, 3) for city, days in called.found)
