"""Blocks and settings that GLM-4 and GLM-4-0414 share."""

from eqx_decoders.families.common import LAYER, DecoderSizes, NormPlaces, decoder_sizes, fused_mlp
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import AUTO_MAP
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


ROPE = Rope(fraction=0.5, pairing="interleaved")
SETTINGS = (
    AUTO_MAP,
    decoder_sizes(num_kv_heads=2, head_dim=128, eps=1.5625e-7, attention_bias=True),
    rope_settings(fraction=0.5, pairing="interleaved"),
)
FUSED_MLP = fused_mlp(LAYER + "mlp.")


def glm(shape: DecoderSizes, *, rope: Rope = ROPE, norms: NormPlaces = "pre") -> DecoderConfig:
    """Return a decoder of GLM-4 blocks; the output of attention never has a bias."""
    mixer = shape.attention(rope=rope, out_bias=False)
    return shape.decoder(shape.block(mixer, shape.mlp(fused=True), norms=norms))
