"""Compare values and gradients of the policy losses with numbers computed in float64.

The tolerance is 1e-6: the tables have six digits (rounding error 5e-7), and float32 has an error of 1e-7 near 1.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.training.objectives.advantages import token_weights
from eqx_decoders.training.objectives.policy_loss import (
    Correction,
    PolicyLoss,
    kl_penalty,
    policy_loss,
    value_is_clipped,
    value_loss,
)
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused


REAL = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0]], bool)


def tokens(*numbers: float) -> jax.Array:
    """Return values of three completions with three, one and two tokens. Padding is NaN or infinite."""
    rows = np.array([[np.nan] * 3, [np.nan, -np.inf, np.inf], [np.nan] * 3], np.float32)
    rows[REAL] = numbers
    return jnp.asarray(rows)


POLICY = tokens(-0.5, -1, -2, -0.1, -1.5, -0.4)
OLD = tokens(-0.7, -0.8, -2.1, -0.6, -1, -0.5)
SAMPLER = tokens(-0.9, -0.8, -2.1, -0.6, -1, -1.5)
REFERENCE = tokens(-0.6, -1.2, -1.5, -0.3, -1.5, -0.9)
ADVANTAGES = tokens(1, 1, 1, -1, -0.5, -0.5)


def assert_same(got, want) -> None:
    assert_allclose(got, want, rtol=0, atol=1e-6)


def weights(aggregation="token", **options) -> jax.Array:
    return jnp.asarray(token_weights(REAL, aggregation, **options))


def evaluate(config, aggregation="token", rows=slice(None), sampler=SAMPLER, old=OLD, **options):
    """Return the summed loss, the gradient of each token and the summed metrics."""
    c = weights(aggregation, **options)[rows]
    given = dict(advantages=ADVANTAGES[rows], old=old if old is None else old[rows])
    given |= dict(sampler=sampler if sampler is None else sampler[rows])

    def loss(log_probs):
        return policy_loss(config, log_probs, weights=c, **given)

    (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(POLICY[rows])
    assert_array_equal(gradient[~REAL[rows]], 0)
    return value, gradient[REAL[rows]], {name: float(number) for name, number in sums.items()}


def symmetric_clip(**options) -> PolicyLoss:
    return PolicyLoss(**dict(high=0.2) | options)


def corrected(kind, **options) -> PolicyLoss:
    return symmetric_clip(correction=Correction(kind=kind, **options))


GSPO = [*[-0.114877] * 3, 0.549574, 0.068228, 0.068228]
TABLE = {
    "clip, sequence": (symmetric_clip(), "sequence", 0.361238, [0, -0.090970, -0.122797, 0.549574, 0, 0.092098]),
    "clip": (symmetric_clip(), "token", -0.087099, [0, -0.136455, -0.184195, 0.274787, 0, 0.092098]),
    "clip, constant": (symmetric_clip(), "constant", -0.043550, [0, -0.068228, -0.092098, 0.137393, 0, 0.046049]),
    "clip higher": (PolicyLoss(), "token", -0.090666, [-0.203567, -0.136455, -0.184195, 0.274787, 0, 0.092098]),
    "dual": (symmetric_clip(dual=1.5), "token", -0.111886, [0, -0.136455, -0.184195, 0, 0, 0.092098]),
    "cispo": (symmetric_clip(kind="cispo"), "token", 0.472190, [-0.2, -0.136455, -0.184195, 0.2, 0.050544, 0.092098]),
    "gspo": (symmetric_clip(kind="gspo"), "sequence", 0.341397, GSPO),
    "gspo, narrow": (symmetric_clip(kind="gspo", low=0.03, high=0.04), "sequence", 0.366609, [*GSPO[:4], 0, 0]),
    "gspo_token": (symmetric_clip(kind="gspo_token"), "sequence", 0.341397, GSPO),
    "luspo": (symmetric_clip(kind="gspo"), "sequence_sum", -0.211411, [*[-0.344632] * 3, 0.549574, 0.136455, 0.136455]),
    "sapo": (
        PolicyLoss(kind="sapo"), "sequence", 0.454300, [-0.134062, -0.090227, -0.122458, 0.490451, 0.048447, 0.091817]
    ),
    "reinforce": (PolicyLoss(kind="reinforce"), "token", 0.408333, [*[-1 / 6] * 3, 1 / 6, 1 / 12, 1 / 12]),
    "tis": (corrected("tis"), "token", -0.039282, [0, -0.136455, -0.184195, 0.274787, 0, 0.184195]),
    "mask": (corrected("mask"), "token", -0.223477, [0, -0.136455, -0.184195, 0.274787, 0, 0]),
    "sequence_tis": (corrected("sequence_tis"), "token", -0.043608, [0, -0.166667, -0.224976, 0.274787, 0, 0.184195]),
    "sequence_mask": (corrected("sequence_mask"), "token", -0.361137, [0, -0.166667, -0.224976, 0.274787, 0, 0]),
    "bypass": (corrected("bypass"), "token", 0.071150, [0, -0.136455, -0.184195, 0.274787, 0, 0.250347]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_value_and_gradient(name):
    config, aggregation, value, gradient = TABLE[name]
    options = dict(limit=4) if aggregation == "constant" else {}
    got = evaluate(config, aggregation, **options)
    assert_same(got[0], value)
    assert_same(got[1], gradient)


@pytest.mark.slow
@pytest.mark.parametrize("dual", [None, 1.5])
def test_every_ratio_with_every_sign(dual):
    """The objective is the smaller of the two products; with negative advantages it is at least `dual` times them."""
    ratios, signs = np.meshgrid([0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 1.6], [-2.0, 0.0, 3.0])
    plain, clipped = ratios * signs, np.clip(ratios, 0.8, 1.28) * signs
    want = -np.minimum(plain, clipped)
    slopes = np.where(plain <= clipped, -plain, 0)
    if dual is not None:
        slopes = np.where((signs < 0) & (ratios > dual), 0, slopes)
        want = np.where(signs < 0, np.minimum(want, -dual * signs), want)
    log_probs, advantages = jnp.asarray(np.log(ratios), jnp.float32), jnp.asarray(signs, jnp.float32)
    ones, old = jnp.ones_like(log_probs), jnp.zeros_like(log_probs)

    def loss(log_probs):
        return policy_loss(PolicyLoss(dual=dual), log_probs, weights=ones, advantages=advantages, old=old)[0]

    value, gradient = jax.value_and_grad(loss)(log_probs)
    assert_allclose(value, want.sum(), rtol=1e-6)
    assert_allclose(gradient, slopes, rtol=0, atol=2e-6)


def test_without_sampler_log_probs_only_their_metrics_are_missing():
    value, gradient, sums = evaluate(symmetric_clip(), sampler=None)
    assert_same(value, TABLE["clip"][2])
    assert_same(gradient, TABLE["clip"][3])
    full = evaluate(symmetric_clip())[2]
    about = {"importance", "importance_squared", "log_prob_gap", "masked"}
    assert sums == {name: number for name, number in full.items() if name not in about} and about < set(full)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
def test_sums_of_microbatches_are_the_sum_of_the_batch(aggregation, cut):
    options, halves = dict(limit=4) if aggregation == "constant" else {}, (slice(0, cut), slice(cut, 3))
    whole = evaluate(symmetric_clip(), aggregation, **options)
    parts = [evaluate(symmetric_clip(), aggregation, rows, **options) for rows in halves]
    assert_same(sum(part[0] for part in parts), whole[0])
    assert_same(np.concatenate([part[1] for part in parts]), whole[1])
    assert_same([sum(part[2][name] for part in parts) for name in whole[2]], list(whole[2].values()))


@pytest.mark.slow(fast=("token-0.053749", "constant-0.026874"))
@pytest.mark.parametrize("aggregation, wrong", [("sequence", 0.390001), ("token", 0.053749), ("constant", 0.026874)])
def test_mean_of_microbatch_means_differs_from_the_batch_mean(aggregation, wrong):
    """Token weights are computed per microbatch: rows 1 and 2 are one microbatch, row 3 is the other."""
    options, losses = dict(limit=4) if aggregation == "constant" else {}, []
    for rows in (slice(0, 2), slice(2, 3)):
        c = jnp.asarray(token_weights(REAL[rows], aggregation, **options))
        given = dict(weights=c, advantages=ADVANTAGES[rows], old=OLD[rows])
        losses.append(float(policy_loss(symmetric_clip(), POLICY[rows], **given)[0]))
    assert_same(np.mean(losses), wrong)
    right = {"sequence": 0.361238, "token": -0.087099, "constant": -0.043550}[aggregation]
    assert abs(wrong - right) > 0.01


def test_policy_loss_metrics():
    ratios = np.exp([0.2, -0.2, 0.1, 0.5, -0.5, 0.1])
    want = dict(tokens=6, ratio=ratios.sum(), clip_low=1, clip_high=1, clip=2)
    importance = np.exp([0.2, 0, 0, 0, 0, 1])
    want |= dict(importance=importance.sum(), importance_squared=(importance**2).sum(), masked=0, log_prob_gap=1.2)
    sums = evaluate(symmetric_clip())[2]
    assert sums.keys() == want.keys()
    assert_allclose([sums[name] for name in want], list(want.values()), rtol=1e-6)
    tis = evaluate(corrected("tis"))[2]
    assert_allclose(tis["importance"], importance.sum(), rtol=1e-6)  # before it is truncated
    assert (
        evaluate(corrected("mask"))[2]["masked"],
        evaluate(corrected("sequence_mask"))[2]["masked"],
    ) == (1, 2)
    assert evaluate(corrected("mask", floor=1.1))[2]["masked"] == 5
    dual = evaluate(symmetric_clip(dual=1.5))[2]
    assert (dual["clip_low"], dual["clip_high"], dual["clip"]) == (1, 1, 3)
    cispo = evaluate(symmetric_clip(kind="cispo"))[2]
    assert (cispo["clip_low"], cispo["clip_high"]) == (0, 2)
    for name in ("reinforce", "sapo"):
        assert evaluate(PolicyLoss(kind=name))[2]["clip"] == 0


def test_old_log_probs_are_optional_with_one_update_per_batch():
    value, gradient, sums = evaluate(symmetric_clip(), old=None, sampler=None)
    assert_same(value, -(3 - 1 - 2 * 0.5) / 6)
    assert_same(gradient, np.array([-1, -1, -1, 1, 0.5, 0.5]) / 6)
    assert sums["ratio"] == sums["tokens"] == 6 and sums["clip"] == 0
    value, gradient, sums = evaluate(corrected("tis"), old=None)
    factor = np.minimum(np.exp([0.4, -0.2, 0.1, 0.5, -0.5, 1.1]), 2)
    assert_same(gradient, factor * [-1, -1, -1, 1, 0.5, 0.5] / 6)


def test_reinforce_with_importance_sampling():
    gradient = evaluate(PolicyLoss(kind="reinforce", correction=Correction(kind="bypass")))[1]
    assert_same(gradient, np.exp([0.4, -0.2, 0.1, 0.5, -0.5, 1.1]) * [-1, -1, -1, 1, 0.5, 0.5] / 6)


def test_sequence_importance_weights_as_geometric_mean():
    gradient = evaluate(corrected("sequence_tis", sequence_weight="mean"))[1]
    factor = np.exp([0.2 / 3] * 3 + [0] + [0.5] * 2)
    assert_same(gradient, factor * TABLE["clip"][3])
    gradient = evaluate(corrected("sequence_mask", sequence_weight="mean", cap=1.2))[1]
    assert_same(gradient, factor * TABLE["clip"][3] * [1, 1, 1, 1, 0, 0])


@pytest.mark.slow(fast=("threshold=0.15-0", "threshold=0.1-0,4", "threshold=0.1 distance=kl-empty"))
@pytest.mark.parametrize(
    "options, masked",
    [
        (dict(threshold=0.15), [0]),
        (dict(threshold=0.1), [0, 4]),
        (dict(threshold=0.03, distance="kl"), [0, 4]),
        (dict(threshold=0.06, distance="kl"), [0]),
        (dict(threshold=0.1, distance="kl"), []),
    ],
)
def test_dppo_masks_tokens_beyond_the_divergence_threshold(options, masked):
    """Only tokens that their advantage would move further away are masked; the sixth has a negative advantage."""
    value, gradient, sums = evaluate(PolicyLoss(kind="dppo", **options))
    ratio = np.exp([0.2, -0.2, 0.1, 0.5, -0.5, 0.1])
    ratio[masked] = 0
    losses = ratio * [-1, -1, -1, 1, 0.5, 0.5] / 6
    assert_same(value, losses.sum())
    assert_same(gradient, losses)
    assert (sums["clip_high"], sums["clip_low"]) == (int(0 in masked), int(4 in masked))
    if options["threshold"] == 0.15:  # without sampler log-probs, the old log-probs are used: 0.11 for the first token
        assert evaluate(PolicyLoss(kind="dppo", **options), sampler=None)[2]["clip_high"] == 0


@pytest.mark.slow
def test_packed_completions_equal_completions_in_rows():
    """Tokens of weight 0 do not count."""
    completions = np.array([[0, 1, 1, 1, 1, 2, 3, 3]], np.int32)
    real = np.array([[0, 1, 0, 1, 1, 1, 1, 1]], bool)

    def pack(rows):
        row = np.full((1, 8), np.nan, np.float32)
        row[real] = np.asarray(rows)[REAL]
        return jnp.asarray(row)

    c = jnp.nan_to_num(pack(weights("sequence")))
    given = dict(advantages=pack(ADVANTAGES), old=pack(OLD), sampler=pack(SAMPLER), weights=c)
    for config in (symmetric_clip(kind="gspo"), corrected("sequence_tis")):

        def loss(log_probs, config=config):
            return policy_loss(config, log_probs, completion_ids=jnp.asarray(completions), count=3, **given)[0]

        value, gradient = jax.value_and_grad(loss)(pack(POLICY))
        want = evaluate(config, "sequence")
        assert_same(value, want[0])
        assert_same(gradient[real], want[1])


@pytest.mark.slow
def test_extreme_ratios_give_finite_values_and_gradients():
    far = tokens(-100, -1, -2, -0.1, -1.5, -0.4)
    for config in (
        symmetric_clip(),
        symmetric_clip(kind="gspo"),
        corrected("sequence_tis"),
        PolicyLoss(kind="sapo"),
    ):
        for given in (dict(old=far, sampler=far), dict(old=far, sampler=SAMPLER), dict(old=OLD, sampler=far)):
            value, gradient, sums = evaluate(config, **given)
            assert np.all(np.isfinite([value, *gradient, *sums.values()]))


# --- KL penalty ---

KL = {
    "k1": (0.083333, [1 / 6] * 6),
    "k2": (0.049167, [0.016667, 0.033333, -0.083333, 0.033333, 0, 0.083333]),
    "k3": (0.049592, [0.015860, 0.030212, -0.108120, 0.030212, 0, 0.065578]),
    "k3_ratio": (0.055704, [0.020357, 0.027291, -0.092098, 0.054957, 0, 0.092098]),
}


def penalty(kind, log_probs, old=OLD):
    old = old if kind == "k3_ratio" else None
    return jnp.sum(kl_penalty(kind, log_probs, REFERENCE, where=jnp.asarray(REAL), old=old)) / 6


@pytest.mark.parametrize("kind", KL)
def test_kl_penalty_value_and_gradient(kind):
    value, gradient = jax.value_and_grad(lambda log_probs: penalty(kind, log_probs))(POLICY)
    assert_same(value, KL[kind][0])
    assert_same(gradient[REAL], KL[kind][1])
    assert_array_equal(gradient[~REAL], 0)


def test_clipped_loss_plus_kl_penalty():
    value, gradient, _ = evaluate(symmetric_clip())
    more, slope = jax.value_and_grad(lambda log_probs: 0.1 * penalty("k3", log_probs))(POLICY)
    assert_same(value + more, -0.082140)
    assert_same(gradient + slope[REAL], [0.001586, -0.133434, -0.195007, 0.277808, 0, 0.098655])


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, value, gradient",
    [
        ("k1", 0.082225, [0, 0, 0]),
        ("k2", 0.081272, [-0.005022, -0.153774, 0.158796]),
        ("k3", 0.082225, [0.021987, -0.175924, 0.153937]),
        ("k3_ratio", 0.082225, [-0.005022, -0.153774, 0.158796]),
    ],
)
def test_expected_value_and_gradient_of_kl_estimators(kind, value, gradient):
    """Average over all three tokens: k2 and k3_ratio have the gradient of KL(p || q), and k3 has that of KL(q || p)."""
    logits, reference = jnp.asarray([0.2, -0.1, 0.4]), jax.nn.log_softmax(jnp.asarray([0.0, 0.3, -0.2]))
    chances = jax.nn.softmax(logits)
    everything = jnp.ones((1, 3), bool)

    def expected(logits):
        return jnp.sum(
            chances * kl_penalty(kind, jax.nn.log_softmax(logits)[None], reference[None], where=everything)[0]
        )

    got = jax.value_and_grad(expected)(logits)
    assert_same(got[0], value)
    assert_same(got[1], gradient)
    if kind == "k2":
        exact = jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - reference)))(logits)
        assert_same(exact, gradient)


# --- critic ---


def test_value_loss():
    values, old, returns = (
        jnp.asarray([row], jnp.float32)
        for row in ([0.9, 0.35, 0.6, np.nan], [0.5, 0.4, 0.3, np.nan], [1, 0.98, 1, np.nan])
    )
    weight = jnp.asarray([[1 / 3, 1 / 3, 1 / 3, 0]])
    got = jax.value_and_grad(lambda values: value_loss(values, returns, weights=weight, old=old))(values)
    assert_same(got[0], 0.122817)
    assert_same(got[1], [[0, -0.21, 0, 0]])
    assert value_is_clipped(values, returns, old=old)[0, :3].tolist() == [True, False, True]
    plain = jax.value_and_grad(lambda values: value_loss(values, returns, weights=weight))(values)
    assert_same(plain[0], (0.01 + 0.63**2 + 0.16) / 6)
    assert_same(plain[1], [[-0.1 / 3, -0.21, -0.4 / 3, 0]])


# --- configurations ---


UNREAD = {  # options that have no effect because of another field
    "sapo": (PolicyLoss, dict(low=0.1), dict(kind="sapo")),
    "cispo": (PolicyLoss, dict(dual=3.0), dict(kind="cispo")),
    "reinforce": (PolicyLoss, dict(high=0.3), dict(kind="reinforce")),
    "tau_positive": (PolicyLoss, dict(tau_positive=2.0), {}),
    "tau_negative": (PolicyLoss, dict(tau_negative=2.0), {}),
    "threshold": (PolicyLoss, dict(threshold=0.1), {}),
    "dual": (PolicyLoss, dict(dual=1.0), {}),  # out of range
    "cap": (Correction, dict(cap=3.0), {}),
    "tis": (Correction, dict(floor=0.5), dict(kind="tis")),
    "mask": (Correction, dict(sequence_weight="mean"), dict(kind="mask")),
}


@pytest.mark.parametrize("name", UNREAD)
def test_options_without_effect_are_refused(name):
    cls, option, choice = UNREAD[name]
    ((field, value),) = option.items()
    chosen = [f"{name}={kind!r}" for name, kind in choice.items()]
    with refused(ConfigError, f"{cls.__name__}.{field}={value!r}", *chosen):
        cls(**option, **choice)


def test_incompatible_options_are_refused():
    with refused(ConfigError, "Correction.floor=2.0", "Correction.cap=0.5"):
        Correction(kind="mask", cap=0.5)
    with refused(ConfigError, "Correction.kind='tis'", "sampler"):
        evaluate(corrected("tis"), sampler=None)
    with refused(ConfigError, "kind='k2'", "old"):
        kl_penalty("k2", POLICY, REFERENCE, where=jnp.asarray(REAL), old=OLD)


@pytest.mark.parametrize("kind, field, value", [("sapo", "tau_positive", 2.0), ("sapo", "tau_negative", 2.0)])
def test_sapo_temperatures_change_the_gradient(kind, field, value):
    base = PolicyLoss(kind=kind)
    before, after = (
        evaluate(base)[1],
        evaluate(dataclasses.replace(base, **{field: value}))[1],
    )
    changed = np.abs(before - after) > 1e-5
    assert_array_equal(changed, [field == "tau_positive"] * 3 + [field == "tau_negative"] * 3)
