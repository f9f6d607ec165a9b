"""The states of a form: thinking, free text, calls and content, what is open in each, and what
is forced.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from forms.vocabularies import tokenizer_of, vocabulary_of
from llguidance import LLMatcher
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper

from mlx_blockpool.config import FormConfig
from mlx_blockpool.errors import FormError
from mlx_blockpool.forms import form as form_module
from mlx_blockpool.forms.compiler import Compiler
from mlx_blockpool.forms.exact import exact
from mlx_blockpool.forms.form import Marks, ReplyForm
from mlx_blockpool.forms.output_format import OutputFormat

VOCABULARY = vocabulary_of("bpe")
COMPILER = Compiler(FormConfig())
MARKS = Marks.from_tokenizer(tokenizer_of("bpe"), VOCABULARY)
THINK, THOUGHT = VOCABULARY.added["<think>"], VOCABULARY.added["</think>"]
CALL, CALLED = VOCABULARY.added["<tool_call>"], VOCABULARY.added["</tool_call>"]
END = max(VOCABULARY.eos)
# Content with space before it, and a call with its end.
CONTENT = 'start: ws "[" DIGITS "]"\nws: /[ \\n]{0,2}/\nDIGITS: /[0-9]+/\n'
ONE_CALL = f'start: "name(" /[a-z]/ ")" <[{CALLED}]>\n'

# The tokens after which after() has brought forms.
FOLLOWED: dict[ReplyForm, list[int]] = {}


def matcher(grammar: str) -> LLMatcher:
    return COMPILER.compile("bpe", VOCABULARY, grammar, "here")


def tokens_of(text: str) -> list[int]:
    return VOCABULARY.ll.tokenize_str(text)


def form_of(
    state: Any = "start",
    content: str | None = CONTENT,
    calls: str | None = None,
    marks: Marks = MARKS,
) -> ReplyForm:
    compiled = [None if grammar is None else matcher(grammar) for grammar in (content, calls)]
    return ReplyForm(marks, VOCABULARY.num_words, *compiled, state)


def open_tokens(form: ReplyForm) -> set[int] | None:
    """The tokens that may come next; None: any."""
    words = np.full(VOCABULARY.num_words, -1, np.int32)
    if not form.fill(words):
        assert (words == -1).all()
        return None
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(tokenizer_of("bpe"))]
    return set(np.flatnonzero(bits).tolist())


def after(form: ReplyForm, *parts: str | int) -> ReplyForm:
    """A form after text and tokens."""
    added = [
        token for part in parts for token in (tokens_of(part) if isinstance(part, str) else [part])
    ]
    copy = form.copy()
    FOLLOWED[copy] = [*FOLLOWED.get(form, []), *added]
    copy.follow(FOLLOWED[copy])
    return copy


def first(text: str) -> int:
    return tokens_of(text)[0]


def test_marks_are_single_tokens_or_have_an_added_one() -> None:
    assert (MARKS.think_start, MARKS.think_end, MARKS.call_start) == ((THINK,), (THOUGHT,), (CALL,))
    hf = tokenizer_of("bpe")._tokenizer
    in_text = TokenizerWrapper(
        hf, BPEStreamingDetokenizer, tool_call_start="<function name=", tool_call_end="</function>"
    )
    assert Marks.from_tokenizer(in_text, VOCABULARY).call_start == ()
    mixed = TokenizerWrapper(
        hf, BPEStreamingDetokenizer, tool_call_start="<tool_call>name", tool_call_end=""
    )
    assert Marks.from_tokenizer(mixed, VOCABULARY).call_start == (CALL, *tokens_of("name"))


def test_content_is_held_from_its_first_token_to_its_end() -> None:
    form = form_of(marks=replace(MARKS, think_start=(), call_start=()))
    digits = open_tokens(after(form, "["))
    assert digits is not None
    assert {first("1"), first("9")} <= digits
    assert digits.isdisjoint({END, THINK, CALL, first("a")})
    assert open_tokens(after(form, "[12]")) == VOCABULARY.eos
    assert open_tokens(after(form, "[12]", END)) == VOCABULARY.eos
    # Tokens after the end change nothing.
    assert open_tokens(after(form, "[12]", END, "more")) == VOCABULARY.eos


def test_following_is_idempotent_and_counts_all_tokens() -> None:
    form, tokens = form_of(), tokens_of("[12")
    for end in (0, 1, 1, 2, 3, 3):
        form.follow(tokens[:end])
    assert open_tokens(form) == open_tokens(after(form_of(), "[12"))


def test_tokens_that_break_the_form_are_an_error() -> None:
    for tokens in (
        [first("a")],
        [*tokens_of("[1"), first("a")],
        [*tokens_of("[1"), END],
        [*tokens_of("[1]"), first("1")],
    ):
        with pytest.raises(
            FormError, match=r"the reply has left its form|cannot begin the reply in its form"
        ):
            form_of().follow(tokens)


def test_thinking_and_calls_may_come_before_content() -> None:
    form = form_of(calls=ONE_CALL)
    start = open_tokens(form)
    assert start is not None
    assert {THINK, CALL, first("["), first("\n")} <= start
    assert start.isdisjoint({END, THOUGHT, first("a")})
    # Space does not begin the content.
    assert {THINK, CALL, first("[")} <= (open_tokens(after(form, "\n")) or set())
    assert (open_tokens(after(form, "[")) or set()).isdisjoint({THINK, CALL})
    # Neither thinking nor a call where the model has none.
    plain = form_of(marks=Marks(eos=MARKS.eos, space=MARKS.space))
    assert (open_tokens(plain) or set()).isdisjoint({THINK, CALL})
    # Calls that have no grammar are not part of a form.
    assert CALL not in (open_tokens(form_of()) or set())


def test_thinking_is_free_and_does_not_end_the_reply_before_its_content() -> None:
    for form in (form_of("thinking"), after(form_of(), THINK)):
        thinking = open_tokens(after(form, "anything, [ too"))
        assert thinking is not None
        assert (
            thinking
            == set(range(32 * VOCABULARY.num_words))
            & set(range(len(tokenizer_of("bpe")))) - VOCABULARY.eos
        )
        begun = after(form, "so", THOUGHT)
        assert {first("["), THINK} <= (open_tokens(begun) or set())
        assert open_tokens(after(begun, "\n\n[7]")) == VOCABULARY.eos


def test_marks_of_several_tokens_are_forced_once_they_are_begun() -> None:
    marks = replace(
        MARKS,
        think_start=(THINK, first("a"), first("b")),
        think_end=(first("c"), THOUGHT),
        call_start=(THINK, CALL),
    )
    form = form_of(calls=ONE_CALL, marks=marks)
    assert form.forced() == []
    either = after(form, THINK)
    assert open_tokens(either) == {first("a"), CALL}
    assert either.forced() == []
    assert open_tokens(after(form, THINK, first("a"))) == {first("b")}
    assert after(form, THINK, first("a")).forced() == [first("b")]
    thinking = after(form, THINK, first("a"), first("b"), first("c"))
    assert END not in (open_tokens(thinking) or set())
    assert open_tokens(after(thinking, first("c"), THOUGHT)) == open_tokens(form)
    assert after(form, THINK, CALL).forced()[0] == first("name(")
    with pytest.raises(FormError, match="cannot begin the reply"):
        after(form, THINK, first("b"))
    # What follows the beginning of a mark is part of it, and no content.
    bracket = form_of(marks=replace(MARKS, think_start=(THINK, first("["))))
    assert END not in (open_tokens(after(bracket, THINK, first("["), "anything")) or {END})


def test_a_call_among_free_text_is_held_and_text_follows() -> None:
    form = form_of("free", content=None, calls=ONE_CALL)
    assert open_tokens(form) is None
    assert open_tokens(after(form, "text </tool_call>")) is None
    call = after(form, "text", CALL)
    assert call.forced()[:1] == [first("name")]
    for _ in range(2):
        assert open_tokens(after(call, "name(")) == {
            first(letter) for letter in "abcdefghijklmnopqrstuvwxyz"
        }
        later = after(call, "name(x)", CALLED)
        assert open_tokens(later) is None
        # A second call begins anew.
        call = after(later, "\n", CALL)
    assert open_tokens(after(form, "text", END)) == VOCABULARY.eos


def test_one_reply_has_several_calls() -> None:
    form, written = form_of("free", content=None, calls=ONE_CALL), list[int]()
    for letter in "xyz":
        written += [*tokens_of("text"), CALL, *tokens_of("name(")]
        form.follow(written)
        assert first("a") in (open_tokens(form) or set())
        written += [*tokens_of(f"{letter})"), CALLED]
        form.follow(written)
        assert open_tokens(form) is None


def test_thinking_in_free_text_is_free_and_calls_may_come_in_it() -> None:
    form = form_of("thinking", content=None, calls=ONE_CALL)
    assert open_tokens(form) is None
    assert after(form, "so", THOUGHT, CALL).forced()
    assert after(form, "so", CALL).forced()
    assert open_tokens(after(form, "so", THOUGHT, "text", THINK)) is None


def test_calls_next_to_content_take_its_place() -> None:
    several = ONE_CALL.replace(
        "start:", "start: call (/[ \\n]{0,2}/ " + f"<[{CALL}]>" + " call)*\ncall:"
    )
    form = form_of(calls=several)
    later = after(form, "\n", CALL, "name(x)", CALLED)
    allowed = open_tokens(later)
    assert allowed is not None
    assert VOCABULARY.eos | {CALL} <= allowed
    assert first("[") not in allowed
    assert open_tokens(after(later, CALL, "name(x)", CALLED, END)) == VOCABULARY.eos
    # No text follows a single call either.
    assert open_tokens(after(form_of(calls=ONE_CALL), CALL, "name(x)", CALLED)) == VOCABULARY.eos


def test_a_forced_token_is_the_only_one_that_is_open() -> None:
    form = form_of("form", content='start: "abc" /[0-9]/ "de"\n')
    forced = form.forced()
    assert VOCABULARY.ll.decode_str(forced) in ("ab", "abc")
    assert open_tokens(form) == {forced[0]}
    form.follow(forced[:1])
    assert form.forced() == forced[1:]
    assert after(form_of("form", content='start: "abc" /[0-9]/ "de"\n'), "abc").forced() == []


@pytest.mark.parametrize("state", ["start", "form"])
def test_a_long_run_of_forced_tokens_is_found_once(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " a long text" * 400
    grammar = f'start: "{text}" /[xy]/\n'
    form = form_of(state, grammar, marks=Marks(eos=MARKS.eos, space=MARKS.space))
    found, find, generated = [], ReplyForm._find_forced, list[int]()
    monkeypatch.setattr(ReplyForm, "_find_forced", lambda form: found.append(form) or find(form))
    while forced := form.forced():
        assert len(forced) <= FormConfig.most_forced
        generated += forced[:20]
        form.follow(generated)
        assert open_tokens(form) == (
            {first("x"), first("y")} if not form.forced() else {form.forced()[0]}
        )
    assert "".join(tokenizer_of("bpe").decode(generated)) == text
    # At its beginning, and at its end.
    assert len(found) == 2


def test_tokens_may_be_given_from_the_first_new_one_on() -> None:
    form, tokens = form_of(), tokens_of("[12]")
    form.follow(tokens[:2])
    assert form.seen == 2
    form.follow(tokens[1:3], 1)
    form.follow(tokens[3:], 3)
    assert form.seen == len(tokens)
    assert open_tokens(form) == VOCABULARY.eos


def test_a_copy_follows_another_reply() -> None:
    form = after(form_of(calls=ONE_CALL), "\n")
    form.jumps = False
    copies = [form.copy(), after(form_of(calls=ONE_CALL), CALL).copy()]
    copies[0].follow([*tokens_of("\n"), *tokens_of("[1]")])
    copies[1].follow([CALL, *tokens_of("name(")])
    assert open_tokens(copies[0]) == VOCABULARY.eos
    assert THINK in (open_tokens(form) or set())
    assert not copies[0].jumps


AMBIGUOUS = "start: a\na: a a | /[a-z]/ | b\nb: b a | a b | /[a-y]/\n"


@pytest.mark.parametrize("limits", [{"step_items": 2000}, {"row_items": 50}])
def test_a_form_whose_limits_are_met_is_an_error_and_no_end(limits: dict[str, int]) -> None:
    compiled = Compiler(FormConfig(**limits)).compile("bpe", VOCABULARY, AMBIGUOUS, "here")
    form = ReplyForm(MARKS, VOCABULARY.num_words, compiled, None, "form")
    with pytest.raises(FormError, match=r"Too many items|row has 55 items; max is 50"):
        write_letters(form, 100)


@pytest.mark.parametrize(
    ("costs", "fails_at"), [([0.004] * 200, None), ([0.4, *[0.0] * 199], None), ([0.03] * 200, 9)]
)
def test_a_form_that_costs_much_with_every_token_is_an_error(
    costs: list[float], fails_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All replies wait for it.

    Following a token and filling a mask are measured, each between two looks at the clock.
    """
    form = form_of("form", "start: /[a-z]*/\n")
    looks = itertools.accumulate(cost for each in costs for cost in (0.0, each))
    monkeypatch.setattr(time, "thread_time", lambda: next(looks))
    if fails_at is None:
        write_letters(form, 100)
        return
    with pytest.raises(FormError, match=f"has cost 0.6 s for {fails_at} tokens"):
        write_letters(form, 100)


def write_letters(form: ReplyForm, count: int) -> None:
    for length in range(count):
        form.follow([first("a")] * length)
        assert open_tokens(form) != VOCABULARY.eos


NESTED = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Zürich", "a value", "another value here"]},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "fixed": {"const": 'a "constant" \n of text'},
    },
    "required": ["name", "count", "tags", "fixed"],
    "additionalProperties": False,
}
TEXTS = [
    {
        "name": "another value here",
        "count": 12,
        "tags": ["two words", "é <think>"],
        "fixed": 'a "constant" \n of text',
    },
    {"name": "Zürich", "count": -1, "tags": [], "fixed": 'a "constant" \n of text'},
]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("kind", ["bpe", "spm", "prefixed", "naive"])
def test_forced_tokens_are_those_that_the_tokenizer_writes(kind: str, indent: int | None) -> None:
    vocabulary = vocabulary_of(kind)
    wanted = OutputFormat("json", json.dumps(exact(NESTED, "here")), "here")
    count = 0
    for value in TEXTS:
        tokens = vocabulary.ll.tokenize_str(json.dumps(value, ensure_ascii=False, indent=indent))
        form = ReplyForm(
            MARKS,
            vocabulary.num_words,
            COMPILER.compile(kind, vocabulary, wanted.grammar, wanted.place),
            state="form",
        )
        for end in range(len(tokens)):
            form.follow(tokens[:end])
            forced = form.forced()
            assert tokens[end : end + len(forced)] == forced
            count += len(forced) > 0
        assert form.forced() == []
    assert count > 30


# -- a reply whose tokens run out ------------------------------------------------------------------

ORDER: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1},
        "paid": {"type": "boolean"},
    },
    "required": ["name", "items", "paid"],
    "$defs": {
        "item": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["tea", "coffee"]},
                "count": {"type": "integer", "minimum": 5},
                "parts": {"type": "array", "items": {"$ref": "#/$defs/item"}},
            },
            "required": ["kind", "count"],
        }
    },
}


def grammar_of(schema: Any) -> str:
    return OutputFormat("json", json.dumps(schema), "here").grammar


def drawn(form: ReplyForm, max_tokens: int, seed: int) -> list[int]:
    """A reply of random tokens, of which those that open more are liked most."""
    rng = np.random.default_rng(seed)
    form.max_tokens = max_tokens
    reply: list[int] = []
    while len(reply) < max_tokens:
        allowed = open_tokens(form)
        assert allowed
        opening = [t for t in tokens_of('[{",:ab') if t in allowed]
        reply.append(int(rng.choice(opening if opening and rng.random() < 0.8 else [*allowed])))
        if reply[-1] in VOCABULARY.eos:
            break
        form.follow(reply)
    return reply


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_tokens", [60, 61, 80, 130, 300])
def test_content_is_closed_before_the_limit_cuts_it(max_tokens: int, seed: int) -> None:
    form = form_of("form", grammar_of(ORDER))
    reply = drawn(form, max_tokens, seed)
    assert reply[-1] in VOCABULARY.eos
    told = json.loads(VOCABULARY.ll.decode_str(reply[:-1]))
    assert sorted(told) == ["items", "name", "paid"]


def test_thinking_ends_while_there_are_tokens_for_the_content() -> None:
    form = form_of("thinking")
    form.max_tokens = 30
    thought = tokens_of("so, " * 40)
    for count in range(30):
        form.follow(thought[:count])
        if form.forced():
            break
    assert 18 <= count <= 26
    assert form.forced()[0] == THOUGHT
    closed = [*thought[:count], *form.forced()]
    assert VOCABULARY.ll.decode_str(closed).endswith("[0]")


def test_a_call_is_closed_before_the_limit_cuts_it() -> None:
    form = form_of("free", None, ONE_CALL)
    form.max_tokens = 8
    form.follow([*tokens_of("a b"), CALL])
    reply = [*tokens_of("a b"), CALL]
    while forced := form.forced():
        reply += forced
        form.follow(reply)
    assert len(reply) <= 8 or reply[-1] == CALLED


def test_what_cannot_be_closed_is_cut() -> None:
    form = form_of("form", grammar_of({"type": "array", "items": {"const": 1}, "minItems": 50}))
    reply = drawn(form, 20, 0)
    assert len(reply) == 20
    assert reply[-1] not in VOCABULARY.eos


def test_far_from_the_limit_nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    monkeypatch.setattr(form_module, "closing", lambda *_: searched.append(1))
    form = form_of("form", grammar_of(ORDER))
    form.max_tokens = 100_000
    form.follow(tokens_of('{"name":"' + "a" * 300))
    assert not searched


def test_a_grammar_whose_end_takes_long_to_find_costs_no_reply() -> None:
    rules = [f'r{i}: "A" r{(i + 1) % 200} | "B" r{(i * 7 + 3) % 200} | "C"' for i in range(200)]
    ways = " | ".join(f"s r{i}" for i in range(200))
    form = form_of("form", "\n".join(['start: s "!"', f's: {ways} | "Z"', *rules]))
    form.max_tokens = FormConfig.closing_tokens + 11
    words = np.zeros(VOCABULARY.num_words, np.int32)
    for count, letter in enumerate("ZABABABABABABAB"):
        form.follow(tokens_of(letter), count)
        form.fill(words)
    assert form._search_at == 0
