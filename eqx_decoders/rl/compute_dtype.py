"""Copies of weights in the compute dtype, so that inference reads fewer bytes than from float32 weights."""

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


# Primitives that move or copy values without arithmetic: casting their input or their output gives the same values.
_MOVES = frozenset({"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "copy_p", "rev"})
_MOVES |= {"slice", "dynamic_slice", "gather", "split", "sharding_constraint", "reshard", "optimization_barrier"}


def weights_cast_to_compute_dtype(model: Decoder) -> frozenset[str]:
    """Return the names of weights that are stored in a larger dtype, and that every use casts to the compute dtype.

    Replacing such a weight by a copy in the compute dtype does not change the results of a forward pass. The weights
    are found in the jaxprs of a prompt of 4 tokens and of a step of 1 token: every use of the weight, or of a slice of
    it, is a cast. Weights that these jaxprs do not read, such as encoders and multi-token prediction, are not included.
    """
    dtype = jnp.dtype(model.execution.precision.compute)
    candidates = {name for name, leaf in named_leaves(model).items() if _is_larger(leaf, dtype)}
    if not candidates:
        return frozenset()
    arrays, static = eqx.partition(model, eqx.is_array)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays)
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    cache = jax.eval_shape(lambda: init_cache(model.config, 1, 8, layout=model.execution.layout))
    for length in (4, 1):
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def forward(arrays: Any, tokens: Any, cache: Any) -> Any:
            return eqx.combine(arrays, static)(tokens, cache=cache).logits

        jaxpr = jax.make_jaxpr(forward)(shapes, tokens, cache).jaxpr
        variables = dict(zip(names, jaxpr.invars, strict=False))
        used = {id(variable) for equation in jaxpr.eqns for variable in equation.invars}
        candidates = {name for name in candidates if id(variables[name]) in used}
        candidates = {name for name in candidates if _uncast_outputs(jaxpr, variables[name], dtype) == set()}
    return frozenset(candidates)


def cast_weights(model: Decoder, names: frozenset[str]) -> Decoder:
    """Return the model with copies of the named weights in its compute dtype; shardings and other weights are kept."""
    dtype = jnp.dtype(model.execution.precision.compute)
    return replaced(model, {name: cast(leaf, dtype) for name, leaf in named_leaves(model).items() if name in names})


def _is_larger(leaf: Any, dtype: np.dtype) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > dtype.itemsize


def _uncast_outputs(jaxpr: core.Jaxpr, variable: Any, dtype: np.dtype) -> set[int] | None:
    """Return the indices of the outputs of a jaxpr that hold `variable`, moved but not cast to `dtype`.

    Returns None if the jaxpr uses the variable in any other way than moving it and casting it to `dtype`.
    """
    outputs = {index for index, output in enumerate(jaxpr.outvars) if output is variable}
    for equation in jaxpr.eqns:
        for index, argument in enumerate(equation.invars):
            if argument is not variable or _casts(equation, dtype):
                continue
            moved = _moved_results(equation, index, dtype)
            if moved is None:
                return None
            for result in moved:
                outputs_of_result = _uncast_outputs(jaxpr, result, dtype)
                if outputs_of_result is None:
                    return None
                outputs |= outputs_of_result
    return outputs


def _casts(equation: Any, dtype: np.dtype) -> bool:
    return equation.primitive.name == "convert_element_type" and equation.params["new_dtype"] == dtype


def _rounds(equation: Any, dtype: np.dtype) -> bool:
    """Return whether an equation rounds to values that `dtype` represents exactly, so that a later cast is exact."""
    if equation.primitive.name != "reduce_precision":
        return False
    info = jnp.finfo(dtype)
    params = equation.params
    return (params["exponent_bits"], params["mantissa_bits"]) == (info.nexp, info.nmant)


def _moved_results(equation: Any, index: int, dtype: np.dtype) -> list[Any] | None:
    """Return the results of an equation that hold its argument `index`, moved.

    Returns None if the equation computes with the argument.
    """
    name = equation.primitive.name
    if name in _MOVES or _rounds(equation, dtype):
        return [equation.outvars[index]] if len(equation.outvars) == len(equation.invars) else equation.outvars
    leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr)
    inner_jaxprs = [getattr(leaf, "jaxpr", leaf) for leaf in leaves if _is_jaxpr(leaf)]
    num_predicates = 1 if name == "cond" else 0  # the first argument of cond selects the branch
    carry = _carry_arguments(equation, inner_jaxprs[0]) if name == "scan" else range(0)
    if not inner_jaxprs or name == "while" or index in carry or index < num_predicates:
        return None
    moved = []
    for inner in inner_jaxprs:
        if len(inner.invars) + num_predicates != len(equation.invars):
            return None
        outputs = _uncast_outputs(inner, inner.invars[index - num_predicates], dtype)
        if outputs is None or not outputs.isdisjoint(range(len(carry))):
            return None
        moved += [equation.outvars[output] for output in outputs]
    return moved


def _carry_arguments(equation: Any, body: core.Jaxpr) -> range:
    """Return the indices of a scan's arguments that are its carry.

    The arguments are constants, carry and scanned arrays, in this order. Constants and carry have the same shapes
    inside the body; scanned arrays lose their leading axis.
    """

    def count_same_shapes(outer: Any, inner: Any) -> int:
        return sum(first.aval.shape == second.aval.shape for first, second in zip(outer, inner, strict=True))

    num_constants_and_carry = count_same_shapes(equation.invars, body.invars)
    num_carry = count_same_shapes(equation.outvars, body.outvars)
    return range(num_constants_and_carry - num_carry, num_constants_and_carry)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)
