"""GLM-4 and GLM-Edge (GLM Team 2024): a part of each head is rotated, in neighboring pairs; fused MLPs."""

from eqx_decoders.families._glm import FUSED_MLP, SETTINGS, glm
from eqx_decoders.families.common import llama_weights
from eqx_decoders.families.hf_table import Family


FAMILY = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    settings=SETTINGS,
    build=glm,
    weights=llama_weights(mlp=FUSED_MLP),
)


_SETTINGS = dict(model_type="glm", num_hidden_layers=40)

MODELS = {
    "glm4-9b": _SETTINGS | dict(vocab_size=151_552, hidden_size=4096, num_attention_heads=32, intermediate_size=13_696),
    "glm4-9b-1m": _SETTINGS | dict(
        vocab_size=151_552, hidden_size=4096, num_attention_heads=32, num_key_value_heads=4, intermediate_size=13_696,
    ),
    "glm-edge-1.5b": _SETTINGS | dict(
        vocab_size=59_264, hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=4,
        intermediate_size=6144, attention_bias=False, rms_norm_eps=1e-05,
        rope_parameters=dict(partial_rotary_factor=1.0),
    ),
    "glm-edge-4b": _SETTINGS | dict(
        vocab_size=59_264, hidden_size=3072, num_attention_heads=24, num_key_value_heads=6, intermediate_size=8192,
        attention_bias=False, rms_norm_eps=1e-05, rope_parameters=dict(partial_rotary_factor=1.0),
    ),
}  # fmt: skip
