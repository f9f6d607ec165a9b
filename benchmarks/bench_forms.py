"""What forms cost and save: masks alone, decode steps of eight, tokens that a form forces,
compiling, and its price for others.

All on a vocabulary of 128k tokens, which decides what a mask costs. Processor time, but for the
steps beside a thread that compiles, which are on the clock. The model is random and does not end a
text by itself, so that each step of the eight is masked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher
from measure import interleave, llama, options, report
from mlx_lm.generate import StopSequences
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from mlx_blockpool.config import EngineConfig, FormConfig
from mlx_blockpool.drafts.curve import CostCurve
from mlx_blockpool.drafts.drafting import Drafting
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request, Token
from mlx_blockpool.engine.sampling import masked
from mlx_blockpool.forms.calls import call_grammar
from mlx_blockpool.forms.compiler import Compiler
from mlx_blockpool.forms.exact import exact
from mlx_blockpool.forms.form import Marks, ReplyForm
from mlx_blockpool.forms.output_format import OutputFormat, ToolFormat
from mlx_blockpool.forms.vocabulary import Vocabulary

VOCABULARY = 128_256
KEY = "vocabulary"
MEMBERS = 8
ADDED = ("<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
REPLY = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "number": {"type": "integer"}},
    "required": ["text", "number"],
    "additionalProperties": False,
}
CITIES = ["Amsterdam", "Barcelona", "Copenhagen", "Edinburgh"]
NAME = "get_weather_forecast_of_city"
FORECAST = {
    "type": "object",
    "properties": {
        "name_of_the_city": {"enum": CITIES},
        "number_of_days_to_look_ahead": {"type": "integer", "minimum": 1, "maximum": 14},
        "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
        "include_precipitation": {"type": "boolean"},
    },
    "required": [
        "name_of_the_city",
        "number_of_days_to_look_ahead",
        "temperature_unit",
        "include_precipitation",
    ],
    "additionalProperties": False,
}


def make_tokenizer(size: int) -> TokenizerWrapper:
    """A BPE over bytes.

    Its tokens are words of the forms and random ones, and each word's beginnings, as merges need
    them.
    """
    rng, letters = random.Random(0), "abcdefghijklmnopqrstuvwxyz"
    vocabulary = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []

    def add(word: str) -> None:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary and len(vocabulary) < size - len(ADDED):
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))

    words = (
        json.dumps([NAME, FORECAST, REPLY, "function parameter"])
        .replace("_", " ")
        .replace('"', " ")
        .split()
    )
    for word in [word for word in words if word.isalpha()]:
        add(word)
        add("\u0120" + word)
    while len(vocabulary) < size - len(ADDED):
        add(
            ("\u0120" if rng.random() < 0.5 else "")
            + "".join(rng.choices(letters, k=rng.randint(3, 9)))
        )
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        ByteLevel(add_prefix_space=False),
        ByteLevelDecoder(),
    )
    tokenizer.add_tokens(
        [AddedToken(text, special=text == ADDED[0], normalized=False) for text in ADDED]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=ADDED[0])
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)


def wanted(schema: Any) -> OutputFormat:
    return OutputFormat("json", json.dumps(exact(schema, "schema")), "schema")


class Forms:
    """The vocabulary of a tokenizer, a compiler, and forms of it."""

    def __init__(self, size: int) -> None:
        self.tokenizer = make_tokenizer(size)
        start = time.process_time()
        self.vocabulary = Vocabulary.from_tokenizer(self.tokenizer)
        self.vocabulary_seconds = time.process_time() - start
        self.compiler = Compiler(FormConfig())
        self.marks = Marks.from_tokenizer(self.tokenizer, self.vocabulary)

    def content(self, schema: Any) -> ReplyForm:
        return self._form(self.matcher(self.compiler, wanted(schema)))

    def matcher(self, compiler: Compiler, form: OutputFormat) -> LLMatcher:
        return compiler.compile(KEY, self.vocabulary, form.grammar, form.place)

    def call(self, parser: str, name: str, parameters: Any) -> ReplyForm:
        tool = ToolFormat(name, json.dumps(exact(parameters, "tools")), "tools")
        grammar = call_grammar(parser, [tool], self.vocabulary, extent="call")
        return self._form(self.compiler.compile(KEY, self.vocabulary, grammar, "tools"))

    def _form(self, matcher: Any) -> ReplyForm:
        return ReplyForm(self.marks, self.vocabulary.num_words, content=matcher, state="form")


def processor_us(work: Callable[[], Any], times: int) -> float:
    start = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - start) / times * 1e6


def closed_by_where(logits: mx.array, words: np.ndarray) -> mx.array:
    """The plain way, to compare with: bits as booleans, from the host."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    return mx.where(mx.array(bits).astype(mx.bool_), logits, mx.array(-mx.inf, logits.dtype))


def bench_mask(args: argparse.Namespace, forms: Forms, rows: int, rounds: int, times: int) -> None:
    """The mask of one step: its words, which the host fills while the device computes logits, and
    closing what they exclude.

    `mixed` masks have no runs of equal bits. `where` is the plain way, whose speed depends on such
    runs.
    """
    logits = mx.random.normal((rows, VOCABULARY))
    mx.eval(logits)
    opened = forms.tokenizer.encode('{"text": "some', add_special_tokens=False)
    members = [forms.content(REPLY) for _ in range(rows)]
    for member in members:
        member.follow(opened)
    words = np.full((rows, forms.vocabulary.num_words), -1, np.int32)

    def fill() -> None:
        for row, member in enumerate(members):
            assert member.fill(words[row])

    fill()
    mixed = (
        np.random.default_rng(0).integers(-(2**31), 2**31, words.shape, np.int64).astype(np.int32)
    )
    for mask in (words, mixed):
        assert mx.array_equal(masked(logits, mask), closed_by_where(logits, mask)).item()
    runs: dict[str, Callable[[], Any]] = {
        "fill": fill,
        "close": lambda: mx.eval(masked(logits, words)),
        "close_mixed": lambda: mx.eval(masked(logits, mixed)),
        "where": lambda: mx.eval(closed_by_where(logits, words)),
        "where_mixed": lambda: mx.eval(closed_by_where(logits, mixed)),
        "logprobs": lambda: mx.eval(logits - mx.logsumexp(logits, axis=-1, keepdims=True)),
    }
    taken = interleave(
        {name: partial(processor_us, run, times) for name, run in runs.items()}, rounds
    )
    report(
        args,
        "forms",
        f"the mask of {rows} {'row' if rows == 1 else 'rows'}",
        vocabulary=VOCABULARY,
        **{f"{name}_us": round(us, 1) for name, us in taken.items()},
        mask_us=round(taken["fill"] + taken["close"], 1),
        share_of_logprobs=round((taken["fill"] + taken["close"]) / taken["logprobs"], 3),
    )


def run(engine: BlockPoolBatchEngine) -> tuple[dict[int, list[int]], list[tuple[float, float]]]:
    """The tokens of all replies, and the processor and wall seconds of each step in which all
    members got one token.
    """
    written: dict[int, list[int]] = {}
    steps = []
    while len(engine):
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = [event for event in engine.next() if isinstance(event, Token)]
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        for token in tokens:
            written.setdefault(token.uid, []).append(token.token)
        if len(tokens) == len({token.uid for token in tokens}) == MEMBERS:
            steps.append((cpu, wall))
    return written, steps


def insert(
    engine: BlockPoolBatchEngine,
    forms: list[ReplyForm | None],
    tokens: int,
    eos: frozenset[int] = frozenset(),
) -> list[int]:
    # The prompts go through the model together, so that all decode from then on.
    engine.caches.forward_seconds = lambda tokens: 1.0
    stop = StopSequences([(token,) for token in sorted(eos)])
    prompts = [[5, 6, 7, number] * 2 for number in range(len(forms))]
    return [
        engine.insert(Request(prompt, tokens, form=form, stop=stop))
        for prompt, form in zip(prompts, forms, strict=True)
    ]


def bench_steps(
    args: argparse.Namespace, forms: Forms, engine: BlockPoolBatchEngine, rounds: int, tokens: int
) -> None:
    """Steps of eight, of which none, one or all have a form."""

    def median_step(formed: int) -> float:
        given = [forms.content(REPLY) if number < formed else None for number in range(MEMBERS)]
        uids = insert(engine, given, tokens)
        written, steps = run(engine)
        texts = [forms.tokenizer.decode(written[uid]) for uid in uids]
        assert all(text.lstrip().startswith("{") for text in texts[:formed]), "a form was not kept"
        return statistics.median(cpu for cpu, _ in steps)

    kinds = {"none": 0, "one": 1, "eight": MEMBERS}
    taken = interleave(
        {name: partial(median_step, formed) for name, formed in kinds.items()}, rounds
    )
    report(
        args,
        "forms",
        "steps of eight, of which none, one and all have a form",
        vocabulary=VOCABULARY,
        **{f"{name}_ms": round(seconds * 1e3, 2) for name, seconds in taken.items()},
        **{f"ratio_{name}": round(taken[name] / taken["none"], 3) for name in ("one", "eight")},
    )


def bench_forced(
    args: argparse.Namespace, forms: Forms, engine: BlockPoolBatchEngine, rounds: int
) -> None:
    """A call with long names: its steps and time with forced tokens computed together, and one
    by one.
    """
    written: dict[str, list[int]] = {}
    counted: dict[str, dict[str, int]] = {}

    def call(name: str) -> float:
        form = forms.call("qwen3_coder", NAME, FORECAST)
        form.jumps = name == "together"
        before = dict(engine.counts)
        insert(engine, [form], 200, forms.vocabulary.eos)
        start = time.process_time()
        (written[name],) = run(engine)[0].values()
        seconds = time.process_time() - start
        counted[name] = {
            key: engine.counts[key] - before.get(key, 0)
            for key in ("decode_steps", "forced_tokens", "jumps")
        }
        return seconds

    taken = interleave({name: partial(call, name) for name in ("together", "one by one")}, rounds)
    assert written["together"] == written["one by one"], "a jump changed the reply"
    report(
        args,
        "forms",
        "a call of qwen3_coder with long names",
        vocabulary=VOCABULARY,
        tokens=len(written["together"]),
        steps=counted["together"]["decode_steps"],
        steps_one_by_one=counted["one by one"]["decode_steps"],
        forced=counted["together"]["forced_tokens"],
        jumps=counted["together"]["jumps"],
        together_ms=round(taken["together"] * 1e3, 1),
        one_by_one_ms=round(taken["one by one"] * 1e3, 1),
        ratio=round(taken["one by one"] / taken["together"], 2),
    )


def bench_neighbour(args: argparse.Namespace, forms: Forms, model: Any, characters: int) -> None:
    """A stream next to a reply that is one long constant: its gaps with jumps as they are chosen,
    at any price, and one by one.

    The engines take turns, a step of each that is awaited, so that all meet the same noise. Seconds
    are on the clock.
    """
    constant = " ".join(random.Random(1).choices(CITIES, k=characters // 9))
    config = EngineConfig(measures=not args.quick, most_drafted=0)
    names = ("as chosen", "at any price", "one by one")
    engines = {name: BlockPoolBatchEngine.open(model, 400_000_000, config) for name in names}
    free: Any = CostCurve.from_points({1: 1e-6, 64: 1e-6}, {1: 1.0, 8: 1.0})
    engines["at any price"].steps.drafting = Drafting(curve=free)
    engines["at any price"].steps.account = lambda *_: None  # type: ignore[method-assign]
    gaps: dict[str, list[float]] = {name: [] for name in engines}
    written, order = dict.fromkeys(engines, 0), {name: [1, 2] for name in engines}
    for name, engine in engines.items():
        form = forms.content({"const": constant})
        form.jumps = name != "one by one"
        order[name] = insert(engine, [None, form], characters, frozenset())
        while any(sequence.in_prefill for sequence in engine.sequences):
            engine.next()
    while len(gaps["one by one"]) < characters // 60:
        for name, engine in engines.items():
            start = time.perf_counter()
            events = [event for event in engine.next() if isinstance(event, Token)]
            mx.synchronize()
            gaps[name].append(time.perf_counter() - start)
            written[name] += sum(event.uid == order[name][1] for event in events)
    median = {name: statistics.median(each) for name, each in gaps.items()}
    report(
        args,
        "forms",
        "a stream next to a long constant",
        vocabulary=VOCABULARY,
        steps=len(gaps["one by one"]),
        **{
            f"{name.replace(' ', '_')}_ms": round(seconds * 1e3, 2)
            for name, seconds in median.items()
        },
        **{
            f"{name.replace(' ', '_')}_largest_ms": round(max(each) * 1e3, 2)
            for name, each in gaps.items()
        },
        constant_tokens=written,
        ratio=round(median["as chosen"] / median["one by one"], 3),
        ratio_at_any_price=round(median["at any price"] / median["one by one"], 2),
    )


def wide(properties: int) -> dict[str, Any]:
    """An object with many properties, each of which may be left out."""
    of_one = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "number": {"type": "integer"}},
    }
    return {
        "type": "object",
        "properties": {f"property_{number}": of_one for number in range(properties)},
    }


SCHEMAS = {
    "small": REPLY,
    "300 properties": wide(300),
    "enum of 2,000": {"enum": [f"value {number}" for number in range(2000)]},
}


def bench_compile(
    args: argparse.Namespace, forms: Forms, schema: Any, case: str, rounds: int
) -> None:
    """A schema is checked in every request.

    Its grammar is compiled once, and copied by later requests.
    """
    form = wanted(schema)
    forms.matcher(forms.compiler, form)
    runs: dict[str, Callable[[], float]] = {
        "check": lambda: processor_us(lambda: wanted(schema), 3),
        "new": lambda: processor_us(lambda: forms.matcher(Compiler(FormConfig()), form), 1),
        "known": lambda: processor_us(lambda: forms.matcher(forms.compiler, form), 20),
    }
    taken = interleave(runs, rounds)
    report(
        args,
        "forms",
        f"compiling: {case}",
        vocabulary=VOCABULARY,
        vocabulary_s=round(forms.vocabulary_seconds, 2),
        **{f"{name}_ms": round(us / 1e3, 2) for name, us in taken.items()},
    )


def bench_gaps(
    args: argparse.Namespace, forms: Forms, engine: BlockPoolBatchEngine, steps: int
) -> None:
    """Steps of eight streams, alone, beside a thread that compiles, and beside one that works as
    long without Python's lock.
    """

    def compile_one() -> None:
        forms.matcher(Compiler(FormConfig()), wanted(wide(300)))

    needed = processor_us(compile_one, 3)
    rounds = int(10_000 * needed / processor_us(lambda: digest(10_000), 3))
    works = {"alone": lambda: None, "beside": compile_one, "without_lock": lambda: digest(rounds)}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    insert(engine, [None] * MEMBERS, 3 * steps + 4)
    with ThreadPoolExecutor(1) as other:
        while len(engine):
            name = min(works, key=lambda name: len(seconds[name]))
            working = other.submit(works[name])
            start = time.perf_counter()
            count = sum(isinstance(event, Token) for event in engine.next())
            taken = time.perf_counter() - start
            working.result()
            if count == MEMBERS:
                seconds[name].append(taken)
    report(
        args,
        "forms",
        "steps of eight streams beside a thread that compiles",
        vocabulary=VOCABULARY,
        steps=len(seconds["alone"]),
        compile_ms=round(needed / 1e3, 1),
        **{f"{name}_ms": round(statistics.median(s) * 1e3, 1) for name, s in seconds.items()},
        **{
            f"{name}_p90_ms": round(sorted(s)[len(s) * 9 // 10] * 1e3, 1)
            for name, s in seconds.items()
        },
    )


def digest(rounds: int) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", b"form", b"salt", rounds)


if __name__ == "__main__":
    args = options(__doc__ or "")
    rounds, times, tokens = (1, 20, 6) if args.quick else (9, 200, 26)
    forms = Forms(VOCABULARY)
    engine = BlockPoolBatchEngine.open(
        llama(128, 2, 2, 1, vocab=VOCABULARY), pool_bytes=400_000_000
    )
    for rows in (1, MEMBERS):
        bench_mask(args, forms, rows, rounds, times)
    bench_steps(args, forms, engine, rounds, tokens)
    bench_forced(args, forms, engine, rounds)
    bench_neighbour(args, forms, engine.model, 1_800 if args.quick else 18_000)
    for case, schema in SCHEMAS.items():
        bench_compile(args, forms, schema, case, rounds)
    bench_gaps(args, forms, engine, 4 * tokens)
