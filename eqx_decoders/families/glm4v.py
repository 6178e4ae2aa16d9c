"""GLM-4.1V (GLM-V Team 2025): GLM-4-0414 with images of any shape, and positions of time, row and column."""

from eqx_decoders.families._glm_vision import dense_family, with_glm_vision
from eqx_decoders.families.multimodal import ExtendedModel


IMAGE = 151_343
FAMILY = dense_family(model_type="glm4v", architecture="Glm4vForConditionalGeneration", image=IMAGE)
MODELS = {"glm4.1v-9b": ExtendedModel("glm4-0414-9b", with_glm_vision(13_696, IMAGE))}
