"""Attention with all scores at once: the definition, and the fastest form for a few queries.

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
    cap_scores,
    cap_slopes,
)
from eqx_decoders.layers.attention.kernels.selection import as_mask
from eqx_decoders.layers.mask import Mask, visible


def dot(inputs: AttentionInputs, call: AttentionCall) -> Result:
    """Attend as `attend` defines it. Scales of keys multiply scores, scales of values weights: nothing is rounded."""
    query, key, value, _, _, scales, _ = inputs
    batch, length, heads, _ = query.shape
    if scales is not None:
        key, value = key.astype(query.dtype), value.astype(query.dtype)
    scores = _scores(inputs._replace(query=query, key=key), call)
    scores = jnp.where(_seen(inputs, call.mask), scores, -jnp.inf)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=EMPTY))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    safe = jnp.where(total > 0, total, 1.0)
    mixing = weights / safe if scales is None else weights / safe * _of_keys(scales.value)
    out = _mixed(mixing.astype(value.dtype), value, call)
    lse = jnp.where(total > 0, top + jnp.log(safe), EMPTY)
    lse = lse[..., 0].transpose(0, 3, 1, 2).reshape(batch, length, heads)
    out = out.reshape(batch, length, heads, -1).astype(query.dtype)
    return checkpoint_name(out, "context"), checkpoint_name(lse, "context")


def dot_gradients(inputs: AttentionInputs, call: AttentionCall, cotangents: Cotangents) -> Gradients:
    """Compute gradients as `attend_gradients` defines them."""
    query, key, value, *_ = inputs
    kv_heads = key.shape[2]
    lse, delta = (_grouped(x, kv_heads).transpose(0, 2, 3, 1)[..., None] for x in (cotangents.lse, cotangents.delta))
    query_g, out_bar = (_grouped(x, kv_heads) for x in (query, cotangents.out_bar.astype(value.dtype)))
    scores = _scores(inputs, call)
    seen = _seen(inputs, call.mask)
    weights = jnp.exp(jnp.where(seen, scores, -jnp.inf) - lse)
    slopes = weights * (jnp.einsum("btngv,bsnv->bngts", out_bar, value, preferred_element_type=jnp.float32) - delta)
    slopes = cap_slopes(slopes, scores, call.soft_cap).astype(key.dtype)
    query_bar = jnp.einsum("bngts,bsnd->btngd", slopes, key, preferred_element_type=jnp.float32)
    key_bar = jnp.einsum("bngts,btngd->bsnd", slopes, query_g, preferred_element_type=jnp.float32)
    weights = weights.astype(value.dtype)
    value_bar = jnp.einsum("bngts,btngv->bsnv", weights, out_bar, preferred_element_type=jnp.float32)
    return query_bar.reshape(query.shape), key_bar, value_bar


def _mixed(weights: Array, value: Array, call: AttentionCall) -> Array:
    """Mix values by [batch, kv_heads, groups, length, keys] weights: [batch, length, kv_heads, groups, d]."""
    if not call.backend.values_by_head or call.aligned:
        return jnp.einsum("bngts,bsnv->btngv", weights, value)
    # values of a past behind the weights, heads before keys, as a cache has them: otherwise XLA would turn them around
    batch, kv_heads, groups, length, keys = weights.shape
    flat = weights.reshape(batch, kv_heads, groups * length, keys)
    out = jax.lax.dot_general(flat, value.swapaxes(1, 2), (((3,), (2,)), ((0, 1), (0, 1))))
    return out.reshape(batch, kv_heads, groups, length, -1).transpose(0, 3, 1, 2, 4)


def _grouped(x: Array, kv_heads: int) -> Array:
    """Group query heads by their key heads: [batch, length, kv_heads, groups, ...]."""
    return x.reshape(*x.shape[:2], kv_heads, -1, *x.shape[3:])


def _of_keys(scale: Float[Array, "batch keys scale_heads"]) -> Float32[Array, "batch scale_heads 1 1 keys"]:
    return scale.astype(jnp.float32).swapaxes(1, 2)[:, :, None, None]


def _scores(inputs: AttentionInputs, call: AttentionCall) -> Float32[Array, "batch kv_heads groups length keys"]:
    query, key, scales = _grouped(inputs.query, inputs.key.shape[2]), inputs.key, inputs.scales
    scores = jnp.einsum("btngd,bsnd->bngts", query, key, preferred_element_type=jnp.float32)
    scores = scores if scales is None else scores * _of_keys(scales.key)
    if call.alibi is not None and inputs.slopes is not None:
        of_query, of_key = inputs.positions.query_positions, inputs.positions.key_positions
        slopes = inputs.slopes.reshape(1, *scores.shape[1:3], 1, 1)
        scores += call.alibi.bias(slopes, of_query[:, None, None, :, None], of_key[:, None, None, None])
    return cap_scores(scores, call.soft_cap)


def _seen(inputs: AttentionInputs, mask: Mask) -> Bool[Array, "batch kv_heads groups length keys"]:
    seen, selected = visible(mask, *inputs.positions)[:, None, None], inputs.selected
    if selected is None:
        return seen
    heads, kv_heads = inputs.query.shape[2], inputs.key.shape[2]
    selected = as_mask(selected, inputs.key.shape[1])
    split = (1, 1) if selected.shape[1] == 1 else (kv_heads, heads // kv_heads)
    return seen & selected.reshape(selected.shape[0], *split, *selected.shape[2:])
