"""Replies that are put back as they were sampled: prompts that begin with the prompt and the
reply of the turn before.
"""

from __future__ import annotations

import copy
import pickle
from array import array
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from models import character_tokenizer
from transformers import PreTrainedTokenizerFast

from mlx_blockpool.hooks import Replayed
from mlx_blockpool.server.prompts.replay import KnownPieces, Replay
from mlx_blockpool.server.prompts.templates import Template

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "look", "description": "", "parameters": {"type": "object"}},
    }
]
CALL: Any = {
    "id": "1",
    "type": "function",
    "function": {"name": "look", "arguments": {"at": "pool"}},
}
# Thinking goes from all turns before the last question; the opening leaves it to the model to begin
# with it.
QWEN3 = (
    "{% for m in messages %}{% set c = m.content.split('</think>')[-1].lstrip('\n') if m.role == "
    "'assistant' else m.content %}"
    "<|im_start|>{{ m.role }}\n{{ c }}"
    "{% for t in m.tool_calls or [] %}\n<tool_call>\n{{ t.function | tojson }}\n</tool_call>{% "
    "endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The opening has begun to think, which earlier turns never show; no line ends between turns.
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A>{{ m.content.split('</think>')[-1] }}"
    "{% for t in m.tool_calls or [] %}<call>{{ t.function.name }}\n{{ t.function.arguments | "
    "tojson }}</call>{% endfor %}"
    "<|im_end|>{% else %}{{ m.role[0] | upper }}>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A><think>\n{% endif %}"
)
# Channels; what ends a reply is another token than what ends it in the history, and a call ends
# with its own.
GPT_OSS = (
    "{% for m in messages %}{% if m.tool_calls %}<|start|>assistant to={{ "
    "m.tool_calls[0].function.name }}<|channel|>commentary"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content "
    "}}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
STYLES: dict[str, tuple[str, list[str], list[str]]] = {
    "qwen3": (
        QWEN3,
        ["<|im_end|>"],
        [
            "<think>\nHm.\n</think>\n\nI "
            'look.\n<tool_call>\n{"name":"look"}\n</tool_call><|im_end|>',
            "<think>\nSo.\n</think>\n\nYes.<|im_end|>",
        ],
    ),
    "deepseek": (
        DEEPSEEK,
        ["<|im_end|>"],
        [
            "Hm.\n</think>\n\nI look.<call>look\n{}</call><|im_end|>",
            "So.\n</think>\n\nYes.<|im_end|>",
        ],
    ),
    "gpt_oss": (
        GPT_OSS,
        ["<|return|>", "<|call|>"],
        [
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant "
            "to=look<|channel|>commentary<|message|>{}<|call|>",
            "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        ],
    ),
}


def tokenizer_of(template: str, stops: list[str]) -> Any:
    made = character_tokenizer()
    made.add_special_tokens(
        ["<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>"]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = template
    return TokenizerWrapper(
        tokenizer, eos_token_ids=[tokenizer.convert_tokens_to_ids(stop) for stop in stops]
    )


@pytest.mark.parametrize("style", STYLES)
def test_each_prompt_begins_with_the_one_before_and_its_reply(style: str) -> None:
    template, stops, written = STYLES[style]
    tokenizer = tokenizer_of(template, stops)

    def own(messages: list[Any]) -> list[int]:
        return list(
            tokenizer.apply_chat_template(
                messages, tools=TOOLS, add_generation_prompt=True, tokenize=True
            )
        )

    sampled = [tokenizer.encode(text, add_special_tokens=False) for text in written]
    said = [
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
        {"role": "assistant", "content": "Yes."},
    ]
    behind = [{"role": "tool", "content": "It."}, {"role": "user", "content": "Sure?"}]
    messages: list[Any] = [{"role": "user", "content": "Is it?"}]
    prompt = own(messages)
    for reply, tokens, answer in zip(said, sampled, behind, strict=True):
        messages = [*messages, Replayed(reply, tokens), answer]
        before, built = (
            [*prompt, *tokens[:-1]],
            Replay(Template(tokenizer, TOOLS, {}), messages).tokens(messages),
        )
        assert built is not None
        prompt, ends = list(built[0]), built[1]
        (opening,) = ends
        assert prompt[: len(before)] == before
        assert own(messages)[: len(before)] != before, "the template alone would do"
        closed = tokenizer.decode(prompt[opening:])
        assert tokenizer.decode(own(messages)).endswith(closed)
        assert tokenizer.decode(prompt[len(before) :]).count(answer["content"]) == 1


def test_without_replies_and_where_the_template_shows_none_its_own_prompt_has_to_do() -> None:
    plain = tokenizer_of(QWEN3, ["<|im_end|>"])
    said: list[Any] = [
        {"role": "user", "content": "Is it?"},
        {"role": "assistant", "content": "Yes."},
    ]
    assert Replay(Template(plain, None, {}), said).tokens(said) is None
    replied = [said[0], Replayed(said[1], [1, 2])]
    silent = tokenizer_of(
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", ["<|im_end|>"]
    )
    assert Replay(Template(silent, None, {}), replied).tokens(replied) is None


def test_a_message_keeps_its_tokens_on_its_way_to_a_worker() -> None:
    message = Replayed({"role": "assistant", "content": "Yes."}, [1, 2])
    for other in (copy.deepcopy(message), pickle.loads(pickle.dumps(message))):
        assert (other, other.tokens) == (message, [1, 2])


def test_of_a_known_conversation_only_the_last_turn_is_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template, stops, written = STYLES["qwen3"]
    tokenizer = tokenizer_of(template, stops)
    sampled = tokenizer.encode(written[1], add_special_tokens=False)
    rendered: list[int] = []
    text = Template.text

    def counted(self: Template, messages: Any, **more: Any) -> str:
        rendered.append(len(messages))
        return text(self, messages, **more)

    monkeypatch.setattr(Template, "text", counted)
    known, messages = KnownPieces(), [{"role": "user", "content": "Is it?"}]
    for turn in range(6):
        messages += [
            Replayed({"role": "assistant", "content": "Yes."}, sampled),
            {"role": "user", "content": f"Sure, {turn}?"},
        ]
        before = len(rendered)
        found = Replay(Template(tokenizer, TOOLS, {}), messages, known).tokens(messages)
        assert len(rendered) - before <= 4
        assert found == Replay(Template(tokenizer, TOOLS, {}), messages).tokens(messages)
        other = [{"role": "user", "content": "Is it not?"}, *messages[1:]]
        assert Replay(Template(tokenizer, TOOLS, {}), other, known).tokens(other) == (
            Replay(Template(tokenizer, TOOLS, {}), other).tokens(other)
        )


def test_the_pieces_used_last_are_kept_up_to_a_bound() -> None:
    known = KnownPieces(max_tokens=100)
    for i in range(20):
        known.add(b"%d" % i, array("I", range(10)))
        assert known.get(b"0") is not None
    assert [known.get(b"%d" % i) is not None for i in (1, 10, 12, 19)] == [False, False, True, True]
