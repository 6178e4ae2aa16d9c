"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's block with biases on queries, keys and values."""

from eqx_decoders.families._qwen import IGNORED_QWEN2_KEYS, LATE_WINDOWS, qwen2
from eqx_decoders.families.common import NO_BIAS, decoder_sizes, llama_weights
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

_SETTINGS = dict(model_type="qwen2", vocab_size=152_064, rope_theta=1_000_000.0)

MODELS = {
    "qwen2.5-0.5b": _SETTINGS | dict(
        vocab_size=151_936, hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        intermediate_size=4864, tie_word_embeddings=True,
    ),
    "qwen2.5-1.5b": _SETTINGS | dict(
        vocab_size=151_936, hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        intermediate_size=8960, tie_word_embeddings=True,
    ),
    "qwen2.5-3b": _SETTINGS | dict(
        vocab_size=151_936, hidden_size=2048, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2,
        intermediate_size=11_008, tie_word_embeddings=True,
    ),
    "qwen2.5-7b": _SETTINGS | dict(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, intermediate_size=18_944,
    ),
    "qwen2.5-14b": _SETTINGS | dict(
        hidden_size=5120, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8, intermediate_size=13_824,
    ),
    "qwen2.5-32b": _SETTINGS | dict(
        hidden_size=5120, num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8, intermediate_size=27_648,
    ),
    "qwen2.5-72b": _SETTINGS | dict(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, intermediate_size=29_568,
    ),
}  # fmt: skip
