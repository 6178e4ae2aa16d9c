"""Selective scan of Mamba (Gu & Dao 2023): an elementwise recurrence with a decay per channel and state element.

    S_t[n, c] = exp(rates[n, c] steps_t[c]) S_{t-1}[n, c] + key_t[n] written_t[c]
    o_t[c] = sum_n query_t[n] S_t[n, c]

Each element of the state has its own decay, so a chunk cannot be computed by matrix products. Instead, an associative
scan combines the pairs (decay, update) of its tokens, and a loop carries the state from chunk to chunk. The states of
single tokens exist only for one chunk at a time, in the backward pass too. A token with step size 0 and written value 0
leaves the state unchanged.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32

from eqx_decoders.context import Execution
from eqx_decoders.layers.recurrent.scans.sharded_scan import states_of_shards
from eqx_decoders.sharding.axes import names_of


State = TypeVar("State")
CHUNK = 32  # tokens whose states are in memory at the same time


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

    - `steps`: step sizes dt, at least 0.
    - `rates`: decay rates, at most 0 (Mamba's A).
    - `state`: state before the first token; None means zeros.
    - `resets`: True for the first token of each document; the state is zeroed before these tokens.
    - `chunk`: tokens per chunk.
    """
    batch, _, channels = written.shape
    start = jnp.zeros((batch, key.shape[2], channels), jnp.float32) if state is None else state
    key, query = key.astype(jnp.float32), query.astype(jnp.float32)

    def advance(state: Array, tokens: tuple) -> tuple[Array, Array]:
        return _advance(rates, state, *tokens)

    end, out = scan_chunks(advance, start, (steps, written, key, query, resets), chunk)
    return out, end


def scan_chunks(
    advance: Callable[[State, tuple], tuple[State, Any]],
    start: State,
    tokens: tuple,
    chunk: int,
    padding: tuple | None = None,
) -> tuple[State, Any]:
    """Scan `advance(state, tokens) -> (state, outputs)` over chunks; return the last state and all outputs.

    `tokens` holds arrays [batch, length, …] or None. `advance` receives them as [chunk, batch, …], and returns outputs
    in the same order of axes; the outputs of `scan_chunks` are [batch, length, …]. `padding` holds the value with which
    each array is padded to a multiple of the chunk size; None means zeros.
    """
    batch, length = tokens[0].shape[:2]
    chunk = min(chunk, length)
    padding = (0,) * len(tokens) if padding is None else padding
    advance = jax.checkpoint(advance)

    def split(x: Array | None, pad_value: Any) -> Array | None:
        if x is None:
            return None
        widths = ((0, 0), (0, -length % chunk)) + ((0, 0),) * (x.ndim - 2)
        padded = jnp.pad(x, widths, constant_values=pad_value)
        return jnp.moveaxis(padded.reshape(batch, -1, chunk, *x.shape[2:]), 0, 2)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 2, 0).reshape(batch, -1, *x.shape[3:])[:, :length]

    chunks = tuple(map(split, tokens, padding))
    if chunk == length:  # without a loop, decoding reads this layer's slice of the stacked states without a copy
        end, out = advance(start, jax.tree.map(lambda x: x[0], chunks))
        return end, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), out)
    end, out = lax.scan(advance, start, chunks)
    return end, jax.tree.map(join, out)


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
    first = update[:1] + decay[:1] * state[None]  # the previous state enters through the first token's update
    _, states = lax.associative_scan(_compose, (decay, jnp.concatenate([first, update[1:]])))
    return states[-1], (query[..., None] * states).sum(2)


def _compose(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Compose two affine maps (decay, update) of the state, of which `first` is applied first."""
    return first[0] * second[0], second[0] * first[1] + second[1]


def selective_scan_on_mesh(
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

    If the mesh shards sequences, each device scans its shard twice. The first scan starts from a zero state; its last
    state and the total decay of the shard are all-gathered, which gives the state before each shard. The second scan
    starts from that state. Tokens are not communicated.
    """
    layout, arrays = execution.layout, (steps, written, key, query, rates, state, resets)
    spec = layout.activation_spec("batch length channels", written.shape)
    batch_axes, length_axes, channel_axes = map(names_of, spec)
    if layout.single or not length_axes:
        return selective_scan(*arrays)

    def run(steps, written, key, query, rates, state, resets):
        inputs = steps, written, key, query, rates
        _, end = selective_scan(*inputs, None, resets)
        decay = jnp.exp(rates[None] * steps.sum(1)[:, None])
        if resets is not None:
            decay = jnp.where(resets.any(1)[:, None, None], 0.0, decay)
        start = jnp.zeros_like(end) if state is None else state
        start, end = states_of_shards(
            start, (decay, end), lambda state, shard: shard[0] * state + shard[1], length_axes
        )
        out, _ = selective_scan(*inputs, start, resets)
        return out, end

    batch_axes = layout.with_unit_axes(batch_axes)
    tokens = PartitionSpec(batch_axes, length_axes, channel_axes)
    keys = PartitionSpec(batch_axes, length_axes)
    states = PartitionSpec(batch_axes, None, channel_axes)
    by_channel = PartitionSpec(None, channel_axes)
    specs = (tokens, tokens, keys, keys, by_channel, states, keys)
    return layout.shard_map(run, specs, (tokens, states))(*arrays)
