"""A checkpoint compared with one family: which tensors and keys its tables explain, and what would have to differ."""

import dataclasses
import functools
import math
import re
import types
from collections.abc import Mapping
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.residual.residual import Sequential
from eqx_decoders.errors import EqxDecodersError
from eqx_decoders.families.common import LAYER_TYPES, renamed
from eqx_decoders.families.draft.changes import PARALLEL, Change, applies, change_for, changed
from eqx_decoders.families.draft.lenient_settings import Reading
from eqx_decoders.families.draft.renames import Rename, find_renames
from eqx_decoders.families.draft.tensor_groups import (
    Shape,
    TensorGroup,
    grouped,
    layer_prefix,
    pattern_of,
    table_of,
)
from eqx_decoders.families.draft.vocabulary import Vocabulary
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mask import Causal, SlidingWindow
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.init import abstract


_ROUNDS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Differences between a checkpoint and a family.

    **Arguments:**

    - `family`: the family, as it is.
    - `content`: the settings.
    - `reading`: the settings as the family reads them.
    - `groups`: the tensors.
    - `prefix`: what layers are called in the family and in the file, where these differ.
    - `renames`: modules with other names.
    - `added`: rows that the family lacks, as other families have them.
    - `changes`: fields of the configuration that must differ.
    - `unexplained`: tensors that remain, the shapes that follow for them where they have another one, or None.
    - `lacking`: tensors that the family expects and the file lacks, by pattern.
    - `sizes`: sizes of the decoder by axis.
    - `habits`: what the family has and Llama doesn't, though neither a tensor nor a key of the file says it.
    - `windows`: whether `layer_types` says which layers have windows, and the family would not read it.
    """

    family: Family
    content: Mapping[str, Any]
    reading: Reading
    groups: Mapping[str, TensorGroup]
    prefix: tuple[str, str] | None
    renames: tuple[Rename, ...]
    added: tuple[Weight, ...]
    changes: tuple[Change, ...]
    unexplained: Mapping[str, TensorGroup | None]
    lacking: Mapping[str, TensorGroup]
    sizes: Mapping[str, int]
    habits: tuple[str, ...]
    windows: bool

    @property
    def distance(self) -> int:
        """How much differs: most of all what is not explained, then habits, then what has to be changed."""
        unbuilt = 1000 * (self.reading.config is None)
        changes = len(self.replaced_words) + len(self.changes) + len(self.added) + bool(self.reading.fraction)
        open_ends = len(self.unexplained) + len(self.lacking) + len(self.reading.refused)
        open_ends += sum(not is_off(self.content[key]) for key in self.unknown_keys)
        return (
            4 * (changes + self.windows) + 8 * len(self.habits) + 12 * open_ends + 2 * len(self.unknown_keys) + unbuilt
        )

    @property
    def config(self) -> DecoderConfig | None:
        """The configuration with all changes; None where the family can't build one."""
        return None if self.reading.config is None else changed(self.reading.config, self.changes)

    @property
    def unknown_keys(self) -> list[str]:
        """Keys that nothing reads."""
        return [key for key in self.reading.unknown if not (self.windows and key in _WINDOW_KEYS)]

    @property
    def replaced_words(self) -> dict[str, str]:
        """Words in the names of the family's tensors, and those of the file."""
        words = dict([self.prefix]) if self.prefix else {}
        return words | {rename.old: rename.new for rename in self.renames}


def compare(
    family: Family, content: Mapping[str, Any], tensors: Mapping[str, Shape], reading: Reading, words: Vocabulary
) -> Comparison:
    """Compare a checkpoint's settings, as a family reads them, and its tensors with the tables of this family."""
    names, prefix = _full_names(family, tensors)
    table = _Fit.of(family, names, prefix, reading.config, content)
    groups = grouped({name: shape for name, shape in names.items() if not table.ignores(name)})
    for _ in range(_ROUNDS):
        table.expect()
        if not (table.rename(groups, words) or table.add_rows(groups, words) or table.change(groups)):
            break
    table.expect()
    unexplained = {pattern: table.wanted.get(pattern) for pattern in groups if not table.explains(groups[pattern])}
    return Comparison(
        family=family,
        content=content,
        reading=reading,
        groups=groups,
        prefix=prefix,
        renames=tuple(table.renames),
        added=tuple(table.added),
        changes=tuple(table.changes.values()),
        unexplained=unexplained,
        lacking={pattern: group for pattern, group in table.wanted.items() if pattern not in groups},
        sizes=sizes_of(reading.config),
        habits=habits_of(reading.config) + _lost_windows(reading, content),
        windows=_has_windows(reading, content),
    )


def _full_names(family: Family, tensors: Mapping[str, Shape]) -> tuple[dict[str, Shape], tuple[str, str] | None]:
    """Return the tensors under the names of a family's table, and what layers are called in the two if they differ."""
    names = {family.stored_name(name): shape for name, shape in tensors.items()}
    patterns = [pattern_of(row.name) for row in family.weights if not row.is_mtp]
    own, found = layer_prefix(patterns), layer_prefix(map(pattern_of, names))
    if own == found or any(pattern.startswith(found) for pattern in patterns):
        return names, None
    if own == family.prefix + found:  # saved from the base model
        head = family.head.removesuffix("weight")
        return {name if name.startswith(head) else family.prefix + name: names[name] for name in names}, None
    return names, (own, found)


_WINDOW_KEYS = ("layer_types", "sliding_window")


def _has_windows(reading: Reading, content: Mapping[str, Any]) -> bool:
    types, window = content.get("layer_types"), content.get("sliding_window")
    known = isinstance(types, list) and set(map(str, types)) <= {LAYER_TYPES[Causal], LAYER_TYPES[SlidingWindow]}
    unread = "layer_types" in reading.unknown and (window is None or "sliding_window" in reading.unknown)
    attention = reading.config is not None and all(isinstance(b.mixer, AttentionConfig) for b in reading.config.blocks)
    return known and unread and attention


def _lost_windows(reading: Reading, content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return that no layer has a window where `sliding_window` is read, and means nothing because of a default."""
    window = content.get("sliding_window")
    wanted = isinstance(window, int) and "sliding_window" in reading.read and content.get("use_sliding_window") is None
    blocks = () if reading.config is None else reading.config.blocks
    found = any(isinstance(getattr(block.mixer, "mask", None), SlidingWindow) for block in blocks)
    typed = content.get("layer_types") is not None
    return () if not wanted or found or typed or not blocks else (f"no window, though sliding_window={window},",)


@functools.lru_cache(maxsize=64)
def _shapes(config: DecoderConfig) -> Any:
    return abstract(config)


@dataclasses.dataclass
class _Fit:
    """Table of a family while it is being changed into that of a checkpoint."""

    family: Family
    config: DecoderConfig | None
    tied: bool  # as the file says: a head beside it is a copy
    renames: list[Rename] = dataclasses.field(default_factory=list)
    added: list[Weight] = dataclasses.field(default_factory=list)
    changes: dict[Any, Change] = dataclasses.field(default_factory=dict)
    banned: set[Any] = dataclasses.field(default_factory=set)
    wanted: dict[str, TensorGroup] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        family: Family,
        names: Mapping[str, Shape],
        prefix: tuple[str, str] | None,
        config: DecoderConfig | None,
        content: Mapping[str, Any],
    ) -> "_Fit":
        """Return the table with the rows for the forms in which a file may store experts."""
        shaped = all(shape is not None for shape in names.values())
        stored = {name: types.SimpleNamespace(shape=shape) for name, shape in names.items()} if shaped else list(names)
        family = family.stored_as(stored)
        if prefix is not None:
            first = f"{prefix[1].partition('.')[0]}."
            changes: dict[str, Any] = {"prefix": first} if prefix[0].startswith(family.prefix) else {}
            rows = renamed(family.weights, {prefix[0]: prefix[1]})
            family = dataclasses.replace(family, weights=rows, **changes)
        return cls(family, config, content.get("tie_word_embeddings") is True)

    @property
    def rows(self) -> dict[str, list[Weight]]:
        return table_of(self.family.weights)

    def ignores(self, name: str) -> bool:
        head = self.config is not None and self.config.tied and self.tied and name == self.family.head
        return head or (self.config is not None and self.family.is_ignored(name, self.config))

    def explains(self, group: TensorGroup) -> bool:
        """Return True for a tensor that the table expects, in these layers and with this shape."""
        if self.config is None:
            return group.pattern in self.rows
        wanted = self.wanted.get(group.pattern)
        if wanted is None or wanted.layers != group.layers:
            return False
        return not group.shapes or wanted.shapes == group.shapes

    def expect(self) -> None:
        """Find the tensors of the configuration as it is changed; keep no change that leads to none."""
        if self.config is None:
            return
        try:
            mappings = self.family.bind(_shapes(changed(self.config, list(self.changes.values()))))
        except (EqxDecodersError, TypeError, AttributeError):
            if self.changes:
                key, change = self.changes.popitem()
                self.banned.add((key, change.code))
                return self.expect()
            self.config, mappings = None, {}
        first_experts = ((mapping, mapping.names[:: math.prod(mapping.stack[1:])]) for mapping in mappings.values())
        self.wanted = grouped({name: mapping.shape for mapping, names in first_experts for name in names})

    def rename(self, groups: Mapping[str, TensorGroup], words: Vocabulary) -> bool:
        """Rename modules; return whether there are some."""
        rows = self.rows
        unknown = {pattern: group for pattern, group in groups.items() if pattern not in rows}
        missing = {pattern: group for pattern, group in self.wanted.items() if pattern not in groups}
        done = False
        for rename in find_renames(unknown, missing, rows, words.paths):
            names = {rename.old: rename.new}
            after = {pattern_of(row.name) for row in renamed(self.family.weights, names)}
            if any(pattern in rows and pattern not in after for pattern in groups):
                continue  # the words stand in other names, too
            if rename.group.pattern not in table_of(self.family.weights):
                self.family = dataclasses.replace(self.family, weights=renamed(self.family.weights, names))
            self.renames.append(rename)
            done = True
        return done

    def add_rows(self, groups: Mapping[str, TensorGroup], words: Vocabulary) -> bool:
        """Add rows that other families have, for weights that a change gives; return whether there are some."""
        rows, new = self.rows, list[Weight]()
        served = {row.path for pattern in groups for row in rows.get(pattern, ())}
        for pattern, group in groups.items():
            found = [] if pattern in rows else words.weights(pattern, None if group.shape is None else len(group.shape))
            for path, einops in found[:1]:
                if path not in served and self._change(path, True, group) is not None:
                    new.append(Weight(pattern, path, einops))
        self.added += new
        self.family = dataclasses.replace(self.family, weights=(*self.family.weights, *new))
        return bool(new)

    def change(self, groups: Mapping[str, TensorGroup]) -> bool:
        """Change fields so that the expected tensors are those of the file; return whether there are some."""
        rows, found = self.rows, dict[Any, Change]()
        differing = [(group, True) for pattern, group in groups.items() if pattern not in self.wanted]
        differing += [(group, False) for pattern, group in self.wanted.items() if pattern not in groups]
        scales = [group for pattern, group in groups.items() if pattern in self.wanted and not self.explains(group)]
        for group in scales:
            if any(re.match(r"mixer\.\w+_norm", row.path) for row in rows.get(group.pattern, ())):
                differing.append((group, True))
        for group, present in sorted(differing, key=_order):
            for row in rows.get(group.pattern, ()):
                change = self._change(row.path, present, group)
                if change is not None:
                    found.setdefault(change.key, change)
                    break
        if self._is_parallel(found):
            found[PARALLEL.key] = PARALLEL
        new = {
            key: change
            for key, change in found.items()
            if self._code(key) != change.code and (key, change.code) not in self.banned
        }
        self.changes |= new
        return bool(new)

    def _is_parallel(self, found: Mapping[Any, Change]) -> bool:
        """Return True for blocks that lose their second norm, and have none on their outputs."""
        gone = {key for key, change in found.items() if change.code == "None"}
        if self.config is None or ("block", "pre_mlp_norm") not in gone or ("block", "pre_mixer_norm") in gone:
            return False
        blocks = self.config.blocks
        return all(b.pre_mixer_norm and not b.post_mlp_norm and b.residual == Sequential() for b in blocks)

    def _code(self, key: Any) -> str | None:
        return self.changes[key].code if key in self.changes else None

    def _change(self, path: str, present: bool, group: TensorGroup) -> Change | None:
        """Return the change that a tensor asks for, if it is one of all layers."""
        if self.config is None or (group.layers and group.layers != set(range(len(self.config.blocks)))):
            return None
        change = change_for(path, present, group.shape, self.config)
        return change if change is not None and applies(change, self.config) else None


def _order(difference: tuple[TensorGroup, bool]) -> tuple[bool, bool]:
    """Put scales before biases, and queries before keys: the width of all keys may be that of one head."""
    pattern = difference[0].pattern
    return pattern.endswith("bias"), re.search(r"\bk_|key", pattern) is not None


def sizes_of(config: DecoderConfig | None) -> dict[str, int]:
    """Return the sizes of a decoder by axis."""
    if config is None:
        return {}
    sizes = {"embed": config.embed_dim, "vocab": config.vocab_size}
    fields = {"heads": "num_heads", "kv_heads": "num_kv_heads", "head_dim": "head_dim", "mlp": "mlp_dim"}
    fields["experts"] = "num_experts"
    for block in reversed(config.blocks):
        for layer in (block.mixer, block.mlp):
            sizes |= {word: getattr(layer, field) for word, field in fields.items() if hasattr(layer, field)}
    return sizes


def habits_of(config: DecoderConfig | None) -> tuple[str, ...]:
    """Return what a decoder has and Llama's doesn't, of what no tensor shows."""
    if config is None:
        return ()
    fields = ("embedding_scale", "logit_divisor", "logit_soft_cap")
    found = [(field, getattr(config, field), getattr(_PLAIN, field)) for field in fields]
    for block in dict.fromkeys(config.blocks):
        mixer, mlp, rope = block.mixer, block.mlp, getattr(block.mixer, "rope", None)
        found.append(("residual", block.residual, _PLAIN.residual))
        if isinstance(mixer, AttentionConfig):
            for field in ("query_scale", "temperature", "soft_cap", "qkv_clip"):
                found.append((f"attention.{field}", getattr(mixer, field), getattr(_PLAIN.blocks[0].mixer, field)))
            if rope is None:
                found.append(("attention.rope", None, Rope()))
        if rope is not None:
            found += [("rope.pairing", rope.pairing, "half"), ("rope.fraction", rope.fraction, 1.0)]
        if isinstance(mlp, ExpertsConfig):
            found += [("experts.limit", mlp.limit, None), ("experts.up_offset", mlp.up_offset, 0.0)]
        found.append(("norm.offset", getattr(block.pre_mixer_norm or block.post_mixer_norm, "offset", 0.0), 0.0))
    return tuple(dict.fromkeys(f"{name}={value}" for name, value, plain in found if value != plain))


_PLAIN = DecoderConfig(
    vocab_size=2,
    embed_dim=2,
    blocks=(BlockConfig(mixer=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=2), mlp=None),),
    final_norm=None,
)


def is_off(value: Any) -> bool:
    """Return True for a value that mostly means that something is not there."""
    return value in (None, False, 0, "", [], {})
