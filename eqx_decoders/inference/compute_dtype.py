"""Weights in the dtype in which they are multiplied: a model that only draws need not read larger ones."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from eqx_decoders.model.caches import init_cache
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.numerics.precision import cast
from eqx_decoders.sharding.axes import named_leaves, path_name, replaced


# Operations that move numbers and change none: what is cast before or after them is the same.
_MOVES = frozenset({"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "copy_p", "rev"})
_MOVES |= {"slice", "dynamic_slice", "gather", "split", "sharding_constraint", "reshard", "optimization_barrier"}


def multiplied_weights(model: Decoder) -> frozenset[str]:
    """Return the names of the weights that a forward pass reads in the compute dtype alone, and has in a larger one.

    A copy in that dtype gives the same numbers. Found in the programs of a prompt and of a token: each use of such a
    weight is a cast, maybe of a part of it. What they don't read, such as encoders and drafting heads, is not among
    them.
    """
    dtype = jnp.dtype(model.execution.precision.compute)
    large = {name for name, leaf in named_leaves(model).items() if _is_larger(leaf, dtype)}
    if not large:
        return frozenset()
    arrays, static = eqx.partition(model, eqx.is_array)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays)
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    cache = jax.eval_shape(lambda: init_cache(model.config, 1, 8, layout=model.execution.layout))
    for length in (4, 1):
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def forward(arrays: Any, tokens: Any, cache: Any) -> Any:
            return eqx.combine(arrays, static)(tokens, cache=cache).logits

        program = jax.make_jaxpr(forward)(shapes, tokens, cache).jaxpr
        variables = dict(zip(names, program.invars, strict=False))
        read = {id(each) for equation in program.eqns for each in equation.invars}
        large = {name for name in large if id(variables[name]) in read}
        large = {name for name in large if _results(program, variables[name], dtype) == set()}
    return frozenset(large)


def with_multiplied(model: Decoder, names: frozenset[str]) -> Decoder:
    """Return a model with copies of these weights in its compute dtype, sharded as they are; others are the same."""
    dtype = jnp.dtype(model.execution.precision.compute)
    return replaced(model, {name: cast(leaf, dtype) for name, leaf in named_leaves(model).items() if name in names})


def _is_larger(leaf: Any, dtype: np.dtype) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > dtype.itemsize


def _results(program: core.Jaxpr, variable: Any, dtype: np.dtype) -> set[int] | None:
    """Return the numbers of a program's results that are a variable, moved and not cast to a dtype.

    None if the program does anything else with it than to move and to cast it.
    """
    results = {index for index, each in enumerate(program.outvars) if each is variable}
    for equation in program.eqns:
        for place, each in enumerate(equation.invars):
            if each is not variable or _casts(equation, dtype):
                continue
            moved = _moved(equation, place, dtype)
            more = None if moved is None else [_results(program, each, dtype) for each in moved]
            if more is None or None in more:
                return None
            results = results.union(*(each for each in more if each is not None))
    return results


def _casts(equation: Any, dtype: np.dtype) -> bool:
    return equation.primitive.name == "convert_element_type" and equation.params["new_dtype"] == dtype


def _rounds(equation: Any, dtype: np.dtype) -> bool:
    """Return whether an operation rounds to the numbers of a dtype, which a cast to it does not change."""
    if equation.primitive.name != "reduce_precision":
        return False
    info, params = jnp.finfo(dtype), equation.params
    return (params["exponent_bits"], params["mantissa_bits"]) == (info.nexp, info.nmant)


def _moved(equation: Any, place: int, dtype: np.dtype) -> list[Any] | None:
    """Return the results of an operation that are one of its arguments, moved; None if it computes with that."""
    name, params = equation.primitive.name, equation.params
    if name in _MOVES or _rounds(equation, dtype):
        return [equation.outvars[place]] if len(equation.outvars) == len(equation.invars) else equation.outvars
    leaves = jax.tree.leaves(list(params.values()), is_leaf=_is_program)
    programs = [getattr(each, "jaxpr", each) for each in leaves if _is_program(each)]
    chosen = 1 if name == "cond" else 0  # the first argument says which program runs
    replaced = _replaced(equation, programs[0]) if name == "scan" else range(0)
    if not programs or name == "while" or place in replaced or place < chosen:
        return None
    moved = []
    for part in programs:
        if len(part.invars) + chosen != len(equation.invars):
            return None
        results = _results(part, part.invars[place - chosen], dtype)
        if results is None or not results.isdisjoint(range(len(replaced))):
            return None
        moved += [equation.outvars[index] for index in results]
    return moved


def _replaced(equation: Any, body: core.Jaxpr) -> range:
    """Return the places of the arguments that each turn of a scan replaces: behind those without an axis of turns."""

    def alike(ones: Any, others: Any) -> int:
        return sum(one.aval.shape == other.aval.shape for one, other in zip(ones, others, strict=True))

    whole, carried = alike(equation.invars, body.invars), alike(equation.outvars, body.outvars)
    return range(whole - carried, whole)


def _is_program(value: Any) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)
