"""RecurrentGemma (Griffin Team 2024): two gated recurrences to one attention with a window, and half of RoPE."""

import itertools
from typing import Any

import jax.numpy as jnp

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import check
from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, ends
from eqx_decoders.families.gemma.rg_lru import RGLRUConfig
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Group, Integer, Number, Only, Renamed, Rule, Values
from eqx_decoders.families.weight_rows import Weight, gated_mlp, norm_weights, self_attention
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mask import SlidingWindow
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_KINDS = ("recurrent", "attention")
_CYCLE = (_KINDS[0], _KINDS[0], _KINDS[1])
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
    """Return a decoder whose layers have the mixers of a repeated `cycle`, cut off where they end."""
    norm, mlp = RMSNormConfig(eps=shape.eps, offset=1.0), shape.mlp(bias=True)
    attention = shape.attention(mask=SlidingWindow(window), rope=rope, out_bias=True)
    kinds = itertools.islice(itertools.cycle(cycle), shape.num_layers)
    blocks = (shape.block(recurrence if kind == _KINDS[0] else attention, mlp, norm) for kind in kinds)
    scale = float(jnp.dtype("bfloat16").type(shape.embed_dim**0.5))
    return shape.decoder(blocks, norm, embedding_scale=scale, logit_soft_cap=logit_cap)


# --- config.json ---


def _halve(fields: Fields, values: Values) -> None:
    """Replace `intermediate_size`, which counts gate and up, by the features of each."""
    fields.content["intermediate_size"] = fields.integer("intermediate_size", 7680, least=2) // 2


def _read_cycle(fields: Fields, values: Values) -> tuple[str, ...]:
    cycle = tuple(fields.words("block_types", _KINDS, None) or _CYCLE)
    if _KINDS[1] not in cycle[: values["shape"].num_layers]:
        raise fields.error("block_types must have at least one attention layer.")
    return cycle


def _write_cycle(config: DecoderConfig) -> dict[str, Any]:
    kinds = [_KINDS[isinstance(block.mixer, AttentionConfig)] for block in config.blocks]
    cycles = (kinds[:size] for size in range(1, len(kinds) + 1))
    return {"block_types": next(c for c in cycles if kinds == (c * len(kinds))[: len(kinds)])}


def _recurrence(shape: DecoderSizes, *, width: int, taps: int) -> RGLRUConfig:
    heads, rule = shape.num_heads, "must be a multiple of num_attention_heads"
    check(width % heads == 0, f"lru_width={width} {rule}={heads}.")
    return RGLRUConfig(num_heads=heads, value_dim=width // heads, taps=taps, activation=shape.activation)


def _recurrence_weights(prefix: str) -> tuple[Weight, ...]:
    """Return rows of the recurrence."""
    into = {"linear_x": "value", "linear_y": "gate"}
    gates = {"input_gate": "input_gate", "recurrent_gate": "decay_gate"}
    pattern, bias = "(heads value_dim) embed -> embed heads value_dim", "(heads value_dim) -> heads value_dim"
    return (
        *(Weight(f"{prefix}{name}.weight", f"mixer.{path}", pattern) for name, path in into.items()),
        *(Weight(f"{prefix}{name}.bias", f"mixer.{path}_bias", bias) for name, path in into.items()),
        Weight(prefix + "conv_1d.weight", "mixer.taps", "(heads value_dim) 1 taps -> heads value_dim taps"),
        Weight(prefix + "conv_1d.bias", "mixer.taps_bias", bias),
        *(
            Weight(f"{prefix}rg_lru.{name}_weight", f"mixer.{path}", "heads inner value_dim -> heads inner value_dim")
            for name, path in gates.items()
        ),
        *(
            Weight(f"{prefix}rg_lru.{name}_bias", f"mixer.{path}_bias", "heads value_dim -> heads value_dim")
            for name, path in gates.items()
        ),
        Weight(prefix + "rg_lru.recurrent_param", "mixer.decay", bias),
        Weight(prefix + "linear_out.weight", "mixer.out", "embed (heads value_dim) -> heads value_dim embed"),
        Weight(prefix + "linear_out.bias", "mixer.out_bias", "embed -> embed", needs="mixer.decay"),
    )


_KEYS = {"hidden_act": "hidden_activation", "initializer_range": None}
_PATHS = {"intermediate_size": lambda config: 2 * config.blocks[0].mlp.mlp_dim}
FAMILY = Family(
    model_type="recurrent_gemma",
    architecture="RecurrentGemmaForCausalLM",
    settings=(
        Renamed({"_block_types": "block_types"}),
        Only("embeddings_scale_by_sqrt_dim", True),
        Rule("", _halve),
        decoder_sizes(tied=True, activation="gelu_pytorch_tanh", keys=_KEYS, paths=_PATHS),
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
    ignored_keys={"final_w_init_variance_scale w_init_variance_scale": "how it was begun"},
)


_SETTINGS = dict(model_type="recurrent_gemma", vocab_size=256_000, num_key_value_heads=1)

MODELS = {
    "recurrentgemma-2b": _SETTINGS | dict(
        hidden_size=2560, num_hidden_layers=26, num_attention_heads=10, intermediate_size=15_360,
    ),
    "recurrentgemma-9b": _SETTINGS | dict(
        hidden_size=4096, num_hidden_layers=38, num_attention_heads=16, intermediate_size=24_576,
    ),
}  # fmt: skip
