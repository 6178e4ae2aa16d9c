"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's block with biases on queries, keys and values."""

import functools

from eqx_decoders.families._qwen import IGNORED_QWEN2_KEYS, LATE_WINDOWS, qwen2
from eqx_decoders.families.common import NO_BIAS, DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=32, keys=NO_BIAS),
        rope_settings(),
        LATE_WINDOWS,
    ),
    build=qwen2,
    weights=llama_weights(),
    ignored_keys=IGNORED_QWEN2_KEYS,
)
# The smaller ones have a smaller vocabulary and tie their tables.
_tied = functools.partial(DecoderSizes, vocab_size=151_936, num_kv_heads=2, tied=True)
_shape = functools.partial(DecoderSizes, vocab_size=152_064, head_dim=128)

MODELS = {
    "qwen2.5-0.5b": lambda: qwen2(_tied(embed_dim=896, num_layers=24, num_heads=14, head_dim=64, mlp_dim=4864)),
    "qwen2.5-1.5b": lambda: qwen2(_tied(embed_dim=1536, num_layers=28, num_heads=12, head_dim=128, mlp_dim=8960)),
    "qwen2.5-3b": lambda: qwen2(_tied(embed_dim=2048, num_layers=36, num_heads=16, head_dim=128, mlp_dim=11_008)),
    "qwen2.5-7b": lambda: qwen2(_shape(embed_dim=3584, num_layers=28, num_heads=28, num_kv_heads=4, mlp_dim=18_944)),
    "qwen2.5-14b": lambda: qwen2(_shape(embed_dim=5120, num_layers=48, num_heads=40, num_kv_heads=8, mlp_dim=13_824)),
    "qwen2.5-32b": lambda: qwen2(_shape(embed_dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, mlp_dim=27_648)),
    "qwen2.5-72b": lambda: qwen2(_shape(embed_dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, mlp_dim=29_568)),
}
