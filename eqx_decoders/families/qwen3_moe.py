"""Qwen3 with experts (Yang et al. 2025): Qwen3's attention; layers with experts and dense ones mixed at will."""

import dataclasses
from typing import Any

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.families.family import Family
from eqx_decoders.families.fields import Fields, activation_name
from eqx_decoders.families.moe import (
    HARMLESS,
    dense_of,
    experts_of,
    fused_experts,
    is_sparse,
    need_experts,
    separate_experts,
    write_experts,
)
from eqx_decoders.families.ropes import read_rope, write_ropes
from eqx_decoders.families.shape import (
    LLAMA_WEIGHTS,
    Shape,
    attentions,
    read_shape,
    write_masks,
    write_sizes,
)
from eqx_decoders.layers.attention import QKNorm
from eqx_decoders.layers.experts import ExpertsConfig
from eqx_decoders.layers.mask import Causal, Mask, SlidingWindow
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.layers.router import RouterConfig


def qwen3_moe(
    shape: Shape,
    *,
    num_experts: int,
    num_experts_per_token: int,
    expert_dim: int,
    renormalize: bool = True,
    dense_layers: frozenset[int] = frozenset(),
    rope: Rope = Rope(theta=1e6),
    mask: Mask = Causal(),
    attention_bias: bool = False,
) -> DecoderConfig:
    """A decoder of Qwen3 blocks with experts, but for `dense_layers`, counted from 0, whose MLP is `shape`'s."""
    norm = RMSNormConfig(eps=shape.eps)
    experts = ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        mlp_dim=expert_dim,
        activation=shape.activation,
        router=RouterConfig(order="score_first", renormalize=renormalize),
    )
    mixer = shape.attention(
        rope=rope, mask=mask, qk_norm=QKNorm(norm=norm), qkv_bias=attention_bias, out_bias=attention_bias
    )
    sparse = BlockConfig(mixer=mixer, mlp=experts, pre_mixer_norm=norm, pre_mlp_norm=norm)
    dense = BlockConfig(mixer=mixer, mlp=shape.mlp(), pre_mixer_norm=norm, pre_mlp_norm=norm)
    return shape.layered([dense if index in dense_layers else sparse for index in range(shape.num_layers)], norm)


def _read(fields: Fields) -> DecoderConfig:
    fields.rename("num_experts", "num_local_experts")
    fields.content.setdefault("intermediate_size", 6144)
    shape = read_shape(fields, num_kv_heads=4)
    step, only = fields.integer("decoder_sparse_step", 1), fields.numbers("mlp_only_layers")
    dense = frozenset(index for index in range(shape.num_layers) if index in only or (index + 1) % step)
    on, window = fields.flag("use_sliding_window", False), fields.integer("sliding_window", 4096, null=None)
    fields.take("max_window_layers", None)  # transformers gives all layers the window
    fields.off("use_qk_norm", True)  # the next three stand in Qwen3-Coder's files, and transformers does not read them
    fields.off("qkv_bias", False)
    fields.off("shared_expert_intermediate_size", 0)
    config = qwen3_moe(
        shape,
        num_experts=fields.integer("num_local_experts", 128),
        num_experts_per_token=fields.integer("num_experts_per_tok", 8),
        expert_dim=fields.integer("moe_intermediate_size", 768),
        renormalize=fields.flag("norm_topk_prob", False),
        dense_layers=dense,
        rope=read_rope(fields),
        mask=SlidingWindow(window) if on and window is not None else Causal(),
        attention_bias=fields.flag("attention_bias", False),
    )
    return need_experts(fields, config)


def _write(config: DecoderConfig) -> dict[str, Any]:
    experts, dense, mixer = experts_of(config), dense_of(config), attentions(config)[0]
    window = write_masks(config)["sliding_window"]
    return (
        write_sizes(config)
        | write_experts(experts, "num_experts")
        | {
            "hidden_act": activation_name(experts.activation),
            "moe_intermediate_size": experts.mlp_dim,
            "intermediate_size": experts.mlp_dim if dense is None else dense.mlp_dim,
            "norm_topk_prob": experts.router.renormalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [index for index, block in enumerate(config.blocks) if not is_sparse(block)],
            "attention_bias": mixer.qkv_bias,
            "use_sliding_window": window is not None,
            "sliding_window": window,
        }
        | write_ropes(mixer.rope)
    )


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read,
    write=_write,
    weights=LLAMA_WEIGHTS + separate_experts("model.layers.{layer}.mlp.", "gate_proj", "up_proj", "down_proj", "gate"),
    fused=fused_experts("model.layers.{layer}.mlp."),
    harmless=HARMLESS,
)


def qwen3_custom_moe(
    shape: Shape, *, num_experts: int, num_experts_per_token: int, expert_dim: int, latent_dim: int, rope: Rope
) -> DecoderConfig:
    """MaxText's variant: attention writes `latent_dim` features, which alone its experts and their router see.

    `x += up(experts(norm(attention(norm(x)))))`: one residual connection around both layers. It has no Hugging Face
    form.
    """
    plain = qwen3_moe(
        shape,
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        expert_dim=expert_dim,
        rope=rope,
    )
    mixer = dataclasses.replace(attentions(plain)[0], out_dim=latent_dim)
    block = dataclasses.replace(plain.blocks[0], mixer=mixer, wiring="chained")
    return dataclasses.replace(plain, blocks=(block,) * shape.num_layers)


def _shape(
    embed_dim: int, num_layers: int, num_heads: int, num_kv_heads: int, mlp_dim: int, head_dim: int = 128
) -> Shape:
    return Shape(
        vocab_size=151_936,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_dim=mlp_dim,
    )


def _qwen3_moe(
    embed_dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    expert_dim: int,
    num_experts: int = 128,
    theta: float = 1e6,
) -> DecoderConfig:
    shape = _shape(embed_dim, num_layers, num_heads, num_kv_heads, expert_dim)
    return qwen3_moe(
        shape, num_experts=num_experts, num_experts_per_token=8, expert_dim=expert_dim, rope=Rope(theta=theta)
    )


MODELS = {
    "qwen3-30b-a3b": lambda: _qwen3_moe(2048, 48, 32, 4, 768, theta=1e7),
    "qwen3-30b-a3b-base": lambda: _qwen3_moe(2048, 48, 32, 4, 768),
    "qwen3-235b-a22b": lambda: _qwen3_moe(4096, 94, 64, 4, 1536, theta=5e6),
    "qwen3-custom-30b-a3b": lambda: qwen3_custom_moe(
        _shape(2048, 48, 16, 2, 2048, head_dim=256),
        num_experts=128,
        num_experts_per_token=8,
        expert_dim=2048,
        latent_dim=768,
        rope=Rope(theta=1e7),
    ),
    "qwen3-480b-a35b": lambda: _qwen3_moe(6144, 62, 96, 8, 2560, num_experts=160, theta=1e7),
}
