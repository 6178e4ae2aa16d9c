"""Ring attention (Liu et al., 2023): key/value shards travel around a ring of devices, which attend to one at a time.

    out = sum_i out_i exp(lse_i - lse),    lse = logsumexp_i lse_i,    i: shards of the keys of a sequence

A device never stores more keys of a sequence than its own shard, the current one and the arriving one. The backward
pass sends keys and values around the ring a second time. As lse over all keys is known by then, a device computes the
gradients of a shard at once. The gradients of keys and values travel with them, in float32, and finally return to the
shard's device.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from eqx_decoders.layers.attention.kernels.call import AttentionInputs, AttentionOptions
from eqx_decoders.layers.attention.kernels.chunked import may_see
from eqx_decoders.layers.attention.kernels.common import Result, make_cotangents
from eqx_decoders.layers.attention.kernels.registry import attend_gradients, merge, run_kernel
from eqx_decoders.layers.attention.kernels.selection import Selected, map_keys
from eqx_decoders.layers.mask import AttentionPositions
from eqx_decoders.remat import save
from eqx_decoders.sharding.links import send


UNROLLED_SHARDS = 4  # unroll the loop over at most this many shards: XLA then removes sends of arrays that are not used


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """Ring of devices that send keys and values to one another.

    Groups of neighboring devices may have the same tokens with different heads. Each group has one shard of the
    sequence, and a device sends to the corresponding device of the next group.

    **Arguments:**

    - `axes`: mesh axes over which a sequence is sharded.
    - `num_devices`: number of devices along these axes.
    - `group_size`: number of devices with the same tokens.
    - `visible_shards`: number of shards to which a device attends: its own and the shards just before it.
    - `kernel`: name of the kernel that attends to a shard.
    - `options`: static options of the attention to one shard; `aligned` applies to a device's own shard.
    """

    axes: tuple[str, ...]
    num_devices: int
    group_size: int
    visible_shards: int
    kernel: str
    options: AttentionOptions

    def send_forward(self, arrays: Any, shards: int = 1) -> Any:
        """Send arrays to the devices whose tokens are `shards` shards later in the sequence (modulo the ring)."""
        pairs = [(index, (index + shards * self.group_size) % self.num_devices) for index in range(self.num_devices)]
        return jax.tree.map(lambda x: send(x, self.axes, pairs), arrays)

    def shard_index(self, distance: Any = 0) -> Array:
        """Return the index of the shard that is `distance` shards before the device's own (modulo the ring)."""
        own_index = lax.axis_index(self.axes) // self.group_size
        return lax.rem(own_index - distance + self.num_devices, self.num_devices // self.group_size)

    def shard_options(self, own: bool) -> AttentionOptions:
        """Return the options for a device's own shard, or for the shard of another device."""
        return dataclasses.replace(self.options, aligned=own and self.options.aligned)


def attend_in_ring(ring: Ring, inputs: AttentionInputs) -> Result:
    """Attend with a device's queries to the complete sequence, as `attend` defines it, inside `jax.shard_map`.

    Keys and values are the device's own shard. Key positions, key segments and the selection are those of the complete
    sequence. Saving "context" (out and lse) under rematerialization saves the complete forward pass.
    """
    query, key, value, positions, selected, *_ = inputs
    results: Any = _attend(ring, query, key, value, positions, selected, inputs.slopes)
    return results


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    ring: Ring,
    query: Array,
    key: Array,
    value: Array,
    positions: AttentionPositions,
    selected: Selected | None,
    slopes: Array | None,
):
    return _forward(ring, query, key, value, positions, selected, slopes)


def _attend_fwd(ring: Ring, *inputs: Any):
    out, lse = (save(x, "context") for x in _forward(ring, *inputs))
    return (out, lse), (*inputs, out, lse)


def _attend_bwd(ring: Ring, residuals: tuple, bars: tuple):
    *inputs, out, lse = residuals
    grads = _backward(ring, inputs, make_cotangents((out, lse), bars))
    return *(grad.astype(x.dtype) for grad, x in zip(grads, residuals[:3], strict=True)), None, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


# In the functions below `keys` are the keys and values of one shard, and `distance` is the number of shards from that
# shard to the device's own.


def _forward(ring, query, key, value, positions, selected, slopes) -> Result:
    def attend_to_shard(keys: tuple[Array, Array], distance: Any, own: bool = False) -> Result:
        shard_positions, shard_selected = _slice_shard(ring.shard_index(distance), key.shape[1], positions, selected)
        inputs = AttentionInputs(query, *keys, shard_positions, shard_selected, slopes=slopes)
        out, lse = run_kernel(inputs, ring.shard_options(own), ring.kernel)
        return out.astype(jnp.float32), lse

    def step(carry, distance):
        keys, total = carry
        next_keys = ring.send_forward(keys)
        total = _if_visible(
            ring, distance, key, positions, lambda: merge([total, attend_to_shard(keys, distance)]), total
        )
        return (next_keys, total), None

    total = attend_to_shard((key, value), 0, own=True)
    if ring.visible_shards > 1:
        total = _scan_shards(ring, step, (ring.send_forward((key, value)), total))[1]
    return total[0].astype(query.dtype), total[1]


def _backward(ring, inputs, cotangents) -> tuple[Array, Array, Array]:
    query, key, value, positions, selected, slopes = inputs

    def gradients(keys: tuple[Array, Array], distance: Any, own: bool = False):
        shard_positions, shard_selected = _slice_shard(ring.shard_index(distance), key.shape[1], positions, selected)
        inputs = AttentionInputs(query, *keys, shard_positions, shard_selected, slopes=slopes)
        return attend_gradients(inputs, ring.shard_options(own), cotangents, ring.kernel)

    def add_gradients(keys: tuple[Array, Array], distance: Any, sums: Any):
        def added():
            return jax.tree.map(jnp.add, sums, gradients(keys, distance))

        return _if_visible(ring, distance, key, positions, added, sums)

    def step(carry, distance):
        keys, (query_bar, *key_value_bars) = carry
        next_keys = ring.send_forward(keys)
        # `key_value_bars` come from the device that had `keys` in the previous step
        sums = (query_bar, *ring.send_forward(key_value_bars))
        return (next_keys, add_gradients(keys, distance, sums)), None

    query_bar, *own_key_value_bars = own_gradients = gradients((key, value), 0, own=True)
    if ring.visible_shards == 1:
        return own_gradients
    keys = ring.send_forward((key, value))
    next_keys = ring.send_forward(keys) if ring.visible_shards > 2 else keys
    sums = add_gradients(keys, 1, (query_bar, *map(jnp.zeros_like, own_key_value_bars)))
    query_bar, *key_value_bars = _scan_shards(ring, step, (next_keys, sums), 2)[1]
    returned_bars = ring.send_forward(key_value_bars, 1 - ring.visible_shards)
    key_bar, value_bar = map(jnp.add, own_key_value_bars, returned_bars)
    return query_bar, key_bar, value_bar


def _scan_shards(ring: Ring, step: Any, carry: Any, first: int = 1) -> Any:
    """Run `step(carry, distance)` for the distances from `first` to the last visible shard; return the last carry."""
    distances = jnp.arange(first, ring.visible_shards, dtype=jnp.int32)
    if len(distances) == 0:
        return carry
    return lax.scan(step, carry, distances, unroll=ring.visible_shards <= UNROLLED_SHARDS)[0]


def _slice_shard(
    shard: Int[Array, ""], size: int, positions: AttentionPositions, selected: Selected | None
) -> tuple[AttentionPositions, Any]:
    """Slice key positions, key segments and the selection of a complete sequence to the keys of one shard."""

    def take(x: Array | None, axis: int) -> Any:
        return None if x is None else lax.dynamic_slice_in_dim(x, shard * size, size, axis)

    key_positions = positions.key_positions
    shard_positions = positions._replace(
        key_positions=take(key_positions, 1), key_segments=take(positions.key_segments, 1)
    )
    return shard_positions, None if selected is None else map_keys(take, selected, key_positions.shape[1])


def _if_visible(
    ring: Ring, distance: Any, key: Array, positions: AttentionPositions, compute: Any, otherwise: Any
) -> Any:
    """Return `compute()`, or `otherwise` if no query of the device sees a key of the shard."""
    shard_positions, _ = _slice_shard(ring.shard_index(distance), key.shape[1], positions, None)
    return lax.cond(may_see(ring.options.mask, shard_positions), compute, lambda: otherwise)
