"""Compare values and gradients of the preference losses with numbers computed in float64.

The tolerance is 1e-6: the tables have six digits (rounding error 5e-7), and float32 has an error of 2e-7 near 2.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.training.objectives.advantages import token_weights
from eqx_decoders.training.objectives.preference_loss import (
    KTOLoss,
    PairLoss,
    kto_loss,
    log_odds,
    pair_loss,
    reward_loss,
)
from eqx_decoders.training.objectives.reductions import completion_lengths, completion_sums
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused


NAN = math.nan
# a prompt's token, the chosen completion, the rejected one, padding
LOG_PROBS = np.array(
    [[NAN, -0.5, -1, -0.25, -0.75, -1.5, NAN, NAN], [NAN, -1.25, -0.5, -0.5, -0.25, -0.75, -1, NAN]], np.float32
)
COMPLETION_IDS = np.array([[0, 1, 1, 1, 2, 2, 0, 0], [0, 1, 1, 2, 2, 2, 2, 0]], np.int32)
REFERENCE = dict(reference_chosen=jnp.asarray([-2.0, -1.5]), reference_rejected=jnp.asarray([-2.0, -3.0]))
LENGTHS = dict(chosen_lengths=jnp.asarray([3, 2]), rejected_lengths=jnp.asarray([2, 4]))
FIRST = ((0, 1), (1, 1), (0, 4), (1, 3))  # a token of C1, C2, R1 and R2


def assert_same(got, want) -> None:
    assert_allclose(got, want, rtol=0, atol=1e-6)


def evaluate(config, **changes):
    """Return the mean loss, the gradient of one token per completion, the losses of the pairs, and summed metrics."""
    given = LENGTHS | (REFERENCE if config.needs_reference else {}) | changes

    def loss(log_probs):
        sums = completion_sums(log_probs, jnp.asarray(COMPLETION_IDS), 2)
        losses, metrics = pair_loss(config, sums[:, 0], sums[:, 1], **given)
        return jnp.mean(losses), (losses, metrics)

    (value, (losses, metrics)), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(LOG_PROBS))
    tokens = [float(gradient[place]) for place in FIRST]
    for row, number in ((0, 1), (0, 2), (1, 1), (1, 2)):
        assert (
            np.ptp(gradient[row][COMPLETION_IDS[row] == number]) == 0
        )  # all tokens of a completion have the same gradient
    assert_array_equal(gradient[COMPLETION_IDS == 0], 0)
    return value, np.asarray(tokens), losses, metrics


def without_nll(kind, **options) -> PairLoss:
    return PairLoss(kind=kind, beta=0.5, **dict(nll_weight=0.0) | options)


TABLE = {
    "DPO": (without_nll("sigmoid"), 0.737031, [-0.109456, -0.148167, 0.109456, 0.148167]),
    "cDPO": (without_nll("sigmoid", smoothing=0.1), 0.730781, [-0.084456, -0.123167, 0.084456, 0.123167]),
    "robust": (without_nll("robust", smoothing=0.1), 0.744844, [-0.140706, -0.179417, 0.140706, 0.179417]),
    "hinge": (without_nll("hinge"), 1.062500, [-0.25, -0.25, 0.25, 0.25]),
    "IPO on sums": (without_nll("ipo", over="sums"), 1.656250, [-0.5, -1.75, 0.5, 1.75]),
    "IPO on means": (without_nll("ipo", over="tokens"), 1.094618, [-0.263889, -0.625, 0.395833, 0.3125]),
    "DPO on means": (without_nll("sigmoid", over="tokens"), 0.700009, [-0.039498, -0.066401, 0.059248, 0.033201]),
    "SimPO": (without_nll("simpo", gamma=0.3), 0.817947, [-0.042274, -0.075585, 0.063411, 0.037792]),
    "CPO": (without_nll("cpo"), 0.549531, [-0.109456, -0.101833, 0.109456, 0.101833]),
    "ORPO": (without_nll("orpo"), 0.320601, [-0.051992, -0.132264, 0.051038, 0.082980]),
    "APO-zero": (without_nll("apo_zero"), 1.015484, [-0.062256, -0.062256, 0.062256, 0.061534]),
    "APO-down": (without_nll("apo_down"), 1.015245, [0.000723, 0.001903, 0.061534, 0.060353]),
    "NCA": (without_nll("nca"), 1.407283, [-0.050796, -0.074204, 0.058599, 0.070272]),
    "BCO": (without_nll("bco"), 1.424368, [-0.117198, -0.132802, 0.117198, 0.140544]),
    "SPPO": (without_nll("sppo"), 2.468750, [-0.75, -1.25, 0.75, 1.5]),
    "EXO": (without_nll("exo", smoothing=0.1), 0.556835, [-0.119820, -0.155242, 0.119820, 0.155242]),
}


@pytest.mark.parametrize("name", TABLE)
def test_value_and_gradient(name):
    config, want, slopes = TABLE[name]
    value, gradient, _, _ = evaluate(config)
    assert_same(value, want)
    assert_same(gradient, slopes)


def test_pair_losses_and_metrics():
    _, _, losses, metrics = evaluate(TABLE["DPO"][0])
    assert_same(losses, [0.575939, 0.898123])
    want = dict(pairs=2, correct=1, margin=0.25 - 0.375, chosen_reward=0.125 - 0.125, rejected_reward=-0.125 + 0.25)
    want |= dict(chosen_log_prob=-3.5, rejected_log_prob=-4.75)
    assert metrics.keys() == want.keys()
    assert_same([metrics[name] for name in want], list(want.values()))


def test_pairs_with_an_empty_completion_are_ignored():
    short = dict(chosen_lengths=jnp.asarray([3, 0]))
    references = dict(reference_chosen=jnp.asarray([-2.0, NAN]))
    for config in (without_nll("sigmoid"), without_nll("ipo", over="tokens"), without_nll("orpo", nll_weight=1.0)):
        given = short | (references if config.needs_reference else {})
        _, gradient, losses, metrics = evaluate(config, **given)
        alone = evaluate(config)
        assert_same(losses, [alone[2][0], 0])
        assert_same(gradient, alone[1] * [1, 0, 1, 0])
        assert metrics["pairs"] == 1 and metrics["chosen_log_prob"] == -1.75


def test_losses_of_a_policy_equal_to_the_reference():
    """The DPO loss is log 2, and the IPO loss is 1 / (4 beta^2)."""
    zeros = dict.fromkeys(REFERENCE, jnp.asarray([-2.0, -3.0]))
    for config, want in (
        (without_nll("sigmoid"), math.log(2)),
        (without_nll("ipo", over="sums"), 1.0),
        (without_nll("robust"), math.log(2)),
    ):
        losses, _ = pair_loss(config, jnp.asarray([-2.0, -3.0]), jnp.asarray([-2.0, -3.0]), **LENGTHS, **zeros)
        assert_same(losses, [want] * 2)


def test_nll_of_the_chosen_completion():
    """The NLL is averaged per completion (0.729167), or over all tokens of the batch with `token_weights`."""
    without = evaluate(without_nll("orpo"))
    value, gradient, _, _ = evaluate(without_nll("orpo", nll_weight=None))
    assert_same(value - without[0], 0.729167)
    assert_same(gradient - without[1], [-1 / 6, -1 / 4, 0, 0])
    assert_same(evaluate(without_nll("cpo", nll_weight=None))[0] - evaluate(without_nll("cpo"))[0], 0.729167)
    assert_same(evaluate(without_nll("sigmoid", nll_weight=None))[0], TABLE["DPO"][1])
    assert_same(evaluate(without_nll("sigmoid", nll_weight=0.5))[0], TABLE["DPO"][1] + 0.729167 / 2)
    for aggregation, want in (("token", 0.7), ("sequence", 0.729167)):
        chosen = np.where(COMPLETION_IDS == 1, -LOG_PROBS, 0)
        assert_same(np.sum(token_weights(COMPLETION_IDS == 1, aggregation) * chosen), want)


def test_bco_subtracts_the_reward_baseline():
    """The baseline is subtracted from the rewards c = (0.125, -0.125) and r = (-0.125, 0.25)."""
    _, _, losses, _ = evaluate(without_nll("bco"), baseline=jnp.float32(0.2))
    want = [math.log1p(math.exp(0.2 - c)) + math.log1p(math.exp(r - 0.2)) for c, r in ((0.125, -0.125), (-0.125, 0.25))]
    assert_same(losses, want)


def test_log_odds_are_accurate_in_float32():
    """Test log(p / (1 - p)) for log-probs near and far below 0; at 0 it is finite and has no gradient."""
    log_probs = np.array([-1e-5, -1e-3, -0.6, -0.7, -5.0, -80.0])
    got = log_odds(jnp.asarray(log_probs, jnp.float32))
    exact = np.asarray(log_probs, np.float32).astype(np.float64)
    assert_allclose(got, exact - np.log(-np.expm1(exact)), rtol=1e-6, atol=1e-6)
    slope = jax.vmap(jax.grad(log_odds))(jnp.asarray(log_probs, jnp.float32))
    assert_allclose(slope, -1 / np.expm1(exact), rtol=1e-5)
    value, slope = jax.value_and_grad(log_odds)(jnp.float32(0))
    assert np.isfinite(value) and value > 13 and slope == 0


# --- KTO ---

KTO = {
    0.075: (0.507766, [-0.031190, -0.031045, 0.031045, 0.030900]),
    0.0: (0.507742, [-0.031128, -0.031128, 0.031128, 0.030767]),
}


def kto(config, baseline, lengths=(3, 2, 2, 4)):
    reference = jnp.asarray([-2, -1.5, -2, -3], jnp.float32)
    given = dict(lengths=jnp.asarray(lengths), baseline=jnp.float32(baseline))

    def loss(log_probs):
        losses, metrics = kto_loss(config, log_probs, reference, jnp.asarray([True, True, False, False]), **given)
        return jnp.mean(losses), (losses, metrics)

    return jax.value_and_grad(loss, has_aux=True)(jnp.asarray([-1.75, -1.75, -2.25, -2.5]))


@pytest.mark.slow(fast=("0.0",))
@pytest.mark.parametrize("baseline", KTO)
def test_kto_value_and_gradient(baseline):
    (value, (losses, metrics)), gradient = kto(KTOLoss(beta=0.5), baseline)
    assert_same(value, KTO[baseline][0])
    assert_same(gradient, KTO[baseline][1])
    want = dict(completions=4, desirable=2, desirable_reward=0, undesirable_reward=0.125)
    assert metrics.keys() == want.keys()
    assert_same([metrics[name] for name in want], list(want.values()))
    (_, (weighed, _)), _ = kto(KTOLoss(beta=0.5, desirable_weight=3.0, undesirable_weight=0.5), baseline)
    assert_same(weighed, np.asarray(losses) * [3, 3, 0.5, 0.5])
    (_, (some, metrics)), slopes = kto(KTOLoss(beta=0.5), baseline, lengths=(3, 0, 2, 4))
    assert_same(some, np.asarray(losses) * [1, 0, 1, 1])
    assert_same(slopes, np.asarray(gradient) * [1, 0, 1, 1])
    assert (metrics["completions"], metrics["desirable"]) == (3, 1)


def test_kto_baseline_has_no_gradient():
    policy, reference = jnp.asarray([-3, -2.5, -4, -3.5]), jnp.asarray([-3.2, -2.4, -4.3, -3.4])

    def loss(z, reference):
        desirable, lengths = jnp.asarray([True, False] * 2), jnp.ones(4, jnp.int32)
        return kto_loss(KTOLoss(), policy, reference, desirable, lengths=lengths, baseline=z)[0]

    assert_same(loss(jnp.float32(0), policy), [0.5] * 4)  # where policy and reference agree
    assert jax.grad(lambda z: jnp.sum(loss(z, reference)))(jnp.float32(0.1)) == 0


# --- reward models ---


@pytest.mark.slow(fast=("default-0.788632--0.18877,-0.334094,0.18877,0.334094",))
@pytest.mark.parametrize(
    "options, value, gradient",
    [
        ({}, 0.788632, [-0.188770, -0.334094, 0.188770, 0.334094]),
        (dict(margins=jnp.asarray([0.5, 0.0])), 0.898167, [-0.25, -0.334094, 0.25, 0.334094]),
        (dict(centering=0.01), 0.806732, [-0.169770, -0.333094, 0.207770, 0.335094]),
    ],
)
def test_reward_loss_value_and_gradient(options, value, gradient):
    def loss(scores):
        losses, metrics = reward_loss(scores[0], scores[1], **options)
        return jnp.mean(losses), metrics

    (got, metrics), slope = jax.value_and_grad(loss, has_aux=True)(jnp.asarray([[1.2, -0.3], [0.7, 0.4]]))
    assert_same(got, value)
    assert_same(slope.reshape(-1), gradient)
    want = dict(pairs=2, correct=1, margin=-0.2, chosen_reward=0.9, rejected_reward=1.1)
    assert metrics.keys() == want.keys()
    assert_same([metrics[name] for name in want], list(want.values()))


def test_padding_pairs_are_excluded_from_the_reward_loss():
    scores, real = jnp.asarray([1.2, NAN]), jnp.asarray([True, False])
    losses, metrics = reward_loss(scores, jnp.asarray([0.7, NAN]), real=real, margins=jnp.asarray([0.0, NAN]))
    assert_same(losses, [math.log1p(math.exp(-0.5)), 0])
    assert metrics["pairs"] == metrics["correct"] == 1


# --- configurations ---


@pytest.mark.parametrize(
    "make, names",
    [
        pytest.param(lambda: without_nll("ipo"), ["kind='ipo'", "over='sums'", "'tokens'"], id="ipo"),
        pytest.param(lambda: without_nll("exo"), ["kind='exo'", "smoothing"], id="exo"),
        pytest.param(lambda: without_nll("hinge", smoothing=0.1), ["smoothing=0.1", "kind='hinge'"], id="hinge"),
        pytest.param(lambda: without_nll("sigmoid", gamma=0.1), ["gamma=0.1", "kind='sigmoid'"], id="sigmoid"),
        pytest.param(lambda: without_nll("simpo", over="sums"), ["over='sums'", "kind='simpo'"], id="simpo"),
        pytest.param(lambda: without_nll("robust", smoothing=0.5), ["smoothing=0.5"], id="robust"),
        pytest.param(
            lambda: evaluate(without_nll("sigmoid"), reference_chosen=None),
            ["kind='sigmoid'", "reference"],
            id="without-reference",
        ),
        pytest.param(
            lambda: evaluate(without_nll("cpo"), **REFERENCE), ["kind='cpo'", "reference"], id="with-reference"
        ),
        pytest.param(
            lambda: evaluate(without_nll("nca"), baseline=jnp.float32(0)),
            ["kind='nca'", "baseline"],
            id="with-baseline",
        ),
    ],
)
def test_unused_or_missing_options_are_refused(make, names):
    with refused(ConfigError, "PairLoss", *names):
        make()


def test_completion_lengths_of_packed_pairs():
    assert_array_equal(completion_lengths(jnp.asarray(COMPLETION_IDS), 2), [[3, 2], [2, 4]])
