"""Llama 4, text (Meta 2025): experts; chunked attention with RoPE, full attention without RoPE in every 4th layer."""

import functools
from collections.abc import Collection
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families.common import (
    LAYER,
    DecoderSizes,
    attentions,
    decoder_sizes,
    llama_weights,
    read_masks,
    write_masks,
)
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings, rotated_layers
from eqx_decoders.families.setting_rows import Flag, Integer, Only, Rule, Values
from eqx_decoders.families.weight_rows import gated_mlp
from eqx_decoders.layers.attention.attention import QKNorm, QueryTemperature
from eqx_decoders.layers.mask import Chunked, Mask
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


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
    """Return a decoder of Llama 4 blocks.

    **Arguments:**

    - `shape`: sizes of the decoder; its MLP is the shared expert, and has the width of the routed experts.
    - `num_experts`, `num_experts_per_token`: number of routed experts, and number per token.
    - `dense_dim`: MLP width of the layers without experts.
    - `sparse`: the layers with experts, from 0.
    - `rotated`: the layers with `rope`, from 0.
    - `masks`: the attention mask of each layer.
    - `qk_norm`: whether the rotated layers normalize queries and keys.
    - `temperature`: scale of the queries by position, in the layers without RoPE.
    """
    experts = shape.experts(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        router=RouterConfig(score="sigmoid", input_scaling=True),
        shared=shape.mlp(),
    )
    dense = MLPConfig(mlp_dim=dense_dim, activation=shape.activation)
    normed = QKNorm(norm=RMSNormConfig(eps=shape.eps, scale=False), when="after_rope") if qk_norm else None

    def block(index: int, mask: Mask) -> BlockConfig:
        if index in rotated:
            mixer = shape.attention(mask=mask, rope=rope, qk_norm=normed)
        else:
            mixer = shape.attention(mask=mask, rope=None, temperature=temperature)
        return shape.block(mixer, experts if index in sparse else dense)

    return moe.need_experts(shape.decoder(map(block, range(shape.num_layers), masks)))


def _read_sparse(fields: Fields, values: Values) -> frozenset[int]:
    step = fields.integer("interleave_moe_layer_step", 1)
    default = range(step - 1, values["shape"].num_layers, step)
    return frozenset(fields.integers("moe_layers", default))


def _read_masks(fields: Fields, values: Values) -> tuple[Mask, ...]:
    chunk = fields.integer("attention_chunk_size", 8192, null=None)
    return read_masks(fields, values, chunk, lambda index: index in values["rotated"], Chunked, "attention_chunk_size")


def _read_temperature(fields: Fields, values: Values) -> QueryTemperature | None:
    tuning = fields.content.get("attn_temperature_tuning")
    if isinstance(tuning, int):  # published files have 4, which transformers tests as a boolean
        fields.content["attn_temperature_tuning"] = bool(tuning)
    temperature = QueryTemperature(scale=fields.number("attn_scale", 0.1), length=fields.integer("floor_scale", 8192))
    return temperature if fields.flag("attn_temperature_tuning", True) else None


def _write_temperature(config: DecoderConfig) -> dict[str, Any]:
    temperatures = [mixer.temperature for mixer in attentions(config) if mixer.rope is None]
    temperature = next(iter(temperatures), None)
    tuning = {"attn_temperature_tuning": temperature is not None or not temperatures}
    if temperature is None:
        return tuning
    return tuning | {"attn_scale": temperature.scale, "floor_scale": temperature.length}


def _dense_dim(config: DecoderConfig) -> int:
    return next((block.mlp.mlp_dim for block in config.blocks if isinstance(block.mlp, MLPConfig)), 16_384)


def _has_qk_norm(config: DecoderConfig) -> bool:
    return any(mixer.qk_norm is not None for mixer in attentions(config))


_MLP = LAYER + "feed_forward."
FAMILY = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=8, head_dim=128, eps=1e-5, paths=moe.EXPERT_PATHS),
        rotated_layers(),
        Rule("sparse", _read_sparse, lambda config: {"moe_layers": moe.sparse_layer_indices(config)}),
        Rule("masks", _read_masks, lambda config: write_masks(config, Chunked, "attention_chunk_size")),
        Rule("temperature", _read_temperature, _write_temperature),
        *moe.expert_counts("num_local_experts", num=16, chosen=1),
        Integer("intermediate_size_mlp", _dense_dim, 16_384, name="dense_dim"),
        Flag("use_qk_norm", _has_qk_norm, True, name="qk_norm"),
        rope_settings(theta=500_000.0, pairing="interleaved", required=False),
        Only("for_llm_compressor", False),
    ),
    build=llama4,
    weights=llama_weights(
        mlp=moe.fused_experts(_MLP, "router", gate_up="experts embed mlp", down="experts mlp embed")
        + gated_mlp(_MLP + "shared_expert.", "mlp.shared.")
        + gated_mlp(_MLP)
    ),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {"interleave_moe_layer_step no_rope_layer_interval": "moe_layers and no_rope_layers determine it"},
)


_SHAPE = DecoderSizes(
    vocab_size=202_048, embed_dim=5120, num_layers=48, num_heads=40, num_kv_heads=8, head_dim=128, mlp_dim=8192,
    eps=1e-5,
)  # fmt: skip
_ROTATED = frozenset(index for index in range(48) if (index + 1) % 4)
_model = functools.partial(llama4, _SHAPE, rotated=_ROTATED, masks=_SHAPE.cycle_masks(8192, 4, Chunked))
_MAVERICK_ROPE = Rope(theta=500_000.0, pairing="interleaved")

MODELS = {
    "llama4-17b-16e": dict(
        model_type="llama4_text", vocab_size=202_048, hidden_size=5120, num_hidden_layers=48, num_attention_heads=40,
        intermediate_size=8192,
        rope_scaling=dict(
            factor=16.0, high_freq_factor=1.0, low_freq_factor=1.0, original_max_position_embeddings=8192,
            rope_type="llama3",
        ),
    ),
    "llama4-17b-128e": lambda: _model(num_experts=128, sparse=range(1, 48, 2), rope=_MAVERICK_ROPE, qk_norm=False),
}  # fmt: skip
