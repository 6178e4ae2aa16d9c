"""Flash attention (Dao et al., 2022) in Pallas kernels, with a mask that is an interval of positions per query.

Tiles of scores are never written to HBM. This module defines the call, its gradients and the mask arrays.
`pallas_flash_tiles` defines the equations of a tile, and `pallas_flash_tpu` and `pallas_flash_gpu` define the kernels.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Int, Int32

from eqx_decoders.layers.attention.kernels.call import AttentionCall, AttentionInputs
from eqx_decoders.layers.attention.kernels.common import Cotangents, Gradients, Result, make_cotangents
from eqx_decoders.layers.attention.kernels.pallas_flash_tiles import FlashKernels, FlashPlan, pad_to_tile, padded_length
from eqx_decoders.layers.attention.kernels.selection import KEYS_PER_ROW, Selection, pack_lanes
from eqx_decoders.layers.attention.kernels.tile_sizes import TileSizes
from eqx_decoders.layers.mask import AttentionPositions, interval
from eqx_decoders.sharding.chips import LANES


class _MaskInputs(NamedTuple):
    """Inputs from which the mask is computed: positions, and the bits and key groups of a selection.

    These are the residuals of the backward pass, instead of the arrays computed from them: if layers are scanned, XLA
    can then move that computation out of the loop over layers.
    """

    positions: AttentionPositions
    bits: Int32[Array, "batch selected_heads _ _"] | None = None
    key_groups: Int[Array, "batch kv_length"] | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    kernels: FlashKernels, plan: FlashPlan, query: Array, key: Array, value: Array, mask_inputs: _MaskInputs
) -> tuple[Array, Array]:
    return _forward(kernels, plan, query, key, value, _mask_arrays(plan, mask_inputs))


def _attend_fwd(
    kernels: FlashKernels, plan: FlashPlan, query: Array, key: Array, value: Array, mask_inputs: _MaskInputs
):
    results = _forward(kernels, plan, query, key, value, _mask_arrays(plan, mask_inputs))
    out, lse = (checkpoint_name(x, "context") for x in results)
    return (out, lse), (query, key, value, mask_inputs, out, lse)


def _attend_bwd(kernels: FlashKernels, plan: FlashPlan, residuals: tuple, bars: tuple):
    query, key, value, mask_inputs, out, lse = residuals
    out_bar, lse_bar = bars
    cotangents = make_cotangents((out, kernels.from_row_vectors(lse)), (out_bar, kernels.from_row_vectors(lse_bar)))
    lse_delta = jnp.concatenate([lse, kernels.to_row_vectors(cotangents.delta)], 2)
    mask_arrays = _mask_arrays(plan, mask_inputs)
    return *_backward(kernels, plan, query, key, value, mask_arrays, cotangents.out_bar, lse_delta, None), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def flash_attention(kernels: FlashKernels, inputs: AttentionInputs, call: AttentionCall) -> Result:
    """Compute `attend`; on platforms other than that of the kernels they are interpreted, which is slow.

    Remat policies that save "context" (out and lse) avoid recomputing the forward pass.
    """
    length, plan = inputs.query.shape[1], kernels.make_plan(call)
    results: Any = _attend(kernels, plan, *_arrays(kernels, plan, inputs), _mask_inputs(plan, inputs))
    out, lse = results
    return kernels.restore(out, length), lse[:, :, 0, :length].swapaxes(1, 2)


def flash_gradients(
    kernels: FlashKernels, inputs: AttentionInputs, call: AttentionCall, cotangents: Cotangents
) -> Gradients:
    """Compute `attend_gradients`."""
    length, kv_length, plan = inputs.query.shape[1], inputs.key.shape[1], kernels.make_plan(call)
    out_bar, lse, delta = (kernels.arrange(x, plan.query_tiles) for x in cotangents)
    lse_delta = jnp.concatenate([kernels.to_row_vectors(x) for x in (lse, delta)], 2)
    mask_arrays = _mask_arrays(plan, _mask_inputs(plan, inputs))
    grads = _backward(kernels, plan, *_arrays(kernels, plan, inputs), mask_arrays, out_bar, lse_delta, jnp.float32)
    query_bar, key_bar, value_bar = (
        kernels.restore(x, size) for x, size in zip(grads, (length, kv_length, kv_length), strict=True)
    )
    return query_bar, key_bar, value_bar


# Without jit, JAX does not remove an unused Pallas call from a backward pass.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(
    kernels: FlashKernels, plan: FlashPlan, query: Array, key: Array, value: Array, mask_arrays: tuple[Array, ...]
) -> tuple[Array, Array]:
    """Return out, and lse as one row vector per head, [batch, heads, 1, length]."""
    heads, length = query.shape[1:3] if kernels.heads_first else query.shape[2:0:-1]
    out_spec = "queries", (*query.shape[:3], value.shape[3]), query.dtype
    lse_spec = "rows", (query.shape[0], heads, 1, length), jnp.float32
    out, lse = kernels.run(plan, "forward", _operands(plan, query, key, value, mask_arrays), [out_spec, lse_spec])
    return out, lse


def _backward(
    kernels: FlashKernels,
    plan: FlashPlan,
    query: Array,
    key: Array,
    value: Array,
    mask_arrays: tuple[Array, ...],
    out_bar: Array,
    lse_delta: Array,
    dtype: Any,
) -> tuple[Array, Array, Array]:
    """Return the gradients of query, key and value in `dtype`; None: in the dtypes of query, key and value.

    `lse_delta` holds lse and delta of `Cotangents` as row vectors, [batch, heads, 2, length].
    """
    operands = [*_operands(plan, query, key, value, mask_arrays), ("queries", out_bar), ("rows", lse_delta)]
    query_spec, key_spec, value_spec = ((layout, x.shape, dtype or x.dtype) for layout, x in operands[:3])
    (query_bar,) = kernels.run(plan, "queries", operands, [query_spec])
    key_bar, value_bar = kernels.run(plan, "keys", operands, [key_spec, value_spec])
    return query_bar, key_bar, value_bar


def _operands(
    plan: FlashPlan, query: Array, key: Array, value: Array, mask_arrays: tuple[Array, ...]
) -> list[tuple[str, Array]]:
    """Return the arrays that all kernels read, as pairs (layout, array)."""
    return list(zip(("queries", "keys", "keys", *plan.mask_layouts), (query, key, value, *mask_arrays), strict=True))


def _arrays(kernels: FlashKernels, plan: FlashPlan, inputs: AttentionInputs) -> tuple[Array, Array, Array]:
    key, value = (kernels.arrange(x, plan.key_tiles) for x in (inputs.key, inputs.value))
    return kernels.arrange(inputs.query, plan.query_tiles), key, value


def _mask_inputs(plan: FlashPlan, inputs: AttentionInputs) -> _MaskInputs:
    """Return the inputs of the mask.

    The bits of a selection are padded to a multiple of the query tile. Their last axes are [words, length] with key
    groups, and [length, words] with bits packed by lanes.
    """
    selected = inputs.selected
    if selected is None:
        return _MaskInputs(inputs.positions)
    if not isinstance(selected, Selection):
        selected = Selection(pack_lanes(selected))
    words = jax.lax.bitcast_convert_type(selected.words, jnp.int32)
    if selected.group is not None:
        return _MaskInputs(inputs.positions, pad_to_tile(words.swapaxes(2, 3), plan.query_tiles, 3), selected.group)
    lanes = -(-padded_length(plan.key_tiles, inputs.positions.key_positions.shape[1]) // KEYS_PER_ROW) * LANES
    words = jnp.pad(words, [(0, 0)] * 3 + [(0, lanes - words.shape[3])])
    return _MaskInputs(inputs.positions, pad_to_tile(words, plan.query_tiles, 2))


def _mask_arrays(plan: FlashPlan, mask_inputs: _MaskInputs) -> tuple[Array, ...]:
    """Return the mask arrays that kernels read: intervals, positions, and the bits of a selection."""
    mask_arrays = intervals_and_positions(plan, mask_inputs.positions, mask_inputs.key_groups)
    return mask_arrays if mask_inputs.bits is None else (*mask_arrays, mask_inputs.bits)


def intervals_and_positions(
    plan: FlashPlan, positions: AttentionPositions, key_groups: Int[Array, "batch keys"] | None = None
) -> tuple[Int[Array, "batch 3 length"], Int[Array, "batch _ kv_length"]]:
    """Return (first visible position, last visible position, segment) per query, and (position, segment) per key.

    With `key_groups` the second array also contains the group of each key. Padding sees nothing and is not seen.
    """

    def stack(tiles: TileSizes, *rows: tuple[Array, int]) -> Array:
        """Stack rows, each padded with its value."""
        return jnp.stack([pad_to_tile(row.astype(jnp.int32), tiles, 1, value) for row, value in rows], 1)

    def or_zeros(segments: Array | None, like: Array) -> Array:
        return jnp.zeros_like(like) if segments is None else segments

    first, last = interval(plan.mask, positions.query_positions, positions.query_spans)
    query_segments = or_zeros(positions.query_segments, first)
    key_segments = or_zeros(positions.key_segments, positions.key_positions)
    intervals = stack(plan.query_tiles, (first, 0), (last, -1), (query_segments, 0))
    key_rows = [(positions.key_positions, -1), (key_segments, 0)]
    if key_groups is not None:
        key_rows.append((key_groups, -1))
    return intervals, stack(plan.key_tiles, *key_rows)
