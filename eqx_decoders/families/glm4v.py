"""GLM-4.1V (GLM-V Team 2025): GLM-4-0414 with images of any shape, and positions of time, row and column."""

from eqx_decoders.families._glm_vision import SECTIONS, glm_v_family, with_glm_vision
from eqx_decoders.families.common import NO_BIAS, decoder_sizes
from eqx_decoders.families.multimodal import ExtendedModel
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Only


FAMILY = glm_v_family(
    "glm4",
    dict(
        model_type="glm4v_text",
        architecture="Glm4vTextModel",
        settings=(
            Only("attention_bias", True),
            decoder_sizes(num_kv_heads=2, eps=1e-5, attention_bias=True, keys=NO_BIAS),
            rope_settings(fraction=1.0, pairing="interleaved", sections=SECTIONS, interleaved_sections=False),
        ),
    ),
    image=151_343,
    model_type="glm4v",
    architecture="Glm4vForConditionalGeneration",
)

MODELS = {"glm4.1v-9b": ExtendedModel("glm4-0414-9b", with_glm_vision(13_696, 151_343))}
