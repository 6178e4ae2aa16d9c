"""Llama 4, text (Meta 2025): chunked attention with RoPE, full attention without it in every fourth layer; experts."""

import functools
from collections.abc import Collection
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.families import moe
from eqx_decoders.families.common import (
    DecoderSizes,
    attentions,
    gated_mlp,
    llama_weights,
    read_masks,
    read_shape,
    write_masks,
    write_sizes,
)
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.layers.attention.attention import QKNorm, QueryTemperature
from eqx_decoders.layers.mask import Chunked, Mask
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Llama3Rope, Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_LOCAL = (Chunked, "attention_chunk_size")


def llama4(
    shape: DecoderSizes,
    *,
    num_experts: int,
    num_experts_per_token: int = 1,
    dense_dim: int = 16_384,
    sparse: Collection[int],
    rotated: Collection[int],
    masks: tuple[Mask, ...],
    rope: Rope,
    qk_norm: bool = True,
    temperature: QueryTemperature | None = QueryTemperature(),
) -> DecoderConfig:
    """Return a decoder of Llama 4 blocks; `shape`'s MLP is that of an expert and the shared one.

    The layers in `sparse`, counted from 0, have experts. Queries and keys are normalized in the `rotated` layers, and
    have a `temperature` in the others.
    """
    experts = shape.experts(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        router=RouterConfig(score="sigmoid", input_scaling=True),
        shared=shape.mlp(),
    )
    dense = MLPConfig(mlp_dim=dense_dim, activation=shape.activation)
    normed = QKNorm(norm=RMSNormConfig(eps=shape.eps, scale=False), when="after_rope") if qk_norm else None
    with_rope, without = dict(rope=rope, qk_norm=normed), dict(rope=None, temperature=temperature)

    def block(index: int, mask: Mask) -> BlockConfig:
        mixer = shape.attention(mask=mask, **(with_rope if index in rotated else without))
        return shape.block(mixer, experts if index in sparse else dense)

    return shape.decoder(map(block, range(shape.num_layers), masks))


def _read(fields: Fields) -> DecoderConfig:
    shape = read_shape(fields, num_kv_heads=8, head_dim=128, eps=1e-5)
    count = shape.num_layers
    interval, step = fields.integer("no_rope_layer_interval", 4), fields.integer("interleave_moe_layer_step", 1)
    rotated = fields.numbers("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(count)]
    if len(rotated) != count:
        raise fields.error(f"no_rope_layers has {len(rotated)} entries, but there are {count} layers.")
    chunk = fields.integer("attention_chunk_size", 8192, null=None)
    tuning = fields.content.get("attn_temperature_tuning")
    if isinstance(tuning, int):  # published as 4, and taken for true
        fields.content["attn_temperature_tuning"] = bool(tuning)
    temperature = QueryTemperature(scale=fields.number("attn_scale", 0.1), length=fields.integer("floor_scale", 8192))
    fields.allow_only("for_llm_compressor", False)
    config = llama4(
        shape,
        num_experts=fields.integer("num_local_experts", 16),
        num_experts_per_token=fields.integer("num_experts_per_tok", 1),
        dense_dim=fields.integer("intermediate_size_mlp", 16_384),
        sparse=frozenset(fields.numbers("moe_layers", range(step - 1, count, step))),
        rotated=frozenset(index for index in range(count) if rotated[index]),
        masks=read_masks(fields, chunk, [flag != 0 for flag in rotated], *_LOCAL),
        rope=read_rope(fields, theta=500_000.0, pairing="interleaved"),
        qk_norm=fields.flag("use_qk_norm", True),
        temperature=temperature if fields.flag("attn_temperature_tuning", True) else None,
    )
    return moe.need_experts(fields, config)


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixers = attentions(config)
    temperatures = [mixer.temperature for mixer in mixers if mixer.rope is None]
    temperature = next(iter(temperatures), None)
    settings = {
        "intermediate_size_mlp": moe.dense_dim(config, default=16_384),
        "moe_layers": moe.sparse_layers(config),
        "no_rope_layers": [int(mixer.rope is not None) for mixer in mixers],
        "use_qk_norm": any(mixer.qk_norm is not None for mixer in mixers),
        "attn_temperature_tuning": temperature is not None or not temperatures,
    }
    if temperature is not None:
        settings |= {"attn_scale": temperature.scale, "floor_scale": temperature.length}
    experts = moe.write_experts(config, count="num_local_experts", width="intermediate_size")
    return write_sizes(config) | experts | settings | write_masks(config, *_LOCAL) | write_rope(config)


_MLP = "model.layers.{layer}.feed_forward."
FAMILY = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    read=_read,
    write=_write,
    weights=llama_weights(
        mlp=moe.fused_experts(_MLP, "router", gate_up="experts embed mlp", down="experts mlp embed")
        + gated_mlp(_MLP + "shared_expert.", "mlp.shared.")
        + gated_mlp(_MLP)
    ),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | dict.fromkeys(("interleave_moe_layer_step", "no_rope_layer_interval"), "the lists say it"),
)

_SHAPE = DecoderSizes(
    vocab_size=202_048, embed_dim=5120, num_layers=48, num_heads=40, num_kv_heads=8, head_dim=128, mlp_dim=8192,
    eps=1e-5,
)  # fmt: skip
_ROTATED = frozenset(index for index in range(48) if (index + 1) % 4)
_model = functools.partial(llama4, _SHAPE, rotated=_ROTATED, masks=_SHAPE.cycle_masks(8192, 4, Chunked))
_SCOUT_ROPE = Llama3Rope(theta=500_000.0, factor=16.0, high_frequency_factor=1.0, pairing="interleaved")
_MAVERICK_ROPE = Rope(theta=500_000.0, pairing="interleaved")

MODELS = {
    "llama4-17b-16e": lambda: _model(num_experts=16, sparse=range(48), rope=_SCOUT_ROPE),
    "llama4-17b-128e": lambda: _model(num_experts=128, sparse=range(1, 48, 2), rope=_MAVERICK_ROPE, qk_norm=False),
}
