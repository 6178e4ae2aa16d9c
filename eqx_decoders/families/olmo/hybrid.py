"""Olmo Hybrid (Team Olmo 2026): three blocks with a gated delta net for each attention block of OLMo 2.

Blocks with a gated delta net have pre-norms, and attention blocks have post-norms.
"""

import functools
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, hybrid_layers, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.olmo.text import olmo_block
from eqx_decoders.families.qwen.hybrid import INTO_KEYS, INTO_VALUES, KEYS, LINEAR, VALUES
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.families.setting_rows import Check, Defaults, Flag, Group, Integer, Rule, Values, value_at
from eqx_decoders.families.weight_rows import Weight, norm_weights
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.recurrent.gated_delta_net import GatedDeltaNetConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_NORM = RMSNormConfig(eps=1e-5)  # transformers does not use `rms_norm_eps` inside gated delta nets


def olmo_hybrid(
    shape: DecoderSizes, *, delta: GatedDeltaNetConfig, full: tuple[bool, ...], rope: Rope | None
) -> DecoderConfig:
    """Return a decoder of Olmo Hybrid blocks.

    `full`: for each layer, whether it has attention; other layers have the gated delta net `delta`. `rope`: rotary
    embedding of attention; None: no rotation.
    """
    attention_block = olmo_block(shape, rope=rope)
    delta_block = shape.block(delta)
    return shape.decoder(attention_block if has_attention else delta_block for has_attention in full)


def _read_rope(fields: Fields, values: Values) -> Rope | None:
    """Return the rotary embedding: None if `rope_theta` is null, and transformers' default if it is missing."""
    tables = fields.content, fields.content.get("rope_parameters")
    thetas = [table["rope_theta"] for table in tables if isinstance(table, dict) and "rope_theta" in table]
    rope = read_rope(fields)
    return None if thetas and all(theta is None for theta in thetas) else rope


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    if value_at(config, "attention").rope is not None:
        return write_rope(config)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}


def _num_heads(values: Values) -> int:
    return values["shape"].num_heads


def _default_key_dim(values: Values) -> int:
    return int(0.75 * values["shape"].embed_dim / values["num_key_heads"])


_DELTA = (
    Integer("linear_num_key_heads", "delta.num_key_heads", _num_heads),
    Integer("linear_num_value_heads", "delta.num_heads", _num_heads),
    Integer("linear_key_head_dim", "delta.key_dim", _default_key_dim),
    Integer("linear_value_head_dim", "delta.value_dim", lambda values: 2 * values["key_dim"]),
    Integer("linear_conv_kernel_dim", "delta.taps", 4),
    Flag("linear_allow_neg_eigval", "delta.negative_eigenvalues", True),
)
_DEFAULTS = dict(
    vocab_size=100_352, hidden_size=3840, intermediate_size=11_008, num_hidden_layers=32, num_attention_heads=30
)
# letter in the tensor's name: name of the weight, and pattern of its kernel or axes of its convolution
_KERNELS = {
    "q": ("query", INTO_KEYS),
    "k": ("key", INTO_KEYS),
    "v": ("value", INTO_VALUES),
    "g": ("gate", INTO_VALUES),
}
_CONVOLUTIONS = {"q": ("query", KEYS), "k": ("key", KEYS), "v": ("value", VALUES)}
FAMILY = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    settings=(
        Defaults(_DEFAULTS),
        decoder_sizes(keys={"head_dim": None}),
        Group("delta", functools.partial(GatedDeltaNetConfig, norm=_NORM), _DELTA),
        # without layer_types, every fourth layer has attention; with fewer than four layers, the last layer
        Rule("_interval", lambda fields, values: min(4, values["shape"].num_layers)),
        hybrid_layers(AttentionConfig),
        Check(
            lambda values: not all(values["full"]),
            "layer_types has full_attention for all layers. At least one layer must have linear_attention: change it.",
        ),
        Rule("rope", _read_rope, _write_rope),
    ),
    build=olmo_hybrid,
    weights=(
        *llama_weights(norms="post"),
        *norm_weights(LAYER, pre_mixer_norm="attention_layer_norm", pre_mlp_norm="feedforward_layer_norm"),
        *(
            Weight(f"{LINEAR}{letter}_proj.weight", f"mixer.{name}", pattern)
            for letter, (name, pattern) in _KERNELS.items()
        ),
        *(
            Weight(f"{LINEAR}{letter}_conv1d.weight", f"mixer.{name}_taps", f"{axes} 1 taps -> {axes.strip('()')} taps")
            for letter, (name, axes) in _CONVOLUTIONS.items()
        ),
        Weight(LINEAR + "a_proj.weight", "mixer.dt", "heads embed -> embed heads"),
        Weight(LINEAR + "b_proj.weight", "mixer.beta", "heads embed -> embed heads"),
        Weight(LINEAR + "A_log", "mixer.a_log", "heads -> heads"),
        Weight(LINEAR + "dt_bias", "mixer.dt_bias", "heads -> heads"),
        Weight(LINEAR + "o_norm.weight", "mixer.norm.scale", "norm -> norm"),
        Weight(LINEAR + "o_proj.weight", "mixer.out", f"embed {VALUES} -> heads value_dim embed"),
    ),
    ignored_keys={
        "linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min": "they affect only the "
        "initialization of weights"
    },
)


MODELS = {
    "olmo-hybrid-7b": dict(model_type="olmo_hybrid", rope_parameters=dict(rope_theta=None)),
}  # fmt: skip
