"""A model that says nothing but what it has read: the tokens that its attention falls on, copied
from its context.

So a reply shows whose keys and values it was computed with. Which token it is depends on the whole
context.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN = 128


def save(folder: Path) -> None:
    """The model's folder, as mlx-lm loads it; tokens are single ASCII characters."""
    # Byte-level BPE writes the space and the newline as these letters.
    alphabet = [chr(c) for c in range(33, 127)] + ["\u0120", "\u010a"]
    tokenizer = Tokenizer(BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        ByteLevel(add_prefix_space=False),
        ByteLevelDecoder(),
    )
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    vocab = tokenizer.get_vocab_size()
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
    }
    config |= {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
    }
    config |= {"tie_word_embeddings": True, "torch_dtype": "float32"}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(weights(config).parameters())),
        {"format": "mlx"},
    )
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**special, "clean_up_tokenization_spaces": False})
    )


def weights(config: dict[str, Any]) -> Any:
    """Embeddings span one part of the hidden space. The first layer writes what it has read into
    the rest, which chooses what the second one copies.
    """
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    vocab = config["vocab_size"]
    basis = mx.linalg.qr(mx.random.normal((HIDDEN, HIDDEN)), stream=mx.cpu)[0]
    embeddings, rest = basis[:vocab], basis[vocab:]
    first, second = model.layers
    model.model.embed_tokens.weight = embeddings * HIDDEN**0.5
    random = [mx.random.normal((HIDDEN, HIDDEN)) * 0.3 for _ in range(6)]
    for layer, (query, key) in ((first, random[:2]), (second, random[2:4])):
        layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight = query, key
        layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
    # Rows of `rest` take anything to the part of the space that says nothing.
    first.self_attn.v_proj.weight = random[4]
    first.self_attn.o_proj.weight = rest.T @ rest @ random[5]
    # What the second layer attends to counts for more than the last token itself.
    second.self_attn.v_proj.weight = embeddings.T @ embeddings
    second.self_attn.o_proj.weight = 8 * mx.eye(HIDDEN)
    mx.eval(model.parameters())
    return model.eval()
