"""How a model's own template writes a call: rendered once by a prompt worker, for the grammar of
the model's calls.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from forms.vocabularies import tokenizer_of
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper

from mlx_blockpool.forms.tags import TAGS
from mlx_blockpool.server.prompts.job import PreparedPrompt, PromptJob, TokenizerSource
from mlx_blockpool.server.prompts.renderer import PromptRenderer
from mlx_blockpool.server.prompts.templates import sample_call

SYSTEM = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
# As GLM 4.5 writes calls, with the lines that 4.7 leaves out.
LINES = (
    SYSTEM + "{% for m in messages %}<|im_start|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>{{ call.function.name }}\n"
    "{% for key, value in call.function.arguments.items() %}<arg_key>{{ key "
    "}}</arg_key>\n<arg_value>{{ value }}</arg_value>\n"
    "{% endfor %}</tool_call>{% endfor %}<|im_end|>{% endfor %}"
)
PARAMETER = "<parameter={{ key }}>\n{{ value }}\n</parameter>\n"
# As Qwen3-Coder does, with the arguments in the order of their names.
SORTED = (
    SYSTEM + "{% for m in messages %}<|im_start|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments | dictsort %}"
    + PARAMETER
    + "{% endfor %}</function>\n</tool_call>{% endfor %}"
    "<|im_end|>{% endfor %}"
)
REFUSES = (
    "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}{{ "
    "m.content }}{% endfor %}"
)
FORGETS = "{% for m in messages %}{{ m.content }}{% endfor %}"


def tokenizer_with(template: str, **options: Any) -> TokenizerWrapper:
    inner = copy.copy(tokenizer_of("bpe")._tokenizer)
    inner.chat_template = template
    markers = {"tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>"} | options
    return TokenizerWrapper(inner, BPEStreamingDetokenizer, **markers)


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (
            LINES,
            "sample_function\n<arg_key>key_b</arg_key>\n<arg_value>A1B2</arg_value>\n"
            "<arg_key>key_a</arg_key>\n<arg_value>C3D4</arg_value>\n",
        ),
        (
            SORTED,
            "\n<function=sample_function>\n<parameter=key_a>\nC3D4\n</parameter>\n"
            "<parameter=key_b>\nA1B2\n</parameter>\n</function>\n",
        ),
        (REFUSES, ""),
        (FORGETS, ""),
    ],
)
def test_a_sample_call_is_what_the_template_writes_between_the_markers(
    template: str, written: str
) -> None:
    assert sample_call(tokenizer_with(template)) == written


def test_a_model_without_calls_writes_no_sample() -> None:
    assert sample_call(tokenizer_with(LINES, tool_call_start=None, tool_call_end=None)) == ""


def test_calls_without_an_end_marker_are_read_to_the_end() -> None:
    template = (
        "{% for m in messages %}{{ '[CALL]' ~ (m.tool_calls[0].function.arguments | tojson) if "
        "m.tool_calls }}{% endfor %}"
    )
    written = sample_call(tokenizer_with(template, tool_call_start="[CALL]", tool_call_end=""))
    assert json.loads(written) == {"key_b": "A1B2", "key_a": "C3D4"}


def test_tags_take_the_space_of_a_sample() -> None:
    tags = TAGS["glm47"].spelled(sample_call(tokenizer_with(LINES)))
    assert (tags.begin, tags.key, tags.close) == (
        "{name}\n",
        "<arg_key>{key}</arg_key>\n<arg_value>",
        "</arg_value>\n",
    )
    plain = TAGS["glm47"].spelled("")
    assert (plain.begin, plain.key, plain.close) == (
        "{name}",
        "<arg_key>{key}</arg_key><arg_value>",
        "</arg_value>",
    )


def test_a_worker_returns_the_sample_of_prompts_whose_calls_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renderer, source = PromptRenderer(tokenizer_with(LINES)), TokenizerSource("", {})
    chat = [{"role": "user", "content": "a"}]

    def prepared(holds_calls: bool) -> PreparedPrompt:
        job = PromptJob(
            source,
            "chat",
            messages=copy.deepcopy(chat),
            is_chat_request=True,
            holds_calls=holds_calls,
        )
        return renderer.render(job)

    assert prepared(False).call_spelling == ""
    assert prepared(True).call_spelling.startswith("sample_function\n")
    monkeypatch.setattr(renderer.tokenizer, "apply_chat_template", None)
    # Once for all prompts of the tokenizer.
    assert renderer._call_spelling == sample_call(tokenizer_with(LINES))
