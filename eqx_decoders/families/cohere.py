"""Command R, R+, R7B and A, and Aya (Cohere 2024, 2025): parallel attention and MLP, LayerNorm, scaled logits."""

from collections.abc import Iterable

from eqx_decoders.families.common import DecoderSizes, cycle_mask_settings, decoder_sizes, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Check, Flag, Inverse, Only, Setting, only
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def cohere_decoder(shape: DecoderSizes, mixers: Iterable[AttentionConfig], logit_divisor: float) -> DecoderConfig:
    """Return a decoder of Cohere blocks with the given mixer of each layer."""
    norm = LayerNormConfig(eps=shape.eps, bias=False)
    blocks = (shape.block(mixer, norm=norm, parallel_norms=1) for mixer in mixers)
    return shape.decoder(blocks, norm, logit_divisor=logit_divisor)


COHERE_SETTINGS: tuple[Setting, ...] = (
    decoder_sizes(eps=1e-5, tied=True, keys={"rms_norm_eps": "layer_norm_eps"}),
    Inverse("logit_scale", "logit_divisor", 0.0625),
    # published files have these keys; transformers does not read them
    *only(
        use_parallel_block=True, use_gated_activation=True, use_embedding_sharing=True,
        position_embedding_type="rope_gptj", order_of_interleaved_layers="local_attn_first",
    ),
    Only("rotary_pct", 1, 1.0),
)  # fmt: skip
IGNORED_COHERE_KEYS = {
    "layer_switch _sliding_window_pattern": "layer_types and sliding_window_pattern determine it",
    "use_parallel_embedding": "runtime option; it changes no output",
}


# --- Command R and R+, Aya ---


def cohere(shape: DecoderSizes, *, rope: Rope, logit_divisor: float = 16.0, qk_norm: bool = False) -> DecoderConfig:
    """Return a decoder of Command R blocks.

    `qk_norm`: whether queries and keys are normalized, with a separate scale per head (Command R+).
    """
    norm = QKNorm(norm=LayerNormConfig(eps=shape.eps, bias=False), over="each_head") if qk_norm else None
    return cohere_decoder(shape, (shape.attention(rope=rope, qk_norm=norm),) * shape.num_layers, logit_divisor)


COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    settings=(
        *COHERE_SETTINGS,
        Flag("use_qk_norm", "attention.qk_norm", False, name="qk_norm"),
        rope_settings(theta=500_000.0, pairing="interleaved"),
    ),
    build=cohere,
    weights=llama_weights(),
    ignored_keys=IGNORED_COHERE_KEYS,
)

_COHERE_BASE = dict(
    model_type="cohere",
    vocab_size=256_000,
    hidden_size=8192,
    num_hidden_layers=40,
    num_attention_heads=64,
)

_COHERE_35B = _COHERE_BASE | dict(intermediate_size=22_528, rope_theta=8_000_000.0)
_COHERE_32B = _COHERE_BASE | dict(num_key_value_heads=8, intermediate_size=24_576, rope_theta=4_000_000.0)


# --- Command R7B and Command A: layers with windows and RoPE, full layers without RoPE ---


def cohere2(shape: DecoderSizes, *, masks: tuple[Mask, ...], rope: Rope, logit_divisor: float = 16.0) -> DecoderConfig:
    """Return a decoder of Command R7B blocks; only layers with windows have the rotary embedding."""
    return cohere_decoder(shape, shape.attention_by_mask(masks, None, rope), logit_divisor)


COHERE2 = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    settings=(
        *COHERE_SETTINGS,
        Only("use_qk_norm", False),
        Check(
            lambda values: values["shape"].head_dim * values["shape"].num_heads == values["shape"].embed_dim,
            "head_dim={shape.head_dim} must be hidden_size / num_attention_heads: transformers ignores other values.",
        ),
        cycle_mask_settings(4, key="sliding_window_pattern"),
        rope_settings(pairing="interleaved"),
    ),
    build=cohere2,
    weights=llama_weights(),
    ignored_keys=IGNORED_COHERE_KEYS,
)


_COHERE2_BASE = dict(
    model_type="cohere2", vocab_size=256_000, num_key_value_heads=8, logit_scale=0.25, rope_theta=50_000.0
)


FAMILIES = (COHERE, COHERE2)

MODELS = {
    "command-r-35b": _COHERE_35B,
    "command-r-08-2024-32b": _COHERE_32B,
    "command-r-plus-104b": _COHERE_BASE | dict(
        hidden_size=12_288, num_hidden_layers=64, num_attention_heads=96, num_key_value_heads=8,
        intermediate_size=33_792, logit_scale=0.8333333333333334, rope_theta=75_000_000.0, use_qk_norm=True,
    ),
    "aya-23-8b": _COHERE_BASE | dict(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14_336,
        rope_theta=10_000.0,
    ),
    "aya-23-35b": _COHERE_35B,
    "aya-expanse-8b": _COHERE_BASE | dict(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14_336,
        logit_scale=0.125, rope_theta=10_000.0,
    ),
    "aya-expanse-32b": _COHERE_32B,
    "command-r7b": _COHERE2_BASE | dict(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=14_336,
    ),
    "command-a-111b": _COHERE2_BASE | dict(
        hidden_size=12_288, num_hidden_layers=64, num_attention_heads=96, intermediate_size=36_864,
    ),
}  # fmt: skip
