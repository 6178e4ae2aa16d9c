"""Blocks and settings that Cohere's families share: attention and MLP in parallel, after one LayerNorm without bias."""

from collections.abc import Iterable

from eqx_decoders.families.common import DecoderSizes, decoder_sizes
from eqx_decoders.families.settings_table import Inverse, Only, Setting, only
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def cohere_decoder(shape: DecoderSizes, mixers: Iterable[AttentionConfig], logit_divisor: float) -> DecoderConfig:
    """Return a decoder of Cohere's blocks with this attention in its layers."""
    norm = LayerNormConfig(eps=shape.eps, bias=False)
    blocks = (shape.block(mixer, norm=norm, parallel=1) for mixer in mixers)
    return shape.decoder(blocks, norm, logit_divisor=logit_divisor)


COHERE_SETTINGS: tuple[Setting, ...] = (
    decoder_sizes(eps=1e-5, tied=True, keys={"rms_norm_eps": "layer_norm_eps"}),
    Inverse("logit_scale", "logit_divisor", 0.0625),
    # these stand in published files, and transformers does not read them
    *only(
        use_parallel_block=True, use_gated_activation=True, use_embedding_sharing=True,
        position_embedding_type="rope_gptj", order_of_interleaved_layers="local_attn_first",
    ),
    Only("rotary_pct", 1, 1.0),
)  # fmt: skip
IGNORED_COHERE_KEYS = {
    "layer_switch": "layer_types and sliding_window_pattern say it",
    "_sliding_window_pattern": "layer_types and sliding_window_pattern say it",
    "use_parallel_embedding": "how it was run",
}
