"""Rows of a family's table of settings, which map keys of `config.json` to values of a configuration.

Reading a table returns the keyword arguments of a function that builds the configuration. Writing a table returns the
keys for a configuration. The same rows serve both directions.

    Integer("num_hidden_layers", "blocks", name="num_layers")    # one key, one value
    Number("rms_norm_eps", "final_norm.eps", 1e-6)               # with transformers' default
    Only("mlp_bias", False)                                      # any other value is refused
    Group("mamba", Mamba2Config, rows)                           # several keys, one value
    Table("vision_config", rows)                                 # keys of a nested object

A path is a sequence of attributes of the configuration, or of indices where a word is a number. Its first word may be a
key of `FINDERS`: `attention` is the first attention mixer, `mlp` the first MLP. A path may also be a function of the
configuration. A default may be a function of the values of earlier rows. Only later rows see values whose names start
with `_`. A `Rule` has a function for each direction, for keys that no other row can describe.
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


ABSENT: Any = object()  # a path that is a function returns it if the key should not be written
Values = MutableMapping[str, Any]
Path = str | Callable[[Any], Any] | None

# First words of paths. A word stands for the first layer whose configuration has one of these classes. The classes are
# named instead of imported, so that a family imports only its own layers.
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
    """Return the first mixer or MLP of the classes `FINDERS[word]`; None if no layer has such a class."""
    for class_name in FINDERS[word]:
        for block in config.blocks:
            for layer in (*block.mixers(), block.mlp):
                if any(base.__name__ == class_name for base in type(layer).__mro__):
                    return layer
    return None


def value_at(config: Any, path: str) -> Any:
    """Return the value at `path` in a configuration. Raises ConversionError if the path does not exist."""
    value = config
    for word in path.split("."):
        if value is config and word in FINDERS:
            value = first_layer(config, word)
            if value is None:
                raise ConversionError(
                    f"{type(config).__name__}.blocks: at least one layer must have {' or '.join(FINDERS[word])}, which "
                    f"config.json describes ({path})."
                )
        elif word.isdecimal():
            if not isinstance(value, tuple) or int(word) >= len(value):
                raise ConversionError(
                    f"{type(config).__name__}.{path}: there is no element {word}, which config.json describes."
                )
            value = value[int(word)]
        elif hasattr(value, word):
            value = getattr(value, word)
        else:
            raise ConversionError(
                f"{type(config).__name__}.{path}: {type(value).__name__} has no attribute {word}, which config.json "
                "describes."
            )
    return value


def values_by_layer(config: Any, path: str) -> list[Any]:
    """Return the value at `path` in each block of a decoder. Raises ConversionError if a block has no such path."""
    return [value_at(config, f"blocks.{layer}.{path}") for layer in range(len(config.blocks))]


class Setting(abc.ABC):
    """Base class of the rows of a table of settings."""

    @abc.abstractmethod
    def read(self, fields: Fields, values: Values) -> None:
        """Read the keys of the row, and set their values in `values`, which has the values of earlier rows."""

    def write(self, config: Any) -> dict[str, Any]:
        """Return the keys of the row for a configuration."""
        return {}


def read_all(settings: Iterable[Setting], fields: Fields, outer: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Read all rows in order, and return their values. `outer`: other values that the rows may use."""
    values: dict[str, Any] = {}
    visible_values = collections.ChainMap(values, dict(outer))
    for setting in settings:
        setting.read(fields, visible_values)
    return values


def public(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose names do not start with `_`: the keyword arguments of the function that builds."""
    return {name: value for name, value in values.items() if not name.startswith("_")}


def write_all(settings: Iterable[Setting], config: Any) -> dict[str, Any]:
    """Return the keys of all rows for a configuration. If several rows write a key, the last row takes precedence."""
    return {key: value for setting in settings for key, value in setting.write(config).items()}


@dataclasses.dataclass(frozen=True)
class Key(Setting):
    """Row of one key with one value. Subclasses define the type of the value.

    **Arguments:**

    - `key`: the key. Empty: the family has no such key, and the value is always `default`.
    - `path`: path of the value in a configuration. None: the key is not written.
    - `default`: value if the key is missing or null; of a `Word`, a string of `known`. If it is omitted, the key is
        required.
    - `name`: name of the value; the last word of `path` by default.
    - `null`: value if the key is null; `default` if it is omitted.
    - `twin`: a second key with the same value; both keys are read and written.
    """

    key: str
    path: Path
    default: Any = REQUIRED
    _: dataclasses.KW_ONLY
    name: str = ""
    null: Any = REQUIRED
    twin: str = ""

    reader: ClassVar[str] = ""  # name of the method of `Fields` that reads the key

    def value(self, fields: Fields, default: Any, null: Any) -> Any:
        """Read the key, and return its value."""
        return getattr(fields, self.reader)(self.key, default, null=null)

    def to_json(self, value: Any) -> Any:
        """Convert a value to JSON."""
        return value

    @property
    def keyword(self) -> str:
        """Name of the value."""
        return self.name or str(self.path).rpartition(".")[2]

    def read(self, fields: Fields, values: Values) -> None:
        if self.twin:
            fields.rename(self.twin, self.key)
        default = self.default(values) if callable(self.default) else self.default
        null = self.null(values) if callable(self.null) else self.null
        values[self.keyword] = self.value(fields, default, null) if self.key else default

    def write(self, config: Any) -> dict[str, Any]:
        if self.path is None or not self.key:
            return {}
        value = self.path(config) if callable(self.path) else value_at(config, self.path)
        return {} if value is ABSENT else {key: self.to_json(value) for key in (self.key, self.twin) if key}


@dataclasses.dataclass(frozen=True)
class Integer(Key):
    """Row of an integer. `least`: the minimum."""

    _: dataclasses.KW_ONLY
    least: int = 1

    def value(self, fields: Fields, default: Any, null: Any) -> Any:
        return fields.integer(self.key, default, null=null, least=self.least)


class Number(Key):
    """Row of a finite number above 0."""

    reader = "number"


class NumberZeroIsDefault(Number):
    """Row of a finite number above 0. The value 0 means the default, because transformers tests `if number`."""

    def value(self, fields: Fields, default: Any, null: Any) -> Any:
        number = fields.content.get(self.key)
        if isinstance(number, int | float) and not isinstance(number, bool) and number == 0:
            fields.take(self.key)
            return default
        return super().value(fields, default, null)


class Inverse(Number):
    """Row of a number above 0 whose inverse is the value: a factor in `config.json`, a divisor in the configuration."""

    def value(self, fields: Fields, default: Any, null: Any) -> Any:
        return 1.0 / super().value(fields, default, null)

    def to_json(self, value: Any) -> Any:
        """Return the number with the shortest text whose rounded inverse is exactly `value`.

        Several neighboring numbers may have this inverse, and the result of `1.0 / value` may not be one of them.
        """
        neighbors = (math.nextafter(1.0 / value, toward) for toward in (0.0, 1.0 / value, math.inf))
        exact = (number for number in neighbors if 1.0 / number == value)
        return min(exact, key=lambda number: len(repr(number)), default=1.0 / value)


class Flag(Key):
    """Row of a boolean: the value at `path` if it is a boolean, otherwise whether this value is not None."""

    reader = "flag"

    def to_json(self, value: Any) -> Any:
        return value if isinstance(value, bool) else value is not None


class Layers(Key):
    """Row of the number of layers. `path` is the path of the tuple of layers."""

    reader = "layers"

    def to_json(self, value: Any) -> Any:
        return len(value)


class Numbers(Key):
    """Row of a list of integers."""

    reader = "integers"

    def value(self, fields: Fields, default: Any, null: Any) -> Any:
        return tuple(super().value(fields, default, null))

    def to_json(self, value: Any) -> Any:
        return list(value)


@dataclasses.dataclass(frozen=True)
class Word(Key):
    """Row of a string. `known` maps supported strings to values; the first string of a value is written."""

    _: dataclasses.KW_ONLY
    known: Mapping[str, Any]

    def value(self, fields: Fields, default: Any, null: Any) -> Any:
        return fields.word(self.key, self.known, default)

    def to_json(self, value: Any) -> Any:
        return json_name(self.known, value, self.key)


def activation(key: str, path: Path, default: str, *, name: str = "") -> Word:
    """Return the row of an activation function. `default`: transformers' name of the default."""
    return Word(key, path, default, known=ACTIVATIONS, name=name)


@dataclasses.dataclass(frozen=True)
class Only(Setting):
    """Row of a key that must be missing or null, or have one of the values `allowed`.

    **Arguments:**

    - `allowed`: the supported values. A function is called with the values of earlier rows, and returns a supported
        value.
    - `written`: whether the key is written, with the first value of `allowed`, or null if `allowed` is empty.
    """

    key: str
    allowed: tuple[Any, ...]
    written: bool

    def __init__(self, key: str, *allowed: Any, written: bool = False):
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "allowed", allowed)
        object.__setattr__(self, "written", written)

    def read(self, fields: Fields, values: Values) -> None:
        fields.allow_only(self.key, *(option(values) if callable(option) else option for option in self.allowed))

    def write(self, config: Any) -> dict[str, Any]:
        return {self.key: self.allowed[0] if self.allowed else None} if self.written else {}


def only(**values: Any) -> tuple[Only, ...]:
    """Return the rows of keys with a single supported value, which are not written: `only(mlp_bias=False)`."""
    return tuple(Only(key, value) for key, value in values.items())


@dataclasses.dataclass(frozen=True)
class Unused(Setting):
    """Row of keys that have no effect and, unlike `ignored_keys`, are not exported.

    **Arguments:**

    - `keys`: the keys, separated by spaces.
    - `reason`: why they have no effect.
    """

    keys: str
    reason: str

    def read(self, fields: Fields, values: Values) -> None:
        for key in self.keys.split():
            fields.take(key, None)
            fields.content.pop(key, None)


# For families whose published files have this key. Other families refuse it.
AUTO_MAP = Unused("auto_map", "it names code in the same directory, which is neither run nor exported")


@dataclasses.dataclass(frozen=True)
class Defaults(Setting):
    """Row of transformers' defaults for missing keys. An explicit null is not replaced."""

    values: Mapping[str, Any]

    def read(self, fields: Fields, values: Values) -> None:
        fields.content = {**self.values, **fields.content}


@dataclasses.dataclass(frozen=True)
class Renamed(Setting):
    """Row of other spellings of keys, with the spelling that later rows read."""

    keys: Mapping[str, str]

    def read(self, fields: Fields, values: Values) -> None:
        for old, new in self.keys.items():
            fields.rename(old, new)


@dataclasses.dataclass(frozen=True)
class Check(Setting):
    """Row of a condition on the values of earlier rows.

    **Arguments:**

    - `rule`: returns whether the values are valid.
    - `sentence`: error message for invalid values, with names of values in braces.
    """

    rule: Callable[[Values], bool]
    sentence: str

    def read(self, fields: Fields, values: Values) -> None:
        if not self.rule(values):
            raise fields.error(self.sentence.format_map(values))


@dataclasses.dataclass(frozen=True)
class Rule(Setting):
    """Row of keys that functions read and write.

    **Arguments:**

    - `name`: name of the value. Empty: the row has no value.
    - `reads`: returns the value, from the fields and the values of earlier rows.
    - `writes`: returns the keys for a configuration.
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
    """Row that builds one value from the values of other rows.

    **Arguments:**

    - `name`: name of the value.
    - `make`: builds the value; the values of `settings` are its keyword arguments.
    - `settings`: the rows.
    - `uses`: names of values of earlier rows that are also passed to `make`, without a leading `_`.
    - `path`: path of the value in a configuration; paths of `settings` are relative to it. None: the configuration.
    - `when`: returns whether the keys are read, from the values of earlier rows. Otherwise the value is None. If `when`
        is None, the keys are always read.
    - `layer`: key of `FINDERS`. The keys are not written if the configuration has no such layer. None: they are always
        written.
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
        own_values = public(read_all(self.settings, fields, values))
        used_values = {name.lstrip("_"): values[name] for name in self.uses}
        try:
            values[self.name] = self.make(**used_values, **own_values)
        except ConfigError as error:
            raise fields.error(str(error)) from error

    def write(self, config: Any) -> dict[str, Any]:
        if self.layer is not None and first_layer(config, self.layer) is None:
            return {}
        part = config if self.path is None else value_at(config, self.path)
        if part is None:
            raise ConversionError(
                f"{type(config).__name__}.{self.path}=None must be set: config.json of this model type describes it."
            )
        return write_all(self.settings, part)


@dataclasses.dataclass(frozen=True)
class Table(Setting):
    """Row of a nested object, such as `vision_config`.

    **Arguments:**

    - `key`: key of the object.
    - `settings`: rows of the keys of the object.
    - `model_type`: `model_type` of the object that is written; None: it is not written.
    - `what`: what the object describes, for the error message if it is missing. Empty: the object is optional; if it is
        missing, the values of its groups are None.
    - `ignored`: keys of the object without effect, with the reason; see `Family.ignored_keys`.
    """

    key: str
    settings: tuple[Setting, ...]
    _: dataclasses.KW_ONLY
    model_type: str | None = None
    what: str = "the encoder"
    ignored: Mapping[str, str] = dataclasses.field(default_factory=dict)

    # Keys that transformers writes into every nested object. `tie_word_embeddings` matters only for the decoder.
    COMMON_KEYS: ClassVar[tuple[str, ...]] = (
        "model_type",
        "dtype",
        "torch_dtype",
        "architectures",
        "tie_word_embeddings",
    )

    def read(self, fields: Fields, values: Values) -> None:
        table = fields.table(self.key)
        if table is None:
            if self.what:
                raise fields.error(f"{self.key} is missing, but it must describe {self.what}: add it.")
            values.update({group.name: None for group in self._groups})
            return
        values.update(read_all(self.settings, table, values))
        for key in self.COMMON_KEYS:
            table.take(key, None)
        fields.carry(self.key, table.ignored(IGNORED_KEYS | by_key(self.ignored), ALLOWED_VALUES, GENERATION_KEYS))

    @property
    def _groups(self) -> list[Group]:
        return [setting for setting in self.settings if isinstance(setting, Group)]

    def write(self, config: Any) -> dict[str, Any]:
        if not self.what and all(
            group.path is not None and value_at(config, group.path) is None for group in self._groups
        ):
            return {self.key: None}
        model_type = {} if self.model_type is None else {"model_type": self.model_type}
        return {self.key: model_type | write_all(self.settings, config)}


def sized(sizes: type, make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of keyword arguments that builds a `sizes` and passes it to `make`, with all other arguments.

    `sizes` is a dataclass, such as `EncoderSizes`; its fields are keyword arguments of the function.
    """
    size_names = {field.name for field in dataclasses.fields(sizes)}

    def build(**values: Any) -> Any:
        size_values = {name: value for name, value in values.items() if name in size_names}
        options = {name: value for name, value in values.items() if name not in size_names}
        return make(sizes(**size_values), **options)

    return build
