"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama's block with fused matrices; LongRoPE for long texts, windows."""

from typing import Any

from eqx_decoders.families.common import (
    ENDS,
    LAYER,
    NO_BIAS,
    PRE_NORMS,
    DecoderSizes,
    decoder_sizes,
    fused_mlp,
    same_window,
)
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Rule, value_at
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.mask import Causal, Mask, SlidingWindow
from eqx_decoders.layers.rope import LongRope, Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def phi3(shape: DecoderSizes, *, rope: Rope = Rope(), mask: Mask = Causal()) -> DecoderConfig:
    """Return a decoder of Phi-3 blocks."""
    return shape.decoder(shape.block(shape.attention(rope=rope, mask=mask, fused_qkv=True), shape.mlp(fused=True)))


def _write_original_length(config: DecoderConfig) -> dict[str, Any]:
    """Return the length beside the table of rotary settings, too, where transformers looks for it."""
    rope = value_at(config, "attention.rope")
    return {"original_max_position_embeddings": rope.original_length} if isinstance(rope, LongRope) else {}


_ATTENTION = LAYER + "self_attn."
FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5, keys={**NO_BIAS, "head_dim": None}),
        same_window(None),
        rope_settings(fraction=1.0),
        Rule(writes=_write_original_length),
    ),
    build=phi3,
    weights=(
        *ENDS,
        *PRE_NORMS,
        Weight(_ATTENTION + "qkv_proj.weight", "mixer.qkv", "(qkv_heads head_dim) embed -> embed qkv_heads head_dim"),
        Weight(_ATTENTION + "o_proj.weight", "mixer.out", "embed (heads head_dim) -> heads head_dim embed"),
        *fused_mlp(LAYER + "mlp."),
    ),
    ignored_keys={"attention_bias mlp_bias": "transformers has no such key here"},
)


# of long texts: what frequencies are divided by
_LONG = (
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
    6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215,
    18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64,
    32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
)  # fmt: skip


def _phi4_mini() -> DecoderConfig:
    shape = DecoderSizes(
        vocab_size=200_064, embed_dim=3072, num_layers=32, num_heads=24, num_kv_heads=8, head_dim=128, mlp_dim=8192,
        eps=1e-5, tied=True,
    )  # fmt: skip
    rope = LongRope(
        theta=10_000.0, fraction=0.75, short_factors=(1.0,) * 48, long_factors=_LONG, original_length=4096, factor=32.0
    )
    return phi3(shape, rope=rope, mask=SlidingWindow(262_144))


_SETTINGS = dict(
    model_type="phi3",
    vocab_size=32_064,
    hidden_size=5120,
    num_hidden_layers=40,
    num_attention_heads=40,
    intermediate_size=17_920,
)

MODELS = {
    "phi3-mini-3.8b": _SETTINGS | dict(
        hidden_size=3072, num_hidden_layers=32, num_attention_heads=32, intermediate_size=8192, sliding_window=2047,
    ),
    "phi3-medium-14b": _SETTINGS | dict(num_key_value_heads=10, sliding_window=2047),
    "phi4-mini-3.8b": _phi4_mini,
    "phi4-14b": _SETTINGS | dict(vocab_size=100_352, num_key_value_heads=10, rope_theta=250_000.0),
}  # fmt: skip
