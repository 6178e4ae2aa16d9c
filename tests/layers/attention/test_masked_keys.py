"""Tokens that are masked as keys, such as partial padding of image patches."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mask import Bidirectional
from tests.compare import assert_allclose
from tests.layers.common import context, drawn, normal


EMBED, LENGTH = 6, 9
CONFIG = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4, rope=None, mask=Bidirectional())


@pytest.mark.slow(fast=("dot",))
@pytest.mark.parametrize("kernel", ["dot", "chunked"])
def test_masked_tokens_attend_but_are_not_attended_to(kernel):
    layer = drawn(lambda key: CONFIG.build(EMBED, key=key))
    x, masked = normal(1, LENGTH, EMBED), np.isin(np.arange(LENGTH), (2, 7, 8))
    ctx = dataclasses.replace(context(np.arange(LENGTH)[None], attention=kernel), masked_keys=jnp.asarray(masked[None]))
    found, _ = layer(jnp.asarray(x), ctx)
    query, key, value, out = (np.asarray(getattr(layer, name)) for name in ("query", "key", "value", "out"))
    q, k, v = (np.einsum("te,ehd->thd", x[0], each) for each in (query, key, value))
    weights = np.exp(np.einsum("qhd,kd->hqk", q, k[~masked, 0]) / 2)
    mixed = np.einsum("hqk,kd->qhd", weights / weights.sum(axis=2, keepdims=True), v[~masked, 0])
    assert_allclose(found[0], np.einsum("qhd,hde->qe", mixed, out), atol=1e-5)
