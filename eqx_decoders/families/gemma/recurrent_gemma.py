"""RecurrentGemma (Griffin Team 2024): two gated linear recurrences (RG-LRU) for each layer with local attention.

Attention has a sliding window, and rotates half of the features of a head.
"""

import itertools
from typing import Any

import jax.numpy as jnp

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.errors import check
from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, ends
from eqx_decoders.families.family import Family
from eqx_decoders.families.gemma.rg_lru import RGLRUConfig
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Group, Integer, Number, Only, Renamed, Rule, Values, value_at
from eqx_decoders.families.weight_rows import Weight, gated_mlp, norm_weights, self_attention
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mask import SlidingWindow
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_RECURRENT, _ATTENTION = "recurrent", "attention"  # names in `block_types`
_CYCLE = (_RECURRENT, _RECURRENT, _ATTENTION)
_ROPE = Rope(fraction=0.5)


def recurrent_gemma(
    shape: DecoderSizes,
    *,
    recurrence: RGLRUConfig,
    cycle: tuple[str, ...] = _CYCLE,
    window: int = 2048,
    rope: Rope = _ROPE,
    logit_cap: float = 30.0,
) -> DecoderConfig:
    """Return the configuration of a decoder with RecurrentGemma blocks.

    **Arguments:**

    - `shape`: sizes of the decoder and of attention.
    - `recurrence`: mixer of `"recurrent"` layers.
    - `cycle`: mixer types, `"recurrent"` or `"attention"`, which repeat over the layers.
    - `window`: number of positions in the sliding window of attention.
    - `rope`: rotary embedding of attention.
    - `logit_cap`: soft cap of the logits.
    """
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    mlp = shape.mlp(bias=True)
    attention = shape.attention(mask=SlidingWindow(window), rope=rope, out_bias=True)
    mixer_types = itertools.islice(itertools.cycle(cycle), shape.num_layers)
    blocks = (shape.block(recurrence if name == _RECURRENT else attention, mlp, norm) for name in mixer_types)
    embedding_scale = float(jnp.dtype("bfloat16").type(shape.embed_dim**0.5))  # transformers rounds it to bfloat16
    return shape.decoder(blocks, norm, embedding_scale=embedding_scale, logit_soft_cap=logit_cap)


# --- config.json ---


def _halve_intermediate_size(fields: Fields, values: Values) -> None:
    """Replace `intermediate_size`, the sum of the widths of gate and up projection, by the width of the MLP."""
    fields.content["intermediate_size"] = fields.integer("intermediate_size", 7680, least=2) // 2


def _read_cycle(fields: Fields, values: Values) -> tuple[str, ...]:
    cycle = tuple(fields.words("block_types", (_RECURRENT, _ATTENTION), None) or _CYCLE)
    num_layers = values["shape"].num_layers
    if _ATTENTION not in cycle[:num_layers]:
        raise fields.error(
            f"block_types={abbreviate(list(cycle))} must have {_ATTENTION!r} among the types of the first "
            f"{num_layers} layers (num_hidden_layers): add an attention layer."
        )
    return cycle


def _write_cycle(config: DecoderConfig) -> dict[str, Any]:
    types = [_ATTENTION if isinstance(block.mixer, AttentionConfig) else _RECURRENT for block in config.blocks]
    cycles = (types[:size] for size in range(1, len(types) + 1))
    return {"block_types": next(cycle for cycle in cycles if types == (cycle * len(types))[: len(types)])}


def _recurrence(shape: DecoderSizes, *, width: int, taps: int) -> RGLRUConfig:
    heads = shape.num_heads
    check(width % heads == 0, f"lru_width={width} must be a multiple of num_attention_heads={heads}.")
    return RGLRUConfig(num_heads=heads, value_dim=width // heads, taps=taps, activation=shape.activation)


def _recurrence_weights(prefix: str) -> tuple[Weight, ...]:
    kernel = "(heads value_dim) embed -> embed heads value_dim"
    bias = "(heads value_dim) -> heads value_dim"
    gate_kernel = "heads inner value_dim -> heads inner value_dim"
    gate_bias = "heads value_dim -> heads value_dim"
    return (
        Weight(prefix + "linear_x.weight", "mixer.value", kernel),
        Weight(prefix + "linear_y.weight", "mixer.gate", kernel),
        Weight(prefix + "linear_x.bias", "mixer.value_bias", bias),
        Weight(prefix + "linear_y.bias", "mixer.gate_bias", bias),
        Weight(prefix + "conv_1d.weight", "mixer.taps", "(heads value_dim) 1 taps -> heads value_dim taps"),
        Weight(prefix + "conv_1d.bias", "mixer.taps_bias", bias),
        Weight(prefix + "rg_lru.input_gate_weight", "mixer.input_gate", gate_kernel),
        Weight(prefix + "rg_lru.recurrent_gate_weight", "mixer.decay_gate", gate_kernel),
        Weight(prefix + "rg_lru.input_gate_bias", "mixer.input_gate_bias", gate_bias),
        Weight(prefix + "rg_lru.recurrent_gate_bias", "mixer.decay_gate_bias", gate_bias),
        Weight(prefix + "rg_lru.recurrent_param", "mixer.decay", bias),
        Weight(prefix + "linear_out.weight", "mixer.out", "embed (heads value_dim) -> heads value_dim embed"),
        Weight(prefix + "linear_out.bias", "mixer.out_bias", "embed -> embed", needs="mixer.decay"),
    )


_KEY_NAMES = {"hidden_act": "hidden_activation", "initializer_range": None}
_PATHS = {"intermediate_size": lambda config: 2 * value_at(config, "blocks.0.mlp.mlp_dim")}
FAMILY = Family(
    model_type="recurrent_gemma",
    architecture="RecurrentGemmaForCausalLM",
    settings=(
        Renamed({"_block_types": "block_types"}),
        Only("embeddings_scale_by_sqrt_dim", True),
        Rule("", _halve_intermediate_size),
        decoder_sizes(tied=True, activation="gelu_pytorch_tanh", keys=_KEY_NAMES, paths=_PATHS),
        Rule("cycle", _read_cycle, _write_cycle),
        Group(
            "recurrence",
            _recurrence,
            (
                Integer("lru_width", "rg_lru.channels", lambda values: values["shape"].embed_dim, name="width"),
                Integer("conv1d_width", "rg_lru.taps", 4),
            ),
            uses=("shape",),
            layer="rg_lru",
        ),
        Integer("attention_window_size", "attention.mask.size", 2048, name="window"),
        rope_settings(fraction=0.5),
        Number("logits_soft_cap", "logit_soft_cap", 30.0, name="logit_cap"),
    ),
    build=recurrent_gemma,
    weights=(
        *ends(final_norm="model.final_norm"),
        *norm_weights(LAYER, pre_mixer_norm="temporal_pre_norm", pre_mlp_norm="channel_pre_norm"),
        *self_attention(LAYER, "temporal_block."),
        *_recurrence_weights(LAYER + "temporal_block."),
        *gated_mlp(LAYER + "mlp_block."),
    ),
    ignored_keys={"final_w_init_variance_scale w_init_variance_scale": "only initializes new weights"},
)


_BASE = dict(model_type="recurrent_gemma", vocab_size=256_000, num_key_value_heads=1)

MODELS = {
    "recurrentgemma-2b": _BASE | dict(
        hidden_size=2560, num_hidden_layers=26, num_attention_heads=10, intermediate_size=15_360,
    ),
    "recurrentgemma-9b": _BASE | dict(
        hidden_size=4096, num_hidden_layers=38, num_attention_heads=16, intermediate_size=24_576,
    ),
}  # fmt: skip
