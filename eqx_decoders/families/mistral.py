"""Mistral 7B (Jiang et al. 2023): Llama's block, with a sliding window in every layer in version 0.1."""

from typing import Any

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.families.family import Family
from eqx_decoders.families.fields import Fields
from eqx_decoders.families.ropes import read_rope, write_ropes
from eqx_decoders.families.shape import (
    LLAMA_WEIGHTS,
    Shape,
    attentions,
    read_masks,
    read_shape,
    write_masks,
    write_shape,
)
from eqx_decoders.layers.mask import Causal, Mask, SlidingWindow
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope


def mistral(shape: Shape, *, rope: Rope, mask: Mask = Causal()) -> DecoderConfig:
    """A decoder of Mistral blocks, all with the same mask."""
    norm = RMSNormConfig(eps=shape.eps)
    block = BlockConfig(
        mixer=shape.attention(rope=rope, mask=mask), mlp=shape.mlp(), pre_mixer_norm=norm, pre_mlp_norm=norm
    )
    return shape.decoder(lambda _: block, norm)


def _read(fields: Fields) -> DecoderConfig:
    shape = read_shape(fields, num_kv_heads=8)
    window = fields.integer("sliding_window", 4096, null=None)
    masks = read_masks(fields, shape.num_layers, window, lambda _: window is not None)
    if len(set(masks)) > 1 or (window is not None and Causal() in masks):
        raise fields.error("layer_types must be the same for all layers of a Mistral, as sliding_window says.")
    return mistral(shape, rope=read_rope(fields), mask=masks[0])


def _write(config: DecoderConfig) -> dict[str, Any]:
    window = write_masks(config)["sliding_window"]
    return write_shape(config) | {"sliding_window": window} | write_ropes(attentions(config)[0].rope)


_IDLE = ("attention_bias", "mlp_bias", "use_sliding_window", "max_window_layers")
FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    read=_read,
    write=_write,
    weights=LLAMA_WEIGHTS,
    harmless=dict.fromkeys(_IDLE, "transformers has no such key here; a bias would be in the file"),
)

_SHAPE = Shape(
    vocab_size=32_000,
    embed_dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=14_336,
    eps=1e-5,
)

MODELS = {
    "mistral-7b": lambda: mistral(_SHAPE, rope=Rope(theta=1e6)),
    "mistral-7b-v0.1": lambda: mistral(_SHAPE, rope=Rope(theta=10_000.0), mask=SlidingWindow(4096)),
}
