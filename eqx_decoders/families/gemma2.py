"""Gemma 2 (Gemma Team 2024): Gemma with norms around both layers, soft caps, and a window in every other layer."""

import functools

from eqx_decoders.families._gemma import GEMMA2_SETTINGS, IGNORED_ACTIVATION_KEY, gemma2
from eqx_decoders.families.common import DecoderSizes, llama_weights
from eqx_decoders.families.hf_table import Family


FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    settings=GEMMA2_SETTINGS,
    build=gemma2,
    weights=llama_weights(norms="sandwich"),
    ignored_keys=IGNORED_ACTIVATION_KEY,
)

_shape = functools.partial(DecoderSizes, vocab_size=256_128, tied=True, activation="gelu_tanh")
_2B = _shape(embed_dim=2304, num_layers=26, num_heads=8, num_kv_heads=4, head_dim=256, mlp_dim=9216)
_9B = _shape(embed_dim=3584, num_layers=42, num_heads=16, num_kv_heads=8, head_dim=256, mlp_dim=14_336)
_27B = _shape(embed_dim=4608, num_layers=46, num_heads=32, num_kv_heads=16, head_dim=128, mlp_dim=36_864)

MODELS = {
    "gemma2-2b": lambda: gemma2(_2B, masks=_2B.cycle_masks(4096, 2)),
    "gemma2-9b": lambda: gemma2(_9B, masks=_9B.cycle_masks(4096, 2)),
    "gemma2-27b": lambda: gemma2(_27B, masks=_27B.cycle_masks(4096, 2), query_scalar=144),
}
