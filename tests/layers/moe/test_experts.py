"""Experts: three implementations of one sum against a loop in NumPy, dropped tokens, and random layers."""

import dataclasses
from unittest.mock import Mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from jax.test_util import check_grads

import eqx_decoders as ed
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import Experts, ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.numerics.low_rank import LowRank
from eqx_decoders.sharding.axes import axes, product_axes
from eqx_decoders.training.optimizer.optimizer import muon_dimensions
from tests.compare import assert_close
from tests.errors import refused
from tests.models import ROUTERS
from tests.oracles import experts_by_hand
from tests.programs import drop_compiled_programs


EMBED = 6
FORMS = ("dense", "dropless", "capacity")
PLAIN = ExpertsConfig(num_experts=5, num_experts_per_token=2, mlp_dim=4, capacity_factor=9.0)
GPT_OSS = dict(activation="quick_gelu", up_offset=1.0, limit=0.7, bias=True, router=RouterConfig(bias=True))
DEEPSEEK = RouterConfig(
    score="sigmoid", order="score_first", renormalize=True, selection_bias=True, scaling_factor=2.5,
    num_groups=2, groups_per_token=1, group_score="top2_sum",
)  # fmt: skip
# a layer and the shape of its tokens
CASES = {
    "gpt_oss": (dataclasses.replace(PLAIN, **GPT_OSS), (3, 5)),
    "deepseek": (
        dataclasses.replace(
            PLAIN, num_experts=8, num_experts_per_token=3, router=DEEPSEEK, shared=MLPConfig(mlp_dim=3)
        ),
        (2, 4),
    ),
    "nemotron": (
        dataclasses.replace(
            PLAIN,
            gated=False,
            latent_dim=6,
            activation="relu2",
            bias=True,
            router=DEEPSEEK,
            num_experts=8,
            shared=MLPConfig(mlp_dim=3, gated=False, activation="relu2"),
            shared_gate=True,
        ),
        (2, 4),
    ),
    "gemma4": (
        dataclasses.replace(
            PLAIN,
            router=RouterConfig(order="score_first", per_expert_scale=True, input_norm=RMSNormConfig(eps=0.1)),
            shared=MLPConfig(mlp_dim=3),
            norms=RMSNormConfig(eps=0.1),
        ),
        (2, 5),
    ),
    "longcat, with a bias": (
        dataclasses.replace(
            PLAIN,
            num_zero_experts=4,
            num_experts_per_token=3,
            out_bias=True,
            router=RouterConfig(order="score_first", scaling_factor=1.5),
        ),
        (2, 5),
    ),
    "llama4, all of three": (
        dataclasses.replace(
            PLAIN, num_experts=3, num_experts_per_token=3, router=RouterConfig(score="sigmoid", input_scaling=True)
        ),
        (1, 9),
    ),
    "qwen3_next, one token of sixty-four": (
        dataclasses.replace(PLAIN, num_experts=64, capacity_factor=64.0, shared=MLPConfig(mlp_dim=3), shared_gate=True),
        (1, 1),
    ),
}


def drawn(config: ExpertsConfig, seed: int = 0) -> Experts:
    """Return a layer with random weights from NumPy."""
    draws = np.random.default_rng(seed)
    shapes = eqx.filter_eval_shape(lambda key: config.build(EMBED, key=key), jax.random.key(0))
    arrays, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return eqx.combine(jax.tree.map(lambda a: jnp.asarray(draws.normal(0.1, 0.5, a.shape), a.dtype), arrays), static)


def tokens(shape, seed: int = 1):
    """Return tokens and their positions; with more than two tokens, every third one is padding."""
    x = np.random.default_rng(seed).normal(size=(*shape, EMBED)).astype(np.float32)
    places = np.tile(np.arange(shape[1]), (shape[0], 1))
    return x, np.where((places % 3 == 2) & (shape[1] > 2), -1, places)


@eqx.filter_jit
def run(layer, x, positions, form):
    """Return output, statistics and the gradient of a weighted sum."""

    def loss(diff):
        layer, x = diff
        ctx = ed.ForwardContext(positions=positions, execution=ed.Execution(experts=form))
        out, stats = layer(x, ctx)
        weights = jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(weights * out.astype(jnp.float32)), (out, stats)

    (_, (out, stats)), gradient = jax.value_and_grad(loss, has_aux=True)((layer, x))
    return out, stats, gradient


@pytest.mark.slow(fast=("gpt_oss",))
@pytest.mark.parametrize("name", CASES)
def test_all_implementations_match_numpy_and_have_equal_gradients(name):
    config, shape = CASES[name]
    layer, (x, positions) = drawn(config), tokens(shape)
    results = {form: run(layer, jnp.asarray(x), jnp.asarray(positions), form) for form in FORMS}
    want, _ = experts_by_hand(layer, x.astype(np.float64), positions)
    for out, stats, gradient in results.values():
        assert_close(out, want, units=256)
        assert_close((stats, gradient), results["dense"][1:], units=256)
    assert float(results["capacity"][1].dropped) == 0
    assert np.any(results["dropless"][2][0].down)


@pytest.mark.slow(fast=("gpt_oss",))
@pytest.mark.parametrize("name", ["gpt_oss", "llama4, all of three"])
def test_runs_all_experts_on_few_tokens_on_tpu(name, monkeypatch):
    """The implementation of a decoding step on TPU, run on CPU: tokens and expert outputs are not copied."""
    config, shape = CASES[name]
    layer, (x, positions) = drawn(dataclasses.replace(config, capacity_factor=None)), tokens(shape)
    want = run(layer, jnp.asarray(x), jnp.asarray(positions), "dense")
    monkeypatch.setattr(ed.Layout, "platform", "tpu")
    few = Mock(side_effect=Experts._all_experts)
    monkeypatch.setattr(Experts, "_all_experts", lambda *args: few(*args))
    found = eqx.filter_jit(lambda *inputs: run.__wrapped__(*inputs, "auto"))(layer, x, jnp.asarray(positions))
    assert_close(found, want, units=256)
    assert few.called


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dropless", "capacity"])
def test_all_tokens_select_the_same_expert(form):
    layer, (x, positions) = drawn(dataclasses.replace(PLAIN, num_experts_per_token=1)), tokens((2, 7))
    kernel = jnp.zeros_like(layer.router.kernel)
    layer = dataclasses.replace(layer, router=dataclasses.replace(layer.router, kernel=kernel))
    out, stats, gradient = run(layer, jnp.asarray(x), jnp.asarray(positions), form)
    assert stats.counts.tolist() == [float(np.sum(positions >= 0)), 0.0, 0.0, 0.0, 0.0]
    assert_close(out, experts_by_hand(layer, x.astype(np.float64), positions)[0], units=256)
    assert np.any(gradient[0].up[0]) and not np.any(gradient[0].up[1:])
    nothing = run(layer, jnp.asarray(x), jnp.full(positions.shape, -1), form)
    assert not np.any(nothing[0]) and not any(np.any(leaf) for leaf in jax.tree.leaves(nothing[2]))


@pytest.mark.slow
def test_dropless_gradients_equal_finite_differences_in_float64():
    """For all arrays with a gradient."""
    config = dataclasses.replace(CASES["deepseek"][0], bias=True, shared_gate=True, up_offset=1.0)
    with jax.enable_x64(True):
        layer, (x, positions) = drawn(config), tokens((2, 3))
        layer = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), layer)
        bias = layer.router.selection_bias

        def call(layer, x):  # the selection bias is updated in steps and has no gradient
            layer = eqx.tree_at(lambda m: m.router.selection_bias, layer, bias, is_leaf=lambda leaf: leaf is None)
            ctx = ed.ForwardContext(positions=jnp.asarray(positions), execution=ed.Execution(experts="dropless"))
            return layer(x, ctx)[0]

        free = eqx.tree_at(lambda m: m.router.selection_bias, layer, None)
        check_grads(jax.jit(call), (free, jnp.asarray(x, jnp.float64)), order=1, modes=["rev"], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dropless", "capacity"])
def test_half_precision_tokens_match_single_precision(form):
    layer, (x, positions) = drawn(CASES["gpt_oss"][0]), tokens((3, 5))
    x = jnp.asarray(x, jnp.bfloat16)
    out, stats, gradient = run(layer, x, jnp.asarray(positions), form)
    want = run(layer, x.astype(jnp.float32), jnp.asarray(positions), form)
    assert out.dtype == jnp.bfloat16 and all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradient[0]))
    assert_close(stats, want[1], units=256)
    assert_close((out, gradient), (want[0], want[2]), units=8, dtype="bfloat16")


# --- capacity ---


@pytest.mark.parametrize(
    ("length", "chosen", "experts", "factor", "room"),
    [
        (8, 2, 4, 1.25, 5),
        (9, 2, 4, 1.25, 6),
        (2, 1, 8, 0.5, 1),
        (1, 2, 4, 1.0, 1),
        (8, 1, 8, 0.9, 1),
        (16, 2, 8, 2.0, 8),
    ],
)
def test_capacity_formula(length, chosen, experts, factor, room):
    config = dataclasses.replace(PLAIN, num_experts=experts, num_experts_per_token=chosen, capacity_factor=factor)
    assert config.capacity(length) == room


@pytest.mark.slow(fast=("0.5-llama4, all of three", "0.1-gpt_oss"))
@pytest.mark.parametrize(("factor", "name"), [(1.0, "deepseek"), (0.5, "llama4, all of three"), (0.1, "gpt_oss")])
def test_drops_tokens_after_capacity_is_reached(factor, name):
    """For each row separately. Other weights are not increased, and the remaining tokens have gradients."""
    config, (rows, _) = dataclasses.replace(CASES[name][0], capacity_factor=factor), CASES[name][1]
    layer, (x, positions) = drawn(config), tokens((rows, 9))
    out, stats, gradient = run(layer, jnp.asarray(x), jnp.asarray(positions), "auto")
    want, dropped = experts_by_hand(layer, x.astype(np.float64), positions, config.capacity(9))
    assert_close(out, want, units=256)
    assert float(stats.dropped) == dropped > 0
    assert float(stats.counts.sum()) == np.sum(positions >= 0) * config.num_experts_per_token
    assert np.all(np.isfinite(gradient[1]))
    assert np.any(gradient[0].down)


def test_first_choices_take_precedence_over_second_choices():
    """Capacity is one token per expert.

    The first choice of the second token is the second choice of the first token.
    """
    config = ExpertsConfig(num_experts=3, num_experts_per_token=2, mlp_dim=4, capacity_factor=0.5)
    assert config.capacity(3) == 1
    logits = np.array([[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [2.0, 1.0, 3.0]])
    layer = drawn(config)
    kernel = jnp.zeros((EMBED, 3)).at[:3].set(jnp.asarray(logits, jnp.float32))
    layer = dataclasses.replace(layer, router=dataclasses.replace(layer.router, kernel=kernel))
    x = np.eye(3, EMBED, dtype=np.float32)[None]
    out, stats, _ = run(layer, jnp.asarray(x), jnp.arange(3)[None], "auto")
    want, dropped = experts_by_hand(layer, x.astype(np.float64), np.arange(3)[None], 1)
    assert_close(out, want, units=256)
    assert float(stats.dropped) == dropped == 3  # experts 0 and 1 process the first token, expert 2 the second token
    assert not np.any(out[0, 2])


def test_capacity_needs_capacity_factor():
    layer, (x, positions) = drawn(dataclasses.replace(PLAIN, capacity_factor=None)), tokens((1, 2))
    with refused(ed.ConfigError, "Execution.experts='capacity'", "capacity_factor"):
        run(layer, jnp.asarray(x), jnp.asarray(positions), "capacity")


# --- weights ---


@pytest.mark.slow
def test_every_weight_has_the_variance_of_one_expert():
    """Not the variance for the fan-in of all experts, as in MaxText."""
    config = ExpertsConfig(num_experts=16, num_experts_per_token=2, mlp_dim=64)
    layer = config.build(32, key=jax.random.key(0))
    for weight, fan in ((layer.gate, 32), (layer.up, 32), (layer.down, 64), (layer.router.kernel, 32)):
        assert float(jnp.std(weight)) == pytest.approx(fan**-0.5, rel=0.05)
    assert not np.array_equal(layer.gate[0], layer.gate[1])


def test_experts_are_batched_matrices_for_muon_and_lora():
    """Biases are not matrices, and the router is one matrix."""
    words = axes(drawn(dataclasses.replace(PLAIN, bias=True)))
    assert words["gate"] == words["up"] == ("experts", "embed", "mlp")
    found = {name: product_axes(("layers", *words[name])) for name in words}
    assert found["down"] == (("mlp",), ("embed",)) and found["gate"] == (("embed",), ("mlp",))
    assert found["router.kernel"] == (("embed",), ("experts",))
    assert [name for name, split in found.items() if split is None] == ["gate_bias", "up_bias", "down_bias"]
    dimensions = muon_dimensions(("layers", "experts", "embed", "mlp"))
    assert (tuple(dimensions.reduction_axis), tuple(dimensions.output_axis)) == ((2,), (3,))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dense", "dropless"])
def test_low_rank_pairs_of_experts_equal_merged_weights(form):
    layer, (x, positions) = drawn(PLAIN), tokens((2, 4))
    draws = np.random.default_rng(4)

    def pair(weight):
        a, b = (draws.normal(size=(5, size, 2)).astype(np.float32) for size in weight.shape[1:])
        magnitude = jnp.asarray(draws.normal(size=(5, weight.shape[-1])).astype(np.float32))
        return LowRank(weight, jnp.asarray(a), jnp.asarray(b.swapaxes(1, 2)), 0.5, magnitude)

    parts = eqx.tree_at(lambda m: (m.gate, m.down), layer, (pair(layer.gate), pair(layer.down)))
    whole = eqx.tree_at(lambda m: (m.gate, m.down), layer, (parts.gate.array(), parts.down.array()))
    ctx = ed.ForwardContext(positions=jnp.asarray(positions), execution=ed.Execution(experts=form))
    assert_close(*(eqx.filter_jit(layer)(jnp.asarray(x), ctx)[0] for layer in (parts, whole)), units=256)
    assert set(axes(parts)) >= {"gate.base", "gate.lora_a", "gate.lora_b"}
    assert axes(parts)["gate.lora_a"] == ("experts", "embed", "rank")
    assert axes(parts)["gate.lora_b"] == ("experts", "rank", "mlp")


# --- properties of random layers ---


# No shrinking: each example is compiled for seconds.
SETTINGS = dict(
    derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
few, many = settings(max_examples=2, **SETTINGS), settings(max_examples=60, **SETTINGS)


@st.composite
def layers(draw, capacity: bool = True) -> ExpertsConfig:
    """Return any experts: odd numbers of experts without groups, one choice, all experts, and sufficient capacity."""
    router = draw(st.sampled_from(ROUTERS))
    experts = draw(st.sampled_from([4, 6, 10] if router.num_groups > 1 else [1, 2, 3, 5, 7, 12]))
    most = experts // router.num_groups * router.groups_per_token
    shared = draw(st.sampled_from([None, MLPConfig(mlp_dim=3), MLPConfig(mlp_dim=2, gated=False, bias=True)]))
    gated = draw(st.booleans())
    return ExpertsConfig(
        num_experts=experts,
        num_experts_per_token=draw(st.sampled_from(sorted({1, min(2, most), most}))),
        mlp_dim=draw(st.sampled_from([1, 4, 7])),
        router=router,
        activation=draw(st.sampled_from(["silu", "quick_gelu", "gelu_tanh"])),
        gated=gated,
        latent_dim=draw(st.sampled_from([None, 6])),
        up_offset=draw(st.sampled_from([0.0, 1.0])) if gated else 0.0,
        limit=draw(st.sampled_from([None, 0.7])) if gated else None,
        bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        num_zero_experts=draw(st.sampled_from([0, 3])) if router.num_groups == 1 else 0,
        shared=shared,
        shared_gate=shared is not None and draw(st.booleans()),
        capacity_factor=float(experts) if capacity else draw(st.sampled_from([0.4, 1.0, 1.25])),
    )


shapes = st.sampled_from([(1, 1), (1, 7), (2, 5), (3, 3)])
seeds = st.integers(0, 99)


def some_padding(shape, seed: int):
    """Return tokens and their positions; about every fifth token is padding."""
    draws = np.random.default_rng(seed)
    places = np.tile(np.arange(shape[1]), (shape[0], 1))
    return draws.normal(size=(*shape, EMBED)).astype(np.float32), np.where(draws.random(shape) < 0.2, -1, places)


def check_forms(config, shape, seed):
    drop_compiled_programs()
    layer, (x, positions) = drawn(config, seed), some_padding(shape, seed)
    dense = run(layer, jnp.asarray(x), jnp.asarray(positions), "dense")
    assert_close(dense[0], experts_by_hand(layer, x.astype(np.float64), positions)[0], units=256)
    for form in ("dropless", "capacity"):
        out, stats, gradient = run(layer, jnp.asarray(x), jnp.asarray(positions), form)
        assert float(stats.dropped) == 0
        assert_close((out, stats, gradient), dense, units=256)


@pytest.mark.slow
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
    layer, (x, positions) = drawn(config, seed), some_padding(shape, seed)
    out, stats, gradient = run(layer, jnp.asarray(x), jnp.asarray(positions), "capacity")
    want, dropped = experts_by_hand(layer, x.astype(np.float64), positions, config.capacity(shape[1]))
    assert_close(out, want, units=256)
    assert float(stats.dropped) == dropped
    assert float(stats.counts.sum()) == np.sum(positions >= 0) * config.num_experts_per_token
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
@given(config=layers(capacity=False), seed=seeds)
@few
def test_drops_and_counts_tokens_beyond_capacity(config, seed):
    check_drops(config, (2, 9), seed)


@pytest.mark.slow
@given(config=layers(capacity=False), shape=shapes, seed=seeds)
@many
def test_drops_and_counts_tokens_beyond_capacity_often(config, shape, seed):
    check_drops(config, shape, seed)


def check_differences(config, form, seed):
    """Compare gradients with finite differences in float64, for all arrays with a gradient."""
    with jax.enable_x64(True):
        layer, (x, positions) = drawn(config, seed), some_padding((2, 3), seed)
        layer = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), layer)
        # the selection bias is updated in steps and has no gradient
        held = layer.router.selection_bias
        free = layer if held is None else eqx.tree_at(lambda m: m.router.selection_bias, layer, None)

        def call(layer, x):
            layer = dataclasses.replace(layer, router=dataclasses.replace(layer.router, selection_bias=held))
            ctx = ed.ForwardContext(positions=jnp.asarray(positions), execution=ed.Execution(experts=form))
            return layer(x, ctx)[0]

        # steps of 1e-5: with JAX's default of 1e-4, curvature causes an error of 1e-5
        inputs = free, jnp.asarray(x, jnp.float64)
        check_grads(jax.jit(call), inputs, order=1, modes=["rev"], eps=1e-5, rtol=1e-6, atol=1e-6)


FULL = ExpertsConfig(
    num_experts=5, num_experts_per_token=2, mlp_dim=4, router=RouterConfig(bias=True), limit=0.9, up_offset=1.0,
    activation="quick_gelu", bias=True, shared=MLPConfig(mlp_dim=3), shared_gate=True, capacity_factor=1.0,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dense", "capacity"])
def test_gradients_equal_finite_differences(form):
    """Also with dropped tokens."""
    check_differences(FULL, form, 3)


@pytest.mark.slow
@given(config=layers(capacity=False), form=st.sampled_from(["dense", "dropless", "capacity"]), seed=seeds)
@many
def test_gradients_equal_finite_differences_often(config, form, seed):
    # clamps have a kink, where finite differences are wrong
    check_differences(dataclasses.replace(config, limit=None), form, seed)


@pytest.mark.slow(fast=("7-1",))
@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (3, 3), (7, 1)])
def test_routes_a_single_token(experts, chosen):
    """As in decoding: more experts than tokens, or all experts."""
    config = ExpertsConfig(num_experts=experts, num_experts_per_token=chosen, mlp_dim=3)
    layer, (x, _) = drawn(config, 5), some_padding((1, 1), 5)
    out, stats, _ = run(layer, jnp.asarray(x), jnp.zeros((1, 1), jnp.int32), "auto")
    assert_close(out, experts_by_hand(layer, x.astype(np.float64), np.zeros((1, 1), int))[0], units=256)
    assert float(stats.counts.sum()) == chosen and float(stats.counts.max()) == 1


@pytest.mark.slow
def test_half_precision_weights_and_tokens_match_single_precision():
    """Weights in bf16, too. The error is that of rounding them once."""
    layer, (x, positions) = drawn(FULL, 7), some_padding((2, 9), 7)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (layer, jnp.asarray(x)))
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half)
    got, want = (run(*pair, jnp.asarray(positions), "dropless") for pair in (half, wide))
    assert got[0].dtype == jnp.bfloat16 and all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(got[2]))
    assert_close(got[1], want[1], units=4, dtype="bfloat16")
    assert_close((got[0], got[2]), (want[0], want[2]), units=8, dtype="bfloat16")
