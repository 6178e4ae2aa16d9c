"""Attention kernels: the blockwise one equals the plain one in values and in gradients, for every mask and shape."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.kernel import EMPTY, KERNELS, Kernel, attend, merge, with_sink
from eqx_decoders.layers.mask import Bidirectional, Causal, Chunked, SlidingWindow


MASKS = [Causal(), SlidingWindow(7), SlidingWindow(150), Chunked(9), Bidirectional()]


def make(length, kv_length=None, *, heads=4, kv_heads=2, dim=8, value_dim=8, dtype=jnp.float32, seed=0, batch=2):
    kv_length = length if kv_length is None else kv_length
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(batch, length, heads, dim), (batch, kv_length, kv_heads, dim), (batch, kv_length, kv_heads, value_dim)]
    return tuple(jax.random.normal(k, s, jnp.float32).astype(dtype) for k, s in zip(keys, shapes, strict=True))


def packed(length, batch=2, padding=5):
    """Two documents and padding; the second row is cut elsewhere."""
    cuts = [length // 3 + 11 * row for row in range(batch)]
    segments = np.stack([np.where(np.arange(length) < cut, 1, 2) for cut in cuts])
    positions = np.stack(
        [np.where(np.arange(length) < cut, np.arange(length), np.arange(length) - cut) for cut in cuts]
    )
    positions[:, length - padding :] = -1
    return jnp.asarray(positions, jnp.int32), jnp.asarray(segments, jnp.int32)


def plain(length, batch=2, start=0):
    return jnp.broadcast_to(jnp.arange(start, start + length, dtype=jnp.int32)[None], (batch, length))


@functools.partial(jax.jit, static_argnames=("mask", "soft_cap", "aligned", "kernel", "platform"))
def all_of(qkv, weights, places, **options):
    """Values, and the gradients of a loss that depends on both results."""

    def loss(qkv):
        out, lse = attend(*qkv, **places, **options)
        seen = lse > EMPTY / 2
        score = (out.astype(jnp.float32) * weights[0]).sum() + (jnp.where(seen, lse, 0.0) * weights[1]).sum()
        return score, (out, lse)

    (_, results), grads = jax.value_and_grad(loss, has_aux=True)(qkv)
    return results, grads


def weights_for(qkv):
    batch, length, heads, _ = qkv[0].shape
    keys = jax.random.split(jax.random.key(9))
    return jax.random.normal(keys[0], (batch, length, heads, qkv[2].shape[3])), jax.random.normal(
        keys[1], (batch, length, heads)
    )


def same(left, right, tolerance=3e-5):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(a).all() and np.isfinite(b).all()
        scale = max(1.0, np.abs(b[b > EMPTY / 2]).max(initial=0.0))
        np.testing.assert_allclose(a, b, atol=tolerance * scale, rtol=0)


def both(qkv, places, **options):
    weights = weights_for(qkv)
    chunked = all_of(qkv, weights, places, kernel="chunked", **options)
    return chunked, all_of(qkv, weights, places, kernel="dot", **{**options, "aligned": False})


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_packed_chunked_is_dot(mask, soft_cap):
    positions, segments = packed(301)
    places = {"query_positions": positions, "key_positions": positions}
    places |= {"query_segments": segments, "key_segments": segments}
    same(*both(make(301), places, mask=mask, soft_cap=soft_cap, aligned=True))
