"""Attention that materializes all scores: the reference implementation, and the fastest kernel for a few queries.

Memory grows with length x kv_length.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32

from eqx_decoders.layers.attention.kernels.call import AttentionCall, AttentionInputs
from eqx_decoders.layers.attention.kernels.common import (
    EMPTY,
    Cotangents,
    Gradients,
    Result,
    cap_gradient,
    cap_scores,
)
from eqx_decoders.layers.attention.kernels.selection import as_mask
from eqx_decoders.layers.mask import Mask, visible


def dot(inputs: AttentionInputs, call: AttentionCall) -> Result:
    """Compute `attend`. Scales of quantized keys multiply scores, and scales of values multiply attention weights.

    Dequantized keys and values are therefore not rounded to the query's dtype.
    """
    query, key, value, _, _, scales, _ = inputs
    batch, length, heads, _ = query.shape
    if scales is not None:
        key, value = key.astype(query.dtype), value.astype(query.dtype)
    scores = _scores(inputs._replace(query=query, key=key), call)
    scores = jnp.where(_mask(inputs, call.mask), scores, -jnp.inf)
    max_score = jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=EMPTY))
    exponentials = jnp.exp(scores - max_score)
    total = exponentials.sum(-1, keepdims=True)
    safe_total = jnp.where(total > 0, total, 1.0)
    weights = exponentials / safe_total
    if scales is not None:
        weights = weights * _expand_scale(scales.value)
    out = _weighted_sum(weights.astype(value.dtype), value, call)
    lse = jnp.where(total > 0, max_score + jnp.log(safe_total), EMPTY)
    lse = lse[..., 0].transpose(0, 3, 1, 2).reshape(batch, length, heads)
    out = out.reshape(batch, length, heads, -1).astype(query.dtype)
    return checkpoint_name(out, "context"), checkpoint_name(lse, "context")


def dot_gradients(inputs: AttentionInputs, call: AttentionCall, cotangents: Cotangents) -> Gradients:
    """Compute `attend_gradients`."""
    query, key, value, *_ = inputs
    kv_heads = key.shape[2]
    lse, delta = (
        _split_heads(x, kv_heads).transpose(0, 2, 3, 1)[..., None] for x in (cotangents.lse, cotangents.delta)
    )
    split_query, out_bar = (_split_heads(x, kv_heads) for x in (query, cotangents.out_bar.astype(value.dtype)))
    scores = _scores(inputs, call)
    mask = _mask(inputs, call.mask)
    weights = jnp.exp(jnp.where(mask, scores, -jnp.inf) - lse)
    score_bar = weights * (jnp.einsum("btngv,bsnv->bngts", out_bar, value, preferred_element_type=jnp.float32) - delta)
    score_bar = cap_gradient(score_bar, scores, call.soft_cap).astype(key.dtype)
    query_bar = jnp.einsum("bngts,bsnd->btngd", score_bar, key, preferred_element_type=jnp.float32)
    key_bar = jnp.einsum("bngts,btngd->bsnd", score_bar, split_query, preferred_element_type=jnp.float32)
    weights = weights.astype(value.dtype)
    value_bar = jnp.einsum("bngts,btngv->bsnv", weights, out_bar, preferred_element_type=jnp.float32)
    return query_bar.reshape(query.shape), key_bar, value_bar


def _weighted_sum(weights: Array, value: Array, call: AttentionCall) -> Array:
    """Return the weighted sum of values: [batch, length, kv_heads, queries_per_kv, value_dim].

    The shape of the weights is [batch, kv_heads, queries_per_kv, length, keys].
    """
    if not call.backend.cached_values_by_head or call.aligned:
        return jnp.einsum("bngts,bsnv->btngv", weights, value)
    # Cached values are the right operand, with heads before keys as in the cache: otherwise XLA would transpose them.
    batch, kv_heads, queries_per_kv, length, keys = weights.shape
    flat = weights.reshape(batch, kv_heads, queries_per_kv * length, keys)
    out = jax.lax.dot_general(flat, value.swapaxes(1, 2), (((3,), (2,)), ((0, 1), (0, 1))))
    return out.reshape(batch, kv_heads, queries_per_kv, length, -1).transpose(0, 3, 1, 2, 4)


def _split_heads(x: Array, kv_heads: int) -> Array:
    """Split query heads by KV head: [batch, length, kv_heads, queries_per_kv, ...]."""
    return x.reshape(*x.shape[:2], kv_heads, -1, *x.shape[3:])


def _expand_scale(scale: Float[Array, "batch keys scale_heads"]) -> Float32[Array, "batch scale_heads 1 1 keys"]:
    return scale.astype(jnp.float32).swapaxes(1, 2)[:, :, None, None]


def _scores(inputs: AttentionInputs, call: AttentionCall) -> Float32[Array, "batch kv_heads groups length keys"]:
    query = _split_heads(inputs.query, inputs.key.shape[2])
    scores = jnp.einsum("btngd,bsnd->bngts", query, inputs.key, preferred_element_type=jnp.float32)
    if inputs.scales is not None:
        scores = scores * _expand_scale(inputs.scales.key)
    if call.alibi is not None and inputs.slopes is not None:
        query_positions = inputs.positions.query_positions[:, None, None, :, None]
        key_positions = inputs.positions.key_positions[:, None, None, None]
        slopes = inputs.slopes.reshape(1, *scores.shape[1:3], 1, 1)
        scores += call.alibi.bias(slopes, query_positions, key_positions)
    return cap_scores(scores, call.soft_cap)


def _mask(inputs: AttentionInputs, mask: Mask) -> Bool[Array, "batch kv_heads groups length keys"]:
    """Return the mask of visible and selected keys, with axes of size 1 where heads do not differ."""
    allowed = visible(mask, *inputs.positions)[:, None, None]
    if inputs.selected is None:
        return allowed
    heads, kv_heads = inputs.query.shape[2], inputs.key.shape[2]
    selected = as_mask(inputs.selected, inputs.key.shape[1])
    split = (1, 1) if selected.shape[1] == 1 else (kv_heads, heads // kv_heads)
    return allowed & selected.reshape(selected.shape[0], *split, *selected.shape[2:])
