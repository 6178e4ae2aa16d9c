"""Inputs of a decoder's forward pass: checked arrays, and the `ForwardContext` that every layer receives."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eqx_decoders.context import Execution, ForwardContext, Inputs, Promises
from eqx_decoders.core.input_checks import InputSizes, as_int32, check_shapes
from eqx_decoders.encoders.media import Encoded, Media
from eqx_decoders.errors import check
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.embedding.embedding import document_positions
from eqx_decoders.layers.mask import spans_of


class ForwardInputs(NamedTuple):
    """Inputs of a forward pass, as in `Decoder.__call__`. Either `tokens` or `embeds` is None.

    `extra_inputs` is the argument `inputs`. `encoded` has the features of `media`; None: they are not computed yet.
    """

    tokens: Any
    positions: Any = None
    segment_ids: Any = None
    embeds: Any = None
    extra_inputs: Inputs | None = None
    media: Media | None = None
    encoded: Encoded | None = None


def as_int32_inputs(inputs: ForwardInputs) -> ForwardInputs:
    """Convert `tokens`, `positions` and `segment_ids` to int32."""
    integers = {name: as_int32(name, getattr(inputs, name)) for name in ("tokens", "positions", "segment_ids")}
    return inputs._replace(**integers)


def as_arrays(inputs: ForwardInputs) -> ForwardInputs:
    """Convert the inputs with one value per token to JAX arrays; integers become int32."""
    inputs = as_int32_inputs(inputs)
    names = ("tokens", "positions", "segment_ids", "embeds")
    values = {name: getattr(inputs, name) for name in names}
    return inputs._replace(**{name: None if x is None else jnp.asarray(x) for name, x in values.items()})


def layer_positions(inputs: Inputs, positions: Array) -> dict[str, Any]:
    """Return the fields of a `ForwardContext` that come from `inputs`."""
    span_ids = as_int32("spans", inputs.spans)
    rotary = inputs.rotary_positions
    return dict(
        span_ends=None if span_ids is None else spans_of(jnp.asarray(span_ids), positions),
        rotary_positions=None if rotary is None else jnp.asarray(rotary),
    )


def prepare_inputs(
    config: InputSizes, execution: Execution, inputs: ForwardInputs, cache: Cache | None, promises: Promises
) -> tuple[ForwardInputs, ForwardContext, Float[Array, "batch"] | None]:
    """Check the inputs of a forward pass, and derive missing positions from the cache and the segment ids.

    Returns the inputs as arrays, the context of all layers, and the cache's offset of rotary positions after this pass
    (None if the cache has no such offset). Raises ConfigError for wrong shapes or dtypes, and for a cache of another
    batch size.
    """
    extra_inputs = Inputs() if inputs.extra_inputs is None else inputs.extra_inputs
    inputs = as_int32_inputs(inputs)
    batch_size, length = check_shapes(
        config,
        inputs.tokens,
        inputs.positions,
        inputs.segment_ids,
        embeds=inputs.embeds,
        spans=extra_inputs.spans,
    )
    inputs = as_arrays(inputs)
    positions, segment_ids = inputs.positions, inputs.segment_ids
    cache_rows = batch_size if cache is None else cache.length.shape[0]
    check(
        cache_rows == batch_size,
        f"cache has {cache_rows} rows, but tokens have {batch_size} rows. "
        f"Create a cache with init_cache(batch_size={batch_size}).",
    )
    start = None if cache is None else cache.length
    dense_positions = all(x is None for x in (positions, segment_ids, cache))
    positions, segment_ids = document_positions(positions, segment_ids, (batch_size, length), start)
    extra_inputs, rope_offset = _with_offsets(extra_inputs, positions, cache)
    ctx = ForwardContext(
        positions=positions,
        segment_ids=segment_ids if cache is None else None,
        execution=execution,
        cache_is_empty=promises.cache_is_empty,
        accept_all=promises.accept_all,
        dense_positions=dense_positions,
        documents_are_contiguous=promises.documents_are_contiguous or dense_positions,
        tokens=inputs.tokens,
        **layer_positions(extra_inputs, positions),
    )
    return inputs, ctx, rope_offset


def _with_offsets(
    inputs: Inputs, positions: Int[Array, "batch length"], cache: Cache | None
) -> tuple[Inputs, Float[Array, "batch"] | None]:
    """Return inputs whose rotary positions continue those in the cache, and the cache's offset for the next call.

    The offset is None if there is no cache, or if the model has no multi-dimensional rotary positions.
    `Inputs.rotary_positions` count from 0 in each call. If they are None, all dimensions continue one by one.
    """
    if cache is None or cache.rope_offset is None:
        return inputs, None
    offset = cache.rope_offset
    call_positions = inputs.rotary_positions
    if call_positions is None:
        continued = positions.astype(jnp.float32) + offset[:, None]
        rotary = jnp.where(positions >= 0, continued, -1.0)[:, :, None]
        return dataclasses.replace(inputs, rotary_positions=jnp.repeat(rotary, 3, axis=2)), offset
    start = cache.length.astype(jnp.float32) + offset
    rotary = jnp.asarray(call_positions).astype(jnp.float32) + start[:, None, None]
    real = positions >= 0
    last = jnp.max(jnp.where(real[:, :, None], rotary, -jnp.inf), axis=(1, 2))
    new_offset = last - jnp.max(positions, axis=1).astype(jnp.float32)
    return dataclasses.replace(inputs, rotary_positions=rotary), jnp.where(real.any(axis=1), new_offset, offset)


def write_positions(x: Array, ctx: ForwardContext) -> Int[Array, "batch length"]:
    """Return the positions at which a cache stores the tokens of this call.

    They are `ctx.positions` with a data dependency on `x`, the output of the last layer, so that XLA reads the cache
    before it writes to it. Without the dependency, XLA's CPU and GPU backends copy the cache instead of updating it in
    place.
    """
    layout = ctx.execution.layout
    if x.size == 0 or not layout.backend.reads_before_writes:
        return ctx.positions
    if layout.single:  # jax 0.10 drops optimization barriers on CPU, hence a condition that is always False
        return jnp.where(x.reshape(-1)[0] > jnp.inf, -1, ctx.positions)
    return jax.lax.optimization_barrier((x, ctx.positions))[1]
