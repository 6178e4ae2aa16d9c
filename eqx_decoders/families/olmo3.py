"""Olmo 3 (Team Olmo 2025): norms on outputs only, norms over all heads, a window in three of four layers."""

import functools

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.families._olmo import olmo_block
from eqx_decoders.families.common import DecoderSizes, cycle_masks, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import RopesByLayer
from eqx_decoders.layers.mask import Mask, SlidingWindow
from eqx_decoders.layers.rope import Rope, YarnRope
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

_shape = functools.partial(DecoderSizes, vocab_size=100_278, head_dim=128)
_7B = _shape(embed_dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, mlp_dim=11_008)
_32B = _shape(embed_dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, mlp_dim=27_648)
_LONG = YarnRope(theta=_THETA, factor=8.0, original_length=8192)

MODELS = {
    "olmo3-7b-pt": lambda: olmo3(_7B, masks=_7B.cycle_masks(4096, 4)),
    "olmo3-7b": lambda: olmo3(_7B, masks=_7B.cycle_masks(4096, 4), rope=_LONG),
    "olmo3-32b": lambda: olmo3(_32B, masks=_32B.cycle_masks(4096, 4), rope=_LONG),
}
