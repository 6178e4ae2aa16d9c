"""Blocks and settings that several Qwen families share."""

from typing import Any

from eqx_decoders.families import moe
from eqx_decoders.families.common import DecoderSizes, read_masks, read_shape, write_masks
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.rope_config import read_rope
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.mask import Causal, Mask
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


VL_SECTIONS = (24, 20, 20)
VL_ROPE = Rope(theta=5e6, sections=VL_SECTIONS)
IGNORED_WINDOW_KEYS = {"max_window_layers": "layer_types says it"}


def qwen2(shape: DecoderSizes, *, rope: Rope = Rope(theta=1e6), masks: tuple[Mask, ...] = ()) -> DecoderConfig:
    """Return a decoder of Qwen2 blocks; without `masks`, one for each layer, all are causal."""
    masks = masks or (Causal(),) * shape.num_layers
    return shape.decoder(shape.block(shape.attention(mask=mask, rope=rope, qkv_bias=True)) for mask in masks)


def qwen3(shape: DecoderSizes, *, rope: Rope = Rope(theta=1e6), masks: tuple[Mask, ...] = ()) -> DecoderConfig:
    """Return a decoder of Qwen3 blocks; without `masks`, one for each layer, all are causal."""
    masks, qk_norm = masks or (Causal(),) * shape.num_layers, QKNorm(norm=shape.norm)
    return shape.decoder(shape.block(shape.attention(mask=mask, rope=rope, qk_norm=qk_norm)) for mask in masks)


def qwen3_moe(
    shape: DecoderSizes,
    *,
    expert_dim: int,
    num_experts: int = 128,
    num_experts_per_token: int = 8,
    renormalize: bool = True,
    dense_layers: frozenset[int] = frozenset(),
    rope: Rope = Rope(theta=1e6),
    mask: Mask = Causal(),
) -> DecoderConfig:
    """Return a decoder of Qwen3 blocks with experts; `dense_layers`, counted from 0, have `shape`'s MLP."""
    experts = shape.experts(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        mlp_dim=expert_dim,
        router=RouterConfig(order="score_first", renormalize=renormalize),
    )
    mixer = shape.attention(rope=rope, mask=mask, qk_norm=QKNorm(norm=shape.norm))
    sparse, dense = shape.block(mixer, experts), shape.block(mixer)
    return shape.decoder(dense if index in dense_layers else sparse for index in range(shape.num_layers))


def read_late_windows(fields: Fields, layers: int) -> tuple[Mask, ...]:
    """Read the masks: windows from layer `max_window_layers` on, or as `layer_types` says."""
    on, size = fields.flag("use_sliding_window", False), fields.integer("sliding_window", 4096, null=None)
    first = fields.integer("max_window_layers", 28, least=0)
    window = size if on else None
    return read_masks(fields, window, [window is not None and index >= first for index in range(layers)])


def write_late_windows(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys that `read_late_windows` reads."""
    masks = write_masks(config)
    if masks["sliding_window"] is None:
        return masks | {"use_sliding_window": False}
    return masks | {"use_sliding_window": True, "max_window_layers": masks["layer_types"].index("sliding_attention")}


def read_sparse_text(
    fields: Fields,
    *,
    num_kv_heads: int,
    mlp_dim: int,
    expert_dim: int,
    num_experts: int,
    num_experts_per_token: int,
    theta: float,
    renormalize: bool = True,
) -> DecoderConfig:
    """Read Qwen3's layers with experts, and positions of three dimensions; the arguments are the keys' defaults."""
    fields.rename("num_experts", "num_local_experts")
    fields.content.setdefault("intermediate_size", mlp_dim)
    shape = read_shape(fields, num_kv_heads=num_kv_heads)
    step, only = fields.integer("decoder_sparse_step", 1), fields.numbers("mlp_only_layers")
    for key in ("sliding_window", "use_sliding_window", "max_window_layers"):
        fields.take(key, None)  # transformers reads none of them: all layers have full attention
    fields.allow_only("use_qk_norm", True)
    fields.allow_only("qkv_bias", False)
    fields.allow_only("shared_expert_intermediate_size", 0)
    config = qwen3_moe(
        shape,
        num_experts=fields.integer("num_local_experts", num_experts),
        num_experts_per_token=fields.integer("num_experts_per_tok", num_experts_per_token),
        expert_dim=fields.integer("moe_intermediate_size", expert_dim),
        renormalize=renormalize,
        dense_layers=frozenset(index for index in range(shape.num_layers) if index in only or (index + 1) % step),
        rope=read_rope(fields, theta=theta, sections=VL_SECTIONS),
    )
    return moe.need_experts(fields, config)
