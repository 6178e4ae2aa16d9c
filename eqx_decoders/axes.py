"""The word list of logical axes, and the paths by which weights are named.

A weight says what its dimensions are in its type, `Float[Array, "embed mlp"]`. `axes(model)` reads these words back:
they are the sharding vocabulary (`layout.py`), the table of `--describe` and the names in checkpoints.
"""

import dataclasses
import types
import typing
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from eqx_decoders.errors import ConfigError, check_word


AXES: dict[str, str] = {
    "batch": "sequences processed together",
    "length": "positions of a sequence (queries)",
    "kv_length": "positions of a sequence that are attended to (keys and values)",
    "slots": "places of a cache",
    "embed": "features of the residual stream",
    "vocab": "token ids",
    "positions": "rows of a table of learned positions",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "qkv_heads": "query, key and value heads of a fused projection",
    "head_dim": "features of one head",
    "mlp": "hidden features of a feed-forward layer",
    "inputs": "input projections of a fused feed-forward layer",
    "norm": "features of a normalised vector",
    "layers": "equal layers of a stack",
}

Axes = tuple[str, ...]

# What a tree may hold where a type says array: also NumPy's, and the shape of one that is yet to be.
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
if TYPE_CHECKING:
    AnyArray = Any
else:
    AnyArray = jax.Array | np.ndarray | jax.ShapeDtypeStruct


def check_axes(where: str, words: str | Axes) -> Axes:
    """Split `"batch length embed"` into words and check each of them against the list."""
    split = tuple(words.split()) if isinstance(words, str) else tuple(words)
    for word in split:
        check_word(where, word, AXES)
    return split


def path_name(path: tuple[Any, ...]) -> str:
    """`(GetAttrKey("segments"), SequenceKey(0), GetAttrKey("mlp"))` -> `"segments.0.mlp"`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Every leaf that is not None, by its dotted path, in the order of the tree."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def axes(tree: PyTree) -> dict[str, Axes]:
    """The words of every array in a tree of modules, by its dotted path.

    A module with the class variable `stack_axes` (a stack of layers) puts these words in front of all those below it.
    """
    found: dict[str, Axes] = {}
    _collect(tree, "", (), found)
    return found


def _collect(node: Any, path: str, stacked: Axes, found: dict[str, Axes]) -> None:
    if isinstance(node, eqx.Module):
        stacked = stacked + getattr(type(node), "stack_axes", ())
        hints = _hints(type(node))
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            where = f"{path}.{field.name}".lstrip(".")
            if field.metadata.get("static", False) or value is None:
                continue
            if isinstance(value, _ARRAYS):
                words = _words(hints[field.name])
                if words is None:
                    raise ConfigError(
                        f"{type(node).__name__}.{field.name} holds an array: its type must name the axes."
                    )
                found[where] = stacked + check_axes(f"{type(node).__name__}.{field.name}", words)
            else:
                _collect(value, where, stacked, found)
    elif isinstance(node, tuple | list):
        for index, value in enumerate(node):
            _collect(value, f"{path}.{index}".lstrip("."), stacked, found)
    elif isinstance(node, dict):
        for key, value in node.items():
            _collect(value, f"{path}.{key}".lstrip("."), stacked, found)


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _words(hint: Any) -> str | None:
    """`Float[Array, "embed mlp"] | None` -> `"embed mlp"`."""
    if hasattr(hint, "dim_str"):
        return hint.dim_str
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next((word for part in typing.get_args(hint) if (word := _words(part)) is not None), None)
    return None
