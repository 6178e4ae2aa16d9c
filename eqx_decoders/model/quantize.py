"""Models with weights in few bits: `quantize` rounds those of any model, `dequantize` widens them again.

    model = quantize(model, "int8")
    model = quantize(model, {"*.mlp.*": "int4", "*": "int8"})

Weights are rounded to the nearest, symmetrically around zero, by the largest number of a column, group or block.
"""

import collections
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from eqx_decoders.errors import check, check_integer, check_word
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.quantizations import QUANTIZATIONS, quantized
from eqx_decoders.numerics.low_precision import fits
from eqx_decoders.numerics.quantized_weight import (
    AbstractQuantizedWeight,
    matrix_axes,
    quantized_weights,
)
from eqx_decoders.sharding.axes import Axes, axes, matching, named_leaves, path_name, product_axes, replaced
from eqx_decoders.sharding.layout import Layout, out_shardings, partitions


QuantizationName = Literal["int8", "int4", "fp8", "fp8_block", "nf4"]


GROUPED = tuple(name for name, kind in QUANTIZATIONS.items() if kind.groups)


def quantize(
    model: Decoder, modes: str | Mapping[str, str | None] = "int8", *, group_size: int | None = None
) -> Decoder:
    """Return the model with its matrices in few bits, for inference, or below low-rank pairs (`add_lora`).

    **Arguments:**

    - `model`: of arrays, on any layout, or of shapes.
    - `modes`: mode of all matrices, or by pattern of their paths (`*` stands for anything; the first that matches
        counts; None leaves them): `"int8"`: whole numbers up to 127 with a scale for each column (8 bits a weight);
        `"int4"`: up to 7 with one for `group_size` rows of a column (4.25 bits with groups of 128); `"nf4"`: quantiles
        of the normal distribution, so too (QLoRA); `"fp8"`: e4m3 with one for each column; `"fp8_block"`: with one for
        128 x 128 numbers.
    - `group_size`: rows of a group of `"int4"` and `"nf4"`; they must divide the rows of a weight. None: 128 (`"nf4"`:
        64), or 64 or 32 for the weights that these do not divide (see `group_sizes`).

    All matrices inside of blocks are quantized, but tables, norms, routers, biases, decays and weights with one number
    a head. The output head and encoders are if a pattern begins with their name, as in `"head.kernel"`.

    Raises ConfigError for an unknown mode, a pattern of nothing that can be in few bits, a group that does not divide,
    and a model that has such weights already.
    """
    if group_size is not None:
        check_integer("quantize: group_size", group_size)
    present = sorted(quantized_weights(model))[:1]
    rule = "call dequantize first"
    check(not present, f"quantize: the model has weights in few bits already, such as {present}: {rule}.")
    words, leaves = axes(model), named_leaves(model)
    chosen = _chosen({"*": modes} if isinstance(modes, str) else modes, words)
    nodes: dict[str, Any] = {}
    for path, mode in chosen.items():
        nodes[path] = _quantized(model.execution.layout, path, words[path], leaves[path], mode, group_size)
    return replaced(model, nodes)


def group_sizes(model: Decoder) -> dict[int, int]:
    """Return the number of weights in groups by the rows of their groups, the most rows first."""
    nodes = (node for node in quantized_weights(model).values() if node.format in GROUPED)
    counts = collections.Counter(node.block[0] for node in nodes)
    return dict(sorted(counts.items(), reverse=True))


def dequantize(model: Decoder, *, dtype: DTypeLike | None = None) -> Decoder:
    """Return the model with plain arrays for weights in few bits, by default in the dtype of its other weights."""
    layout, nodes = model.execution.layout, quantized_weights(model)
    kind = np.dtype(model.execution.precision.params if dtype is None else dtype)
    shapes = {path: jax.ShapeDtypeStruct(node.shape, kind) for path, node in nodes.items()}
    shardings = named_leaves(layout.shardings(replaced(model, shapes)))
    shapes = {path: leaf.update(sharding=shardings[path]) for path, leaf in shapes.items()}
    weights: dict[str, Any] = {
        path: shapes[path] if isinstance(node.values, jax.ShapeDtypeStruct) else _widened(layout, node, shapes[path])
        for path, node in nodes.items()
    }
    return replaced(model, weights)


def _widened(layout: Layout, node: AbstractQuantizedWeight, like: jax.ShapeDtypeStruct) -> Array:
    run = layout.automatically(lambda node: node.dequantized(like.dtype), lambda _: partitions(like))
    return jax.jit(run, out_shardings=out_shardings(like))(node)


def _chosen(modes: Mapping[str, str | None], words: Mapping[str, Axes]) -> dict[str, str]:
    """Return the mode of every weight that is quantized, by path, in the order of the model."""
    check(len(modes) > 0, "quantize: modes={} must name at least one pattern, such as '*'.")
    mode_of: dict[str, str | None] = {}
    for pattern, mode in modes.items():
        if mode is not None:
            check_word(f"quantize: modes[{pattern!r}]", mode, get_args(QuantizationName))
        matched = matching(words, (pattern,), "quantize: modes")
        able = [path for path in words if path in matched and _able(path, words[path], pattern)]
        check(
            bool(able) or mode is None,
            f"quantize: modes[{pattern!r}] matches {min(matched)}, which is not kept in few bits: tables, routers, "
            "norms, biases and low-rank pairs aren't, nor is what makes decays or one number per head, and heads and "
            "encoders must be named ('head.kernel'). Write another pattern.",
        )
        mode_of = dict.fromkeys(able, mode) | mode_of
    return {path: mode for path in words if (mode := mode_of.get(path)) is not None}


def _able(path: str, words: Axes, pattern: str) -> bool:
    if fits(path, words):
        return True
    first = path.split(".")[0]
    named = pattern.startswith(f"{first}.") and first in ("head", "vision", "audio")
    return named and (path == "head.kernel" or (product_axes(words) is not None and "layers" in words))


def _quantized(
    layout: Layout, path: str, words: Axes, leaf: Any, mode: str, group_size: int | None
) -> AbstractQuantizedWeight:
    """Return a weight in few bits, sharded by the layout's tables."""
    inner, outer = map(len, matrix_axes(words))
    rows = math.prod(leaf.shape[len(leaf.shape) - inner - outer : len(leaf.shape) - outer])
    kind = QUANTIZATIONS[mode]
    block = (rows, 1) if kind.block is None else kind.block
    if kind.groups:
        contracted = " x ".join(words[len(words) - inner - outer : len(words) - outer])
        rule = f"must divide the {rows} rows ({contracted}) of {path}: choose another one, or another mode for it"
        sizes = kind.groups if group_size is None else (group_size,)
        fitting = [size for size in sizes if rows % size == 0]
        check(len(fitting) > 0, f"quantize: group_size={' or '.join(map(str, sizes))} {rule}.")
        block = (fitting[0], 1)

    def make(weight: Array) -> AbstractQuantizedWeight:
        return quantized(weight, kind, block, inner, outer)

    like = jax.eval_shape(make, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    like = _placed(layout, path, words, like)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return like
    return jax.jit(layout.automatically(make, lambda _: partitions(like)), out_shardings=out_shardings(like))(leaf)


def _placed(layout: Layout, path: str, words: Axes, node: AbstractQuantizedWeight) -> AbstractQuantizedWeight:
    """Return the shapes of a weight in few bits with shardings of the layout."""
    stack = words.count("layers")
    parts = {name: (*words[:stack], *inner) for name, inner in node.part_axes(words[stack:]).items()}

    def with_sharding(at: Any, leaf: Any) -> Any:
        name = path_name(at)
        return leaf.update(sharding=layout.weight_sharding(parts[name], leaf.shape, f"{path}.{name}"))

    return jax.tree_util.tree_map_with_path(with_sharding, node)
