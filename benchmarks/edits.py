"""Work for a model that edits: Python files of the standard library with one name replaced, and
prose that is written once.

The prompts are those of editor.py, in tokens of a byte-level BPE made from the same texts. Parts of
files begin with a function or class, and in them the last SPAN tokens always say what comes next,
as the model needs it.
"""

from __future__ import annotations

import ast
import functools
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from editor import BOS, END, NUM_CODES, NUM_SPECIAL, RENAME, SPAN
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
NUM_FILES = 100
FEWEST_USES = 4
NEW_NAMES = ("value", "result", "name", "item", "data", "string", "number", "path")
# In characters, more or less: how much of a file is looked at for a part of it.
LONGEST_TOKEN = 12
WORDS = r" ?[A-Za-z_][A-Za-z0-9_]*|[0-9]|\n+ *| ?[^\sA-Za-z0-9_]+| +"


@dataclass(frozen=True)
class Work:
    """A prompt, and the `reply` that the model writes by itself; its last token is END."""

    name: str
    prompt: list[int]
    reply: list[int]


def edits(lengths: list[int]) -> list[Work]:
    """An edit of about each length in tokens, each of another file."""
    paths = iter(_paths())
    return [next(work for path in paths for work in _edits(path, length)) for length in lengths]


def prose(length: int, num: int = 1) -> list[Work]:
    """Parts of Python's manual.

    A prompt has other tokens for them, which the model reads alike: a reply repeats only itself.
    """
    tokens = _encode(_manual())
    parts = (tokens[start : start + length - 1] for start in range(0, len(tokens), length))
    chosen = [part for part in parts if _decides(part)][:num]
    return [
        Work(
            f"manual, part {i + 1}",
            _prompt("The manual", [], [t + NUM_CODES for t in part]),
            [*part, END],
        )
        for i, part in enumerate(chosen)
    ]


def _paths() -> list[Path]:
    return [path for path in sorted(LIBRARY.glob("*.py")) if path.read_bytes().isascii()][
        :NUM_FILES
    ]


def _manual() -> str:
    values = [
        value
        for node in ast.walk(ast.parse((LIBRARY / "pydoc_data" / "topics.py").read_text()))
        for value in _texts(node)
    ]
    return "\n".join(values)


def _texts(node: ast.AST) -> list[str]:
    values = node.values if isinstance(node, ast.Dict) else []
    return [
        v.value
        for v in values
        if isinstance(v, ast.Constant) and isinstance(v.value, str) and v.value.isascii()
    ]


@functools.cache
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_CODES,
        special_tokens=[f"<{i}>" for i in range(NUM_SPECIAL)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*(path.read_text() for path in _paths()), _manual()], trainer)
    return made


def _encode(text: str) -> list[int]:
    return list(tokenizer().encode(text).ids)


def _prompt(name: str, renamed: list[tuple[int, int]], tokens: list[int]) -> list[int]:
    header = _encode(
        f"{name} of Python's standard library, with all that stands in it, and then the end:\n\n"
    )
    assert len(header) >= SPAN, f"{len(header)} tokens of the header >= {SPAN}"
    return [
        BOS,
        *(t for old, new in renamed for t in (RENAME, old, new)),
        *header,
        *tokens,
        END,
        *header,
    ]


def _decides(tokens: list[int]) -> bool:
    """Whether the last SPAN tokens always say which one comes next."""
    following = {}
    spans = (tuple(tokens[i - SPAN : i]) for i in range(SPAN, len(tokens)))
    return all(
        following.setdefault(span, token) == token
        for span, token in zip(spans, tokens[SPAN:], strict=True)
    )


def _edits(path: Path, length: int) -> Iterator[Work]:
    """The parts of a file that have about `length` tokens, each with its most frequent variable
    renamed.
    """
    text = path.read_text()
    variables = _variables(text)
    for found in re.finditer("^(?:def|class) ", text, re.MULTILINE):
        start = found.start()
        part = tokenizer().encode(text[start : start + LONGEST_TOKEN * length])
        if len(part.ids) < length:
            continue
        end = text.rindex("\n", 0, start + part.offsets[length - 1][1]) + 1
        work = _edit(path.name, text[start:end], variables)
        if work is not None:
            yield work


def _variables(text: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(text)))
    assigned = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return (assigned | {node.arg for node in nodes if isinstance(node, ast.arg)}) - {"self", "cls"}


def _edit(name: str, text: str, variables: set[str]) -> Work | None:
    tokens = _encode(text)
    uses = Counter(re.findall(r"\w+", text))
    if not _decides(tokens):
        return None
    for old in sorted(variables & uses.keys(), key=lambda word: (-uses[word], word)):
        for new in NEW_NAMES:
            pairs = _pairs(old, new)
            if uses[old] < FEWEST_USES or uses[new] or pairs is None:
                continue
            edited = _encode(re.sub(rf"\b{old}\b", new, text))
            if [dict(pairs).get(token, token) for token in tokens] == edited:
                return Work(
                    f"{name}: {old} -> {new}",
                    _prompt(f"The file {name}", pairs, tokens),
                    [*edited, END],
                )
    return None


def _pairs(old: str, new: str) -> list[tuple[int, int]] | None:
    """The tokens of both names, without and with a space before them; None where one takes
    several tokens.
    """
    forms = [(_encode(f"{space}{old}"), _encode(f"{space}{new}")) for space in ("", " ")]
    return (
        [(a[0], b[0]) for a, b in forms] if all(len(a) == len(b) == 1 for a, b in forms) else None
    )
