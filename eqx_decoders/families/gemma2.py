"""Gemma 2 (Gemma Team 2024): Gemma with norms around both layers, soft caps, and a window in every other layer."""

from eqx_decoders.families._gemma import GEMMA2_SETTINGS, IGNORED_ACTIVATION_KEY, gemma2
from eqx_decoders.families.common import llama_weights
from eqx_decoders.families.hf_table import Family


FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    settings=GEMMA2_SETTINGS,
    build=gemma2,
    weights=llama_weights(norms="sandwich"),
    ignored_keys=IGNORED_ACTIVATION_KEY,
)


_SETTINGS = dict(model_type="gemma2", vocab_size=256_128)

MODELS = {
    "gemma2-2b": _SETTINGS | dict(
        hidden_size=2304, num_hidden_layers=26, num_attention_heads=8, intermediate_size=9216,
    ),
    "gemma2-9b": _SETTINGS | dict(
        hidden_size=3584, num_hidden_layers=42, num_attention_heads=16, num_key_value_heads=8, intermediate_size=14_336,
    ),
    "gemma2-27b": _SETTINGS | dict(
        hidden_size=4608, num_hidden_layers=46, num_attention_heads=32, num_key_value_heads=16, head_dim=128,
        intermediate_size=36_864, query_pre_attn_scalar=144,
    ),
}  # fmt: skip
