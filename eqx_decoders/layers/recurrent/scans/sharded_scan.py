"""Recurrences of rows that a mesh splits: each device runs its piece, and then their effects on the state are combined.

A piece of a row maps the state S before it to

    S' = A S + B,    o_t = b_t + a_t^T S,

since the recurrence is linear in S. In the gated delta rule the columns of a state are independent, so that one run
with the state [0 | I] and values [v | 0] ends in [B | A] and gives [b | a]. Without a correction A is a product of
decays. A and B of all pieces are gathered, a matrix or two per head and row; no token leaves its device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32

from eqx_decoders.context import Execution
from eqx_decoders.layers.attention.kernels.common import used_heads
from eqx_decoders.layers.recurrent.kernels.pallas_scan import CHUNK
from eqx_decoders.layers.recurrent.scans.recurrence import delta_rule
from eqx_decoders.sharding.axes import names_of
from eqx_decoders.sharding.chips import compute_capability


T = TypeVar("T")
_EXACT = lax.Precision.HIGHEST  # states pass from piece to piece


def recur_on_mesh(
    query: Float[Array, "batch length key_heads key_dim"],
    key: Float[Array, "batch length key_heads key_dim"],
    value: Float[Array, "batch length heads value_dim"],
    log_decay: Float[Array, "batch length heads decay_dim"],
    beta: Float[Array, "batch length heads"] | None,
    state: Float32[Array, "batch heads key_dim value_dim"] | None = None,
    resets: Bool[Array, "batch length"] | None = None,
    *,
    execution: Execution,
) -> tuple[
    Float[Array, "batch length heads value_dim"],
    Float32[Array, "batch length heads value_dim"],
    Float32[Array, "batch heads key_dim value_dim"],
]:
    """Run `delta_rule` on the mesh of `execution`."""
    layout, arrays = execution.layout, (query, key, value, log_decay, beta, state, resets)
    rows, length, heads = map(names_of, layout.activation_spec("batch length heads value_dim", value.shape)[:3])
    # a kernel sees a device's own arrays, and by their shapes it is chosen
    backend, count = layout.backend, value.shape[1]
    may_have_kernel = (backend.pallas_tpu and count >= CHUNK) or (backend.pallas_gpu and count > 1)
    device: dict[str, Any] = dict(platform=layout.platform, compute_capability=compute_capability(layout.device))
    if layout.single or not (length or may_have_kernel):
        return delta_rule(*arrays, **device)
    key_heads = names_of(layout.activation_spec("batch length key_heads key_dim", key.shape)[2])
    others, groups = heads[len(key_heads) :], value.shape[2] // key.shape[2]
    if others and heads[: len(key_heads)] != key_heads:
        key_heads, others = (), heads

    def run(query, key, value, log_decay, beta, state, resets):
        if others:
            query, key = (used_heads(x, others, value.shape[2], groups) for x in (query, key))
        shape = value.shape[0], value.shape[2], key.shape[3], value.shape[3]
        if not length:
            return delta_rule(query, key, value, log_decay, beta, state, resets, **device)
        start = jnp.zeros(shape, jnp.float32) if state is None else state
        piece = _run_piece(query, key, value, log_decay, beta, resets, device)
        start, end = states_of_pieces(start, (piece.transition, piece.end), _moved, length)
        out, written = (_with_state(x, start) for x in (piece.out, piece.written))
        return out.astype(value.dtype), written, end

    # named, too, are mesh axes of one device: over what no name splits gradients are summed
    rows = (*rows, *(name for name, size in layout.mesh.shape.items() if size == 1))
    tokens, keys = PartitionSpec(rows, length, heads), PartitionSpec(rows, length, key_heads)
    states = PartitionSpec(rows, heads)
    specs = (keys, keys, tokens, tokens, tokens, states, PartitionSpec(rows, length))
    return layout.shard_map(run, specs, (tokens, tokens, states))(*arrays)


_Affine = tuple[Array, Array | None]  # a result without a state before the piece, and the vectors that read the state


class _Piece(NamedTuple):
    """Effect of a piece of a row on the state before it.

    - `out`, `written`: b [batch, length, heads, value_dim] and a [batch, length, heads, key_dim].
    - `end`: B.
    - `transition`: A, [batch, heads, key_dim, key_dim], or its diagonal, [batch, heads, key_dim or 1].
    """

    out: _Affine
    written: _Affine
    end: Float32[Array, "batch heads key_dim value_dim"]
    transition: Float32[Array, "batch heads ..."]


def _run_piece(query, key, value, log_decay, beta, resets, device: dict[str, Any]) -> _Piece:
    value = value.astype(jnp.float32)
    if beta is None:
        out, written, end = delta_rule(query, key, value, log_decay, None, None, resets, **device)
        fade = _fade(log_decay, resets)
        readout = jnp.repeat(query.astype(jnp.float32), value.shape[2] // query.shape[2], axis=2) * fade
        return _Piece((out, readout), (written, None), end, fade[:, -1])
    batch, _, heads, value_dim = value.shape
    key_dim = key.shape[3]
    wide = jnp.concatenate([value, jnp.zeros((*value.shape[:3], key_dim), jnp.float32)], 3)
    one = jnp.broadcast_to(
        jnp.eye(key_dim, value_dim + key_dim, value_dim, jnp.float32), (batch, heads, key_dim, value_dim + key_dim)
    )
    results = delta_rule(query, key, wide, log_decay, beta, one, resets, **device)
    out, written, (end, transition) = ((x[..., :value_dim], x[..., value_dim:]) for x in results)
    return _Piece(out, written, end, transition)


def _fade(log_decay: Array, resets: Array | None) -> Float32[Array, "batch length heads decay_dim"]:
    """Return the remaining share of the state before the piece at each token."""
    fade = jnp.exp(jnp.cumsum(log_decay.astype(jnp.float32), axis=1))
    if resets is None:
        return fade
    return jnp.where((jnp.cumsum(resets, axis=1) > 0)[:, :, None, None], 0.0, fade)


def states_of_pieces(start: T, piece: Any, move: Callable[[T, Any], T], axes: tuple[str, ...]) -> tuple[T, T]:
    """Return the states before a device's piece and after the last one, from the state before the first one.

    A piece that begins in the state S ends in `move(S, piece)`; states and pieces are arrays or trees of them.
    """

    def step(carry, indexed):
        (state, own_state), (index, piece) = carry, indexed
        own = index == lax.axis_index(axes)
        own_state = jax.tree.map(lambda here, known: jnp.where(own, here, known), state, own_state)
        return (move(state, piece), own_state), None

    pieces = jax.tree.map(lambda x: lax.all_gather(x, axes), piece)
    (end, own_state), _ = lax.scan(step, (start, start), (jnp.arange(len(jax.tree.leaves(pieces)[0])), pieces))
    return own_state, end


def _moved(state: Array, piece: tuple[Array, Array]) -> Array:
    transition, end = piece
    if transition.ndim == state.ndim:
        return jnp.einsum("bhkj,bhjv->bhkv", transition, state, precision=_EXACT) + end
    return transition[..., None] * state + end


def _with_state(affine: _Affine, state: Array) -> Array:
    without, readout = affine
    if readout is None:
        return without
    return without + jnp.einsum("blhk,bhkv->blhv", readout, state, preferred_element_type=jnp.float32)
