"""Causal convolutions match the definition, for rows with and without gaps, documents, padding and several calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.layers.cache.recurrent_state import last_inputs
from eqx_decoders.layers.documents import document_starts
from eqx_decoders.layers.recurrent.causal_conv import causal_convolution
from tests.compare import assert_allclose, assert_array_equal


BATCH, CHANNELS, TAPS = 3, 5, 4


def definition(x, kernel, bias, tail, positions, segments, dilation):
    """Compute token by token in NumPy. Returns also the last inputs."""
    size, y, tails = (TAPS - 1) * dilation, np.zeros(x.shape), np.zeros((BATCH, (TAPS - 1) * dilation, CHANNELS))
    for row in range(BATCH):
        seen, document = list(tail[row]), None
        for at in np.flatnonzero(positions[row] >= 0):
            if document is not None and segments is not None and segments[row, at] != document:
                seen = []
            document = None if segments is None else segments[row, at]
            seen.append(x[row, at])
            lags = [tap * dilation for tap in range(TAPS) if tap * dilation < len(seen)]
            y[row, at] = bias + sum(kernel[:, TAPS - 1 - lag // dilation] * seen[-1 - lag] for lag in lags)
        tails[row] = ([np.zeros(CHANNELS)] * size + seen)[-size:]
    return y, tails


def real_tokens(padding, length):
    """Return which tokens of each row are real."""
    places, row = np.arange(length)[None], np.arange(BATCH)[:, None]
    if padding == "between":
        return np.random.default_rng(length).random((BATCH, length)) < 0.6
    return {"none": places >= 0 * row, "before": places >= 2 * row, "behind": places < length - 2 * row}[padding]


@functools.partial(jax.jit, static_argnames="dilation")
def run(x, kernel, bias, tail, positions, segments, weights, dilation):
    def loss(x, kernel, bias, tail):
        y = causal_convolution(x, kernel, bias, tail, positions, segments, dilation)
        return (jnp.where(positions[:, :, None] >= 0, y, 0.0) * weights).sum(), y

    given = (0, 1, 2) if tail is None else (0, 1, 2, 3)
    (_, y), grads = jax.value_and_grad(loss, given, has_aux=True)(x, kernel, bias, tail)
    return y, grads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "dilation"),
    [(1, 1), (13, 3), (1, 3), (13, 1)],
)
def test_matches_the_definition(length, dilation):
    """Values, and gradients by linearity: y is linear in x, the state, and the kernel with the bias."""
    draws = np.random.default_rng(0)
    x, weights = draws.normal(size=(2, BATCH, length, CHANNELS)).astype(np.float32)
    kernel, bias = draws.normal(size=(CHANNELS, TAPS)).astype(np.float32), draws.normal(size=CHANNELS).astype("f4")
    tail = draws.normal(size=(BATCH, (TAPS - 1) * dilation, CHANNELS)).astype(np.float32)
    cut = np.cumsum(draws.random((BATCH, length)) < 0.3, axis=1).astype(np.int32)
    for padding in ("none", "before", "behind", "between"):
        real = real_tokens(padding, length)
        positions = np.where(real, np.cumsum(real, axis=1) - 1, -1).astype(np.int32)
        for before, segments in ((None, None), (None, cut), (tail, None)):
            past = np.zeros_like(tail) if before is None else before
            expected, last = definition(x, kernel, bias, past, positions, segments, dilation)
            arrays = jax.tree.map(jnp.asarray, (x, kernel, bias, before, positions, segments, weights))
            y, grads = run(*arrays, dilation=dilation)
            assert_allclose(y, expected, atol=1e-5)  # 0 for padding
            loss = (expected * weights)[real].sum()
            inner = (grads[0] * x).sum() + (grads[2] * bias).sum() + (0 if before is None else (grads[3] * tail).sum())
            assert_allclose(inner, loss, atol=1e-4)
            inner = (grads[1] * kernel).sum() + (grads[2] * bias).sum()
            assert_allclose(inner, loss, atol=1e-4)
            if segments is None:
                found = last_inputs(jnp.asarray(past), jnp.asarray(x), jnp.asarray(positions))
                assert_array_equal(found, last)


def test_consecutive_calls_match_one_call():
    draws = np.random.default_rng(1)
    x, kernel = jnp.asarray(draws.normal(size=(1, 17, 2)), jnp.float32), jnp.ones((2, 4))
    positions, tail, parts = jnp.arange(17)[None], jnp.zeros((1, 3, 2)), []
    convolve, last = jax.jit(causal_convolution), jax.jit(last_inputs)
    for start, end in ((0, 1), (1, 3), (3, 17)):
        here = x[:, start:end], positions[:, start:end]
        parts.append(convolve(here[0], kernel, None, tail, here[1], None))
        tail = last(tail, *here)
    whole = convolve(x, kernel, None, None, positions, None)
    assert_allclose(jnp.concatenate(parts, 1), whole, atol=1e-5)


def test_half_precision_is_summed_in_float32():
    x = jnp.asarray([[[256.0], [1.0], [1.0], [1.0]]], jnp.bfloat16)
    y = causal_convolution(x, jnp.ones((1, 4)), None, None, jnp.arange(4)[None], None)
    assert y.dtype == jnp.bfloat16 and float(y[0, 3, 0]) == float(jnp.bfloat16(259.0))


def test_document_starts():
    segments = jnp.asarray([[1, 1, 9, 1, 2, 2, 7, 3], [4, 4, 4, 4, 4, 4, 4, 4]])
    positions = jnp.asarray([[0, 1, -1, 2, 0, 1, -1, 0], [0, 1, 2, 3, 4, 5, 6, 7]])
    starts = document_starts(positions, segments)
    assert starts is not None and np.flatnonzero(starts[0]).tolist() == [4, 7] and not starts[1].any()
    assert document_starts(positions, None) is None
