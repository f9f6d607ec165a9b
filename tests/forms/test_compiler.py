"""Compiled grammars: once each, within bounds, and refused with their reasons."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import numpy as np
import pytest
from forms.vocabularies import vocabulary_of
from llguidance import LLMatcher

from mlx_blockpool.config import FormConfig
from mlx_blockpool.errors import FormError
from mlx_blockpool.forms.calls import call_grammar
from mlx_blockpool.forms.compiler import REPLY_BYTES, Compiled, Compiler
from mlx_blockpool.forms.form import Marks, ReplyForm
from mlx_blockpool.forms.output_format import OutputFormat, ToolFormat

WORD = "start: /[a-z]+/"


def accepts(found: Any, text: str) -> bool:
    copy, tokens = found.deep_copy(), vocabulary_of("bpe").ll.tokenize_str(text)
    return bool(copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting())


def compile_content(compiler: Compiler, kind: Any, text: str) -> Any:
    grammar = OutputFormat(kind, text, "here").grammar
    return compiler.compile("key", vocabulary_of("bpe"), grammar, "here")


def test_a_hundred_threads_compile_one_grammar_once() -> None:
    compiler = Compiler(FormConfig())
    found: list[Any] = []

    def run() -> None:
        found.append(compiler.compile("key", vocabulary_of("bpe"), WORD, "here"))

    vocabulary_of("bpe")
    threads = [threading.Thread(target=run) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (compiler.compiled, compiler.hits, len(compiler), len(found)) == (1, 99, 1, 100)
    assert found[0].consume_tokens(vocabulary_of("bpe").ll.tokenize_str("name"))
    assert not found[1].is_accepting()


def without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes no time: what a grammar is estimated at is its text alone."""
    monkeypatch.setattr("mlx_blockpool.forms.compiler.COMPILING_BYTES", 0)


def test_the_least_recently_used_grammars_are_dropped_by_number_and_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_time(monkeypatch)
    vocabulary = vocabulary_of("bpe")
    few, small = (
        Compiler(FormConfig(compiled=2)),
        Compiler(FormConfig(compiled_bytes=len(WORD) * 2)),
    )
    for compiler in (few, small):
        for text in (WORD, WORD.replace("z", "y"), WORD, WORD.replace("z", "x"), WORD):
            compiler.compile("key", vocabulary, text, "here")
        assert (len(compiler), compiler.compiled, compiler.hits) == (2, 3, 2)
        assert compiler.nbytes == 2 * len(WORD)
        compiler.compile("key", vocabulary, WORD.replace("z", "y"), "here")
        assert compiler.compiled == 4
    # What is larger than the bound is compiled, and not kept.
    assert not small.compile(
        "key", vocabulary, "start: " + " ".join(["/a/"] * 20), "here"
    ).is_error()
    assert (len(small), small.nbytes) == (0, 0)


def test_a_grammar_is_estimated_by_the_time_that_it_and_its_replies_took() -> None:
    found = Compiled(
        LLMatcher(vocabulary_of("bpe").ll, LLMatcher.grammar_from_lark(WORD), log_level=0),
        1_000,
        0.25,
    )
    assert found.nbytes == 1_000 + 107_500_000
    for seconds in (0.125, 0.0, 0.125):
        found.reply_seconds += seconds
    assert (found.nbytes, found.grown) == (1_000 + 107_500_000 + 65_000_000, 65_000_000)
    # A refusal has no matcher.
    assert Compiled("it is too large", 1_000, 0.25).nbytes == 1_000


def test_a_grammar_that_its_replies_have_made_large_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_time(monkeypatch)
    vocabulary, compiler = vocabulary_of("bpe"), Compiler(FormConfig(compiled_bytes=1_000_000))
    work: list[Compiled] = []
    matcher = compiler.compile("key", vocabulary, WORD, "here", work)
    form = ReplyForm(Marks(), vocabulary.num_words, matcher, None, "form", work)
    form.fill(np.empty(vocabulary.num_words, np.int32))
    assert compiler.nbytes == len(WORD) + int(work[0].reply_seconds * REPLY_BYTES) > len(WORD)
    compiler.compile("key", vocabulary, WORD.replace("z", "y"), "here")
    work[0].reply_seconds = 0.4 * 1_000_000 / REPLY_BYTES
    compiler.compile("key", vocabulary, WORD, "here")
    assert (compiler.compiled, compiler.hits, len(compiler)) == (2, 1, 2)
    work[0].reply_seconds += 0.2 * 1_000_000 / REPLY_BYTES
    compiler.compile("key", vocabulary, WORD, "here")
    assert (compiler.compiled, compiler.hits, len(compiler), compiler.nbytes) == (
        3,
        1,
        2,
        2 * len(WORD),
    )


def test_what_grows_beyond_the_bound_is_dropped_before_it_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_time(monkeypatch)
    vocabulary, compiler = vocabulary_of("bpe"), Compiler(FormConfig(compiled_bytes=1_000))
    for text in (WORD, WORD.replace("z", "y")):
        work: list[Compiled] = []
        compiler.compile("key", vocabulary, text, "here", work)
        work[0].reply_seconds += 600 / REPLY_BYTES
    assert (compiler.nbytes, len(compiler)) == (600 + len(WORD), 1)


def test_a_running_form_goes_on_when_its_grammar_is_dropped() -> None:
    vocabulary, compiler = vocabulary_of("bpe"), Compiler(FormConfig())
    work: list[Compiled] = []
    form = ReplyForm(
        Marks(),
        vocabulary.num_words,
        compiler.compile("key", vocabulary, WORD, "here", work),
        None,
        "form",
        work,
    )
    words = np.empty(vocabulary.num_words, np.int32)
    form.fill(words)
    before = words.copy()
    compiler.clear()
    assert (len(compiler), compiler.nbytes) == (0, 0)
    form.fill(words)
    assert (words == before).all()
    form.follow(vocabulary.ll.tokenize_str("name"))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "[ab]a{999}{999}"),
        ("regex", f"[ab]{'a' * 40_000}"),
        ("grammar", f'start: /[ab]/ x{{30}}\nx: "{"a" * 2_000}"'),
        (
            "grammar",
            'root ::= [ab] x x x x\nx ::= y y y y\ny ::= z z z z\nz ::= "' + "a" * 1_000 + '"',
        ),
    ],
    ids=["counters", "text", "lark", "gbnf"],
)
def test_no_form_forces_a_text_without_end_in_one_step(kind: str, text: str) -> None:
    matcher = compile_content(Compiler(FormConfig()), kind, text)
    assert matcher.consume_tokens(vocabulary_of("bpe").ll.tokenize_str("b"))
    forced = matcher.compute_ff_tokens()
    assert len(vocabulary_of("bpe").ll.decode_bytes(forced)) <= 20_000
    # What has met the limit is in an error after the run, and cannot end as if it were whole.
    matcher.consume_tokens(forced)
    matcher.compute_bitmask()
    assert matcher.is_error() == (kind == "regex")


def test_constants_that_many_parameters_share_are_not_forced_together() -> None:
    vocabulary, names = vocabulary_of("bpe"), [f"p{number}" for number in range(30)]
    shared = {
        "properties": {key: {"$ref": "#/$defs/c"} for key in names},
        "required": names,
        "$defs": {"c": {"const": "a" * 2_000}},
    }
    tool = ToolFormat(
        "f", json.dumps({"type": "object", **shared, "additionalProperties": False}), "here"
    )
    matcher = Compiler(FormConfig()).compile(
        "key", vocabulary, call_grammar("qwen3_coder", [tool], vocabulary), "here"
    )
    assert not matcher.compute_ff_tokens()


def test_vocabularies_are_apart_and_dropped_by_their_keys() -> None:
    compiler = Compiler(FormConfig())
    compiler.compile("one", vocabulary_of("bpe"), WORD, "here")
    compiler.compile("other", vocabulary_of("spm"), WORD, "here")
    compiler.drop("one")
    assert (len(compiler), compiler.compiled) == (1, 2)
    compiler.compile("other", vocabulary_of("spm"), WORD, "here")
    compiler.compile("one", vocabulary_of("bpe"), WORD, "here")
    assert (compiler.compiled, compiler.hits) == (3, 1)


def test_what_is_kept_does_not_wait_for_another_grammar() -> None:
    compiler, compiles, ends = Compiler(FormConfig()), threading.Event(), threading.Event()
    compiler.compile("key", vocabulary_of("bpe"), WORD, "here")
    matcher = compiler._matcher

    def slow(*arguments: Any) -> Any:
        compiles.set()
        assert ends.wait(60)
        return matcher(*arguments)

    compiler._matcher = slow  # type: ignore[method-assign]
    other = threading.Thread(
        target=compiler.compile, args=("key", vocabulary_of("bpe"), 'start: "other"', "here")
    )
    other.start()
    assert compiles.wait(60)
    compiler.compile("key", vocabulary_of("bpe"), WORD, "here")
    compiler.drop("key")
    assert (compiler.compiled, compiler.hits, len(compiler)) == (1, 1, 0)
    ends.set()
    other.join()
    assert (compiler.compiled, len(compiler)) == (2, 1)


def test_a_grammar_whose_replies_have_used_up_its_states_is_compiled_anew() -> None:
    vocabulary, compiler = vocabulary_of("bpe"), Compiler(FormConfig(replies=3, lexer_states=60))

    def written(seed: int) -> int:
        """How many letters of a reply the grammar follows."""
        matcher = compiler.compile("key", vocabulary, "start: /(a|b)*a(a|b){12}/", "here")
        draw = random.Random(seed)
        for count in range(100):
            matcher.compute_bitmask()
            if matcher.is_error() or not matcher.consume_token(
                vocabulary.ll.tokenize_str(draw.choice("ab"))[0]
            ):
                return count
        return 100

    first, *others = [written(seed) for seed in range(4)]
    # All copies share the states of their lexer.
    assert first > 15
    assert max(others) < 5
    assert (written(0), compiler.compiled, compiler.hits, len(compiler)) == (first, 2, 3, 1)
    assert written(1) < 5
    compiler.drop("key")
    assert (written(0), compiler.compiled) == (first, 3)


@pytest.mark.parametrize(
    ("kind", "text", "taken", "refused"),
    [
        (
            "json",
            '{"type": "array"}',
            ["[1]", "\n\n[ ]\n", '[{"a": 1}' + " " * 20 + "]"],
            ["{}", "[1", "[1" + " " * 21 + "]"],
        ),
        (
            "choice",
            json.dumps(["a", "a/b", "x\ny", "é <think>#", '"q"']),
            ["a", "a/b", "x\ny", "é <think>#", '"q"'],
            ["b", "a/"],
        ),
        ("regex", r"^[a-z]+\/x$", ["abc/x"], ["/x", "abc/xy"]),
        ("regex", "", [""], ["a"]),
        ("regex", r"a\$|\\$", ["a$", "\\"], ["a"]),
        ("grammar", 'start: "a" x\nx: /[0-9]+/', ["a12"], ["a", "12"]),
        ("grammar", 'root ::= "yes" | "no"', ["yes", "no"], ["nope", "ye"]),
    ],
)
def test_content_is_matched_as_a_whole(
    kind: str, text: str, taken: list[str], refused: list[str]
) -> None:
    found = compile_content(Compiler(FormConfig()), kind, text)
    assert [accepts(found, one) for one in taken] == [True] * len(taken)
    assert [accepts(found, one) for one in refused] == [False] * len(refused)


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("regex", "(a", "invalid regex: unclosed group"),
        ("regex", "a{20001}", "it begins with more than 20000 bytes that leave no choice"),
        ("regex", "a)|(b", "invalid regex: unopened group"),
        (
            "regex",
            "a(?!b)",
            "invalid regex: look-around, including look-ahead and look-behind, is not supported",
        ),
        ("regex", "\ud800", "this regex cannot be read: 'utf-8' codec can't encode character"),
        (
            "choice",
            '["\\ud800"]',
            "this choice cannot be read: 'utf-8' codec can't encode character",
        ),
        (
            "grammar",
            'start: a\na: a "x"',
            "no text ever completes it: one of its rules leads to itself and has no",
        ),
        (
            "grammar",
            "root ::= root",
            "no text ever completes it: one of its rules leads to itself and has no",
        ),
        ("grammar", "start: foo", 'at 1(8): unknown name: "foo"'),
        ("grammar", "hello", "this grammar cannot be read: Expected ::="),
        (
            "grammar",
            "root ::= " + "(" * 5000,
            "this grammar cannot be read: maximum recursion depth exceeded",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_place(kind: str, text: str, why: str) -> None:
    compiler = Compiler(FormConfig())
    for _ in range(2):
        with pytest.raises(FormError) as raised:
            compile_content(compiler, kind, text)
        assert str(raised.value).startswith(f"here: {why}")
        assert "\n" not in str(raised.value)
    # What llguidance has refused is not compiled again.
    assert (compiler.compiled, compiler.refused + compiler.hits) in ((0, 2), (0, 0))


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (
            {"oneOf": [{"type": "integer"}, {"minimum": 3}]},
            "oneOf is not supported where two of its",
        ),
        ({"type": "string", "pattern": "a(?!b)"}, "invalid regex: look-around"),
    ],
)
def test_a_schema_that_does_not_compile_is_refused_and_not_compiled_again(
    schema: Any, why: str
) -> None:
    compiler = Compiler(FormConfig())
    text = json.dumps(
        {"type": "object", "properties": {"a": schema, "b": {"type": "integer"}}, "required": ["a"]}
    )
    tries: list[Any] = []
    for _ in range(3):
        with pytest.raises(FormError) as raised:
            compile_content(compiler, "json", text)
        assert str(raised.value).startswith(f"here: {why}")
        tries.append(compiler.hits)
    assert (tries, compiler.refused, len(compiler)) == ([0, 1, 2], 1, 1)


def test_a_grammar_that_takes_too_long_is_refused() -> None:
    with pytest.raises(
        FormError, match=r"^here: it took 0.0 s to compile; at most -1 s are spent on one$"
    ):
        Compiler(FormConfig(compile_seconds=-1)).compile("key", vocabulary_of("bpe"), WORD, "here")


def test_a_language_without_texts_is_refused() -> None:
    with pytest.raises(FormError, match=r"^here: "):
        Compiler(FormConfig()).compile("key", vocabulary_of("bpe"), "start: /a/ & /b/\n", "here")


def test_limits_of_llguidance_are_those_of_the_config() -> None:
    with pytest.raises(FormError, match="too"):
        Compiler(FormConfig(grammar_symbols=3)).compile(
            "key", vocabulary_of("bpe"), 'start: "a" /b/ "c" /d/ "e"', "here"
        )
