"""Test that log-probabilities of given tokens equal a direct forward pass, and that contexts are computed once."""

import numpy as np
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.evaluation import scoring
from eqx_decoders.evaluation.scoring import rolling_windows, score_continuations, score_texts
from tests.errors import refused
from tests.evaluation.models import forward, most_likely, small_engine


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, count).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("before", [1, 15, 16, 17, 40])
def test_log_probabilities_of_continuations_equal_a_forward_pass(before):
    context = random_tokens(before)
    best = most_likely(context)
    ends = [
        random_tokens(5, 1),
        random_tokens(1, 2),
        [best],
        [best, *random_tokens(1, 3)],
        [*random_tokens(1, 3), best],
        random_tokens(20, 4),
    ]
    found = score_continuations(small_engine(), [(context, end) for end in ends])
    for end, likelihood in zip(ends, found, strict=True):
        logprob, greedy = forward([*context, *end], before)
        assert likelihood.logprob == pytest.approx(logprob, abs=1e-5 * len(end)), end
        assert likelihood.is_greedy == greedy
    assert found[2].is_greedy and not found[3].is_greedy


@pytest.mark.slow
def test_shared_context_is_computed_once(monkeypatch):
    """If continuations have one token, the full context is shared; otherwise its complete cache pages."""
    engine, chunks = small_engine(), []
    prefill = engine._runner.prefill
    counted = lambda *args, **wanted: (chunks.append(args[2]), prefill(*args, **wanted))[1]  # noqa: E731
    monkeypatch.setattr(engine._runner, "prefill", counted)
    engine.clear_prefix_cache()
    score_continuations(engine, [(random_tokens(40, 7), [token]) for token in range(20, 30)])
    assert sorted(chunks) == [0, 16, 32]
    chunks.clear()
    score_continuations(engine, [(random_tokens(40, 8), [token, 5, 6]) for token in range(20, 30)])
    assert sorted(chunks) == [0, 16, *[32] * 10]


@pytest.mark.slow
def test_results_do_not_depend_on_order():
    pairs = [(random_tokens(3 + 7 * (at % 4), at % 4), random_tokens(1 + at % 3, at)) for at in range(14)]
    one, other = score_continuations(small_engine(), pairs), score_continuations(small_engine(), pairs[::-1])
    assert one == other[::-1]


@pytest.mark.slow
def test_long_contexts_are_truncated_at_the_start():
    context, end = random_tokens(100), random_tokens(4, 1)
    (found,) = score_continuations(small_engine(), [(context, end)])
    assert found.logprob == pytest.approx(forward([*context, *end][-64:], 60)[0], abs=1e-4)
    with refused(ConfigError, "64 tokens", "max_length=64"):
        score_continuations(small_engine(), [(context, random_tokens(64))])


@pytest.mark.parametrize("count", [0, 1, 2, 9, 10, 11, 47])
@pytest.mark.parametrize("context", [1, 4, 9])
def test_windows_score_each_token_once_with_the_longest_context(count, context):
    windows = list(rolling_windows(count, 10, context))
    assert [at for _, first, stop in windows for at in range(first, stop)] == list(range(1, count))
    assert all(stop - begin == min(10, stop) for begin, _, stop in windows)
    assert all(first - begin >= context for begin, first, _ in windows[1:])


def test_windows_equal_those_of_lm_eval():
    utils = pytest.importorskip("lm_eval.utils")
    for count, window, context in ((1, 5, 1), (7, 5, 1), (23, 5, 2), (23, 9, 4), (24, 24, 1)):
        tokens = [-1, *range(count)]
        known = list(utils.get_rolling_token_windows(tokens[1:], -1, window - 1, context))
        found = list(rolling_windows(count + 1, window, context))
        assert [(tokens[begin : stop - 1], tokens[first:stop]) for begin, first, stop in found] == known


def test_contexts_that_fill_the_window_are_refused():
    with refused(ConfigError, "text_context=10", "10 tokens", "max_length"):
        list(rolling_windows(20, 10, 10))


@pytest.mark.slow
def test_texts_are_scored_by_windows():
    texts = [random_tokens(150, 5), random_tokens(64, 6), random_tokens(2, 7), random_tokens(1, 8)]
    known = []
    for tokens in texts:
        windows = rolling_windows(len(tokens), 64, 20)
        known.append(sum(forward(tokens[begin:stop], first - begin)[0] for begin, first, stop in windows))
    assert score_texts(small_engine(), texts, 20) == pytest.approx(known, abs=1e-3)
    assert score_texts(small_engine(), texts[1:]) == pytest.approx(known[1:], abs=1e-3)  # a single window
    assert score_texts(small_engine(), texts[:1]) != pytest.approx(known[:1], abs=1e-3)


@pytest.mark.parametrize("pair", [([], [1, 2]), ([1, 2], []), ([], [])], ids=["no context", "no continuation", "empty"])
def test_empty_contexts_and_continuations_are_refused(pair):
    """Otherwise the score would be 0, the sum over no tokens and the best possible score."""
    with refused(ConfigError, "pair 1", f"{len(pair[0])} context tokens", f"{len(pair[1])} continuation tokens"):
        score_continuations(small_engine(), [([1], [2]), pair])


def test_texts_without_tokens_are_refused():
    with refused(ConfigError, "text 0", "0 tokens"):
        score_texts(small_engine(), [[]])


def test_empty_document_has_score_zero(monkeypatch):
    """Documents with and without tokens after the BOS token, in one call."""

    def scored(engine, pairs, progress):
        return [scoring.Likelihood(-float(len(continuation)), True) for _, continuation in pairs]

    monkeypatch.setattr(scoring, "score_continuations", scored)
    assert score_texts(small_engine(), [[1], [1, 2, 3], [1]]) == [0.0, -2.0, 0.0]
