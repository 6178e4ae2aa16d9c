"""Gemma 2 (Gemma Team 2024): Gemma with norms around both layers, soft caps, and a window in every other layer."""

import functools
from typing import Any

from eqx_decoders.families._gemma import GEMMA_SETTINGS, IGNORED_ACTIVATION_KEY, gemma_decoder
from eqx_decoders.families.common import DecoderSizes, cycle_masks, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Number
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def gemma2(
    shape: DecoderSizes,
    *,
    masks: tuple[Mask, ...],
    query_scalar: int = 256,
    rope: Rope = Rope(),
    attention_cap: float | None = 50.0,
    logit_cap: float | None = 30.0,
) -> DecoderConfig:
    """Return a decoder of Gemma 2 blocks; queries are multiplied by `query_scalar ** -0.5`."""
    options: dict[str, Any] = dict(rope=rope, query_scale=query_scalar**-0.5, soft_cap=attention_cap)
    return gemma_decoder(shape, (shape.attention(mask=mask, **options) for mask in masks), logit_cap)


FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    settings=(
        *GEMMA_SETTINGS,
        cycle_masks(2, default=4096),
        rope_settings(),
        Number("attn_logit_softcapping", "attention.soft_cap", 50.0, null=None, name="attention_cap"),
        Number("final_logit_softcapping", "logit_soft_cap", 30.0, null=None, name="logit_cap"),
    ),
    build=gemma2,
    weights=llama_weights(norms="sandwich"),
    ignored_keys=IGNORED_ACTIVATION_KEY,
)

_shape = functools.partial(DecoderSizes, vocab_size=256_128, tied=True, activation="gelu_tanh")
_2B = _shape(embed_dim=2304, num_layers=26, num_heads=8, num_kv_heads=4, head_dim=256, mlp_dim=9216)
_9B = _shape(embed_dim=3584, num_layers=42, num_heads=16, num_kv_heads=8, head_dim=256, mlp_dim=14_336)
_27B = _shape(embed_dim=4608, num_layers=46, num_heads=32, num_kv_heads=16, head_dim=128, mlp_dim=36_864)

MODELS = {
    "gemma2-2b": lambda: gemma2(_2B, masks=_2B.cycle_masks(4096, 2)),
    "gemma2-9b": lambda: gemma2(_9B, masks=_9B.cycle_masks(4096, 2)),
    "gemma2-27b": lambda: gemma2(_27B, masks=_27B.cycle_masks(4096, 2), query_scalar=144),
}
