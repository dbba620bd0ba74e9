"""Which mini models there are: one line or a few for each architecture of llama.cpp that has experts."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.miniarch.keys import (
    BASE,
    BLOCKS,
    CLAMPS,
    CONNECTIONS,
    DEEPSEEK4,
    DELTA,
    EQUAL_HEADS,
    GEMMA4,
    GLM5,
    GROUPS,
    HY_V4,
    HYBRID,
    INDEXER,
    KDA,
    LATENT,
    LATENT_WINDOW,
    LAYER_NORM,
    LEAD,
    MAMBA,
    N_FF,
    NEMOTRON,
    NORMED,
    PREDICTION,
    QWEN4,
    SCALES,
    SECTIONS,
    SHARED,
    SHARED_WIDTH,
    SIGMOID,
    SITU,
    WINDOW,
    WINDOWS,
    Keys,
)

Quants = tuple[str, str, str]
"""Types of the gate, up and down matrices of all experts; one fused matrix takes the gate's."""


@dataclass(frozen=True)
class Mini:
    """One model: keys over `BASE`, and the types of its experts.

    Of the tensors that llama.cpp knows for it, it lacks those of `OPTIONAL` that are not in `optional`, and `without`
    (all patterns). `fused`: gate and up are one matrix. `dense`: layers that have no router although llama.cpp lets
    them have one. `embedding`: spread of the token embedding, small where the graph scales it up.
    """

    architecture: str
    keys: Keys = field(default_factory=dict)
    quants: Quants = ("Q8_0", "Q8_0", "Q8_0")
    without: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    fused: bool = False
    dense: tuple[int, ...] = ()
    embedding: float = 1.0

    @property
    def metadata(self) -> Keys:
        """All keys."""
        return BASE | self.keys

    @property
    def n_expert(self) -> int:
        return int(str(self.metadata["expert_count"]))

    @property
    def n_expert_used(self) -> int:
        return int(str(self.metadata["expert_used_count"]))


OPTIONAL = (
    "*.scale",
    "*.input_scale",
    "*.attn_q.bias",
    "*.attn_k.bias",
    "*.attn_v.bias",
    "*.attn_output.bias",
    "dense_2*",
)
"""Tensors that most models lack."""

QKV_BIAS = ("*.attn_q.bias", "*.attn_k.bias", "*.attn_v.bias")
ATTENTION_BIAS = (*QKV_BIAS, "*.attn_output.bias")


PER_EXPERT_SCALES = ("*_exps.scale",)
GEMMA_SCALES = ("*.ffn_gate_inp.scale", "*.ffn_down_exps.scale")


def all_of(kind: str) -> Quants:
    """The same type for all matrices."""
    return (kind, kind, kind)


F32, F16, BF16, Q8, MXFP4 = map(all_of, ("F32", "F16", "BF16", "Q8_0", "MXFP4"))
# As llama.cpp mixes them: the down matrices are more precise.
Q4 = ("Q4_0", "Q4_0", "Q8_0")
K4 = ("Q4_K", "Q4_K", "Q6_K")
K5 = ("Q5_K", "Q5_K", "Q6_K")
IQ4 = ("IQ4_XS", "IQ4_XS", "Q5_K")
IQ3 = ("IQ3_S", "IQ3_S", "Q4_K")
IQ2 = ("IQ2_XS", "IQ2_XS", "IQ3_S")
ODD = ("F16", "Q4_0", "BF16")
"""Three types in a layer."""

MINIS: dict[str, Mini] = {
    "qwen3moe": Mini("qwen3moe", {"expert_count": 16, "expert_used_count": 4}, K4),
    "qwen3moe-scales": Mini("qwen3moe", {}, MXFP4, optional=PER_EXPERT_SCALES),
    "qwen2moe": Mini("qwen2moe", SHARED_WIDTH, Q4, optional=QKV_BIAS),
    "qwen3vlmoe": Mini("qwen3vlmoe", SECTIONS, K5),
    "qwen3next": Mini("qwen3next", DELTA | SHARED_WIDTH, K4),
    "qwen3next-fused": Mini("qwen3next", DELTA | SHARED_WIDTH, Q8, fused=True),
    "qwen35moe": Mini("qwen35moe", DELTA | SHARED_WIDTH | SECTIONS, IQ4),
    "qwen35moe-fused": Mini("qwen35moe", DELTA | SHARED_WIDTH | SECTIONS, K4, fused=True),
    "qwen4exp": Mini("qwen4exp", DELTA | SHARED_WIDTH | SECTIONS | CONNECTIONS | INDEXER | QWEN4, Q8),
    "qwen4exp-fused": Mini("qwen4exp", DELTA | SHARED_WIDTH | SECTIONS | CONNECTIONS | INDEXER | QWEN4, K5, fused=True),
    "olmoe": Mini("olmoe", EQUAL_HEADS, F32),
    "llama": Mini("llama", {}, Q4),
    "mistral3": Mini("mistral3", {}, IQ3),
    "mistral4": Mini("mistral4", LATENT | LEAD | SHARED | NORMED, K4),
    "llama4": Mini("llama4", WINDOW | {"block_count": 4, "interleave_moe_layer_step": 2, "expert_used_count": 1}, K5),
    "deepseek": Mini("deepseek", LEAD | SHARED | NORMED, Q4),
    "deepseek2": Mini("deepseek2", LATENT | LEAD | SHARED | NORMED, K4, without=("*exp_probs_b*",)),
    "deepseek2-groups": Mini("deepseek2", LATENT | LEAD | SHARED | NORMED | SIGMOID | GROUPS, IQ2),
    "deepseek2-fused": Mini("deepseek2", LATENT | LEAD | SHARED | NORMED | SIGMOID, K4, fused=True),
    "deepseek2-ocr": Mini("deepseek2-ocr", LEAD | SHARED | NORMED | EQUAL_HEADS, Q8),
    "deepseek32": Mini("deepseek32", LATENT | LEAD | SHARED | NORMED | SIGMOID | INDEXER, IQ4),
    "deepseek4": Mini("deepseek4", DEEPSEEK4 | SHARED | NORMED | INDEXER | CONNECTIONS, MXFP4),
    "glm4moe": Mini("glm4moe", LEAD | SHARED | NORMED | SIGMOID, K4),
    "glm4moe-mtp": Mini("glm4moe", LEAD | SHARED | NORMED | SIGMOID | PREDICTION, Q8),
    "glm-dsa": Mini("glm-dsa", LATENT | LEAD | SHARED | NORMED | SIGMOID | INDEXER, IQ3),
    "glm5-next": Mini(
        "glm5-next", LATENT | KDA | LEAD | SHARED | NORMED | SIGMOID | INDEXER | CONNECTIONS | GLM5, BF16
    ),
    "gpt-oss": Mini("gpt-oss", WINDOW, MXFP4, optional=ATTENTION_BIAS),
    "granite": Mini("granite", SCALES, Q8),
    "granitemoe": Mini("granitemoe", SCALES | SHARED_WIDTH, K4),
    "granitehybrid": Mini("granitehybrid", SCALES | SHARED_WIDTH | MAMBA | HYBRID, K4),
    "granite_swa": Mini("granite_swa", SCALES | SHARED_WIDTH | WINDOWS, ODD),
    "granite_swa-fused": Mini("granite_swa", SCALES | SHARED_WIDTH | WINDOWS, ODD, fused=True),
    "minicpm": Mini("minicpm", {}, F16, embedding=1 / 12),
    "lfm2moe": Mini("lfm2moe", HYBRID | LEAD | SIGMOID | {"shortconv.l_cache": 3}, Q4),
    "ernie4_5-moe": Mini("ernie4_5-moe", LEAD | SHARED_WIDTH | {"interleave_moe_layer_step": 1}, IQ4),
    "hunyuan-moe": Mini("hunyuan-moe", SHARED_WIDTH, K4),
    "hy_v3": Mini("hy_v3", SHARED_WIDTH | NORMED, IQ3),
    "hy_v3-fused": Mini("hy_v3", SHARED_WIDTH | NORMED, IQ4, fused=True),
    "hy_v4": Mini("hy_v4", LATENT | LEAD | SHARED | NORMED | SIGMOID | INDEXER | CONNECTIONS | HY_V4, K5),
    "bailingmoe": Mini("bailingmoe", SHARED | NORMED, F16),
    "bailingmoe2": Mini("bailingmoe2", LEAD | SHARED | SHARED_WIDTH | NORMED | SIGMOID | GROUPS, K4),
    "bailingmoe3": Mini("bailingmoe3", LATENT | KDA | LEAD | SHARED | NORMED | SIGMOID | CLAMPS, K5),
    "dots1": Mini("dots1", LEAD | SHARED | NORMED | SIGMOID | EQUAL_HEADS, IQ4),
    "dots3note": Mini("dots3note", LATENT | LATENT_WINDOW | LEAD | SHARED | NORMED | SIGMOID | INDEXER, Q8),
    "minimax-01": Mini("minimax-01", {"residual_scale": 1.0, "full_attention_interval": 2}, Q8),
    "minimax-m2": Mini("minimax-m2", SIGMOID, IQ2),
    "minimax-m3": Mini("minimax-m3", LEAD | SHARED | NORMED | SIGMOID | INDEXER | BLOCKS, K4),
    "gemma4": Mini("gemma4", GEMMA4, Q4, optional=GEMMA_SCALES, embedding=1 / 16),
    "gemma4-fused": Mini("gemma4", GEMMA4, K4, optional=GEMMA_SCALES, fused=True, embedding=1 / 16),
    "phimoe": Mini("phimoe", {}, K5, optional=ATTENTION_BIAS),
    "smallthinker": Mini("smallthinker", SIGMOID | WINDOW | {"block_count": 4}, Q4),
    "grovemoe": Mini(
        "grovemoe", {"expert_group_scale": 0.05, "experts_per_group": 2, "expert_chunk_feed_forward_length": N_FF}, K4
    ),
    "arctic": Mini("arctic", {}, IQ3),
    "jamba": Mini("jamba", MAMBA | HYBRID, K4, dense=(0,)),
    "kimi-linear": Mini("kimi-linear", LATENT | KDA | LEAD | SHARED | NORMED | SIGMOID, IQ2),
    "kimi-k3": Mini("kimi-k3", LATENT | KDA | LEAD | SHARED | NORMED | SIGMOID | SITU, MXFP4),
    "afmoe": Mini("afmoe", LEAD | SHARED | NORMED | SIGMOID | WINDOWS, K5, embedding=1 / 16),
    "mellum": Mini("mellum", WINDOWS, Q8),
    "dbrx": Mini("dbrx", LAYER_NORM | {"attention.clamp_kqv": 8.0}, K4),
    "grok": Mini("grok", {"embedding_scale": 1.0}, Q4),
    "exaone-moe": Mini("exaone-moe", LEAD | SHARED | NORMED | SIGMOID | WINDOWS, BF16),
    "cohere2moe-mtp": Mini("cohere2moe", LEAD | LAYER_NORM | WINDOWS | NORMED | PREDICTION | {"logit_scale": 1.0}, Q4),
    "cohere2moe": Mini("cohere2moe", LEAD | LAYER_NORM | WINDOWS | NORMED | {"logit_scale": 1.0}, F16),
    "cohere2moe-fused": Mini("cohere2moe", LEAD | LAYER_NORM | WINDOWS | NORMED | {"logit_scale": 1.0}, Q4, fused=True),
    "laguna": Mini("laguna", LEAD | SHARED_WIDTH | NORMED | SIGMOID | WINDOWS, IQ4),
    "mimo2": Mini("mimo2", WINDOWS | SIGMOID, K4),
    "step35": Mini("step35", WINDOWS | SIGMOID | SHARED_WIDTH | NORMED | CLAMPS, IQ3),
    "maple": Mini("maple", WINDOWS | {"swiglu_clamp_exp": 7.0}, F32),
    "nemotron_h": Mini("nemotron_h", NEMOTRON, Q8),
    "nemotron_h_moe": Mini("nemotron_h_moe", NEMOTRON | {"moe_latent_size": 256}, K4),
    "rnd1": Mini("rnd1", {}, K5),
    "llada-moe": Mini("llada-moe", {}, K4),
}
"""Names are the architecture's, with what is special behind it."""

LEFT_OUT = {
    "bert": "an encoder; only nomic-bert-moe gives this graph experts",
    "nomic-bert": "an encoder without experts that borrows bert's graph",
    "nomic-bert-moe": "an encoder for embeddings: it does not decode",
    "jina-bert-v2": "an encoder without experts that borrows bert's graph",
    "jina-bert-v3": "an encoder without experts that borrows bert's graph",
    "llama-embed": "llama's graph for embeddings: it has no logits",
    "dflash": "a draft model: it needs the hidden states of its target",
    "phi3": "dense; its graph is phimoe's too",
    "lfm2": "dense; its graph is lfm2moe's too",
}
"""Architectures whose graph can build experts and that have no mini model, and why."""
