"""Recurrences and convolutions of sharded rows equal those of one device, without exchange of tokens."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.context import Execution, ForwardContext
from eqx_decoders.layers.recurrent.causal_conv import causal_convolution
from eqx_decoders.layers.recurrent.scans.recurrence import delta_rule
from eqx_decoders.layers.recurrent.scans.sharded_scan import recur_on_mesh
from eqx_decoders.layers.recurrent.sharded_conv import convolve_on_mesh
from tests.cases import RECURRENT
from tests.layers.common import drawn, normal
from tests.layers.recurrent.scans.test_recurrence import documents, make, same


TWO, FOUR, EIGHT = dict(context=2, data=2, tensor=2), dict(context=4, tensor=2), dict(context=8)
slow = pytest.mark.slow


@functools.partial(jax.jit, static_argnames=("function", "options"))
def results(function, args, rest, options=()):
    """Return results, and gradients of a weighted sum of all results."""

    def loss(args):
        found = jax.tree.leaves(function(*args, *rest, **dict(options)))
        weights = [jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in found]
        return sum((x.astype(jnp.float32) * w).sum() for x, w in zip(found, weights, strict=True)), found

    (_, found), grads = jax.value_and_grad(loss, has_aux=True)(args)
    return found, grads


@pytest.mark.slow(fast=("True-context=8-head-default", "True-context=4 tensor=2-linear-stateless=True"))
@pytest.mark.parametrize(
    ("sizes", "kind", "options"),
    [
        (TWO, "head", {}),
        (FOUR, "linear", dict(stateless=True)),
        (FOUR, "channel", {}),
        (EIGHT, "head", {}),
        (EIGHT, "channel", dict(key_heads=4)),
        (EIGHT, "linear", dict(batch=3)),
        (FOUR, "head", dict(key_heads=1)),
        (FOUR, "linear", dict(key_heads=3, heads=6)),
        (dict(context=2, tensor=4), "linear", dict(key_heads=2, heads=8)),
        (dict(context=2, tensor=4), "head", dict(key_heads=2, heads=4)),
    ],
)
@pytest.mark.parametrize("resets", [True, False])
def test_sharded_recurrence_matches_one_device(sizes, kind, options, resets):
    """From a state or zeros, with documents that end or start within a shard. Compares outputs and the last state."""
    stateless = options.get("stateless", False)
    *args, state = make(96, kind, **{name: value for name, value in options.items() if name != "stateless"})
    starts = documents(96, len(state)).at[:, 48].set(True) if resets else None
    args = (*args, *([None] if kind == "linear" else []), None if stateless else state)
    execution = Execution(layout=ed.Layout.create(**sizes))
    want = results(delta_rule, args, (starts,))
    same(results(recur_on_mesh, args, (starts,), (("execution", execution),)), want, tolerance=1e-5)


@slow
def test_strong_decays_match_one_device():
    """Decays from complete to none."""
    query, key, value, decay, beta, state = make(64)
    steep = decay * jnp.where(jnp.arange(64) % 3 == 0, 1e4, 0.0)[None, :, None, None]
    execution = Execution(layout=ed.Layout.create(**EIGHT))
    for middle in (beta, None):
        args = (query, key, value, steep, middle, state)
        want = results(delta_rule, args, (None,))
        same(results(recur_on_mesh, args, (None,), (("execution", execution),)), want, tolerance=1e-5)


@pytest.mark.parametrize("dilation", [1, pytest.param(3, marks=slow)])
@pytest.mark.parametrize("tailed", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("sizes", [FOUR, pytest.param(EIGHT, marks=slow)])
def test_sharded_convolution_matches_one_device(sizes, dilation, tailed):
    """Gaps in rows, shards of padding, interleaved documents; shards shorter than the kernel."""
    draws, channels, taps = np.random.default_rng(0), 6, 4
    x, kernel = draws.normal(size=(4, 32, channels)), draws.normal(size=(channels, taps))
    tail = draws.normal(size=(4, (taps - 1) * dilation, channels)) if tailed else None
    args = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (x, kernel, draws.normal(size=channels), tail))
    real = draws.random((4, 32)) < np.array([[1.0], [0.6], [0.3], [1.0]])
    real[3, 6:26] = False
    segments = jnp.asarray(np.cumsum(draws.random((4, 32)) < 0.15, axis=1) % 2 + 1, jnp.int32).at[3].set(1)
    positions = jnp.where(jnp.asarray(real), jnp.arange(32)[None], -1)
    execution = Execution(layout=ed.Layout.create(**sizes))

    def only_real(function):
        def run(*args, **options):
            return jnp.where(positions[:, :, None] >= 0, function(*args, dilation=dilation, **options), 0.0)

        return run

    want = results(only_real(causal_convolution), args, (positions, segments))
    found = results(only_real(convolve_on_mesh), args, (positions, segments), (("execution", execution),))
    same(found, want)


def layer_and_rows(name, length=64):
    layer = drawn(lambda key: RECURRENT[name].build(16, key=key))
    cut = np.array([[24], [37]])
    place = np.arange(length)[None]
    positions = np.where(place < cut, place, place - cut)
    positions[:, -7:] = -1
    rows = (
        jnp.asarray(normal(2, length, 16)),
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(1 + (place >= cut), jnp.int32),
    )
    return layer, rows


@eqx.filter_jit
def outputs(layer, rows, execution):
    x, positions, segments = rows

    def loss(both):
        layer, x = both
        out = layer(x, ForwardContext(positions, segments, execution=execution))[0]
        out = jnp.where(positions[:, :, None] >= 0, out, 0.0)
        return (out * jnp.sin(jnp.arange(out.size)).reshape(out.shape)).sum(), out

    (_, out), grads = eqx.filter_value_and_grad(loss, has_aux=True)((layer, x))
    return out, eqx.filter(grads, eqx.is_array)


MIXERS = ("delta net", "mamba2", "mamba", "kimi delta", "gated unit", "time mix", "mLSTM")


# with context=2, data=2, tensor=2, XLA for CPU (jax 0.10) crashes for decay by channel and one chunk of 32 tokens
@slow
@pytest.mark.parametrize("sizes", [FOUR, EIGHT, dict(context=2, data=4)])
@pytest.mark.parametrize("name", [*MIXERS, "lightning", "mamba2 and attention"])
def test_layers(name, sizes):
    """Packed rows with padding: outputs, and gradients of weights and inputs."""
    layer, rows = layer_and_rows(name)
    many = outputs(layer, rows, Execution(layout=ed.Layout.create(**sizes)))
    same(many, outputs(layer, rows, Execution()), tolerance=2e-5)


@slow
@pytest.mark.parametrize("name", MIXERS)
def test_tokens_are_not_gathered(name):
    """A step on context=4 gathers no float32 array with the length of the row."""
    layer, (x, positions, segments) = layer_and_rows(name, length=256)
    layout = ed.Layout.create(context=4, data=2)
    x = jax.device_put(x, layout.activation_sharding("batch length embed", x.shape))
    places = [jax.device_put(each, layout.activation_sharding("batch length")) for each in (positions, segments)]
    execution = Execution(layout=layout)
    arrays, static = eqx.partition((layer, (x, *places)), eqx.is_array)
    step = jax.jit(lambda arrays: outputs(*eqx.combine(arrays, static), execution))
    text = str(step.lower(arrays).compile().as_text())
    moved = re.findall(r" = \(?f32\[([\d,]+)\]\S* (all-gather|all-to-all|all-reduce|collective-permute)", text)
    assert moved, "states are gathered"
    assert not [shape for shape, _ in moved if "256" in shape.split(",")], moved
