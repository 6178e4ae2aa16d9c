"""Comparison of a checkpoint of an unknown model type with the families of the library.

`rank` orders the families by how much of the checkpoint they explain, and compares the nearest family in detail. It
needs `config.json` and the names of the tensors. Shapes of tensors are optional and make the comparison more precise.
"""

import dataclasses
import math
import re
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError, EqxDecodersError
from eqx_decoders.families.config_keys import ALLOWED_VALUES, GENERATION_KEYS, IGNORED_KEYS
from eqx_decoders.families.family import Family
from eqx_decoders.families.setting_rows import Group, Inverse, Key, Setting, public
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mask import Causal
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.init import abstract


Shape = tuple[int, ...] | None  # None: only the name of the tensor is known

# --- names of tensors ---

_NUMBER = re.compile(r"(?<![^.])(?:\d+|\{\w+\})(?![^.])")
_LAYER, _EXPERT = "{layer}", "{expert}"


@dataclasses.dataclass(frozen=True)
class TensorGroup:
    """Tensors whose names differ only in numbers.

    **Arguments:**

    - `pattern`: the name, with `{layer}` for the first number and `{expert}` for all other numbers.
    - `layers`: values of the first number.
    - `shapes`: the distinct shapes, sorted; empty if only names are known.
    """

    pattern: str
    layers: frozenset[int]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def rank(self) -> int | None:
        """Number of dimensions; None if only names are known."""
        return len(self.shapes[0]) if self.shapes else None

    def __str__(self) -> str:
        return " ".join((self.pattern, " or ".join(str(list(shape)) for shape in self.shapes))).strip()


def pattern_of(name: str) -> str:
    """Return the pattern of a tensor's name, or of the name in a row of a family's table of weights."""
    numbers = iter((_LAYER,))
    return _NUMBER.sub(lambda _: next(numbers, _EXPERT), name)


def group_tensors(tensors: Mapping[str, Shape]) -> dict[str, TensorGroup]:
    """Return the groups of tensors by their patterns."""
    names: dict[str, list[str]] = defaultdict(list)
    for name in tensors:
        names[pattern_of(name)].append(name)
    groups: dict[str, TensorGroup] = {}
    for pattern, members in sorted(names.items()):
        numbers = [_NUMBER.search(name) for name in members]
        layers = frozenset(int(number[0]) for number in numbers if number)
        shapes = {shape for name in members if (shape := tensors[name]) is not None}
        groups[pattern] = TensorGroup(pattern, layers, tuple(sorted(shapes)))
    return groups


def _inner_name(pattern: str) -> str:
    """Return the part of a pattern that starts with `{layer}`; without `{layer}`, the last two words."""
    _, layer, inner = pattern.partition(f"{_LAYER}.")
    return f"{_LAYER}.{inner}" if layer else ".".join(pattern.split(".")[-2:])


def _layer_prefix(patterns: Iterable[str]) -> str:
    """Return the most common prefix before `{layer}`; empty if no pattern has a layer."""
    prefixes = [pattern.partition(_LAYER)[0] for pattern in patterns if _LAYER in pattern]
    return max(sorted(set(prefixes)), key=prefixes.count, default="")


# --- names that the families of the library use ---

# Regular expressions of names of norms, for names that no family uses.
_NORM_NAMES = {
    "pre_mlp_norm": r"(pre_?|before_)?(mlp|ffn|feed_?forward|moe)(_layer_?norm|_norm|_ln)?|(norm|ln|layernorm)_?2",
    "pre_mixer_norm": r"(pre_?|before_|self_)?(attn|attention|mixer|input|operator)(_layer_?norm|_norm|_ln)?"
    r"|(norm|ln|layernorm)_?1",
    "embedding_norm": r"(word_?|token_?)?(emb|embed|embeddings?)_?(layer_?norm|norm|ln)",
    "post_mixer_norm": r"(post|after)_?(attn|attention|self_attn|mixer)(_layer_?norm|_norm|_ln)?",
    "post_mlp_norm": r"(post|after)_?(mlp|ffn|feed_?forward|moe)(_layer_?norm|_norm|_ln)?",
}


# Keys of other libraries' configuration files, by the path of the setting.
_OTHER_KEYS = {
    "embed_dim": "d_model n_embd dim model_dim n_embed embed_dim",
    "blocks": "n_layers n_layer num_layers depth",
    "attention.num_heads": "n_heads n_head num_heads",
    "attention.num_kv_heads": "n_kv_heads kv_n_heads num_kv_heads n_head_kv multi_query_group_num",
    "attention.head_dim": "d_head kv_channels attention_head_dim",
    "mlp.mlp_dim": "d_ff ffn_dim ffn_hidden_size n_inner hidden_dim mlp_dim",
    "mlp.activation": "activation activation_function hidden_activation act_fn",
    "final_norm.eps": "norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_epsilon rms_eps",
    "vocab_size": "n_vocab padded_vocab_size",
}


@dataclasses.dataclass(frozen=True)
class LibraryNames:
    """Names that the families of the library use for weights and settings.

    **Arguments:**

    - `weights`: for each end of a tensor's name, the number of families that use it, by the path of the weight and the
        number of dimensions of the tensor.
    - `keys`: keys of `config.json`, by the path of the setting.
    """

    weights: Mapping[str, Counter[tuple[str, int]]]
    keys: Mapping[str, set[str]]

    @classmethod
    def of(cls, families: Iterable[Family]) -> "LibraryNames":
        """Return the names that these families use."""
        weights: dict[str, Counter[tuple[str, int]]] = defaultdict(Counter)
        keys = defaultdict(set, {path: set(names.split()) for path, names in _OTHER_KEYS.items()})
        for family in families:
            for row in family.weights:
                for end in _name_ends(pattern_of(row.name)) if row.part is None else ():
                    weights[end][row.path, _row_rank(row)] += 1
            for key, path in setting_paths(family).items():
                keys[path].add(key)
        return cls(dict(weights), dict(keys))

    def paths(self, pattern: str, rank: int | None) -> list[str]:
        """Return the paths of weights that families store under such a name, most common first.

        Only the longest end of the name that any family uses is considered. Names of norms are also recognized by
        common spellings.

        **Arguments:**

        - `pattern`: pattern of the name; see `pattern_of`.
        - `rank`: number of dimensions of the tensor; None: unknown.
        """
        for end in _name_ends(pattern):
            counts = self.weights.get(end, Counter())
            paths = [path for (path, row_rank), _ in counts.most_common() if rank in (None, row_rank)]
            if paths:
                return paths
        module, _, kind = pattern.rpartition(".")
        kind = {"weight": "scale", "bias": "bias"}.get(kind)
        module = module.rpartition(".")[2]
        is_vector = kind is not None and rank in (None, 1)
        return [f"{norm}.{kind}" for norm, names in _NORM_NAMES.items() if is_vector and re.fullmatch(names, module)]

    def renamed_keys(self, family: Family, content: Mapping[str, Any]) -> dict[str, str]:
        """Return keys of `content` that are other spellings of keys that the family reads, with these keys.

        Only keys that are missing in `content` are considered.
        """
        own_paths = setting_paths(family)
        renamed: dict[str, str] = {}
        for key, path in own_paths.items():
            others = [other for other in sorted(self.keys[path]) if other in content and other not in own_paths]
            if key not in content and len(others) == 1:
                renamed[others[0]] = key
        return renamed


def setting_paths(family: Family) -> dict[str, str]:
    """Return the path in the configuration of each key with a single value."""
    rows = [row for row in _single_keys(family.settings) if row.key and isinstance(row.path, str)]
    return {row.key: f"1 / {row.path}" if isinstance(row, Inverse) else str(row.path) for row in rows}


def _single_keys(settings: Iterable[Setting]) -> Iterator[Key]:
    for setting in settings:
        if isinstance(setting, Key):
            yield setting
        elif isinstance(setting, Group):
            yield from _single_keys(setting.settings)


def _name_ends(pattern: str) -> list[str]:
    """Return the ends of a pattern that may identify a weight, longest first."""
    words = _inner_name(pattern).split(".")
    in_layer = words[0] == _LAYER
    scope = "layer" if in_layer else "model"
    return [f"{scope}:{'.'.join(words[start:])}" for start in range(in_layer, len(words) - 1)]


def _row_rank(row: Weight) -> int:
    """Return the number of dimensions of a row's tensor in a checkpoint."""
    return len(re.findall(r"\([^)]*\)|\S+", row.pattern.split("->")[0]))


# --- properties that tensors do not reveal ---


@dataclasses.dataclass(frozen=True)
class Property:
    """Property of a decoder that its tensors do not reveal.

    **Arguments:**

    - `name`: name of the property in the report.
    - `value`: path of the field in a `BlockConfig`; with the prefix `decoder.`, in the `DecoderConfig`; or a function
        that returns the value for a block.
    - `keys`: regular expression of the keys of `config.json` that determine the value. Empty: no key does.
    - `usual`: the value in most decoders. Empty: several values are common.
    """

    name: str
    value: str | Callable[[BlockConfig], str | None]
    keys: str = ""
    usual: str = ""

    def text(self, config: DecoderConfig) -> str:
        """Return the distinct values of all blocks, joined with "and"; empty if the property does not apply."""
        texts: list[str] = []
        for block in dict.fromkeys(config.blocks):
            value = self.value(block) if callable(self.value) else _value_at(config, block, self.value)
            if isinstance(value, float):
                texts.append(f"{value:g}")
            elif value is not None:
                texts.append(str(value))
            elif self.usual == "none":
                texts.append("none")
        return " and ".join(dict.fromkeys(texts))


def _value_at(config: DecoderConfig, block: BlockConfig, path: str) -> Any:
    """Return the value at a path; for a configuration, the name of its class. None: the path does not exist."""
    value: Any = config if path.startswith("decoder.") else block
    for name in path.removeprefix("decoder.").split("."):
        value = getattr(value, name, None)
    return type(value).__name__ if dataclasses.is_dataclass(value) else value


def _norms(block: BlockConfig) -> str:
    fields = ("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm")
    return ", ".join(field for field in fields if getattr(block, field) is not None) or "none"


def _position_encoding(block: BlockConfig) -> str | None:
    if not isinstance(block.mixer, AttentionConfig):
        return None
    return "RoPE" if block.mixer.rope is not None else "ALiBi" if block.mixer.alibi is not None else "no RoPE"


_CAUSAL = Causal.__name__
_PROPERTIES = (
    Property("activation", "mlp.activation", r"act(ivation)?(_|\b)"),
    Property("norms of a block", _norms, r"post_norm|pre_norm|norm_before"),
    Property("class of norms", "pre_mixer_norm", r"norm_type|rms_norm"),
    Property("number added to the weight of a norm", "pre_mixer_norm.offset", usual="0"),
    Property("residual connection", "residual", r"parallel_(attn|residual|block)", "Sequential"),
    Property("factor of the outputs of layers", "residual.residual_scale", r"residual_multiplier", "1"),
    Property("position encoding", _position_encoding, r"no_rope|position_embedding_type|alibi", "RoPE"),
    Property("features that RoPE pairs", "mixer.rope.pairing", r"interleave", "half"),
    Property("share of a head that RoPE rotates", "mixer.rope.fraction", r"rotary|rope_pct", "1"),
    Property("QK norm", "mixer.qk_norm.when", usual="before_rope"),
    Property("attention mask", "mixer.mask", r"layer_types|window_pattern|use_sliding|window_layers", _CAUSAL),
    Property("query scale if not head_dim ** -0.5", "mixer.query_scale", r"attn_scalar|attention_mult", "none"),
    Property("soft cap of attention scores", "mixer.soft_cap", r"soft_?cap", "none"),
    Property("factor of embeddings", "decoder.embedding_scale", r"embedding_multiplier|scale_emb", "1"),
    Property("divisor of logits", "decoder.logit_divisor", r"logits?_scal", "1"),
    Property("soft cap of logits", "decoder.logit_soft_cap", r"soft_?cap", "none"),
    Property("score function of the router", "mlp.router.score", r"scor(e|ing)_func"),
    Property("order of selection and scores in the router", "mlp.router.order"),
    Property("router divides selected scores by their sum", "mlp.router.renormalize", r"norm_topk|route_norm"),
    Property("clip of gate and up projections", "mlp.limit", r"limit", "none"),
    Property("number added to up projections", "mlp.up_offset", usual="0"),
)


# --- settings ---

_NOT_SETTINGS = ("model_type", "architectures", "dtype", "torch_dtype", "quantization_config", "auto_map")
_MAX_REFUSALS = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """Result of reading a `config.json` with the table of a family.

    **Arguments:**

    - `config`: the configuration; None if the family cannot build it.
    - `error`: why the family cannot build the configuration.
    - `read`: keys that the family looked for, including missing keys.
    - `unread`: keys that the family neither reads nor ignores, with their values.
    - `refused`: error messages by key, for values that the family refuses. `config` is built without these keys.
    - `renamed`: keys of the file that are other spellings of keys of the family, with the spelling of the family.
    - `open_properties`: properties of `config` that no key determines, with their values.
    """

    config: DecoderConfig | None
    error: str = ""
    read: frozenset[str] = frozenset()
    unread: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    open_properties: Mapping[Property, str] = dataclasses.field(default_factory=dict)

    @property
    def num_unusual(self) -> int:
        """Number of open properties with an unusual value."""
        return sum(value != prop.usual != "" for prop, value in self.open_properties.items())


def read_leniently(family: Family, content: Mapping[str, Any], renamed: Mapping[str, str]) -> Reading:
    """Read all settings that a family can read, and collect problems instead of raising errors.

    `content`: the `config.json`. `renamed`: see `Reading`.
    """
    fields = Fields({renamed.get(key, key): value for key, value in content.items() if key not in _NOT_SETTINGS})
    values: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for setting in family.settings:
        fields, error = _read_row(setting, fields, values, refused)
        if error:
            return Reading(config=None, error=error, read=fields.read_keys, refused=refused, renamed=renamed)
    read = fields.read_keys
    for key, allowed in ALLOWED_VALUES.items():
        try:
            if key not in read:
                fields.allow_only(key, *allowed)
        except ConversionError as error:
            refused[key] = str(error).partition(": ")[2]
    config = None
    error = ""
    try:
        config = family.build(**public(values))
    except Exception as build_error:  # the settings may be those of another family, which `build` does not expect
        error = str(build_error)
    known = fields.read_keys | family.ignored_keys.keys() | IGNORED_KEYS.keys()
    known |= {key for key, kinds in GENERATION_KEYS.items() if type(content.get(key)) in kinds}
    return Reading(
        config=config,
        error=error,
        read=read,
        unread={key: value for key, value in fields.content.items() if key not in known and value is not None},
        refused=refused,
        renamed=renamed,
        open_properties={} if config is None else _open_properties(config, read & fields.content.keys()),
    )


def _open_properties(config: DecoderConfig, keys: Iterable[str]) -> dict[Property, str]:
    """Return the properties that `keys` do not determine, with their values in `config`."""
    all_keys = " ".join(sorted(keys))
    values: dict[Property, str] = {}
    for prop in _PROPERTIES:
        if prop.usual == _CAUSAL and "sliding_window" in keys:
            prop = dataclasses.replace(prop, usual="")  # some layers have a window, but not necessarily all
        if not prop.keys or re.search(prop.keys, all_keys) is None:
            values[prop] = prop.text(config)
    return {prop: value for prop, value in values.items() if value}


def _read_row(setting: Setting, fields: Fields, values: dict[str, Any], refused: dict[str, str]) -> tuple[Fields, str]:
    """Read a row into `values`. Keys whose values are refused are removed and added to `refused`.

    Returns the fields without refused keys, and an error message, which is empty on success.
    """
    for _ in range(_MAX_REFUSALS):
        attempt = fields.without()
        try:
            setting.read(attempt, values)
            return attempt, ""
        except EqxDecodersError as error:
            message = str(error)
        except Exception as error:  # the value may have a type that the row does not expect
            return attempt, f"{type(error).__name__}: {error}"
        key = re.match(r"config\.json: (\w+)(?:: |=| has )", message)
        if key is None or key[1] not in fields.content:
            return attempt, message
        fields = fields.without(key[1])
        refused[key[1]] = message.partition(": ")[2]
    return fields, f"it refuses {_MAX_REFUSALS} or more values."


def is_off(value: Any) -> bool:
    """Return whether a value usually means that a feature is turned off."""
    return value in (None, False, 0, "", [], {})


# --- tensors ---


@dataclasses.dataclass(frozen=True)
class Rename:
    """Tensors that probably hold a weight that the family stores under another name.

    **Arguments:**

    - `row`: pattern of the name in the family.
    - `family_words`, `file_words`: the words in which the names differ, including adjacent dots.
    - `certain`: whether another family uses this name for the weight. Otherwise only the shapes match.
    """

    row: str
    family_words: str
    file_words: str
    certain: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Differences between a checkpoint and a family.

    **Arguments:**

    - `family`, `reading`: the family, and the result of reading the settings with it.
    - `groups`: tensors that the family does not ignore.
    - `prefix`: prefix before the index of a layer, in the family and in the file; None if they are equal.
    - `renames`: tensors with other names.
    - `different`: tensors whose shapes or layers differ from what the family expects, with the expected tensors.
    - `disabled`: tensors that the family supports, but not with these settings, with the path of the weight.
    - `unexplained`: tensors that the family does not support.
    - `missing`: tensors that the family expects, but that the checkpoint lacks.
    """

    family: Family
    reading: Reading
    groups: tuple[TensorGroup, ...]
    prefix: tuple[str, str] | None
    renames: tuple[Rename, ...]
    different: tuple[tuple[TensorGroup, TensorGroup], ...]
    disabled: tuple[tuple[TensorGroup, str], ...]
    unexplained: tuple[TensorGroup, ...]
    missing: tuple[TensorGroup, ...]

    @property
    def distance(self) -> int:
        """Weighted number of differences. Tensors and settings that the family does not explain weigh most."""
        reading = self.reading
        unexplained = len(self.unexplained) + len(self.different) + len(self.missing) + len(reading.refused)
        unexplained += sum(not is_off(value) for value in reading.unread.values())
        changes = len({rename.family_words for rename in self.renames}) + (self.prefix is not None)
        changes += len({re.sub(r"\w+$", "", path) for _, path in self.disabled})
        distance = 12 * unexplained + 6 * reading.num_unusual + 4 * changes + 2 * len(reading.unread)
        return distance + 1000 * (reading.config is None)


def compare(
    family: Family, content: Mapping[str, Any], tensors: Mapping[str, Shape], reading: Reading, names: LibraryNames
) -> Comparison:
    """Compare a checkpoint with the tables of a family.

    **Arguments:**

    - `content`: the checkpoint's `config.json`.
    - `tensors`: shapes of the tensors by name; None where only the name is known.
    - `reading`: result of `read_leniently`.
    - `names`: names that all families of the library use.
    """
    family_names, prefix = _family_names(family, tensors)
    shapes = {family_names[name]: shape for name, shape in tensors.items()}
    stored: Any = list(shapes)
    if None not in shapes.values():
        stored = {name: types.SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    family = family.for_tensors(stored)
    config, expected = _expected_tensors(family, reading.config)
    shapes = {name: shape for name, shape in shapes.items() if not _is_ignored(family, name, config, content)}
    file_patterns = {pattern_of(family_name): pattern_of(name) for name, family_name in family_names.items()}
    groups = {
        pattern: dataclasses.replace(group, pattern=file_patterns[pattern])
        for pattern, group in group_tensors(shapes).items()
    }
    rows: dict[str, list[Weight]] = defaultdict(list)
    for row in family.weights:
        rows[pattern_of(row.name)].append(row)
    renames = _find_renames(groups, expected, rows, names)
    row_patterns: dict[str, str] = {}
    for pattern in groups:
        row_patterns[pattern] = pattern if pattern in rows else _original_name(pattern, renames)
    different: list[tuple[TensorGroup, TensorGroup]] = []
    disabled: list[tuple[TensorGroup, str]] = []
    unexplained: list[TensorGroup] = []
    for pattern, group in groups.items():
        expected_group = expected.get(row_patterns[pattern])
        group_rows = rows.get(row_patterns[pattern], [])
        paths = [row.path for row in group_rows if group.rank in (None, _row_rank(row))]
        if expected_group is not None:
            if group.layers != expected_group.layers or (group.shapes and group.shapes != expected_group.shapes):
                different.append((group, expected_group))
        elif not group_rows or (config is not None and not paths):
            unexplained.append(group)
        elif config is not None:
            disabled.append((group, paths[0]))
    return Comparison(
        family=family,
        reading=reading,
        groups=tuple(groups.values()),
        prefix=prefix,
        renames=tuple(renames.values()),
        different=tuple(different),
        disabled=tuple(disabled),
        unexplained=tuple(unexplained),
        missing=tuple(group for pattern, group in expected.items() if pattern not in row_patterns.values()),
    )


def _family_names(family: Family, tensors: Iterable[str]) -> tuple[dict[str, str], tuple[str, str] | None]:
    """Return the names of tensors with the family's prefix of layers, and `Comparison.prefix`."""
    names = {name: family.stored_name(name) for name in tensors}
    patterns = [pattern_of(row.name) for row in family.weights if not row.is_mtp]
    own_prefix = _layer_prefix(patterns)
    file_prefix = _layer_prefix(map(pattern_of, names.values()))
    if any(pattern.startswith(file_prefix) for pattern in patterns):
        return names, None
    if own_prefix == family.prefix + file_prefix:  # a checkpoint of the base model, without the head
        head = family.head.removesuffix("weight")
        return {key: name if name.startswith(head) else family.prefix + name for key, name in names.items()}, None
    file_pattern = f"^{re.escape(file_prefix)}"
    family_names = {key: re.sub(file_pattern, own_prefix, name) for key, name in names.items()}
    return family_names, (own_prefix, file_prefix)


def _is_ignored(family: Family, name: str, config: DecoderConfig | None, content: Mapping[str, Any]) -> bool:
    """Return whether the family ignores a tensor. A tied head that is stored as well is also ignored."""
    if config is None:
        return False
    is_copy = config.tied and content.get("tie_word_embeddings") is True and name == family.head
    return is_copy or family.is_ignored(name, config)


def _expected_tensors(
    family: Family, config: DecoderConfig | None
) -> tuple[DecoderConfig | None, dict[str, TensorGroup]]:
    """Return `config` and its tensors; `(None, {})` if the family has no tensors for this configuration."""
    if config is None:
        return None, {}
    try:
        mappings = family.bind(abstract(config)).values()
    except (EqxDecodersError, TypeError, AttributeError):
        return None, {}
    # the first expert of each layer is sufficient: all experts have the same names and shapes
    tensors = {name: mapping.shape for mapping in mappings for name in mapping.names[:: math.prod(mapping.stack[1:])]}
    return config, group_tensors(tensors)


def _find_renames(
    groups: Mapping[str, TensorGroup],
    expected: Mapping[str, TensorGroup],
    rows: Mapping[str, list[Weight]],
    names: LibraryNames,
) -> dict[str, Rename]:
    """Find expected tensors with other names, by the names in other families, or else by unique shapes."""
    unknown = {pattern: group for pattern, group in groups.items() if pattern not in rows}
    absent = {pattern: group for pattern, group in expected.items() if pattern not in groups}
    renames: dict[str, Rename] = {}
    for pattern, group in unknown.items():
        fitting = [row for row, expected_group in absent.items() if _may_be_same(group, expected_group)]
        paths = names.paths(pattern, group.rank)
        known = [row for path in paths for row in fitting if any(weight.path == path for weight in rows[row])]
        rivals = [other for other in unknown.values() if fitting and _may_be_same(other, absent[fitting[0]])]
        if known or (len(fitting) == len(rivals) == 1 and not paths):
            row = (known or fitting)[0]
            renames[pattern] = Rename(row, *word_difference(row, pattern), certain=bool(known))
            del absent[row]
    return renames


def _may_be_same(group: TensorGroup, expected_group: TensorGroup) -> bool:
    same_shapes = not group.shapes or not expected_group.shapes or group.shapes == expected_group.shapes
    same_kind = group.pattern.rpartition(".")[2] == expected_group.pattern.rpartition(".")[2]
    same_numbers = group.pattern.count(_EXPERT) == expected_group.pattern.count(_EXPERT)
    return same_shapes and same_kind and same_numbers and group.layers == expected_group.layers


def word_difference(row: str, pattern: str) -> tuple[str, str]:
    """Return the words in which two patterns differ, including adjacent dots: `(".old.", ".new.")`."""
    old, new = row.split("."), pattern.split(".")
    start = 0
    while start < min(len(old), len(new)) - 1 and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    before, after = "." if start else "", "." if end else ""
    old_words, new_words = (".".join(words[start : len(words) - end]) for words in (old, new))
    return f"{before}{old_words}{after}", f"{before}{new_words}{after}"


def _original_name(pattern: str, renames: Mapping[str, Rename]) -> str:
    """Return the family's name of a tensor. Renames of other tensors in the same module are applied, too."""
    if pattern in renames:
        return renames[pattern].row
    for rename in renames.values():
        pattern = pattern.replace(rename.file_words, rename.family_words)
    return pattern


# --- ranking ---

_MAX_COMPARED = 8
_KEY_TOLERANCE = 0.1  # by how much the share of keys of a similar family may be below that of the nearest family


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A family that a checkpoint may belong to.

    **Arguments:**

    - `reading`: result of reading the checkpoint's settings.
    - `tensor_share`, `key_share`: share of the checkpoint's tensors and keys whose names the family uses, from 0 to 1.
    - `absent_keys`: number of keys that the family reads, but that most families do not read and the checkpoint lacks.
    """

    family: Family
    reading: Reading
    tensor_share: float
    key_share: float
    absent_keys: int

    @property
    def score(self) -> float:
        """Score of the family before its tensors are compared in detail; higher is nearer."""
        reading = self.reading
        doubts = 2 * len(reading.refused) + reading.num_unusual + 100 * (reading.config is None)
        return 3 * self.tensor_share + self.key_share - 0.05 * doubts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranking:
    """Families ranked by how much of a checkpoint they explain.

    **Arguments:**

    - `content`: the checkpoint's `config.json`.
    - `candidates`: all families, the nearest first.
    - `nearest`: comparison with the nearest family.
    - `names`: names that all families use.
    """

    content: Mapping[str, Any]
    candidates: tuple[Candidate, ...]
    nearest: Comparison
    names: LibraryNames

    def similar_candidates(self) -> list[Candidate]:
        """Return the other families that explain all settings, and nearly as much as the nearest family."""
        first = self.candidates[0]
        return [
            candidate
            for candidate in self.candidates[1:]
            if candidate.tensor_share >= first.tensor_share
            and candidate.key_share >= first.key_share - _KEY_TOLERANCE
            and not candidate.reading.refused
        ]


def rank(families: Iterable[Family], content: Mapping[str, Any], tensors: Mapping[str, Shape]) -> Ranking:
    """Rank families by how much of a checkpoint they explain.

    **Arguments:**

    - `content`: the checkpoint's `config.json`.
    - `tensors`: shapes of the tensors by name; None where only the name is known.
    """
    families = list(families)
    names = LibraryNames.of(families)
    readings = [read_leniently(family, content, names.renamed_keys(family, content)) for family in families]
    readers = Counter(key for reading in readings for key in reading.read)
    rare_keys = {key for key, count in readers.items() if 2 * count < len(families)}
    candidates = [
        _candidate(family, reading, content, tensors, rare_keys)
        for family, reading in zip(families, readings, strict=True)
    ]
    candidates.sort(key=lambda candidate: (-candidate.score, candidate.absent_keys))
    compared: list[tuple[float, int, Comparison]] = []
    for index, candidate in enumerate(candidates[:_MAX_COMPARED]):
        comparison = compare(candidate.family, content, tensors, candidate.reading, names)
        distance = comparison.distance + candidate.absent_keys + 60 * (1 - candidate.tensor_share)
        compared.append((distance, index, comparison))
    compared.sort(key=lambda item: item[:2])
    ranked = [candidates[index] for _, index, _ in compared] + candidates[_MAX_COMPARED:]
    return Ranking(content=content, candidates=tuple(ranked), nearest=compared[0][2], names=names)


def _candidate(
    family: Family, reading: Reading, content: Mapping[str, Any], tensors: Mapping[str, Shape], rare_keys: set[str]
) -> Candidate:
    rows = {_inner_name(pattern_of(row.name)) for row in (*family.weights, *family.fused, *family.transposed)}
    patterns = {_inner_name(pattern_of(family.stored_name(name))) for name in tensors}
    no_settings = {*IGNORED_KEYS, *GENERATION_KEYS, *_NOT_SETTINGS}
    keys = {key for key, value in content.items() if key not in no_settings and value is not None}
    known_keys = keys & (reading.read | family.ignored_keys.keys() | reading.renamed.keys())
    absent_keys = (reading.read & rare_keys) - content.keys() - set(reading.renamed.values())
    return Candidate(
        family=family,
        reading=reading,
        tensor_share=len(patterns & rows) / max(1, len(patterns)),
        key_share=len(known_keys) / max(1, len(keys)),
        absent_keys=len(absent_keys),
    )
