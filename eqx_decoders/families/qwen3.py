"""Qwen3, dense (Yang et al. 2025): Llama's block with normalized queries and keys."""

import functools

from eqx_decoders.families._qwen import IGNORED_WINDOW_KEYS, LATE_WINDOWS, qwen3
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=32, head_dim=128),
        rope_settings(),
        LATE_WINDOWS,
    ),
    build=qwen3,
    weights=llama_weights(),
    ignored_keys=IGNORED_WINDOW_KEYS,
)

_shape = functools.partial(DecoderSizes, vocab_size=151_936, num_kv_heads=8, head_dim=128)
_1_7B = _shape(embed_dim=2048, num_layers=28, num_heads=16, mlp_dim=6144, tied=True)
_4B = _shape(embed_dim=2560, num_layers=36, num_heads=32, mlp_dim=9728, tied=True)
_8B = _shape(embed_dim=4096, num_layers=36, num_heads=32, mlp_dim=12_288)
_14B = _shape(embed_dim=5120, num_layers=40, num_heads=40, mlp_dim=17_408)

_SETTINGS = dict(model_type="qwen3", vocab_size=151_936, num_key_value_heads=8, rope_theta=1_000_000.0)

_1_7B = _SETTINGS | dict(
    hidden_size=2048,
    num_hidden_layers=28,
    num_attention_heads=16,
    intermediate_size=6144,
    tie_word_embeddings=True,
)
_4B = _SETTINGS | dict(
    hidden_size=2560,
    num_hidden_layers=36,
    num_attention_heads=32,
    intermediate_size=9728,
    tie_word_embeddings=True,
)
_8B = _SETTINGS | dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, intermediate_size=12_288)
_14B = _SETTINGS | dict(hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, intermediate_size=17_408)

MODELS = {
    "qwen3-0.6b": _SETTINGS | dict(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=3072,
        tie_word_embeddings=True,
    ),
    "qwen3-1.7b": _1_7B,
    "qwen3-1.7b-base": _1_7B,
    "qwen3-4b": _4B,
    "qwen3-4b-base": _4B,
    "qwen3-4b-thinking-2507": _SETTINGS | dict(
        hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, intermediate_size=9728, rope_theta=5_000_000.0,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": _8B,
    "qwen3-8b-base": _8B,
    "qwen3-14b": _14B,
    "qwen3-14b-base": _14B,
    "qwen3-32b": _SETTINGS | dict(
        hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, intermediate_size=25_600,
    ),
}  # fmt: skip
