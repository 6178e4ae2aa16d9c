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
_8B = _shape(embed_dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, mlp_dim=14_336)
_32B = _shape(embed_dim=8192, num_layers=40, num_heads=64, num_kv_heads=8, mlp_dim=24_576)
_35B = _shape(embed_dim=8192, num_layers=40, num_heads=64, num_kv_heads=64, mlp_dim=22_528)
_104B = _shape(embed_dim=12_288, num_layers=64, num_heads=96, num_kv_heads=8, mlp_dim=33_792)


def _rope(theta: float) -> Rope:
    return Rope(theta=theta, pairing="interleaved")


MODELS = {
    "command-r-35b": lambda: cohere(_35B, rope=_rope(8e6)),
    "command-r-08-2024-32b": lambda: cohere(_32B, rope=_rope(4e6)),
    "command-r-plus-104b": lambda: cohere(_104B, rope=_rope(75e6), logit_divisor=1 / 0.8333333333333334, qk_norm=True),
    "aya-23-8b": lambda: cohere(_8B, rope=_rope(10_000.0)),
    "aya-23-35b": lambda: cohere(_35B, rope=_rope(8e6)),
    "aya-expanse-8b": lambda: cohere(_8B, rope=_rope(10_000.0), logit_divisor=8.0),
    "aya-expanse-32b": lambda: cohere(_32B, rope=_rope(4e6)),
}
