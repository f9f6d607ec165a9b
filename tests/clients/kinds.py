"""Tiny models of several architectures that answer a client as the demo agent does, so that a
conversation goes on: they call its shell, and answer.

The next token follows from the last one alone, so that each call is the same. What the layers add
is random and too small to change it.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from models import CONFIGS, make_model, write_model
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from benchmarks.demo.agent import FOLDER, NO_SHELL, load_script, replies

KINDS = ("llama", "qwen3_5", "gemma3_text", "gpt_oss")
HIDDEN = 96
CHANGES = {
    "hidden_size": HIDDEN,
    "head_dim": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def save_kind(folder: Path, kind: str, shell: str) -> Path:
    """The folder of a model whose client has a tool `shell`."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    embedding = mx.zeros((size, HIDDEN))
    head = mx.zeros((size, HIDDEN))
    # The last dimension is that of all tokens after which a reply ends.
    embedding[:, HIDDEN - 1] = 100.0
    spoken = [
        r
        for r in replies(load_script())
        if r[0] == NO_SHELL or r[0].removeprefix("<|").startswith(f"{shell} ")
    ]
    dimensions: dict[str, int] = {}
    for reply in spoken:
        for here, following in itertools.pairwise(reply):
            if here in dimensions:
                continue
            dimension = dimensions[here] = len(dimensions)
            token = tokenizer.token_to_id(here)
            embedding[token] = 0.0
            embedding[token, dimension] = 100.0
            head[tokenizer.token_to_id(following), dimension] = 10.0
    head[tokenizer.token_to_id("<|im_end|>"), HIDDEN - 1] = 10.0
    assert len(dimensions) < HIDDEN
    changes: dict[str, Any] = {**CHANGES, "vocab_size": size}
    if "text_config" in CONFIGS[kind]:
        changes = {"text_config": {**CONFIGS[kind]["text_config"], **changes}}
    model = make_model(kind, **changes)
    weights = dict(tree_flatten(model.parameters()))
    for name in weights:
        if name.endswith("embed_tokens.weight"):
            weights[name] = embedding
        elif name.endswith("lm_head.weight"):
            weights[name] = head
        elif weights[name].ndim > 1:
            weights[name] = weights[name] * 0.02
    model.load_weights(list(weights.items()))
    template = AutoTokenizer.from_pretrained(FOLDER).chat_template
    return write_model(folder, model, {**CONFIGS[kind], **changes}, template, tokenizer)
