"""Mixtral (Jiang et al. 2024): Mistral's attention, and eight experts of which each token uses two."""

from typing import Any

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.families.family import Family
from eqx_decoders.families.fields import Fields, activation_name
from eqx_decoders.families.moe import HARMLESS, experts_of, fused_experts, separate_experts, write_experts
from eqx_decoders.families.ropes import read_rope, write_ropes
from eqx_decoders.families.shape import (
    ATTENTION,
    ENDS,
    PRE_NORMS,
    Shape,
    attentions,
    read_shape,
    write_masks,
    write_sizes,
)
from eqx_decoders.layers.experts import ExpertsConfig
from eqx_decoders.layers.mask import Causal, Mask, SlidingWindow
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope


def mixtral(
    shape: Shape, *, num_experts: int, num_experts_per_token: int, rope: Rope, mask: Mask = Causal()
) -> DecoderConfig:
    """A decoder of Mixtral blocks: a softmax over the chosen experts weighs them."""
    norm = RMSNormConfig(eps=shape.eps)
    experts = ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        mlp_dim=shape.mlp_dim,
        activation=shape.activation,
    )
    block = BlockConfig(
        mixer=shape.attention(rope=rope, mask=mask), mlp=experts, pre_mixer_norm=norm, pre_mlp_norm=norm
    )
    return shape.decoder(lambda _: block, norm)


def _read(fields: Fields) -> DecoderConfig:
    shape = read_shape(fields, num_kv_heads=8, eps=1e-5)
    window = fields.integer("sliding_window", None)
    return mixtral(
        shape,
        num_experts=fields.integer("num_local_experts", 8),
        num_experts_per_token=fields.integer("num_experts_per_tok", 2),
        rope=read_rope(fields, theta=1e6),
        mask=Causal() if window is None else SlidingWindow(window),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    experts = experts_of(config)
    sizes = {"intermediate_size": experts.mlp_dim, "hidden_act": activation_name(experts.activation)}
    window = {"sliding_window": write_masks(config)["sliding_window"]}
    rope = write_ropes(attentions(config)[0].rope)
    return write_sizes(config) | sizes | write_experts(experts, "num_local_experts") | window | rope


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read=_read,
    write=_write,
    weights=ENDS
    + ATTENTION
    + separate_experts("model.layers.{layer}.block_sparse_moe.", "w1", "w3", "w2", "gate")
    + PRE_NORMS,
    fused=fused_experts("model.layers.{layer}.mlp."),
    harmless=HARMLESS,
)


def _mixtral(embed_dim: int, num_layers: int, num_heads: int, mlp_dim: int, vocab_size: int) -> DecoderConfig:
    shape = Shape(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=mlp_dim,
        eps=1e-5,
    )
    return mixtral(shape, num_experts=8, num_experts_per_token=2, rope=Rope(theta=1e6))


MODELS = {
    "mixtral-8x7b": lambda: _mixtral(4096, 32, 32, 14_336, 32_000),
    "mixtral-8x22b": lambda: _mixtral(6144, 56, 48, 16_384, 32_768),
}
