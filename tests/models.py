"""Tiny models of real mlx-lm architectures, random weights, float32."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import unattachable
from mlx.utils import tree_flatten, tree_map
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

# mlx-lm finds the code of a model by its type.
sys.modules["mlx_lm.models.unattachable"] = unattachable

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# As Qwen's tokenizers have them: added, but not special.
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# Logits of a random model that are moved, by token.
ENDING = {'"': 4.0, "}": 4.0, "]": 4.0, "<|im_end|>": 4.0, "<think>": -20.0}

SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "vocab_size": 131,
}
# Two queries to each key.
GROUPED = {"num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "model_type": "llama", "num_hidden_layers": 2, "torch_dtype": "float32"},
    "qwen2": {
        **SMALL,
        **GROUPED,
        "model_type": "qwen2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "torch_dtype": "float32",
    },
    "gemma3_text": {
        **SMALL,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 300,
        "sliding_window_pattern": 2,
        "torch_dtype": "float32",
    },
    "gpt_oss": {
        **SMALL,
        **GROUPED,
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "torch_dtype": "float32",
    },
    "lfm2": {
        "model_type": "lfm2",
        "vocab_size": 131,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 48,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
        "torch_dtype": "float32",
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {
            **SMALL,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "linear_conv_kernel_dim": 4,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": False,
        },
        "torch_dtype": "float32",
    },
    "gemma2": {
        **SMALL,
        **GROUPED,
        "model_type": "gemma2",
        "num_hidden_layers": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "torch_dtype": "float32",
    },
    "unattachable": {
        **SMALL,
        **GROUPED,
        "model_type": "unattachable",
        "num_hidden_layers": 2,
        "head_dim": 16,
        "torch_dtype": "float32",
    },
    "phi": {
        "model_type": "phi",
        "vocab_size": 131,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "torch_dtype": "float32",
    },
}


def make_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """The model of CONFIGS[name] with `changes`; the same weights for the same seed."""
    config = {**CONFIGS[name], **changes}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    # Untrained weights give nearly equal logits; wider ones give each prompt its own clear answer.
    model.update(
        tree_map(
            lambda p: mx.random.normal(p.shape) * 0.35 if p.ndim > 1 else p, model.parameters()
        )
    )
    mx.eval(model.parameters())
    model.eval()
    return model


def save_model(folder: Path, name: str, seed: int = 0, **changes: Any) -> Path:
    """A model folder that mlx_lm.load and both servers take: weights, config and a tokenizer of
    single ASCII characters.
    """
    changes = {"vocab_size": character_tokenizer().get_vocab_size(), **changes}
    return write_model(folder, make_model(name, seed, **changes), {**CONFIGS[name], **changes})


def write_model(
    folder: Path,
    model: Any,
    config: dict[str, Any],
    template: str = CHAT_TEMPLATE,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """The folder of a model: weights, config.json, and a tokenizer with a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    (folder / "config.json").write_text(json.dumps(config))
    (tokenizer or character_tokenizer()).save(str(folder / "tokenizer.json"))
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


def save_endless(folder: Path, seed: int = 0) -> Path:
    """save_model() of a llama that does not end a reply by itself, where the likeliest token is
    drawn.
    """
    return without(save_model(folder, "llama", seed), "<|im_end|>")


def without(folder: Path, *tokens: str) -> Path:
    """A saved llama, changed so that none of these tokens is the likeliest."""
    weights = mx.load(str(folder / "model.safetensors"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name, array in weights.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            for token in tokens:
                array[tokenizer.token_to_id(token)] = 0
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def make_ending(tokenizer: Tokenizer, seed: int = 0) -> Any:
    """A random phi that ends what it writes: what closes a string, a list or an object, and the end
    of a turn, is likelier.

    Of mlx-lm's models phi has biases in its last layer.
    """
    model = make_model("phi", seed, vocab_size=tokenizer.get_vocab_size())
    biases = [0.0] * tokenizer.get_vocab_size()
    for text, bias in ENDING.items():
        biases[tokenizer.token_to_id(text)] = bias
    model.lm_head.bias = mx.array(biases)
    mx.eval(model.parameters())
    return model


def save_ending(folder: Path, template: str = CHAT_TEMPLATE, seed: int = 0) -> Path:
    """make_ending() with byte_tokenizer() in a model folder."""
    tokenizer = byte_tokenizer()
    config = {**CONFIGS["phi"], "vocab_size": tokenizer.get_vocab_size()}
    return write_model(folder, make_ending(tokenizer, seed), config, template, tokenizer)


def byte_tokenizer() -> Tokenizer:
    """A BPE over all bytes with some merges as JSON has them, and the tokens of thinking and
    calls: it can write any text.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    texts = [
        '{"name": "value", "number": 10, "items": [true, false, null]}',
        '{"name":"value","number":10,"items":[true,false,null]}',
    ]
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        texts, BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return tokenizer


def character_tokenizer() -> Tokenizer:
    """A byte-level BPE without merges: what is generated tokenizes back to the same ids,
    whatever the model says.
    """
    # Byte-level BPE writes the space and the newline as these letters.
    alphabet = [chr(c) for c in range(33, 127)] + ["\u0120", "\u010a"]
    tokenizer = Tokenizer(BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer
