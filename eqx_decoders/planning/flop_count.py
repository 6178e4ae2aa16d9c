"""FLOPs of the matrix products in a traced program, including recomputation."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from eqx_decoders.numerics.grouped_matmul import BLOCKS
from eqx_decoders.numerics.grouped_matmul_gpu import KERNELS


# names of the kernels of grouped products: JAX's megablox kernels, kernels for GPUs, and loops over tiles
_GROUPED_KERNELS = ("gmm", "tgmm", *KERNELS, BLOCKS)
_CUDNN = "dot_product_attention"  # prefix of the names of cuDNN's primitives


class MatmulFlops(NamedTuple):
    """FLOPs of the matrix products of a program, summed over all devices.

    **Arguments:**

    - `counted`: FLOPs of products in loops with known trip counts.
    - `has_uncounted`: whether there are other products: in loops or kernel grids whose size depends on data, or in
        cuDNN's attention.
    - `eight_bit`: the part of `counted` with 8-bit operands.
    - `grouped`: the part of `counted` that belongs to grouped products (experts). Their arrays can have room for the
        worst case, so this is an upper bound.
    - `grouped_eight_bit`: the part of `grouped` with 8-bit operands.
    - `has_uncounted_grouped`: whether there are grouped products in loops or kernel grids whose size depends on data.
        Those multiply in 16 bits: they convert 8-bit operands.
    """

    counted: float
    has_uncounted: bool
    eight_bit: float = 0.0
    grouped: float = 0.0
    grouped_eight_bit: float = 0.0
    has_uncounted_grouped: bool = False


def products(jaxpr: Any) -> MatmulFlops:
    """Count the FLOPs of a traced function (`jax.jit(f).trace(x).jaxpr`). For a `cond`, the largest branch counts."""
    counted, eight_bit, grouped, grouped_eight_bit = 0.0, 0.0, 0.0, 0.0
    has_uncounted, has_uncounted_grouped = False, False
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        flops = _product(eqn)
        parts = [products(inner) for inner in inner_programs(eqn)]
        name = eqn.primitive.name
        if eqn.params.get("name", scope_of(eqn)) in _GROUPED_KERNELS:
            has_uncounted_grouped = True
            continue
        if name == "while":
            has_uncounted |= any(part.counted > part.grouped or part.has_uncounted for part in parts)
            has_uncounted_grouped |= any(part.grouped > 0 or part.has_uncounted_grouped for part in parts)
            continue
        has_dynamic_grid = name == "pallas_call" and not all(
            isinstance(size, int) for size in eqn.params["grid_mapping"].grid
        )
        if has_dynamic_grid or name.startswith(_CUDNN):
            has_uncounted = True
            continue
        has_uncounted |= any(part.has_uncounted for part in parts)
        has_uncounted_grouped |= any(part.has_uncounted_grouped for part in parts)
        if name == "cond":
            parts = [max(parts, key=lambda part: part.counted)]
        is_grouped, is_eight_bit, times = name.startswith("ragged"), _is_eight_bit(eqn), _times(eqn)
        counted += flops + sum(part.counted for part in parts) * times
        eight_bit += flops * is_eight_bit + sum(part.eight_bit for part in parts) * times
        grouped += flops * is_grouped + sum(part.grouped for part in parts) * times
        grouped_eight_bit += (
            flops * (is_grouped and is_eight_bit) + sum(part.grouped_eight_bit for part in parts) * times
        )
    return MatmulFlops(counted, has_uncounted, eight_bit, grouped, grouped_eight_bit, has_uncounted_grouped)


def scope_of(eqn: Any) -> str:
    """Return the innermost `jax.named_scope` of an equation, or an empty string."""
    return str(eqn.source_info.name_stack).rpartition("/")[2].rstrip(")").rpartition("(")[2]


def _product(eqn: Any) -> float:
    """Return the FLOPs of a product, `2 * size of one operand * free dimensions of the other`, or 0."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (_, contracted), (_, batch) = params["dimension_numbers"]
        return 2.0 * eqn.invars[0].aval.size * _free(eqn.invars[1].aval.shape, (*contracted, *batch))
    if name in ("ragged_dot_general", "ragged_dot"):
        numbers = params["ragged_dot_dimension_numbers"]
        (_, contracted), (_, batch) = numbers.dot_dimension_numbers
        groups = tuple(numbers.rhs_group_dimensions)
        return 2.0 * eqn.invars[0].aval.size * _free(eqn.invars[1].aval.shape, (*contracted, *batch, *groups))
    return 0.0


def _is_eight_bit(eqn: Any) -> bool:
    return eqn.invars[0].aval.dtype.itemsize == 1 if _product(eqn) else False


def _free(shape: tuple[int, ...], without: tuple[int, ...]) -> int:
    return math.prod(size for axis, size in enumerate(shape) if axis not in without)


def _times(eqn: Any) -> int:
    """Return how often the programs inside an equation run, summed over all devices."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return params["length"]
    if name == "shard_map":  # shapes inside are those of one device
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    if name == "pallas_call":
        grid = params["grid_mapping"].grid
        return math.prod(size for size in grid if isinstance(size, int))
    return 1


def inner_programs(eqn: Any) -> Iterator[Any]:
    """Yield the programs inside an equation."""
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield inner
