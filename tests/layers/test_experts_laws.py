"""Laws of experts, for random layers: all forms are equal, gradients are finite differences, and drops are counted."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from jax.test_util import check_grads

import eqx_decoders as ed
from eqx_decoders.layers.experts import ExpertsConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.router import RouterConfig
from tests.layers.test_experts import EMBED, close, drawn, run
from tests.oracles import experts_by_hand
from tests.programs import drop_compiled_programs
from tests.strategies import ROUTERS


# No shrinking: each try compiles for seconds.
SETTINGS = dict(
    derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
few, many = settings(max_examples=2, **SETTINGS), settings(max_examples=60, **SETTINGS)


@st.composite
def layers(draw, capacity: bool = True) -> ExpertsConfig:
    """Any experts: odd numbers of them where groups allow, one slot, all of them, and a capacity that holds all."""
    router = draw(st.sampled_from(ROUTERS))
    experts = draw(st.sampled_from([4, 6, 10] if router.num_groups > 1 else [1, 2, 3, 5, 7, 12]))
    most = experts // router.num_groups * router.groups_per_token
    shared = draw(st.sampled_from([None, MLPConfig(mlp_dim=3), MLPConfig(mlp_dim=2, gated=False, bias=True)]))
    return ExpertsConfig(
        num_experts=experts,
        num_experts_per_token=draw(st.sampled_from(sorted({1, min(2, most), most}))),
        mlp_dim=draw(st.sampled_from([1, 4, 7])),
        router=router,
        activation=draw(st.sampled_from(["silu", "quick_gelu", "gelu_tanh"])),
        up_offset=draw(st.sampled_from([0.0, 1.0])),
        limit=draw(st.sampled_from([None, 0.7])),
        bias=draw(st.booleans()),
        shared=shared,
        shared_gate=shared is not None and draw(st.booleans()),
        capacity_factor=float(experts) if capacity else draw(st.sampled_from([0.4, 1.0, 1.25])),
    )


shapes = st.sampled_from([(1, 1), (1, 7), (2, 5), (3, 3)])
seeds = st.integers(0, 99)


def tokens(shape, seed: int):
    """Tokens, and their positions: about every fifth one is padding."""
    draws = np.random.default_rng(seed)
    places = np.tile(np.arange(shape[1]), (shape[0], 1))
    return draws.normal(size=(*shape, EMBED)).astype(np.float32), np.where(draws.random(shape) < 0.2, -1, places)


def check_forms(config, shape, seed):
    drop_compiled_programs()
    layer, (x, positions) = drawn(config, seed), tokens(shape, seed)
    dense = run(layer, jnp.asarray(x), jnp.asarray(positions), "dense")
    close(dense[0], experts_by_hand(layer, x.astype(np.float64), positions)[0], 3e-5)
    for form in ("dropless", "capacity"):
        out, stats, gradient = run(layer, jnp.asarray(x), jnp.asarray(positions), form)
        assert float(stats.dropped) == 0
        close((out, stats, gradient), dense, 3e-5)


@given(config=layers(), shape=shapes, seed=seeds)
@few
def test_dense_dropless_and_capacity_are_equal(config, shape, seed):
    check_forms(config, shape, seed)


@pytest.mark.slow
@given(config=layers(), shape=shapes, seed=seeds)
@many
def test_dense_dropless_and_capacity_are_equal_often(config, shape, seed):
    check_forms(config, shape, seed)


def check_drops(config, shape, seed):
    drop_compiled_programs()
    layer, (x, positions) = drawn(config, seed), tokens(shape, seed)
    out, stats, gradient = run(layer, jnp.asarray(x), jnp.asarray(positions), "capacity")
    want, dropped = experts_by_hand(layer, x.astype(np.float64), positions, config.capacity(shape[1]))
    close(out, want, 3e-5)
    assert float(stats.dropped) == dropped
    assert float(stats.counts.sum()) == np.sum(positions >= 0) * config.num_experts_per_token
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


@given(config=layers(capacity=False), seed=seeds)
@few
def test_what_finds_no_room_is_dropped_and_counted(config, seed):
    check_drops(config, (2, 9), seed)


@pytest.mark.slow
@given(config=layers(capacity=False), shape=shapes, seed=seeds)
@many
def test_what_finds_no_room_is_dropped_and_counted_often(config, shape, seed):
    check_drops(config, shape, seed)


def check_differences(config, form, seed):
    """In double precision, with everything that has a gradient."""
    with jax.enable_x64(True):
        layer, (x, positions) = drawn(config, seed), tokens((2, 3), seed)
        layer = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), layer)
        # a selection bias steers by steps: no difference there
        held = layer.router.selection_bias
        free = layer if held is None else eqx.tree_at(lambda m: m.router.selection_bias, layer, None)

        def call(layer, x):
            layer = dataclasses.replace(layer, router=dataclasses.replace(layer.router, selection_bias=held))
            ctx = ed.Context(positions=jnp.asarray(positions), execution=ed.Execution(experts=form))
            return layer(x, ctx)[0]

        # steps of 1e-5: with JAX's own of 1e-4 curvature is seen, 1e-5 of the value
        inputs = free, jnp.asarray(x, jnp.float64)
        check_grads(jax.jit(call), inputs, order=1, modes=["rev"], eps=1e-5, rtol=1e-6, atol=1e-6)


FULL = ExpertsConfig(
    num_experts=5, num_experts_per_token=2, mlp_dim=4, router=RouterConfig(bias=True), limit=0.9, up_offset=1.0,
    activation="quick_gelu", bias=True, shared=MLPConfig(mlp_dim=3), shared_gate=True, capacity_factor=1.0,
)  # fmt: skip


@pytest.mark.parametrize("form", [pytest.param("dense", marks=pytest.mark.slow), "capacity"])
def test_gradients_are_finite_differences(form):
    """Where tokens are dropped, too."""
    check_differences(FULL, form, 3)


@pytest.mark.slow
@given(config=layers(capacity=False), form=st.sampled_from(["dense", "dropless", "capacity"]), seed=seeds)
@many
def test_gradients_are_finite_differences_often(config, form, seed):
    # a limit has a corner, which a difference may step over
    check_differences(dataclasses.replace(config, limit=None), form, seed)


@pytest.mark.parametrize(("experts", "chosen"), [pytest.param(1, 1, marks=pytest.mark.slow), (3, 3), (7, 1)])
def test_one_token_finds_its_experts(experts, chosen):
    """As in decoding: with more experts than tokens, and with all of them."""
    config = ExpertsConfig(num_experts=experts, num_experts_per_token=chosen, mlp_dim=3)
    layer, (x, _) = drawn(config, 5), tokens((1, 1), 5)
    out, stats, _ = run(layer, jnp.asarray(x), jnp.zeros((1, 1), jnp.int32), "auto")
    close(out, experts_by_hand(layer, x.astype(np.float64), np.zeros((1, 1), int))[0], 3e-5)
    assert float(stats.counts.sum()) == chosen and float(stats.counts.max()) == 1


@pytest.mark.slow
def test_half_precision_weights_and_tokens_stay_near_single():
    """Weights in bf16 as well: the loss of digits is that of rounding them once."""
    layer, (x, positions) = drawn(FULL, 7), tokens((2, 9), 7)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (layer, jnp.asarray(x)))
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half)
    got, want = (run(*pair, jnp.asarray(positions), "dropless") for pair in (half, wide))
    assert got[0].dtype == jnp.bfloat16 and all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(got[2]))
    close(got[1], want[1], 0.02)
    close((got[0], got[2]), (want[0], want[2]), 0.05)
