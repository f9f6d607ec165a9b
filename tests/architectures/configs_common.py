"""Parts that the small configs share. mlx-lm's ModelArgs take the keys that they know and leave
the others.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

WINDOW = 32
FULL, SLIDING = "full_attention", "sliding_attention"

SMALL: Config = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}

# Three layers that slide and one that does not.
ALTERNATING: Config = {
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING],
}

# Dense in the first layer, experts in the others.
EXPERTS: Config = {
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

# Multi-head latent attention: the cache has one head of latents (key) and of rope positions
# (value).
LATENT: Config = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

YARN: Config = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


# What makes rows of at least 32 numbers of those of 16, as quantised blocks need.
TWICE = (
    "hidden_size",
    "d_model",
    "n_embd",
    "model_dim",
    "hidden_dim",
    "block_dim",
    "kv_channels",
    "long_factor",
    "short_factor",
)
THIRTY_TWO = (
    "head_dim",
    "global_head_dim",
    "swa_head_dim",
    "swa_v_head_dim",
    "index_head_dim",
    "v_head_dim",
    "hidden_size_per_head",
    "kv_lora_rank",
)


def wide(config: Config) -> Config:
    """The same model with keys and values of a multiple of 32 numbers, except for the positions
    beside a latent.
    """
    found = config | {key: wide(value) for key, value in config.items() if isinstance(value, dict)}
    found |= {key: config[key] * 2 for key in TWICE if key in config} | {
        key: 32 for key in THIRTY_TWO if key in config
    }
    if "qk_nope_head_dim" in config:
        found["qk_nope_head_dim"] = 32 - config["qk_rope_head_dim"]
    # It has half the hidden size of the others, beside its large vocabulary.
    return found | {"num_attention_heads": 2} if config.get("model_type") == "phi3small" else found


def family(common: Config, **own: Config) -> dict[str, Config]:
    """Configs by model type: SMALL, then what the family shares, then each one's own."""
    return {
        name: {**SMALL, **common, **changes, "model_type": name} for name, changes in own.items()
    }


def wrapped(name: str, text: Config, text_type: str | None = None, **own: Any) -> dict[str, Config]:
    """The config of a wrapper around a text model; `text_type` where the text model is another
    module of mlx-lm.
    """
    inner = {**SMALL, **text, "model_type": text_type or name}
    return {
        name: {
            "model_type": name,
            "vocab_size": SMALL["vocab_size"],
            "text_config": inner,
            "torch_dtype": "float32",
            **own,
        }
    }
