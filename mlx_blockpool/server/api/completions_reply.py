"""Renders the replies to a chat or completion of OpenAI's: each choice by itself, and the response that all of them add up to.

mlx-lm's handler makes the packets. Knows responses and token counts; no sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mlx_lm.generate import TextStateMachine

from ..request import ParsedRequest
from .errors import openai_answer
from .logprobs import in_lists, logprobs_of
from .reply import BlockEnd, Call, Done, Json, Packet, Renderer, ReplyParser, Text, Thinking, call_id
from .sections import Sections

FINISH_REASONS = {"stop": "stop", "stop_word": "stop", "length": "length", "calls": "tool_calls"}


class ChatRenderer(Renderer):
    """Renders one choice of a chat. `whole`: the choice as it stands in the response."""

    def __init__(self, handler: Any, parsed: ParsedRequest, context: Any, index: int) -> None:
        super().__init__(parsed, context, keeps_space=True)
        self._handler, self._index = handler, index
        self._logprobs = logprobs_of(parsed)
        self._calls: list[Json] = []
        self._thinking: list[str] = []

    @property
    def reply(self) -> ReplyParser | None:
        return self.parser

    def keepalive(self, progress: str = "") -> Iterable[Packet]:
        return keepalive(progress)

    def add(self, response: Any) -> Iterator[Packet]:
        if self._logprobs is not None:
            self._logprobs.add(response)
        return super().add(response)

    def _render(self, event: Text | Thinking | Call | BlockEnd) -> Iterable[Packet]:
        if isinstance(event, Thinking):
            self._thinking.append(event.text)
        elif isinstance(event, Call):
            self._calls.append(_call(event))
        if not self._handler.stream or isinstance(event, BlockEnd):
            return ()
        if isinstance(event, Call):
            return [self._packet(tool_calls=[self._calls[-1] | {"index": len(self._calls) - 1}])]
        if isinstance(event, Thinking):
            return [self._packet(reasoning_text=event.text)]
        return [self._packet(event.text)] if event.text else ()

    def _end(self, done: Done) -> Iterable[Packet]:
        reason = FINISH_REASONS[done.reason]
        if self._handler.stream:
            return [self._packet("", reason)]
        thinking = "".join(self._thinking)
        packet = self._packet(self.parser.blocks.text, reason, tool_calls=self._calls, reasoning_text=thinking)
        (self.whole,) = packet["choices"]
        return ()

    def _packet(self, text: str = "", reason: str | None = None, **more: Any) -> Json:
        packet = packet_of(self._handler, self._index, text, reason, **more)
        if self._logprobs is not None:
            packet["choices"][0]["logprobs"] = {"content": self._logprobs.take(), "refusal": None}
        return packet


class TextRenderer:
    """Renders one choice of a completion, as mlx-lm's handler does: the text outside of thinking and calls."""

    def __init__(self, handler: Any, parsed: ParsedRequest, context: Any, index: int) -> None:
        self.whole: Json = {}
        self.reply: ReplyParser | None = None
        self._handler, self._index = handler, index
        self._tokenizer = parsed.request.tokenizer
        self._logprobs = logprobs_of(parsed)
        # A client that asks as OpenAI's do, with a number, gets their lists; with mlx-lm's words it gets what a chat has.
        self._in_lists = not isinstance(parsed.body.logprobs, bool)
        self._sections = Sections.of(parsed.request, context.initial_state)
        # Markers are found in the text of a reply without a form; stop words are in every one.
        words = [(word, "normal") for word in parsed.arguments.stop_words]
        machine = context.text_sm if self._sections is None else TextStateMachine({"normal": words})
        self._before = context.initial_state if self._sections is None else "normal"
        self._state = machine.make_state(self._before)
        self._text = ""
        self._has_called = False
        self._reason: str | None = None
        self._written = 0

    def add(self, response: Any) -> Iterator[Packet]:
        if self._logprobs is not None:
            self._logprobs.add(response)
        for state, part in self._segments(response):
            self._has_called |= state == "normal" and self._before == "tool"
            self._text += part if state == "normal" else ""
            self._before = state
        self._reason = response.finish_reason
        if self._handler.stream and self._text and self._before != "tool":
            yield self._packet(None)

    def finish(self) -> Iterator[Packet]:
        calls = self._has_called or self._before == "tool"
        packet = self._packet("tool_calls" if calls and self._reason != "length" else self._reason or "stop")
        if self._handler.stream:
            yield packet
        else:
            (self.whole,) = packet["choices"]

    def _segments(self, response: Any) -> list[tuple[Any, str]]:
        text = self._shown(response)
        if response.finish_reason == "stop" and not self._is_whole(response):
            # What was held back is the beginning of what has stopped the reply.
            self._state, state = TextStateMachine.discard(self._state)
            return [(state, "")]
        self._state, segments = TextStateMachine.split(self._state, text)
        if response.finish_reason is not None:
            self._state, rest, state = TextStateMachine.flush(self._state)
            segments.append((state, rest))
        return list(segments)

    def _is_whole(self, response: Any) -> bool:
        """Whether a reply that keeps a form has ended by itself: its last characters may begin a stop word too."""
        return self._sections is not None and response.token in self._tokenizer.eos_token_ids

    def _shown(self, response: Any) -> str:
        """The text that one token adds, without the thinking of a reply that keeps a form."""
        if self._sections is None:
            return str(response.text)
        self._sections.add(response.token, response.text)
        found = self._sections.take(response.text)
        if response.finish_reason is not None:
            found.append(self._sections.flush())
        return "".join(part for section, part in found if section != "thinking")

    def _packet(self, reason: str | None) -> Json:
        packet = packet_of(self._handler, self._index, self._text, reason)
        self._text = ""
        if self._logprobs is not None:
            entries = self._logprobs.take()
            shown = in_lists(entries, self._written) if self._in_lists else {"content": entries}
            packet["choices"][0]["logprobs"] = shown
            self._written += sum(len(entry["token"]) for entry in entries)
        return packet


class ChoicesRenderer:
    """Renders all choices of a request, as their parts come. `whole`: the response, once finish() has returned.

    Of more choices than the client wants those with the highest mean logprob are shown.
    """

    def __init__(self, handler: Any, parsed: ParsedRequest, kind: type[ChatRenderer] | type[TextRenderer], wanted: int) -> None:
        self.whole: Json = {}
        self._handler, self._parsed, self._kind, self._wanted = handler, parsed, kind, wanted
        count = parsed.request.choices
        self._choices: dict[int, ChatRenderer | TextRenderer] = {}
        self._contexts: dict[int, Any] = {}
        self._errors: dict[int, Exception] = {}
        self._ended: set[int] = set()
        self._num_tokens = [0] * count
        self._logprobs = [0.0] * count

    @property
    def has_begun(self) -> bool:
        return bool(self._contexts)

    @property
    def replies(self) -> list[ReplyParser]:
        """The replies that have not failed."""
        found = (choice.reply for index, choice in sorted(self._choices.items()) if index not in self._errors)
        return [reply for reply in found if reply is not None]

    def add(self, index: int, part: Any) -> Iterable[Packet]:
        """The packets of one part of a choice: see BlockpoolGenerator.generate_choices(). Raises what concerns all of them."""
        if index in self._ended:
            return ()
        if isinstance(part, ConnectionError):
            raise part
        if isinstance(part, Exception):
            return self._fail(index, part)
        if index not in self._contexts:
            self._contexts[index] = part
            self._choices[index] = self._kind(self._handler, self._parsed, part, index)
            return ()
        choice = self._choices[index]
        if part is None:
            return self._finish(index)
        self._num_tokens[index] += 1
        self._logprobs[index] += part.logprob
        packets = list(choice.add(part))
        if choice.reply is None or choice.reply.finish is None:
            return packets
        self._contexts[index].stop()
        return [*packets, *self._finish(index)]

    def finish(self) -> Iterable[Packet]:
        """The packets behind all choices. Raises the error of the first choice where all have failed."""
        if len(self._errors) == len(self._num_tokens):
            raise self._errors[min(self._errors)]
        prompt, cached = self._prompt_counts()
        counts = prompt, sum(self._num_tokens), cached
        if self._handler.stream:
            usage = [self._handler.completion_usage_response(*counts)] if self._handler.stream_options["include_usage"] else []
            for packet in usage:
                packet["usage"] |= self._prediction_counts()
            return [*usage, b"data: [DONE]\n\n"]
        self.whole = self._handler.generate_response("", None, *counts)
        self.whole["usage"] |= self._prediction_counts()
        self.whole["choices"] = [{**self._whole_choice(index), "index": i} for i, index in enumerate(self._shown())]
        return ()

    def _finish(self, index: int) -> list[Packet]:
        self._ended.add(index)
        return list(self._choices[index].finish())

    def _fail(self, index: int, error: Exception) -> list[Packet]:
        """Note that one choice has failed; the others continue."""
        self._ended.add(index)
        self._errors[index] = error
        return [self._failed_packet(index)] if self._handler.stream and len(self._num_tokens) > 1 else []

    def _failed_packet(self, index: int) -> Json:
        packet = packet_of(self._handler, index, "", "error")
        packet["choices"][0] |= openai_answer(self._errors[index])[1]
        return packet

    def _whole_choice(self, index: int) -> Json:
        if index not in self._errors:
            return self._choices[index].whole
        (choice,) = self._failed_packet(index)["choices"]
        return dict(choice)

    def _shown(self) -> list[int]:
        """The choices to show, in their order."""
        indices = list(range(len(self._num_tokens)))
        if self._wanted == len(indices):
            return indices

        def rank(index: int) -> tuple[bool, float]:
            return index in self._errors, -self._logprobs[index] / max(self._num_tokens[index], 1)

        return sorted(indices, key=rank)[: self._wanted]

    def _prediction_counts(self) -> Json:
        """What became of the client's prediction, for the usage; nothing for a request without one."""
        if not self._parsed.request.prediction:
            return {}
        counts = self._parsed.request.predictions
        accepted, rejected = sum(each.accepted for each in counts), sum(each.rejected for each in counts)
        return {"completion_tokens_details": {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}}

    def _prompt_counts(self) -> tuple[int, int]:
        """Tokens of the prompt, which all choices have in common, and those of them that were cached before the first choice."""
        context = self._contexts[min(self._contexts)]
        return len(context.prompt), context.prompt_cache_count


def packet_of(handler: Any, index: int, text: str, reason: str | None, **more: Any) -> Json:
    """mlx-lm's packet of one choice; a whole one has no counts yet."""
    packet: Json = handler.generate_response(text, reason, 0, 0, **more)
    packet["choices"][0]["index"] = index
    return packet


def keepalive(progress: str) -> Iterable[Packet]:
    return [f": keepalive{progress}\n\n".encode()]


def _call(call: Call) -> Json:
    return {"function": {"name": call.name, "arguments": call.written}, "type": "function", "id": call_id(call)}
