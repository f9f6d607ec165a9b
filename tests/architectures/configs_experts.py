"""Models with experts whose every layer attends to all tokens, to a window or to a chunk."""

from __future__ import annotations

from .configs_common import (
    ALTERNATING,
    EXPERTS,
    FULL,
    LATENT,
    SLIDING,
    WINDOW,
    YARN,
    Config,
    family,
    wrapped,
)

BAILING: Config = {
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "use_qk_norm": True,
}

PLAIN = family(
    EXPERTS,
    Klear={"mlp_only_layers": [0], "decoder_sparse_step": 1},
    bailing_moe=BAILING,
    dbrx={
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    deepseek={},
    dots1={},
    ernie4_5_moe={
        "use_bias": False,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    glm4_moe={"rope_scaling": None, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    granitemoe={
        "logits_scaling": 2.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
    },
    hunyuan={
        "num_hidden_layers": 4,
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    llama4_text={
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 0, 1, 0],
        "use_qk_norm": True,
    },
    minimax={"rotary_dim": 8, "shared_intermediate_size": 32},
    mixtral={},
    olmoe={},
    phimoe={
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * 8,
            "short_factor": [1.0] * 8,
            "long_mscale": 1.24,
            "short_mscale": 1.24,
            "original_max_position_embeddings": 4096,
        }
    },
    phixtral={"num_vocab": 131, "model_dim": 64, "num_heads": 4, "num_layers": 2, "rotary_dim": 8},
    qwen2_moe={},
    qwen3_moe={"mlp_only_layers": [0], "decoder_sparse_step": 1},
    solar_open={"partial_rotary_factor": 0.5},
)

LATENT_EXPERTS = family(
    {**EXPERTS, **LATENT},
    deepseek_v2={"topk_method": "greedy", "rope_scaling": YARN},
    deepseek_v3={"rope_scaling": YARN},
    glm4_moe_lite={},
    mistral4={"rope_parameters": {**YARN, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}},
)

# CacheList: latents, and what an indexer keeps to choose the 16 tokens that a query attends to.
INDEXER: Config = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 16}
INDEXED = family(
    {**EXPERTS, **LATENT, **INDEXER},
    deepseek_v32={"rope_scaling": YARN},
    glm_moe_dsa={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
)

# CacheList of two attentions a layer; longcat_flash_ngram has one more cache, of token ids, before
# the first layer.
LONGCAT = family(
    {
        **LATENT,
        "num_layers": 2,
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "zero_expert_num": 2,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "routed_scaling_factor": 1.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    longcat_flash={},
    longcat_flash_ngram={"ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2},
)

WINDOWED = family(
    {**EXPERTS, **ALTERNATING},
    afmoe={"num_dense_layers": 1},
    exaone_moe={"is_moe_layer": [False, True, True, True]},
    gpt_oss={"intermediate_size": 32},
    laguna={},
    mellum={"rope_parameters": {FULL: {"rope_theta": 10000.0}, SLIDING: {"rope_theta": 1000.0}}},
    mimo_v2_flash={
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "v_head_dim": 12,
        "swa_head_dim": 20,
        "swa_v_head_dim": 8,
        "partial_rotary_factor": 0.5,
    },
    step3p5={
        "num_attention_groups": 2,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "moe_layers_enum": "1,2,3",
        "attention_other_setting": {"num_attention_heads": 2, "num_attention_groups": 1},
    },
)

# Window, compressed groups of four tokens, and an indexer over them; the last two layers read what
# layer 1 keeps. Sizes that no block of its fake quantisation divides: rounding would turn tiny
# differences into large ones.
DEEPSEEK_V41 = family(
    EXPERTS,
    deepseek_v41={
        "num_hidden_layers": 4,
        "head_dim": 24,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
        "sliding_window": WINDOW,
        "compress_ratios": [0, 4, 4, 4],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 2],
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
        "index_n_heads": 2,
        "index_head_dim": 24,
        "index_topk": 8,
    },
)

WRAPPED: dict[str, Config] = {
    **wrapped("kimi_k25", {**EXPERTS, **LATENT}, "kimi_k2"),
    **wrapped("kimi_vl", {**EXPERTS, **LATENT}, "deepseek_v3"),
    **wrapped(
        "llama4",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
        "llama4_text",
    ),
    **wrapped(
        "minimax_m3_vl",
        {
            **EXPERTS,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 32,
            "rotary_dim": 8,
            "moe_layer_freq": [0, 1, 1],
            "sparse_attention_freq": [0, 1, 1],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 8,
            "index_topk_blocks": 3,
        },
        "minimax_m3_text",
    ),
    **wrapped(
        "muse_spark",
        {
            **EXPERTS,
            **ALTERNATING,
            "num_shared_experts": 0,
            "post_norm_eps": 1e-8,
            "rope_parameters": {"rope_theta": 10000.0},
            "layer_rope_theta": [10000.0, 0.0, 10000.0, 10000.0],
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.5,
            "moe_hidden_size": 48,
        },
        "muse_spark_text",
    ),
    **wrapped(
        "qwen3_vl_moe",
        {**EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 1},
        "qwen3_vl_moe_text",
    ),
}

WITH_EXPERTS = {
    **PLAIN,
    **LATENT_EXPERTS,
    **INDEXED,
    **LONGCAT,
    **WINDOWED,
    **DEEPSEEK_V41,
    **WRAPPED,
}
