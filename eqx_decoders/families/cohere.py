"""Command R and R+, Aya (Cohere 2024): parallel blocks with LayerNorm, interleaved RoPE, scaled logits."""

import functools

from eqx_decoders.families._cohere import COHERE_SETTINGS, IGNORED_COHERE_KEYS, cohere_decoder
from eqx_decoders.families.common import DecoderSizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def cohere(shape: DecoderSizes, *, rope: Rope, logit_divisor: float = 16.0, qk_norm: bool = False) -> DecoderConfig:
    """Return a decoder of Command R's blocks; R+ normalizes each head with a scale of its own."""
    norm = QKNorm(norm=LayerNormConfig(eps=shape.eps, bias=False), over="each_head") if qk_norm else None
    return cohere_decoder(shape, (shape.attention(rope=rope, qk_norm=norm),) * shape.num_layers, logit_divisor)


FAMILY = Family(
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

_shape = functools.partial(DecoderSizes, vocab_size=256_000, head_dim=128, eps=1e-5, tied=True)
_32B = _shape(embed_dim=8192, num_layers=40, num_heads=64, num_kv_heads=8, mlp_dim=24_576)
_35B = _shape(embed_dim=8192, num_layers=40, num_heads=64, num_kv_heads=64, mlp_dim=22_528)


_SETTINGS = dict(
    model_type="cohere",
    vocab_size=256_000,
    hidden_size=8192,
    num_hidden_layers=40,
    num_attention_heads=64,
)

_35B = _SETTINGS | dict(intermediate_size=22_528, rope_theta=8_000_000.0)
_32B = _SETTINGS | dict(num_key_value_heads=8, intermediate_size=24_576, rope_theta=4_000_000.0)

MODELS = {
    "command-r-35b": _35B,
    "command-r-08-2024-32b": _32B,
    "command-r-plus-104b": _SETTINGS | dict(
        hidden_size=12_288, num_hidden_layers=64, num_attention_heads=96, num_key_value_heads=8,
        intermediate_size=33_792, logit_scale=0.8333333333333334, rope_theta=75_000_000.0, use_qk_norm=True,
    ),
    "aya-23-8b": _SETTINGS | dict(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14_336,
        rope_theta=10_000.0,
    ),
    "aya-23-35b": _35B,
    "aya-expanse-8b": _SETTINGS | dict(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14_336,
        logit_scale=0.125, rope_theta=10_000.0,
    ),
    "aya-expanse-32b": _32B,
}  # fmt: skip
