"""Granite 3.0 to 3.3 (Granite Team 2024): Llama's block with multipliers of embeddings, branches, scores and logits."""

import functools
from typing import Any

from eqx_decoders.families import _granite
from eqx_decoders.families._granite import MULTIPLIERS
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def granite(shape: DecoderSizes, *, mlp_bias: bool = False, rope: Rope = Rope(), **scales: Any) -> DecoderConfig:
    """Return a decoder of Granite blocks; scores are multiplied by `query_scale` alone."""
    return _granite.granite(shape, shape.mlp(bias=mlp_bias), rope=rope, **scales)


FAMILY = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    settings=(decoder_sizes(), Flag("mlp_bias", "mlp.bias", False, name="mlp_bias"), rope_settings(), *MULTIPLIERS),
    build=granite,
    weights=llama_weights(),
)

_shape = functools.partial(DecoderSizes, num_layers=40, num_heads=32, num_kv_heads=8, eps=1e-5, tied=True)
_2b = functools.partial(_shape, embed_dim=2048, head_dim=64, mlp_dim=8192)
_8b = functools.partial(_shape, embed_dim=4096, head_dim=128, mlp_dim=12_800)


def _model(shape: DecoderSizes, theta: float, logit_divisor: float) -> DecoderConfig:
    scales: dict[str, Any] = dict(query_scale=1 / shape.head_dim, embedding_scale=12.0, residual_scale=0.22)
    return granite(shape, rope=Rope(theta=theta), logit_divisor=logit_divisor, **scales)


MODELS = {
    "granite3-2b": lambda: _model(_2b(vocab_size=49_155), 1e4, 8.0),
    "granite3-8b": lambda: _model(_8b(vocab_size=49_155), 1e4, 16.0),
    "granite3.1-2b": lambda: _model(_2b(vocab_size=49_155), 5e6, 8.0),
    "granite3.1-8b": lambda: _model(_8b(vocab_size=49_155), 1e7, 16.0),
    "granite3.3-2b": lambda: _model(_2b(vocab_size=49_159), 1e7, 8.0),
    "granite3.3-8b": lambda: _model(_8b(vocab_size=49_159), 1e7, 16.0),
}
