"""Counting what a traced step keeps from its loops over layers for the backward pass, before anything is compiled."""

import math
from typing import Any

from eqx_decoders.planning.flop_count import inner_programs


def kept_arrays(jaxpr: Any) -> list[Any]:
    """The stacked results of a loop that a later one reads piece by piece; their shapes are those of all devices."""
    written: dict[Any, Any] = {}
    found: dict[Any, Any] = {}
    deeper: list[Any] = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "scan":
            inside = eqn.params["jaxpr"].jaxpr
            read = _stacked(eqn.invars, inside.invars)
            found |= {var: written[var] for var in read if var in written}
            written |= {var: var.aval for var in _stacked(eqn.outvars, inside.outvars)}
        else:
            deeper += [array for part in inner_programs(eqn) for array in kept_arrays(part)]
    return [*found.values(), *deeper]


def _stacked(outside: list[Any], inside: list[Any]) -> list[Any]:
    """What a loop reads or writes piece by piece: inside it has a dimension less. Literals are no such things."""
    pairs = zip(outside, inside, strict=True)
    return [one for one, piece in pairs if one.aval.ndim > piece.aval.ndim and not hasattr(one, "val")]


def kept_share(arrays: list[Any], embed_dim: int, *, tokens: int, features: int) -> int:
    """Bytes of a device where the mesh cuts tokens into `tokens` parts, and heads and mlp into `features`.

    The residual stream, and what is as wide, is not cut by the latter.
    """
    return sum(
        math.prod(array.shape) * array.dtype.itemsize // tokens // (1 if array.shape[-1:] == (embed_dim,) else features)
        for array in arrays
    )
