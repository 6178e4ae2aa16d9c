"""Losses of preferences against numbers computed in float64: value and gradient.

Tables have six digits (half of the last is 5e-7) and float32 of numbers about 2 is off by 2e-7: equal to 1e-6.
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


def same(got, want) -> None:
    assert_allclose(got, want, rtol=0, atol=1e-6)


def run(config, **changes):
    """The mean over the pairs, the gradient of a token of each completion, and the sums of metrics."""
    given = LENGTHS | (REFERENCE if config.needs_reference else {}) | changes

    def loss(log_probs):
        sums = completion_sums(log_probs, jnp.asarray(COMPLETION_IDS), 2)
        losses, metrics = pair_loss(config, sums[:, 0], sums[:, 1], **given)
        return jnp.mean(losses), (losses, metrics)

    (value, (losses, metrics)), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(LOG_PROBS))
    tokens = [float(gradient[place]) for place in FIRST]
    for row, number in ((0, 1), (0, 2), (1, 1), (1, 2)):
        assert np.ptp(gradient[row][COMPLETION_IDS[row] == number]) == 0  # the same of each token
    assert_array_equal(gradient[COMPLETION_IDS == 0], 0)
    return value, np.asarray(tokens), losses, metrics


def of(kind, **options) -> PairLoss:
    return PairLoss(kind=kind, beta=0.5, **dict(nll_weight=0.0) | options)


TABLE = {
    "DPO": (of("sigmoid"), 0.737031, [-0.109456, -0.148167, 0.109456, 0.148167]),
    "cDPO": (of("sigmoid", smoothing=0.1), 0.730781, [-0.084456, -0.123167, 0.084456, 0.123167]),
    "robust": (of("robust", smoothing=0.1), 0.744844, [-0.140706, -0.179417, 0.140706, 0.179417]),
    "hinge": (of("hinge"), 1.062500, [-0.25, -0.25, 0.25, 0.25]),
    "IPO on sums": (of("ipo", over="sums"), 1.656250, [-0.5, -1.75, 0.5, 1.75]),
    "IPO on means": (of("ipo", over="tokens"), 1.094618, [-0.263889, -0.625, 0.395833, 0.3125]),
    "DPO on means": (of("sigmoid", over="tokens"), 0.700009, [-0.039498, -0.066401, 0.059248, 0.033201]),
    "SimPO": (of("simpo", gamma=0.3), 0.817947, [-0.042274, -0.075585, 0.063411, 0.037792]),
    "CPO": (of("cpo"), 0.549531, [-0.109456, -0.101833, 0.109456, 0.101833]),
    "ORPO": (of("orpo"), 0.320601, [-0.051992, -0.132264, 0.051038, 0.082980]),
    "APO-zero": (of("apo_zero"), 1.015484, [-0.062256, -0.062256, 0.062256, 0.061534]),
    "APO-down": (of("apo_down"), 1.015245, [0.000723, 0.001903, 0.061534, 0.060353]),
    "NCA": (of("nca"), 1.407283, [-0.050796, -0.074204, 0.058599, 0.070272]),
    "BCO": (of("bco"), 1.424368, [-0.117198, -0.132802, 0.117198, 0.140544]),
    "SPPO": (of("sppo"), 2.468750, [-0.75, -1.25, 0.75, 1.5]),
    "EXO": (of("exo", smoothing=0.1), 0.556835, [-0.119820, -0.155242, 0.119820, 0.155242]),
}


@pytest.mark.parametrize("name", TABLE)
def test_value_and_gradient(name):
    config, want, slopes = TABLE[name]
    value, gradient, _, _ = run(config)
    same(value, want)
    same(gradient, slopes)


def test_pairs_and_metrics():
    _, _, losses, metrics = run(TABLE["DPO"][0])
    same(losses, [0.575939, 0.898123])
    want = dict(pairs=2, correct=1, margin=0.25 - 0.375, chosen_reward=0.125 - 0.125, rejected_reward=-0.125 + 0.25)
    want |= dict(chosen_log_prob=-3.5, rejected_log_prob=-4.75)
    assert metrics.keys() == want.keys()
    same([metrics[name] for name in want], list(want.values()))


def test_pairs_without_an_completion_do_not_count():
    short = dict(chosen_lengths=jnp.asarray([3, 0]))
    references = dict(reference_chosen=jnp.asarray([-2.0, NAN]))
    for config in (of("sigmoid"), of("ipo", over="tokens"), of("orpo", nll_weight=1.0)):
        given = short | (references if config.needs_reference else {})
        _, gradient, losses, metrics = run(config, **given)
        alone = run(config)
        same(losses, [alone[2][0], 0])
        same(gradient, alone[1] * [1, 0, 1, 0])
        assert metrics["pairs"] == 1 and metrics["chosen_log_prob"] == -1.75


def test_equal_policies():
    """Where policy and reference agree DPO is log 2, and IPO 1 / (4 beta^2)."""
    zeros = dict.fromkeys(REFERENCE, jnp.asarray([-2.0, -3.0]))
    for config, want in ((of("sigmoid"), math.log(2)), (of("ipo", over="sums"), 1.0), (of("robust"), math.log(2))):
        losses, _ = pair_loss(config, jnp.asarray([-2.0, -3.0]), jnp.asarray([-2.0, -3.0]), **LENGTHS, **zeros)
        same(losses, [want] * 2)


def test_likelihood_of_the_chosen_completion():
    """A mean over the answer's tokens for each pair (.729167), or over all tokens of the batch with `token_weights`."""
    without = run(of("orpo"))
    value, gradient, _, _ = run(of("orpo", nll_weight=None))
    same(value - without[0], 0.729167)
    same(gradient - without[1], [-1 / 6, -1 / 4, 0, 0])
    same(run(of("cpo", nll_weight=None))[0] - run(of("cpo"))[0], 0.729167)
    same(run(of("sigmoid", nll_weight=None))[0], TABLE["DPO"][1])
    same(run(of("sigmoid", nll_weight=0.5))[0], TABLE["DPO"][1] + 0.729167 / 2)
    for aggregation, want in (("token", 0.7), ("sequence", 0.729167)):
        chosen = np.where(COMPLETION_IDS == 1, -LOG_PROBS, 0)
        same(np.sum(token_weights(COMPLETION_IDS == 1, aggregation) * chosen), want)


def test_baseline_of_rewards():
    """Of c = (.125, -.125), r = (-.125, .25) the baseline is taken off."""
    _, _, losses, _ = run(of("bco"), baseline=jnp.float32(0.2))
    want = [math.log1p(math.exp(0.2 - c)) + math.log1p(math.exp(r - 0.2)) for c, r in ((0.125, -0.125), (-0.125, 0.25))]
    same(losses, want)


def test_odds_in_float32():
    """log(p / (1 - p)) of log-probs near 0 and far below it; at 0 it is finite, and has no gradient."""
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
def test_kto(baseline):
    (value, (losses, metrics)), gradient = kto(KTOLoss(beta=0.5), baseline)
    same(value, KTO[baseline][0])
    same(gradient, KTO[baseline][1])
    want = dict(completions=4, desirable=2, desirable_reward=0, undesirable_reward=0.125)
    assert metrics.keys() == want.keys()
    same([metrics[name] for name in want], list(want.values()))
    (_, (weighed, _)), _ = kto(KTOLoss(beta=0.5, desirable_weight=3.0, undesirable_weight=0.5), baseline)
    same(weighed, np.asarray(losses) * [3, 3, 0.5, 0.5])
    (_, (some, metrics)), slopes = kto(KTOLoss(beta=0.5), baseline, lengths=(3, 0, 2, 4))
    same(some, np.asarray(losses) * [1, 0, 1, 1])
    same(slopes, np.asarray(gradient) * [1, 0, 1, 1])
    assert (metrics["completions"], metrics["desirable"]) == (3, 1)


def test_the_baseline_of_kto_has_no_gradient():
    policy, reference = jnp.asarray([-3, -2.5, -4, -3.5]), jnp.asarray([-3.2, -2.4, -4.3, -3.4])

    def loss(z, reference):
        desirable, lengths = jnp.asarray([True, False] * 2), jnp.ones(4, jnp.int32)
        return kto_loss(KTOLoss(), policy, reference, desirable, lengths=lengths, baseline=z)[0]

    same(loss(jnp.float32(0), policy), [0.5] * 4)  # where policy and reference agree
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
def test_reward_loss(options, value, gradient):
    def loss(scores):
        losses, metrics = reward_loss(scores[0], scores[1], **options)
        return jnp.mean(losses), metrics

    (got, metrics), slope = jax.value_and_grad(loss, has_aux=True)(jnp.asarray([[1.2, -0.3], [0.7, 0.4]]))
    same(got, value)
    same(slope.reshape(-1), gradient)
    want = dict(pairs=2, correct=1, margin=-0.2, chosen_reward=0.9, rejected_reward=1.1)
    assert metrics.keys() == want.keys()
    same([metrics[name] for name in want], list(want.values()))


def test_pairs_that_are_not_real_have_no_reward():
    scores, real = jnp.asarray([1.2, NAN]), jnp.asarray([True, False])
    losses, metrics = reward_loss(scores, jnp.asarray([0.7, NAN]), real=real, margins=jnp.asarray([0.0, NAN]))
    same(losses, [math.log1p(math.exp(-0.5)), 0])
    assert metrics["pairs"] == metrics["correct"] == 1


# --- configurations ---


@pytest.mark.parametrize(
    "make, names",
    [
        pytest.param(lambda: of("ipo"), ["kind='ipo'", "over='sums'", "'tokens'"], id="ipo"),
        pytest.param(lambda: of("exo"), ["kind='exo'", "smoothing"], id="exo"),
        pytest.param(lambda: of("hinge", smoothing=0.1), ["smoothing=0.1", "kind='hinge'"], id="hinge"),
        pytest.param(lambda: of("sigmoid", gamma=0.1), ["gamma=0.1", "kind='sigmoid'"], id="sigmoid"),
        pytest.param(lambda: of("simpo", over="sums"), ["over='sums'", "kind='simpo'"], id="simpo"),
        pytest.param(lambda: of("robust", smoothing=0.5), ["smoothing=0.5"], id="robust"),
        pytest.param(
            lambda: run(of("sigmoid"), reference_chosen=None), ["kind='sigmoid'", "reference"], id="without-reference"
        ),
        pytest.param(lambda: run(of("cpo"), **REFERENCE), ["kind='cpo'", "reference"], id="with-reference"),
        pytest.param(lambda: run(of("nca"), baseline=jnp.float32(0)), ["kind='nca'", "baseline"], id="with-baseline"),
    ],
)
def test_unused_and_missing_options_are_refused(make, names):
    with refused(ConfigError, "PairLoss", *names):
        make()


def test_lengths_of_packed_pairs():
    assert_array_equal(completion_lengths(jnp.asarray(COMPLETION_IDS), 2), [[3, 2], [2, 4]])
