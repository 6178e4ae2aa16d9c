"""Decoders with recurrences alone; settings and weights of Mamba-2 in the checkpoints of several families."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConfigError
from eqx_decoders.families.common import ends
from eqx_decoders.families.settings_table import (
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MambaSizes:
    """Sizes of a decoder whose layers have recurrences only; `eps` is that of the norms."""

    vocab_size: int
    embed_dim: int
    num_layers: int
    eps: float = 1e-5
    tied: bool = False
    init_std: float = 0.1


def mamba_decoder(shape: MambaSizes, *, mamba: Mamba1Config | Mamba2Config) -> DecoderConfig:
    """Return a decoder with this recurrence in each layer."""
    norm = RMSNormConfig(eps=shape.eps)
    block = BlockConfig(mixer=mamba, mlp=None, pre_mixer_norm=norm)
    return DecoderConfig(
        vocab_size=shape.vocab_size, embed_dim=shape.embed_dim, blocks=(block,) * shape.num_layers, final_norm=norm,
        tied=shape.tied, init_std=shape.init_std,
    )  # fmt: skip


def mamba_sizes(vocab_size: int, embed_dim: int, num_layers: int, tied: bool) -> Group:
    """Return the rows of `MambaSizes`, called `shape`; the arguments are transformers' defaults."""
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
    """Return the rows of a decoder with these of its layers."""
    return (
        *ends("backbone.embeddings", "backbone.norm_f"),
        Weight(BACKBONE + "norm.weight", "pre_mixer_norm.scale", "norm -> norm"),
        *mixer,
    )


BACKBONE = "backbone.layers.{layer}."


def mamba_weights(prefix: str) -> tuple[Weight, ...]:
    """Return rows of Mamba-2: its input projections share one tensor, and its convolutions another."""
    streams = {"value": "(heads value_dim)", "key": "(key_heads key_dim)", "query": "(key_heads key_dim)"}
    into = [("gate", "(heads value_dim)"), *streams.items()]
    return (
        *sharing(
            prefix + "in_proj.weight",
            *((f"mixer.{name}", f"{rows} embed -> embed {rows.strip('()')}") for name, rows in into),
            ("mixer.dt", "heads embed -> embed heads"),
        ),
        *sharing(
            prefix + "in_proj.bias",
            *((f"mixer.{name}_bias", f"{rows} -> {rows.strip('()')}") for name, rows in into),
            ("mixer.dt_in_bias", "heads -> heads"),
        ),
        *sharing(
            prefix + "conv1d.weight",
            *((f"mixer.{name}_taps", f"{rows} 1 taps -> {rows.strip('()')} taps") for name, rows in streams.items()),
        ),
        *sharing(
            prefix + "conv1d.bias",
            *((f"mixer.{name}_taps_bias", f"{rows} -> {rows.strip('()')}") for name, rows in streams.items()),
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
    """Return the rows of the value `mamba`, after those of a `shape` with `embed_dim` and `eps`.

    The arguments are transformers' defaults: `inner_dim` is that of `mamba_d_ssm`, features of all heads together, in
    whose place most families have `mamba_expand`. `keys` maps Granite's and Bamba's keys to the family's; `more` are
    rows of other options.
    """

    def key(name: str) -> str:
        return keys.get(name, name)

    def make(
        shape: Any, *, num_heads: int, inner: int, value_dim: int | None, limits: tuple[float, float | None],
        **options: Any,
    ) -> Mamba2Config:  # fmt: skip
        features = value_dim or inner // num_heads
        if num_heads * features != inner:
            sizes = f"{key('mamba_n_heads')}={num_heads} x {key('mamba_d_head')}={features}"
            rule = "mamba_d_ssm" if inner_dim else f"{key('mamba_expand')} x hidden_size"
            raise ConfigError(f"{sizes} must be {rule}={inner}.")
        low, high = limits
        options = {"out_bias": options["in_bias"], "eps": shape.eps, **options}
        return Mamba2Config(num_heads=num_heads, value_dim=features, dt_min=low, dt_max=high, **options)

    width = _Width("mamba_d_ssm", _inner, inner_dim, null=None, name="inner")
    limits = Rule("limits", _read_limits, _write_limits)
    if step is not None:
        limits = Rule("limits", lambda fields, values: (fields.number(step.key, step.default), None), step.write)
    rows = (
        Integer(key("mamba_n_heads"), "mamba.num_heads", 128),
        width if inner_dim else _Expansion(key("mamba_expand"), _expand, 2, name="inner"),
        _ValueDim(key("mamba_d_head"), "mamba.value_dim", value_dim),
        Flag(key("mamba_proj_bias"), "mamba.in_bias", False, name="in_bias"),
        Integer(key("mamba_n_groups"), "mamba.num_groups", num_groups),
        Integer(key("mamba_d_state"), "mamba.key_dim", key_dim),
        Integer(key("mamba_d_conv"), "mamba.taps", 4),
        Flag(key("mamba_conv_bias"), "mamba.taps_bias", True),
        limits,
        *more,
    )
    return Group("mamba", make, rows, uses=("shape",), layer="mamba")


class _Expansion(Integer):
    """Features of all heads, as a multiple of the stream's."""

    def read(self, fields: Fields, values: Values) -> None:
        super().read(fields, values)
        values[self.keyword] *= values["shape"].embed_dim


class _Width(Integer):
    """Features of all heads; those of `mamba_expand` where they are null."""

    def read(self, fields: Fields, values: Values) -> None:
        super().read(fields, values)
        if values[self.keyword] is None:
            values[self.keyword] = fields.integer("mamba_expand", 2) * values["shape"].embed_dim


class _ValueDim(Integer):
    """Features of a head; "auto" is the default."""

    def value(self, fields: Fields, default: Any, null: Any) -> Any:
        return default if fields.take(self.key, None) == "auto" else super().value(fields, default, null)


_INFINITE = {"__float__": "Infinity"}  # as transformers writes it


def _read_limits(fields: Fields, values: Values) -> tuple[float, float | None]:
    """Read the bounds of a step: two numbers, the second None where it is infinite."""
    limits = fields.take("time_step_limit", [0.0, _INFINITE])
    low, high = limits if isinstance(limits, list) and len(limits) == 2 else (None, None)
    infinite = high == _INFINITE or high == float("inf")
    bounds = Fields({"time_step_limit[0]": low, "time_step_limit[1]": 1.0 if infinite else high}, fields.where)
    least = 0.0 if low == 0 and not isinstance(low, bool) else bounds.number("time_step_limit[0]")
    greatest = bounds.number("time_step_limit[1]")
    return least, None if infinite else greatest


def _write_limits(config: DecoderConfig) -> dict[str, Any]:
    mamba = first_layer(config, "mamba")
    return {"time_step_limit": [mamba.dt_min, _INFINITE if mamba.dt_max is None else mamba.dt_max]}


def _inner(config: DecoderConfig) -> int:
    mamba = first_layer(config, "mamba")
    return mamba.num_heads * mamba.value_dim


def _expand(config: DecoderConfig) -> int:
    return _inner(config) // config.embed_dim
