"""Sort the tokens of a device by expert, and return expert outputs to their tokens, with gathers only.

An assignment is a pair `(t, k)`: token `t` and its k-th selected expert. With `slots` experts per token, its flat index
is `t * slots + k`. Two index arrays connect assignments with the rows of the sorted buffer (`places` in the shapes):

- `destinations[t, k]`: row of the sorted buffer that holds assignment `(t, k)`.
- `sources[row]`: flat index of the assignment in this row.

An index one past the end means that an assignment has no row, or that a row is empty; gathers read zeros there.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from eqx_decoders.remat import save


# JAX differentiates a gather into a scatter, which is slow on every platform. The custom gradients of this module
# gather with the inverse index instead.


def sort_by_expert(
    indices: Int32[Array, "tokens slots"], num_experts: int, padding: int = 0
) -> tuple[Int32[Array, "tokens slots"], Int32[Array, "places"]]:
    """Sort assignments by expert, then by token; return `(destinations, sources)`.

    The sorted buffer has `tokens * min(slots, num_experts) + padding` rows. That is enough for every routing, because a
    token selects an expert at most once; the last `padding` rows are always empty.

    **Arguments:**

    - `indices`: experts selected for each token; `num_experts` and larger values have no row.
    - `num_experts`: number of experts to sort by.
    - `padding`: number of empty rows at the end.
    """
    flat = indices.reshape(-1)
    size = len(indices) * min(indices.shape[1], num_experts)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    destinations = jnp.where(flat < num_experts, jnp.argsort(order).astype(jnp.int32), size + padding)
    sources = jnp.where(flat[order] < num_experts, order, flat.size)[:size]
    destinations = destinations.reshape(indices.shape)
    sources = jnp.pad(sources, (0, padding), constant_values=flat.size)
    return save(destinations, "moe_routing_maps"), save(sources, "moe_routing_maps")


def assign_with_capacity(
    indices: Int32[Array, "length slots"], *, num_experts: int, capacity: int
) -> tuple[Int32[Array, "length slots"], Int32[Array, "places"]]:
    """Assign `capacity` rows to each expert, in the order of assignments; return `(destinations, sources)`.

    The buffer has `num_experts * capacity` rows. Assignments beyond the capacity of their expert have no row.
    """
    flat = indices.reshape(-1)
    is_expert = (flat[:, None] == jnp.arange(num_experts, dtype=flat.dtype)[None]).astype(jnp.int32)
    rank = jnp.sum(is_expert * jnp.cumsum(is_expert, axis=0), axis=1, dtype=jnp.int32) - 1
    size = num_experts * capacity
    destinations = jnp.where((flat < num_experts) & (rank < capacity), flat * capacity + rank, size)
    empty = jnp.full((size,), flat.size, jnp.int32)
    sources = empty.at[destinations].set(jnp.arange(flat.size, dtype=jnp.int32), mode="drop")
    return destinations.reshape(indices.shape), sources


@jax.custom_vjp
def dispatch(
    x: Float[Array, "tokens embed"], destinations: Int32[Array, "tokens slots"], sources: Int32[Array, "places"]
) -> Float[Array, "places embed"]:
    """Copy each token to the buffer rows of its assignments; empty rows are zeros."""
    return gather_rows(x, sources // destinations.shape[1])


def _dispatch_backward(destinations, gradient):
    sum_dtype = np.promote_types(gradient.dtype, np.float32)
    terms = _gather_assignments(gradient, destinations, sum_dtype)
    return functools.reduce(jnp.add, terms).astype(gradient.dtype), None, None


dispatch.defvjp(lambda x, destinations, sources: (dispatch(x, destinations, sources), destinations), _dispatch_backward)


def undo_dispatch(
    y: Float[Array, "places embed"], destinations: Int32[Array, "tokens 1"], sources: Int32[Array, "places"]
) -> Float[Array, "tokens embed"]:
    """Return the buffer row of each token that has only one expert; zeros for a token without a row.

    The two index arrays are inverse to each other, so this is `dispatch` with their roles exchanged.
    """
    return dispatch(y, sources[:, None], destinations[:, 0])


@jax.custom_vjp
def combine(
    y: Float[Array, "places embed"],
    weights: Float[Array, "tokens slots"],
    destinations: Int32[Array, "tokens slots"],
    sources: Int32[Array, "places"],
) -> Float[Array, "tokens embed"]:
    """Return for each token the weighted sum of the buffer rows of its assignments, in the dtype of `weights`."""
    outputs = _gather_assignments(y, destinations, weights.dtype)
    return functools.reduce(jnp.add, (output * weights[:, k, None] for k, output in enumerate(outputs)))


def _combine_forward(y, weights, destinations, sources):
    return combine(y, weights, destinations, sources), (y, weights, destinations, sources)


def _combine_backward(residuals, gradient):
    y, weights, destinations, sources = residuals
    y_gradient = gather_rows(gradient, sources // destinations.shape[1]) * gather_rows(weights.reshape(-1, 1), sources)
    outputs = _gather_assignments(y, destinations, weights.dtype)
    weights_gradient = jnp.stack([jnp.sum(gradient * output, axis=1) for output in outputs], axis=1)
    return y_gradient.astype(y.dtype), weights_gradient, None, None


combine.defvjp(_combine_forward, _combine_backward)


def scale_rows(
    rows: Float[Array, "places embed"],
    weights: Float[Array, "tokens slots"],
    destinations: Int32[Array, "tokens slots"],
    sources: Int32[Array, "places"],
) -> tuple[Float[Array, "places embed"], Float[Array, "tokens slots"]]:
    """Multiply the rows of the sorted buffer by the weights of their assignments.

    Returns the scaled rows, and the weights that `combine` needs for them: 1, or 0 for an assignment without a row.
    """
    row_weights = dispatch(weights.reshape(-1, 1), destinations.reshape(-1, 1), sources)
    return rows * row_weights.astype(rows.dtype), (destinations < len(sources)).astype(weights.dtype)


def _gather_assignments(x: Array, destinations: Array, dtype: DTypeLike) -> list[Array]:
    """Return one array `[tokens, embed]` for each k: the buffer rows of all tokens' k-th assignments.

    A list, because XLA fuses separate gathers with their uses, but does not fuse a sum over one large gather.
    """
    return [gather_rows(x, destinations[:, k]).astype(dtype) for k in range(destinations.shape[1])]


def gather_rows(x: Array, index: Array) -> Array:
    """Return the rows of `x` at `index`; zeros where the index is past the end."""
    return x.at[index].get(mode="fill", fill_value=0)
