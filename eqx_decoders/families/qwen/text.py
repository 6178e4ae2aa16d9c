"""Qwen2 and 2.5 (Yang et al. 2024) and Qwen3 (Yang et al. 2025), dense and with experts.

The blocks are Llama blocks with two changes: Qwen2 adds biases to the query, key and value projections, and Qwen3
normalizes queries and keys per head.
"""

import dataclasses
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families.common import (
    LAYER,
    NO_BIAS,
    DecoderSizes,
    decoder_sizes,
    find_window,
    llama_weights,
    read_masks,
    write_masks,
)
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import (
    Defaults,
    Flag,
    Group,
    Integer,
    Renamed,
    Rule,
    Setting,
    Unused,
    Values,
    only,
)
from eqx_decoders.families.weight_rows import Weight, gated_mlp
from eqx_decoders.layers.mask import Causal, Mask, SlidingWindow
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


VL_SECTIONS = (24, 20, 20)  # M-RoPE sections for time, height and width
IGNORED_WINDOW_KEYS = {"max_window_layers": "layer_types determines the masks"}
IGNORED_QWEN2_KEYS = IGNORED_WINDOW_KEYS | {"attention_bias qkv_bias": "Qwen2 always has these biases"}


def qwen2(shape: DecoderSizes, *, rope: Rope = Rope(theta=1e6), masks: tuple[Mask, ...] = ()) -> DecoderConfig:
    """Return the configuration of a decoder with Qwen2 blocks.

    `masks` contains one mask per layer; if it is empty, all layers are causal.
    """
    return shape.decoder(map(shape.block, shape.attention_by_mask(masks, rope, rope, qkv_bias=True)))


def qwen3(shape: DecoderSizes, *, rope: Rope = Rope(theta=1e6), masks: tuple[Mask, ...] = ()) -> DecoderConfig:
    """Return the configuration of a decoder with Qwen3 blocks.

    `masks` contains one mask per layer; if it is empty, all layers are causal.
    """
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
    """Return the configuration of a decoder with Qwen3 mixture-of-experts blocks.

    `dense_layers` contains the indices of layers with a dense MLP, whose width is `shape.mlp_dim`. Raises ConfigError
    if no layer has experts.
    """
    experts = shape.experts(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        mlp_dim=expert_dim,
        router=RouterConfig(order="score_first", renormalize=renormalize),
    )
    mixers = shape.attention_by_mask((mask,) * shape.num_layers, rope, rope, qk_norm=shape.qk_norm)
    return moe.sparse_decoder(shape, mixers, experts, dense_layers)


def _read_window_settings(fields: Fields) -> tuple[int | None, int]:
    """Return the window size, or None if windows are disabled, and the value of `max_window_layers`."""
    enabled = fields.flag("use_sliding_window", False)
    size = fields.integer("sliding_window", 4096, null=None, least=0)
    boundary = fields.integer("max_window_layers", 28, least=0)
    return (size or None) if enabled else None, boundary


def _read_late_windows(fields: Fields, values: Values) -> tuple[Mask, ...]:
    window, first_layer = _read_window_settings(fields)
    return read_masks(fields, values, window, lambda layer: window is not None and layer >= first_layer)


def _write_late_windows(config: DecoderConfig) -> dict[str, Any]:
    masks = write_masks(config)
    if masks["sliding_window"] is None:
        return masks | {"use_sliding_window": False}
    return masks | {"use_sliding_window": True, "max_window_layers": masks["layer_types"].index("sliding_attention")}


# Sliding windows in the layers from index `max_window_layers` on. `layer_types` takes precedence.
LATE_WINDOWS = Rule("masks", _read_late_windows, _write_late_windows)


def _read_early_windows(fields: Fields, values: Values) -> tuple[Mask, ...]:
    window, end_layer = _read_window_settings(fields)
    return read_masks(fields, values, window, lambda layer: window is not None and layer % 2 == 0 and layer < end_layer)


def _write_early_windows(config: DecoderConfig) -> dict[str, Any]:
    masks = write_masks(config, default=0)  # transformers writes sliding_window=0 if no layer has a window
    return masks | {"use_sliding_window": masks["sliding_window"] > 0}


# Sliding windows in layers with an even index below `max_window_layers`. `layer_types` takes precedence.
EARLY_WINDOWS = Rule("masks", _read_early_windows, _write_early_windows)


def _read_window(fields: Fields, values: Values) -> Mask:
    enabled = fields.flag("use_sliding_window", False)
    window = fields.integer("sliding_window", 4096, null=None)
    return SlidingWindow(window) if enabled and window is not None else Causal()


def _write_window(config: DecoderConfig) -> dict[str, Any]:
    window = find_window(config)
    return {"use_sliding_window": window is not None, "sliding_window": window}


WINDOW = Rule("mask", _read_window, _write_window)  # the same window in all layers


def sparse_settings(
    *, num_kv_heads: int, mlp_dim: int, expert_dim: int, num_experts: int, num_experts_per_token: int
) -> tuple[Setting, ...]:
    """Return the settings of the sizes and experts of Qwen3. The arguments are the defaults in transformers."""
    return (
        Defaults({"intermediate_size": mlp_dim}),
        decoder_sizes(num_kv_heads=num_kv_heads),
        moe.sparse_steps(),
        # Checkpoints of Qwen3-Coder contain these keys, but transformers does not read them.
        *only(use_qk_norm=True, qkv_bias=False, shared_expert_intermediate_size=0),
        Renamed({"num_local_experts": "num_experts"}),
        *moe.expert_counts("num_experts", num=num_experts, chosen=num_experts_per_token, width=expert_dim),
    )


def sparse_text_settings(*, theta: float, **defaults: int) -> tuple[Setting, ...]:
    """Return the settings of a Qwen3 decoder with experts and M-RoPE, used in vision-language models."""
    return (
        # transformers does not read these keys.
        Unused("sliding_window use_sliding_window max_window_layers", "all layers have full attention"),
        dataclasses.replace(WINDOW, reads=lambda fields, values: Causal()),
        *sparse_settings(**defaults),
        rope_settings(theta=theta, sections=VL_SECTIONS),
    )


# --- Experts with a gated shared expert (Qwen2, Qwen3-Next, Qwen3.5) ---


_MLP = LAYER + "mlp."


def qwen_experts(shape: DecoderSizes, *, renormalize: bool = True, **options: Any) -> ExpertsConfig:
    """Return the configuration of experts with a shared expert, whose output is scaled by a learned gate per token."""
    router = RouterConfig(order="score_first", renormalize=renormalize)
    return shape.experts(shared_gate=True, router=router, **options)


def expert_settings(*, num: int, chosen: int, expert_dim: int = 512, shared_dim: int = 512) -> tuple[Setting, ...]:
    """Return the settings of the experts. The arguments are the defaults in transformers."""
    return (
        *moe.expert_counts("num_experts", num=num, chosen=chosen),
        Integer("moe_intermediate_size", "experts.mlp_dim", expert_dim),
        Integer("shared_expert_intermediate_size", "experts.shared.mlp_dim", shared_dim, name="shared_dim"),
    )


EXPERTS = (
    *moe.separate_experts(_MLP),
    *gated_mlp(_MLP + "shared_expert.", "mlp.shared."),
    Weight(_MLP + "shared_expert_gate.weight", "mlp.shared_gate", "1 embed -> embed"),
)
FUSED_EXPERTS = moe.fused_experts(_MLP)


# --- Qwen2 and Qwen2.5: biases in the query, key and value projections ---


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=32, keys=NO_BIAS),
        rope_settings(),
        LATE_WINDOWS,
    ),
    build=qwen2,
    weights=llama_weights(),
    ignored_keys=IGNORED_QWEN2_KEYS,
)

_QWEN2_BASE = dict(model_type="qwen2", vocab_size=152_064, rope_theta=1_000_000.0)


# --- Qwen3: normalized queries and keys ---


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=32, head_dim=128),
        rope_settings(),
        LATE_WINDOWS,
    ),
    build=qwen3,
    weights=llama_weights(),
    ignored_keys=IGNORED_WINDOW_KEYS,
)

_QWEN3_BASE = dict(model_type="qwen3", vocab_size=151_936, num_key_value_heads=8, rope_theta=1_000_000.0)

_QWEN3_1_7B = _QWEN3_BASE | dict(
    hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, intermediate_size=6144, tie_word_embeddings=True
)
_QWEN3_4B = _QWEN3_BASE | dict(
    hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, intermediate_size=9728, tie_word_embeddings=True
)
_QWEN3_8B = _QWEN3_BASE | dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, intermediate_size=12_288)
_QWEN3_14B = _QWEN3_BASE | dict(
    hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, intermediate_size=17_408
)


# --- Qwen3 with experts: each layer has either experts or a dense MLP ---


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    settings=(
        *sparse_settings(num_kv_heads=4, mlp_dim=6144, expert_dim=768, num_experts=128, num_experts_per_token=8),
        WINDOW,
        Unused("max_window_layers", "transformers uses the window in all layers"),
        Flag("norm_topk_prob", "experts.router.renormalize", False),
        rope_settings(),
    ),
    build=qwen3_moe,
    weights=llama_weights(experts=moe.separate_experts(_MLP)),
    fused=FUSED_EXPERTS,
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)


_QWEN3_MOE_BASE = dict(model_type="qwen3_moe", vocab_size=151_936, head_dim=128, norm_topk_prob=True)


# --- Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2 attention, and experts with a gated shared expert ---


def qwen2_moe(
    shape: DecoderSizes, *, experts: ExpertsConfig, rope: Rope = Rope(theta=1e6), masks: tuple[Mask, ...] = (),
    dense_layers: frozenset[int] = frozenset(),
) -> DecoderConfig:  # fmt: skip
    """Return the configuration of a decoder with Qwen2 mixture-of-experts blocks.

    `masks` contains one mask per layer; if it is empty, all layers are causal. `dense_layers` contains the indices of
    layers with a dense MLP, whose width is `shape.mlp_dim`. Raises ConfigError if no layer has experts.
    """
    mixers = shape.attention_by_mask(masks, rope, rope, out_bias=False)
    return moe.sparse_decoder(shape, mixers, experts, dense_layers)


_QWEN2_EXPERTS = (
    *expert_settings(num=60, chosen=4, expert_dim=1408, shared_dim=5632),
    Flag("norm_topk_prob", "experts.router.renormalize", False),
)
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    settings=(
        Defaults({"intermediate_size": 5632}),
        decoder_sizes(num_kv_heads=16, attention_bias=True, keys={"attention_bias": "qkv_bias"}),
        Group("experts", qwen_experts, _QWEN2_EXPERTS, uses=("shape",)),
        moe.sparse_steps(),
        EARLY_WINDOWS,
        rope_settings(),
    ),
    build=qwen2_moe,
    weights=llama_weights(experts=EXPERTS),
    fused=FUSED_EXPERTS,
    ignored_keys=moe.IGNORED_ROUTER_KEYS | IGNORED_WINDOW_KEYS,
)


_QWEN2_MOE_BASE = dict(model_type="qwen2_moe", vocab_size=151_936, rope_theta=1_000_000.0)


FAMILIES = (QWEN2, QWEN3, QWEN3_MOE, QWEN2_MOE)

MODELS = {
    "qwen2.5-0.5b": _QWEN2_BASE | dict(
        vocab_size=151_936, hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        intermediate_size=4864, tie_word_embeddings=True,
    ),
    "qwen2.5-1.5b": _QWEN2_BASE | dict(
        vocab_size=151_936, hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        intermediate_size=8960, tie_word_embeddings=True,
    ),
    "qwen2.5-3b": _QWEN2_BASE | dict(
        vocab_size=151_936, hidden_size=2048, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2,
        intermediate_size=11_008, tie_word_embeddings=True,
    ),
    "qwen2.5-7b": _QWEN2_BASE | dict(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, intermediate_size=18_944,
    ),
    "qwen2.5-14b": _QWEN2_BASE | dict(
        hidden_size=5120, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8, intermediate_size=13_824,
    ),
    "qwen2.5-32b": _QWEN2_BASE | dict(
        hidden_size=5120, num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8, intermediate_size=27_648,
    ),
    "qwen2.5-72b": _QWEN2_BASE | dict(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, intermediate_size=29_568,
    ),
    "qwen3-0.6b": _QWEN3_BASE | dict(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=3072,
        tie_word_embeddings=True,
    ),
    "qwen3-1.7b": _QWEN3_1_7B,
    "qwen3-1.7b-base": _QWEN3_1_7B,
    "qwen3-4b": _QWEN3_4B,
    "qwen3-4b-base": _QWEN3_4B,
    "qwen3-4b-thinking-2507": _QWEN3_4B | dict(rope_theta=5_000_000.0),
    "qwen3-8b": _QWEN3_8B,
    "qwen3-8b-base": _QWEN3_8B,
    "qwen3-14b": _QWEN3_14B,
    "qwen3-14b-base": _QWEN3_14B,
    "qwen3-32b": _QWEN3_BASE | dict(
        hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, intermediate_size=25_600,
    ),
    "qwen3-30b-a3b": _QWEN3_MOE_BASE | dict(
        hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, rope_theta=10_000_000.0,
    ),
    "qwen3-30b-a3b-base": _QWEN3_MOE_BASE | dict(
        hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, rope_theta=1_000_000.0,
    ),
    "qwen3-235b-a22b": _QWEN3_MOE_BASE | dict(
        hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, moe_intermediate_size=1536,
        rope_theta=5_000_000.0,
    ),
    "qwen3-480b-a35b": _QWEN3_MOE_BASE | dict(
        hidden_size=6144, num_hidden_layers=62, num_attention_heads=96, num_key_value_heads=8,
        moe_intermediate_size=2560, num_experts=160, rope_theta=10_000_000.0,
    ),
    "qwen1.5-moe-a2.7b": _QWEN2_MOE_BASE | dict(hidden_size=2048, num_hidden_layers=24, num_attention_heads=16),
    "qwen2-57b-a14b": _QWEN2_MOE_BASE | dict(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        moe_intermediate_size=2560, num_experts=64, num_experts_per_tok=8, shared_expert_intermediate_size=20_480,
    ),
}  # fmt: skip
