"""Gemma 3, text (Gemma Team 2025): five layers with a window to one without, each kind with its own RoPE."""

from eqx_decoders.families._gemma import GEMMA_SETTINGS, IGNORED_ACTIVATION_KEY, gemma_decoder
from eqx_decoders.families.common import DecoderSizes, cycle_masks, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import RopesByLayer
from eqx_decoders.families.settings_table import Number, Only
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
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


_SETTINGS = dict(model_type="gemma3_text", vocab_size=262_144, sliding_window=1024)

MODELS = {
    "gemma3-1b": _SETTINGS | dict(
        hidden_size=1152, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1, intermediate_size=6912,
        sliding_window=512,
    ),
    "gemma3-4b": _SETTINGS | dict(
        hidden_size=2560, num_hidden_layers=34, num_attention_heads=8, intermediate_size=10_240,
        rope_parameters=dict(full_attention=dict(factor=8.0, rope_type="linear")),
    ),
    "gemma3-12b": _SETTINGS | dict(
        hidden_size=3840, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8, intermediate_size=15_360,
        rope_parameters=dict(full_attention=dict(factor=8.0, rope_type="linear")),
    ),
    "gemma3-27b": _SETTINGS | dict(
        hidden_size=5376, num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=16, head_dim=128,
        intermediate_size=21_504, query_pre_attn_scalar=168,
        rope_parameters=dict(full_attention=dict(factor=8.0, rope_type="linear")),
    ),
}  # fmt: skip
