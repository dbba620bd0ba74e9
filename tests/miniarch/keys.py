"""Metadata of mini models: what they share, and groups of keys that several architectures need.

A key is written with the architecture's name before it. Whole numbers become u32, decimals f32, lists arrays of those.
"""

from __future__ import annotations

Value = bool | int | float | str | list[int] | list[float]
Keys = dict[str, Value]

N_VOCAB = 320
N_EMBD = 256
N_EXPERT = 8
N_USED = 2
N_FF = 256
"""Width of one expert. Widths are one block of a K-quant, so that experts can have any type."""

BASE: Keys = {
    "block_count": 3,
    "context_length": 512,
    "embedding_length": N_EMBD,
    "feed_forward_length": N_FF,
    "expert_feed_forward_length": N_FF,
    "expert_count": N_EXPERT,
    "expert_used_count": N_USED,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 64,
    "rope.freq_base": 10000.0,
    "vocab_size": N_VOCAB,
}

LEAD: Keys = {"leading_dense_block_count": 1}
SHARED: Keys = {"expert_shared_count": 1}
SHARED_WIDTH: Keys = {"expert_shared_feed_forward_length": 128}
SIGMOID: Keys = {"expert_gating_func": 2}
NORMED: Keys = {"expert_weights_norm": True, "expert_weights_scale": 1.5}
GROUPS: Keys = {"expert_group_count": 4, "expert_group_used_count": 2}
LAYER_NORM: Keys = {"attention.layer_norm_epsilon": 1e-5}
WINDOW: Keys = {"attention.sliding_window": 16}
WINDOWS: Keys = {**WINDOW, "attention.sliding_window_pattern": [1, 0, 1]}
SECTIONS: Keys = {"rope.dimension_sections": [8, 12, 12, 0]}
SCALES: Keys = {"logit_scale": 2.0, "residual_scale": 0.5, "embedding_scale": 1.5, "attention.scale": 0.1}

EQUAL_HEADS: Keys = {"attention.head_count_kv": 4}
CLAMPS: Keys = {"swiglu_clamp_exp": [0.0, 2.0, 2.0], "swiglu_clamp_shexp": [0.0, 3.0, 3.0]}
PREDICTION: Keys = {"block_count": 4, "nextn_predict_layers": 1}

HYBRID: Keys = {"attention.head_count_kv": [0, 2, 0]}
"""A layer without KV heads is recurrent."""

LATENT: Keys = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 64,
    "attention.kv_lora_rank": 64,
    "attention.key_length": 96,
    "attention.value_length": 64,
    "attention.key_length_mla": 64,
    "attention.value_length_mla": 48,
    "rope.dimension_count": 32,
}
"""Latent attention: a cell holds 64 compressed keys and 32 that are rotated."""

INDEXER: Keys = {"attention.indexer.head_count": 8, "attention.indexer.key_length": 64, "attention.indexer.top_k": 64}

MAMBA: Keys = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 2 * N_EMBD,
    "ssm.state_size": 64,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
}
DELTA: Keys = {**MAMBA, "ssm.inner_size": N_EMBD, "ssm.time_step_rank": 4, "full_attention_interval": 2}
KDA: Keys = {
    **HYBRID,
    "attention.head_count_kv": [0, 1, 0],
    "ssm.conv_kernel": 4,
    "kda.head_dim": 64,
    "kda.gate_lower_bound": -5.0,
}
CONNECTIONS: Keys = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
}

# What single architectures need.
DEEPSEEK4: Keys = {
    "block_count": 4,
    "attention.head_count": 8,
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 64,
    "rope.dimension_count": 32,
    "attention.output_group_count": 8,
    "attention.output_lora_rank": 32,
    "attention.compress_ratios": [0, 0, 4, 128],
    "attention.compress_rope_freq_base": 160000.0,
    "hash_layer_count": 1,
    "swiglu_clamp_exp": 10.0,
    "expert_gating_func": 4,
    **WINDOW,
}
GEMMA4: Keys = {
    **WINDOWS,
    "embedding_length_per_layer_input": 0,
    "attention.key_length_swa": 64,
    "attention.value_length_swa": 64,
    "final_logit_softcapping": 30.0,
}
LATENT_WINDOW: Keys = {
    **WINDOWS,
    "attention.kv_lora_rank_swa": 64,
    "attention.key_length_swa": 96,
    "attention.value_length_swa": 64,
    "attention.key_length_mla_swa": 64,
    "attention.value_length_mla_swa": 48,
    "rope.freq_base_swa": 10000.0,
    "attention.indexer.types": [0, 1, 0],
}
SITU: Keys = {
    "attn_res.block_size": 12,
    "activation.situ_beta": 4.0,
    "activation.situ_linear_beta": 25.0,
    "expert_latent_length": N_EMBD,
}
BLOCKS: Keys = {
    "attention.indexer.head_count": 2,
    "attention.indexer.block_size": 4,
    "attention.indexer.local_blocks": 1,
}
HY_V4: Keys = {"hyper_connection.magnitude": 2.0, "swiglu_clamp_exp": 10.0, "attention.indexer.types": [1, 0, 1]}
GLM5: Keys = {
    "attention.key_length": 64,
    "rope.dimension_count": 0,
    "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True,
}
QWEN4: Keys = {"hyper_connection.low_rank": 8, "attention.compress_ratios": [4, 4, 4]}
NEMOTRON: Keys = {
    **MAMBA,
    **HYBRID,
    **LAYER_NORM,
    **SHARED_WIDTH,
    **NORMED,
    "feed_forward_length": [0, 0, N_FF],
}
