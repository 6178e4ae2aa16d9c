"""Gemma 2 (Gemma Team 2024): Gemma with norms around both layers, soft caps, and a window in every other layer."""

from typing import Any

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.families.family import Family
from eqx_decoders.families.fields import Fields
from eqx_decoders.families.ropes import read_rope, write_ropes
from eqx_decoders.families.shape import (
    ATTENTION,
    ENDS,
    GATED_MLP,
    SANDWICH_NORMS,
    Shape,
    attentions,
    read_masks,
    read_shape,
    write_masks,
    write_shape,
)
from eqx_decoders.layers.attention import AttentionConfig
from eqx_decoders.layers.mask import Causal, Mask, SlidingWindow
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope


def sandwich(shape: Shape, mixer: AttentionConfig) -> BlockConfig:
    """A block with norms before and after both layers, scales stored as 1 + w."""
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    return BlockConfig(
        mixer=mixer,
        mlp=shape.mlp(),
        pre_mixer_norm=norm,
        post_mixer_norm=norm,
        pre_mlp_norm=norm,
        post_mlp_norm=norm,
    )


def gemma2(
    shape: Shape,
    *,
    masks: tuple[Mask, ...],
    query_scalar: int,
    rope: Rope = Rope(),
    attention_cap: float | None = 50.0,
    logit_cap: float | None = 30.0,
    attention_bias: bool = False,
) -> DecoderConfig:
    """A decoder of Gemma 2 blocks; queries are multiplied by `query_scalar ** -0.5`."""
    options = dict(rope=rope, query_scale=query_scalar**-0.5, soft_cap=attention_cap)
    biases = dict(qkv_bias=attention_bias, out_bias=attention_bias)
    return shape.decoder(
        lambda mask: sandwich(shape, shape.attention(mask=mask, **options, **biases)),
        RMSNormConfig(eps=shape.eps, offset=1.0),
        masks,
        embedding_scale=shape.embed_dim**0.5,
        logit_soft_cap=logit_cap,
    )


def read_gemma_shape(fields: Fields) -> Shape:
    """Gemma 2's and 3's sizes."""
    return read_shape(
        fields,
        num_kv_heads=4,
        head_dim=256,
        tied=True,
        activation="hidden_activation",
        default_activation="gelu_pytorch_tanh",
    )


def _read(fields: Fields) -> DecoderConfig:
    shape = read_gemma_shape(fields)
    window = fields.integer("sliding_window", 4096, null=None)
    return gemma2(
        shape,
        masks=read_masks(fields, shape.num_layers, window, lambda index: index % 2 == 0),
        query_scalar=fields.integer("query_pre_attn_scalar", 256),
        rope=read_rope(fields),
        attention_cap=fields.number("attn_logit_softcapping", 50.0, null=None),
        logit_cap=fields.number("final_logit_softcapping", 30.0, null=None),
        attention_bias=fields.flag("attention_bias", False),
    )


def write_gemma(config: DecoderConfig) -> dict[str, Any]:
    """The keys that Gemma 2 and 3 share."""
    mixer = attentions(config)[0]
    caps = {"attn_logit_softcapping": mixer.soft_cap, "final_logit_softcapping": config.logit_soft_cap}
    shape = write_shape(config, activation="hidden_activation") | {"attention_bias": mixer.qkv_bias}
    scale = mixer.head_dim**-0.5 if mixer.query_scale is None else mixer.query_scale
    # transformers makes the mask of the window even if no layer has it
    return shape | write_masks(config, default=4096) | {"query_pre_attn_scalar": round(scale**-2)} | caps


def _write(config: DecoderConfig) -> dict[str, Any]:
    return write_gemma(config) | write_ropes(attentions(config)[0].rope)


WEIGHTS = ENDS + ATTENTION + GATED_MLP + SANDWICH_NORMS
HARMLESS = {"hidden_act": "transformers reads hidden_activation"}
FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    read=_read,
    write=_write,
    weights=WEIGHTS,
    harmless=HARMLESS,
)


def _gemma2(
    embed_dim: int, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int, mlp_dim: int, query_scalar: int
) -> DecoderConfig:
    shape = Shape(
        vocab_size=256_128,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        tied=True,
        activation="gelu_tanh",
    )
    masks = tuple(Causal() if index % 2 else SlidingWindow(4096) for index in range(num_layers))
    return gemma2(shape, masks=masks, query_scalar=query_scalar)


MODELS = {
    "gemma2-2b": lambda: _gemma2(2304, 26, 8, 4, 256, 9216, 256),
    "gemma2-9b": lambda: _gemma2(3584, 42, 16, 8, 256, 14_336, 256),
    "gemma2-27b": lambda: _gemma2(4608, 46, 32, 16, 128, 36_864, 144),
}
