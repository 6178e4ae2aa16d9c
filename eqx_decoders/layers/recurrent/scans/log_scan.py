"""Running sums of exponentials and running maxima that decay, as logarithms: no exponent is ever above 0.

    l_t = log(exp(l_{t-1} + g_t) + exp(k_t))    or    l_t = max(l_{t-1} + g_t, k_t)

`MEANS` has beside l the mean of values v_t that these exponentials weight, at each step a convex combination. Both are
laws that join two pieces of a row, so that tokens of a chunk are joined in a tree, and then chunks one by one.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float32

from eqx_decoders.context import Execution
from eqx_decoders.layers.recurrent.scans.selective_scan import over_chunks
from eqx_decoders.layers.recurrent.scans.sharded_scan import states_of_pieces
from eqx_decoders.sharding.axes import names_of


CHUNK = 64  # tokens that are joined together
EMPTY = -1e30  # logarithm of nothing: its exponential is 0, and sums of a few such are finite

Piece = tuple[Array, ...]  # the log decay of a piece of a row, and its state from nothing: of a token g, k, v
State = tuple[Array, ...]


class Law(NamedTuple):
    """How two pieces of a row make one, and the state from nothing."""

    join: Callable[[Piece, Piece], Piece]
    empty: tuple[float, ...]

    def advance(self, state: State, piece: Piece) -> State:
        """Return the state after a piece."""
        return self.join((jnp.zeros_like(state[0]), *state), piece)[1:]

    def nothing(self, like: Array) -> State:
        """Return the state from nothing, in the shape of an array."""
        return tuple(jnp.full_like(like, value) for value in self.empty)


def _join_maxima(first: Piece, then: Piece) -> Piece:
    (decay, level), (more, other) = first, then
    return decay + more, jnp.maximum(level + more, other)


def _join_means(first: Piece, then: Piece) -> Piece:
    (decay, level, mean), (more, other, new) = first, then
    faded = level + more
    return decay + more, jnp.logaddexp(faded, other), weighted(faded, mean, other, new)


def weighted(level: Array, mean: Array, other: Array, new: Array) -> Array:
    """Return the mean of two means whose weights have these logarithms."""
    return new + jax.nn.sigmoid(level - other) * (mean - new)


MAXIMA = Law(_join_maxima, (EMPTY,))
MEANS = Law(_join_means, (EMPTY, 0.0))


def scan_states(law: Law, tokens: Piece, start: State, chunk: int = CHUNK) -> tuple[State, State]:
    """Return the states before each token, and the state after the last, from the one before the first."""

    def advance(state: State, tokens: Piece) -> tuple[State, State]:
        after = law.advance(tuple(x[None] for x in state), lax.associative_scan(law.join, tokens))
        before = tuple(jnp.concatenate([x[None], y[:-1]]) for x, y in zip(state, after, strict=True))
        return tuple(y[-1] for y in after), before

    end, before = over_chunks(advance, start, tokens, chunk, (0.0, *law.empty))
    return before, end


def scan_on_mesh(
    law: Law,
    tokens: tuple[Float32[Array, "batch length channels"], ...],
    start: tuple[Float32[Array, "batch channels"], ...],
    *,
    execution: Execution,
) -> tuple[tuple[Float32[Array, "batch length channels"], ...], tuple[Float32[Array, "batch channels"], ...]]:
    """Run `scan_states` on the mesh of `execution`: where it splits rows a device runs its piece twice, as in Mamba."""
    layout = execution.layout
    rows, length, channels = map(names_of, layout.activation_spec("batch length channels", tokens[0].shape))
    if layout.single or not length:
        return scan_states(law, tokens, start)

    def run(tokens: Piece, start: State) -> tuple[State, State]:
        _, end = scan_states(law, tokens, law.nothing(start[0]))
        own, end = states_of_pieces(start, (tokens[0].sum(1), *end), law.advance, length)
        return scan_states(law, tokens, own)[0], end

    # named, too, are mesh axes of one device: over what no name splits gradients are summed
    rows = (*rows, *(name for name, size in layout.mesh.shape.items() if size == 1))
    specs = PartitionSpec(rows, length, channels), PartitionSpec(rows, channels)
    return layout.shard_map(run, specs, specs)(tokens, start)
