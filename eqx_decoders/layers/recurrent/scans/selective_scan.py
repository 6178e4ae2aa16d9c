"""Selective scan of Mamba (Gu & Dao 2023): a recurrence of numbers, with a decay of each channel and state.

    S_t[n, c] = exp(rates[n, c] steps_t[c]) S_{t-1}[n, c] + key_t[n] written_t[c]
    o_t[c] = sum_n query_t[n] S_t[n, c]

Since both a channel and a state decay by themselves, tokens of a chunk are no product of matrices: an associative scan
combines their pairs (decay, update), and a loop carries the state from chunk to chunk. States of single tokens exist
within one chunk only, in the backward pass too. A token with step 0 and nothing written leaves the state as it is.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32

from eqx_decoders.context import Execution
from eqx_decoders.layers.recurrent.scans.sharded_scan import states_of_pieces
from eqx_decoders.sharding.axes import names_of


S = TypeVar("S")
CHUNK = 32  # tokens whose states are in memory together


def selective_scan(
    steps: Float32[Array, "batch length channels"],
    written: Float32[Array, "batch length channels"],
    key: Float[Array, "batch length key_dim"],
    query: Float[Array, "batch length key_dim"],
    rates: Float32[Array, "key_dim channels"],
    state: Float32[Array, "batch key_dim channels"] | None = None,
    resets: Bool[Array, "batch length"] | None = None,
    chunk: int = CHUNK,
) -> tuple[Float32[Array, "batch length channels"], Float32[Array, "batch key_dim channels"]]:
    """Return outputs, and the state after the last token.

    **Arguments:**

    - `steps`: at least 0. `rates`: at most 0.
    - `state`: before the first token; None for zeros.
    - `resets`: the first tokens of documents: what came before them is forgotten.
    - `chunk`: tokens that are computed at once.
    """
    batch, _, channels = written.shape
    start = jnp.zeros((batch, key.shape[2], channels), jnp.float32) if state is None else state
    key, query = key.astype(jnp.float32), query.astype(jnp.float32)

    def advance(state: Array, tokens: tuple) -> tuple[Array, Array]:
        return _advance(rates, state, *tokens)

    end, out = over_chunks(advance, start, (steps, written, key, query, resets), chunk)
    return out, end


def over_chunks(
    advance: Callable[[S, tuple], tuple[S, Any]], start: S, tokens: tuple, chunk: int, empty: tuple | None = None
) -> tuple[S, Any]:
    """Return the last state of `advance(state, tokens)`, chunk by chunk, and its results of all tokens.

    `tokens` are arrays [batch, length, …] or None, which it takes as [chunk, batch, …], and so are its results.
    `empty` has the value of each for a token that is none; zeros by default.
    """
    batch, length = tokens[0].shape[:2]
    chunk, fills = min(chunk, length), (0,) * len(tokens) if empty is None else empty
    advance = jax.checkpoint(advance)

    def cut(x: Array | None, fill: Any) -> Array | None:
        if x is None:
            return None
        widths = ((0, 0), (0, -length % chunk)) + ((0, 0),) * (x.ndim - 2)
        filled = jnp.pad(x, widths, constant_values=fill)
        return jnp.moveaxis(filled.reshape(batch, -1, chunk, *x.shape[2:]), 0, 2)

    def joined(x: Array) -> Array:
        return jnp.moveaxis(x, 2, 0).reshape(batch, -1, *x.shape[3:])[:, :length]

    pieces = tuple(map(cut, tokens, fills))
    if chunk == length:  # without a loop: decoding reads a slice of all layers' states where it is
        end, out = advance(start, jax.tree.map(lambda x: x[0], pieces))
        return end, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), out)
    end, out = lax.scan(advance, start, pieces)
    return end, jax.tree.map(joined, out)


def _advance(
    rates: Float32[Array, "key_dim channels"],
    state: Float32[Array, "batch key_dim channels"],
    steps: Float32[Array, "chunk batch channels"],
    written: Float32[Array, "chunk batch channels"],
    key: Float32[Array, "chunk batch key_dim"],
    query: Float32[Array, "chunk batch key_dim"],
    resets: Bool[Array, "chunk batch"] | None,
) -> tuple[Float32[Array, "batch key_dim channels"], Float32[Array, "chunk batch channels"]]:
    """Return the state after a chunk, and the outputs of its tokens."""
    decay = jnp.exp(rates[None, None] * steps[:, :, None])
    if resets is not None:
        decay = jnp.where(resets[:, :, None, None], 0.0, decay)
    update = key[..., None] * written[:, :, None]
    first = update[:1] + decay[:1] * state[None]  # all that comes before is part of the first token's update
    _, states = lax.associative_scan(_both, (decay, jnp.concatenate([first, update[1:]])))
    return states[-1], (query[..., None] * states).sum(2)


def _both(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return decay and update of two pieces, one after the other."""
    return one[0] * other[0], other[0] * one[1] + other[1]


def scan_on_mesh(
    steps: Float32[Array, "batch length channels"],
    written: Float32[Array, "batch length channels"],
    key: Float[Array, "batch length key_dim"],
    query: Float[Array, "batch length key_dim"],
    rates: Float32[Array, "key_dim channels"],
    state: Float32[Array, "batch key_dim channels"] | None = None,
    resets: Bool[Array, "batch length"] | None = None,
    *,
    execution: Execution,
) -> tuple[Float32[Array, "batch length channels"], Float32[Array, "batch key_dim channels"]]:
    """Run `selective_scan` on the mesh of `execution`.

    Where it splits rows, each device runs its piece twice: for the state at its end if there were none before, which
    is gathered beside the piece's decay, and then from the state that follows. No token leaves its device.
    """
    layout, arrays = execution.layout, (steps, written, key, query, rates, state, resets)
    rows, length, channels = map(names_of, layout.activation_spec("batch length channels", written.shape))
    if layout.single or not length:
        return selective_scan(*arrays)

    def run(steps, written, key, query, rates, state, resets):
        piece = steps, written, key, query, rates
        _, end = selective_scan(*piece, None, resets)
        decay = jnp.exp(rates[None] * steps.sum(1)[:, None])
        if resets is not None:
            decay = jnp.where(resets.any(1)[:, None, None], 0.0, decay)
        start = jnp.zeros_like(end) if state is None else state
        start, end = states_of_pieces(start, (decay, end), lambda state, piece: piece[0] * state + piece[1], length)
        out, _ = selective_scan(*piece, start, resets)
        return out, end

    # named, too, are mesh axes of one device: over what no name splits gradients are summed
    rows = (*rows, *(name for name, size in layout.mesh.shape.items() if size == 1))
    tokens, keys = PartitionSpec(rows, length, channels), PartitionSpec(rows, length)
    states, by_channel = PartitionSpec(rows, None, channels), PartitionSpec(None, channels)
    specs = (tokens, tokens, keys, keys, by_channel, states, keys)
    return layout.shard_map(run, specs, (tokens, states))(*arrays)
