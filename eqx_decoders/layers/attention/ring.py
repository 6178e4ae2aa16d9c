"""Ring attention: keys and values go round among devices, and each attends to those that it has (Liu et al., 2023).

    out = sum_i out_i exp(lse_i - lse),    lse = logsumexp_i lse_i,    i: the pieces of a row's keys

A device never has more of a row's keys than its own and those that arrive. The backward pass sends keys and values
round once more: with lse of all keys each piece has its gradients at once, and those of keys and values travel with
them, in f32, and home.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eqx_decoders.layers.attention.kernels.chunked import may_see
from eqx_decoders.layers.attention.kernels.common import Result, cotangents
from eqx_decoders.layers.attention.kernels.registry import attend, attend_gradients, merge
from eqx_decoders.layers.mask import AttentionPositions, Mask
from eqx_decoders.remat import save


WRITTEN_OUT = 4  # rings of up to so many pieces are no loop: nothing then travels that nobody needs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """Devices that send keys and values to one another; ones side by side may hold the same tokens of other heads.

    **Arguments:**

    - `axes`: the mesh axes over which a row is split.
    - `devices`: how many devices these are.
    - `group`: how many of them have the same tokens.
    - `pieces`: how many pieces of a row a device attends to: its own, and so many less one before it.
    - `mask`, `soft_cap`, `kernel`, `platform`: as `attend` has them.
    - `aligned`: whether queries and keys of a piece are the same tokens in the same order.
    """

    axes: tuple[str, ...]
    devices: int
    group: int
    pieces: int
    mask: Mask
    soft_cap: float | None
    kernel: str
    platform: str
    aligned: bool

    def pass_on(self, arrays: Any, pieces: int = 1) -> Any:
        """To the devices so many pieces on, which are behind a device's own in the row."""
        there = [(index, (index + pieces * self.group) % self.devices) for index in range(self.devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, there), arrays)

    def piece(self, before: Any = 0) -> Array:
        """The number of a device's own piece, or of one before it."""
        return lax.rem(lax.axis_index(self.axes) // self.group - before + self.devices, self.devices // self.group)

    def options(self, own: bool) -> dict[str, Any]:
        """What `attend` needs beside arrays."""
        options = dict(mask=self.mask, soft_cap=self.soft_cap, kernel=self.kernel, platform=self.platform)
        return options | dict(local=True, aligned=own and self.aligned)


def attend_in_ring(
    ring: Ring,
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    value: Float[Array, "batch kv_length kv_heads value_dim"],
    places: AttentionPositions,
    selected: Bool[Array, "batch selected_heads length row"] | None,
) -> Result:
    """Attention of a device's queries to a whole row, as `attend` defines it; to be called in `jax.shard_map`.

    Of keys `places` has those of the whole row, one piece behind the other; so has `selected`. Under remat, saving
    "context" (out and lse) saves the whole forward pass.
    """
    results: Any = _attend(ring, query, key, value, places, selected)
    return results


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, query: Array, key: Array, value: Array, places: AttentionPositions, selected: Array | None):
    return _forward(ring, query, key, value, places, selected)


def _attend_fwd(ring: Ring, query: Array, key: Array, value: Array, places: AttentionPositions, selected: Array | None):
    out, lse = (save(x, "context") for x in _forward(ring, query, key, value, places, selected))
    return (out, lse), (query, key, value, places, selected, out, lse)


def _attend_bwd(ring: Ring, kept: tuple, bars: tuple):
    query, key, value, places, selected, out, lse = kept
    grads = _backward(ring, query, key, value, places, selected, cotangents((out, lse), bars))
    return *(grad.astype(x.dtype) for grad, x in zip(grads, kept[:3], strict=True)), None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(ring, query, key, value, places, selected) -> Result:
    def results(keys: tuple[Array, Array], before: Any, own: bool = False) -> Result:
        here, chosen = _of_piece(ring.piece(before), key.shape[1], places, selected)
        out, lse = attend(query, *keys, selected=chosen, **here._asdict(), **ring.options(own))
        return out.astype(jnp.float32), lse

    def step(carry, before):
        keys, found = carry
        following = ring.pass_on(keys)
        found = _if_seen(ring, before, key, places, lambda: merge([found, results(keys, before)]), found)
        return (following, found), None

    found = results((key, value), 0, own=True)
    if ring.pieces > 1:
        found = _each_piece(ring, step, (ring.pass_on((key, value)), found))[1]
    return found[0].astype(query.dtype), found[1]


def _backward(ring, query, key, value, places, selected, known) -> tuple[Array, Array, Array]:
    def gradients(keys: tuple[Array, Array], before: Any, own: bool = False):
        here, chosen = _of_piece(ring.piece(before), key.shape[1], places, selected)
        return attend_gradients(query, *keys, known, here, chosen, **ring.options(own))

    def add(keys: tuple[Array, Array], before: Any, sums: Any):
        def more():
            return jax.tree.map(jnp.add, sums, gradients(keys, before))

        return _if_seen(ring, before, key, places, more, sums)

    def step(carry, before):
        keys, (query_bar, *travelling) = carry
        following = ring.pass_on(keys)  # gradients arrive where the keys are that they belong to
        return (following, add(keys, before, (query_bar, *ring.pass_on(travelling)))), None

    query_bar, *own = found = gradients((key, value), 0, own=True)
    if ring.pieces == 1:
        return found
    keys = ring.pass_on((key, value))
    following = ring.pass_on(keys) if ring.pieces > 2 else keys
    sums = add(keys, 1, (query_bar, *map(jnp.zeros_like, own)))
    query_bar, *travelling = _each_piece(ring, step, (following, sums), 2)[1]
    key_bar, value_bar = map(jnp.add, own, ring.pass_on(travelling, 1 - ring.pieces))
    return query_bar, key_bar, value_bar


def _each_piece(ring: Ring, step: Any, carry: Any, first: int = 1) -> Any:
    """Fold `step(carry, before)` over the pieces before a device's own, from `first` on."""
    before = jnp.arange(first, ring.pieces, dtype=jnp.int32)
    return lax.scan(step, carry, before, unroll=ring.pieces <= WRITTEN_OUT)[0] if len(before) else carry


def _of_piece(
    piece: Int[Array, ""], size: int, places: AttentionPositions, selected: Array | None
) -> tuple[AttentionPositions, Array | None]:
    """Where the keys of a piece stand, and which of them are selected."""

    def cut(x: Array | None, axis: int) -> Any:
        return None if x is None else lax.dynamic_slice_in_dim(x, piece * size, size, axis)

    places = places._replace(key_positions=cut(places.key_positions, 1), key_segments=cut(places.key_segments, 1))
    return places, cut(selected, 3)


def _if_seen(ring: Ring, before: Any, key: Array, places: AttentionPositions, more: Any, found: Any) -> Any:
    """`more()`, or what is `found` already where no query of a device sees a key of the piece."""
    here, _ = _of_piece(ring.piece(before), key.shape[1], places, None)
    return lax.cond(may_see(ring.mask, here), more, lambda: found)
