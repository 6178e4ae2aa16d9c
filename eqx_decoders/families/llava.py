"""LLaVA 1.5 (Liu et al. 2023): a decoder with images of one size, encoded by CLIP or SigLIP."""

from eqx_decoders.families._llava import llava_family, with_clip
from eqx_decoders.families.multimodal import ExtendedModel


FAMILY = llava_family("llava", "LlavaForConditionalGeneration")
MODELS = {
    "llava1.5-7b": ExtendedModel("llama2-7b", with_clip),
    "llava1.5-13b": ExtendedModel("llama2-13b", with_clip),
}
