"""GLM-4.6V (Z.ai 2025): GLM-4.1V or GLM-4.5V under one name; videos are sampled otherwise."""

from typing import Any

from eqx_decoders.families._glm_vision import dense_family, sparse_family, with_glm_vision
from eqx_decoders.families.multimodal import ExtendedModel


IMAGE = 151_363
_NAMES: dict[str, Any] = dict(model_type="glm46v", architecture="Glm46VForConditionalGeneration", image=151_343)
FAMILY = dense_family(**_NAMES, alternatives=(sparse_family(**_NAMES, writes_fused=True),))
MODELS = {
    "glm4.6v-flash-9b": ExtendedModel("glm4-0414-9b", with_glm_vision(13_696, IMAGE)),
    "glm4.6v-106b-a12b": ExtendedModel("glm4.5-air-106b-a12b", with_glm_vision(10_944, IMAGE)),
}
