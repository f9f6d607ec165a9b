"""Models whose every layer attends to all tokens or to a window, without experts."""

from __future__ import annotations

from .configs_common import (
    ALTERNATING,
    FULL,
    LATENT,
    SLIDING,
    SMALL,
    WINDOW,
    Config,
    family,
    wrapped,
)

LLAMA_LIKE = family(
    {},
    apertus={"post_norm": True, "qk_norm": True},
    bitnet={},
    cohere={"use_qk_norm": True},
    ernie4_5={"use_bias": False},
    exaone={"num_layers": 2},
    gemma={},
    gemma2={"query_pre_attn_scalar": 16},
    glm={},
    glm4={"partial_rotary_factor": 0.5},
    granite={
        "logits_scaling": 2.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
    },
    helium={},
    hunyuan_v1_dense={},
    internlm2={"bias": False},
    internlm3={},
    mimo={},
    minicpm={"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12.0},
    nanochat={},
    nemotron={"hidden_act": "relu2", "norm_eps": 1e-5},
    olmo2={},
    phi={"partial_rotary_factor": 0.5},
    phi3={},
    plamo={"n_shared_head": 2},
    qwen={"kv_channels": 16},
    qwen2={},
    qwen3={},
    seed_oss={},
    smollm3={"num_hidden_layers": 4},
    stablelm={"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    starcoder2={"norm_epsilon": 1e-5},
    talkie={},
    telechat3={},
)

# As gpt2 and its successors name things.
GPT_LIKE = family(
    {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_ctx": 4096, "n_positions": 4096},
    gpt2={"num_key_value_heads": None},
    gpt_bigcode={"num_key_value_heads": None},
    gpt_neox={"num_key_value_heads": None, "rotary_emb_base": 10000, "rotary_pct": 0.5},
    gptj={"rotary_dim": 8},
    **{"lille-130m": {"block_size": 4096, "n_kv_heads": 2}},
)

LATENT_DENSE = family(
    LATENT,
    minicpm3={
        "dim_model_base": 32,
        "scale_depth": 1.4,
        "scale_emb": 12.0,
        "rope_scaling": {"type": "longrope"},
    },
    youtu_llm={},
)

WINDOWED = family(
    ALTERNATING,
    cohere2={"sliding_window_pattern": 4},
    exaone4={"rope_scaling": None, "sliding_window_pattern": "LLLG"},
    gemma3_text={"query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    llama={},
    ministral3={
        "rope_parameters": {
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        }
    },
    muse_glimmer={},
    olmo3={},
    plamo3={"sliding_window_pattern": 2},
    spark2_5={
        "rope_parameters": {
            FULL: {"rope_theta": 10000.0},
            SLIDING: {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        }
    },
)

# The last two layers read the keys and values of earlier ones; full layers differ from sliding ones
# in heads and head size.
GEMMA4_TEXT: Config = {
    **SMALL,
    **ALTERNATING,
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 131,
}
GEMMA3N_TEXT: Config = {
    **SMALL,
    **ALTERNATING,
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 131,
    "hidden_size_per_layer_input": 8,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0],
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}

# Fewer or more caches than layers.
SHARED_OR_LOOPED = {
    **family(
        {},
        afm7={
            "hidden_dim": 64,
            "num_layers": 4,
            "num_kv_reuse_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        iquestloopcoder={"loop_num": 2, "loop_window_size": WINDOW},
        nanbeige={"num_loops": 2},
        **{
            "nemotron-nas": {
                "num_hidden_layers": 4,
                "block_configs": [
                    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
                    {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
                    {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
                    {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
                ],
            }
        },
    ),
    "gemma4_text": {**GEMMA4_TEXT, "model_type": "gemma4_text"},
}

OTHER = family(
    {},
    olmo={"d_model": 64, "n_layers": 2, "mlp_hidden_size": 96, "n_heads": 4, "embedding_size": 131},
    openelm={
        "num_transformer_layers": 2,
        "model_dim": 64,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4],
        "num_kv_heads": [1, 2],
        "ffn_multipliers": [1.0, 2.0],
    },
    phi3small={
        # It writes to the logits of tokens up to 100351 whatever the vocabulary: a smaller one is a
        # write past the array.
        "vocab_size": 100352,
        "hidden_size": 32,
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 2,
        "blocksparse_vert_stride": 2,
    },
)

WRAPPED: dict[str, Config] = {
    **wrapped(
        "gemma3",
        {**ALTERNATING, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
        "gemma3_text",
    ),
    **wrapped("gemma3n", GEMMA3N_TEXT, "gemma3n_text"),
    **wrapped("gemma4", GEMMA4_TEXT, "gemma4_text"),
    **wrapped("mistral3", {}, "mistral"),
    **wrapped("pixtral", {}, "mistral"),
    **wrapped("qwen2_vl", {}, "qwen2_vl_text"),
    **wrapped("qwen3_vl", {}, "qwen3_vl_text"),
}

DENSE = {
    **LLAMA_LIKE,
    **GPT_LIKE,
    **LATENT_DENSE,
    **WINDOWED,
    **SHARED_OR_LOOPED,
    **OTHER,
    **WRAPPED,
}
