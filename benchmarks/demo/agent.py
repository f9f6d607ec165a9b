"""Build the demo agent, a model that calls tools: python -m benchmarks.demo.agent [--out DIR].

A real llama model whose weights are written instead of trained: it follows agent_script.json,
whatever the prompt. The chat template opens each reply with a token for the step and the client's
shell tool, and phrases of the script are tokens of their own. Each next token follows from the last
one and, by one attention head that looks two tokens back, from the step. So its replies are known
and cost next to nothing, while prompts, tools, templates and caches are those of any other model. A
reply that the script does not have, such as one in a form, ends as soon as the form allows it.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer

import mlx_blockpool

from .tokenizer import CALL, CALL_END, IM_END, save_tokenizer, train_tokenizer

# Its weights, and the script that they follow.
FOLDER = Path(__file__).parent / "agent_model"
VOCAB_SIZE = 4096
HIDDEN = 160
HEAD_DIM = 64
LONGEST = 131072
# So small a base makes every pair of dimensions turn fast enough to tell a token from its
# neighbours.
ROPE_THETA = 10.0
# Where the head looks. Its score there is ahead of that of any other token by more than 25.
LOOKS_BACK = 2
SHARPNESS = 8.0
NO_SHELL = "<|no shell|>"

CHAT_TEMPLATE = """\
{%- set state = namespace(shell=none, step=0) -%}
{%- for tool in tools or [] -%}
{%- set name = (tool.function or tool).name -%}
{%- if state.shell is none and name in SHELLS -%}{%- set state.shell = name -%}{%- endif -%}
{%- endfor -%}
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}{%- for part in content or [] -%}{{- part['text'] -}}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- macro begin() -%}
{{- '<|im_start|>assistant\\n' -}}
{{- '<|no shell|>' if state.shell is none else '<|' ~ state.shell ~ ' ' ~ state.step % STEPS ~ '|>' -}}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\\n# Tools\\n' -}}
{%- for tool in tools -%}{{- tool | tojson ~ '\\n' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- begin() ~ text(message['content']) -}}
{%- set state.step = state.step + 1 -%}
{%- for tool_call in message['tool_calls'] or [] -%}
{%- set tool_call = tool_call.function or tool_call -%}
{{- '\\n' if loop.first and message['content'] or not loop.first -}}
{{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' ~ tool_call.arguments | tojson ~ '}\\n</tool_call>' -}}
{%- endfor -%}
{%- else -%}
{{- '<|im_start|>' ~ message['role'] ~ '\\n' ~ text(message['content']) -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- begin() -}}{%- endif -%}
"""  # noqa: E501


def load_script() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (Path(__file__).parent / "agent_script.json").read_text(encoding="utf-8")
    )
    return found


def replies(script: dict[str, Any]) -> Iterator[list[str]]:
    """Every reply as the tokens that it consists of, the one that the template begins it with
    first.
    """
    for shell, arguments in script["shells"].items():
        for number, step in enumerate(script["steps"]):
            opening = f"<|{shell} {number}|>"
            if "answer" in step:
                yield [opening, *step["answer"], IM_END]
                continue
            filled = json.dumps(arguments).replace('"$"', json.dumps(step["run"]))
            call = f'\n{{"name": "{shell}", "arguments": {filled}}}\n'
            yield [opening, f"{step['say']}\n", CALL, call, CALL_END, IM_END]
    yield [NO_SHELL, *script["without_shell"], IM_END]


def make_tokenizer(script: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE, with each token of the script's replies whole."""
    folder = Path(mlx_blockpool.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    phrases = dict.fromkeys(
        phrase for reply in replies(script) for phrase in reply if phrase != IM_END
    )
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return tokenizer


def make_weights(tokenizer: Tokenizer, script: dict[str, Any]) -> dict[str, Any]:
    """Float32 weights by mlx-lm's names.

    Dimensions [0, 64) of the hidden state are openings of replies, [64, 94) other phrases that
    something follows on, 94 an opening bracket, 95 any other token, and [96, 160) the opening that
    stands two tokens back. After any other token the reply ends, or in a form that does not allow
    this, its text, list or object; a text first, because it may contain brackets.
    """
    ids = {phrase: tokenizer.token_to_id(phrase) for reply in replies(script) for phrase in reply}
    size = tokenizer.get_vocab_size()
    embedding, head = np.zeros((size, HIDDEN), np.float32), np.zeros((size, HIDDEN), np.float32)
    dims = _dimensions(script)
    embedding[:, 95] = 1
    for ending, strength in {IM_END: 1, '"': 0.75, "]": 0.5, "}": 0.5}.items():
        head[tokenizer.token_to_id(ending), 95] = strength
    for opening, ending in ("[]", "{}"):
        embedding[tokenizer.token_to_id(opening)] = np.eye(HIDDEN)[94]
        head[tokenizer.token_to_id(ending), 94] = 1
    for phrase, dim in dims.items():
        embedding[ids[phrase]] = np.eye(HIDDEN)[dim]
    for reply in replies(script):
        for here, following in itertools.pairwise(reply):
            head[ids[following], dims[here]] = 1
        if CALL in reply:
            head[ids[reply[3]], 96 + dims[reply[0]]] = 1
    turns = LOOKS_BACK * ROPE_THETA ** -(np.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    # q and k of all tokens are the same vector, k turned so far that position i - 2 meets i as it
    # was.
    strength = np.sqrt(SHARPNESS * np.sqrt(HEAD_DIM))
    value = np.eye(HEAD_DIM, HIDDEN) / np.sqrt(HIDDEN)
    attention = {
        "q_proj.weight": np.zeros((HEAD_DIM, HIDDEN)),
        "q_proj.bias": strength * np.repeat([1, 0], HEAD_DIM // 2),
        "k_proj.weight": np.zeros((HEAD_DIM, HIDDEN)),
        "k_proj.bias": strength * np.concatenate([np.cos(turns), np.sin(turns)]),
        "v_proj.weight": value,
        "v_proj.bias": np.zeros(HEAD_DIM),
        "o_proj.weight": np.eye(HIDDEN, HEAD_DIM, -96),
        "o_proj.bias": np.zeros(HIDDEN),
    }
    layer = {f"self_attn.{name}": weight for name, weight in attention.items()}
    layer |= {f"{name}_layernorm.weight": np.ones(HIDDEN) for name in ("input", "post_attention")}
    layer |= {f"mlp.{name}_proj.weight": np.zeros(shape) for name, shape in _mlp_shapes().items()}
    weights = {f"model.layers.0.{name}": weight for name, weight in layer.items()}
    weights |= {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(HIDDEN),
        "lm_head.weight": 4 * head,
    }
    return {name: mx.array(weight.astype(np.float32)) for name, weight in weights.items()}


def _dimensions(script: dict[str, Any]) -> dict[str, int]:
    """The dimension of each token that something follows on.

    What is called needs none of its own: calls all end alike.
    """
    openings = [reply[0] for reply in replies(script)]
    others = dict.fromkeys(phrase for reply in replies(script) for phrase in reply[1:-1])
    calls = {reply[3] for reply in replies(script) if CALL in reply}
    dims = {phrase: n for n, phrase in enumerate(openings)}
    dims |= {
        phrase: 64 + n
        for n, phrase in enumerate(phrase for phrase in others if phrase not in calls)
    }
    assert len(openings) <= 64, len(openings)
    last = max(dims.values()) + 1
    assert last < 94, last
    return dims | dict.fromkeys(calls, last)


def _mlp_shapes() -> dict[str, tuple[int, int]]:
    return {"gate": (8, HIDDEN), "up": (8, HIDDEN), "down": (HIDDEN, 8)}


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": LONGEST,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": tokenizer.token_to_id(IM_END),
    }


def save(folder: Path) -> None:
    """A folder that mlx_lm.load takes."""
    script = load_script()
    tokenizer = make_tokenizer(script)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        make_weights(tokenizer, script),
        metadata={"format": "mlx"},
    )
    (folder / "config.json").write_text(
        json.dumps(model_config(tokenizer), indent=1) + "\n", encoding="utf-8"
    )
    template = CHAT_TEMPLATE.replace("SHELLS", json.dumps(list(script["shells"]))).replace(
        "STEPS", str(len(script["steps"]))
    )
    save_tokenizer(tokenizer, folder, template, LONGEST)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the demo agent.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write")
    save(parser.parse_args().out)


if __name__ == "__main__":
    main()
