"""Blocks, settings and tensors that several Granite families share: multipliers, and experts that share tensors."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.residual.residual import Sequential
from eqx_decoders.families.common import DecoderSizes, NormPlaces
from eqx_decoders.families.settings_table import Number, Only
from eqx_decoders.families.weight_rows import Weight, sharing
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def scaled(
    shape: DecoderSizes, blocks: Iterable[BlockConfig], *, residual_scale: float = 1.0, **scales: Any
) -> DecoderConfig:
    """Return a decoder with these blocks and a multiplier of their branches; the scales are those of its ends."""
    residual = Sequential(residual_scale=residual_scale)
    return shape.decoder((dataclasses.replace(block, residual=residual) for block in blocks), **scales)


def granite(
    shape: DecoderSizes,
    mlp: MLPConfig | ExpertsConfig | None = None,
    *,
    rope: Rope = Rope(),
    query_scale: float = 1.0,
    norms: NormPlaces = "pre",
    **scales: Any,
) -> DecoderConfig:
    """Return a decoder of Granite blocks, all with this MLP or experts; the scales are those of `scaled`."""
    block = shape.block(shape.attention(rope=rope, query_scale=query_scale), mlp, norms=norms)
    return scaled(shape, [block] * shape.num_layers, **scales)


# transformers 4 writes this key for models in which all layers have a rotary embedding.
POSITIONS = Only("position_embedding_type", "rope")
STREAM_SCALES = (
    Number("embedding_multiplier", "embedding_scale", 1.0),
    Number("residual_multiplier", "blocks.0.residual.residual_scale", 1.0),
)
MULTIPLIERS = (
    *STREAM_SCALES,
    Number("attention_multiplier", "attention.query_scale", 1.0),
    Number("logits_scaling", "logit_divisor", 1.0),
)

_LAYER = "model.layers.{layer}."
_INTO, _OUT = "mlp embed -> embed mlp", "embed mlp -> mlp embed"
_EACH_INTO = "experts mlp embed -> experts embed mlp"
_MOE = _LAYER + "block_sparse_moe."
EXPERTS = (
    *sharing(_MOE + "input_linear.weight", ("mlp.gate", _EACH_INTO), ("mlp.up", _EACH_INTO), axis=1),
    Weight(_MOE + "output_linear.weight", "mlp.down", "experts embed mlp -> experts mlp embed"),
    Weight(_MOE + "router.layer.weight", "mlp.router.kernel", "experts embed -> embed experts"),
)


def shared_mlp(path: str = "mlp.shared.") -> tuple[Weight, ...]:
    """Return the rows of the MLP that every token uses."""
    return (
        *sharing(_LAYER + "shared_mlp.input_linear.weight", (path + "gate", _INTO), (path + "up", _INTO)),
        Weight(_LAYER + "shared_mlp.output_linear.weight", path + "down", _OUT),
    )
