"""Filters, samples and invalid settings of samplers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.core.sampling import SamplingTensors, choose_tokens, is_stop, min_logits
from tests.compare import assert_allclose
from tests.errors import refused


def passing(sampler, logits):
    """Logits over temperature, -inf where a filter cuts."""
    scaled = jnp.asarray(logits) / sampler.temperature
    return np.where(scaled >= min_logits(scaled, SamplingTensors.of(sampler).filters), scaled, -np.inf)


LOGITS = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.06, 0.04]]))


@pytest.mark.slow(fast=("Sample()-5",))
@pytest.mark.parametrize(
    "sampler, kept",
    [
        (ed.Sample(), 5),
        (ed.Sample(top_k=2), 2),
        (ed.Sample(top_k=99), 5),
        (ed.Sample(top_p=0.69), 2),
        (ed.Sample(top_p=0.71), 3),
        (ed.Sample(top_p=1.0), 5),
        (ed.Sample(top_p=0.01), 1),
        (ed.Sample(min_p=0.5), 3),
        (ed.Sample(min_p=1.0), 1),
        (ed.Sample(top_k=4, top_p=0.8, min_p=0.6), 2),
        (ed.Sample(temperature=0.5, min_p=0.3), 2),
    ],
)
def test_filters_keep_the_right_tokens(sampler, kept):
    finite = np.isfinite(passing(sampler, LOGITS))[0]
    assert finite.tolist() == [True] * kept + [False] * (5 - kept)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [ed.Sample(temperature=2.0), ed.Sample(top_k=3), ed.Sample(top_p=0.8)])
def test_samples_follow_the_distribution(sampler):
    """Chi-square over 20,000 samples; the bound is the 99.9 % quantile for four degrees of freedom."""
    keys = jax.random.split(jax.random.key(0), 20_000)
    many = jnp.tile(LOGITS, (20_000, 1))
    draws = np.asarray(choose_tokens(many, SamplingTensors.of(sampler), keys, np.zeros(20_000, np.int32)))
    want = np.asarray(jax.nn.softmax(passing(sampler, LOGITS)))[0]
    counts = np.bincount(draws, minlength=5)
    possible = want > 0
    assert counts[~possible].sum() == 0
    expected = 20_000 * want[possible]
    assert ((counts[possible] - expected) ** 2 / expected).sum() < 18.5


@pytest.mark.slow(fast=("0.9-ties",))
@pytest.mark.parametrize("kind", ["flat", "steep", "ties", "cut", "mixed"])
@pytest.mark.parametrize("mass", [0.9, 1.0, 0.1, 0.999])
def test_top_p_equals_the_result_of_sorting(kind, mass):
    """Over 500 tokens: some minimum logits are among the largest logits, others are found by bisection."""
    draws = np.random.default_rng(0).normal(size=(6, 500)).astype(np.float32)
    logits = {
        "flat": 0.01 * draws,
        "steep": 6 * draws,
        "ties": np.rint(draws),  # of a few numbers, zeros with both signs among them
        "cut": np.where(draws > 0.5, draws, -np.inf),
        "mixed": draws * np.asarray([0.01, 9, 0.1, 30, 1, 3])[:, None],
    }[kind].astype(np.float32)
    order = -np.sort(-logits, axis=-1)
    shares = np.exp(order.astype(np.float64))
    sums = np.cumsum(shares / shares.sum(-1, keepdims=True), axis=-1)
    reached = np.minimum((sums < mass - 1e-6).sum(-1), 499)  # a mass that is that of a whole group: rounding decides
    further = np.minimum((sums < mass + 1e-6).sum(-1), 499)
    kept = np.isfinite(passing(ed.Sample(top_p=mass), logits))
    rows = np.arange(6)
    fewest = (logits >= order[rows, reached][:, None]) & np.isfinite(logits)
    most = (logits >= order[rows, further][:, None]) & np.isfinite(logits)
    assert (fewest <= kept).all() and (kept <= most).all()
    assert (kept == (logits >= np.where(kept, logits, np.inf).min(-1)[:, None])).all()  # ties stay


def test_greedy_returns_the_lowest_id_of_equally_likely_tokens():
    assert choose_tokens(jnp.asarray([[1.0, 2.0, 2.0]]), SamplingTensors.of(ed.Greedy())).tolist() == [1]


def test_logits_are_divided_by_the_temperature_and_ties_are_kept():
    """Computed by hand, for two rows with different minimum logits."""
    logits = jnp.asarray([[0.0, 3.0, 2.0, 2.0], [5.0, 0.0, 4.0, -1.0]])
    out = passing(ed.Sample(temperature=0.5, top_k=2), logits)
    cut = -np.inf
    assert_allclose(out, [[cut, 6.0, 4.0, 4.0], [10.0, cut, 8.0, cut]], rtol=1e-6)
    out = passing(ed.Sample(temperature=2.0, min_p=float(np.exp(-0.6))), logits)
    assert_allclose(out, [[cut, 1.5, 1.0, 1.0], [2.5, cut, 2.0, cut]], rtol=1e-6)


def test_stops_are_the_listed_ids():
    tokens = jnp.asarray([[1, 2, 3], [4, 5, 1]])
    assert is_stop(tokens, np.array((), np.int32)).tolist() == [[False] * 3] * 2
    assert is_stop(tokens, np.array((1, 5))).tolist() == [[True, False, False], [False, True, True]]


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.0), ("top_k", 0), ("top_p", 1.5), ("top_p", 0.0), ("min_p", float("nan")), ("min_p", 1.1)],
)
def test_bad_settings_are_refused(field, value):
    with refused(ed.ConfigError, f"Sample.{field}={value}"):
        ed.Sample(**{field: value})
