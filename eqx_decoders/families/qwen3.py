"""Qwen3, dense (Yang et al. 2025): Llama's block with normalized queries and keys."""

import functools

from eqx_decoders.families._qwen import IGNORED_WINDOW_KEYS, LATE_WINDOWS, qwen3
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.layers.rope import Rope


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
_0_6B = _shape(embed_dim=1024, num_layers=28, num_heads=16, mlp_dim=3072, tied=True)
_1_7B = _shape(embed_dim=2048, num_layers=28, num_heads=16, mlp_dim=6144, tied=True)
_4B = _shape(embed_dim=2560, num_layers=36, num_heads=32, mlp_dim=9728, tied=True)
_8B = _shape(embed_dim=4096, num_layers=36, num_heads=32, mlp_dim=12_288)
_14B = _shape(embed_dim=5120, num_layers=40, num_heads=40, mlp_dim=17_408)
_32B = _shape(embed_dim=5120, num_layers=64, num_heads=64, mlp_dim=25_600)

MODELS = {
    "qwen3-0.6b": lambda: qwen3(_0_6B),
    "qwen3-1.7b": lambda: qwen3(_1_7B),
    "qwen3-1.7b-base": lambda: qwen3(_1_7B),
    "qwen3-4b": lambda: qwen3(_4B),
    "qwen3-4b-base": lambda: qwen3(_4B),
    "qwen3-4b-thinking-2507": lambda: qwen3(_4B, rope=Rope(theta=5e6)),
    "qwen3-8b": lambda: qwen3(_8B),
    "qwen3-8b-base": lambda: qwen3(_8B),
    "qwen3-14b": lambda: qwen3(_14B),
    "qwen3-14b-base": lambda: qwen3(_14B),
    "qwen3-32b": lambda: qwen3(_32B),
}
