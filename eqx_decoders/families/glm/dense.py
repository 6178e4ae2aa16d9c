"""GLM-4 and GLM-Edge (GLM Team 2024), and GLM-4-0414 (Z.ai 2025).

Rotary embeddings rotate pairs of neighboring features, by default in half of each head. The gate and up projections of
MLPs are fused.
"""

import functools

from eqx_decoders.families.common import LAYER, DecoderSizes, NormPlaces, decoder_sizes, fused_mlp, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import AUTO_MAP
from eqx_decoders.families.weight_rows import norm_weights
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_SETTINGS = (
    AUTO_MAP,
    decoder_sizes(num_kv_heads=2, head_dim=128, eps=1.5625e-7, attention_bias=True),
    rope_settings(fraction=0.5, pairing="interleaved"),
)
_FUSED_MLP = fused_mlp(LAYER + "mlp.")


def glm(shape: DecoderSizes, *, rope: Rope, norms: NormPlaces = "pre") -> DecoderConfig:
    """Return a decoder of GLM-4 blocks. `shape.attention_bias` does not apply to the output projection of attention."""
    mixer = shape.attention(rope=rope, out_bias=False)
    return shape.decoder(shape.block(mixer, shape.mlp(fused=True), norms=norms))


# --- GLM-4 and GLM-Edge ---


GLM = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    settings=_SETTINGS,
    build=glm,
    weights=llama_weights(mlp=_FUSED_MLP),
)


_GLM_BASE = dict(model_type="glm", num_hidden_layers=40)


# --- GLM-4-0414: norms before and after attention and the MLP ---


glm4 = functools.partial(glm, norms="sandwich")
GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    settings=_SETTINGS,
    build=glm4,
    weights=llama_weights(
        norms=norm_weights(
            LAYER,
            pre_mixer_norm="input_layernorm",
            post_mixer_norm="post_self_attn_layernorm",
            pre_mlp_norm="post_attention_layernorm",  # despite its name, it normalizes the input of the MLP
            post_mlp_norm="post_mlp_layernorm",
        ),
        mlp=_FUSED_MLP,
    ),
)


_GLM4_BASE = dict(model_type="glm4", vocab_size=151_552, rms_norm_eps=1e-05)


FAMILIES = (GLM, GLM4)

MODELS = {
    "glm4-9b": _GLM_BASE | dict(vocab_size=151_552, hidden_size=4096, num_attention_heads=32, intermediate_size=13_696),
    "glm4-9b-1m": _GLM_BASE | dict(
        vocab_size=151_552, hidden_size=4096, num_attention_heads=32, num_key_value_heads=4, intermediate_size=13_696,
    ),
    "glm-edge-1.5b": _GLM_BASE | dict(
        vocab_size=59_264, hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=4,
        intermediate_size=6144, attention_bias=False, rms_norm_eps=1e-05,
        rope_parameters=dict(partial_rotary_factor=1.0),
    ),
    "glm-edge-4b": _GLM_BASE | dict(
        vocab_size=59_264, hidden_size=3072, num_attention_heads=24, num_key_value_heads=6, intermediate_size=8192,
        attention_bias=False, rms_norm_eps=1e-05, rope_parameters=dict(partial_rotary_factor=1.0),
    ),
    "glm4-0414-9b": _GLM4_BASE | dict(
        hidden_size=4096, num_hidden_layers=40, num_attention_heads=32, intermediate_size=13_696,
    ),
    "glm4-0414-32b": _GLM4_BASE | dict(
        hidden_size=6144, num_hidden_layers=61, num_attention_heads=48, intermediate_size=23_040, attention_bias=False,
    ),
}  # fmt: skip
