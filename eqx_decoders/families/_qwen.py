"""Blocks and settings that several Qwen families share."""

import dataclasses
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, find_window, read_masks, write_masks
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Defaults, Renamed, Rule, Setting, Unused, Values, only
from eqx_decoders.layers.mask import Causal, Mask, SlidingWindow
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


VL_SECTIONS = (24, 20, 20)
IGNORED_WINDOW_KEYS = {"max_window_layers": "layer_types says it"}
IGNORED_QWEN2_KEYS = IGNORED_WINDOW_KEYS | {"attention_bias qkv_bias": "the biases are always there"}


def qwen2(shape: DecoderSizes, *, rope: Rope = Rope(theta=1e6), masks: tuple[Mask, ...] = ()) -> DecoderConfig:
    """Return a decoder of Qwen2 blocks; without `masks`, one for each layer, all are causal."""
    return shape.decoder(map(shape.block, shape.attention_by_mask(masks, rope, rope, qkv_bias=True)))


def qwen3(shape: DecoderSizes, *, rope: Rope = Rope(theta=1e6), masks: tuple[Mask, ...] = ()) -> DecoderConfig:
    """Return a decoder of Qwen3 blocks; without `masks`, one for each layer, all are causal."""
    return shape.decoder(map(shape.block, shape.attention_by_mask(masks, rope, rope, qk_norm=shape.qk_norm)))


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
    mixers = shape.attention_by_mask((mask,) * shape.num_layers, rope, rope, qk_norm=shape.qk_norm)
    return moe.sparse_decoder(shape, mixers, experts, dense_layers)


def _read_window_settings(fields: Fields) -> tuple[int | None, int]:
    """Return the size of windows, None where they are off, and the layer where they begin or end."""
    on, size = fields.flag("use_sliding_window", False), fields.integer("sliding_window", 4096, null=None, least=0)
    return (size or None) if on else None, fields.integer("max_window_layers", 28, least=0)


def _read_late_windows(fields: Fields, values: Values) -> tuple[Mask, ...]:
    window, first = _read_window_settings(fields)
    return read_masks(fields, values, window, lambda index: window is not None and index >= first)


def _write_late_windows(config: DecoderConfig) -> dict[str, Any]:
    masks = write_masks(config)
    if masks["sliding_window"] is None:
        return masks | {"use_sliding_window": False}
    return masks | {"use_sliding_window": True, "max_window_layers": masks["layer_types"].index("sliding_attention")}


# windows from layer `max_window_layers` on, or as `layer_types` says
LATE_WINDOWS = Rule("masks", _read_late_windows, _write_late_windows)


def _read_early_windows(fields: Fields, values: Values) -> tuple[Mask, ...]:
    window, end = _read_window_settings(fields)
    return read_masks(fields, values, window, lambda index: window is not None and index % 2 == 0 and index < end)


def _write_early_windows(config: DecoderConfig) -> dict[str, Any]:
    masks = write_masks(config, default=0)  # as transformers writes it
    return masks | {"use_sliding_window": masks["sliding_window"] > 0}


# windows in every other layer before layer `max_window_layers`, or as `layer_types` says
EARLY_WINDOWS = Rule("masks", _read_early_windows, _write_early_windows)


def _read_window(fields: Fields, values: Values) -> Mask:
    on, window = fields.flag("use_sliding_window", False), fields.integer("sliding_window", 4096, null=None)
    return SlidingWindow(window) if on and window is not None else Causal()


def _write_window(config: DecoderConfig) -> dict[str, Any]:
    window = find_window(config)
    return {"use_sliding_window": window is not None, "sliding_window": window}


WINDOW = Rule("mask", _read_window, _write_window)


def sparse_settings(
    *, num_kv_heads: int, mlp_dim: int, expert_dim: int, num_experts: int, num_experts_per_token: int
) -> tuple[Setting, ...]:
    """Return the rows of Qwen3's sizes and experts; the arguments are transformers' defaults."""
    return (
        Defaults({"intermediate_size": mlp_dim}),
        decoder_sizes(num_kv_heads=num_kv_heads),
        moe.sparse_steps(),
        # these stand in Qwen3-Coder's files, and transformers does not read them
        *only(use_qk_norm=True, qkv_bias=False, shared_expert_intermediate_size=0),
        Renamed({"num_local_experts": "num_experts"}),
        *moe.expert_counts("num_experts", num=num_experts, chosen=num_experts_per_token, width=expert_dim),
    )


def sparse_text_settings(*, theta: float, **defaults: int) -> tuple[Setting, ...]:
    """Return the rows of Qwen3 with experts, as a decoder with positions of three dimensions."""
    unwindowed = ("sliding_window", "use_sliding_window", "max_window_layers")
    return (
        # transformers reads none of them: all layers have full attention
        Unused(" ".join(unwindowed), "all layers have full attention"),
        dataclasses.replace(WINDOW, reads=lambda fields, values: Causal()),
        *sparse_settings(**defaults),
        rope_settings(theta=theta, sections=VL_SECTIONS),
    )
