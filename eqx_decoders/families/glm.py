"""GLM-4 (GLM Team 2024): half of each head is rotated, in neighboring pairs; biases of queries, keys and values."""

from eqx_decoders.families._glm import FUSED_MLP, SETTINGS, glm, glm_sizes
from eqx_decoders.families.common import llama_weights
from eqx_decoders.families.hf_table import Family


FAMILY = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    settings=SETTINGS,
    build=glm,
    weights=llama_weights(mlp=FUSED_MLP),
)

_9B = glm_sizes(
    embed_dim=4096, num_layers=40, num_heads=32, mlp_dim=13_696, eps=1.5625e-7, attention_bias=True,
)  # fmt: skip

MODELS = {"glm4-9b": lambda: glm(_9B)}
