"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's block with biases on queries, keys and values."""

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
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope


def qwen2(shape: Shape, *, rope: Rope = Rope(theta=1e6), masks: tuple[Mask, ...] = ()) -> DecoderConfig:
    """A decoder of Qwen2 blocks; `masks` has one for each layer, or is empty: all are causal."""
    norm = RMSNormConfig(eps=shape.eps)

    def block(mask):
        mixer = shape.attention(mask=mask, rope=rope, qkv_bias=True)
        return BlockConfig(mixer=mixer, mlp=shape.mlp(), pre_mixer_norm=norm, pre_mlp_norm=norm)

    return shape.decoder(block, norm, masks)


def read_late_windows(fields: Fields, layers: int) -> tuple[Mask, ...]:
    """Windows from layer `max_window_layers` on, if `use_sliding_window`, or as `layer_types` says."""
    on, size = fields.flag("use_sliding_window", False), fields.integer("sliding_window", 4096, null=None)
    first = fields.integer("max_window_layers", 28, least=0)
    window = size if on else None
    return read_masks(fields, layers, window, lambda index: window is not None and index >= first)


def write_late_windows(config: DecoderConfig) -> dict[str, Any]:
    """The keys that `read_late_windows` reads."""
    masks = write_masks(config)
    if masks["sliding_window"] is None:
        return masks | {"use_sliding_window": False}
    return masks | {"use_sliding_window": True, "max_window_layers": masks["layer_types"].index("sliding_attention")}


def _read(fields: Fields) -> DecoderConfig:
    shape = read_shape(fields, num_kv_heads=32)
    return qwen2(shape, rope=read_rope(fields), masks=read_late_windows(fields, shape.num_layers))


def _write(config: DecoderConfig) -> dict[str, Any]:
    return write_shape(config) | write_late_windows(config) | write_ropes(attentions(config)[0].rope)


HARMLESS = {"max_window_layers": "layer_types says it"}
FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=_read,
    write=_write,
    weights=LLAMA_WEIGHTS,
    harmless=HARMLESS | dict.fromkeys(("attention_bias", "qkv_bias"), "the biases are always there"),
)


def _qwen25(
    embed_dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    mlp_dim: int,
    vocab_size: int,
    head_dim: int = 128,
    tied: bool = False,
) -> DecoderConfig:
    shape = Shape(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        tied=tied,
    )
    return qwen2(shape)


MODELS = {
    "qwen2.5-0.5b": lambda: _qwen25(896, 24, 14, 2, 4864, 151_936, head_dim=64, tied=True),
    "qwen2.5-1.5b": lambda: _qwen25(1536, 28, 12, 2, 8960, 151_936, tied=True),
    "qwen2.5-3b": lambda: _qwen25(2048, 36, 16, 2, 11_008, 151_936, tied=True),
    "qwen2.5-7b": lambda: _qwen25(3584, 28, 28, 4, 18_944, 152_064),
    "qwen2.5-14b": lambda: _qwen25(5120, 48, 40, 8, 13_824, 152_064),
    "qwen2.5-32b": lambda: _qwen25(5120, 64, 40, 8, 27_648, 152_064),
    "qwen2.5-72b": lambda: _qwen25(8192, 80, 64, 8, 29_568, 152_064),
}
