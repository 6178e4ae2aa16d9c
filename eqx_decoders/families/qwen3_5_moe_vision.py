"""Qwen3.5 with experts, images and videos (Qwen Team 2026)."""

from eqx_decoders.families._qwen_vision import qwen3_5_family, with_large_vision
from eqx_decoders.families.multimodal import ExtendedModel


FAMILY = qwen3_5_family("qwen3_5_moe_text", model_type="qwen3_5_moe", architecture="Qwen3_5MoeForConditionalGeneration")

MODELS = {
    "qwen3.5-35b-a3b-vision": ExtendedModel("qwen3.5-35b-a3b", with_large_vision),
    "qwen3.5-122b-a10b-vision": ExtendedModel("qwen3.5-122b-a10b", with_large_vision),
    "qwen3.5-397b-a17b-vision": ExtendedModel("qwen3.5-397b-a17b", with_large_vision),
}
