"""Running means and maxima: chunks equal single tokens in values and gradients, also on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.context import Execution
from eqx_decoders.layers.recurrent.scans.log_scan import (
    DECAYING_MAX,
    DECAYING_MEAN,
    LOG_ZERO,
    log_scan_on_mesh,
    scan_states,
)
from tests.compare import assert_allclose
from tests.layers.common import normal


def inputs(reduction, length: int, channels: int = 4):
    """Return three rows: keys of very different size, two documents in the second row, padding in the third."""
    decay, keys = -np.abs(normal(3, length, channels)), 60 * normal(3, length, channels, seed=2)
    values = normal(3, length, channels, seed=3)
    decay[1, [7, length // 2]] = LOG_ZERO
    decay[2, 5:9], keys[2, 5:9], values[2, 5:9] = 0.0, LOG_ZERO, 0.0
    start = 5 * normal(3, channels, seed=4), normal(3, channels, seed=5)
    tokens = [jnp.asarray(x) for x in (decay, keys, values)]
    count = len(reduction.initial)
    return tuple(tokens[: 1 + count]), tuple(map(jnp.asarray, start[:count]))


@functools.partial(jax.jit, static_argnames="function")
def results(args, function):
    """Return states, and gradients of a weighted sum of all states."""

    def loss(args):
        found = function(*args)
        weights = [jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in jax.tree.leaves(found)]
        return sum((x * w).sum() for x, w in zip(jax.tree.leaves(found), weights, strict=True)), found

    return jax.grad(loss, has_aux=True)(args)


def same(found, want):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert_allclose(one, other, rtol=1e-4, atol=2e-4)


@pytest.mark.slow(fast=("maxima",))
@pytest.mark.parametrize("reduction", [DECAYING_MEAN, DECAYING_MAX], ids=["means", "maxima"])
def test_chunks_match_single_tokens(reduction):
    args = inputs(reduction, 26)
    want = results(args, functools.partial(scan_states, reduction, chunk=1))
    same(results(args, functools.partial(scan_states, reduction, chunk=8)), want)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [dict(context=2, tensor=2, data=2), dict(context=4, tensor=2)])
def test_sharded_sequences_match_one_device(sizes):
    (decay, *tokens), start = inputs(DECAYING_MEAN, 80)
    args = (
        tuple(jnp.concatenate([x, x[:1]]) for x in (decay, *tokens)),
        tuple(jnp.concatenate([x, x[:1]]) for x in start),
    )
    run = functools.partial(log_scan_on_mesh, DECAYING_MEAN, execution=Execution(layout=ed.Layout.create(**sizes)))
    same(results(args, run), results(args, functools.partial(scan_states, DECAYING_MEAN)))
