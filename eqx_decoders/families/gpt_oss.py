"""GPT-OSS (OpenAI 2025): sinks, a window in every other layer, biases everywhere, experts with a clamped SwiGLU."""

import dataclasses
from typing import Any

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.families.family import Family, Weight
from eqx_decoders.families.fields import Fields
from eqx_decoders.families.moe import HARMLESS, experts_of, write_experts
from eqx_decoders.families.ropes import read_rope, write_ropes
from eqx_decoders.families.shape import (
    ATTENTION,
    ENDS,
    PRE_NORMS,
    Shape,
    attentions,
    read_masks,
    read_shape,
    write_masks,
    write_sizes,
)
from eqx_decoders.layers.experts import ExpertsConfig
from eqx_decoders.layers.mask import Causal, Mask, SlidingWindow
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope, YarnRope
from eqx_decoders.layers.router import RouterConfig


_ROPE = YarnRope(theta=150_000.0, factor=32.0, original_length=4096, truncate=False)


def gpt_oss(
    shape: Shape,
    *,
    num_experts: int,
    num_experts_per_token: int,
    masks: tuple[Mask, ...],
    rope: Rope = _ROPE,
    limit: float = 7.0,
    attention_bias: bool = True,
) -> DecoderConfig:
    """A decoder of GPT-OSS blocks: `(up + 1) gate sigmoid(1.702 gate)`, with gate and up cut off at `limit`."""
    norm = RMSNormConfig(eps=shape.eps)
    experts = ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        mlp_dim=shape.mlp_dim,
        activation="quick_gelu",
        up_offset=1.0,
        limit=limit,
        bias=True,
        router=RouterConfig(bias=True),
    )
    options = dict(rope=rope, sinks=True, qkv_bias=attention_bias, out_bias=attention_bias)

    def block(mask):
        mixer = shape.attention(mask=mask, **options)
        return BlockConfig(mixer=mixer, mlp=experts, pre_mixer_norm=norm, pre_mlp_norm=norm)

    return shape.decoder(block, norm, masks)


def _read(fields: Fields) -> DecoderConfig:
    shape = read_shape(fields, num_kv_heads=8, head_dim=64, eps=1e-5)
    fields.off("hidden_act", "silu")
    fields.off("swiglu_alpha", 1.702)
    fields.off("experts_per_token", fields.content.get("num_experts_per_tok", 4))  # the same, under an older name
    window = fields.integer("sliding_window", 128, null=None)
    scaled = any(fields.content.get(key) is not None for key in ("rope_parameters", "rope_scaling"))
    return gpt_oss(
        dataclasses.replace(shape, activation="silu"),
        num_experts=fields.integer("num_local_experts", 128),
        num_experts_per_token=fields.integer("num_experts_per_tok", 4),
        masks=read_masks(fields, shape.num_layers, window, lambda index: index % 2 == 0),
        rope=read_rope(fields, theta=150_000.0) if scaled else _ROPE,
        limit=fields.number("swiglu_limit", 7.0),
        attention_bias=fields.flag("attention_bias", True),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    experts, mixer = experts_of(config), attentions(config)[0]
    own = {
        "intermediate_size": experts.mlp_dim,
        "hidden_act": "silu",
        "swiglu_alpha": 1.702,
        "swiglu_limit": experts.limit,
        "attention_bias": mixer.qkv_bias,
    }
    masks, rope = write_masks(config), write_ropes(mixer.rope)
    return write_sizes(config) | write_experts(experts, "num_local_experts") | own | masks | rope


_LAYER = "model.layers.{layer}."
_EXPERTS = _LAYER + "mlp.experts."
_BOTH, _BOTH_BIAS = "experts embed (mlp part) -> part experts embed mlp", "experts (mlp part) -> part experts mlp"
FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    read=_read,
    write=_write,
    weights=(
        *ENDS,
        *ATTENTION,
        *PRE_NORMS,
        Weight(_LAYER + "self_attn.sinks", "mixer.sink", "heads -> heads"),
        Weight(_LAYER + "mlp.router.weight", "mlp.router.kernel", "experts embed -> embed experts"),
        Weight(_LAYER + "mlp.router.bias", "mlp.router.bias", "experts -> experts"),
        Weight(_EXPERTS + "gate_up_proj", "mlp.gate", _BOTH, part=(0, 2)),
        Weight(_EXPERTS + "gate_up_proj", "mlp.up", _BOTH, part=(1, 2)),
        Weight(_EXPERTS + "gate_up_proj_bias", "mlp.gate_bias", _BOTH_BIAS, part=(0, 2)),
        Weight(_EXPERTS + "gate_up_proj_bias", "mlp.up_bias", _BOTH_BIAS, part=(1, 2)),
        Weight(_EXPERTS + "down_proj", "mlp.down", "experts mlp embed -> experts mlp embed"),
        Weight(_EXPERTS + "down_proj_bias", "mlp.down_bias", "experts embed -> experts embed"),
    ),
    harmless=HARMLESS | {"initial_context_length": "rope_scaling says it"},
)


def _gpt_oss(num_layers: int, num_experts: int) -> DecoderConfig:
    shape = Shape(
        vocab_size=201_088,
        embed_dim=2880,
        num_layers=num_layers,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        mlp_dim=2880,
        eps=1e-5,
    )
    masks = tuple(Causal() if index % 2 else SlidingWindow(128) for index in range(num_layers))
    return gpt_oss(shape, num_experts=num_experts, num_experts_per_token=4, masks=masks)


MODELS = {"gpt-oss-20b": lambda: _gpt_oss(24, 32), "gpt-oss-120b": lambda: _gpt_oss(36, 128)}
