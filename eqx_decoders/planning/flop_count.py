"""Counts of the products that a traced program computes, recomputation included."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from eqx_decoders.numerics.grouped_matmul import BLOCKS
from eqx_decoders.numerics.grouped_matmul_gpu import KERNELS


# kernels of grouped products, JAX's and those for GPUs, and loops over blocks
_GROUPED = ("gmm", "tgmm", *KERNELS, BLOCKS)
_CUDNN = "dot_product_attention"  # how its primitives begin


class MatmulFlops(NamedTuple):
    """Floating-point operations of the matrix products of a program, on all devices together.

    counted: those in loops whose trips are known. uncounted: whether there are others, in loops or grids of kernels
    whose trips depend on data, or in cuDNN's attention. eight_bit: those of the counted ones that are of 8-bit numbers.
    ragged: those of the counted ones that are grouped products, whose rows may have room for the worst case. loose:
    whether there are grouped products in loops or grids whose trips depend on data.
    """

    counted: float
    uncounted: bool
    eight_bit: float = 0.0
    ragged: float = 0.0
    loose: bool = False


def products(jaxpr: Any) -> MatmulFlops:
    """Count the products of a traced function (`jax.jit(f).trace(x).jaxpr`), and of a condition's largest branch."""
    counted, eight_bit, ragged, uncounted, loose = 0.0, 0.0, 0.0, False, False
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        flops = _product(eqn)
        parts = [products(inner) for inner in inner_programs(eqn)]
        name = eqn.primitive.name
        if eqn.params.get("name", scope_of(eqn)) in _GROUPED:
            loose = True
            continue
        if name == "while":
            uncounted |= any(part.counted > part.ragged or part.uncounted for part in parts)
            loose |= any(part.ragged > 0 or part.loose for part in parts)
            continue
        of_data = name == "pallas_call" and not all(isinstance(size, int) for size in eqn.params["grid_mapping"].grid)
        if of_data or name.startswith(_CUDNN):
            uncounted = True
            continue
        uncounted |= any(part.uncounted for part in parts)
        loose |= any(part.loose for part in parts)
        if name == "cond":
            parts = [max(parts, key=lambda part: part.counted)]
        counted += flops + sum(part.counted for part in parts) * _times(eqn)
        eight_bit += flops * _is_eight_bit(eqn) + sum(part.eight_bit for part in parts) * _times(eqn)
        ragged += flops * name.startswith("ragged") + sum(part.ragged for part in parts) * _times(eqn)
    return MatmulFlops(counted, uncounted, eight_bit, ragged, loose)


def scope_of(eqn: Any) -> str:
    """Return the innermost `jax.named_scope` of an equation; empty where it has none."""
    return str(eqn.source_info.name_stack).rpartition("/")[2].rstrip(")").rpartition("(")[2]


def _product(eqn: Any) -> float:
    """Compute `2 * size of one operand * free dimensions of the other`; 0 for other operations."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (_, contracted), (_, shared) = params["dimension_numbers"]
        return 2.0 * eqn.invars[0].aval.size * _free(eqn.invars[1].aval.shape, (*contracted, *shared))
    if name in ("ragged_dot_general", "ragged_dot"):
        numbers = params["ragged_dot_dimension_numbers"]
        (_, contracted), (_, shared) = numbers.dot_dimension_numbers
        groups = tuple(numbers.rhs_group_dimensions)
        return 2.0 * eqn.invars[0].aval.size * _free(eqn.invars[1].aval.shape, (*contracted, *shared, *groups))
    return 0.0


def _is_eight_bit(eqn: Any) -> bool:
    return eqn.invars[0].aval.dtype.itemsize == 1 if _product(eqn) else False


def _free(shape: tuple[int, ...], without: tuple[int, ...]) -> int:
    return math.prod(size for axis, size in enumerate(shape) if axis not in without)


def _times(eqn: Any) -> int:
    """Return how often the programs inside an equation run, on all devices together."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return params["length"]
    if name == "shard_map":  # whose shapes are those of one device
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    if name == "pallas_call":
        grid = params["grid_mapping"].grid
        return math.prod(size for size in grid if isinstance(size, int))
    return 1


def inner_programs(eqn: Any) -> Iterator[Any]:
    """Yield the programs inside an equation."""
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(each, "jaxpr", each), "eqns"):
                yield each
