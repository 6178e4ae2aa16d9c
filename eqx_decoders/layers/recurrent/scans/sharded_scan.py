"""Recurrences over sequences that a mesh shards: each device processes its shard, and only states are communicated.

The recurrence is linear in the state, so a shard maps the state S before it to

    S' = A S + B,    o_t = b_t + a_t^T S.

In the gated delta rule the columns of a state are independent, so one run with the initial state [0 | I] and values
[v | 0] ends in the state [B | A] and returns the outputs [b | a]. In the linear recurrence A is a product of decays. A
and B of all shards are all-gathered: one or two matrices per head and sequence. Tokens are not communicated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32

from eqx_decoders.context import Execution
from eqx_decoders.layers.attention.kernels.common import select_kv_heads
from eqx_decoders.layers.recurrent.kernels.pallas_scan import CHUNK
from eqx_decoders.layers.recurrent.scans.recurrence import delta_rule
from eqx_decoders.sharding.axes import names_of
from eqx_decoders.sharding.chips import compute_capability


State = TypeVar("State")
_EXACT = lax.Precision.HIGHEST  # rounding errors of states would accumulate from shard to shard


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
    value_spec = layout.activation_spec("batch length heads value_dim", value.shape)
    batch_axes, length_axes, head_axes = map(names_of, value_spec[:3])
    # kernels run under shard_map: XLA cannot partition them, and `delta_rule` selects them by the shapes of one device
    backend, num_tokens = layout.backend, value.shape[1]
    may_have_kernel = (backend.pallas_tpu and num_tokens >= CHUNK) or (backend.pallas_gpu and num_tokens > 1)
    device: dict[str, Any] = dict(platform=layout.platform, compute_capability=compute_capability(layout.device))
    if layout.single or not (length_axes or may_have_kernel):
        return delta_rule(*arrays, **device)
    key_head_axes = names_of(layout.activation_spec("batch length key_heads key_dim", key.shape)[2])
    # mesh axes that shard value heads, but not key heads: a device then selects the key heads of its value heads
    value_only_axes = head_axes[len(key_head_axes) :]
    values_per_key = value.shape[2] // key.shape[2]
    if value_only_axes and head_axes[: len(key_head_axes)] != key_head_axes:
        key_head_axes, value_only_axes = (), head_axes

    def run(query, key, value, log_decay, beta, state, resets):
        if value_only_axes:
            query, key = (select_kv_heads(x, value_only_axes, value.shape[2], values_per_key) for x in (query, key))
        shape = value.shape[0], value.shape[2], key.shape[3], value.shape[3]
        if not length_axes:
            return delta_rule(query, key, value, log_decay, beta, state, resets, **device)
        start = jnp.zeros(shape, jnp.float32) if state is None else state
        shard = _run_shard(query, key, value, log_decay, beta, resets, device)
        start, end = states_of_shards(start, (shard.transition, shard.end), _apply_shard, length_axes)
        out, written = (_add_state(x, start) for x in (shard.out, shard.written))
        return out.astype(value.dtype), written, end

    batch_axes = layout.with_unit_axes(batch_axes)
    tokens = PartitionSpec(batch_axes, length_axes, head_axes)
    keys = PartitionSpec(batch_axes, length_axes, key_head_axes)
    states = PartitionSpec(batch_axes, head_axes)
    specs = (keys, keys, tokens, tokens, tokens, states, PartitionSpec(batch_axes, length_axes))
    return layout.shard_map(run, specs, (tokens, tokens, states))(*arrays)


_Affine = tuple[Array, Array | None]  # (b, a): the result is b + a^T S; a=None: the result does not depend on S


class _Shard(NamedTuple):
    """Results of a shard as affine functions of the state S before it; see the module docstring.

    - `out`, `written`: b [batch, length, heads, value_dim] and a [batch, length, heads, key_dim].
    - `end`: B.
    - `transition`: A, [batch, heads, key_dim, key_dim], or its diagonal, [batch, heads, key_dim or 1].
    """

    out: _Affine
    written: _Affine
    end: Float32[Array, "batch heads key_dim value_dim"]
    transition: Float32[Array, "batch heads ..."]


def _run_shard(query, key, value, log_decay, beta, resets, device: dict[str, Any]) -> _Shard:
    value = value.astype(jnp.float32)
    if beta is None:
        out, written, end = delta_rule(query, key, value, log_decay, None, None, resets, **device)
        decay = _decay_from_start(log_decay, resets)
        readout = jnp.repeat(query.astype(jnp.float32), value.shape[2] // query.shape[2], axis=2) * decay
        return _Shard((out, readout), (written, None), end, decay[:, -1])
    batch, _, heads, value_dim = value.shape
    key_dim = key.shape[3]
    extended_value = jnp.concatenate([value, jnp.zeros((*value.shape[:3], key_dim), jnp.float32)], 3)
    extended_state = jnp.broadcast_to(
        jnp.eye(key_dim, value_dim + key_dim, value_dim, jnp.float32), (batch, heads, key_dim, value_dim + key_dim)
    )
    results = delta_rule(query, key, extended_value, log_decay, beta, extended_state, resets, **device)
    out, written, (end, transition) = ((x[..., :value_dim], x[..., value_dim:]) for x in results)
    return _Shard(out, written, end, transition)


def _decay_from_start(log_decay: Array, resets: Array | None) -> Float32[Array, "batch length heads decay_dim"]:
    """Return the decay of the state before the shard up to each token; 0 after a reset."""
    decay = jnp.exp(jnp.cumsum(log_decay.astype(jnp.float32), axis=1))
    if resets is None:
        return decay
    return jnp.where((jnp.cumsum(resets, axis=1) > 0)[:, :, None, None], 0.0, decay)


def states_of_shards(
    start: State, shard: Any, apply: Callable[[State, Any], State], axes: tuple[str, ...]
) -> tuple[State, State]:
    """Return the state before this device's shard, and the state after the last shard.

    Call this under `shard_map`. The descriptions of all shards are all-gathered over the mesh axes `axes`.

    **Arguments:**

    - `start`: state before the first shard, an array or a pytree.
    - `shard`: description of this device's shard, an array or a pytree.
    - `apply`: `(state before a shard, its description) -> state after it`.
    """

    def step(carry, indexed):
        state, own_state = carry
        index, shard = indexed
        is_own = index == lax.axis_index(axes)
        own_state = jax.tree.map(lambda new, old: jnp.where(is_own, new, old), state, own_state)
        return (apply(state, shard), own_state), None

    shards = jax.tree.map(lambda x: lax.all_gather(x, axes), shard)
    (end, own_state), _ = lax.scan(step, (start, start), (jnp.arange(len(jax.tree.leaves(shards)[0])), shards))
    return own_state, end


def _apply_shard(state: Array, shard: tuple[Array, Array]) -> Array:
    transition, end = shard
    if transition.ndim == state.ndim:
        return jnp.einsum("bhkj,bhjv->bhkv", transition, state, precision=_EXACT) + end
    return transition[..., None] * state + end


def _add_state(affine: _Affine, state: Array) -> Array:
    constant, readout = affine
    if readout is None:
        return constant
    return constant + jnp.einsum("blhk,bhkv->blhv", readout, state, preferred_element_type=jnp.float32)
