"""What keys and values in 8 or 4 bits do to answers: those of the demo model, and the tool calls of
a small model.

Compared with the same model and keys and values as it computes them, in float32. The demo model
answers the questions that it was not trained on, after a system message of some hundred tokens. The
small model calls tools for some turns: each call has to copy a number that an earlier result named,
its own calls stay in its context, and no result depends on them.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from demo.conversations import Conversations, Message
from demo.tokenizer import IM_END, IM_START, encode
from measure import options_parser, report
from mlx_lm.generate import StopSequences
from tokenizers import Tokenizer
from tool_calls import Session, Verdict, judge, session

from mlx_blockpool.config import KVBits
from mlx_blockpool.demo import model_path
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.opening import open_caches
from mlx_blockpool.engine.request import Request, Token
from mlx_blockpool.kv.prompt_cache import make_prompt_cache

CALLER = Path(__file__).parent / "data/caller"
FORMS = {
    "off": None,
    "8": KVBits(8, 8),
    "keys 8, values 4": KVBits(8, 4),
    "keys 4, values 8": KVBits(4, 8),
    "4": KVBits(4, 4),
}
POOL_BYTES = 64 << 20
# A call that is longer than it should be is cut off after as many tokens more.
SPARE_TOKENS = 8
# As many sessions are played together.
AT_A_TIME = 10
QUESTIONS, SESSIONS, COMPARED_SESSIONS = 60, 24, 6
# As the server computes prompts.
CHUNK_TOKENS = 512


class Subject:
    """A model in float32, its tokenizer, and a pool for each form of keys and values."""

    def __init__(self, folder: Path) -> None:
        self.model = mlx_lm.load(str(folder))[0]
        self.model.set_dtype(mx.float32)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.engines: dict[str, BlockPoolBatchEngine] = {}
        for form, bits in FORMS.items():
            opened = open_caches(self.model, POOL_BYTES, bits=bits)
            assert opened.prefix.arena.spec.bits == bits, (
                f"{form}: keys and values are in {opened.prefix.arena.spec.bits}"
            )
            self.engines[form] = BlockPoolBatchEngine(self.model, opened)

    def caches(self, form: str) -> list[Any]:
        """Caches of a new sequence in the pool of this form."""
        return make_prompt_cache(self.model, self.engines[form].caches.prefix.arena)

    def logits(self, tokens: list[int], caches: list[Any]) -> mx.array:
        """Logits [tokens, vocabulary], computed in chunks."""
        parts = []
        for start in range(0, len(tokens), CHUNK_TOKENS):
            parts.append(
                self.model(mx.array([tokens[start : start + CHUNK_TOKENS]]), cache=caches)[0]
            )
            mx.eval(parts[-1])
        return mx.concatenate(parts)


def divergences(exact: mx.array, other: mx.array) -> list[float]:
    """KL(exact || other) in nats at each position, from logits [positions, vocabulary]."""
    p, q = (logits - mx.logsumexp(logits, axis=-1, keepdims=True) for logits in (exact, other))
    found: list[float] = (mx.exp(p) * (p - q)).sum(-1).tolist()
    return found


class Compared:
    """What one form did to logits where the model is to write."""

    def __init__(self) -> None:
        self._divergences: list[float] = []
        self._agree: list[bool] = []

    def add(self, exact: mx.array, other: mx.array) -> None:
        self._divergences += divergences(exact, other)
        self._agree += (mx.argmax(exact, -1) == mx.argmax(other, -1)).tolist()

    def figures(self) -> dict[str, float]:
        return {
            "tokens": len(self._agree),
            "kl_mean": float(f"{statistics.mean(self._divergences):.2g}"),
            "kl_p99": float(f"{np.quantile(self._divergences, 0.99):.2g}"),
            "kl_most": float(f"{max(self._divergences):.2g}"),
            "same_token": round(statistics.mean(self._agree), 5),
        }


def compare(
    subject: Subject, messages: Iterable[Message], compared: dict[str, Compared]
) -> list[str]:
    """Compare all forms where the model is to write, given what it is to write.

    Returns the forms that would write just that.
    """
    tokens, flags = encode(subject.tokenizer, messages)
    where = [i for i, flag in enumerate(flags[1:]) if flag]
    logits = {
        form: subject.logits(tokens[:-1], subject.caches(form))[mx.array(where)] for form in FORMS
    }
    for form in FORMS:
        compared[form].add(logits["off"], logits[form])
    expected = [tokens[i + 1] for i in where]
    return [form for form in FORMS if mx.argmax(logits[form], -1).tolist() == expected]


def bench_questions(args: argparse.Namespace, questions: int) -> None:
    subject, conversations = Subject(Path(model_path())), Conversations(random.Random(7))
    pairs = random.Random(3).sample(
        conversations.held_out, min(questions, len(conversations.held_out))
    )
    compared, right = {form: Compared() for form in FORMS}, Counter[str]()
    for question, answer in pairs:
        system = conversations.draw("long")[0]
        right.update(
            compare(subject, [system, ("user", question), ("assistant", answer)], compared)
        )
    for form in FORMS:
        report(
            args,
            "answers",
            f"questions, {form}",
            questions=len(pairs),
            right=right[form],
            **compared[form].figures(),
        )


class Played:
    """A session with the calls that the model writes, whose tokens stay in the prompts of later
    turns.
    """

    def __init__(self, tokenizer: Tokenizer, made: Session) -> None:
        self.verdicts: list[Verdict] = []
        self._tokenizer, self._made = tokenizer, made
        (self._end,) = tokenizer.encode(IM_END).ids
        self._tokens: list[int] = tokenizer.encode(f"{IM_START}system\n{made.system}{IM_END}").ids

    def request(self, turn: int) -> Request:
        text = f"\n{IM_START}user\n{self._made.turns[turn].user}{IM_END}\n{IM_START}assistant\n"
        self._tokens += self._tokenizer.encode(text).ids
        most = len(self._tokenizer.encode(self._made.turns[turn].call).ids) + SPARE_TOKENS
        return Request(list(self._tokens), most, stop=StopSequences([[self._end]]))

    def reply(self, turn: int, written: list[int]) -> None:
        written = [token for token in written if token != self._end]
        made = self._made.turns[turn]
        self.verdicts.append(
            judge(self._tokenizer.decode(written, skip_special_tokens=False), made.call)
        )
        text = f"{IM_END}\n{IM_START}tool\n{made.result}{IM_END}"
        self._tokens += written + self._tokenizer.encode(text).ids


def play(subject: Subject, sessions: list[Session], form: str) -> list[list[Verdict]]:
    """All sessions at a time, greedily, turn by turn: what the engine caches of one turn is the
    prefix of the next.
    """
    engine, played = subject.engines[form], [Played(subject.tokenizer, made) for made in sessions]
    for turn in range(len(sessions[0].turns)):
        uids = engine.insert_all([each.request(turn) for each in played])
        written: dict[int, list[int]] = {uid: [] for uid in uids}
        while engine.sequences:
            for event in engine.next():
                if isinstance(event, Token):
                    written[event.uid].append(event.token)
        for each, uid in zip(played, uids, strict=True):
            each.reply(turn, written[uid])
    return [each.verdicts for each in played]


def bench_calls(
    args: argparse.Namespace, folder: Path, seeds: int, compared_seeds: int, turns: int
) -> None:
    """Calls of `seeds` sessions; divergences, which take as long again, of the first
    `compared_seeds`.
    """
    subject = Subject(folder)
    sessions = [session(random.Random(f"held out {seed}"), turns) for seed in range(seeds)]
    compared = {form: Compared() for form in FORMS}
    for made in sessions[:compared_seeds]:
        compare(subject, made.messages(), compared)
    for form in FORMS:
        verdicts = [
            v
            for start in range(0, seeds, AT_A_TIME)
            for v in play(subject, sessions[start : start + AT_A_TIME], form)
        ]
        counts = {
            name: subject.engines[form].counts[name] for name in ("prompt_tokens", "decode_steps")
        }
        report(
            args,
            "answers",
            f"tool calls, {form}",
            **summary(verdicts),
            **compared[form].figures(),
            **counts,
        )


def summary(sessions: list[list[Verdict]]) -> dict[str, Any]:
    """Shares of all calls; sessions without a wrong call; the median of the first wrong turn of
    the others, from 1.
    """
    calls = [verdict for verdicts in sessions for verdict in verdicts]
    first = [
        [verdict.right for verdict in verdicts].index(False) + 1
        for verdicts in sessions
        if not all(v.right for v in verdicts)
    ]
    return {
        "sessions": len(sessions),
        "turns": len(sessions[0]),
        **{
            name: round(statistics.mean(getattr(v, name) for v in calls), 4)
            for name in Verdict._fields
        },
        "faultless": len(sessions) - len(first),
        "first_wrong_turn": statistics.median(first) if first else None,
    }


def main() -> None:
    parser = options_parser(__doc__ or "")
    parser.add_argument(
        "--model",
        type=Path,
        default=CALLER,
        help="folder of the model that calls tools (default: %(default)s)",
    )
    args = parser.parse_args()
    bench_questions(args, 4 if args.quick else QUESTIONS)
    bench_calls(args, args.model, *((2, 1, 4) if args.quick else (SESSIONS, COMPARED_SESSIONS, 20)))


if __name__ == "__main__":
    main()
