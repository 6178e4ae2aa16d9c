"""Rows of tokens sorted by expert, within a device: they go to their places and come back by gathers alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from eqx_decoders.remat import save


# `destinations` has the place of each of a token's slots, `sources` the slot at each place, counted token by token.
# Either may point beyond its end: there is a row of zeros. XLA would make the gradient of a gather a scatter, which is
# slow everywhere; here each is the other's gradient.


def sort_by_expert(
    chosen: Int32[Array, "tokens slots"], experts: int, spare: int = 0
) -> tuple[Int32[Array, "tokens slots"], Int32[Array, "places"]]:
    """Sort choices by expert, then token: return the place of each choice, and the choice at each place.

    A token chooses an expert at most once; choices of `experts` or more are of none of them. There are places for
    `tokens * min(slots, experts)` choices and `spare` more, which stay empty. Where there is none: one beyond the
    last place, one beyond the last choice.
    """
    flat = chosen.reshape(-1)
    size = len(chosen) * min(chosen.shape[1], experts)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    destinations = jnp.where(flat < experts, jnp.argsort(order).astype(jnp.int32), size + spare)
    sources = jnp.where(flat[order] < experts, order, flat.size)[:size]
    destinations, sources = destinations.reshape(chosen.shape), jnp.pad(sources, (0, spare), constant_values=flat.size)
    return save(destinations, "moe_routing_maps"), save(sources, "moe_routing_maps")


def assign_places(
    indices: Int32[Array, "length slots"], *, experts: int, room: int
) -> tuple[Int32[Array, "length slots"], Int32[Array, "places"]]:
    """Assign `experts * room` places, first come, first served: return the place of each choice, and the reverse.

    Where there is none: one beyond the last place, one beyond the last choice.
    """
    chosen = indices.reshape(-1)
    mine = (chosen[:, None] == jnp.arange(experts, dtype=chosen.dtype)[None]).astype(jnp.int32)
    before = jnp.sum(mine * jnp.cumsum(mine, axis=0), axis=1, dtype=jnp.int32) - 1
    destinations = jnp.where((chosen < experts) & (before < room), chosen * room + before, experts * room)
    empty = jnp.full((experts * room,), chosen.size, jnp.int32)
    sources = empty.at[destinations].set(jnp.arange(chosen.size, dtype=jnp.int32), mode="drop")
    return destinations.reshape(indices.shape), sources


@jax.custom_vjp
def dispatch(
    x: Float[Array, "tokens embed"], destinations: Int32[Array, "tokens slots"], sources: Int32[Array, "places"]
) -> Float[Array, "places embed"]:
    """Copy each token to each of its places."""
    return rows_at(x, sources // destinations.shape[1])


def _dispatch_backward(destinations, gradient):
    wide = np.promote_types(gradient.dtype, np.float32)
    return functools.reduce(jnp.add, _slots(gradient, destinations, wide)).astype(gradient.dtype), None, None


dispatch.defvjp(lambda x, destinations, sources: (dispatch(x, destinations, sources), destinations), _dispatch_backward)


@jax.custom_vjp
def combine(
    y: Float[Array, "places embed"],
    weights: Float[Array, "tokens slots"],
    destinations: Int32[Array, "tokens slots"],
    sources: Int32[Array, "places"],
) -> Float[Array, "tokens embed"]:
    """Compute for each token the weighted sum over its places, in the dtype of the weights."""
    pieces = _slots(y, destinations, weights.dtype)
    return functools.reduce(jnp.add, (piece * weights[:, slot, None] for slot, piece in enumerate(pieces)))


def _combine_forward(y, weights, destinations, sources):
    return combine(y, weights, destinations, sources), (y, weights, destinations, sources)


def _combine_backward(saved, gradient):
    y, weights, destinations, sources = saved
    to_y = rows_at(gradient, sources // destinations.shape[1]) * rows_at(weights.reshape(-1, 1), sources)
    pieces = _slots(y, destinations, weights.dtype)
    to_weights = jnp.stack([jnp.sum(gradient * piece, axis=1) for piece in pieces], axis=1)
    return to_y.astype(y.dtype), to_weights, None, None


combine.defvjp(_combine_forward, _combine_backward)


def scale_rows(
    rows: Float[Array, "places embed"],
    weights: Float[Array, "tokens slots"],
    destinations: Int32[Array, "tokens slots"],
    sources: Int32[Array, "places"],
) -> tuple[Float[Array, "places embed"], Float[Array, "tokens slots"]]:
    """Multiply rows by their weights; return them, and weights of one instead."""
    row_weights = dispatch(weights.reshape(-1, 1), destinations.reshape(-1, 1), sources)
    return rows * row_weights.astype(rows.dtype), (destinations < len(sources)).astype(weights.dtype)


def _slots(x: Array, destinations: Array, dtype: DTypeLike) -> list[Array]:
    """Read the rows at each token's first, second, … place. XLA fuses each with its use, but no sum of all."""
    return [rows_at(x, destinations[:, slot]).astype(dtype) for slot in range(destinations.shape[1])]


def rows_at(x: Array, index: Array) -> Array:
    """Return rows of `x`; zeros for an index beyond the last one."""
    return x.at[index].get(mode="fill", fill_value=0)
