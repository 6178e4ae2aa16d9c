"""Qwen3.5 with experts that sees images and videos (Qwen Team 2026)."""

from eqx_decoders.families import qwen3_5_moe
from eqx_decoders.families.qwen3_5_vision import LARGE, qwen3_5_vision, seeing
from eqx_decoders.model.decoder import DecoderConfig


FAMILY = seeing(qwen3_5_moe.FAMILY, model_type="qwen3_5_moe", architecture="Qwen3_5MoeForConditionalGeneration")


def _with(name: str) -> DecoderConfig:
    text = qwen3_5_moe.MODELS[name]()
    return qwen3_5_vision(text, LARGE(out_dim=text.embed_dim))


MODELS = {
    "qwen3.5-35b-a3b-vision": lambda: _with("qwen3.5-35b-a3b"),
    "qwen3.5-122b-a10b-vision": lambda: _with("qwen3.5-122b-a10b"),
    "qwen3.5-397b-a17b-vision": lambda: _with("qwen3.5-397b-a17b"),
}
