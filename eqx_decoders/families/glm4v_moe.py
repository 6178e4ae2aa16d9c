"""GLM-4.5V (GLM-V Team 2025): GLM-4.5 with images of any shape, and positions of time, row and column."""

from eqx_decoders.families._glm_vision import sparse_family, with_glm_vision
from eqx_decoders.families.multimodal import ExtendedModel


IMAGE = 151_363
FAMILY = sparse_family(model_type="glm4v_moe", architecture="Glm4vMoeForConditionalGeneration", image=IMAGE)
MODELS = {"glm4.5v-106b-a12b": ExtendedModel("glm4.5-air-106b-a12b", with_glm_vision(10_944, IMAGE))}
