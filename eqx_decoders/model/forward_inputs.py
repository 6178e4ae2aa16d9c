"""Inputs of a decoder's forward pass: checked arrays, and the `ForwardContext` that every layer receives.

Arguments of MaxText's `Transformer`, for those who know it:

| MaxText | here |
|---|---|
| `decoder_input_tokens`, `decoder_positions`, `decoder_segment_ids` | `tokens`, `positions`, `segment_ids` |
| `encoder_images`, `encoder_image_masks`, `encoder_audios` | `media`, by `Media.create`; no padded tiles |
| bidirectional masks of images | `media.spans`, in layers with `AttentionConfig.spans` |
| deepstack embeddings | computed by `encode`, added by `AddedFeaturesConfig`, with and without scan |
| `enable_dropout`, rngs | `key`; None is without |
| `model_mode="train"` | no `cache` |
| `model_mode="prefill"`, `"autoregressive"` | a `cache`, empty or not; any number of tokens at a time |
| `previous_chunk` | the `cache`: a chunk is a call that goes on with it |
| `true_length` | positions of -1, or segment 0, for padding; `prompt_lengths` of `generate` |
| `slot` | a row of the cache: `cache.with_row`, `cache.reset` |
| `page_state` | tables of a cache with `pages`, by `cache.with_tables`; without, its rows are contiguous |
| `decoder_target_tokens`, `decoder_target_mask` | `Batch` and `next_token_loss`; `predict_mtp` alone |
| `kv_caches`, `attention_metadata` | `forward_uncommitted`, which writes nothing, and `cache.commit` |
| `nnx_method`, intermediates | methods (`run`, `logits`, `head_input`), and `Output.stats` |
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eqx_decoders.context import Execution, ForwardContext, Inputs, Promises
from eqx_decoders.core.input_checks import InputSizes, as_int32, check_shapes
from eqx_decoders.errors import check
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.embedding.embedding import document_positions
from eqx_decoders.layers.mask import spans_of


class TokenInputs(NamedTuple):
    """Arguments of a decoder that have a value for each token; `embeds` stands in place of `tokens`."""

    tokens: Any
    positions: Any = None
    segment_ids: Any = None
    embeds: Any = None


class PreparedInputs(NamedTuple):
    """Arrays of a forward pass: either `tokens` or `embeds`, and the offset of rotary positions after it."""

    tokens: Array | None
    embeds: Array | None
    by_layer: dict[str, Array]
    ctx: ForwardContext
    rope_offset: Array | None


def as_int32_inputs(inputs: TokenInputs) -> TokenInputs:
    """Convert ids, positions and documents to int32."""
    integers = {name: as_int32(name, getattr(inputs, name)) for name in ("tokens", "positions", "segment_ids")}
    return inputs._replace(**integers)


def as_arrays(inputs: TokenInputs) -> TokenInputs:
    """Convert `as_int32_inputs` to arrays of JAX."""
    return TokenInputs(*(None if x is None else jnp.asarray(x) for x in as_int32_inputs(inputs)))


def layer_positions(inputs: Inputs, positions: Array) -> dict[str, Any]:
    """Return the fields of a `ForwardContext` that come from `inputs`."""
    spans = as_int32("spans", inputs.spans)
    spans, rotary = (None if x is None else jnp.asarray(x) for x in (spans, inputs.rotary_positions))
    return dict(spans=None if spans is None else spans_of(spans, positions), rotary_positions=rotary)


def prepare_inputs(
    config: InputSizes,
    execution: Execution,
    arrays: TokenInputs,
    inputs: Inputs,
    cache: Cache | None,
    promises: Promises,
) -> PreparedInputs:
    """Check the inputs of a forward pass, and derive missing ones from the cache and from documents."""
    arrays = as_int32_inputs(arrays)
    tokens, positions, segment_ids, embeds = arrays
    rows, length = check_shapes(config, tokens, positions, segment_ids, embeds=embeds, spans=inputs.spans)
    tokens, positions, segment_ids, embeds = as_arrays(arrays)
    cache_rows = rows if cache is None else cache.length.shape[0]
    check(cache_rows == rows, f"cache has {cache_rows} rows, but tokens {rows}: make one with init_cache.")
    begin = None if cache is None else cache.length
    dense_positions = all(x is None for x in (positions, segment_ids, cache))
    positions, segment_ids = document_positions(positions, segment_ids, (rows, length), begin)
    inputs, rope_offset = _with_offsets(inputs, positions, cache)
    ctx = ForwardContext(
        positions=positions,
        segment_ids=segment_ids if cache is None else None,
        execution=execution,
        cache_is_empty=promises.cache_is_empty,
        accept_all=promises.accept_all,
        dense_positions=dense_positions,
        contiguous=promises.contiguous or dense_positions,
        tokens=tokens,
        **layer_positions(inputs, positions),
    )
    return PreparedInputs(tokens, embeds, inputs.by_layer, ctx, rope_offset)


def _with_offsets(
    inputs: Inputs, positions: Int[Array, "batch length"], cache: Cache | None
) -> tuple[Inputs, Float[Array, "batch"] | None]:
    """Return inputs with rotary positions behind those of a cache, and the offset of the next call; None without it.

    Given positions count from 0 in each call; where none are given, all dimensions count on.
    """
    if cache is None or cache.rope_offset is None:
        return inputs, None
    offset, call_positions = cache.rope_offset, inputs.rotary_positions
    if call_positions is None:
        counted = positions.astype(jnp.float32) + offset[:, None]
        rotary = jnp.where(positions >= 0, counted, -1.0)[:, :, None]
        return dataclasses.replace(inputs, rotary_positions=jnp.repeat(rotary, 3, axis=2)), offset
    begin = cache.length.astype(jnp.float32) + offset
    rotary = jnp.asarray(call_positions).astype(jnp.float32) + begin[:, None, None]
    real = positions >= 0
    last = jnp.max(jnp.where(real[:, :, None], rotary, -jnp.inf), axis=(1, 2))
    new = last - jnp.max(positions, axis=1).astype(jnp.float32)
    return dataclasses.replace(inputs, rotary_positions=rotary), jnp.where(real.any(axis=1), new, offset)


def positions_after(x: Array, ctx: ForwardContext) -> Int[Array, "batch length"]:
    """Return positions that depend on `x`: so all of a cache is read before it is written, which is in place.

    XLA's backends for CPUs and GPUs would copy it.
    """
    layout = ctx.execution.layout
    if x.size == 0 or not layout.backend.reads_before_writes:
        return ctx.positions
    if layout.single:  # jax 0.10 drops barriers on CPUs
        return jnp.where(x.reshape(-1)[0] > jnp.inf, -1, ctx.positions)  # never
    return jax.lax.optimization_barrier((x, ctx.positions))[1]
