"""GLM-4.5V (GLM-V Team 2025): GLM-4.5 with images of any shape, and positions of time, row and column."""

from eqx_decoders.families import moe
from eqx_decoders.families._deepseek import DEPTHS, expert_settings, v3_router_settings
from eqx_decoders.families._glm_vision import SECTIONS, glm_v_family, with_glm_vision
from eqx_decoders.families.common import decoder_sizes
from eqx_decoders.families.multimodal import ExtendedModel
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Only


FAMILY = glm_v_family(
    "glm4_moe",
    dict(
        model_type="glm4v_moe_text",
        architecture="Glm4vMoeTextModel",
        settings=(
            decoder_sizes(num_kv_heads=8, eps=1e-5, attention_bias=True),
            rope_settings(fraction=0.5, sections=SECTIONS, interleaved_sections=False),
            Only("use_qk_norm", False),
            *v3_router_settings(scale=1.0),
            *expert_settings(num_experts=128, chosen=8, shared=1, expert_dim=1408),
            moe.dense_layers(1),
            DEPTHS,
        ),
    ),
    image=151_363,
    model_type="glm4v_moe",
    architecture="Glm4vMoeForConditionalGeneration",
)

MODELS = {"glm4.5v-106b-a12b": ExtendedModel("glm4.5-air-106b-a12b", with_glm_vision(10_944, 151_363))}
