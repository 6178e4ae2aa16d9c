"""GLM-4 and GLM-Edge (GLM Team 2024): a part of each head is rotated, in neighboring pairs; fused MLPs."""

import functools

from eqx_decoders.families._glm import FUSED_MLP, SETTINGS, glm, glm_sizes
from eqx_decoders.families.common import llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.layers.rope import Rope


FAMILY = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    settings=SETTINGS,
    build=glm,
    weights=llama_weights(mlp=FUSED_MLP),
)

_9b = functools.partial(glm_sizes, embed_dim=4096, num_layers=40, num_heads=32, mlp_dim=13_696, eps=1.5625e-7)
_edge = functools.partial(glm_sizes, vocab_size=59_264, eps=1e-5)
_EDGE_ROPE = Rope(pairing="interleaved")

MODELS = {
    "glm4-9b": lambda: glm(_9b(attention_bias=True)),
    "glm4-9b-1m": lambda: glm(_9b(attention_bias=True, num_kv_heads=4)),
    "glm-edge-1.5b": lambda: glm(
        _edge(embed_dim=2048, num_layers=28, num_heads=16, num_kv_heads=4, mlp_dim=6144), rope=_EDGE_ROPE
    ),
    "glm-edge-4b": lambda: glm(
        _edge(embed_dim=3072, num_layers=40, num_heads=24, num_kv_heads=6, mlp_dim=8192), rope=_EDGE_ROPE
    ),
}
