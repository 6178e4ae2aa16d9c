"""Attention, names of tensors and settings that the Hunyuan families share."""

from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.rope import Rope


def attention(shape: DecoderSizes, rope: Rope) -> AttentionConfig:
    """Return attention whose queries and keys are normalized after they are rotated."""
    return shape.attention(rope=rope, qk_norm=QKNorm(norm=shape.norm, when="after_rope"))


NAMES = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
IGNORED_KEYS = {
    "pretraining_tp": "how it was trained",
    "eod_token_id": "generation_config.json says where a text ends",
    "sep_token_id": "it changes no output",
}
