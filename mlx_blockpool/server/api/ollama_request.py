"""A body of Ollama's API as a chat request and generation arguments. Raises InvalidRequestError for what cannot be honoured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...config import WHAT_FITS
from ..bodies import InvalidRequestError
from ..request import ChatRequest, ParsedRequest
from ..validation import AllSampling, generation_arguments, validated
from .conversation import Conversation, Part, template_arguments
from .ollama_body import ChatBody, GenerateBody, Message, Options, ReplyBody
from .tools import held_tools, strict_places

# Ollama's own, for requests with a penalty and without `repeat_last_n`.
REPEAT_LAST_N = 64
# In place of "the whole context".
WHOLE_CONTEXT = 1 << 20


def parse_chat(body: dict[str, Any], options: Any) -> tuple[ChatBody, ParsedRequest | None]:
    """The body, and the request that it makes; None without messages. `options`: the server's, for what the body leaves open."""
    given = validated(ChatBody, body)
    if not given.messages:
        return given, None
    turns = OllamaTurns()
    for i, message in enumerate(given.messages):
        turns.add(message, f"messages[{i}]")
    begin = turns.take_beginning()
    request = ChatRequest("chat", "", turns.end(), given.tools or None, None, begin=begin, image_at=turns.image_at)
    parsed = _parsed(given, request, options)
    request.held = held_tools(given.tools, request.calls, strict_places(given.tools), request.form)
    return given, parsed


def parse_generate(body: dict[str, Any], options: Any) -> tuple[GenerateBody, ParsedRequest | None]:
    """The same for a prompt, which is the only message beside the system's unless it is `raw`."""
    given = validated(GenerateBody, body)
    if not (given.prompt or given.images):
        return given, None
    if given.raw:
        if given.images or given.system:
            raise InvalidRequestError("raw", "a raw prompt has neither images nor a system prompt")
        return given, _parsed(given, ChatRequest("text", given.prompt, [], None, None), options)
    turns = OllamaTurns()
    if given.system:
        turns.add(Message(role="system", content=given.system), "system")
    turns.add(Message(role="user", content=given.prompt, images=given.images), "")
    request = ChatRequest("chat", "", turns.end(), None, None, image_at=turns.image_at)
    return given, _parsed(given, request, options)


def _parsed(given: ReplyBody, request: ChatRequest, options: Any) -> ParsedRequest:
    request.form = given.form()
    drawn, thinks = given.options, given.think
    words = [drawn.stop] if isinstance(drawn.stop, str) else drawn.stop
    effort = thinks if isinstance(thinks, str) else None
    template = template_arguments(True if effort else thinks, effort, answers_at_once=bool(request.begin))  # type: ignore[arg-type]
    most = options.max_tokens if drawn.num_predict is None else drawn.num_predict if drawn.num_predict > 0 else WHAT_FITS
    words = list(dict.fromkeys(filter(None, words)))
    arguments = generation_arguments(_sampling(given.id, drawn), options, most, words, template)
    arguments = replace(arguments, logprobs=given.logprobs, top_logprobs=given.top_logprobs if given.logprobs else 0)
    return ParsedRequest(request, arguments, given, one_call=False)


def _sampling(model: str, drawn: Options) -> AllSampling:
    """The same by mlx-lm's names. A penalty of 1 changes nothing, and a negative seed stands for any."""
    last = REPEAT_LAST_N if drawn.repeat_last_n is None else drawn.repeat_last_n
    size = WHOLE_CONTEXT if last < 0 else last
    penalty = drawn.repeat_penalty if drawn.repeat_penalty != 1 and size else None
    return AllSampling(
        model=model,
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        top_k=drawn.top_k,
        min_p=drawn.min_p,
        seed=drawn.seed if drawn.seed is None or drawn.seed >= 0 else None,
        repetition_penalty=penalty or 0.0,
        repetition_context_size=size,
        presence_penalty=drawn.presence_penalty if size else 0.0,
        presence_context_size=size,
        frequency_penalty=drawn.frequency_penalty if size else 0.0,
        frequency_context_size=size,
    )


class OllamaTurns(Conversation):
    """The turns of a conversation as messages. Calls without an id get one, and results without belong to the first open call."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[tuple[str, str]] = []

    def add(self, given: Message, place: str) -> None:
        """One message; `place`: where it is in the body."""
        content = self._content(given, place)
        if given.role == "tool":
            self._result(self._answered(given), content)
            return
        message = {"role": given.role, "content": content}
        self.messages.append(message)
        self._think(message, given.thinking)
        for call in given.tool_calls:
            called = call.id or f"call_{len(self._tools_called)}"
            self._open.append((called, call.function.name))
            self._call(message, called, call.function.name, call.function.arguments)

    def take_beginning(self) -> str:
        """The text of a last message that is the assistant's, which the reply continues; empty if it is not."""
        last = self.messages[-1]
        if last["role"] != "assistant" or "tool_calls" in last or "reasoning" in last or len(self.messages) == 1:
            return ""
        return str(self.messages.pop()["content"])

    def _content(self, given: Message, place: str) -> str | list[Part]:
        if not given.images:
            return given.content
        at = f"{place}.images".removeprefix(".")
        images = [self._image(_data_url(data), at) for data in given.images]
        return [*images, {"type": "text", "text": given.content}]

    def _answered(self, result: Message) -> str:
        """The id of the call that a result answers."""
        matching = (each for each in self._open if result.tool_name in ("", each[1]))
        found = next(matching, None)
        if result.tool_call_id or found is None:
            return result.tool_call_id or result.tool_name or "call"
        self._open.remove(found)
        return found[0]


def _data_url(data: str) -> str:
    """An image as it stands in OpenAI's messages. Its type is read from its bytes."""
    return data if data.startswith("data:") else f"data:image;base64,{data}"
