"""Rows for rotary embeddings in `config.json`: `rope_parameters` (transformers 5), `rope_theta` and `rope_scaling`."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.common import LAYER_TYPES, attentions, layer_type
from eqx_decoders.families.setting_rows import (
    ABSENT,
    Check,
    Flag,
    Integer,
    Number,
    NumberZeroIsDefault,
    Only,
    Rule,
    Setting,
    Values,
    read_all,
    value_at,
    write_all,
)
from eqx_decoders.layers.mask import Causal, SlidingWindow
from eqx_decoders.layers.rope import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    NTKRope,
    ProportionalRope,
    Rope,
    YarnRope,
)
from eqx_decoders.model.decoder_config import DecoderConfig


def _length_ratio(values: Values) -> float | None:
    return None if values["_length"] is None else values["_length"] / values["original_length"]


def _needs(name: str, sentence: str) -> Check:
    return Check(lambda values: values[name] is not None, sentence)


_ORIGINAL_LENGTH = (
    Integer("original_max_position_embeddings", "original_length", lambda values: values["_length"]),
    _needs("original_length", "original_max_position_embeddings is missing: add it."),
)
_YARN = (
    *_ORIGINAL_LENGTH,
    Number("factor", "factor", null=_length_ratio),
    _needs("factor", "factor is null, and max_position_embeddings, which would imply it, is missing: set one of them."),
    NumberZeroIsDefault("beta_fast", "beta_fast", 32.0),
    NumberZeroIsDefault("beta_slow", "beta_slow", 1.0),
    Number("attention_factor", "attention_factor", None),
    NumberZeroIsDefault("mscale", "mscale", None),
    NumberZeroIsDefault("mscale_all_dim", "mscale_all_dim", None),
    Only("extrapolation_factor", 1, 1.0),
    Only("attn_factor", 1, 1.0),
    Flag("truncate", lambda rope: ABSENT if rope.truncate else False, True, name="truncate"),
)


def _factors(key: str, name: str) -> Rule:
    """Return the row of a list of numbers above 0, which has a number per rotated pair of features."""

    def read(fields: Fields, values: Values) -> tuple[float, ...]:
        factors = fields.take(key)
        if not isinstance(factors, list) or not all(isinstance(x, int | float) and x > 0 for x in factors):
            raise fields.error(f"{key}={abbreviate(factors)} must be a list of numbers above 0.")
        return tuple(map(float, factors))

    return Rule(name, read, lambda rope: {key: list(getattr(rope, name))})


# Key of `_TYPES` for tables of the type "dynamic" with a key `alpha`, as in Hunyuan's files.
_DYNAMIC_ALPHA = "dynamic, alpha"
# Class of the rotary embedding and additional rows, by `rope_type`.
_TYPES: dict[str, tuple[type[Rope], tuple[Setting, ...]]] = {
    "default": (Rope, ()),
    "linear": (LinearRope, (Number("factor", "factor"),)),
    "llama3": (
        Llama3Rope,
        (
            *_ORIGINAL_LENGTH,
            Number("factor", "factor"),
            Number("low_freq_factor", "low_frequency_factor"),
            Number("high_freq_factor", "high_frequency_factor"),
        ),
    ),
    "yarn": (YarnRope, _YARN),
    "longrope": (
        LongRope,
        (
            *_ORIGINAL_LENGTH,
            _factors("short_factor", "short_factors"),
            _factors("long_factor", "long_factors"),
            Number("factor", "factor", lambda values: max(1.0, _length_ratio(values) or 1.0)),
            Number("attention_factor", "attention_factor", None),
        ),
    ),
    "dynamic": (
        DynamicRope,
        (
            Number("factor", "factor"),
            Rule("original_length", lambda fields, values: values["_length"]),
            _needs("original_length", "rope_type=dynamic needs max_position_embeddings: add it."),
        ),
    ),
    # transformers requires `factor`, but only uses `alpha`
    _DYNAMIC_ALPHA: (NTKRope, (Number("alpha", "alpha"), Rule("", writes=lambda rope: {"factor": 1.0}))),
    "proportional": (
        ProportionalRope,
        (Number("factor", lambda rope: ABSENT if rope.factor == 1.0 else rope.factor, 1.0, name="factor"),),
    ),
}
# Keys without effect, by `rope_type`.
_IGNORED = {
    "default": ("factor", "original_max_position_embeddings"),
    "linear": ("original_max_position_embeddings",),
    "dynamic": ("original_max_position_embeddings",),
    _DYNAMIC_ALPHA: ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}


def rope_settings(name: str = "rope", *, required: bool = True, unused: bool = False, **options: Any) -> Rule:
    """Return the row of the rotary embedding that all layers share.

    **Arguments:**

    - `name`: name of the value.
    - `required`, `unused`: see `write_rope`.
    - `options`: arguments of `read_rope`. With `fraction`, `partial_rotary_factor` is always written.
    """
    partial = options.get("fraction") is not None
    return Rule(
        name,
        lambda fields, values: read_rope(fields, **options),
        functools.partial(write_rope, partial=partial, required=required, unused=unused),
    )


def rotary_dim_setting() -> Rule:
    """Return the row of `rotary_dim`, the number of rotated features of a head. It must precede `rope_settings`.

    `rotary_dim` is converted to `partial_rotary_factor`. It is only written if the conversion is exact.
    """

    def read(fields: Fields, values: Values) -> None:
        rotated = fields.integer("rotary_dim", None)
        if rotated is not None:
            fields.supply("partial_rotary_factor", rotated / values["shape"].head_dim)

    def write(config: DecoderConfig) -> dict[str, Any]:
        attention = value_at(config, "attention")
        rotated = rotated_features(config)
        return {"rotary_dim": rotated} if rotated / attention.head_dim == attention.rope.fraction else {}

    return Rule("", read, write)


def rotated_features(config: DecoderConfig) -> int:
    """Return the number of rotated features of a head. Raises ConversionError if attention has no rotary embedding."""
    attention = value_at(config, "attention")
    if attention.rope is None:
        raise ConversionError(
            "AttentionConfig.rope=None must be a rotary embedding, because config.json has its number of features."
        )
    return attention.rope.rotated(attention.head_dim)


def rotated_layers() -> Rule:
    """Return the row of the value `rotated`: the indices of the layers with rotary embeddings.

    Despite its name, `no_rope_layers` has a 1 for each layer with rotary embeddings. If it is missing, every
    `no_rope_layer_interval`-th layer has no rotary embedding.
    """

    def read(fields: Fields, values: Values) -> frozenset[int]:
        num_layers = values["shape"].num_layers
        interval = fields.integer("no_rope_layer_interval", 4)
        flags = fields.integers("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
        if len(flags) != num_layers:
            raise fields.error(
                f"no_rope_layers has {len(flags)} entries, but there are {num_layers} layers: add an entry per layer."
            )
        return frozenset(layer for layer in range(num_layers) if flags[layer])

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {"no_rope_layers": [int(mixer.rope is not None) for mixer in attentions(config)]}

    return Rule("rotated", read, write)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopesByLayer(Setting):
    """Row of the values `rope` (full attention) and `local_rope` (sliding windows).

    The arguments are those of `read_ropes`.
    """

    theta: float
    local_theta: float
    local_key: str | None
    fraction: float | None = None

    def read(self, fields: Fields, values: Values) -> None:
        ropes = read_ropes(fields, **dataclasses.asdict(self))
        values["rope"], values["local_rope"] = ropes["full_attention"], ropes["sliding_attention"]

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return write_ropes(config)


def read_rope(
    fields: Fields,
    *,
    theta: float = 10_000.0,
    pairing: Literal["half", "interleaved"] = "half",
    fraction: float | None = None,
    sections: tuple[int, ...] = (),
    interleaved_sections: bool = True,
    others: tuple[str, ...] = (),
) -> Rope:
    """Read the rotary embedding that all layers share, from `rope_parameters`, or `rope_theta` and `rope_scaling`.

    Raises ConversionError for invalid or contradictory settings.

    **Arguments:**

    - `theta`: transformers' default for `rope_theta`.
    - `pairing`, `interleaved_sections`: fields of `Rope` that no key of `config.json` determines.
    - `fraction`: default for `partial_rotary_factor`. None: partial rotation is not supported.
    - `sections`: default for `mrope_section`, with a number per dimension of positions. Empty: positions with several
        dimensions are not supported.
    - `others`: keys of the tables that other rows read.
    """
    outer = _OuterSettings(
        theta=fields.number("rope_theta", None),
        default_theta=theta,
        length=fields.integer("max_position_embeddings", None),
        fraction=None if fraction is None else fields.number("partial_rotary_factor", None),
        default_fraction=fraction,
        sections=sections,
        interleaved_sections=interleaved_sections,
    )
    original = fields.integer("original_max_position_embeddings", None)
    tables = [fields.table(key) for key in ("rope_parameters", "rope_scaling")]
    for table in tables:
        if table is not None and original is not None:
            table.supply("original_max_position_embeddings", original)
        if table is not None:
            _plain_mrope(table, sections)
            table.rename("type", "rope_type")
            for key in others:
                table.content.pop(key, None)
    return dataclasses.replace(_read_tables(fields, tables, outer), pairing=pairing)


def _plain_mrope(table: Fields, sections: tuple[int, ...]) -> None:
    """Rename the type `mrope` to `default`: old files use it for an unscaled embedding with several dimensions."""
    if not sections:
        return
    for key in ("type", "rope_type"):
        if table.content.get(key) == "mrope":
            table.content[key] = "default"


def read_ropes(
    fields: Fields, *, theta: float, local_theta: float, local_key: str | None, fraction: float | None = None
) -> dict[str, Rope]:
    """Read the rotary embeddings of `full_attention` and `sliding_attention` layers.

    In new files, `rope_parameters` has a table for each type of layer. In old files, `rope_theta` and `rope_scaling`
    describe full attention, and `local_key` describes sliding windows.

    **Arguments:**

    - `theta`, `local_theta`: defaults for full attention and for sliding windows.
    - `local_key`: key of the theta of sliding windows in old files. None: old files always use `local_theta`.
    - `fraction`: default for `partial_rotary_factor`. None: partial rotation is not supported.
    """
    outer_fraction = None if fraction is None else fields.number("partial_rotary_factor", None)
    length = fields.integer("max_position_embeddings", None)
    parameters = fields.table("rope_parameters")
    scaling = fields.table("rope_scaling")
    full_table, sliding_table = (
        None if parameters is None else parameters.table(LAYER_TYPES[kind]) for kind in (Causal, SlidingWindow)
    )
    for table in (full_table, sliding_table, scaling):
        if table is not None:
            table.rename("type", "rope_type")
    if parameters is not None:
        parameters.finish()
    sliding_outer = _OuterSettings(
        theta=None if local_key is None else fields.number(local_key, None),
        default_theta=local_theta,
        length=length,
        nested=True,
        fraction=outer_fraction,
        default_fraction=fraction,
    )
    full_outer = dataclasses.replace(sliding_outer, theta=fields.number("rope_theta", None), default_theta=theta)
    return {
        "full_attention": _read_tables(fields, [full_table, scaling], full_outer),
        "sliding_attention": _read_tables(fields, [sliding_table], sliding_outer),
    }


def read_named_ropes(fields: Fields, thetas: Mapping[str, tuple[str, float]], *, fraction: float) -> dict[str, Rope]:
    """Read several named rotary embeddings.

    In new files, `rope_parameters` has a table for each name. In old files, the first embedding is not scaled, and
    `rope_scaling` describes all others; their attention factor is 1.

    **Arguments:**

    - `thetas`: for each name, the key of its theta outside of the tables, and the default.
    - `fraction`: default for `partial_rotary_factor`.
    """
    length = fields.integer("max_position_embeddings", None)
    tables = [table for table in map(fields.table, ("rope_parameters", "rope_scaling")) if table is not None]
    is_nested = bool(tables) and set(thetas) <= set(tables[0].content)
    outer_thetas = {name: fields.number(key, None) for name, (key, _) in thetas.items()}
    if not is_nested:
        for table in tables:
            _check_shared_table(table, {name: outer_thetas[name] or default for name, (_, default) in thetas.items()})
    ropes: dict[str, Rope] = {}
    for name, (_, default_theta) in thetas.items():
        outer = _OuterSettings(
            theta=outer_thetas[name], default_theta=default_theta, length=length, nested=True, default_fraction=fraction
        )
        if is_nested:
            ropes[name] = _read_tables(fields, [tables[0].table(name)], outer)
        elif not ropes:
            ropes[name] = Rope(**outer.common_fields(None, None))
        else:
            ropes[name] = _read_tables(fields, list(tables), outer)
    if is_nested:
        tables[0].finish()
    return ropes


def _check_shared_table(table: Fields, thetas: Mapping[str, float]) -> None:
    """Remove theta from a table that describes several rotary embeddings, and set its attention factor.

    transformers ignores theta in such a table. Raises ConversionError unless it is one of `thetas`, the values outside
    of the table by name.
    """
    table.rename("type", "rope_type")
    theta = table.number("rope_theta", None)
    if theta is not None and theta not in thetas.values():
        raise table.error(
            f"rope_theta={theta} must be one of the values outside of this object, {sorted(thetas.values())}: change "
            "or remove it."
        )
    table.content.pop("rope_theta", None)
    if table.content.get("rope_type") == "yarn":
        table.supply("attention_factor", 1.0)


def write_named_ropes(ropes: Mapping[str, Rope]) -> dict[str, Any]:
    """Return `rope_parameters` with a table for each name."""
    return {"rope_parameters": {name: _write_table(rope, partial=True) for name, rope in ropes.items()}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OuterSettings:
    """Rotary settings outside of the table of a rotary embedding, and defaults.

    **Arguments:**

    - `theta`, `fraction`: values of keys outside of the table; None: the keys are missing.
    - `default_theta`, `default_fraction`: values if the keys are missing in the table, too. `default_fraction=None`:
        partial rotation is not supported.
    - `length`: value of `max_position_embeddings`.
    - `nested`: whether there is a table for each type of layer.
    - `sections`, `interleaved_sections`: see `read_rope`.
    """

    theta: float | None
    default_theta: float
    length: int | None
    nested: bool = False
    fraction: float | None = None
    default_fraction: float | None = None
    sections: tuple[int, ...] = ()
    interleaved_sections: bool = True

    def common_fields(self, theta: float | None, fraction: float | None) -> dict[str, Any]:
        """Return the fields that all rotary embeddings have. `theta`, `fraction`: values in the table, or None."""
        return {
            "theta": theta or self.theta or self.default_theta,
            "fraction": fraction or self.fraction or self.default_fraction or 1.0,
            "sections": self.sections,
            "interleaved_sections": self.interleaved_sections,
        }


def _read_tables(fields: Fields, tables: list[Fields | None], outer: _OuterSettings) -> Rope:
    """Return the rotary embedding that all existing tables describe. Raises ConversionError if they differ."""
    ropes = [_read_table(table, outer) for table in tables if table is not None]
    if any(rope != ropes[0] for rope in ropes):
        raise fields.error("rope_parameters and rope_scaling describe different rotary embeddings: remove one of them.")
    return ropes[0] if ropes else Rope(**outer.common_fields(None, None))


def _read_table(table: Fields, outer: _OuterSettings) -> Rope:
    if "short_factor" in table.content and table.content.get("rope_type") in ("su", "yarn"):
        table.content["rope_type"] = "longrope"  # old files use other names for this type
    rope_type = table.word("rope_type", {name: name for name in _TYPES if name != _DYNAMIC_ALPHA}, "default")
    if rope_type == "dynamic" and table.content.get("alpha") is not None:
        rope_type = _DYNAMIC_ALPHA
    allows_partial = outer.default_fraction is not None or rope_type == "proportional"
    common_fields = outer.common_fields(
        _read_inner(table, "rope_theta", outer.theta),
        _read_inner(table, "partial_rotary_factor", outer.fraction) if allows_partial else None,
    )
    if not allows_partial:
        table.allow_only("partial_rotary_factor", 1, 1.0)
    if outer.sections:
        for key in ("mrope_interleaved", "interleaved"):
            table.allow_only(key, outer.interleaved_sections)
        sections = tuple(table.integers("mrope_section", outer.sections))
        if len(sections) != len(outer.sections):
            raise table.error(
                f"mrope_section={list(sections)} must have {len(outer.sections)} numbers: time, height and width."
            )
        common_fields["sections"] = sections
    rope_class, settings = _TYPES[rope_type]
    values = read_all(settings, table, {"_length": outer.length})
    if rope_class is YarnRope:
        # transformers does not read `truncate` in nested tables; it always truncates
        values["truncate"] = values["truncate"] or outer.nested
        if values["mscale_all_dim"] is None or values["attention_factor"] is not None:
            values["mscale"] = None  # it has no effect
    rope = rope_class(**common_fields, **values)
    table.finish(("max_position_embeddings", "finetuned", *_IGNORED.get(rope_type, ())))
    return rope


def _read_inner(table: Fields, key: str, outer_value: float | None) -> float | None:
    """Read a number of a table. Raises ConversionError if it differs from the value of the key outside of the table."""
    value = table.number(key, None)
    if value is not None and outer_value is not None and value != outer_value:
        raise table.error(f"{key}={value} differs from {key}={outer_value} outside of this object: make them equal.")
    return value


def write_rope(
    config: DecoderConfig, *, partial: bool = False, required: bool = True, unused: bool = False
) -> dict[str, Any]:
    """Return the keys of the rotary embedding that all layers share, in the formats of transformers 5 and 4.

    **Arguments:**

    - `partial`: whether `partial_rotary_factor` is written even if all features are rotated.
    - `required`: whether to raise ConversionError if no layer has a rotary embedding. Otherwise no key is written.
    - `unused`: whether default keys are written if no layer has a rotary embedding, as transformers does. It overrides
        `required`.
    """
    mixers = (mixer for block in config.blocks for mixer in block.mixers())
    mixer = next((mixer for mixer in mixers if getattr(mixer, "rope", None)), None)
    if mixer is None and unused:
        return {"rope_parameters": _write_table(Rope())}
    if mixer is None and not required:
        return {}
    rope: Rope | None = getattr(mixer, "rope", None)
    table = _write_table(rope, partial)
    outer_keys = {key: table[key] for key in ("rope_theta", "partial_rotary_factor") if key in table}
    scaling = {key: value for key, value in table.items() if key not in outer_keys}
    if isinstance(rope, DynamicRope):
        outer_keys["max_position_embeddings"] = rope.original_length
    written = {"rope_parameters": table, **outer_keys}
    if scaling != {"rope_type": "default"}:
        written["rope_scaling"] = scaling
    return written


def write_ropes(config: DecoderConfig) -> dict[str, Any]:
    """Return `rope_parameters` with a table for each type of layer that the decoder has."""
    ropes = {layer_type(mixer.mask): mixer.rope for mixer in attentions(config)}
    return {"rope_parameters": {kind: _write_table(rope) for kind, rope in ropes.items()}}


def _write_table(rope: Rope | None, partial: bool = False) -> dict[str, Any]:
    """Return the table of one rotary embedding in the format of transformers 5. `partial`: see `write_rope`."""
    if rope is None:
        raise ConversionError(
            "AttentionConfig.rope=None must be a rotary embedding: config.json of this model type describes one."
        )
    rope_type = next((name for name, (rope_class, _) in _TYPES.items() if rope_class is type(rope)), None)
    if rope_type is None:
        supported = ", ".join(rope_class.__name__ for rope_class, _ in _TYPES.values())
        raise ConversionError(f"AttentionConfig.rope={rope!r} has no rope_type in config.json. Supported: {supported}.")
    settings = _TYPES[rope_type][1]
    written = {key: value for key, value in write_all(settings, rope).items() if value is not None}
    table: dict[str, Any] = {"rope_type": rope_type.split(",")[0], "rope_theta": rope.theta, **written}
    if partial or rope.fraction != 1.0:
        table["partial_rotary_factor"] = rope.fraction
    if rope.sections:
        table["mrope_section"] = list(rope.sections)
    if rope.sections and rope.interleaved_sections:
        table["mrope_interleaved"] = True
    return table
