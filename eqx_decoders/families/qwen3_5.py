"""Qwen3.5, dense, text (Qwen Team 2026): Qwen3-Next's layers, and positions of several dimensions for images."""

from eqx_decoders.families._qwen_hybrid import (
    DEPTH,
    IGNORED_STATE_KEYS,
    QWEN3_5_SETTINGS,
    QWEN3_5_WEIGHTS,
    qwen3_5,
    with_depth_rows,
    with_depths,
)
from eqx_decoders.families.common import ENDS, GATED_MLP, NO_BIAS, decoder_sizes
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Defaults, Rule


FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    settings=(
        Defaults({"intermediate_size": 12_288}),
        decoder_sizes(num_kv_heads=4, head_dim=256, keys=NO_BIAS),
        Rule("mlp", lambda fields, values: values["shape"].mlp()),
        *QWEN3_5_SETTINGS,
    ),
    build=qwen3_5,
    weights=(*ENDS, *with_depth_rows((*QWEN3_5_WEIGHTS, *GATED_MLP)), *DEPTH),
    ignored_keys=IGNORED_STATE_KEYS,
    with_depths=with_depths,
)


_SETTINGS = dict(model_type="qwen3_5_text", vocab_size=248_320, rope_theta=10_000_000.0)

MODELS = {
    "qwen3.5-0.8b": _SETTINGS | dict(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2, intermediate_size=3584,
        linear_num_value_heads=16, tie_word_embeddings=True,
    ),
    "qwen3.5-2b": _SETTINGS | dict(
        hidden_size=2048, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2, intermediate_size=6144,
        linear_num_value_heads=16, tie_word_embeddings=True,
    ),
    "qwen3.5-4b": _SETTINGS | dict(
        hidden_size=2560, num_hidden_layers=32, num_attention_heads=16, intermediate_size=9216,
        tie_word_embeddings=True,
    ),
    "qwen3.5-9b": _SETTINGS | dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=16),
    "qwen3.5-27b": _SETTINGS | dict(
        hidden_size=5120, num_hidden_layers=64, num_attention_heads=24, intermediate_size=17_408,
        linear_num_value_heads=48,
    ),
}  # fmt: skip
