"""The names of logical axes, and the dotted paths that name weights.

A weight says what its dimensions are in its type, `Float[Array, "embed mlp"]`. `axes(model)` reads these words back:
they are the sharding vocabulary (`layout.py`), the table of `--describe` and the names in checkpoints.
"""

import dataclasses
import fnmatch
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from eqx_decoders.errors import ConfigError, check_word
from eqx_decoders.sharding.rules import MESH_AXES, Table


AXES: dict[str, str] = {
    "batch": "sequences processed together",
    "length": "positions of a sequence (queries)",
    "kv_length": "positions of a sequence that are attended to (keys and values)",
    "slots": "places of a cache",
    "pages": "pages of a cache",
    "page_slots": "places of a page",
    "scale_slots": "places of a page's scales, in whole lanes",
    "row_pages": "pages of a row of a cache",
    "stored_dim": "features of a head as pages hold them, in whole lanes",
    "stored_value_dim": "features of a head's values as pages hold them",
    "places": "places of an expert",
    "embed": "features of the residual stream",
    "vocab": "token ids",
    "scores": "numbers that a head gives for a token in place of logits",
    "dimensions": "dimensions of a position: time, height, width",
    "positions": "rows of a table of learned positions",
    "heads": "query heads",
    "halves": "the two heads of a differential head: the result of the second is taken from that of the first",
    "kv_heads": "key and value heads",
    "mask_heads": "key heads, each of which has a bias of every key",
    "scale_heads": "scales of a token's key or value in a cache: one of each head or of each block of it, or one",
    "key_heads": "query and key heads of a linear recurrence, where values have others",
    "qkv_heads": "query, key and value heads of a fused projection",
    "head_dim": "features of one head",
    "qk_dim": "features of a query or key head where values have others",
    "value_dim": "features of a value head where queries and keys have others",
    "key_dim": "features of a key head of a linear recurrence",
    "kv_dim": "features of a key head without its rotary ones, and of a value head",
    "q_rank": "features of the latent that queries are made from",
    "kv_rank": "features of the latent that keys and values are made from",
    "gate_rank": "features of the latent that gates and decays of a recurrence are made from",
    "latent": "features of a latent: of keys and values with the rotary key beside it, or inside of a chained block",
    "joined": "features of an embedding, or of the residual stream, that are added to one another once projected",
    "mlp": "hidden features of a feed-forward layer",
    "series": "series of features of a token that compressed keys are made of: one for each window that it is in",
    "out_groups": "groups of heads that are projected to the stream together",
    "out_rank": "features of such a group between its two projections",
    "group_heads": "heads of such a group",
    "inputs": "input projections of a fused feed-forward layer",
    "experts": "experts: feed-forward layers of which each token uses a few",
    "norm": "features of a normalised vector",
    "rows": "rows of a table beside the embedding, in which tokens find something",
    "row_dim": "features of such a row",
    "table_parts": "equal parts of such a table, one behind the other",
    "ngram_features": "features of the vectors of all n-grams that end at a token",
    "per_layer": "layers that get an embedding of their own",
    "per_layer_input": "features of such an embedding",
    "stream_embed": "features of all residual streams, one stream after the other",
    "coefficients": "numbers by which a token's residual streams are read, written and mixed",
    "coefficient_kinds": "those that read, those that write and those that mix",
    "rank": "features between the two factors of a low-rank update",
    "adapters": "low-rank updates of a weight that are served at once",
    "teacher_heads": "query heads of a frozen teacher",
    "teacher_kv_heads": "key and value heads of a frozen teacher",
    "teacher_head_dim": "features of one head of a frozen teacher",
    "teacher_embed": "features of the residual stream of a teacher",
    "layer_pairs": "pairs of a student's and a teacher's layers",
    "streams": "residual streams side by side",
    "stream_pairs": "pairs of residual streams",
    "taps": "tokens that a convolution looks back",
    "signal": "sines and cosines of a distance",
    "patch": "numbers of a patch of an image",
    "frames": "images of a patch, one behind the other in time",
    "patch_rows": "rows of pixels of a patch",
    "patch_columns": "columns of pixels of a patch",
    "coordinates": "column and row of a patch",
    "filters": "features that a convolution over a spectrum or an image makes",
    "input_filters": "features that it reads",
    "kernel_rows": "bands, or rows of an image, that it looks at",
    "kernel_columns": "frames, or columns of an image, that it looks at",
    "mel": "bands of a spectrum",
    "inner": "features that a projector reads, and the channels that a recurrence makes gates or `scan_inputs` of",
    "scan_inputs": "features that make steps, keys and queries of a recurrence: few, and never split",
    "outer": "features that a projector makes, or the gate of a channel layer",
    "channels": "features of a convolution's input",
    "decay_dim": "decays of a head of a linear recurrence: one, or one of each key feature",
    "groups": "groups of a weight's rows that share a scale",
    "blocks": "blocks of its columns that share one",
    "one": "a single number",
    "layers": "equal layers of a stack",
}

# `eqx.field(metadata=FROZEN)`: arrays in this field of a module are never trained.
FROZEN: dict[str, bool] = {"frozen": True}
# Buffers of the published model: trained only if a pattern ends with their name.
BUFFER: dict[str, bool] = {"buffer": True}
# Buffers that follow from the configuration, such as the number of a layer: no training moves them, and checkpoints of
# families don't hold them.
COMPUTED: dict[str, bool] = {**FROZEN, "computed": True}

Axes = tuple[str, ...]

_LATENTS = ("q_rank", "kv_rank", "gate_rank", "latent")

# Leaves in place of an array in a type: also arrays of NumPy, and shapes.
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
if TYPE_CHECKING:
    AnyArray = Any
else:
    AnyArray = jax.Array | np.ndarray | jax.ShapeDtypeStruct


@runtime_checkable
class CompositeWeight(Protocol):
    """A module in place of an array in a type: one weight, held in several arrays."""

    def part_axes(self, words: Axes) -> dict[str, Axes]:
        """Return the axis names of each of its fields, in order; `words` are those of the whole weight."""
        ...


def check_axes(where: str, words: str | Axes) -> Axes:
    """Split `"batch length embed"` into words and check each of them against the list."""
    split = tuple(words.split()) if isinstance(words, str) else tuple(words)
    for word in split:
        check_word(where, word, AXES)
    return split


def checked_table(name: str, rows: Mapping[str, str | Sequence[str]] | Table) -> Table:
    """Check a table and make it hashable."""
    table = []
    for word, names in rows.items() if isinstance(rows, Mapping) else rows:
        check_word(f"Layout.{name}: axis", word, AXES)
        names = (names,) if isinstance(names, str) else tuple(names)
        for mesh_axis in names:
            check_word(f"Layout.{name}[{word!r}]", mesh_axis, MESH_AXES)
        table.append((word, names))
    return tuple(table)


def path_name(path: tuple[Any, ...]) -> str:
    """Return the dotted name of a path of keys, such as `"scanned_layers.0.mlp"`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Return every leaf that is not None, by its dotted path, in the order of the tree."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def replaced(tree: PyTree, parts: Mapping[str, Any]) -> PyTree:
    """Return the tree with some leaves or modules replaced, by dotted path."""
    return jax.tree.map_with_path(
        lambda path, part: parts.get(path_name(path), part),
        tree,
        is_leaf=lambda path, _: path_name(path) in parts,
        is_leaf_takes_path=True,
    )


def product_axes(words: Axes) -> tuple[Axes, Axes] | None:
    """Return the axes that a weight contracts and those that it produces, without `layers`.

    `layers embed heads head_dim` maps `embed` to `heads head_dim`, `heads head_dim embed` maps back. Leading `experts`
    count matrices, like layers. None for biases, norms, tables, output heads: all but matrices inside of blocks.
    """
    inner = tuple(word for word in words if word != "layers")
    ends = {*_LATENTS, "embed", "rank", "ngram_features", "inner"}
    inner = inner[1:] if inner[:1] == ("experts",) else inner
    others = {"vocab", "positions", "scores"} & set(inner) or inner[:1] in (("streams",), ("out_groups",))
    others = others or inner[:2] == ("heads", "inner")
    if len(inner) < 2 or not ends & set(inner) or others:
        return None
    count = 1 if inner[0] in ends else len(inner) - 1
    return inner[:count], inner[count:]


def axes(tree: PyTree) -> dict[str, Axes]:
    """Return the axis names of every array in a tree of modules, by its dotted path.

    A module with the class variable `stack_axes` (a stack of layers) puts these names in front of all those below it.
    """
    names: dict[str, Axes] = {}
    _collect(tree, "", (), names)
    return names


def _collect(node: Any, path: str, stacked: Axes, names: dict[str, Axes]) -> None:
    if isinstance(node, eqx.Module):
        stacked = stacked + getattr(type(node), "stack_axes", ())
        hints = _hints(type(node))
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            where = f"{path}.{field.name}".lstrip(".")
            if field.metadata.get("static", False) or value is None:
                continue
            if isinstance(value, (*_ARRAYS, CompositeWeight)):
                words = _words(hints[field.name])
                if words is None:
                    raise ConfigError(
                        f"{type(node).__name__}.{field.name} holds an array: its type must name the axes."
                    )
                _name(value, where, stacked, check_axes(f"{type(node).__name__}.{field.name}", words), names)
            else:
                _collect(value, where, stacked, names)
    elif isinstance(node, tuple | list):
        for index, value in enumerate(node):
            _collect(value, f"{path}.{index}".lstrip("."), stacked, names)
    elif isinstance(node, dict):
        for key, value in node.items():
            _collect(value, f"{path}.{key}".lstrip("."), stacked, names)


def _name(value: Any, path: str, stacked: Axes, words: Axes, names: dict[str, Axes]) -> None:
    """Add the axis names of a weight, or of each of its parts."""
    if isinstance(value, CompositeWeight):
        for part, inner in value.part_axes(words).items():
            _name(getattr(value, part), f"{path}.{part}", stacked, inner, names)
    elif value is not None:
        names[path] = stacked + words


def output_axes(value: Any, hint: Any) -> dict[str, Axes]:
    """Return the axis names of all arrays that a function returns, by path, from its return annotation.

    Only arrays whose types name axes are in it. Stacked arrays have names for their last dimensions.
    """
    names: dict[str, Axes] = {}
    _collect_declared(value, hint, "", names)
    return names


def _collect_declared(value: Any, hint: Any, path: str, found: dict[str, Axes]) -> None:
    if isinstance(value, _ARRAYS):
        words = _words(hint)
        if words is not None:
            found[path] = tuple(word for word in words.split() if not word.startswith("*"))
        return
    if isinstance(value, eqx.Module):
        hints = _hints(type(value))
        parts = {field.name: (getattr(value, field.name), hints[field.name]) for field in dataclasses.fields(value)}
    elif isinstance(value, dict):
        parts = {str(key): (part, None) for key, part in value.items()}
    elif isinstance(value, tuple | list):
        named = getattr(value, "_fields", tuple(map(str, range(len(value)))))
        hints = (
            _hints(type(value))
            if hasattr(value, "_fields")
            else dict(zip(named, _parts(hint, len(value)), strict=True))
        )
        parts = {name: (part, hints[name]) for name, part in zip(named, value, strict=True)}
    else:
        return
    for name, (part, hint_of_part) in parts.items():
        _collect_declared(part, hint_of_part, f"{path}.{name}".lstrip("."), found)


def _parts(hint: Any, count: int) -> tuple[Any, ...]:
    """Return the types of the parts of a tuple."""
    arguments = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return arguments[:1] * count
    return arguments if len(arguments) == count else (None,) * count


def matching(names: Iterable[str], patterns: Sequence[str], field: str) -> frozenset[str]:
    """Return the paths of weights that match one of the patterns (`*`: anything). Each pattern must match one."""
    names = tuple(names)
    matched: set[str] = set()
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise ConfigError(f"{field}: no weight matches {pattern!r}. Paths look like {', '.join(names[:3])}, …")
        matched.update(matches)
    return frozenset(matched)


def frozen(tree: PyTree) -> frozenset[str]:
    """Return the paths of the weights that no training moves: those in or below a field with `metadata=FROZEN`."""
    return _all_marked(tree, "frozen")


def computed(tree: PyTree) -> frozenset[str]:
    """Return the paths of the buffers that follow from the configuration: in or below one with `metadata=COMPUTED`."""
    return _all_marked(tree, "computed")


def stored_leaves(tree: PyTree) -> dict[str, Any]:
    """Return the leaves that checkpoints of families hold, by path: all but buffers that are computed."""
    left_out = computed(tree)
    return {path: leaf for path, leaf in named_leaves(tree).items() if path not in left_out}


def buffers(tree: PyTree, named: Sequence[str] = ()) -> frozenset[str]:
    """Return the paths of the weights in or below a field with `metadata=BUFFER`, without those that a pattern names.

    Such a pattern matches the path and ends with its last part: `*.residual.scale` does, `*` and `scanned_layers.*`
    do not.
    """
    patterns = {
        path: [one for one in named if one.endswith(path.split(".")[-1])] for path in _all_marked(tree, "buffer")
    }
    return frozenset(path for path, some in patterns.items() if not any(fnmatch.fnmatch(path, one) for one in some))


def _all_marked(tree: PyTree, mark: str) -> frozenset[str]:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return frozenset(path_name(path) for path in paths if _marked(tree, path, mark))


def _marked(node: Any, path: tuple[Any, ...], mark: str) -> bool:
    """Return whether a field along the path has this in its metadata."""
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            fields = {field.name: field for field in dataclasses.fields(node)}
            if fields[key.name].metadata.get(mark, False):
                return True
            node = getattr(node, key.name)
        else:
            node = node[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]
    return False


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _words(hint: Any) -> str | None:
    """Return the axis names in a type: `Float[Array, "embed mlp"] | None` -> `"embed mlp"`."""
    if hasattr(hint, "dim_str"):
        return hint.dim_str
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next((word for part in typing.get_args(hint) if (word := _words(part)) is not None), None)
    return None


def names_of(group: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a `PartitionSpec`."""
    return (group,) if isinstance(group, str) else group or ()
