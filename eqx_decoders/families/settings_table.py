"""Rows of a family's table of settings: keys of `config.json`, and what they say of a configuration.

A table is read into the keywords of a function that builds the configuration, and written from the configuration, by
the same rows: each names its keys once, and where in a configuration their values stand.

    Integer("num_hidden_layers", "blocks", name="num_layers")    # one key, one value
    Number("rms_norm_eps", "final_norm.eps", 1e-6)               # with transformers' default
    Only("mlp_bias", False)                                      # any other value is refused
    Group("mamba", Mamba2Config, rows)                           # several keys, one value
    Table("vision_config", rows)                                 # an object in the object

A path is read as attributes, numbers as items. Its first word may be one of `FINDERS`: `attention` is the first mixer
with attention, `mlp` the first MLP. A function of the configuration may stand for a path, and a function of the values
before it for a default. Values whose names begin with `_` are for the rows after them alone. What no row expresses is a
`Rule`, with a function for each direction.
"""

import abc
import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, ClassVar

from eqx_decoders.core.config_reader import REQUIRED, Fields
from eqx_decoders.errors import ConfigError, ConversionError
from eqx_decoders.families.config_keys import (
    ACTIVATIONS,
    ALLOWED_VALUES,
    GENERATION_KEYS,
    IGNORED_KEYS,
    by_key,
    json_name,
)


ABSENT: Any = object()  # the value of a path that is a function, for a key that is not written
Values = MutableMapping[str, Any]
Path = str | Callable[[Any], Any] | None

# Paths may begin with one of these words: it finds the first layer whose configuration has one of these classes. The
# classes are named instead of imported, so that a family imports only its own layers.
FINDERS: dict[str, tuple[str, ...]] = {
    "attention": ("AttentionConfig",),
    "latent": ("LatentAttentionConfig",),
    "compressed": ("CompressedAttentionConfig",),
    "mamba": ("Mamba2Config",),
    "mamba1": ("Mamba1Config",),
    "delta": ("GatedDeltaNetConfig", "KimiDeltaAttentionConfig"),
    "convolution": ("GatedConvolutionConfig",),
    "lightning": ("LightningAttentionConfig",),
    "rg_lru": ("RGLRUConfig",),
    "experts": ("ExpertsConfig",),
    "mlp": ("MLPConfig", "ExpertsConfig"),  # experts only where no block has an MLP
}


def first_layer(config: Any, word: str) -> Any:
    """Return the first mixer or MLP whose class `word` stands for; None if there is none."""
    for kind in FINDERS[word]:
        for block in config.blocks:
            for layer in (*block.mixers(), block.mlp):
                if any(base.__name__ == kind for base in type(layer).__mro__):
                    return layer
    return None


def value_at(config: Any, path: str) -> Any:
    """Return what stands at `path` in a configuration. Raises ConversionError where there is no such thing."""
    value, where = config, type(config).__name__
    for word in path.split("."):
        if value is config and word in FINDERS:
            value = first_layer(config, word)
            if value is None:
                raise ConversionError(f"{where}.blocks: no layer has {' or '.join(FINDERS[word])}.")
        elif word.isdecimal():
            value = value[int(word)]
        elif hasattr(value, word):
            value = getattr(value, word)
        else:
            raise ConversionError(f"{where}.{path}: {type(value).__name__} has no {word}.")
    return value


class Setting(abc.ABC):
    """One row."""

    @abc.abstractmethod
    def read(self, fields: Fields, values: Values) -> None:
        """Read the keys of the row, and set what they say in `values`."""

    def write(self, config: Any) -> dict[str, Any]:
        """Return the keys of the row with the values of `config`."""
        return {}


def read_all(settings: Iterable[Setting], fields: Fields, outer: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return the values of all rows, read in order; they see the `outer` ones as well."""
    values: dict[str, Any] = {}
    seen = collections.ChainMap(values, dict(outer))
    for setting in settings:
        setting.read(fields, seen)
    return values


def public(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a function takes: those whose names do not begin with `_`."""
    return {name: value for name, value in values.items() if not name.startswith("_")}


def write_all(settings: Iterable[Setting], config: Any) -> dict[str, Any]:
    """Return the keys of all rows with the values of `config`; of rows with the same key the last one's counts."""
    return {key: value for setting in settings for key, value in setting.write(config).items()}


@dataclasses.dataclass(frozen=True)
class Key(Setting):
    """One key that says one value; its subclasses are types of values.

    **Arguments:**

    - `key`: the key; empty in a family that has none, where the value is always the default.
    - `path`: where the value stands in a configuration; None for a key that is not written.
    - `default`: its value where the key is missing or null. Without one the key must be there.
    - `name`: the keyword of the value; the last word of `path` by default.
    - `null`: value of an explicit null; `default` by default.
    - `twin`: another spelling of the key, which is read and written too.
    """

    key: str
    path: Path
    default: Any = REQUIRED
    _: dataclasses.KW_ONLY
    name: str = ""
    null: Any = REQUIRED
    twin: str = ""

    reader: ClassVar[str] = ""  # method of `Fields`

    def value(self, fields: Fields, default: Any, null: Any) -> Any:
        """Return the value of the key."""
        return getattr(fields, self.reader)(self.key, default, null=null)

    def text(self, value: Any) -> Any:
        """Return the JSON of a value."""
        return value

    @property
    def keyword(self) -> str:
        """Name of the value."""
        return self.name or str(self.path).rpartition(".")[2]

    def read(self, fields: Fields, values: Values) -> None:
        if self.twin:
            fields.rename(self.twin, self.key)
        default, null = (each(values) if callable(each) else each for each in (self.default, self.null))
        values[self.keyword] = self.value(fields, default, null) if self.key else default

    def write(self, config: Any) -> dict[str, Any]:
        if self.path is None or not self.key:
            return {}
        value = self.path(config) if callable(self.path) else value_at(config, self.path)
        return {} if value is ABSENT else {key: self.text(value) for key in (self.key, self.twin) if key}


@dataclasses.dataclass(frozen=True)
class Integer(Key):
    """Integer of at least `least`."""

    _: dataclasses.KW_ONLY
    least: int = 1

    def value(self, fields: Fields, default: Any, null: Any) -> Any:
        return fields.integer(self.key, default, null=null, least=self.least)


class Number(Key):
    """Finite number above 0."""

    reader = "number"


class NumberOrZero(Number):
    """Finite number above 0. The value 0 means the default, because transformers tests the number as a boolean."""

    def value(self, fields: Fields, default: Any, null: Any) -> Any:
        zero = fields.content.get(self.key)
        if isinstance(zero, int | float) and not isinstance(zero, bool) and zero == 0:
            fields.take(self.key)
            return default
        return super().value(fields, default, null)


class Inverse(Number):
    """Number above 0 whose inverse is the value: a factor where the configuration has a divisor."""

    def value(self, fields: Fields, default: Any, null: Any) -> Any:
        return 1.0 / super().value(fields, default, null)

    def text(self, value: Any) -> Any:
        """Return the shortest number with exactly this inverse: a neighbor of the inverse, which is rounded, may be."""
        near = (math.nextafter(1.0 / value, toward) for toward in (0.0, 1.0 / value, math.inf))
        return min((each for each in near if 1.0 / each == value), key=lambda x: len(repr(x)), default=1.0 / value)


class Flag(Key):
    """True or false: what stands at its path or, of anything else, whether something does."""

    reader = "flag"

    def text(self, value: Any) -> Any:
        return value if isinstance(value, bool) else value is not None


class Layers(Key):
    """Number of layers; its path leads to these."""

    reader = "layers"

    def text(self, value: Any) -> Any:
        return len(value)


class Numbers(Key):
    """List of integers."""

    reader = "numbers"

    def value(self, fields: Fields, default: Any, null: Any) -> Any:
        return tuple(super().value(fields, default, null))

    def text(self, value: Any) -> Any:
        return list(value)


@dataclasses.dataclass(frozen=True)
class Word(Key):
    """Word of those in `known`, each with its value; the first of several with one value is written."""

    _: dataclasses.KW_ONLY
    known: Mapping[str, Any]

    def value(self, fields: Fields, default: Any, null: Any) -> Any:
        return fields.word(self.key, self.known, default)

    def text(self, value: Any) -> Any:
        return json_name(self.known, value, self.key)


def activation(key: str, path: Path, default: str, *, name: str = "") -> Word:
    """Return the row of an activation function; `default` is transformers' name."""
    return Word(key, path, default, known=ACTIVATIONS, name=name)


@dataclasses.dataclass(frozen=True)
class Only(Setting):
    """Key that must have one of the values `allowed`, or be missing: other values are not supported.

    A function among them is called with the values of the settings before. With `written` the first allowed value, or
    null, is written.
    """

    key: str
    allowed: tuple[Any, ...]
    written: bool

    def __init__(self, key: str, *allowed: Any, written: bool = False):
        for name, value in dict(key=key, allowed=allowed, written=written).items():
            object.__setattr__(self, name, value)

    def read(self, fields: Fields, values: Values) -> None:
        fields.allow_only(self.key, *(each(values) if callable(each) else each for each in self.allowed))

    def write(self, config: Any) -> dict[str, Any]:
        return {self.key: self.allowed[0] if self.allowed else None} if self.written else {}


def only(**values: Any) -> tuple[Only, ...]:
    """Return the rows of keys that may have one value each; they are not written."""
    return tuple(Only(key, value) for key, value in values.items())


@dataclasses.dataclass(frozen=True)
class Unused(Setting):
    """Keys that say nothing here, and that are no part of an export, unlike `ignored_keys`; with the reason."""

    keys: str
    reason: str

    def read(self, fields: Fields, values: Values) -> None:
        for key in self.keys.split():
            fields.take(key, None)
            fields.content.pop(key, None)


# for families whose published files have it; where it is not expected it is refused
AUTO_MAP = Unused("auto_map", "it names code in the same directory, which is neither run nor exported")


@dataclasses.dataclass(frozen=True)
class Defaults(Setting):
    """Values of keys that are missing, as transformers' classes have them: an explicit null is none."""

    values: Mapping[str, Any]

    def read(self, fields: Fields, values: Values) -> None:
        fields.content = {**self.values, **fields.content}


@dataclasses.dataclass(frozen=True)
class Renamed(Setting):
    """Other spellings of keys, and those that are read."""

    keys: Mapping[str, str]

    def read(self, fields: Fields, values: Values) -> None:
        for old, new in self.keys.items():
            fields.rename(old, new)


@dataclasses.dataclass(frozen=True)
class Check(Setting):
    """Condition that the values before it must meet; the sentence, with their names in braces, says which."""

    rule: Callable[[Values], bool]
    sentence: str

    def read(self, fields: Fields, values: Values) -> None:
        if not self.rule(values):
            raise fields.error(self.sentence.format_map(values))


@dataclasses.dataclass(frozen=True)
class Rule(Setting):
    """Keys that functions read and write.

    **Arguments:**

    - `name`: the keyword of the value that is read; empty for a function without one.
    - `reads`: returns the value, from the fields and the values before it; nothing by default.
    - `writes`: returns the keys of a configuration.
    """

    name: str = ""
    reads: Callable[[Fields, Values], Any] = lambda fields, values: None
    writes: Callable[[Any], dict[str, Any]] = lambda config: {}

    def read(self, fields: Fields, values: Values) -> None:
        value = self.reads(fields, values)
        if self.name:
            values[self.name] = value

    def write(self, config: Any) -> dict[str, Any]:
        return self.writes(config)


@dataclasses.dataclass(frozen=True)
class Group(Setting):
    """Rows that say one value together.

    **Arguments:**

    - `name`: the keyword of the value.
    - `make`: returns the value from the rows' keywords.
    - `settings`: the rows.
    - `uses`: names of values before it that `make` takes as well, without `_`.
    - `path`: where the value stands in a configuration, from which paths of the rows go on; None for the same.
    - `when`: whether it is there, by the values before it; else its keys are not read, and the value is None.
    - `layer`: word of `FINDERS`; where a configuration has no such layer its keys are not written.
    """

    name: str
    make: Callable[..., Any]
    settings: tuple[Setting, ...]
    _: dataclasses.KW_ONLY
    uses: tuple[str, ...] = ()
    path: str | None = None
    when: Callable[[Values], bool] | None = None
    layer: str | None = None

    def read(self, fields: Fields, values: Values) -> None:
        if self.when is not None and not self.when(values):
            values[self.name] = None
            return
        inner = public(read_all(self.settings, fields, values))
        used = {name.lstrip("_"): values[name] for name in self.uses}
        try:
            values[self.name] = self.make(**used, **inner)
        except ConfigError as error:
            raise fields.error(str(error)) from error

    def write(self, config: Any) -> dict[str, Any]:
        if self.layer is not None and first_layer(config, self.layer) is None:
            return {}
        part = config if self.path is None else value_at(config, self.path)
        if part is None:
            raise ConversionError(f"{type(config).__name__}.{self.path}=None: there must be one.")
        return write_all(self.settings, part)


@dataclasses.dataclass(frozen=True)
class Table(Setting):
    """Rows whose keys stand in an object of their own.

    **Arguments:**

    - `key`: the key of the object.
    - `settings`: the rows.
    - `model_type`: its `model_type`, which is written; None for none.
    - `what`: what it describes, for the error where it is missing; empty where it may be, and its groups are None.
    - `ignored`: keys without effect and the reason, as `Family.ignored_keys`.
    """

    key: str
    settings: tuple[Setting, ...]
    _: dataclasses.KW_ONLY
    model_type: str | None = None
    what: str = "the encoder"
    ignored: Mapping[str, str] = dataclasses.field(default_factory=dict)

    # Keys that transformers writes into every nested object. `tie_word_embeddings` matters only for the decoder.
    OUTSIDE: ClassVar[tuple[str, ...]] = ("model_type", "dtype", "torch_dtype", "architectures", "tie_word_embeddings")

    def read(self, fields: Fields, values: Values) -> None:
        table = fields.table(self.key)
        if table is None:
            if self.what:
                raise fields.error(f"{self.key} is missing: it describes {self.what}.")
            values.update({group.name: None for group in self._groups})
            return
        values.update(read_all(self.settings, table, values))
        for name in self.OUTSIDE:
            table.take(name, None)
        fields.carry(self.key, table.ignored(IGNORED_KEYS | by_key(self.ignored), ALLOWED_VALUES, GENERATION_KEYS))

    @property
    def _groups(self) -> list[Group]:
        return [setting for setting in self.settings if isinstance(setting, Group)]

    def write(self, config: Any) -> dict[str, Any]:
        if not self.what and all(value_at(config, group.path or "") is None for group in self._groups):
            return {self.key: None}
        kind = {} if self.model_type is None else {"model_type": self.model_type}
        return {self.key: kind | write_all(self.settings, config)}


def sized(sizes: type, make: Callable[..., Any]) -> Callable[..., Any]:
    """Return `make`, whose first argument is a `sizes`, as a function of keywords: those of `sizes` and its own."""
    names = {field.name for field in dataclasses.fields(sizes)}

    def build(**values: Any) -> Any:
        options = {name: value for name, value in values.items() if name not in names}
        return make(sizes(**{name: value for name, value in values.items() if name in names}), **options)

    return build
