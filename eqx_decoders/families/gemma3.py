"""Gemma 3, text (Gemma Team 2025): five layers with a window to one without, each kind with its own RoPE."""

import functools

from eqx_decoders.families._gemma import GEMMA_SETTINGS, IGNORED_ACTIVATION_KEY, gemma_decoder
from eqx_decoders.families.common import DecoderSizes, cycle_masks, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import RopesByLayer
from eqx_decoders.families.settings_table import Number, Only
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import LinearRope, Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def gemma3(
    shape: DecoderSizes,
    *,
    masks: tuple[Mask, ...],
    query_scalar: int = 256,
    rope: Rope = Rope(theta=1e6),
    local_rope: Rope = Rope(theta=10_000.0),
    logit_cap: float | None = None,
) -> DecoderConfig:
    """Return a decoder of Gemma 3 blocks; layers with a window have the rotary embedding `local_rope`."""
    qk_norm = QKNorm(norm=RMSNormConfig(eps=shape.eps, offset=1.0))
    mixers = shape.attention_by_mask(masks, rope, local_rope, query_scale=query_scalar**-0.5, qk_norm=qk_norm)
    return gemma_decoder(shape, mixers, logit_cap)


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    settings=(
        *GEMMA_SETTINGS,
        Only("attn_logit_softcapping", written=True),  # transformers has the key and never applies it
        RopesByLayer(theta=1e6, local_theta=10_000.0, local_key="rope_local_base_freq"),
        cycle_masks(6, key="sliding_window_pattern", default=4096),
        Number("final_logit_softcapping", "logit_soft_cap", None, name="logit_cap"),
    ),
    build=gemma3,
    weights=llama_weights(norms="sandwich"),
    ignored_keys=IGNORED_ACTIVATION_KEY | {"_sliding_window_pattern": "layer_types says it"},
)

_shape = functools.partial(DecoderSizes, vocab_size=262_144, tied=True, activation="gelu_tanh")
_1B = _shape(embed_dim=1152, num_layers=26, num_heads=4, num_kv_heads=1, head_dim=256, mlp_dim=6912)
_4B = _shape(embed_dim=2560, num_layers=34, num_heads=8, num_kv_heads=4, head_dim=256, mlp_dim=10_240)
_12B = _shape(embed_dim=3840, num_layers=48, num_heads=16, num_kv_heads=8, head_dim=256, mlp_dim=15_360)
_27B = _shape(embed_dim=5376, num_layers=62, num_heads=32, num_kv_heads=16, head_dim=128, mlp_dim=21_504)
_LONG = LinearRope(theta=1e6, factor=8.0)

MODELS = {
    "gemma3-1b": lambda: gemma3(_1B, masks=_1B.cycle_masks(512, 6)),
    "gemma3-4b": lambda: gemma3(_4B, masks=_4B.cycle_masks(1024, 6), rope=_LONG),
    "gemma3-12b": lambda: gemma3(_12B, masks=_12B.cycle_masks(1024, 6), rope=_LONG),
    "gemma3-27b": lambda: gemma3(_27B, masks=_27B.cycle_masks(1024, 6), rope=_LONG, query_scalar=168),
}
