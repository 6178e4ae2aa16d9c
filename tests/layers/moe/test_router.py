"""Routing against a loop over tokens in NumPy, written from the formulas of the model families."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import eqx_decoders as ed
from eqx_decoders.layers.moe.router import Router, RouterConfig, load_balance_loss, router_z_loss
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.sharding.axes import frozen
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import refused
from tests.oracles import best, route_by_hand


EMBED, EXPERTS, CHOSEN = 6, 8, 3
DEEPSEEK = dict(score="sigmoid", order="score_first", renormalize=True, selection_bias=True, scaling_factor=2.5)
GROUPS = dict(num_groups=4, groups_per_token=2)
VARIANTS = {
    "mixtral": dict(order="score_first", renormalize=True),
    "qwen3_moe": dict(order="score_first"),
    "select_first": dict(),
    "gpt_oss": dict(bias=True),
    "deepseek_v2_lite": dict(order="score_first"),
    "deepseek_v2": dict(order="score_first", scaling_factor=16.0, **GROUPS),
    "deepseek_v3": dict(group_score="top2_sum", **DEEPSEEK, **GROUPS),
    "deepseek_v3 without renormalizing": dict(group_score="top2_sum", **(DEEPSEEK | dict(renormalize=False)), **GROUPS),
    "kimi_k2": DEEPSEEK,
    "deepseek_v4": DEEPSEEK | dict(score="sqrt_softplus"),
    "phi3.5": dict(sparse_mixer=0.3),
    "llama4": dict(score="sigmoid", input_scaling=True),
    "gemma4": dict(order="score_first", renormalize=True, per_expert_scale=True, input_norm=RMSNormConfig(eps=0.1)),
    "of everything": dict(bias=True, per_expert_scale=True, **DEEPSEEK, **GROUPS),
}
POSITIONS = np.array([[0, 1, 2, 3, 4], [0, 1, -1, -1, 2], [-1] * 5])
FACTORS = np.sin(1.0 + np.arange(POSITIONS.size * CHOSEN)).reshape(*POSITIONS.shape, CHOSEN)


def router_of(seed: int = 0, **options) -> Router:
    """Return a router with random weights from NumPy."""
    draws = np.random.default_rng(seed)
    router = RouterConfig(**options).build(EMBED, EXPERTS, CHOSEN, key=jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(draws.normal(0.2, 0.5, leaf.shape), jnp.float32), router)


def tokens_of(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(*POSITIONS.shape, EMBED)).astype(np.float32)


@eqx.filter_jit
def run(router, x, positions):
    return router(x, ed.ForwardContext(positions=positions))


@eqx.filter_jit
@eqx.filter_value_and_grad(has_aux=True)
def replay(router, x, replayed):
    """Return a weighted sum of expert weights, and its gradient."""
    found = router(x, ed.ForwardContext(positions=jnp.asarray(POSITIONS)), replayed=replayed)
    return jnp.sum(found[1] * jnp.asarray(FACTORS, jnp.float32)), found


def route(router, x, positions=POSITIONS):
    return run(router, jnp.asarray(x), jnp.asarray(positions))


@pytest.mark.slow
def test_sparse_mixer_with_equal_logits():
    """Relative differences of zeros count as equal, and gradients are finite."""
    router, x = router_of(sparse_mixer=0.3), jnp.zeros((*POSITIONS.shape, EMBED))
    weights = np.asarray(route(router, x)[1])
    assert_allclose(weights[0, 0], 1 / np.arange(EXPERTS, EXPERTS - CHOSEN, -1), rtol=1e-6)
    gradient = jax.grad(lambda kernel: route(dataclasses.replace(router, kernel=kernel), x)[1][0, 0, 0])(router.kernel)
    assert np.all(np.isfinite(gradient))


def test_hashed_tokens_select_experts_by_token_id():
    """The table, which is not trained, selects the experts. Their weights are the router's scores."""
    config = RouterConfig(score="sqrt_softplus", order="score_first", renormalize=True, hashed_tokens=16)
    router, x = config.build(EMBED, EXPERTS, CHOSEN, key=jax.random.key(0)), tokens_of()
    table = np.random.default_rng(0).integers(0, EXPERTS, (16, CHOSEN)).astype(np.int32)
    assert np.bincount(np.asarray(router.table).reshape(-1)).tolist() == [6] * EXPERTS and frozen(router) == {"table"}
    router = dataclasses.replace(router, table=jnp.asarray(table))
    tokens = np.random.default_rng(1).integers(0, 16, POSITIONS.shape).astype(np.int32)
    ctx = ed.ForwardContext(positions=jnp.asarray(POSITIONS), tokens=jnp.asarray(tokens))
    indices, weights, _ = eqx.filter_jit(router)(jnp.asarray(x), ctx)
    real = POSITIONS >= 0
    assert_array_equal(indices, np.where(real[..., None], table[tokens], EXPERTS))
    scores = np.sqrt(np.log1p(np.exp(x.astype(np.float64) @ np.asarray(router.kernel, np.float64))))
    want = np.take_along_axis(scores, table[tokens], axis=-1)
    assert_allclose(weights, want / want.sum(-1, keepdims=True) * real[..., None], rtol=1e-5)
    with refused(ed.ConfigError, "RouterConfig.hashed_tokens", "embeds"):
        router(jnp.asarray(x), dataclasses.replace(ctx, tokens=None))
    with refused(ed.ConfigError, "hashed_tokens=16", "selection_bias"):
        dataclasses.replace(config, selection_bias=True)


@pytest.mark.slow(fast=("deepseek_v2_lite", "phi3.5", "gemma4", "of everything"))
@pytest.mark.parametrize("name", VARIANTS)
def test_routing_matches_numpy(name):
    """Selected experts, their order, weights and statistics. Padding is not routed or counted."""
    router, x = router_of(**VARIANTS[name]), tokens_of()
    indices, weights, stats = route(router, x)
    assert weights.dtype == jnp.float32 and indices.dtype == jnp.int32
    want = {
        name: np.zeros(shape) for name, shape in dict(counts=EXPERTS, probabilities=EXPERTS, z=(), entropy=()).items()
    }
    losses = dict(switch=0.0, megatron=0.0)
    for row, places in enumerate(POSITIONS):
        loads, plain, shares = np.zeros(EXPERTS), np.zeros(EXPERTS), np.zeros(EXPERTS)
        for place, position in enumerate(places):
            if position < 0:
                assert indices[row, place].tolist() == [EXPERTS] * CHOSEN
                assert weights[row, place].tolist() == [0.0] * CHOSEN
                continue
            chosen, scaled, logits, scores = route_by_hand(router, x[row, place])
            assert indices[row, place].tolist() == chosen
            assert_allclose(weights[row, place], scaled, rtol=2e-5)
            share = np.array(scores) / sum(scores)
            loads[chosen] += 1
            plain[best(scores, CHOSEN)] += 1
            shares += share
            want["z"] += math.log(sum(math.exp(z) for z in logits)) ** 2
            want["entropy"] -= sum(p * math.log(p) for p in share)
        want["counts"] += loads
        want["probabilities"] += shares
        if real := np.sum(places >= 0):
            losses["switch"] += EXPERTS * sum(loads / (real * CHOSEN) * shares / real)
            losses["megatron"] += EXPERTS * sum(plain / (real * CHOSEN) * shares / real)
    for field, value in (want | losses | dict(tokens=8.0, sequences=2.0, dropped=0.0)).items():
        assert_allclose(getattr(stats, field), value, rtol=2e-5, err_msg=field)
    for form, value in losses.items():
        assert float(load_balance_loss(stats, form)) == pytest.approx(value / 2, rel=1e-5)
    assert float(router_z_loss(stats)) == pytest.approx(want["z"] / 8, rel=1e-5)


@pytest.mark.slow(fast=("phi3.5",))
@pytest.mark.parametrize("name", ["of everything", "deepseek_v2", "phi3.5"])
def test_replayed_experts_are_weighted_by_the_routers_scores(name):
    """Replaying the own selection has no effect. Another selection has the weights and gradients of the formula."""
    router, x = router_of(**VARIANTS[name]), tokens_of()
    wanted = replay(router, x, jnp.full((*POSITIONS.shape, CHOSEN), -1, jnp.int16))
    own = wanted[0][1][0].astype(jnp.int16)
    same = replay(router, x, own)
    plain = route(router, x)
    assert_close(same, wanted, units=4)
    assert_close(wanted[0][1], plain, units=4)
    assert_array_equal(same[0][1][0], plain[0])
    first = np.asarray(own)[..., :1] + 2
    others = np.where(np.arange(5)[:, None] < 3, (first + np.arange(CHOSEN)) % EXPERTS, -1).astype(np.int16)
    (value, (indices, weights, stats)), gradient = replay(router, x, jnp.asarray(others))
    counts, entry = np.zeros(EXPERTS), (2, 3)

    def by_hand(router):
        total = 0.0
        for row, place in zip(*np.nonzero(POSITIONS >= 0), strict=True):
            given = [*map(int, others[row, place])] if others[row, place, 0] >= 0 else None
            chosen, scaled, _, _ = route_by_hand(router, x[row, place].astype(np.float64), given)
            total += float(np.dot(scaled, FACTORS[row, place]))
            yield row, place, chosen, scaled
        yield total

    *rows, total = by_hand(router)
    for row, place, chosen, scaled in rows:
        assert indices[row, place].tolist() == chosen
        assert_allclose(weights[row, place], scaled, rtol=2e-5)
        counts[chosen] += 1
    assert_array_equal(stats.counts, counts)
    assert float(value) == pytest.approx(total, rel=1e-5) and total != pytest.approx(float(wanted[0][0]), rel=1e-3)
    kernel, step = np.asarray(router.kernel, np.float64), 1e-5
    moved = [kernel.copy() for _ in range(2)]
    moved[0][entry] += step
    moved[1][entry] -= step
    *_, up = by_hand(eqx.tree_at(lambda router: router.kernel, router, moved[0]))
    *_, down = by_hand(eqx.tree_at(lambda router: router.kernel, router, moved[1]))
    assert float(gradient.kernel[entry]) == pytest.approx((up - down) / (2 * step), rel=1e-3, abs=1e-6)


def test_ties_go_to_the_lower_index():
    router = router_of()
    router = dataclasses.replace(router, kernel=jnp.zeros_like(router.kernel))
    indices, weights, _ = route(router, tokens_of())
    assert indices[0].tolist() == [[0, 1, 2]] * 5
    assert_allclose(weights[0], 1 / 3, rtol=1e-6)


def test_ties_between_groups_and_biased_scores_go_to_the_lower_index():
    """All scores are equal. Biases raise two experts of the last group and one of the third group."""
    router = router_of(**VARIANTS["deepseek_v3"])
    bias = jnp.zeros(EXPERTS).at[jnp.asarray([4, 6, 7])].set(jnp.asarray([0.25, 0.125, 0.125]))
    router = dataclasses.replace(router, kernel=jnp.zeros_like(router.kernel), selection_bias=bias)
    indices, weights, _ = route(router, tokens_of())
    assert indices[0].tolist() == [[4, 6, 7]] * 5  # the scores of groups 2 and 3 are equal
    assert_allclose(weights[0], 2.5 / 3, rtol=1e-6)
    unbiased = dataclasses.replace(router, selection_bias=jnp.zeros(EXPERTS))
    assert route(unbiased, tokens_of())[0][0].tolist() == [[0, 1, 2]] * 5


def test_experts_of_excluded_groups_have_weight_zero():
    """DeepSeek-V2 sets scores of excluded groups to 0.

    If selected scores underflow to 0, such an expert may be selected.
    """
    router = router_of(order="score_first", num_groups=2, groups_per_token=1)
    logits = jnp.asarray([190.0, 0.0, 0.0, 0.0, 200.0, 0.0, 0.0, 0.0])
    router = dataclasses.replace(router, kernel=jnp.zeros((EMBED, EXPERTS)).at[0].set(logits))
    indices, weights, _ = route(router, np.eye(EMBED, dtype=np.float32)[:1][None], np.zeros((1, 1), np.int32))
    assert indices[0, 0].tolist() == [4, 0, 1]
    assert_allclose(weights[0, 0], [1.0, 0.0, 0.0], rtol=1e-4)


@pytest.mark.slow
def test_selection_bias_changes_selection_but_not_weights():
    """It has no gradient through weights or losses, and is not trained."""
    router, x = router_of(**VARIANTS["kimi_k2"]), tokens_of()
    forced = dataclasses.replace(router, selection_bias=jnp.full((EXPERTS,), -9.0).at[jnp.asarray([1, 4, 6])].set(9.0))
    indices, weights, _ = route(forced, x)
    assert {tuple(sorted(row)) for row in indices[0].tolist()} == {(1, 4, 6)}
    scores = jax.nn.sigmoid(jnp.asarray(x) @ forced.kernel)
    picked = jnp.take_along_axis(scores[:1], indices[:1], axis=-1)
    assert_allclose(weights[:1], 2.5 * picked / picked.sum(-1, keepdims=True), rtol=1e-5)

    @jax.jit
    @jax.grad
    def gradient_of(router):
        _, weights, stats = route(router, x)
        return jnp.sum(jnp.sin(weights)) + load_balance_loss(stats) + router_z_loss(stats)

    gradient = gradient_of(router)
    assert not np.any(gradient.selection_bias) and np.all(np.any(gradient.kernel, axis=0))
    assert frozen(router) == {"selection_bias"}


def test_a_trained_bias_has_a_gradient():
    gradient = jax.jit(jax.grad(lambda router: jnp.sum(jnp.sin(route(router, tokens_of())[1]))))(router_of(bias=True))
    assert np.any(gradient.bias) and np.any(gradient.kernel)


@pytest.mark.slow(fast=("gpt_oss",))
@pytest.mark.parametrize("name", ["deepseek_v3", "gemma4", "gpt_oss", "deepseek_v2"])
def test_gradients_match_the_formula(name):
    """For weights and for all statistics with a gradient, with fixed selection and counts."""
    router, x, real = router_of(**VARIANTS[name]), jnp.asarray(tokens_of()), jnp.asarray(POSITIONS >= 0)
    config, (indices, _, stats) = router.config, route(router, tokens_of())
    picks = jnp.minimum(indices, EXPERTS - 1)
    hits = jnp.where(real[..., None, None], jax.nn.one_hot(picks, EXPERTS), 0.0)
    tokens = jnp.maximum(real.sum(1), 1).astype(jnp.float32)

    def losses(weights, switch, z):
        return jnp.sum(jnp.sin(weights)) + 0.3 * switch + 0.01 * z

    def by_formula(router):
        read = x if router.input_norm is None else router.input_norm(x) / math.sqrt(EMBED)
        logits = jnp.einsum("bte,ef->btf", read, router.kernel)
        logits = logits if router.bias is None else logits + router.bias[None, None]
        scores = jax.nn.softmax(logits) if config.score == "softmax" else jax.nn.sigmoid(logits)
        if config.order == "select_first":
            weights = jax.nn.softmax(jnp.take_along_axis(logits, picks, axis=-1))
        else:
            weights = jnp.take_along_axis(scores, picks, axis=-1)
        if config.renormalize:
            weights = weights / jnp.sum(weights, -1, keepdims=True)
        if router.per_expert_scale is not None:
            weights = weights * router.per_expert_scale[picks]
        weights = jnp.where(real[..., None], weights * config.scaling_factor, 0.0)
        shares = jnp.where(real[..., None], scores / jnp.sum(scores, -1, keepdims=True), 0.0)
        mean = jnp.sum(shares, axis=1) / tokens[:, None]
        loads = jnp.sum(hits, axis=(1, 2)) / (CHOSEN * tokens[:, None])
        z = jnp.sum(jnp.where(real, jax.nn.logsumexp(logits, axis=-1) ** 2, 0.0)) / 8.0
        return losses(weights, EXPERTS * jnp.sum(loads * mean) / 2, z)

    def by_router(router):
        _, weights, stats = route(router, x)
        return losses(weights, load_balance_loss(stats), router_z_loss(stats))

    got, want = (jax.jit(jax.value_and_grad(loss))(router) for loss in (by_router, by_formula))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert np.any(got[1].kernel) and float(stats.tokens) == 8


@pytest.mark.slow(fast=("softmax",))
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_gradients_of_extreme_logits_are_finite(score):
    router = router_of(score=score, order="score_first", renormalize=True)
    loss = lambda kernel: jnp.sum(route(dataclasses.replace(router, kernel=kernel), tokens_of())[1] ** 2)  # noqa: E731
    assert np.all(np.isfinite(jax.jit(jax.grad(loss))(1e4 * router.kernel)))


def test_routes_half_precision_tokens_in_single_precision():
    router, x = router_of(**VARIANTS["deepseek_v3"]), jnp.asarray(tokens_of(), jnp.bfloat16)
    for got, want in zip(route(router, x)[:2], route(router, x.astype(jnp.float32))[:2], strict=True):
        assert_array_equal(got, want)


@pytest.mark.parametrize("form", ["switch", "megatron"])
def test_balance_loss_is_1_if_balanced_and_num_experts_if_collapsed(form):
    """One expert per token. The gradient is that of the mean scores, with constant loads."""
    router = RouterConfig().build(EXPERTS, EXPERTS, 1, key=jax.random.key(0))
    router = dataclasses.replace(router, kernel=40 * jnp.eye(EXPERTS))
    spread = np.eye(EXPERTS, dtype=np.float32)[np.arange(16) % EXPERTS][None]
    places = np.arange(16)[None]
    assert float(load_balance_loss(route(router, spread, places)[2], form)) == pytest.approx(1.0, rel=1e-4)
    one = np.tile(spread[:, :1], (1, 16, 1))
    assert float(load_balance_loss(route(router, one, places)[2], form)) == pytest.approx(EXPERTS, rel=1e-4)

    soft = router_of()
    loads = route(soft, tokens_of()[:1], POSITIONS[:1])[2].counts / (5 * CHOSEN)

    def by_hand(kernel):
        return EXPERTS * jnp.sum(loads * jnp.mean(jax.nn.softmax(jnp.asarray(tokens_of()[0]) @ kernel), axis=0))

    def loss(kernel):
        return load_balance_loss(
            route(dataclasses.replace(soft, kernel=kernel), tokens_of()[:1], POSITIONS[:1])[2], form
        )

    got, want = jax.jit(lambda kernel: (jax.grad(loss)(kernel), jax.grad(by_hand)(kernel)))(soft.kernel)
    assert_allclose(got, want, atol=1e-6)


def test_megatron_loss_counts_top_scores_with_replayed_experts():
    router, x = router_of(), tokens_of()
    indices, _, stats = route(router, x)
    replayed = replay(router, x, ((indices + 1) % EXPERTS).astype(jnp.int16))[0][1][2]
    assert float(replayed.megatron) == pytest.approx(float(stats.megatron), rel=1e-5)
    assert float(replayed.switch) != pytest.approx(float(stats.switch), rel=1e-2)


def test_losses_without_tokens_are_zero():
    _, _, stats = route(router_of(), tokens_of(), np.full_like(POSITIONS, -1))
    assert float(stats.tokens) == float(load_balance_loss(stats)) == float(router_z_loss(stats)) == 0.0


def test_statistics_of_microbatches_add_up():
    router, x = router_of(**VARIANTS["deepseek_v3"]), tokens_of()
    whole = route(router, x)[2]
    parts = [route(router, x[rows], POSITIONS[rows])[2] for rows in (slice(0, 1), slice(1, 3))]
    jax.tree.map(lambda a, b, c: assert_allclose(a + b, c, rtol=1e-5), *parts, whole)


def test_unknown_type_of_the_loss_is_refused():
    _, _, stats = route(router_of(), tokens_of())
    with pytest.raises((ed.ConfigError, TypeCheckError)):
        load_balance_loss(stats, "megatrn")
