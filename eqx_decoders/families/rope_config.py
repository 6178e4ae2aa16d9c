"""Rotary embeddings in `config.json`: `rope_parameters`, and the older `rope_theta` and `rope_scaling`."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.common import LAYER_TYPES, attentions
from eqx_decoders.families.settings_table import (
    ABSENT,
    Check,
    Flag,
    Integer,
    Number,
    NumberOrZero,
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


def _default_factor(values: Values) -> float | None:
    """Return the ratio of the two lengths, for which an explicit null stands."""
    return None if values["_length"] is None else values["_length"] / values["original_length"]


def _needs(name: str, sentence: str) -> Check:
    return Check(lambda values: values[name] is not None, sentence)


_ORIGINAL_LENGTH = (
    Integer("original_max_position_embeddings", "original_length", lambda values: values["_length"]),
    _needs("original_length", "original_max_position_embeddings is missing: add it."),
)
_YARN = (
    *_ORIGINAL_LENGTH,
    Number("factor", "factor", null=_default_factor),
    _needs("factor", "factor is null, and there is no max_position_embeddings to tell it: give one of them."),
    NumberOrZero("beta_fast", "beta_fast", 32.0),
    NumberOrZero("beta_slow", "beta_slow", 1.0),
    Number("attention_factor", "attention_factor", None),
    NumberOrZero("mscale", "mscale", None),
    NumberOrZero("mscale_all_dim", "mscale_all_dim", None),
    Only("extrapolation_factor", 1, 1.0),
    Only("attn_factor", 1, 1.0),
    Flag("truncate", lambda rope: ABSENT if rope.truncate else False, True, name="truncate"),
)


def _factors(key: str, name: str) -> Rule:
    """Return the row of numbers above 0, one for each pair."""

    def read(fields: Fields, values: Values) -> tuple[float, ...]:
        found = fields.take(key)
        if not isinstance(found, list) or not all(isinstance(x, int | float) and x > 0 for x in found):
            raise fields.error(f"{key} must be a list of numbers above 0.")
        return tuple(map(float, found))

    return Rule(name, read, lambda rope: {key: list(getattr(rope, name))})


_BY_ALPHA = "dynamic, alpha"  # the type that Hunyuan's files call dynamic, too: there `alpha` says all
# Classes of rotary embeddings by `rope_type`, with the rows that each has of its own.
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
            Number("factor", "factor", lambda values: max(1.0, _default_factor(values) or 1.0)),
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
    # transformers requires a factor, but uses only alpha
    _BY_ALPHA: (NTKRope, (Number("alpha", "alpha"), Rule("", writes=lambda rope: {"factor": 1.0}))),
    "proportional": (
        ProportionalRope,
        (Number("factor", lambda rope: ABSENT if rope.factor == 1.0 else rope.factor, 1.0, name="factor"),),
    ),
}
_IGNORED = {
    "default": ("factor", "original_max_position_embeddings"),
    "linear": ("original_max_position_embeddings",),
    "dynamic": ("original_max_position_embeddings",),
    _BY_ALPHA: ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}


def rope_settings(name: str = "rope", *, required: bool = True, unused: bool = False, **options: Any) -> Rule:
    """Return the row of the rotary embedding of all layers; the options are those of `read_rope`.

    With a default for partial rotation it is always written. `required` and `unused` are those of `write_rope`.
    """
    partial = options.get("fraction") is not None
    return Rule(
        name,
        lambda fields, values: read_rope(fields, **options),
        functools.partial(write_rope, partial=partial, required=required, unused=unused),
    )


def rotary_dim() -> Rule:
    """Return the row of the number of rotated features of a head, before that of the rotary embedding.

    It is read as `partial_rotary_factor`, and written where this says the same.
    """

    def read(fields: Fields, values: Values) -> None:
        rotated = fields.integer("rotary_dim", None)
        if rotated is not None:
            fields.supply("partial_rotary_factor", rotated / values["shape"].head_dim)

    def write(config: DecoderConfig) -> dict[str, Any]:
        attention = value_at(config, "attention")
        rotated = attention.rope.rotated(attention.head_dim)
        return {"rotary_dim": rotated} if rotated / attention.head_dim == attention.rope.fraction else {}

    return Rule("", read, write)


def rotated_layers() -> Rule:
    """Return the row of the layers with rotary embeddings, `rotated`: `no_rope_layers` has a 1 for each of them.

    Where it is missing every `no_rope_layer_interval`-th layer has none.
    """

    def read(fields: Fields, values: Values) -> frozenset[int]:
        count, interval = values["shape"].num_layers, fields.integer("no_rope_layer_interval", 4)
        flags = fields.numbers("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(count)]
        if len(flags) != count:
            raise fields.error(f"no_rope_layers has {len(flags)} entries, but there are {count} layers.")
        return frozenset(index for index in range(count) if flags[index])

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {"no_rope_layers": [int(mixer.rope is not None) for mixer in attentions(config)]}

    return Rule("rotated", read, write)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopesByLayer(Setting):
    """Row of the rotary embeddings `rope`, and `local_rope` of layers with a window: the arguments of `read_ropes`."""

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
    """Read the rotary embedding of all layers, from `rope_parameters` or older `rope_theta` and `rope_scaling`.

    Partial rotation and positions of several dimensions are refused unless their defaults, `fraction` and `sections`,
    are given. `interleaved_sections` says how the family's pairs are divided among the dimensions. `others` are keys of
    the tables that other rows read.
    """
    outer = _Outer(
        theta=fields.number("rope_theta", None),
        default=theta,
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
    return dataclasses.replace(_agreeing(fields, tables, outer), pairing=pairing)


def _plain_mrope(table: Fields, sections: tuple[int, ...]) -> None:
    """Rename the type `mrope`, which old files give a plain embedding of several dimensions."""
    for key in ("type", "rope_type") if sections else ():
        if table.content.get(key) == "mrope":
            table.content[key] = "default"


def read_ropes(
    fields: Fields, *, theta: float, local_theta: float, local_key: str | None, fraction: float | None = None
) -> dict[str, Rope]:
    """Read the rotary embeddings of `full_attention` and `sliding_attention` layers.

    New files nest them by the type of the layer. In old ones `rope_theta` and `rope_scaling` are those of the full
    layers, and `local_key` names the others' theta (None: always `local_theta`). Partial rotation is refused unless its
    default, `fraction`, is given.
    """
    outside = None if fraction is None else fields.number("partial_rotary_factor", None)
    common: dict[str, Any] = dict(nested=True, fraction=outside, default_fraction=fraction)
    length = fields.integer("max_position_embeddings", None)
    parameters, scaling = fields.table("rope_parameters"), fields.table("rope_scaling")
    full, sliding = (
        None if parameters is None else parameters.table(LAYER_TYPES[kind]) for kind in (Causal, SlidingWindow)
    )
    for table in (full, sliding, scaling):
        if table is not None:
            table.rename("type", "rope_type")
    if parameters is not None:
        parameters.finish()
    local = None if local_key is None else fields.number(local_key, None)
    outer = _Outer(theta=fields.number("rope_theta", None), default=theta, length=length, **common)
    local_outer = _Outer(theta=local, default=local_theta, length=length, **common)
    return {
        "full_attention": _agreeing(fields, [full, scaling], outer),
        "sliding_attention": _agreeing(fields, [sliding], local_outer),
    }


def read_named_ropes(fields: Fields, thetas: Mapping[str, tuple[str, float]], *, fraction: float) -> dict[str, Rope]:
    """Read rotary embeddings that `rope_parameters` has by name; `thetas` are the outer key and the default of each.

    In old files the first is plain, and `rope_scaling` is that of the others, without a factor of cosine and sine.
    """
    length = fields.integer("max_position_embeddings", None)
    tables = [table for table in map(fields.table, ("rope_parameters", "rope_scaling")) if table is not None]
    nested = bool(tables) and set(thetas) <= set(tables[0].content)
    ropes: dict[str, Rope] = {}
    for name, (key, default) in thetas.items():
        theta = fields.number(key, None)
        outer = _Outer(theta=theta, default=default, length=length, nested=True, default_fraction=fraction)
        if nested:
            ropes[name] = _agreeing(fields, [tables[0].table(name)], outer)
        elif not ropes:
            ropes[name] = Rope(**outer.common(None, None))
        else:
            for table in tables:
                table.rename("type", "rope_type")
                table.content.pop("rope_theta", None)
                if table.content.get("rope_type") == "yarn":
                    table.supply("attention_factor", 1.0)
            ropes[name] = _agreeing(fields, list(tables), outer)
    if nested:
        tables[0].finish()
    return ropes


def write_named_ropes(ropes: Mapping[str, Rope]) -> dict[str, Any]:
    """Return `rope_parameters` with these rotary embeddings by name."""
    return {"rope_parameters": {name: _table(rope, partial=True) for name, rope in ropes.items()}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Outer:
    """Settings outside of a table of rotary settings, and defaults.

    `nested`: layers of different types have tables of their own. `default_fraction=None` rotates all features. Without
    `sections` positions have one dimension; else pairs are divided by them, with `interleaved_sections` or not.
    """

    theta: float | None
    default: float
    length: int | None
    nested: bool = False
    fraction: float | None = None
    default_fraction: float | None = None
    sections: tuple[int, ...] = ()
    interleaved_sections: bool = True

    def common(self, theta: float | None, fraction: float | None) -> dict[str, Any]:
        """Return the fields of all kinds of rotary embeddings, two of them from a table if it has them."""
        return {
            "theta": theta or self.theta or self.default,
            "fraction": fraction or self.fraction or self.default_fraction or 1.0,
            "sections": self.sections,
            "interleaved_sections": self.interleaved_sections,
        }


def _agreeing(fields: Fields, tables: list[Fields | None], outer: _Outer) -> Rope:
    """Return the rotary embedding of the tables that exist; refuse tables that differ."""
    ropes = [_rope(table, outer) for table in tables if table is not None]
    if any(rope != ropes[0] for rope in ropes):
        raise fields.error("rope_parameters and rope_scaling say different things: remove one of them.")
    return ropes[0] if ropes else Rope(**outer.common(None, None))


def _rope(fields: Fields, outer: _Outer) -> Rope:
    """Read one table of rotary settings."""
    if "short_factor" in fields.content and fields.content.get("rope_type") in ("su", "yarn"):
        fields.content["rope_type"] = "longrope"  # as old files call it
    kind = fields.word("rope_type", {name: name for name in _TYPES if name != _BY_ALPHA}, "default")
    kind = _BY_ALPHA if kind == "dynamic" and fields.content.get("alpha") is not None else kind
    partial = outer.default_fraction is not None or kind == "proportional"
    common = outer.common(
        _inner(fields, "rope_theta", outer.theta),
        _inner(fields, "partial_rotary_factor", outer.fraction) if partial else None,
    )
    if not partial:
        fields.allow_only("partial_rotary_factor", 1, 1.0)
    if outer.sections:
        for key in ("mrope_interleaved", "interleaved"):
            fields.allow_only(key, outer.interleaved_sections)
        common["sections"] = tuple(fields.numbers("mrope_section", outer.sections))
        if len(common["sections"]) != len(outer.sections):
            raise fields.error(f"mrope_section must have {len(outer.sections)} numbers: time, height and width.")
    make, settings = _TYPES[kind]
    values = read_all(settings, fields, {"_length": outer.length})
    if make is YarnRope:
        # transformers looks for it outside of nested tables, where no file has it
        values["truncate"] = values["truncate"] or outer.nested
        if values["mscale_all_dim"] is None or values["attention_factor"] is not None:
            values["mscale"] = None  # it has no effect
    ignored = ("max_position_embeddings", "finetuned", *_IGNORED.get(kind, ()))
    rope = make(**common, **values)
    fields.finish(dict.fromkeys(ignored, "has no effect on this type"))
    return rope


def _inner(fields: Fields, key: str, outside: float | None) -> float | None:
    """Read a number of a table; refuse one that differs from the number outside of it."""
    inner = fields.number(key, None)
    if inner is not None and outside is not None and inner != outside:
        raise fields.error(f"{key}={inner}, but {outside} outside of it: make them equal.")
    return inner


def write_rope(
    config: DecoderConfig, *, partial: bool = False, required: bool = True, unused: bool = False
) -> dict[str, Any]:
    """Return the rotary embedding of all layers, as `rope_parameters` and in the spelling of transformers 4.

    `partial` is for families whose `fraction` has a default: it is always written. Where no layer has one, nothing is
    written, or an `unused` one, as transformers writes it; unless it is `required`.
    """
    mixers = (mixer for block in config.blocks for mixer in block.mixers())
    mixer = next((mixer for mixer in mixers if getattr(mixer, "rope", None)), None)
    if mixer is None and unused:
        return {"rope_parameters": _table(Rope())}
    if mixer is None and not required:
        return {}
    rope: Rope | None = getattr(mixer, "rope", None)
    table = _table(rope, partial)
    outside = {key: table[key] for key in ("rope_theta", "partial_rotary_factor") if key in table}
    scaling = {key: value for key, value in table.items() if key not in outside}
    old = {"rope_scaling": scaling} if scaling != {"rope_type": "default"} else {}
    if isinstance(rope, DynamicRope):
        outside["max_position_embeddings"] = rope.original_length
    return {"rope_parameters": table} | outside | old


def write_ropes(config: DecoderConfig) -> dict[str, Any]:
    """Return `rope_parameters` by the type of the layer; a type that no layer has is left out."""
    kinds = {type(mixer.mask): mixer.rope for mixer in attentions(config)}
    return {"rope_parameters": {LAYER_TYPES[kind]: _table(rope) for kind, rope in kinds.items()}}


def _table(rope: Rope | None, partial: bool = False) -> dict[str, Any]:
    """Return the table of one rotary embedding, as transformers 5 writes it."""
    if rope is None:
        raise ConversionError("AttentionConfig.rope=None: there must be a rotary embedding.")
    kind, settings = next((kind, rows) for kind, (rope_type, rows) in _TYPES.items() if rope_type is type(rope))
    written = {key: value for key, value in write_all(settings, rope).items() if value is not None}
    table: dict[str, Any] = {"rope_type": kind.split(",")[0], "rope_theta": rope.theta, **written}
    if partial or rope.fraction != 1.0:
        table["partial_rotary_factor"] = rope.fraction
    if rope.sections:
        table["mrope_section"] = list(rope.sections)
    if rope.sections and rope.interleaved_sections:
        table["mrope_interleaved"] = True
    return table
