"""Olmo 3 (Team Olmo 2025): norms on outputs only, norms over all heads, a window in three of four layers."""

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.families._olmo import olmo_block
from eqx_decoders.families.common import DecoderSizes, cycle_masks, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import RopesByLayer
from eqx_decoders.layers.mask import Mask, SlidingWindow
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_THETA = 500_000.0


def olmo3(
    shape: DecoderSizes,
    *,
    masks: tuple[Mask, ...],
    rope: Rope = Rope(theta=_THETA),
    local_rope: Rope = Rope(theta=_THETA),
) -> DecoderConfig:
    """Return a decoder of Olmo 3 blocks; layers with a window have the rotary embedding `local_rope`."""

    def block(mask: Mask) -> BlockConfig:
        return olmo_block(shape, rope=local_rope if isinstance(mask, SlidingWindow) else rope, mask=mask)

    return shape.decoder(map(block, masks))


FAMILY = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5),
        # transformers gives the layers with a window this theta in old files, whatever their rope_theta is
        RopesByLayer(theta=_THETA, local_theta=_THETA, local_key=None),
        cycle_masks(4, default=4096),
    ),
    build=olmo3,
    weights=llama_weights(norms="post"),
)


_SETTINGS = dict(
    model_type="olmo3",
    vocab_size=100_278,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    intermediate_size=11_008,
    rms_norm_eps=1e-06,
)

MODELS = {
    "olmo3-7b-pt": _SETTINGS,
    "olmo3-7b": _SETTINGS | dict(
        rope_parameters=dict(full_attention=dict(factor=8.0, original_max_position_embeddings=8192, rope_type="yarn")),
    ),
    "olmo3-32b": _SETTINGS | dict(
        hidden_size=5120, num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8, intermediate_size=27_648,
        rope_parameters=dict(full_attention=dict(factor=8.0, original_max_position_embeddings=8192, rope_type="yarn")),
    ),
}  # fmt: skip
