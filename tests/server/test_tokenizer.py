"""POST /tokenize, /detokenize and /apply-template: the tokens and the text that a reply's prompt
has, in both servers' shapes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from mlx_blockpool.config import RequestConfig
from mlx_blockpool.demo import model_path
from mlx_blockpool.forms.token_bytes import byte_letters
from mlx_blockpool.server.prompts.conversion import convert
from mlx_blockpool.server.prompts.job import TokenizerJob, TokenizerSource
from mlx_blockpool.server.prompts.renderer import PromptRenderer
from server.serving import Client

pytestmark = pytest.mark.server("--pool-bytes 20MB --prefill-step-size 128", model="agent")

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "a block?"}],
    },
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
    }
]


def done(server: Client, path: str, **body: Any) -> Any:
    status, answer = server.send(path, body)
    assert status == 200, answer
    return answer


def test_the_tokens_of_a_chat_are_those_that_a_reply_counts(well: Client) -> None:
    counted = well.chat(CHAT, max_tokens=1, tools=TOOLS)["usage"]["prompt_tokens"]
    tokenized = done(well, "/tokenize", messages=CHAT, tools=TOOLS, return_token_strs=True)
    assert tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"]) == counted
    assert (
        tokenized["max_model_len"] == next(iter(well.generator.registry.loaded.values())).positions
    )
    rendered = done(well, "/apply-template", messages=CHAT, tools=TOOLS)["prompt"]
    assert "look_up" in rendered
    assert "What is a block?" in rendered
    assert done(well, "/detokenize", tokens=tokenized["tokens"]) == {
        "content": rendered,
        "prompt": rendered,
    }
    assert (
        done(well, "/v1/tokenize", prompt=rendered, add_special_tokens=False)["tokens"]
        == tokenized["tokens"]
    )


def test_a_chat_is_rendered_as_the_client_wants_it(well: Client) -> None:
    whole, without = (
        done(well, "/apply-template", messages=CHAT, add_generation_prompt=adds)["prompt"]
        for adds in (True, False)
    )
    assert whole.startswith(without)
    assert whole.removeprefix(without).startswith("<|im_start|>assistant")
    answers = done(
        well, "/apply-template", messages=CHAT, chat_template_kwargs={"enable_thinking": False}
    )["prompt"]
    assert answers == whole + "<think>\n\n</think>\n\n"
    later = [CHAT[1], {"role": "system", "content": "The date is new."}]
    assert (
        "<|im_start|>user\nWhat is a block?\n\nThe date is new."
        in done(well, "/apply-template", messages=later)["prompt"]
    )


def test_llama_cpp_reads_content_and_pieces(well: Client) -> None:
    plain = done(well, "/tokenize", content="Hello, it<think>")
    assert list(plain) == ["tokens"]
    paired = done(well, "/tokenize", content="Hello, it<think>", with_pieces=True)["tokens"]
    assert [pair["id"] for pair in paired] == plain["tokens"]
    assert [pair["piece"] for pair in paired][-4:] == [" ", "i", "t", "<think>"]
    mixed = done(well, "/tokenize", content=["Hello", plain["tokens"][-1], " you"])["tokens"]
    assert done(well, "/detokenize", tokens=mixed)["content"] == "Hello<think> you"
    spelled = done(well, "/tokenize", content="<think>", parse_special=False)["tokens"]
    assert len(spelled) > 1
    assert (
        done(well, "/tokenize", content="")["tokens"]
        == done(well, "/tokenize", content=[])["tokens"]
        == []
    )


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/tokenize", {}, "One of content, prompt and messages is needed; found none of them"),
        (
            "/tokenize",
            {"content": "a", "prompt": "a"},
            "One of content, prompt and messages is needed; found content and prompt",
        ),
        ("/tokenize", {"prompt": 3}, "prompt: Input should be a valid string; found 3"),
        ("/tokenize", {"content": [1, 2.5]}, "content[1]"),
        ("/tokenize", {"messages": []}, "messages: Input should not be empty"),
        (
            "/tokenize",
            {"content": ["a", 99_999_999]},
            "the model's vocabulary has no token 99999999",
        ),
        ("/detokenize", {}, "tokens: Field required"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        (
            "/detokenize",
            {"tokens": [1, 99_999_999]},
            "tokens[1]: the model's vocabulary has no token 99999999",
        ),
        (
            "/apply-template",
            {"messages": CHAT, "chat_template": "x"},
            "chat_template_kwargs.chat_template: requests may not",
        ),
        ("/apply-template", {"prompt": "x"}, "messages: Field required"),
        ("/tokenize", {"prompt": "x", "model": "no/such"}, "There is no model 'no/such'"),
    ],
)
def test_what_cannot_be_done_is_named(
    path: str, body: dict[str, Any], says: str, well: Client
) -> None:
    status, answer = well.send(path, body)
    assert status in (400, 404)
    assert says in answer["error"]["message"]


def test_a_piece_that_is_no_text_by_itself_is_its_bytes() -> None:
    renderer = PromptRenderer(load_tokenizer(Path(model_path())))
    said = "A caf\u00e9 \U0001f40d<|im_end|>"
    result = convert(
        renderer,
        TokenizerJob(
            TokenizerSource("", {}), parts=[said], adds_special_tokens=False, wants="pieces"
        ),
    )
    pairs = json.loads(result.written["tokens"])
    assert [pair["id"] for pair in pairs] == result.tokens.tolist()
    pieces = [pair["piece"] for pair in pairs]
    assert any(isinstance(piece, list) for piece in pieces)
    assert (
        b"".join(
            bytes(piece) if isinstance(piece, list) else piece.encode() for piece in pieces
        ).decode()
        == said
    )
    assert pieces[-1] == "<|im_end|>"


def test_the_server_passes_on_long_lists_as_the_worker_has_written_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renderer = PromptRenderer(load_tokenizer(Path(model_path())))
    job = TokenizerJob(TokenizerSource("", {}), parts=["What is a block?"], wants="strings")
    result = convert(renderer, job)
    assert b"block" in result.written["token_strs"]
    monkeypatch.setattr(RequestConfig, "tokenized", len(result.tokens) - 1)
    with pytest.raises(ValueError, match="Send it in parts"):
        convert(renderer, job)


def test_each_byte_has_a_letter() -> None:
    letters = byte_letters()
    assert sorted(letters.values()) == list(range(256))
    assert (letters["\u0120"], letters["\u010a"], letters["A"]) == (ord(" "), ord("\n"), ord("A"))
