"""Granite 4, hybrid (IBM 2025): Mamba-2, few layers of attention without positions, experts or an MLP, multipliers."""

import dataclasses
import functools
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.residual.residual import Sequential
from eqx_decoders.errors import ConversionError
from eqx_decoders.families import moe
from eqx_decoders.families._mamba import mamba_weights
from eqx_decoders.families.common import (
    ENDS,
    PRE_NORMS,
    DecoderSizes,
    first_mixer,
    read_hybrid_layers,
    read_shape,
    self_attention,
    write_hybrid_layers,
    write_sizes,
)
from eqx_decoders.families.config_reader import Fields, activation_name
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.families.weight_rows import Weight, sharing
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def granite_hybrid(
    shape: DecoderSizes,
    *,
    mamba: Mamba2Config | None,
    full: tuple[bool, ...],
    mlp: MLPConfig | ExpertsConfig,
    query_scale: float,
    embedding_scale: float,
    logit_divisor: float,
    residual_scale: float,
    rope: Rope | None = None,
) -> DecoderConfig:
    """Return a decoder of Granite's blocks: attention in the layers where `full` is True, else `mamba`."""
    attention = shape.attention(rope=rope, query_scale=query_scale)

    def block(has_attention: bool) -> BlockConfig:
        mixer = attention if has_attention or mamba is None else mamba
        return dataclasses.replace(shape.block(mixer, mlp), residual=Sequential(residual_scale=residual_scale))

    scales: dict[str, Any] = dict(embedding_scale=embedding_scale, logit_divisor=logit_divisor)
    return shape.decoder(map(block, full), **scales)


def granite_experts(shape: DecoderSizes, *, dim: int, shared_dim: int, **options: Any) -> ExpertsConfig:
    """Return experts of width `dim`, a softmax over the chosen ones, and a shared one of `shared_dim`."""
    return shape.experts(mlp_dim=dim, shared=MLPConfig(mlp_dim=shared_dim, activation=shape.activation), **options)


def _read(fields: Fields) -> DecoderConfig:
    fields.rename("layers_block_type", "layer_types")
    fields.content.pop("head_dim", None)  # it follows from the others
    experts, shared_dim = (
        fields.integer("num_local_experts", 8, least=0),
        fields.integer("shared_intermediate_size", 1024),
    )
    chosen = fields.integer("num_experts_per_tok", 2, least=0)
    fields.content.setdefault("intermediate_size", 11_008)
    shape = read_shape(fields, tied=False)
    full = read_hybrid_layers(fields, shape.num_layers, None)
    mamba = _read_mamba(fields, shape)
    mlp = dataclasses.replace(shape, mlp_dim=shared_dim).mlp()
    if experts:
        options = dict(num_experts=experts, num_experts_per_token=chosen)
        mlp = granite_experts(shape, dim=shape.mlp_dim, shared_dim=shared_dim, **options)
    positions = fields.word("position_embedding_type", {"rope": True, "nope": False, "none": False}, "none")
    rope = read_rope(fields)
    return granite_hybrid(
        shape,
        mamba=None if all(full) else mamba,
        full=full,
        mlp=mlp,
        query_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_divisor=fields.number("logits_scaling", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        rope=rope if positions else None,
    )


def _read_mamba(fields: Fields, shape: DecoderSizes) -> Mamba2Config:
    heads, inner = fields.integer("mamba_n_heads", 128), fields.integer("mamba_expand", 2) * shape.embed_dim
    if fields.content.get("mamba_d_head") == "auto":
        fields.content["mamba_d_head"] = None
    value_dim = fields.integer("mamba_d_head", None) or inner // heads
    if heads * value_dim != inner:
        raise fields.error(
            f"mamba_n_heads={heads} x mamba_d_head={value_dim} must be mamba_expand x hidden_size={inner}."
        )
    fields.allow_only("mamba_proj_bias", False)
    dt_min, dt_max = _read_limits(fields)
    return Mamba2Config(
        num_heads=heads,
        value_dim=value_dim,
        num_groups=fields.integer("mamba_n_groups", 1),
        key_dim=fields.integer("mamba_d_state", 256),
        taps=fields.integer("mamba_d_conv", 4),
        taps_bias=fields.flag("mamba_conv_bias", True),
        dt_min=dt_min,
        dt_max=dt_max,
        eps=shape.eps,
    )


_INFINITE = {"__float__": "Infinity"}  # as transformers writes it


def _read_limits(fields: Fields) -> tuple[float, float | None]:
    """Read the bounds of a step: two numbers, the second None where it is infinite."""
    limits = fields.take("time_step_limit", [0.0, _INFINITE])
    low, high = limits if isinstance(limits, list) and len(limits) == 2 else (None, None)
    infinite = high == _INFINITE or high == float("inf")
    bounds = Fields({"time_step_limit[0]": low, "time_step_limit[1]": 1.0 if infinite else high}, fields.where)
    least = 0.0 if low == 0 and not isinstance(low, bool) else bounds.number("time_step_limit[0]")
    greatest = bounds.number("time_step_limit[1]")
    return least, None if infinite else greatest


def _write(config: DecoderConfig) -> dict[str, Any]:
    mlp, attention, residual = config.blocks[0].mlp, first_mixer(config, AttentionConfig), config.blocks[0].residual
    if not isinstance(mlp, MLPConfig | ExpertsConfig) or not isinstance(residual, Sequential):
        raise ConversionError("DecoderConfig.blocks must be sequential, and have experts or an MLP.")
    shared = mlp if isinstance(mlp, MLPConfig) else mlp.shared
    settings = {
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "hidden_act": activation_name(mlp.activation),
        "shared_intermediate_size": shared.mlp_dim if shared else 0,
        "attention_multiplier": attention.query_scale,
        "embedding_multiplier": config.embedding_scale,
        "logits_scaling": config.logit_divisor,
        "residual_multiplier": residual.residual_scale,
        "position_embedding_type": None if attention.rope is None else "rope",
    }
    if isinstance(mlp, ExpertsConfig):
        settings |= moe.write_experts(config, count="num_local_experts", width="intermediate_size")
    mambas = [block.mixer for block in config.blocks if isinstance(block.mixer, Mamba2Config)]
    # transformers writes rope_parameters even where nothing is rotated
    rope = write_rope(config) if attention.rope else {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    sizes = {key: value for key, value in write_sizes(config).items() if key != "head_dim"}
    layers = write_hybrid_layers(config, AttentionConfig)
    return sizes | settings | layers | _write_mamba(config, mambas[0] if mambas else None) | rope


def _write_mamba(config: DecoderConfig, mamba: Mamba2Config | None) -> dict[str, Any]:
    if mamba is None:  # transformers wants its sizes to fit nevertheless
        return {"mamba_n_heads": config.embed_dim, "mamba_d_head": 2, "mamba_expand": 2}
    return {
        "mamba_n_heads": mamba.num_heads,
        "mamba_d_head": mamba.value_dim,
        "mamba_expand": mamba.num_heads * mamba.value_dim // config.embed_dim,
        "mamba_n_groups": mamba.num_groups,
        "mamba_d_state": mamba.key_dim,
        "mamba_d_conv": mamba.taps,
        "mamba_conv_bias": mamba.taps_bias,
        "mamba_proj_bias": False,
        "time_step_limit": [mamba.dt_min, _INFINITE if mamba.dt_max is None else mamba.dt_max],
    }


_LAYER = "model.layers.{layer}."
_MOE = _LAYER + "block_sparse_moe."
_INTO, _OUT = "mlp embed -> embed mlp", "embed mlp -> mlp embed"
_EACH_INTO = "experts mlp embed -> experts embed mlp"
FAMILY = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    read=_read,
    write=_write,
    weights=(
        *ENDS,
        *PRE_NORMS,
        *self_attention(_LAYER),
        *mamba_weights(_LAYER + "mamba."),
        *(
            row
            for path in ("mlp.", "mlp.shared.")
            for row in (
                *sharing(_LAYER + "shared_mlp.input_linear.weight", (path + "gate", _INTO), (path + "up", _INTO)),
                Weight(_LAYER + "shared_mlp.output_linear.weight", path + "down", _OUT),
            )
        ),
        *sharing(_MOE + "input_linear.weight", ("mlp.gate", _EACH_INTO), ("mlp.up", _EACH_INTO), axis=1),
        Weight(_MOE + "output_linear.weight", "mlp.down", "experts embed mlp -> experts mlp embed"),
        Weight(_MOE + "router.layer.weight", "mlp.router.kernel", "experts embed -> embed experts"),
    ),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {
        "mamba_chunk_size": "how it is run",
        **dict.fromkeys(
            ("init_method", "normalization_function"), "how it was trained: RMSNorm is the one that is read"
        ),
        "mlp_bias": "transformers does not read it",
    },
)

_shape = functools.partial(DecoderSizes, vocab_size=100_352, num_layers=40, eps=1e-5, tied=True, init_std=0.1)
_FULL = tuple(index % 10 == 5 for index in range(40))


def _model(shape: DecoderSizes, mamba_heads: int, logit_divisor: float, experts: ExpertsConfig | None = None):
    mamba = Mamba2Config(num_heads=mamba_heads, value_dim=64, num_groups=1, key_dim=128, eps=shape.eps)
    return granite_hybrid(
        shape, mamba=mamba, full=_FULL, mlp=experts or shape.mlp(), query_scale=1 / shape.head_dim,
        embedding_scale=12.0, logit_divisor=logit_divisor, residual_scale=0.22,
    )  # fmt: skip


_MICRO = _shape(embed_dim=2048, num_heads=32, num_kv_heads=8, head_dim=64, mlp_dim=8192)
_1B = _shape(embed_dim=1536, num_heads=12, num_kv_heads=4, head_dim=128, mlp_dim=4096)
_TINY = _shape(embed_dim=1536, num_heads=12, num_kv_heads=4, head_dim=128, mlp_dim=512)
_SMALL = _shape(embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=768)

MODELS = {
    "granite4-h-micro": lambda: _model(_MICRO, 64, 8.0),
    "granite4-h-1b": lambda: _model(_1B, 48, 6.0),
    "granite4-h-tiny": lambda: _model(
        _TINY, 48, 6.0, granite_experts(_TINY, dim=512, shared_dim=1024, num_experts=64, num_experts_per_token=6)
    ),
    "granite4-h-small": lambda: _model(
        _SMALL, 128, 16.0, granite_experts(_SMALL, dim=768, shared_dim=1536, num_experts=72, num_experts_per_token=10)
    ),
}
