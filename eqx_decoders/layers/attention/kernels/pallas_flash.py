"""Flash attention in Pallas kernels, with an interval of positions per query as the mask.

Tiles of scores exist on the chip alone (Dao et al., 2022). Here are a call, its gradients and the arrays of its mask.
`pallas_flash_tiles` has the equations, `pallas_flash_tpu` and `pallas_flash_gpu` have the kernels.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Int, Int32

from eqx_decoders.layers.attention.kernels.call import AttentionCall, AttentionInputs
from eqx_decoders.layers.attention.kernels.common import Cotangents, Gradients, Result, make_cotangents
from eqx_decoders.layers.attention.kernels.pallas_flash_tiles import FlashKernels, FlashPlan, fill, fill_length
from eqx_decoders.layers.attention.kernels.selection import KEYS_PER_ROW, Selection, pack_lanes
from eqx_decoders.layers.mask import AttentionPositions, interval
from eqx_decoders.layers.tpu import BlockSizes
from eqx_decoders.sharding.chips import LANES


class _Shown(NamedTuple):
    """What the mask of a call is made of: positions, and of a selection its bits and the groups of keys.

    The backward pass gets these, not what follows from them: that may then leave a loop over layers.
    """

    positions: AttentionPositions
    bits: Int32[Array, "batch selected_heads _ _"] | None = None
    groups: Int[Array, "batch kv_length"] | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _softmax(
    kernels: FlashKernels, plan: FlashPlan, query: Array, key: Array, value: Array, shown: _Shown
) -> tuple[Array, Array]:
    return _forward(kernels, plan, query, key, value, _places(plan, shown))


def _softmax_fwd(kernels: FlashKernels, plan: FlashPlan, query: Array, key: Array, value: Array, shown: _Shown):
    results = _forward(kernels, plan, query, key, value, _places(plan, shown))
    out, lse = (checkpoint_name(x, "context") for x in results)
    return (out, lse), (query, key, value, shown, out, lse)


def _softmax_bwd(kernels: FlashKernels, plan: FlashPlan, residuals: tuple, bars: tuple):
    query, key, value, shown, out, lse = residuals
    cotangents = make_cotangents((out, kernels.from_rows(lse)), (bars[0], kernels.from_rows(bars[1])))
    rows = jnp.concatenate([lse, kernels.rows(cotangents.delta)], 2)
    return *_backward(kernels, plan, query, key, value, _places(plan, shown), cotangents.out_bar, rows, None), None


_softmax.defvjp(_softmax_fwd, _softmax_bwd)


def flash_attention(kernels: FlashKernels, inputs: AttentionInputs, call: AttentionCall) -> Result:
    """Attend as `attend` defines it; on any other platform than the kernels' they are interpreted, slowly.

    Under remat, saving "context" (out and lse) saves the whole forward pass.
    """
    length, plan = inputs.query.shape[1], kernels.make_plan(call)
    results: Any = _softmax(kernels, plan, *_arrays(kernels, plan, inputs), _shown(plan, inputs))
    out, lse = results
    return kernels.restore(out, length), lse[:, :, 0, :length].swapaxes(1, 2)


def flash_gradients(
    kernels: FlashKernels, inputs: AttentionInputs, call: AttentionCall, cotangents: Cotangents
) -> Gradients:
    """Compute gradients as `attend_gradients` defines them."""
    length, kv_length, plan = inputs.query.shape[1], inputs.key.shape[1], kernels.make_plan(call)
    out_bar, *rows = (kernels.arrange(x, plan.query_blocks) for x in cotangents)
    rows = jnp.concatenate([kernels.rows(x) for x in rows], 2)
    places = _places(plan, _shown(plan, inputs))
    grads = _backward(kernels, plan, *_arrays(kernels, plan, inputs), places, out_bar, rows, jnp.float32)
    query_bar, key_bar, value_bar = (
        kernels.restore(x, size) for x, size in zip(grads, (length, kv_length, kv_length), strict=True)
    )
    return query_bar, key_bar, value_bar


@functools.partial(jax.jit, static_argnums=(0, 1))  # a Pallas call by itself is never dropped from a backward pass
def _forward(
    kernels: FlashKernels, plan: FlashPlan, query: Array, key: Array, value: Array, places: tuple[Array, ...]
) -> tuple[Array, Array]:
    """Return out, and lse as a row of each head, `[batch, heads, 1, length]`."""
    heads, length = query.shape[1:3] if kernels.heads_first else query.shape[2:0:-1]
    like_out = "queries", (*query.shape[:3], value.shape[3]), query.dtype
    like_lse = "rows", (query.shape[0], heads, 1, length), jnp.float32
    out, lse = kernels.run(plan, "forward", _operands(plan, query, key, value, places), [like_out, like_lse])
    return out, lse


def _backward(
    kernels: FlashKernels,
    plan: FlashPlan,
    query: Array,
    key: Array,
    value: Array,
    places: tuple[Array, ...],
    out_bar: Array,
    lse_delta: Array,
    dtype: Any,
) -> tuple[Array, Array, Array]:
    """Return the gradients of query, key and value, in a dtype or, for None, in theirs.

    `lse_delta` are the rows lse and delta of `Cotangents`, `[batch, heads, 2, length]`.
    """
    operands = [*_operands(plan, query, key, value, places), ("queries", out_bar), ("rows", lse_delta)]
    like_query, like_key, like_value = ((place, x.shape, dtype or x.dtype) for place, x in operands[:3])
    (query_bar,) = kernels.run(plan, "queries", operands, [like_query])
    key_bar, value_bar = kernels.run(plan, "keys", operands, [like_key, like_value])
    return query_bar, key_bar, value_bar


def _operands(
    plan: FlashPlan, query: Array, key: Array, value: Array, places: tuple[Array, ...]
) -> list[tuple[str, Array]]:
    """Return the arrays that all kernels read, with the places of their blocks."""
    return list(zip(("queries", "keys", "keys", *plan.mask_places), (query, key, value, *places), strict=True))


def _arrays(kernels: FlashKernels, plan: FlashPlan, inputs: AttentionInputs) -> tuple[Array, Array, Array]:
    key, value = (kernels.arrange(x, plan.key_blocks) for x in (inputs.key, inputs.value))
    return kernels.arrange(inputs.query, plan.query_blocks), key, value


def _shown(plan: FlashPlan, inputs: AttentionInputs) -> _Shown:
    """Return what the mask is made of; bits are in whole blocks, `words length` unless they are packed by lanes."""
    selected = inputs.selected
    if selected is None:
        return _Shown(inputs.positions)
    if not isinstance(selected, Selection):
        selected = Selection(pack_lanes(selected))
    words, groups = jax.lax.bitcast_convert_type(selected.words, jnp.int32), selected.group
    if groups is not None:
        return _Shown(inputs.positions, fill(words.swapaxes(2, 3), plan.query_blocks, 3), groups)
    lanes = -(-fill_length(plan.key_blocks, inputs.positions.key_positions.shape[1]) // KEYS_PER_ROW) * LANES
    words = jnp.pad(words, [(0, 0)] * 3 + [(0, lanes - words.shape[3])])
    return _Shown(inputs.positions, fill(words, plan.query_blocks, 2))


def _places(plan: FlashPlan, shown: _Shown) -> tuple[Array, ...]:
    """Return the arrays of the mask that kernels read: intervals, positions, and the bits of a selection."""
    places = intervals_and_positions(plan, shown.positions, shown.groups)
    return places if shown.bits is None else (*places, shown.bits)


def intervals_and_positions(
    plan: FlashPlan, positions: AttentionPositions, groups: Int[Array, "batch keys"] | None = None
) -> tuple[Int[Array, "batch 3 length"], Int[Array, "batch _ kv_length"]]:
    """Stack each query's first and last visible position and segment, and each key's position, segment and group."""

    def stack(blocks: BlockSizes, segments: Array | None, *rows: tuple[Array, int], last: Array | None = None) -> Array:
        rows = (*rows, (jnp.zeros_like(rows[0][0]) if segments is None else segments, 0))
        rows = rows if last is None else (*rows, (last, -1))
        return jnp.stack([fill(x.astype(jnp.int32), blocks, 1, value) for x, value in rows], 1)

    first, last = interval(plan.mask, positions.query_positions, positions.query_spans)
    intervals = stack(plan.query_blocks, positions.query_segments, (first, 0), (last, -1))
    return intervals, stack(plan.key_blocks, positions.key_segments, (positions.key_positions, -1), last=groups)
