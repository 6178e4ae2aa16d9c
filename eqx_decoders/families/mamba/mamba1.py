"""Mamba (Gu & Dao 2023) and Falcon Mamba (TII 2024): decoders without attention and MLPs."""

import math
from collections.abc import Mapping
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.family import Family
from eqx_decoders.families.mamba.blocks import BACKBONE, IntegerOrAuto, backbone, mamba_decoder, mamba_sizes
from eqx_decoders.families.setting_rows import Flag, Group, Integer, Only, Rule, Values, first_layer, value_at
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.recurrent.mamba1 import Mamba1Config
from eqx_decoders.model.decoder_config import DecoderConfig


def mamba1_settings(*norm: Rule, keys: Mapping[str, str] = {}) -> Group:
    """Return the settings of `mamba`, a `Mamba1Config`. They must follow a `shape` with `embed_dim`.

    `norm`: setting of the field `norm`, for a family with norms in Mamba layers. `keys`: the family's names of Mamba's
    keys, where these differ; "" for a key that the family does not have.
    """

    def key(name: str) -> str:
        return keys.get(name, name)

    def default_channels(values: Values) -> int:
        return values["_expand"] * values["shape"].embed_dim

    def default_rank(values: Values) -> int:
        return math.ceil(values["shape"].embed_dim / 16)

    settings = (
        Integer(key("expand"), _expand, 2, name="_expand"),
        Integer(key("intermediate_size"), "mamba1.channels", default_channels),
        Integer(key("state_size"), "mamba1.key_dim", 16),
        IntegerOrAuto(key("time_step_rank"), "mamba1.step_rank", default_rank),
        Integer(key("conv_kernel"), "mamba1.taps", 4),
        Flag(key("use_conv_bias"), "mamba1.taps_bias", True),
        Flag(key("use_bias"), "mamba1.bias", False),
        *norm,
    )
    return Group("mamba", Mamba1Config, settings, layer="mamba1")


def _expand(config: DecoderConfig) -> int:
    return max(1, first_layer(config, "mamba1").channels // config.embed_dim)


# keys without effect in Mamba and Falcon Mamba
_IGNORED = {
    "rescale_prenorm_residual time_step_floor time_step_init_scheme time_step_max time_step_min "
    "time_step_scale": "it affects only the initialization of weights",
    "residual_in_fp32 use_associative_scan use_mambapy "
    "use_falcon_mambapy": "it affects only how transformers runs the model",
    "d_inner d_model fused_add_norm n_layer pad_vocab_size_multiple rms_norm ssm_cfg": "transformers does not read it",
}


def mamba1_weights(prefix: str) -> tuple[Weight, ...]:
    """Return the weight rows of Mamba layers, whose tensors have names that start with `prefix`."""
    return (
        Weight(prefix + "in_proj.weight", "mixer.inputs", "(inputs mlp) embed -> embed inputs mlp"),
        Weight(prefix + "in_proj.bias", "mixer.inputs_bias", "(inputs mlp) -> inputs mlp"),
        Weight(prefix + "conv1d.weight", "mixer.taps", "mlp 1 taps -> mlp taps"),
        Weight(prefix + "conv1d.bias", "mixer.taps_bias", "mlp -> mlp"),
        Weight(prefix + "x_proj.weight", "mixer.scan_inputs", "scan_inputs inner -> inner scan_inputs"),
        Weight(prefix + "dt_layernorm.weight", "mixer.step_norm.scale", "norm -> norm"),
        Weight(prefix + "b_layernorm.weight", "mixer.key_norm.scale", "norm -> norm"),
        Weight(prefix + "c_layernorm.weight", "mixer.query_norm.scale", "norm -> norm"),
        Weight(prefix + "dt_proj.weight", "mixer.dt", "mlp gate_rank -> gate_rank mlp"),
        Weight(prefix + "dt_proj.bias", "mixer.dt_bias", "mlp -> mlp"),
        Weight(prefix + "A_log", "mixer.a_log", "mlp key_dim -> mlp key_dim"),
        Weight(prefix + "D", "mixer.skip", "mlp -> mlp"),
        Weight(prefix + "out_proj.weight", "mixer.out", "embed mlp -> mlp embed"),
        Weight(prefix + "out_proj.bias", "mixer.out_bias", "embed -> embed"),
    )


_SIZES = mamba_sizes(vocab_size=50_280, embed_dim=768, num_layers=32, tied=True)


# --- Mamba ---


MAMBA = Family(
    model_type="mamba",
    architecture="MambaForCausalLM",
    settings=(_SIZES, Only("hidden_act", "silu", written=True), mamba1_settings()),
    build=mamba_decoder,
    weights=backbone(mamba1_weights(BACKBONE + "mixer.")),
    ignored_keys=_IGNORED,
)


_MAMBA_BASE = dict(model_type="mamba", num_hidden_layers=48)


# --- Falcon Mamba: keys, queries and steps are normalized without learned scales ---


def _read_norm(fields: Fields, values: Values) -> RMSNormConfig:
    return RMSNormConfig(eps=fields.number("mixer_rms_eps", 1e-6), scale=False)


def _write_norm(config: DecoderConfig) -> dict[str, Any]:
    return {"mixer_rms_eps": value_at(config, "mamba1.norm.eps")}


FALCON_MAMBA = Family(
    model_type="falcon_mamba",
    architecture="FalconMambaForCausalLM",
    settings=(
        _SIZES,
        Only("hidden_act", "silu", written=True),
        mamba1_settings(Rule("norm", _read_norm, _write_norm)),
    ),
    build=mamba_decoder,
    weights=backbone(mamba1_weights(BACKBONE + "mixer.")),
    ignored_keys=_IGNORED,
)


FAMILIES = (MAMBA, FALCON_MAMBA)

MODELS = {
    "mamba-130m": _MAMBA_BASE | dict(num_hidden_layers=24),
    "mamba-370m": _MAMBA_BASE | dict(hidden_size=1024),
    "mamba-790m": _MAMBA_BASE | dict(hidden_size=1536),
    "mamba-1.4b": _MAMBA_BASE | dict(hidden_size=2048),
    "mamba-2.8b": _MAMBA_BASE | dict(hidden_size=2560, num_hidden_layers=64),
    "falcon-mamba-7b": dict(
        model_type="falcon_mamba", vocab_size=65_024, hidden_size=4096, num_hidden_layers=64, tie_word_embeddings=False,
    ),
}  # fmt: skip
