"""Decoders whose layers are Mamba only, and settings and weight rows of Mamba-2 that several families share."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.errors import ConfigError
from eqx_decoders.families.common import ends
from eqx_decoders.families.setting_rows import (
    Flag,
    Group,
    Integer,
    Layers,
    Number,
    Rule,
    Setting,
    Values,
    first_layer,
)
from eqx_decoders.families.weight_rows import Weight, sharing
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.recurrent.mamba1 import Mamba1Config
from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config
from eqx_decoders.model.decoder_config import DecoderConfig


BACKBONE = "backbone.layers.{layer}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class MambaSizes:
    """Sizes of a decoder whose layers are recurrent only. `eps`: eps of the norms."""

    vocab_size: int
    embed_dim: int
    num_layers: int
    eps: float = 1e-5
    tied: bool = False
    init_std: float = 0.1


def mamba_decoder(shape: MambaSizes, *, mamba: Mamba1Config | Mamba2Config) -> DecoderConfig:
    """Return a decoder of pre-norm blocks that have the mixer `mamba` and no MLP."""
    norm = RMSNormConfig(eps=shape.eps)
    block = BlockConfig(mixer=mamba, mlp=None, pre_mixer_norm=norm)
    return DecoderConfig(
        vocab_size=shape.vocab_size, embed_dim=shape.embed_dim, blocks=(block,) * shape.num_layers, final_norm=norm,
        tied=shape.tied, init_std=shape.init_std,
    )  # fmt: skip


def mamba_sizes(*, vocab_size: int, embed_dim: int, num_layers: int, tied: bool) -> Group:
    """Return the settings of `shape`, a `MambaSizes`. The arguments are transformers' defaults."""
    return Group(
        "shape",
        MambaSizes,
        (
            Integer("vocab_size", "vocab_size", vocab_size),
            Integer("hidden_size", "embed_dim", embed_dim),
            Layers("num_hidden_layers", "blocks", num_layers, name="num_layers"),
            Number("layer_norm_epsilon", "final_norm.eps", 1e-5),
            Flag("tie_word_embeddings", "tied", tied),
            Number("initializer_range", "init_std", 0.1),
        ),
    )


def backbone(mixer: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Return the weight rows of a decoder of `mamba_decoder`. `mixer`: weight rows of the mixer."""
    return (
        *ends("backbone.embeddings", "backbone.norm_f"),
        Weight(BACKBONE + "norm.weight", "pre_mixer_norm.scale", "norm -> norm"),
        *mixer,
    )


def mamba_weights(prefix: str) -> tuple[Weight, ...]:
    """Return the weight rows of Mamba-2. Input projections share a tensor, and so do convolutions."""
    convolved = {"value": "(heads value_dim)", "key": "(key_heads key_dim)", "query": "(key_heads key_dim)"}
    projected = {"gate": "(heads value_dim)", **convolved}
    return (
        *sharing(
            prefix + "in_proj.weight",
            *((f"mixer.{name}", f"{axes} embed -> embed {axes.strip('()')}") for name, axes in projected.items()),
            ("mixer.dt", "heads embed -> embed heads"),
        ),
        *sharing(
            prefix + "in_proj.bias",
            *((f"mixer.{name}_bias", f"{axes} -> {axes.strip('()')}") for name, axes in projected.items()),
            ("mixer.dt_in_bias", "heads -> heads"),
        ),
        *sharing(
            prefix + "conv1d.weight",
            *((f"mixer.{name}_taps", f"{axes} 1 taps -> {axes.strip('()')} taps") for name, axes in convolved.items()),
        ),
        *sharing(
            prefix + "conv1d.bias",
            *((f"mixer.{name}_taps_bias", f"{axes} -> {axes.strip('()')}") for name, axes in convolved.items()),
        ),
        Weight(prefix + "A_log", "mixer.a_log", "heads -> heads"),
        Weight(prefix + "D", "mixer.skip", "heads -> heads"),
        Weight(prefix + "dt_bias", "mixer.dt_bias", "heads -> heads"),
        Weight(prefix + "norm.weight", "mixer.norm_scale", "(heads value_dim) -> heads value_dim"),
        Weight(prefix + "out_proj.weight", "mixer.out", "embed (heads value_dim) -> heads value_dim embed"),
        Weight(prefix + "out_proj.bias", "mixer.out_bias", "embed -> embed", needs="mixer.a_log"),
    )


def mamba_settings(
    *,
    num_groups: int = 1,
    key_dim: int = 256,
    value_dim: int | None = None,
    inner_dim: int | None = None,
    keys: Mapping[str, str] = {},
    more: tuple[Setting, ...] = (),
    step: Number | None = None,
) -> Group:
    """Return the settings of `mamba`, a `Mamba2Config`. They must follow a `shape` with `embed_dim` and `eps`.

    Reading raises ConversionError if the number of heads and their features do not agree with the features of all
    heads.

    **Arguments:**

    - `num_groups`, `key_dim`, `value_dim`: transformers' defaults. `value_dim=None`: the default follows from the
        features of all heads.
    - `inner_dim`: transformers' default of `mamba_d_ssm`, the features of all heads. None: the family has no such key,
        and `mamba_expand` determines the features of all heads.
    - `keys`: the family's names of Granite's and Bamba's keys, where these differ.
    - `more`: settings of other fields of `Mamba2Config`.
    - `step`: setting of the lower bound of step sizes. None: `time_step_limit` has both bounds.
    """

    def key(name: str) -> str:
        return keys.get(name, name)

    def make(
        shape: Any, *, num_heads: int, total_dim: int, value_dim: int | None, limits: tuple[float, float | None],
        **options: Any,
    ) -> Mamba2Config:  # fmt: skip
        value_dim = value_dim or total_dim // num_heads
        if num_heads * value_dim != total_dim and inner_dim is not None:
            raise ConfigError(
                f"{key('mamba_n_heads')}={num_heads} times {key('mamba_d_head')}={value_dim} must equal "
                f"mamba_d_ssm={total_dim}. Change one of them."
            )
        if num_heads * value_dim != total_dim:
            raise ConfigError(
                f"{key('mamba_n_heads')}={num_heads} times {key('mamba_d_head')}={value_dim} must equal "
                f"{key('mamba_expand')} times hidden_size, which is {total_dim}. Change one of them."
            )
        dt_min, dt_max = limits
        options = {"out_bias": options["in_bias"], "eps": shape.eps, **options}
        return Mamba2Config(num_heads=num_heads, value_dim=value_dim, dt_min=dt_min, dt_max=dt_max, **options)

    if inner_dim is None:
        total_dim = _Expand(key("mamba_expand"), _expand, 2, name="total_dim")
    else:
        total_dim = _TotalDim("mamba_d_ssm", _total_dim, inner_dim, null=None, name="total_dim")
    limits = Rule("limits", _read_limits, _write_limits)
    if step is not None:
        limits = Rule("limits", lambda fields, values: (fields.number(step.key, step.default), None), step.write)
    settings = (
        Integer(key("mamba_n_heads"), "mamba.num_heads", 128),
        total_dim,
        IntegerOrAuto(key("mamba_d_head"), "mamba.value_dim", value_dim),
        Flag(key("mamba_proj_bias"), "mamba.in_bias", False, name="in_bias"),
        Integer(key("mamba_n_groups"), "mamba.num_groups", num_groups),
        Integer(key("mamba_d_state"), "mamba.key_dim", key_dim),
        Integer(key("mamba_d_conv"), "mamba.taps", 4),
        Flag(key("mamba_conv_bias"), "mamba.taps_bias", True),
        limits,
        *more,
    )
    return Group("mamba", make, settings, uses=("shape",), layer="mamba")


class _Expand(Integer):
    """Features of all heads, stored as a multiple of the embedding dimension."""

    def read(self, fields: Fields, values: Values) -> None:
        super().read(fields, values)
        values[self.keyword] *= values["shape"].embed_dim


class _TotalDim(Integer):
    """Features of all heads. If the key is null, they are `mamba_expand` times the embedding dimension."""

    def read(self, fields: Fields, values: Values) -> None:
        super().read(fields, values)
        if values[self.keyword] is None:
            values[self.keyword] = fields.integer("mamba_expand", 2) * values["shape"].embed_dim


class IntegerOrAuto(Integer):
    """Integer of at least 1. The string "auto" means the default."""

    def value(self, fields: Fields, default: Any, null: Any) -> Any:
        return default if fields.take(self.key, None) == "auto" else super().value(fields, default, null)


_INFINITY = {"__float__": "Infinity"}  # transformers writes infinity in this way, because JSON cannot represent it


def _read_limits(fields: Fields, values: Values) -> tuple[float, float | None]:
    """Return the lower and the upper bound of step sizes. The upper bound is None if it is infinite."""
    limits = fields.take("time_step_limit", [0.0, _INFINITY])
    if not isinstance(limits, list) or len(limits) != 2:
        raise fields.error(
            f"time_step_limit={abbreviate(limits)} must be a list of two numbers, the bounds of step sizes."
        )
    low, high = limits
    bounds = Fields({"time_step_limit[0]": low, "time_step_limit[1]": high}, fields.where)
    # `Fields.number` refuses 0, which is a valid lower bound
    dt_min = 0.0 if low == 0 and not isinstance(low, bool) else bounds.number("time_step_limit[0]")
    dt_max = None if high == _INFINITY or high == float("inf") else bounds.number("time_step_limit[1]")
    return dt_min, dt_max


def _write_limits(config: DecoderConfig) -> dict[str, Any]:
    mamba = first_layer(config, "mamba")
    return {"time_step_limit": [mamba.dt_min, _INFINITY if mamba.dt_max is None else mamba.dt_max]}


def _total_dim(config: DecoderConfig) -> int:
    mamba = first_layer(config, "mamba")
    return mamba.num_heads * mamba.value_dim


def _expand(config: DecoderConfig) -> int:
    return _total_dim(config) // config.embed_dim
