"""Ring attention: keys and values travel among devices, and each attends to the piece that it has (Liu et al., 2023).

    out = sum_i out_i exp(lse_i - lse),    lse = logsumexp_i lse_i,    i: the pieces of a row's keys

A device never has more of a row's keys than its own piece and the arriving one. The backward pass sends keys and
values round once more: with lse of all keys each piece has its gradients at once, and the gradients of keys and
values travel with them, in f32, and home.
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


WRITTEN_OUT = 4  # rings of up to so many pieces are no loop: nothing then travels that nobody needs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """Ring of devices that send keys and values to one another; neighbors may hold the same tokens of other heads.

    **Arguments:**

    - `axes`: the mesh axes over which a row is split.
    - `devices`: number of devices along these axes.
    - `group`: number of devices with the same tokens.
    - `pieces`: number of pieces of a row to which a device attends: its own, and the pieces before it.
    - `kernel`: name of the kernel that attends to a piece.
    - `options`: static options of each piece; `aligned` is about a device's queries and its own piece.
    """

    axes: tuple[str, ...]
    devices: int
    group: int
    pieces: int
    kernel: str
    options: AttentionOptions

    def pass_on(self, arrays: Any, pieces: int = 1) -> Any:
        """Send arrays to the devices so many pieces on, which are later in the row."""
        pairs = [(index, (index + pieces * self.group) % self.devices) for index in range(self.devices)]
        return jax.tree.map(lambda x: send(x, self.axes, pairs), arrays)

    def piece(self, before: Any = 0) -> Array:
        """Return the number of a device's own piece, or of one before it."""
        return lax.rem(lax.axis_index(self.axes) // self.group - before + self.devices, self.devices // self.group)

    def piece_options(self, own: bool) -> AttentionOptions:
        """Return the options for a device's own piece, or for another device's."""
        return dataclasses.replace(self.options, aligned=own and self.options.aligned)


def attend_in_ring(ring: Ring, inputs: AttentionInputs) -> Result:
    """Attend with a device's queries to a whole row, as `attend` defines it; to be called in `jax.shard_map`.

    Key positions and segments in `inputs` are of the whole row, and so is the selection. Under remat, saving "context"
    (out and lse) saves the whole forward pass.
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
    row_positions: AttentionPositions,
    selected: Selected | None,
    slopes: Array | None,
):
    return _forward(ring, query, key, value, row_positions, selected, slopes)


def _attend_fwd(ring: Ring, *inputs: Any):
    out, lse = (save(x, "context") for x in _forward(ring, *inputs))
    return (out, lse), (*inputs, out, lse)


def _attend_bwd(ring: Ring, residuals: tuple, bars: tuple):
    *inputs, out, lse = residuals
    grads = _backward(ring, inputs, make_cotangents((out, lse), bars))
    return *(grad.astype(x.dtype) for grad, x in zip(grads, residuals[:3], strict=True)), None, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(ring, query, key, value, row_positions, selected, slopes) -> Result:
    def results(keys: tuple[Array, Array], before: Any, own: bool = False) -> Result:
        positions, chosen = _of_piece(ring.piece(before), key.shape[1], row_positions, selected)
        inputs = AttentionInputs(query, *keys, positions, chosen, slopes=slopes)
        out, lse = run_kernel(inputs, ring.piece_options(own), ring.kernel)
        return out.astype(jnp.float32), lse

    def step(carry, before):
        keys, total = carry
        following = ring.pass_on(keys)
        total = _if_seen(ring, before, key, row_positions, lambda: merge([total, results(keys, before)]), total)
        return (following, total), None

    total = results((key, value), 0, own=True)
    if ring.pieces > 1:
        total = _each_piece(ring, step, (ring.pass_on((key, value)), total))[1]
    return total[0].astype(query.dtype), total[1]


def _backward(ring, inputs, cotangents) -> tuple[Array, Array, Array]:
    query, key, value, row_positions, selected, slopes = inputs

    def gradients(keys: tuple[Array, Array], before: Any, own: bool = False):
        positions, chosen = _of_piece(ring.piece(before), key.shape[1], row_positions, selected)
        inputs = AttentionInputs(query, *keys, positions, chosen, slopes=slopes)
        return attend_gradients(inputs, ring.piece_options(own), cotangents, ring.kernel)

    def add(keys: tuple[Array, Array], before: Any, sums: Any):
        def more():
            return jax.tree.map(jnp.add, sums, gradients(keys, before))

        return _if_seen(ring, before, key, row_positions, more, sums)

    def step(carry, before):
        keys, (query_bar, *traveling) = carry
        following = ring.pass_on(keys)  # gradients arrive where the keys are that they belong to
        return (following, add(keys, before, (query_bar, *ring.pass_on(traveling)))), None

    query_bar, *own_key_value = of_own_piece = gradients((key, value), 0, own=True)
    if ring.pieces == 1:
        return of_own_piece
    keys = ring.pass_on((key, value))
    following = ring.pass_on(keys) if ring.pieces > 2 else keys
    sums = add(keys, 1, (query_bar, *map(jnp.zeros_like, own_key_value)))
    query_bar, *traveling = _each_piece(ring, step, (following, sums), 2)[1]
    key_bar, value_bar = map(jnp.add, own_key_value, ring.pass_on(traveling, 1 - ring.pieces))
    return query_bar, key_bar, value_bar


def _each_piece(ring: Ring, step: Any, carry: Any, first: int = 1) -> Any:
    """Fold `step(carry, before)` over the pieces before a device's own, from `first` on."""
    before = jnp.arange(first, ring.pieces, dtype=jnp.int32)
    return lax.scan(step, carry, before, unroll=ring.pieces <= WRITTEN_OUT)[0] if len(before) else carry


def _of_piece(
    piece: Int[Array, ""], size: int, row_positions: AttentionPositions, selected: Selected | None
) -> tuple[AttentionPositions, Any]:
    """Return the positions of queries and of the keys of a piece, and the selection among these keys."""

    def cut(x: Array | None, axis: int) -> Any:
        return None if x is None else lax.dynamic_slice_in_dim(x, piece * size, size, axis)

    row = row_positions.key_positions
    positions = row_positions._replace(key_positions=cut(row, 1), key_segments=cut(row_positions.key_segments, 1))
    return positions, None if selected is None else map_keys(cut, selected, row.shape[1])


def _if_seen(ring: Ring, before: Any, key: Array, row_positions: AttentionPositions, more: Any, found: Any) -> Any:
    """Return `more()`, or the given results where no query of a device sees a key of the piece."""
    piece_positions, _ = _of_piece(ring.piece(before), key.shape[1], row_positions, None)
    return lax.cond(may_see(ring.options.mask, piece_positions), more, lambda: found)
