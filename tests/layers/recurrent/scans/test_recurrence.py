"""Recurrences: chunked computation equals token-by-token computation, in values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.recurrent.scans.recurrence import delta_rule, linear_recurrence
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused


KINDS = ["head", "channel", "linear"]  # decay by head or by channel, without the delta rule


def make(length, kind="head", *, batch=2, key_heads=2, heads=4, key_dim=8, value_dim=6, seed=0):
    """Return query, key, value, log_decay, beta, state; the linear recurrence has no beta."""
    draws = np.random.default_rng(seed)

    def normal(*shape):
        return draws.normal(size=shape).astype(np.float32)

    query, key = normal(batch, length, key_heads, key_dim), normal(batch, length, key_heads, key_dim)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = normal(batch, length, heads, value_dim)
    decay = -np.abs(normal(batch, length, heads, key_dim if kind == "channel" else 1))
    beta = 1 / (1 + np.exp(-normal(batch, length, heads)))
    middle = () if kind == "linear" else (beta,)
    return tuple(jnp.asarray(x) for x in (query, key, value, decay, *middle, normal(batch, heads, key_dim, value_dim)))


def form(kind, chunk):
    return functools.partial(linear_recurrence if kind == "linear" else delta_rule, chunk=chunk)


@functools.partial(jax.jit, static_argnames=("kind", "chunk"))
def results_of(args, kind, chunk):
    return form(kind, chunk)(*args)


@functools.partial(jax.jit, static_argnames=("kind", "chunk"))
def all_of(args, resets, kind, chunk):
    """Return results, and gradients of a weighted sum of all results."""

    def loss(args):
        results = form(kind, chunk)(*args, resets)
        weights = [jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in results]
        return sum((x.astype(jnp.float32) * w).sum() for x, w in zip(results, weights, strict=True)), results

    (_, results), grads = jax.value_and_grad(loss, has_aux=True)(args)
    return results, grads


def same(left, right, tolerance=5e-6):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(a).all() and np.isfinite(b).all()
        assert_allclose(a, b, atol=tolerance * max(1.0, np.abs(b).max(initial=0.0)), rtol=0)


def documents(length, batch=2):
    """Return document starts: the first token, two neighbors, and later tokens; the other row has other starts."""
    starts = np.zeros((batch, length), bool)
    for row in range(batch):
        starts[row, [at for at in (0, 5 + row, 6 + row, length // 2, length - 1 - row) if 0 <= at < length]] = True
    return jnp.asarray(starts)


@pytest.mark.slow(fast=("13-head", "13-channel", "13-linear"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [13, 97])
def test_chunks_match_single_tokens(kind, length):
    args, resets = make(length, kind), documents(length)
    same(all_of(args, resets, kind, 64), all_of(args, resets, kind, None))


@pytest.mark.slow
def test_a_single_short_chunk_of_a_wide_layer():
    """XLA for CPU crashed on this case."""
    args = make(31, "channel", key_heads=4, key_dim=64, value_dim=64)
    same(all_of(args, None, "channel", 64), all_of(args, None, "channel", None), tolerance=2e-5)


@pytest.mark.slow
def test_several_chunks_of_32_of_a_wide_layer():
    """XLA for CPU crashed on this case, too."""
    args = make(40, "channel", key_heads=2, heads=2, key_dim=16, value_dim=16)
    same(all_of(args, None, "channel", 32), all_of(args, None, "channel", None), tolerance=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 64, 65, 130])
def test_any_length_and_chunk_size(kind, chunk, length):
    for resets in (None, documents(length)):
        for heads in (2, 6):
            args = make(length, kind, heads=heads, seed=length)
            same(all_of(args, resets, kind, chunk), all_of(args, resets, kind, None))


def test_matches_the_definition():
    """NumPy in float64, written from the formulas."""
    query, key, value, decay, beta, state = (np.asarray(x, np.float64) for x in make(9, "channel"))
    expected = np.zeros(value.shape)
    for row, head in np.ndindex(2, 4):
        matrix = state[row, head]
        for at in range(9):
            matrix = np.exp(decay[row, at, head])[:, None] * matrix
            k = key[row, at, head // 2]
            matrix = matrix + np.outer(k, beta[row, at, head] * (value[row, at, head] - matrix.T @ k))
            expected[row, at, head] = matrix.T @ query[row, at, head // 2]
    out, written, _ = delta_rule(*make(9, "channel"), chunk=None)
    assert_allclose(out, expected, atol=1e-5)
    args = make(9, "channel")
    again, _ = linear_recurrence(*args[:2], written, *args[3:4], args[5], chunk=None)
    assert_allclose(again, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_strong_decays(kind):
    """No overflow and no loss of precision if some tokens or channels decay completely and others do not decay."""
    args = list(make(130, kind))
    draws = np.random.default_rng(3)
    args[3] = jnp.asarray(
        draws.choice([0.0, -1e-3, -20.0, -3e4], size=args[3].shape, p=[0.4, 0.4, 0.1, 0.1]), jnp.float32
    )
    same(all_of(tuple(args), None, kind, 64), all_of(tuple(args), None, kind, None))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_independent(kind):
    """Results and gradients of a document do not depend on other documents, bit by bit."""
    args, length = make(90, kind), 90
    resets = jnp.zeros((2, length), bool).at[:, 21].set(True).at[:, 70].set(True)
    inside = (np.arange(length) >= 21) & (np.arange(length) < 70)
    others = tuple(
        x if x.shape[1] != length else jnp.where(inside.reshape(1, length, *(1,) * (x.ndim - 2)), x, y)
        for x, y in zip(args, make(90, kind, seed=7), strict=True)
    )
    for chunk in (64, None):
        for a, b in zip(*(jax.tree.leaves(all_of(each, resets, kind, chunk)) for each in (args, others)), strict=True):
            if a.shape[1] == length:
                assert_array_equal(a[:, 21:70], b[:, 21:70])
    out = all_of(args, resets, kind, 64)[0][0]
    alone = tuple(x[:, 21:70] if x.shape[1] == length else jnp.zeros_like(x) for x in args)
    same(out[:, 21:70], all_of(alone, None, kind, 64)[0][0])


@pytest.mark.slow(fast=("channel",))
@pytest.mark.parametrize("kind", KINDS)
def test_padding_does_not_change_the_state(kind):
    """Anywhere in a row; exactly if a row has only padding."""
    args, length = make(60, kind), 97
    places = jnp.asarray(np.sort(np.random.default_rng(0).permutation(length)[:60]))
    wide = tuple(x if x.shape[1] != 60 else jnp.zeros((2, length, *x.shape[2:])).at[:, places].set(x) for x in args)
    short, long = results_of(args, kind, 64), results_of(wide, kind, 64)
    same([x[:, places] if x.shape[1] == length else x for x in long], short)
    nothing = tuple(jnp.zeros_like(x) for x in wide[:-1])
    assert_array_equal(results_of((*nothing, args[-1]), kind, 64)[-1], args[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_consecutive_calls_match_one_call(kind):
    args, outs = make(97, kind), []
    state = args[-1]
    for start, end in ((0, 1), (1, 31), (31, 97)):
        part = tuple(x[:, start:end] for x in args[:-1])
        out, *_, state = results_of((*part, state), kind, 64)
        outs.append(out)
    whole = results_of(args, kind, 64)
    same([jnp.concatenate(outs, 1), state], [whole[0], whole[-1]])


@pytest.mark.slow
def test_equal_keys_are_numerically_stable():
    """Equal keys and beta = 1: powers of A reach 1e17, but the entries of its inverse stay small."""
    query, key, value, decay, beta, state = make(64)
    args = (query, jnp.ones_like(key) * 8**-0.5, value, 0.0 * decay, jnp.ones_like(beta), state)
    same(all_of(args, None, "head", 64), all_of(args, None, "head", None), tolerance=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_close_to_float32(kind):
    args = make(97, kind)
    low = tuple(x.astype(jnp.bfloat16) for x in args[:3]) + args[3:]
    exact = all_of(tuple(x.astype(jnp.float32) for x in low), None, kind, 64)
    near = all_of(low, None, kind, 64)
    assert near[0][0].dtype == jnp.bfloat16 and near[0][-1].dtype == jnp.float32 and near[1][0].dtype == jnp.bfloat16
    same(jax.tree.map(lambda x: x.astype(jnp.float32), near), exact, tolerance=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_long_rows_stay_finite(kind):
    args = make(2048, kind, batch=1, key_heads=1, heads=1)
    results, grads = all_of(args, None, kind, 64)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((results, grads)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_memory_grows_linearly_with_the_length(kind):
    def bytes_at(length):
        args = make(length, kind, batch=1, key_heads=1, heads=1, key_dim=64, value_dim=64)
        sizes = all_of.lower(args, None, kind, 64).compile().memory_analysis()
        assert sizes is not None
        return sizes.temp_size_in_bytes

    short, long = bytes_at(1024), bytes_at(4096)
    assert long < 5 * short and long < 4096 * 64 * 4 * 32  # a state per token would need 64 such arrays


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "channel"])
def test_sharded_recurrence_matches_one_device(kind):
    """Batch over `data`, heads over `tensor`: equal results without collectives."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2)
    args = make(40, kind)
    split = [P("data", "tensor") if x is args[-1] else P("data", None, "tensor") for x in args]
    there = tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, split, strict=True))
    program = all_of.lower(there, None, kind, 64).compile()
    for word in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert f" {word}(" not in program.as_text() and f" {word}-start(" not in program.as_text()
    same(program(there, None), all_of(args, None, kind, 64))


def test_refusals():
    for platform in ("cpu", "tpu"):
        with refused(ConfigError, "value heads=4", "key heads=3"):
            delta_rule(*make(128, key_heads=3, key_dim=128, value_dim=128, batch=1), platform=platform)
    with refused(ConfigError, "chunk=48"):
        delta_rule(*make(4), chunk=48)
