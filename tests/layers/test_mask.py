"""Masks as functions of absolute positions."""

import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.mask import Bidirectional, Causal, Chunked, SlidingWindow, Spans, interval, spans_of, visible
from tests.compare import assert_array_equal
from tests.errors import refused


def by_hand(mask, q, k):
    """Compute one query position and one key position."""
    if q < 0 or k < 0:
        return False
    if isinstance(mask, Bidirectional):
        return mask.size is None or q // mask.size == k // mask.size
    if isinstance(mask, SlidingWindow):
        return k <= q and q - k < mask.size
    if isinstance(mask, Chunked):
        return k <= q and q // mask.size == k // mask.size
    return k <= q


@pytest.mark.parametrize(
    "mask",
    [Causal(), SlidingWindow(1), SlidingWindow(3), Chunked(1), Chunked(4), Bidirectional(), Bidirectional(4)],
)
def test_masks_match_a_loop(mask):
    queries = np.array([[0, 1, 2, 7, -1, 3], [-1, 5, 6, 11, 12, 0]])
    keys = np.array([[4, 0, 1, -1, 2, 3, 7, 8], [11, 12, 9, -1, 5, 0, 4, 6]])  # the order of a rolling cache
    segments = np.array([[1, 1, 2, 2, 1, 2], [1, 1, 1, 1, 1, 2]])
    key_segments = np.array([[1, 1, 2, 2, 1, 2, 2, 1], [1, 1, 1, 1, 1, 1, 2, 2]])
    rows = zip(queries, keys, strict=True)
    alone = np.array([[[by_hand(mask, q, k) for k in row_k] for q in row_q] for row_q, row_k in rows])
    same = segments[:, :, None] == key_segments[:, None, :]
    args = [jnp.asarray(x, jnp.int32) for x in (queries, keys, segments, key_segments)]
    assert_array_equal(visible(mask, *args[:2]), alone)
    assert_array_equal(visible(mask, *args), alone & same)


@pytest.mark.parametrize("size", [0, -1, True])
def test_sizes_must_be_integers(size):
    for mask in (SlidingWindow, Chunked, Bidirectional):
        with refused(ConfigError, f"{mask.__name__}.size={size}"):
            mask(size)


def test_segments_are_needed_for_both_queries_and_keys():
    places = jnp.zeros((1, 3), jnp.int32)
    with refused(ConfigError, "key_segments"):
        visible(Causal(), places, places, None, places)
    with refused(ConfigError, "query_segments"):
        visible(Causal(), places, places, places)


def loop_of_spans(ids, positions):
    """Return the last position of each token's span, by a loop over the tokens of a row."""
    last = np.full(len(ids), -1)
    real = [i for i in range(len(ids)) if positions[i] >= 0]
    run: list[int] = []
    for before, at in zip([None, *real], [*real, None], strict=True):
        ends = at is None or before is None or ids[at] != ids[before] or positions[at] != positions[before] + 1
        if ends and run and ids[run[0]] > 0:
            last[run] = positions[run[-1]]
        run = ([at] if ends else [*run, at]) if at is not None else []
    return last


@pytest.mark.slow
def test_spans_are_runs_of_equal_ids():
    """Adjacent, repeated and final spans, spans across padding, and spans in two documents."""
    ids = np.array([[1, 1, 0, 1, 1, 2, 2, 2, 0, 3], [0, 4, 4, 4, 4, 4, 0, 0, 1, 1], [1, 0, 2, 2, 2, 2, 0, 0, 0, 0]])
    positions = np.array(
        [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 1, 2, -1, 3, 0, 1, 2, 3, -1], [7, 8, 9, 0, 1, -1, -1, 2, 3, 4]]
    )
    spans = spans_of(jnp.asarray(ids, jnp.int32), jnp.asarray(positions, jnp.int32))
    expected = [loop_of_spans(*row) for row in zip(ids, positions, strict=True)]
    assert_array_equal(spans.last, np.stack(expected))
    assert list(np.asarray(spans.last[1])) == [-1, 3, 3, -1, 3, 0, -1, -1, 3, -1]


@pytest.mark.slow
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(2), Chunked(4), Bidirectional()])
def test_tokens_see_the_later_tokens_of_their_span(mask):
    """The union of the mask and of "later in the same span" is an interval; documents are separate."""
    positions = jnp.asarray([[0, 1, 2, 3, 4, 5, 6, -1, 0, 1, 2, 3]], jnp.int32)
    segments = jnp.asarray([[1] * 8 + [2] * 4], jnp.int32)
    ids = jnp.asarray([[0, 1, 1, 1, 0, 2, 2, 2, 2, 2, 2, 0]], jnp.int32)
    span = np.array([0, 1, 1, 1, 0, 2, 2, 0, 3, 3, 3, 0])
    spans = spans_of(ids, positions)
    places = (positions, positions, segments, segments)
    seen = np.asarray(visible(mask, *places, spans))
    inside = (span[:, None] == span) & (span[:, None] > 0) & (np.arange(12)[:, None] <= np.arange(12))
    assert_array_equal(seen, np.asarray(visible(mask, *places)) | inside)
    first, last = (np.asarray(x) for x in interval(mask, positions, spans))
    assert (last[0, 7] < first[0, 7]) and not seen[0, 7].any()
    nothing = Spans(jnp.full_like(positions, -1))
    assert_array_equal(visible(mask, *places, nothing), visible(mask, *places))
