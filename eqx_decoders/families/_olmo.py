"""Block that several Olmo families share."""

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.mask import Causal, Mask
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.rope import Rope


def olmo_block(
    shape: DecoderSizes, *, rope: Rope | None, mask: Mask = Causal(), experts: ExpertsConfig | None = None
) -> BlockConfig:
    """Return a block with norms on outputs only, and one norm of all queries of a token, and of all its keys."""
    mixer = shape.attention(rope=rope, mask=mask, qk_norm=QKNorm(norm=shape.norm, over="heads"))
    return shape.block(mixer, experts, norms="post")
