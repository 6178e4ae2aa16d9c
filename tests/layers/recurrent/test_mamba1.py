"""Mamba against loops; its scan in chunks, and on a mesh."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.context import Execution
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.recurrent.mamba1 import Mamba1Config
from eqx_decoders.layers.recurrent.scans.selective_scan import selective_scan, selective_scan_on_mesh
from tests.compare import assert_allclose, assert_close
from tests.layers.common import context, drawn, normal
from tests.oracles import silu, wide


def part(leaf) -> Any:
    return 0.0 if leaf is None else wide(leaf)


def by_hand(layer, x, positions, segments):
    """Compute token by token, with one state per document and without padding."""
    stream, gate = np.moveaxis(np.einsum("bte,eic->btic", x, part(layer.inputs)) + part(layer.inputs_bias), 2, 0)
    config, taps, rates = layer.config, part(layer.taps), np.exp(part(layer.a_log))
    ends = np.cumsum([config.step_rank, config.key_dim])

    def normed(x, norm):
        return x if norm is None else x / np.sqrt(np.mean(x * x) + config.norm.eps) * part(norm.scale)

    out = np.zeros((*x.shape[:2], layer.out.shape[1]))
    for b in range(len(x)):
        state, seen, document = np.zeros((config.channels, config.key_dim)), [], None
        for t in np.flatnonzero(positions[b] >= 0):
            if segments[b, t] != document:
                state, seen, document = np.zeros_like(state), [], segments[b, t]
            seen.append(stream[b, t])
            value = part(layer.taps_bias) + np.zeros(config.channels)
            for tap, inputs in zip(reversed(range(config.taps)), reversed(seen), strict=False):
                value = value + taps[:, tap] * inputs
            value = silu(value)
            parts = np.split(value @ part(layer.scan_inputs), ends)
            features, key, query = map(normed, parts, (layer.step_norm, layer.key_norm, layer.query_norm))
            step = np.log1p(np.exp(features @ part(layer.dt) + part(layer.dt_bias)))
            state = np.exp(-rates * step[:, None]) * state + np.outer(step * value, key)
            answer = state @ query + part(layer.skip) * value
            out[b, t] = (answer * silu(gate[b, t])) @ part(layer.out)
    return out + part(layer.out_bias)


@pytest.mark.slow(fast=("bias=True taps_bias=False norm=RMSNormConfig(eps=0", "norm=RMSNormConfig()"))
@pytest.mark.parametrize(
    "options",
    [{}, dict(bias=True, taps_bias=False, norm=RMSNormConfig(eps=0.1)), dict(norm=RMSNormConfig())],
)
def test_layer_matches_a_loop(options):
    """Packed rows with padding in between."""
    config = Mamba1Config(channels=6, key_dim=3, step_rank=2, taps=3, **options)
    layer, x = drawn(lambda key: config.build(5, key=key)), normal(2, 9, 5)
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 2, 2, 2, 2, 3, 3, 0]])
    positions = np.array([[0, 1, -1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 0, 1, -1]])
    got, entries = eqx.filter_jit(layer)(jnp.asarray(x), context(positions, segments))
    real = positions >= 0
    assert_close(np.asarray(got)[real], by_hand(layer, wide(x), positions, segments)[real], units=64)
    assert entries["state"].steps.shape == (2, 9, 6) and config.token_products(100) == 36


def inputs(length: int, channels: int = 4, key_dim: int = 3) -> list:
    """Return three rows: two documents in the second row, and padding in the third."""
    steps, written = np.abs(normal(3, length, channels)), normal(3, length, channels, seed=2)
    steps[2, 5:9] = written[2, 5:9] = 0.0
    keys = normal(3, length, key_dim, seed=3), normal(3, length, key_dim, seed=4)
    starts = np.zeros((3, length), bool)
    starts[1, [7, length // 2]] = True
    rates, state = -np.abs(normal(key_dim, channels, seed=5)), normal(3, key_dim, channels, seed=6)
    return [jnp.asarray(x) for x in (steps, written, *keys, rates, state, starts)]


@functools.partial(jax.jit, static_argnames="function")
def results(args, starts, function):
    """Return results, and gradients of a weighted sum of all results."""

    def loss(args):
        found = function(*args, starts)
        weights = [jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in found]
        return sum((x * w).sum() for x, w in zip(found, weights, strict=True)), found

    return jax.grad(loss, has_aux=True)(args)


def same(found, want):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow(fast=("4",))
@pytest.mark.parametrize("chunk", [4, 16])
def test_chunks_match_single_tokens(chunk):
    *args, starts = inputs(26)
    want = results(args, starts, functools.partial(selective_scan, chunk=1))
    same(results(args, starts, functools.partial(selective_scan, chunk=chunk)), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [dict(context=2, tensor=2, data=2), dict(context=4, tensor=2)],
)
@pytest.mark.parametrize("stateless", [True, False])
def test_sharded_sequences_match_one_device(sizes, stateless):
    *args, state, starts = inputs(80)
    args = [*args, None if stateless else state]
    want = results(args, starts, selective_scan)
    run = functools.partial(selective_scan_on_mesh, execution=Execution(layout=ed.Layout.create(**sizes)))
    same(results(args, starts, run), want)


@pytest.mark.slow
def test_states_of_all_tokens_are_not_stored():
    """In both passes, memory grows with the tokens of a chunk, and with one state per chunk."""
    *args, starts = inputs(4096, channels=32, key_dim=16)
    memory: Any = results.lower(args, starts, selective_scan).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3 * 4096 * 32 * 16 * 4 / 2
