"""Checkpoints before what clients replace at the end of each prompt: system messages, and reminders
in the user's message.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from models import CHAT_TEMPLATE, byte_tokenizer
from transformers import PreTrainedTokenizerFast

from mlx_blockpool.hooks import Message, Replayed
from mlx_blockpool.prefix.trie import common_prefix
from mlx_blockpool.server.prompts.job import PreparedPrompt, PromptJob, TokenizerSource
from mlx_blockpool.server.prompts.renderer import PromptRenderer

REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
    + CHAT_TEMPLATE
)
# Its last characters are a token with those that follow.
RESULT = '{"items": [{"name": "value"}'
OPENING = "<|im_start|>assistant\n"


def countdown(turn: int) -> str:
    return f"<total_tokens>{190_000 - 3_217 * turn} tokens left</total_tokens>"


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def reminder(turn: int) -> list[dict[str, str]]:
    return [part(f"<system-reminder>\n{countdown(turn)}\n</system-reminder>\n"), part("\n\n")]


def system_message(chat: list[Message], turn: int) -> list[Message]:
    return [*chat, {"role": "system", "content": countdown(turn)}]


def two_system_messages(chat: list[Message], turn: int) -> list[Message]:
    nudge = {"role": "developer", "content": f"Consider your tasks. {turn}"}
    return [*chat, {"role": "system", "content": countdown(turn)}, nudge]


def message_of_reminders(chat: list[Message], turn: int) -> list[Message]:
    return [*chat, {"role": "user", "content": reminder(turn) * 2}]


def reminder_after_text(chat: list[Message], turn: int) -> list[Message]:
    asked = {"role": "user", "content": [part(RESULT), part("\n\n"), *reminder(turn)]}
    return [*chat[:-1], asked]


def both(chat: list[Message], turn: int) -> list[Message]:
    return system_message(message_of_reminders(chat, turn), turn)


ENDS = (
    system_message,
    two_system_messages,
    message_of_reminders,
    reminder_after_text,
    both,
)


def renderer_of(template: str) -> PromptRenderer:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return PromptRenderer(TokenizerWrapper(tokenizer, eos_token_ids=[end]))


def rendered(
    renderer: PromptRenderer, messages: list[Message], **fields: Any
) -> tuple[PreparedPrompt, dict[str, int]]:
    """A prompt, and its last checkpoint of each kind."""
    source, given = TokenizerSource("", {}), copy.deepcopy(messages)
    job = PromptJob(source, "chat", messages=given, is_chat_request=True, **fields)
    prepared = renderer.render(job)
    assert prepared.checkpoints is not None
    return prepared, {kind: end for end, kind in prepared.checkpoints}


def chat(reply: Message, results: int = 2) -> list[Message]:
    messages: list[Message] = [
        {"role": "system", "content": "You find items."},
        {"role": "user", "content": "Find them."},
    ]
    for _ in range(results):
        messages += [reply, {"role": "tool", "content": RESULT}]
    return messages


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, REFUSES])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("is_replayed", [False, True])
def test_the_next_turn_begins_with_all_before_what_was_replaced(
    end: Callable[[list[Message], int], list[Message]], template: str, is_replayed: bool
) -> None:
    renderer = renderer_of(template)
    reply: Message = {"role": "assistant", "content": RESULT}
    if is_replayed:
        # The same text in other tokens, as a model may have sampled it.
        reply = Replayed(
            reply, [token for character in RESULT for token in renderer.tokenizer.encode(character)]
        )
    before = end(chat(reply), 1)
    prepared, found = rendered(renderer, before)
    kept = before[: len(chat(reply)) - 1]
    asked = before[len(kept)]
    if end is reminder_after_text:
        asked = {**asked, "content": [part(RESULT)]}
    following = [*kept, asked, reply, {"role": "tool", "content": RESULT}]
    alike = common_prefix(prepared.tokens, rendered(renderer, end(following, 2))[0].tokens)
    # The next message opens as what was replaced does.
    assert alike - 1 <= found["user"] <= alike
    assert list(found) == ["system", "user", "assistant"]
    opening = renderer.tokenizer.encode(OPENING, add_special_tokens=False)
    assert prepared.tokens[found["assistant"] :] == opening


@pytest.mark.parametrize("begin", ["", "I have"])
def test_a_chat_without_reminders_ends_with_its_last_message(begin: str) -> None:
    renderer = renderer_of(CHAT_TEMPLATE)
    prepared, found = rendered(
        renderer, chat({"role": "assistant", "content": "Yes."}), begin=begin
    )
    opening = renderer.tokenizer.encode(OPENING + begin, add_special_tokens=False)
    assert list(found) == ["system", "user"]
    assert prepared.tokens[found["user"] :] == opening


@pytest.mark.parametrize(
    "asked",
    [
        [part("<task>\nFind them.\n</task>"), part("<system-reminder>\nBe brief.")],
        [part("<task>\nFind them.\n</task>")],
        [part("Is <b> a tag, or </b>?")],
        "<task>\nFind them.\n</task>",
    ],
)
def test_a_question_is_no_reminder(asked: Any) -> None:
    messages: list[Message] = [{"role": "user", "content": asked}]
    assert list(rendered(renderer_of(CHAT_TEMPLATE), messages)[1]) == ["user"]


def test_a_chat_of_nothing_but_system_messages_ends_with_them() -> None:
    renderer = renderer_of(CHAT_TEMPLATE)
    prepared, found = rendered(renderer, [{"role": "system", "content": "Greet."}])
    opening = renderer.tokenizer.encode(OPENING, add_special_tokens=False)
    assert prepared.tokens[found["user"] :] == opening
