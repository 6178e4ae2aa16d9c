"""Masks are functions of absolute positions alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.mask import Bidirectional, Causal, Chunked, SlidingWindow, visible


def by_hand(mask, q, k):
    """One query position and one key position."""
    if q < 0 or k < 0:
        return False
    if isinstance(mask, Bidirectional):
        return True
    if isinstance(mask, SlidingWindow):
        return k <= q and q - k < mask.size
    if isinstance(mask, Chunked):
        return k <= q and q // mask.size == k // mask.size
    return k <= q


@pytest.mark.parametrize(
    "mask", [Causal(), SlidingWindow(1), SlidingWindow(3), Chunked(1), Chunked(4), Bidirectional()]
)
def test_every_mask_is_the_loop(mask):
    queries = np.array([[0, 1, 2, 7, -1, 3], [-1, 5, 6, 11, 12, 0]])
    keys = np.array([[4, 0, 1, -1, 2, 3, 7, 8], [11, 12, 9, -1, 5, 0, 4, 6]])  # a ring's order
    segments = np.array([[1, 1, 2, 2, 1, 2], [1, 1, 1, 1, 1, 2]])
    key_segments = np.array([[1, 1, 2, 2, 1, 2, 2, 1], [1, 1, 1, 1, 1, 1, 2, 2]])
    rows = zip(queries, keys, strict=True)
    alone = np.array([[[by_hand(mask, q, k) for k in row_k] for q in row_q] for row_q, row_k in rows])
    same = segments[:, :, None] == key_segments[:, None, :]
    args = [jnp.asarray(x, jnp.int32) for x in (queries, keys, segments, key_segments)]
    np.testing.assert_array_equal(visible(mask, *args[:2]), alone)
    np.testing.assert_array_equal(visible(mask, *args), alone & same)


@pytest.mark.parametrize("size", [0, -1, True])
def test_sizes_are_whole_numbers(size):
    with pytest.raises(ConfigError, match=r"SlidingWindow.size=.* must be an integer of at least 1"):
        SlidingWindow(size)
    with pytest.raises(ConfigError, match=r"Chunked.size=.* must be an integer of at least 1"):
        Chunked(size)


def test_segments_come_in_pairs():
    places = jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(ConfigError, match="key_segments is given alone"):
        visible(Causal(), places, places, None, places)
    with pytest.raises(ConfigError, match="query_segments is given alone"):
        visible(Causal(), places, places, places)
