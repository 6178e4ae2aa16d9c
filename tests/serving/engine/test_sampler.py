"""Sampling of tokens row by row: filters, the distribution of sampled tokens, and independent rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.core.sampling import choose_tokens, min_logits
from eqx_decoders.errors import ConfigError
from eqx_decoders.serving.engine.sampler import (
    SAMPLING_VARIANTS,
    BatchSamplingParams,
    SamplingBatch,
    SamplingParams,
    SamplingTable,
    SamplingVariant,
    TokenHistory,
    adjust_logits,
    sample_rows,
    score_tokens,
)
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused


VOCAB = 700
LOGITS = np.random.default_rng(0).normal(size=(4, VOCAB)).astype(np.float32) * 3
LOGITS[2] = np.round(LOGITS[2])  # many are equal
FILTERS = [
    dict(top_k=5),
    dict(top_k=200),
    dict(top_k=VOCAB),
    dict(top_p=0.9),
    dict(top_p=0.999),
    dict(top_k=100, top_p=0.3),
    dict(min_p=0.1),
    dict(top_k=3, top_p=0.5, min_p=0.2),
]


def rows_of(*samplings, biases=4):
    rows = BatchSamplingParams.empty(len(samplings), biases)
    for row, sampling in enumerate(samplings):
        rows.set(row, sampling)
    return rows


lowest = jax.jit(min_logits)
chosen = jax.jit(lambda logits, rows, index: choose_tokens(logits, rows.tensors, rows.keys, index))


def sorted_filters(scaled, top_k=None, top_p=None, min_p=None):
    """Return the tokens that pass the filters, computed from sorted logits."""
    passes = np.ones(scaled.shape, bool)
    for row, logits in enumerate(scaled.astype(np.float64)):
        if top_k is not None:
            passes[row] &= logits >= np.sort(logits)[-min(top_k, VOCAB)]
        if top_p is not None:
            order = -np.sort(-logits[passes[row]])
            shares = np.cumsum(np.exp(order) / np.exp(order).sum())
            passes[row] &= logits >= order[np.sum(shares < top_p)]
        if min_p is not None:
            passes[row] &= logits >= logits.max() + np.log(min_p)
    return passes


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_filters_equal_filters_of_sorted_logits(temperature):
    scaled = LOGITS / np.float32(temperature)
    for filters in FILTERS:
        rows = rows_of(*[SamplingParams(temperature=temperature, **filters)] * 4)
        got = scaled >= np.asarray(lowest(jnp.asarray(scaled), rows.tensors.filters))
        assert_array_equal(got, sorted_filters(scaled, **filters), err_msg=str(filters))


def test_no_program_sorts_the_vocabulary():
    """XLA turns a top-k search into a sort if only a few results are used, which is 40 times slower."""
    draws = rows_of(*[SamplingParams(temperature=1.0, top_k=5, top_p=0.9)] * 4).tensors
    # constants instead of arguments: XLA can simplify the most
    known = jax.jit(lambda logits: min_logits(logits, draws.filters))
    for lowered in (lowest.lower(jnp.asarray(LOGITS), draws.filters), known.lower(jnp.asarray(LOGITS))):
        text = str(lowered.compile().as_text())
        assert "TopK" in text and " sort(" not in text


def test_filters_of_other_rows_do_not_change_a_row():
    samplings = [SamplingParams(temperature=0.9, seed=7, **filters) for filters in FILTERS] + [SamplingParams()]
    logits, index = jnp.tile(jnp.asarray(LOGITS[:1]), (len(samplings), 1)), np.arange(len(samplings))
    together = np.asarray(chosen(logits, rows_of(*samplings), index))
    reverse = np.asarray(chosen(logits, rows_of(*samplings[::-1]), index[::-1].copy()))
    assert_array_equal(together, reverse[::-1])
    assert together[-1] == LOGITS[0].argmax()


def test_samples_have_the_distribution_of_the_filtered_logits():
    sampling, draws = SamplingParams(temperature=1.5, top_k=30, seed=3), 20_000
    rows = rows_of(sampling)
    one = jnp.asarray(LOGITS[:1])
    found = np.asarray(jax.jit(jax.vmap(lambda index: chosen(one, rows, index[None])[0]))(jnp.arange(draws)))
    scaled = LOGITS[:1] / np.float32(1.5)
    kept = np.where(sorted_filters(scaled, top_k=30), scaled, -np.inf)[0]
    expected = draws * np.asarray(jax.nn.softmax(kept))
    counts = np.bincount(found, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    there = expected > 0
    chi2 = ((counts[there] - expected[there]) ** 2 / expected[there]).sum()
    assert chi2 < 60  # 29 degrees of freedom: exceeded for less than one in a thousand seeds


def test_sample_depends_only_on_seed_and_index():
    rows = rows_of(*[SamplingParams(temperature=1.0, seed=seed) for seed in (5, 5, 2**40 + 5, -1)])
    logits = jnp.zeros((4, VOCAB))
    first, same, other, negative = np.asarray(chosen(logits, rows, np.zeros(4, np.int32)))
    assert first == same and len({int(first), int(other), int(negative)}) == 3
    later = np.asarray(chosen(logits, rows, np.asarray([1, 0, 0, 0], np.int32)))
    assert later[0] != first and later[1] == same


def adjust(logits, *samplings, tokens, prompt_length, length, allowed=None, masked=None):
    count, words = len(samplings), -(-VOCAB // 32)
    allowed = np.full((count, words), -1, np.int32) if allowed is None else allowed
    masked = np.zeros(count, bool) if masked is None else masked
    written = TokenHistory(jnp.asarray(tokens), np.asarray(prompt_length), np.asarray(length))
    return np.asarray(jax.jit(adjust_logits)(jnp.asarray(logits), rows_of(*samplings), written, allowed, masked))


def test_penalties_and_biases_match_their_formulas():
    tokens = np.asarray([[1, 2, 3, 3, 9, 0]] * 3, np.int32)
    logits = LOGITS[:3].copy()
    samplings = (
        SamplingParams(repetition_penalty=2.0),
        SamplingParams(frequency_penalty=0.5, presence_penalty=0.25),
        SamplingParams(logit_bias=((4, 3.0), (9, -2.0))),
    )
    found = adjust(logits, *samplings, tokens=tokens, prompt_length=[2, 2, 2], length=[5, 5, 5])
    known = logits.copy()
    for token in (1, 2, 3, 9):  # including the prompt; tokens after the length do not count
        known[0, token] = known[0, token] / 2 if known[0, token] > 0 else known[0, token] * 2
    known[1, 3] -= 2 * 0.5 + 0.25
    known[1, 9] -= 0.5 + 0.25
    known[2, 4] += 3
    known[2, 9] -= 2
    assert_allclose(found, known, rtol=1e-6)


def test_masks_apply_only_to_masked_rows():
    allowed = np.zeros((2, -(-VOCAB // 32)), np.int32)
    for token in (0, 31, 32, VOCAB - 1):
        allowed[:, token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
    given = dict(tokens=np.zeros((2, 4), np.int32), prompt_length=[1, 1], length=[1, 1])
    found = adjust(
        LOGITS[:2], SamplingParams(), SamplingParams(), **given, allowed=allowed, masked=np.asarray([True, False])
    )
    assert np.flatnonzero(np.isfinite(found[0])).tolist() == [0, 31, 32, VOCAB - 1]
    assert_array_equal(found[1], LOGITS[1])


@pytest.mark.slow
def test_scores_are_log_probs_of_the_unmodified_logits():
    found = score_tokens(jnp.asarray(LOGITS), jnp.asarray([3, 4, 5, 6]), 5, jnp.asarray(True))
    known = np.asarray(jax.nn.log_softmax(LOGITS, axis=-1))
    assert_allclose(found.chosen, known[range(4), [3, 4, 5, 6]], rtol=1e-5)
    assert_allclose(found.top, -np.sort(-known, axis=1)[:, :5], rtol=1e-5)
    assert np.asarray(found.top_ids)[0, 0] == LOGITS[0].argmax()
    assert not np.asarray(score_tokens(jnp.asarray(LOGITS), jnp.zeros(4, int), 5, jnp.asarray(False)).chosen).any()


@pytest.mark.parametrize(
    "field, value",
    [("temperature", -1.0), ("top_p", 0.0), ("top_p", 2.0), ("repetition_penalty", 0.0), ("seed", 2**64)],
)
def test_refuses_invalid_sampling_parameters(field, value):
    with refused(ConfigError, f"SamplingParams.{field}={value}"):
        SamplingParams(**{field: value})


def test_refuses_two_biases_of_one_token():
    with refused(ConfigError, "SamplingParams.logit_bias"):
        SamplingParams(logit_bias=((3, 1.0), (3, 2.0)))


@pytest.mark.slow
def test_specialized_programs_have_no_branches_and_equal_the_general_program():
    """Greedy and sampled rows, with model and processed log-probs; filters may need more than the top tokens."""
    free = [SamplingParams(), *(SamplingParams(temperature=t, seed=n) for n, t in enumerate((0.3, 1.0, 4.0)))]
    cut = [SamplingParams(temperature=3.0, seed=n, **FILTERS[n]) for n in (1, 4, 7)] + [SamplingParams(top_k=2)]
    history = TokenHistory(np.zeros((4, 2), np.int32), np.ones(4, np.int32), np.ones(4, np.int32))
    for filters, samplings in ((False, free), (True, cut)):
        table = SamplingTable(SamplingBatch.greedy(4, -(-VOCAB // 32), 1), jnp.asarray)
        for slot, sampling in enumerate(samplings):
            table.set(slot, sampling, prompt_length=1, adapter=0, processed_scores=slot % 2 == 1)
        for scores in (False, True):
            variant, batch = table.variant(range(4), scores), table.batch_of(range(4), scores)
            assert variant == SamplingVariant(filters, scores) and variant in SAMPLING_VARIANTS
            plain, formed = (
                jax.jit(lambda x, batch, variant=variant: sample_rows(x, batch, history, 1, 3, variant))
                for variant in (None, variant)
            )
            wanted, got = plain(jnp.asarray(LOGITS), batch), formed(jnp.asarray(LOGITS), batch)
            jax.tree.map(assert_array_equal, got, wanted)
            assert np.any(wanted[1].chosen) == scores
            text = formed.lower(jnp.asarray(LOGITS), batch).as_text()
            assert "stablehlo.case" not in text and "stablehlo.if" not in text
            assert "stablehlo.case" in plain.lower(jnp.asarray(LOGITS), batch).as_text()


def test_rows_with_changed_logits_use_the_general_program():
    table = SamplingTable(SamplingBatch.greedy(3, 1, 1), jnp.asarray)
    table.set(0, SamplingParams(temperature=1.0, top_p=0.5), prompt_length=1, adapter=0, processed_scores=False)
    table.set(1, SamplingParams(presence_penalty=0.1), prompt_length=1, adapter=0, processed_scores=False)
    assert table.variant([0], True) == (True, True) and table.variant([2], False) == (False, False)
    assert table.variant([0, 1], True) is None
    table.set(1, SamplingParams(logit_bias=((3, 1.0),)), prompt_length=1, adapter=0, processed_scores=False)
    assert table.variant([1, 2], False) is None
    table.set(1, SamplingParams(top_k=1), prompt_length=1, adapter=0, processed_scores=False)
    assert table.variant([1, 2], False) == (False, False)  # greedy, whatever the filters are
    table.set(1, SamplingParams(top_k=1), prompt_length=1, adapter=0, processed_scores=True)
    assert table.variant([1, 2], True) == (True, True)
    table.rows.masked[2] = True
    assert table.variant([1, 2], True) is None and table.variant([1], True) is not None
