"""Weight-only quantization: `quantize` rounds the weights of any model, `dequantize` converts them back to floats.

    model = quantize(model, "int8")
    model = quantize(model, {"*.mlp.*": "int4", "*": "int8"})

Weights are rounded to the nearest value. Quantization is symmetric; the scale of a column, group or 2-D block of
weights is computed from the weight with the largest magnitude (absmax).
"""

import collections
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from eqx_decoders.errors import check, check_integer, check_option
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


QuantizationMode = Literal["int8", "int4", "fp8", "fp8_block", "nf4"]  # the keys of `QUANTIZATIONS`
GROUPED = tuple(name for name, quantization in QUANTIZATIONS.items() if quantization.groups)


def quantize(
    model: Decoder, modes: str | Mapping[str, str | None] = "int8", *, group_size: int | None = None
) -> Decoder:
    """Return the model with quantized matrices, for inference or as the frozen base of LoRA (`add_lora`).

    **Arguments:**

    - `model`: a model of arrays on any layout, or of `jax.ShapeDtypeStruct`s.
    - `modes`: one mode for all matrices, or a mode for each pattern of weight paths (`*` matches any text; the first
        pattern that matches a path determines its mode; None leaves matching weights unquantized). Modes:

        - `"int8"`: integers up to ±127, one scale per column (8 bits per weight);
        - `"int4"`: integers up to ±7, one scale per `group_size` rows of a column (4.25 bits with 128 rows);
        - `"nf4"`: quantiles of the normal distribution (QLoRA), one scale per `group_size` rows of a column;
        - `"fp8"`: e4m3, one scale per column;
        - `"fp8_block"`: e4m3, one scale per 128 x 128 block.
    - `group_size`: rows that share a scale in `"int4"` and `"nf4"`; it must divide the rows of the weight. None: 128
        (`"nf4"`: 64), or 64 or 32 for weights whose rows are not a multiple of that (see `group_sizes`).

    All matrices in blocks are quantized, except tables, norms, routers, biases, decays and weights with one value per
    head. The output head and the encoders are quantized only if a pattern starts with their name: `"head.kernel"`.

    Raises ConfigError for an unknown mode, a pattern that matches no weight that can be quantized, a group size that
    does not divide the rows of a weight or has no effect, and a model that is already quantized.
    """
    if group_size is not None:
        check_integer("quantize: group_size", group_size)
    already_quantized = sorted(quantized_weights(model))
    check(
        not already_quantized,
        f"quantize: the model already has quantized weights, such as {already_quantized[:1]}. Call dequantize first.",
    )
    axis_names = axes(model)
    leaves = named_leaves(model)
    mode_of = _modes_by_path({"*": modes} if isinstance(modes, str) else modes, axis_names)
    check(
        group_size is None or any(mode in GROUPED for mode in mode_of.values()),
        f"quantize: group_size={group_size} is used only with the modes {' and '.join(GROUPED)}, but modes="
        f"{modes!r} has none of them. Leave group_size out, or choose another mode.",
    )
    nodes: dict[str, Any] = {}
    for path, mode in mode_of.items():
        nodes[path] = _quantized(model.execution.layout, path, axis_names[path], leaves[path], mode, group_size)
    return replaced(model, nodes)


def group_sizes(model: Decoder) -> dict[int, int]:
    """Return `{rows per group: number of weight tensors}` for group-wise modes, largest groups first."""
    nodes = (node for node in quantized_weights(model).values() if node.format in GROUPED)
    counts = collections.Counter(node.block[0] for node in nodes)
    return dict(sorted(counts.items(), reverse=True))


def dequantize(model: Decoder, *, dtype: DTypeLike | None = None) -> Decoder:
    """Return the model with float arrays in place of quantized weights. `dtype` defaults to `Precision.params`."""
    layout = model.execution.layout
    nodes = quantized_weights(model)
    dtype = np.dtype(model.execution.precision.params if dtype is None else dtype)
    shapes = {path: jax.ShapeDtypeStruct(node.shape, dtype) for path, node in nodes.items()}
    shardings = named_leaves(layout.shardings(replaced(model, shapes)))
    shapes = {path: leaf.update(sharding=shardings[path]) for path, leaf in shapes.items()}
    weights: dict[str, Any] = {
        path: shapes[path]
        if isinstance(node.values, jax.ShapeDtypeStruct)
        else _dequantized(layout, node, shapes[path])
        for path, node in nodes.items()
    }
    return replaced(model, weights)


def _dequantized(layout: Layout, node: AbstractQuantizedWeight, like: jax.ShapeDtypeStruct) -> Array:
    run = layout.automatically(lambda node: node.dequantized(like.dtype), lambda _: partitions(like))
    return jax.jit(run, out_shardings=out_shardings(like))(node)


def _modes_by_path(modes: Mapping[str, str | None], axis_names: Mapping[str, Axes]) -> dict[str, str]:
    """Return the mode of each weight to be quantized, by path, in the order of the model."""
    check(len(modes) > 0, "quantize: modes={} must name at least one pattern, such as '*'.")
    mode_of: dict[str, str | None] = {}
    for pattern, mode in modes.items():
        if mode is not None:
            check_option(f"quantize: modes[{pattern!r}]", mode, QUANTIZATIONS)
        matched = matching(axis_names, (pattern,), "quantize: modes")
        supported = [path for path in axis_names if path in matched and _is_supported(path, axis_names[path], pattern)]
        check(
            bool(supported) or mode is None,
            f"quantize: modes[{pattern!r}] matches only weights that cannot be quantized, such as {min(matched)}: "
            "tables, routers, norms, biases, low-rank adapters, decays and weights with one value per head are not "
            "quantized, and the head and encoders need patterns that start with their name ('head.kernel'). "
            "Write another pattern.",
        )
        mode_of = dict.fromkeys(supported, mode) | mode_of  # earlier patterns take precedence
    return {path: mode for path in axis_names if (mode := mode_of.get(path)) is not None}


def _is_supported(path: str, axis_names: Axes, pattern: str) -> bool:
    """Return whether a weight that `pattern` matches can be quantized."""
    if fits(path, axis_names):
        return True
    first = path.split(".")[0]
    named = pattern.startswith(f"{first}.") and first in ("head", "vision", "audio")
    return named and (path == "head.kernel" or (product_axes(axis_names) is not None and "layers" in axis_names))


def _quantized(
    layout: Layout, path: str, axis_names: Axes, leaf: Any, mode: str, group_size: int | None
) -> AbstractQuantizedWeight:
    """Quantize a weight. The result is sharded by the layout."""
    inner, outer = map(len, matrix_axes(axis_names))
    rows = math.prod(leaf.shape[len(leaf.shape) - inner - outer : len(leaf.shape) - outer])
    quantization = QUANTIZATIONS[mode]
    block = (rows, 1) if quantization.block is None else quantization.block
    if quantization.groups:
        contracted = " x ".join(axis_names[len(axis_names) - inner - outer : len(axis_names) - outer])
        sizes = quantization.groups if group_size is None else (group_size,)
        divisors = [size for size in sizes if rows % size == 0]
        check(
            len(divisors) > 0,
            f"quantize: group_size={' or '.join(map(str, sizes))} must divide the {rows} rows ({contracted}) of "
            f"{path}. Choose another group size, or another mode for this weight.",
        )
        block = (divisors[0], 1)

    def quantize_leaf(weight: Array) -> AbstractQuantizedWeight:
        return quantized(weight, quantization, block, inner, outer)

    target = jax.eval_shape(quantize_leaf, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    target = _with_shardings(layout, path, axis_names, target)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return target
    run = layout.automatically(quantize_leaf, lambda _: partitions(target))
    return jax.jit(run, out_shardings=out_shardings(target))(leaf)


def _with_shardings(
    layout: Layout, path: str, axis_names: Axes, node: AbstractQuantizedWeight
) -> AbstractQuantizedWeight:
    """Add the layout's shardings to the `jax.ShapeDtypeStruct`s of a quantized weight."""
    stack = axis_names.count("layers")
    part_axes = {
        name: (*axis_names[:stack], *inner_axes) for name, inner_axes in node.part_axes(axis_names[stack:]).items()
    }

    def with_sharding(key_path: Any, leaf: Any) -> Any:
        name = path_name(key_path)
        return leaf.update(sharding=layout.weight_sharding(part_axes[name], leaf.shape, f"{path}.{name}"))

    return jax.tree_util.tree_map_with_path(with_sharding, node)
