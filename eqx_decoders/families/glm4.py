"""GLM-4-0414 (Z.ai 2025): GLM-4's block with norms before and after attention and MLP."""

import functools

from eqx_decoders.families._glm import FUSED_MLP, SETTINGS, glm, glm_sizes
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

_9B = glm_sizes(embed_dim=4096, num_layers=40, num_heads=32, mlp_dim=13_696, eps=1e-5, attention_bias=True)
_32B = glm_sizes(embed_dim=6144, num_layers=61, num_heads=48, mlp_dim=23_040, eps=1e-5)

MODELS = {"glm4-0414-9b": lambda: glm4(_9B), "glm4-0414-32b": lambda: glm4(_32B)}
