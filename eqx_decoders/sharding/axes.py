"""Names of logical axes, and dotted paths of weights.

The type annotation of a weight names its logical axes: `Float[Array, "embed mlp"]`. `axes(model)` reads these names.
Sharding rules (`layout.py`), the table of `--describe` and checkpoint conversion use them.
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

from eqx_decoders.errors import ConfigError, check_option
from eqx_decoders.sharding.rules import MESH_AXES, Table


AXES: dict[str, str] = {
    "batch": "sequences processed together",
    "length": "positions of a sequence (queries)",
    "kv_length": "positions of a sequence that are attended to (keys and values)",
    "slots": "token positions of a cache",
    "pages": "pages of a paged cache",
    "page_slots": "token positions of a page",
    "scale_slots": "scales of a page, padded to full TPU lanes",
    "row_pages": "pages of a sequence in a paged cache",
    "stored_dim": "features of a key head as pages store them, padded to full TPU lanes",
    "stored_value_dim": "features of a value head as pages store them",
    "places": "token positions in the buffers of experts with a capacity",
    "embed": "features of the residual stream",
    "vocab": "token ids",
    "scores": "outputs per token of a score head, which replaces the output head",
    "dimensions": "dimensions of a multi-dimensional position: time, height, width",
    "positions": "rows of a table of learned position embeddings",
    "heads": "query heads",
    "halves": "the two heads of a head of differential attention, whose results are subtracted",
    "kv_heads": "key and value heads",
    "mask_heads": "KV heads of dynamic mask attention; each has a bias per key",
    "scale_heads": "scales of a token's key or value in a quantized cache: per head, per block of a head, or one scale",
    "key_heads": "query and key heads of a linear recurrence that has a different number of value heads",
    "qkv_heads": "query, key and value heads of a fused projection",
    "head_dim": "features of a head",
    "qk_dim": "features of a query or key head if value heads have a different size",
    "value_dim": "features of a value head if query and key heads have a different size",
    "key_dim": "features of a key head of a linear recurrence",
    "kv_dim": "features of an MLA key head without its rotary part, plus the features of a value head",
    "q_rank": "features of the latent from which queries are projected",
    "kv_rank": "features of the latent from which keys and values are projected",
    "gate_rank": "features of the latent from which gates and decays are projected",
    "latent": "features of a latent: of keys, values and the rotary key, or inside a low-rank residual connection",
    "joined": "input features of the projections of MTP, which sum an embedding and the residual stream",
    "mlp": "hidden features of a feed-forward layer",
    "series": "projections of a token for compressed keys: one for each window that contains the token",
    "out_groups": "groups of attention heads in a grouped output projection",
    "out_rank": "features of such a group between its two projections",
    "group_heads": "attention heads of such a group",
    "inputs": "input projections of a fused feed-forward layer",
    "experts": "experts of a mixture-of-experts layer",
    "norm": "features of a normalized vector",
    "rows": "rows of a lookup table other than the token embedding",
    "row_dim": "features of such a row",
    "table_parts": "equal parts of such a table, stored separately",
    "ngram_features": "features of the vectors of all n-grams that end at a token",
    "per_layer": "layers that have per-layer embeddings",
    "per_layer_input": "features of a per-layer embedding",
    "stream_embed": "features of all residual streams, concatenated",
    "coefficients": "coefficients per token that read, write and mix residual streams",
    "coefficient_kinds": "kinds of such coefficients: read, write and mix",
    "rank": "features between the two factors of a low-rank update",
    "adapters": "low-rank updates of a weight that are served simultaneously",
    "teacher_heads": "query heads of a frozen teacher",
    "teacher_kv_heads": "key and value heads of a frozen teacher",
    "teacher_head_dim": "features of a head of a frozen teacher",
    "teacher_embed": "features of a teacher's residual stream",
    "layer_pairs": "pairs of a student layer and a teacher layer",
    "streams": "parallel residual streams",
    "stream_pairs": "pairs of residual streams",
    "taps": "taps of a convolution: the number of tokens that it reads",
    "conv_inputs": "inputs before the next token that the convolution reads, in a convolution state",
    "signal": "features of a sinusoidal embedding of a distance",
    "patch": "values of an image patch",
    "frames": "consecutive video frames of a patch",
    "patch_rows": "pixel rows of a patch",
    "patch_columns": "pixel columns of a patch",
    "coordinates": "the column and the row of a patch",
    "filters": "output features of a convolution over a spectrogram or an image",
    "input_filters": "input features of such a convolution",
    "kernel_rows": "kernel size of such a convolution along frequency bands or image rows",
    "kernel_columns": "kernel size of such a convolution along frames or image columns",
    "mel": "frequency bands of a spectrogram",
    "inner": "input features of a projector, or channels of a recurrence before its gates or `scan_inputs`",
    "scan_inputs": "features from which a recurrence computes step sizes, keys and queries: few, and never split",
    "outer": "output features of a projector or of another square or pointwise projection",
    "channels": "features of a convolution over tokens",
    "decay_dim": "decays per head of a linear recurrence: one, or one per key feature",
    "groups": "quantization groups: rows of a weight that share a scale",
    "blocks": "quantization blocks: columns of a weight that share a scale",
    "one": "axis of size 1",
    "layers": "layers of a scanned stack",
}

# Metadata of module fields, such as `eqx.field(metadata=FROZEN)`.
# Arrays that are never trained.
FROZEN: dict[str, bool] = {"frozen": True}
# Buffers of the original model. They are trained only if a pattern ends with their name (see `buffers`).
BUFFER: dict[str, bool] = {"buffer": True}
# Buffers that are computed from the configuration, such as the index of a layer. They are never trained, and
# checkpoints in the format of the original model do not contain them.
COMPUTED: dict[str, bool] = {**FROZEN, "computed": True}

Axes = tuple[str, ...]

_LATENTS = ("q_rank", "kv_rank", "gate_rank", "latent")

# Leaves of a model where an annotation says `Array`: `jax.Array`s, NumPy arrays and shapes.
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
if TYPE_CHECKING:
    AnyArray = Any
else:
    AnyArray = jax.Array | np.ndarray | jax.ShapeDtypeStruct


@runtime_checkable
class CompositeWeight(Protocol):
    """Module whose arrays together represent one weight, such as a quantized weight with its values and scales.

    A field that is annotated as an array, such as `Float[Array, "embed mlp"]`, may contain such a module.
    """

    def part_axes(self, axis_names: Axes) -> dict[str, Axes]:
        """Return the axis names of each array field, in order. `axis_names`: axis names of the weight."""
        ...


def check_axes(field: str, axis_names: str | Axes) -> Axes:
    """Split axis names such as `"batch length embed"`. Raises ConfigError for names that are not in `AXES`."""
    names = tuple(axis_names.split()) if isinstance(axis_names, str) else tuple(axis_names)
    for name in names:
        if name not in AXES:
            check_option(field, name, AXES)
    return names


def as_sharding_rules(field: str, rows: Mapping[str, str | Sequence[str]] | Table) -> Table:
    """Return sharding rules in their hashable form. Raises ConfigError for unknown logical axes or mesh axes."""
    table = []
    for axis, mesh_axes in rows.items() if isinstance(rows, Mapping) else rows:
        check_option(f"Layout.{field}: axis", axis, AXES)
        mesh_axes = (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes)
        for mesh_axis in mesh_axes:
            check_option(f"Layout.{field}[{axis!r}]", mesh_axis, MESH_AXES)
        table.append((axis, mesh_axes))
    return tuple(table)


def path_name(path: tuple[Any, ...]) -> str:
    """Return the dotted form of a pytree path, such as `"scanned_layers.0.mlp"`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Return all leaves of a tree except None, by dotted path, in the order of the tree."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def replaced(tree: PyTree, parts: Mapping[str, Any]) -> PyTree:
    """Return the tree with leaves or modules replaced. `parts`: their replacements, by dotted path."""
    return jax.tree.map_with_path(
        lambda path, part: parts.get(path_name(path), part),
        tree,
        is_leaf=lambda path, _: path_name(path) in parts,
        is_leaf_takes_path=True,
    )


def product_axes(axis_names: Axes) -> tuple[Axes, Axes] | None:
    """Return the axes that a weight matrix contracts and the axes that it produces, without `layers` and `experts`.

    `layers embed heads head_dim` contracts `embed` and produces `heads head_dim`; `heads head_dim embed` contracts
    `heads head_dim`. Returns None for weights that are not matrices of blocks: biases, norms, tables and output heads.
    """
    inner = tuple(name for name in axis_names if name != "layers")
    inner = inner[1:] if inner[:1] == ("experts",) else inner
    stream_axes = {*_LATENTS, "embed", "rank", "ngram_features", "inner"}
    is_excluded = (
        {"vocab", "positions", "scores"} & set(inner)
        or inner[:1] in (("streams",), ("out_groups",))
        or inner[:2] == ("heads", "inner")
    )
    if len(inner) < 2 or not stream_axes & set(inner) or is_excluded:
        return None
    num_contracted = 1 if inner[0] in stream_axes else len(inner) - 1
    return inner[:num_contracted], inner[num_contracted:]


def axes(tree: PyTree) -> dict[str, Axes]:
    """Return the axis names of every array in a tree of modules, by dotted path.

    A module with the class variable `stack_axes` (a stack of layers) prepends these names to the axes of all arrays in
    it. Raises ConfigError for arrays whose annotation does not name the axes.
    """
    found: dict[str, Axes] = {}
    _collect(tree, "", (), found)
    return found


def _collect(node: Any, path: str, stack_axes: Axes, found: dict[str, Axes]) -> None:
    if isinstance(node, eqx.Module):
        stack_axes = stack_axes + getattr(type(node), "stack_axes", ())
        hints = _hints(type(node))
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            field_path = f"{path}.{field.name}".lstrip(".")
            if field.metadata.get("static", False) or value is None:
                continue
            if isinstance(value, (*_ARRAYS, CompositeWeight)):
                axis_names = _axis_names(hints[field.name])
                if axis_names is None:
                    raise ConfigError(
                        f"{type(node).__name__}.{field.name} is an array, so its annotation must name the axes, such "
                        'as Float[Array, "embed mlp"].'
                    )
                axis_names = check_axes(f"{type(node).__name__}.{field.name}", axis_names)
                _add_weight(value, field_path, stack_axes, axis_names, found)
            else:
                _collect(value, field_path, stack_axes, found)
    elif isinstance(node, tuple | list):
        for index, value in enumerate(node):
            _collect(value, f"{path}.{index}".lstrip("."), stack_axes, found)
    elif isinstance(node, dict):
        for key, value in node.items():
            _collect(value, f"{path}.{key}".lstrip("."), stack_axes, found)


def _add_weight(value: Any, path: str, stack_axes: Axes, axis_names: Axes, found: dict[str, Axes]) -> None:
    """Add the axis names of an array, or of each array of a `CompositeWeight`, to `found`."""
    if isinstance(value, CompositeWeight):
        for part, part_axis_names in value.part_axes(axis_names).items():
            _add_weight(getattr(value, part), f"{path}.{part}", stack_axes, part_axis_names, found)
    elif value is not None:
        found[path] = stack_axes + axis_names


def output_axes(value: Any, hint: Any) -> dict[str, Axes]:
    """Return the axis names of the arrays that a function returned, by dotted path.

    Arrays whose types do not name axes are left out. If an array is stacked, the names belong to its last dimensions.

    **Arguments:**

    - `value`: the returned value.
    - `hint`: return annotation of the function.
    """
    found: dict[str, Axes] = {}
    _collect_output(value, hint, "", found)
    return found


def _collect_output(value: Any, hint: Any, path: str, found: dict[str, Axes]) -> None:
    if isinstance(value, _ARRAYS):
        axis_names = _axis_names(hint)
        if axis_names is not None:
            found[path] = tuple(name for name in axis_names.split() if not name.startswith("*"))
        return
    if isinstance(value, eqx.Module):
        hints = _hints(type(value))
        parts = {field.name: (getattr(value, field.name), hints[field.name]) for field in dataclasses.fields(value)}
    elif isinstance(value, dict):
        parts = {str(key): (part, None) for key, part in value.items()}
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", tuple(map(str, range(len(value)))))
        if hasattr(value, "_fields"):
            hints = _hints(type(value))
        else:
            hints = dict(zip(names, _element_hints(hint, len(value)), strict=True))
        parts = {name: (part, hints[name]) for name, part in zip(names, value, strict=True)}
    else:
        return
    for name, (part, part_hint) in parts.items():
        _collect_output(part, part_hint, f"{path}.{name}".lstrip("."), found)


def _element_hints(hint: Any, count: int) -> tuple[Any, ...]:
    """Return the types of the elements of a tuple; None for unknown types."""
    arguments = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return arguments[:1] * count
    return arguments if len(arguments) == count else (None,) * count


def matching(names: Iterable[str], patterns: Sequence[str], field: str) -> frozenset[str]:
    """Return the paths in `names` that match at least one of the patterns, in which `*` matches any text.

    Raises ConfigError, with the name of the `field`, if a pattern matches no path.
    """
    names = tuple(names)
    matched: set[str] = set()
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise ConfigError(
                f"{field}: no weight matches {pattern!r}. Paths of weights look like {', '.join(names[:3])}, …"
            )
        matched.update(matches)
    return frozenset(matched)


def frozen(tree: PyTree) -> frozenset[str]:
    """Return the paths of weights that are never trained: in or below a field with `metadata=FROZEN`."""
    return _paths_with_mark(tree, "frozen")


def computed(tree: PyTree) -> frozenset[str]:
    """Return the paths of computed buffers: in or below a field with `metadata=COMPUTED`."""
    return _paths_with_mark(tree, "computed")


def stored_leaves(tree: PyTree) -> dict[str, Any]:
    """Return the leaves that a checkpoint in the original model's format contains: all but computed buffers."""
    computed_paths = computed(tree)
    return {path: leaf for path, leaf in named_leaves(tree).items() if path not in computed_paths}


def buffers(tree: PyTree, named: Sequence[str] = ()) -> frozenset[str]:
    """Return the paths of buffers (in or below a field with `metadata=BUFFER`) that no pattern in `named` names.

    A pattern names a buffer if it matches the path and ends with the last part of the path: `*.residual.scale` names
    `scanned_layers.0.residual.scale`; `*` and `scanned_layers.*` do not.
    """

    def is_named(path: str) -> bool:
        last_part = path.split(".")[-1]
        return any(pattern.endswith(last_part) and fnmatch.fnmatch(path, pattern) for pattern in named)

    return frozenset(path for path in _paths_with_mark(tree, "buffer") if not is_named(path))


def _paths_with_mark(tree: PyTree, mark: str) -> frozenset[str]:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return frozenset(path_name(path) for path in paths if _has_mark(tree, path, mark))


def _has_mark(node: Any, path: tuple[Any, ...], mark: str) -> bool:
    """Return whether `mark` is in the metadata of a field along the path."""
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


def _axis_names(hint: Any) -> str | None:
    """Return the axis names in a type: `Float[Array, "embed mlp"] | None` -> `"embed mlp"`."""
    if hasattr(hint, "dim_str"):
        return hint.dim_str
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = map(_axis_names, typing.get_args(hint))
        return next((axis_names for axis_names in members if axis_names is not None), None)
    return None


def names_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes in an entry of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else entry or ()
