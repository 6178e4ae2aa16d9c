"""Comparisons that tests rely on: they fail where results differ, and where they could not."""

import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.layers.attention.kernels.common import EMPTY
from tests.compare import assert_allclose, assert_array_equal, assert_close


OUT, LSE = np.linspace(1, 2, 6).astype(np.float32), np.asarray([EMPTY, 0.5, 1.5], np.float32)


def test_what_is_empty_hides_nothing():
    """A query that sees nothing has a log-sum-exp of -1e30: that is no size by which others may differ."""
    assert_close((OUT, LSE), (OUT, LSE))
    for out, lse in ((OUT + 1, LSE), (OUT, LSE + np.float32(1e-3))):
        with pytest.raises(AssertionError, match="differs by"):
            assert_close((out, lse), (OUT, LSE))
    for lse in (LSE[::-1], np.abs(LSE), LSE * np.float32(2), np.where(LSE == EMPTY, np.float32(0), LSE)):
        with pytest.raises(AssertionError, match="empty"):
            assert_close((OUT, lse), (OUT, LSE))


def test_counts_of_a_tree_are_no_size_of_its_numbers():
    with pytest.raises(AssertionError, match="differs by"):
        assert_close((OUT + np.float32(1e-2), 10**6), (OUT, 10**6))


@pytest.mark.parametrize(
    ("got", "want", "options", "words"),
    [
        (OUT[:0], OUT[:0], {}, "nothing to compare"),
        ([], [], {}, "nothing to compare"),
        (OUT, OUT * np.nan, {}, "not finite"),
        (OUT * np.inf, OUT * np.inf, {}, "not finite"),
        (OUT * np.nan, OUT, {}, "not finite"),
        (OUT, OUT, dict(units=512, dtype="bfloat16"), "says nothing"),
        (OUT, OUT, dict(rounded=[OUT * 2]), "says nothing"),
    ],
    ids=["no numbers", "no arrays", "NaN wanted", "infinite", "NaN", "wide", "rounded"],
)
def test_what_could_not_fail_is_refused(got, want, options, words):
    with pytest.raises(AssertionError, match=words):
        assert_close(got, want, **options)


def test_comparisons_like_numpy_refuse_what_cannot_fail():
    for want, options in ((OUT[:0], {}), (OUT * 1e-6, dict(atol=1e-5)), (OUT, dict(rtol=1))):
        with pytest.raises(AssertionError, match=r"nothing"):
            assert_allclose(want, want, **options)
    for compare in (assert_allclose, assert_array_equal):
        with pytest.raises(AssertionError, match="NaN"):
            compare(OUT * np.nan, OUT * np.nan)
        with pytest.raises(AssertionError, match="NaN"):
            compare(jnp.bfloat16(np.nan), jnp.bfloat16(np.nan))
        compare(OUT, OUT)
    assert_allclose(OUT * np.nan, OUT * np.nan, equal_nan=True)
    assert_allclose(np.float32(1e-7), 0, atol=1e-6)
