"""Prompts whose beginnings come from earlier ones have the tokens of whole texts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from thorough import tried
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_blockpool.config import PromptConfig
from mlx_blockpool.demo import model_path
from mlx_blockpool.server.prompts.encoding import ReusingTokenizer, splitting_tokens
from mlx_blockpool.server.prompts.job import PromptJob, TokenizerSource
from mlx_blockpool.server.prompts.renderer import PromptRenderer

ADDED = [
    AddedToken("<|start|>", special=True, normalized=False),
    AddedToken("<|start|>er", special=True, normalized=False),
    AddedToken("<|end|>", special=True, normalized=False),
    AddedToken("<think>", normalized=False),
    AddedToken("<left>", special=True, normalized=False, lstrip=True),
    AddedToken("<right>", special=True, normalized=False, rstrip=True),
    AddedToken("<norm>", special=True, normalized=True),
]
LETTERS = [*"abcdeéß 🙂\n.", "ab", "abc", " a", "de", "▁", "▁a", "▁ab", "Ġ", "Ġa"]


def backend(pre: Any, normalizer: Any = None) -> Tokenizer:
    merges = [("a", "b"), ("ab", "c"), ("d", "e"), ("▁", "a"), ("▁a", "b"), ("Ġ", "a")]
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", *LETTERS])}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre
    if normalizer is not None:
        made.normalizer = normalizer
    made.decoder = decoders.Fuse()
    made.add_tokens(ADDED)
    return made


KINDS = {
    "bytes": backend(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "first": backend(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "always": backend(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "llama": backend(
        pre_tokenizers.Sequence([]),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "words": backend(
        pre_tokenizers.Whitespace(),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()]),
    ),
}
KINDS["demo"] = Tokenizer.from_file(f"{model_path()}/tokenizer.json")
KINDS["demo"].add_tokens(ADDED)
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def reusing(kind: str, **bounds: int) -> ReusingTokenizer:
    whole = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind], eos_token="<|end|>")
    config = type("Config", (PromptConfig,), bounds)
    return ReusingTokenizer(thinking(whole), config)


def thinking(whole: Any) -> Any:
    """mlx-lm's wrapper of a tokenizer whose model thinks between two texts."""
    wrapper = TokenizerWrapper(whole)
    wrapper._think_start, wrapper._think_end = "<think>", "abc de"
    wrapper._think_start_tokens = wrapper.encode("<think>", add_special_tokens=False)
    wrapper._think_end_tokens = wrapper.encode("abc de", add_special_tokens=False)
    return wrapper


PARTS = st.lists(
    st.sampled_from([*(str(token) for token in ADDED), *LETTERS, " ", "  ", "A", "<|st", "<", "ﬁ"]),
    max_size=40,
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@tried(25, 200)
@given(texts=st.lists(st.tuples(PARTS, st.integers(0, 5), st.integers(0, 200)), min_size=2))
def test_texts_that_begin_alike_have_the_tokens_of_whole_texts(
    kind: str, texts: list[tuple[str, int, int]]
) -> None:
    tokenizer, known = reusing(kind, earlier_size=2_000), [""]
    for added, base, cut in texts:
        text = known[base % len(known)][:cut] + added
        found = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.whole.encode(text, add_special_tokens=False)
        assert found.tolist() == whole
        assert tokenizer.rfind_think_start(found) == tokenizer.whole.rfind_think_start(whole)
        assert tokenizer.rfind_think_end(found) == tokenizer.whole.rfind_think_end(whole)
        last = len(found) - 11
        assert tokenizer.rfind_think_start(found, start=last) == (
            tokenizer.whole.rfind_think_start(whole, start=last)
        )
        known.append(text)


@pytest.mark.parametrize("kind", KINDS)
@tried(10, 500)
@given(
    turns=st.lists(st.tuples(st.integers(0, 9), PARTS, st.booleans(), st.booleans()), min_size=2)
)
def test_prompts_and_their_breakpoints_are_those_of_whole_texts(
    kind: str, turns: list[tuple[int, str, bool, bool]]
) -> None:
    whole = PreTrainedTokenizerFast(
        tokenizer_object=KINDS[kind], eos_token="<|end|>", chat_template=TEMPLATE
    )
    wrapper, messages = thinking(whole), [{"role": "system", "content": "abc"}]
    renderer, other = PromptRenderer(wrapper), PromptRenderer(wrapper)
    other.tokenizer._splitting = {}  # encodes whole texts
    for place, text, is_marked, is_salted in turns:
        # Where the chat is as it was up to there, and differs or ends after it.
        role = "assistant" if len(messages[: place + 1]) % 2 else "user"
        messages = [*messages[: place + 1], {"role": role, "content": text}]
        parts = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
        sent = [*messages[:-1], {**messages[-1], "content": parts if is_marked else text}]
        job = PromptJob(TokenizerSource("", {}), "chat", messages=sent)
        job.is_chat_request, job.salt = True, b"salt" * is_salted
        found = renderer.render(copy.deepcopy(job))
        assert list(found.tokens) == whole.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert found == other.render(job)


def test_a_beginning_that_ends_before_an_added_token_is_not_encoded() -> None:
    tokenizer = reusing("bytes")
    text = "".join(f"<|start|>{'abc de ' * 10}<|end|>" for _ in range(3))
    tokenizer.encode(f"{text}<|start|>abc", add_special_tokens=False)
    before = tokenizer.num_encoded
    found = tokenizer.encode(text, add_special_tokens=False)
    assert found.tolist() == tokenizer.whole.encode(text, add_special_tokens=False)
    assert tokenizer.num_encoded == before


def test_only_what_is_new_since_the_last_added_token_is_encoded() -> None:
    tokenizer = reusing("bytes")
    text = "".join(f"<|start|>{'abc de ' * 100}<|end|>\n" for _ in range(20))
    for turn in range(5):
        before = tokenizer.num_encoded
        text += f"<|start|>{turn} de abc<|end|>\n"
        tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.num_encoded - before <= (100 if turn else len(text))
    tokenizer.scope = b"another"
    before = tokenizer.num_encoded
    tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.num_encoded - before == len(text)


@pytest.mark.parametrize("bounds", [{"earlier_texts": 3}, {"earlier_size": 3_000}])
def test_the_texts_used_last_are_kept_up_to_a_bound(bounds: dict[str, int]) -> None:
    tokenizer = reusing("bytes", **bounds)
    texts = [f"{i} {'abc de ' * 100}<|end|> de abc de" for i in "abcdeab"]
    for text in texts:
        tokenizer.encode(text, add_special_tokens=False)
    assert len(tokenizer._earlier) <= 3
    before = tokenizer.num_encoded
    tokenizer.encode(texts[-1], add_special_tokens=False)
    assert tokenizer.num_encoded - before < 50


def test_a_text_that_another_begins_with_is_one_used_last() -> None:
    tokenizer = reusing("bytes", earlier_texts=2)
    first, *others = (f"{i} {'abc de ' * 100}<|end|> abc" for i in "abc")
    for text in (first, others[0], first.removesuffix("<|end|> abc"), others[1]):
        tokenizer.encode(text, add_special_tokens=False)
    before = tokenizer.num_encoded
    tokenizer.encode(first, add_special_tokens=False)
    assert tokenizer.num_encoded - before < 50


def test_a_tokenizer_with_a_token_that_must_be_a_word_encodes_whole_texts() -> None:
    """Whether it is one depends on what follows."""
    whole = copy.deepcopy(KINDS["bytes"])
    whole.add_tokens([AddedToken("word", normalized=False, single_word=True)])
    whole.add_tokens([AddedToken("de", normalized=False)])
    tokenizer = ReusingTokenizer(thinking(PreTrainedTokenizerFast(tokenizer_object=whole)))
    for text in ("a b c wordde a b c", "a b c word"):
        found = tokenizer.encode(text, add_special_tokens=False).tolist()
        assert found == tokenizer.whole.encode(text, add_special_tokens=False)


def test_a_tokenizer_that_encodes_in_another_way_encodes_whole_texts() -> None:
    class Own(PreTrainedTokenizerFast):  # type: ignore[misc]
        def encode(self, text: str, **options: Any) -> list[int]:
            return [len(text)]

    made = Own(tokenizer_object=KINDS["bytes"], eos_token="<|end|>")
    assert not splitting_tokens(made)
    assert not splitting_tokens(object())
    tokenizer = ReusingTokenizer(TokenizerWrapper(made))
    for _ in range(2):
        assert tokenizer.encode("<|start|>abc", add_special_tokens=False).tolist() == [12]
    assert tokenizer.num_encoded == 24


def test_a_text_whose_special_tokens_are_none_changes_no_later_one() -> None:
    """transformers leaves that set in the tokenizers library."""
    tokenizer = reusing("words")
    text = "<|start|>user"
    needed = tokenizer.encode(text, add_special_tokens=False).tolist()
    tokenizer._earlier.clear()
    tokenizer.whole.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.encode(text, add_special_tokens=False).tolist() == needed
