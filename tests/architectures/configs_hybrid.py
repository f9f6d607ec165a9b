"""Models that keep a state of fixed size in some layers or in all: convolutions, state spaces,
linear attention.
"""

from __future__ import annotations

from .configs_common import EXPERTS, FULL, LATENT, SLIDING, WINDOW, Config, family, wrapped

LINEAR = "linear_attention"

# As Qwen3-Next, Qwen3.5 and OLMo hybrid name their gated delta layers.
DELTA: Config = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {
        "type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}

# Kimi delta attention in the layers of kda_layers, counted from 1; latent attention in the others.
KIMI: Config = {
    **EXPERTS,
    **LATENT,
    "num_hidden_layers": 4,
    "num_experts_per_token": 2,
    "model_max_length": 4096,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
    },
}

LFM2: Config = {
    "num_hidden_layers": 3,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "layer_types": ["conv", FULL, "conv"],
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}

LINEAR_ATTENTION = {
    **family(
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "layer_group_size": 2,
            "group_norm_size": 1,
        },
        bailing_hybrid=LATENT,
        bailing_moe_linear={"score_function": "sigmoid", "use_qk_norm": True},
        bailing_moe_v3={**LATENT, "moe_shared_expert_intermediate_size": 32},
    ),
    **family(KIMI, kimi_linear={"head_dim": 24}),
    **family(
        DELTA,
        olmo_hybrid={
            "layer_types": [LINEAR, FULL, LINEAR, FULL],
            "linear_num_value_heads": 2,
            "linear_allow_neg_eigval": True,
        },
        qwen3_5={},
        qwen3_5_moe={**EXPERTS, "num_hidden_layers": 4},
        qwen3_next={
            **EXPERTS,
            "num_hidden_layers": 4,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
        },
    ),
}

CONVOLUTIONS = family(
    LFM2,
    gear={
        "num_hidden_layers": 4,
        "layer_types": ["conv_mixer", FULL, SLIDING, "conv_mixer"],
        "sliding_window": WINDOW,
    },
    lfm2={},
    lfm2_moe={**EXPERTS, "use_expert_bias": True, "num_dense_layers": 1},
)

MAMBA2: Config = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}

STATE_SPACES = family(
    {},
    falcon_h1=MAMBA2,
    granitemoehybrid={
        **EXPERTS,
        **MAMBA2,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 32,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
    },
    jamba={
        **EXPERTS,
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    mamba={
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    mamba2={
        "num_heads": 4,
        "state_size": 8,
        "intermediate_size": 64,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": 4,
    },
    nemotron_h={
        **EXPERTS,
        "hybrid_override_pattern": ["M", "*", "-", "E", "M", "*"],
        "num_hidden_layers": 6,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "moe_shared_expert_intermediate_size": 32,
    },
    plamo2={
        "num_hidden_layers": 4,
        "hidden_size_per_head": 16,
        "mamba_d_state": 8,
        "mamba_num_heads": 4,
        "attention_window_size": WINDOW,
        "full_attention_idx": [],
    },
)

RECURRENT = family(
    {},
    recurrent_gemma={
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    rwkv7={
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
)

# A convolution over keys and values beside the cache of both.
BAICHUAN = family(
    {},
    baichuan_m1={
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "sliding_window_layers": [1, 3],
        "conv_window": 2,
    },
)

HADAMARD: dict[str, Config] = wrapped(
    "prism_hadamard_qwen35",
    {**DELTA, "hidden_size": 128},
    "qwen3_5_text",
    schema_version=2,
    tensor_namespace="mlx-vlm-qwen3_5",
    quantization={"bits": 2, "group_size": 128, "mode": "affine"},
    modules=[
        {
            "path": "model.layers.1.self_attn.q_proj",
            "embedding": False,
            "dtype": "float16",
            "block": 0,
        }
    ],
)

WRAPPED: dict[str, Config] = {
    **wrapped("kimi_k3", {**KIMI, "attn_res_block_size": 2}, "kimi_linear"),
    **wrapped("lfm2-vl", LFM2, "lfm2"),
    **HADAMARD,
}

HYBRID = {**LINEAR_ATTENTION, **CONVOLUTIONS, **STATE_SPACES, **RECURRENT, **BAICHUAN, **WRAPPED}
