"""Attention with a learned bias per distance matches its definition, for all chunk and document boundaries."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.attention.relative_attention import DISTANCE_BIAS, RelativeAttentionConfig
from tests.compare import assert_allclose
from tests.errors import refused
from tests.layers.common import BF16, context, drawn, normal


EMBED = 6
BASE = RelativeAttentionConfig(num_heads=2, head_dim=3, distances=3, reach=4)
CONFIGS = {
    "near": BASE,
    "whole": dataclasses.replace(BASE, reach=50),
    "symmetric": dataclasses.replace(BASE, symmetric=True, reach=7),
    "alone": dataclasses.replace(BASE, reach=1),
}


def define(layer, table, x, documents):
    """Compute attention pair by pair; `documents` has the document id of each token, negative for padding."""
    config = layer.config
    w = {field.name: np.asarray(getattr(layer, field.name), np.float64) for field in dataclasses.fields(layer)[:-1]}
    q, k, v = (np.einsum("te,ehd->thd", x, w[name]) + w[f"{name}_bias"] for name in ("query", "key", "value"))
    y = np.zeros_like(v)
    for i in range(len(x)):
        seen = [j for j in range(len(x)) if documents[j] == documents[i] >= 0 and abs(i - j) < config.reach]
        if not seen:
            continue
        far = np.clip(np.asarray(seen) - i, -config.distances, config.distances - 1)
        bias = table[np.abs(far) if config.symmetric else far + config.distances]
        weights = np.exp(np.einsum("hd,jhd->jh", q[i], k[seen]) / config.head_dim**0.5 + bias)
        y[i] = np.einsum("jh,jhd->hd", weights / weights.sum(0), v[seen])
    return np.einsum("thd,hde->te", y, w["out"]) + w["out_bias"]


def inputs(config, length=11):
    layer = drawn(lambda key: config.build(EMBED, key=key))
    table = np.random.default_rng(5).normal(size=config.table_shape).astype(np.float32)
    index = np.arange(length)
    documents = np.stack([0 * index, np.where(index < 5, 0, np.where(index < 9, 1, -1))])
    positions = np.where(documents < 0, -1, np.where(documents == 1, index - 5, index))
    return layer, jnp.asarray(table), normal(2, length, EMBED), positions, documents


@eqx.filter_jit
def run(layer, table, x, ctx):
    return layer(x, dataclasses.replace(ctx, shared={DISTANCE_BIAS: table}))


@pytest.mark.slow(fast=("near",))
@pytest.mark.parametrize("name", CONFIGS)
def test_layer_matches_its_definition(name):
    layer, table, x, positions, documents = inputs(CONFIGS[name])
    found = np.asarray(run(layer, table, jnp.asarray(x), context(positions, documents + 1)))
    for row in range(2):
        real = documents[row] >= 0
        wanted = define(layer, np.asarray(table, np.float64), x[row], documents[row])
        assert_allclose(found[row][real], wanted[real], atol=2e-5)
    alone = run(layer, table, jnp.asarray(x[:1]), context(positions[:1]))  # the document id is optional
    assert_allclose(alone, found[:1], atol=1e-6)


@pytest.mark.slow
def test_bfloat16_and_gradients():
    layer, table, x, positions, documents = inputs(BASE)
    plain = np.asarray(run(layer, table, jnp.asarray(x), context(positions, documents + 1)))
    short = run(layer, table, jnp.asarray(x, jnp.bfloat16), context(positions, documents + 1, precision=BF16))
    real = documents >= 0
    assert short.dtype == jnp.bfloat16
    assert np.abs(np.asarray(short, np.float32) - plain)[real].max() < 0.05 * np.abs(plain).max()
    weights = normal(2, 11, EMBED, seed=3) * real[..., None]

    @jax.jit
    def loss(table):
        return jnp.sum(run(layer, table, jnp.asarray(x), context(positions, documents + 1)) * weights)

    gradient, way = jax.grad(loss)(table), normal(*table.shape, seed=4)
    slope = (float(loss(table + 3e-3 * way)) - float(loss(table - 3e-3 * way))) / 6e-3
    assert float(jnp.sum(gradient * way)) == pytest.approx(slope, rel=2e-2, abs=2e-2)


def test_operations_and_invalid_settings():
    assert BASE.token_products(100) == 2 * 3 * 2 * 7 and BASE.token_products(5) == 2 * 3 * 2 * 5
    assert (BASE.table_shape, CONFIGS["symmetric"].table_shape) == ((6, 2), (4, 2))
    for field in ("num_heads", "head_dim", "distances", "reach"):
        with refused(ed.ConfigError, f"RelativeAttentionConfig.{field}=0"):
            dataclasses.replace(BASE, **{field: 0})
