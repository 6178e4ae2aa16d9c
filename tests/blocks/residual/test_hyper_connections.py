"""Hyper-connections: against sums written out in NumPy, and laws of their matrices and streams."""

import dataclasses
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.residual.base import BlockLayer
from eqx_decoders.blocks.residual.hyper_connections import HyperConnections
from eqx_decoders.layers.norm import RMSNormConfig
from tests.blocks.residual.common import run_residual
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import refused
from tests.oracles import sigmoid, wide


EMBED, STREAMS = 6, 3
SINKHORN = HyperConnections(streams=STREAMS)
PERMUTATIONS = HyperConnections(streams=STREAMS, mixing="permutations")
CTX = ed.ForwardContext(positions=jnp.broadcast_to(jnp.arange(5), (2, 5)))
X = np.random.default_rng(1).normal(size=(2, 5, STREAMS, EMBED)).astype(np.float32)
MATRICES = np.random.default_rng(2).normal(size=(2, EMBED, EMBED)).astype(np.float32)
BRANCHES = [lambda y, m=m: jnp.tanh(y @ m) for m in MATRICES]


def drawn(config: HyperConnections, branches: int = 2):
    """A wiring with every array drawn by NumPy: coefficients that differ much between tokens."""
    residual = config.build(EMBED, branches=branches, inner_dim=EMBED, key=jax.random.key(0))
    generator = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(generator.normal(0.2, 0.7, leaf.shape), leaf.dtype), residual)


def run(residual, x, branches=BRANCHES):
    return run_residual(residual, x, [BlockLayer("", branch) for branch in branches], ctx=CTX)


def test_streams_are_summed_with_weights_of_the_token():
    config = dataclasses.replace(SINKHORN, weighted_sum=True, eps=0.01)
    generator = np.random.default_rng(0)
    layer = config.build_maps(EMBED, key=jax.random.key(0))
    layer = jax.tree.map(lambda leaf: jnp.asarray(generator.normal(0.2, 0.7, leaf.shape), leaf.dtype), layer)
    flat = wide(X).reshape(2, 5, -1)
    u = flat / np.sqrt(np.mean(flat**2, axis=-1, keepdims=True) + config.norm.eps) * wide(layer.norm.scale)
    weights = sigmoid(u @ wide(layer.kernel) * wide(layer.scale) + wide(layer.bias)) + 0.01
    assert_close(layer.reduce(jnp.asarray(X), CTX), np.einsum("bln,blne->ble", weights, wide(X)), units=32)
    assert SINKHORN.build_maps(EMBED, key=jax.random.key(0)) is None


def softmax(x):
    return np.exp(x) / np.sum(np.exp(x), axis=-1, keepdims=True)


def token_by_hand(config, connection, x, branch):
    """One branch of one token: `x` is [streams, embed]."""
    n, flat = len(x), x.reshape(-1)
    u = flat / np.sqrt(np.mean(flat**2) + config.norm.eps)
    if connection.norm.scale is not None:
        u = u * wide(connection.norm.scale)
    h, scale, bias = u @ wide(connection.kernel), wide(connection.scale), wide(connection.bias)
    read = sigmoid(scale[0] * h[:n] + bias[:n]) + 1e-6
    write = 2 * sigmoid(scale[1] * h[n : 2 * n] + bias[n : 2 * n])
    logits = scale[2] * h[2 * n :] + bias[2 * n :]
    if config.mixing == "sinkhorn":
        mix = softmax(logits.reshape(n, n)) + 1e-6
        mix = mix / (mix.sum(axis=0, keepdims=True) + 1e-6)
        for _ in range(config.iterations - 1):
            mix = mix / (mix.sum(axis=1, keepdims=True) + 1e-6)
            mix = mix / (mix.sum(axis=0, keepdims=True) + 1e-6)
    else:
        shares = softmax(logits)
        mix = sum(
            share * np.eye(n)[list(order)]
            for share, order in zip(shares, itertools.permutations(range(n)), strict=True)
        )
    out = branch(sum(read[k] * x[k] for k in range(n)))
    return np.stack([sum(mix[k, m] * x[k] for k in range(n)) + write[m] * out for m in range(n)])


@pytest.mark.slow(fast=("permutations", "once"))
@pytest.mark.parametrize(
    "config",
    [SINKHORN, PERMUTATIONS, dataclasses.replace(SINKHORN, iterations=1, norm=RMSNormConfig(scale=False, eps=1e-2))],
    ids=["sinkhorn", "permutations", "once"],
)
def test_equals_sums_by_hand(config):
    residual = drawn(config)
    want = wide(X)
    for connection, matrix in zip(residual.connections, MATRICES, strict=True):
        for place in np.ndindex(2, 5):
            want[place] = token_by_hand(config, connection, want[place], lambda y, m=wide(matrix): np.tanh(y @ m))
    assert_close(run(residual, jnp.asarray(X)), want.astype(np.float32))


@pytest.mark.parametrize("config", [SINKHORN, PERMUTATIONS], ids=["sinkhorn", "permutations"])
def test_mixing_keeps_the_sum_of_streams(config):
    mix = np.asarray(drawn(config).connections[0](jnp.asarray(X), CTX).mix)
    assert np.all(mix >= 0)
    assert_allclose(mix.sum(axis=0), 1, atol=1e-5)
    assert_allclose(mix.sum(axis=1), 1, atol=1e-5 if config is PERMUTATIONS else 2e-2)
    assert np.ptp(mix[0, 0]) > 0.1  # they differ between tokens


@pytest.mark.slow(fast=("sinkhorn",))
@pytest.mark.parametrize("mixing", ["sinkhorn", "permutations"])
def test_one_new_stream_is_a_residual_connection(mixing):
    config = HyperConnections(streams=1, mixing=mixing, norm=RMSNormConfig(scale=False))
    residual = config.build(EMBED, branches=2, inner_dim=EMBED, key=jax.random.key(0))
    residual = eqx.tree_at(lambda w: [c.scale for c in w.connections], residual, [jnp.zeros(3)] * 2)
    want = X[:, :, 0]
    for branch in BRANCHES:
        want = want + branch(jnp.asarray(0.5 * want))
    assert_close(run(residual, jnp.asarray(X[:, :, :1]))[:, :, 0], want, units=200)


@pytest.mark.slow
def test_streams_have_no_order():
    """Streams and what belongs to them permuted: the same result, permuted."""
    residual = drawn(SINKHORN, branches=1)
    order = np.array([2, 0, 1])
    n = STREAMS
    matrix = 2 * n + (np.arange(n * n).reshape(n, n)[order][:, order]).reshape(-1)
    columns = np.concatenate([order, n + order, matrix])
    rows = (order[:, None] * EMBED + np.arange(EMBED)).reshape(-1)

    def permuted(connection):
        return eqx.tree_at(
            lambda c: (c.norm.scale, c.kernel, c.bias),
            connection,
            (connection.norm.scale[rows], connection.kernel[rows][:, columns], connection.bias[columns]),
        )

    other = eqx.tree_at(lambda w: w.connections, residual, tuple(map(permuted, residual.connections)))
    assert_close(
        run(other, jnp.asarray(X[:, :, order]), BRANCHES[:1]), run(residual, jnp.asarray(X), BRANCHES[:1])[:, :, order]
    )
    assert np.ptp(X, axis=2).min() > 1e-3


def test_a_branch_of_all_streams_is_added():
    residual = drawn(SINKHORN, branches=1)
    double = BlockLayer("", lambda x: 2 * x, reads_streams=True)
    got = run_residual(residual, jnp.asarray(X), [double, BlockLayer("", BRANCHES[0])], ctx=CTX)
    assert_close(got, run(residual, jnp.asarray(3 * X), BRANCHES[:1]))


def test_expand_copies_and_reduce_adds():
    x = jnp.asarray(X[:, :, 0])
    streams = SINKHORN.expand(x)
    assert streams.shape == (2, 5, STREAMS, EMBED)
    for k in range(STREAMS):
        assert_array_equal(streams[:, :, k], x)
    assert_close(SINKHORN.reduce(jnp.asarray(X)), X.sum(axis=2))


@pytest.mark.slow
@pytest.mark.parametrize("config", [SINKHORN, PERMUTATIONS], ids=["sinkhorn", "permutations"])
def test_gradients_match_differences(config):
    residual = drawn(config, branches=1)
    x = jnp.asarray(X)
    arrays, static = eqx.partition(residual, eqx.is_array)
    direction = jax.tree.map(
        lambda leaf: jnp.asarray(np.random.default_rng(3).normal(size=leaf.shape), leaf.dtype), (arrays, x)
    )

    @jax.jit
    def loss(step):
        moved, y = jax.tree.map(lambda leaf, to: leaf + step * to, (arrays, x), direction)
        return jnp.mean(jnp.square(run(eqx.combine(moved, static), y, BRANCHES[:1])))

    difference = (float(loss(4e-3)) - float(loss(-4e-3))) / 8e-3
    assert abs(float(jax.jit(jax.grad(loss))(0.0)) - difference) < 1e-2 * abs(difference)


def test_streams_keep_their_dtype():
    y = run(drawn(SINKHORN), jnp.asarray(X, jnp.bfloat16), [lambda y: y] * 2)
    assert y.dtype == jnp.bfloat16
    assert_close(
        y.astype(jnp.float32), run(drawn(SINKHORN), jnp.asarray(X), [lambda y: y] * 2), dtype=jnp.bfloat16, units=4
    )


@pytest.mark.parametrize(
    ("field", "value"), [("streams", 0), ("iterations", 0), ("eps", 0.0)], ids=["streams", "iterations", "eps"]
)
def test_wrong_settings_are_refused(field, value):
    with refused(ed.ConfigError, f"HyperConnections.{field}={value}"):
        HyperConnections(**{field: value})


def test_too_many_permutations():
    with refused(ed.ConfigError, "streams=7"):
        HyperConnections(streams=7, mixing="permutations")
