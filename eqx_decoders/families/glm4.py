"""GLM-4-0414 (Z.ai 2025): GLM-4's block with norms before and after attention and MLP."""

import functools

from eqx_decoders.families._glm import FUSED_MLP, SETTINGS, glm
from eqx_decoders.families.common import LAYER, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.weight_rows import norm_weights


glm4 = functools.partial(glm, norms="sandwich")
FAMILY = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    settings=SETTINGS,
    build=glm4,
    weights=llama_weights(
        norms=norm_weights(
            LAYER,
            pre_mixer_norm="input_layernorm",
            post_mixer_norm="post_self_attn_layernorm",
            pre_mlp_norm="post_attention_layernorm",  # its name notwithstanding
            post_mlp_norm="post_mlp_layernorm",
        ),
        mlp=FUSED_MLP,
    ),
)


_SETTINGS = dict(model_type="glm4", vocab_size=151_552, rms_norm_eps=1e-05)

MODELS = {
    "glm4-0414-9b": _SETTINGS | dict(
        hidden_size=4096, num_hidden_layers=40, num_attention_heads=32, intermediate_size=13_696,
    ),
    "glm4-0414-32b": _SETTINGS | dict(
        hidden_size=6144, num_hidden_layers=61, num_attention_heads=48, intermediate_size=23_040, attention_bias=False,
    ),
}  # fmt: skip
