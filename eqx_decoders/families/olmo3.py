"""Olmo 3 (Team Olmo 2025): norms on the layers' outputs alone, norms over all heads, a window in three of four."""

from typing import Any

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.families.family import Family
from eqx_decoders.families.fields import Fields
from eqx_decoders.families.gemma3 import write_local_ropes
from eqx_decoders.families.ropes import read_ropes
from eqx_decoders.families.shape import (
    ATTENTION,
    ENDS,
    GATED_MLP,
    Shape,
    attentions,
    norms,
    read_masks,
    read_shape,
    write_masks,
    write_shape,
)
from eqx_decoders.layers.attention import QKNorm
from eqx_decoders.layers.mask import Causal, Mask, SlidingWindow
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope, YarnRope


_THETA = 500_000.0


def olmo3(
    shape: Shape,
    *,
    masks: tuple[Mask, ...],
    rope: Rope = Rope(theta=_THETA),
    local_rope: Rope = Rope(theta=_THETA),
    attention_bias: bool = False,
) -> DecoderConfig:
    """A decoder of Olmo 3 blocks; layers with a window have the rotary embedding `local_rope`."""
    norm = RMSNormConfig(eps=shape.eps)
    options = dict(qk_norm=QKNorm(norm=norm, over="heads"), qkv_bias=attention_bias, out_bias=attention_bias)

    def block(mask):
        mixer = shape.attention(mask=mask, rope=local_rope if isinstance(mask, SlidingWindow) else rope, **options)
        return BlockConfig(mixer=mixer, mlp=shape.mlp(), post_mixer_norm=norm, post_mlp_norm=norm)

    return shape.decoder(block, norm, masks)


def _read(fields: Fields) -> DecoderConfig:
    shape = read_shape(fields, eps=1e-5)
    window = fields.integer("sliding_window", 4096, null=None)
    # transformers gives the layers with a window this theta in old files, whatever their rope_theta is
    ropes = read_ropes(fields, theta=_THETA, local_theta=_THETA, local_key=None)
    return olmo3(
        shape,
        masks=read_masks(fields, shape.num_layers, window, lambda index: (index + 1) % 4 != 0),
        rope=ropes["full_attention"],
        local_rope=ropes["sliding_attention"],
        attention_bias=fields.flag("attention_bias", False),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    bias = {"attention_bias": attentions(config)[0].qkv_bias}
    return write_shape(config) | bias | write_masks(config, default=4096) | write_local_ropes(config)


FAMILY = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    read=_read,
    write=_write,
    weights=ENDS
    + ATTENTION
    + GATED_MLP
    + norms(post_mixer_norm="post_attention_layernorm", post_mlp_norm="post_feedforward_layernorm"),
)


def _olmo3(
    embed_dim: int, num_layers: int, num_heads: int, num_kv_heads: int, mlp_dim: int, rope: Rope
) -> DecoderConfig:
    shape = Shape(
        vocab_size=100_278,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        mlp_dim=mlp_dim,
    )
    masks = tuple(SlidingWindow(4096) if (index + 1) % 4 else Causal() for index in range(num_layers))
    return olmo3(shape, masks=masks, rope=rope)


_LONG = YarnRope(theta=_THETA, factor=8.0, original_length=8192)

MODELS = {
    "olmo3-7b-pt": lambda: _olmo3(4096, 32, 32, 32, 11_008, Rope(theta=_THETA)),
    "olmo3-7b": lambda: _olmo3(4096, 32, 32, 32, 11_008, _LONG),
    "olmo3-32b": lambda: _olmo3(5120, 64, 40, 8, 27_648, _LONG),
}
