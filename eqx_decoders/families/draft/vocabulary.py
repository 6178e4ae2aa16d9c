"""What all families here call the same thing: tensors of a weight, and keys of a setting."""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from eqx_decoders.families.draft.tensor_groups import inner_name, pattern_of
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Group, Key, Setting


# Words in the names of norms that no family here has, by the place that they usually mean.
_PLACES = {
    "pre_mlp_norm": r"(pre_?|before_)?(mlp|ffn|feed_?forward|moe)(_layer_?norm|_norm|_ln)?$|(norm|ln|layernorm)_?2$",
    "pre_mixer_norm": r"(pre_?|before_|self_)?(attn|attention|mixer|input|operator)(_layer_?norm|_norm|_ln)?$"
    r"|(norm|ln|layernorm)_?1$",
    "embedding_norm": r"(word_?|token_?)?(emb|embed|embeddings?)_?(layer_?norm|norm|ln)$",
    "post_mixer_norm": r"(post|after)_?(attn|attention|self_attn|mixer)(_layer_?norm|_norm|_ln)?$",
    "post_mlp_norm": r"(post|after)_?(mlp|ffn|feed_?forward|moe)(_layer_?norm|_norm|_ln)?$",
}


# Keys of files that other libraries wrote.
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
class Vocabulary:
    """Rows of weights by the ends of their names, and keys by the paths of their values."""

    rows: dict[str, collections.Counter[tuple[str, str]]]
    keys: dict[str, frozenset[str]]
    readers: dict[str, tuple[tuple[str, str], ...]]  # by key: families that read it, and the path of its value

    @classmethod
    def of(cls, families: Iterable[Family]) -> "Vocabulary":
        rows: dict[str, collections.Counter[tuple[str, str]]] = collections.defaultdict(collections.Counter)
        keys = collections.defaultdict(set, {path: set(names.split()) for path, names in _OTHER_KEYS.items()})
        readers: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
        for family in families:
            for row in family.weights:
                if row.part is None:
                    for end in _ends(pattern_of(row.name)):
                        rows[end][row.path, row.pattern] += 1
            for key, path in paths_of(family).items():
                keys[path].add(key)
                readers[key].append((family.model_type, path))
        frozen = {path: frozenset(names) for path, names in keys.items()}
        return cls(dict(rows), frozen, {key: tuple(found) for key, found in readers.items()})

    def weights(self, pattern: str, rank: int | None) -> list[tuple[str, str]]:
        """Return the paths, and the einops patterns, that families give a tensor with this end of a name.

        The longest end that some family has counts, else the words of a norm; `rank` is the number of dimensions, None
        for any.
        """
        for end in _ends(pattern):
            found = self.rows.get(end)
            fitting = [entry for entry, _ in (found.most_common() if found else ()) if _fits(entry[1], rank)]
            if fitting:
                return fitting
        end = {"weight": "scale", "bias": "bias"}.get(pattern.rpartition(".")[2])
        return [(f"{place}.{end}", "norm -> norm") for place in _norm_places(pattern) if end and rank in (None, 1)]

    def paths(self, pattern: str, rank: int | None = None) -> list[str]:
        """Return the paths of `weights`."""
        return [path for path, _ in self.weights(pattern, rank)]

    def renamed_keys(self, family: Family, content: Mapping[str, Any]) -> dict[str, str]:
        """Return the keys of a file that others have for those that the family reads and the file lacks."""
        own, renamed = paths_of(family), {}
        for key, path in own.items():
            others = [other for other in sorted(self.keys.get(path, ())) if other in content and other not in own]
            if key not in content and len(others) == 1:
                renamed[others[0]] = key
        return renamed


def flat_rows(settings: Iterable[Setting]) -> Iterator[Key]:
    """Yield the rows of single keys outside of nested objects."""
    for setting in settings:
        if isinstance(setting, Key):
            yield setting
        elif isinstance(setting, Group):
            yield from flat_rows(setting.settings)


def paths_of(family: Family) -> dict[str, str]:
    """Return the path in a configuration that each key of a family says."""
    return {row.key: row.path for row in flat_rows(family.settings) if row.key and isinstance(row.path, str)}


def _ends(pattern: str) -> list[str]:
    """Return the ends of a pattern that mean something by themselves, the longest first."""
    words = inner_name(pattern).split(".")
    inside = words[0] == "{layer}"
    ends = [".".join(words[begin:]) for begin in range(inside, len(words) - 1)]
    return [f"{'layer' if inside else 'model'}:{end}" for end in ends]


def _fits(pattern: str, rank: int | None) -> bool:
    dims = re.findall(r"\([^)]*\)|\S+", pattern.split("->")[0])
    return rank is None or len(dims) == rank


@functools.cache
def _norm_places(pattern: str) -> tuple[str, ...]:
    module = pattern.split(".")[-2] if "." in pattern else ""
    return tuple(place for place, words in _PLACES.items() if re.search(rf"^({words})", module))
