"""Rotary embeddings against NumPy in float64: frequencies, pairings and rotations, written from the formula."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.rope import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    Rope,
    YarnRope,
    rotate,
)
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import refused
from tests.layers.common import normal
from tests.oracles import llama3_by_hand, plain_frequencies, rotate_by_hand, yarn_by_hand


ROPES = [
    (Rope(theta=100.0), plain_frequencies(100.0, 8), 1.0),
    (Rope(pairing="interleaved"), plain_frequencies(1e4, 8), 1.0),
    (Rope(fraction=0.5), plain_frequencies(1e4, 4), 1.0),
    (Rope(fraction=0.25, pairing="interleaved"), [1.0], 1.0),
    (LinearRope(factor=4.0), [f / 4 for f in plain_frequencies(1e4, 8)], 1.0),
    (DynamicRope(factor=4.0, original_length=64), plain_frequencies(1e4, 8), 1.0),
    # Gemma 4: pairs span the head, and the last pairs are not rotated; a partial pair does not count
    (ProportionalRope(fraction=0.5), [*plain_frequencies(1e4, 8)[:2], 0.0, 0.0], 1.0),
    (ProportionalRope(fraction=0.7, factor=2.0), [*(f / 2 for f in plain_frequencies(1e4, 8)[:2]), 0.0, 0.0], 1.0),
]
LLAMA3 = [
    Llama3Rope(theta=500_000.0),
    Llama3Rope(theta=500_000.0, factor=32.0),
    Llama3Rope(theta=100.0, original_length=64, low_frequency_factor=2.0, high_frequency_factor=3.0),
]
YARN = [
    YarnRope(theta=10_000.0, factor=40.0, original_length=4096),
    YarnRope(theta=150_000.0, factor=32.0, original_length=4096, truncate=False),
    YarnRope(theta=100.0, factor=4.0, original_length=8, attention_factor=1.3),
    YarnRope(theta=100.0, factor=1.0, original_length=8, beta_fast=3.0, beta_slow=3.0),
]


@pytest.mark.parametrize("rope, frequencies, magnitude", ROPES, ids=lambda x: str(x)[:40])
def test_rotation_matches_a_loop(rope, frequencies, magnitude):
    check_rotation(rope, frequencies, magnitude)


def test_base_grows_beyond_the_original_length():
    """For each row separately; padding has position -1."""
    rope, positions = DynamicRope(factor=4.0, original_length=6), jnp.array([[0, 1, 2, 5], [0, 3, 8, -1]])
    for row, last in enumerate((5, 8)):
        base = 1e4 * (4.0 * max(last + 1, 6) / 6 - 3.0) ** (8 / 6)
        by_hand = np.maximum(positions[row], 0)[:, None] * base ** (-np.arange(4) / 4)
        assert_close(rope.angles(jnp.asarray(positions), 8)[0][row], by_hand)
    assert_close(rope.angles(positions[:1], 8)[0], Rope().angles(positions[:1], 8)[0])


def check_rotation(rope, frequencies, magnitude):
    x, positions = normal(2, 3, 2, 8), np.array([[0, 1, 7], [-1, 30, 5]])
    want = np.array(x, np.float64)
    for b, t, h in np.ndindex(2, 3, 2):
        place = max(positions[b, t], 0)
        want[b, t, h] = rotate_by_hand(x[b, t, h], place, frequencies, rope.pairing, magnitude)
    assert_close(rotate(jnp.asarray(x), jnp.asarray(positions), rope), want, units=128)
    half = rotate(jnp.asarray(x, jnp.bfloat16), jnp.asarray(positions), rope)
    assert half.dtype == jnp.bfloat16
    assert_close(half.astype(jnp.float32), want, units=4, dtype="bfloat16")


@pytest.mark.parametrize("rope", LLAMA3)
def test_llama3_matches_a_loop_over_wavelengths(rope):
    for dim in (8, 128):
        assert_allclose(rope.frequencies(dim), llama3_by_hand(rope, dim), rtol=1e-12)
    ratio = np.array(plain_frequencies(rope.theta, 128)) / rope.frequencies(128)
    assert ratio[0] == 1  # all three branches are used
    assert ratio[-1] == pytest.approx(rope.factor)
    assert np.any((ratio > 1.001) & (ratio < rope.factor - 0.001))
    check_rotation(rope, llama3_by_hand(rope, 8), 1.0)


@pytest.mark.parametrize("rope", YARN)
def test_yarn_matches_the_formula(rope):
    for dim in (8, 64):
        assert_allclose(rope.frequencies(dim), yarn_by_hand(rope, dim), rtol=1e-12)
    default = 0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0
    check_rotation(rope, yarn_by_hand(rope, 8), rope.attention_factor or default)


def test_yarn_truncation_matters():
    rounded, exact = (dataclasses.replace(YARN[0], truncate=flag).frequencies(64) for flag in (True, False))
    assert not np.allclose(rounded, exact, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("rope", [Rope(), Rope(pairing="interleaved"), Rope(fraction=0.5), LLAMA3[0]])
def test_rotation_keeps_norms_and_depends_on_relative_positions(rope):
    query, key = jnp.asarray(normal(1, 6, 2, 8)), jnp.asarray(normal(1, 6, 2, 8, seed=2))
    places = jnp.arange(6)[None]

    def scores(shift):
        return jnp.einsum("bqhd,bkhd->bhqk", rotate(query, places + shift, rope), rotate(key, places + shift, rope))

    assert_close(jnp.linalg.norm(rotate(query, places, rope), axis=-1), np.linalg.norm(query, axis=-1), units=32)
    assert_close(scores(37), np.asarray(scores(0)), units=128)
    unturned = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    assert not np.allclose(scores(0), unturned, atol=0.1)


@pytest.mark.parametrize("rope", [Rope(theta=500_000.0), Rope(pairing="interleaved"), YARN[0]])
def test_far_positions_are_rotated_by_float32_angles(rope):
    """Angles of 10^5 radians are exact up to 10^5 * 2^-23. In bfloat16 or float16 they would be meaningless."""
    x, positions = normal(1, 4, 1, 8), np.array([[99_991, 65_537, 131_071, 100_003]])
    want = np.array(x, np.float64)
    for t, position in enumerate(positions[0]):
        want[0, t, 0] = rotate_by_hand(x[0, t, 0], position, rope.frequencies(8), rope.pairing, rope.magnitude)
    for dtype, tolerance in ((jnp.float32, 0.03), (jnp.bfloat16, 0.06)):
        got = rotate(jnp.asarray(x, dtype), jnp.asarray(positions), rope)
        assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=tolerance)


SECTIONS = [
    # of 8 pairs, 0 to 7: the first dimension has the remaining pairs
    ((3, 3, 2), [0, 1, 2, 0, 1, 2, 0, 1]),
    ((4, 2, 2), [0, 1, 2, 0, 1, 2, 0, 0]),
    ((6, 1, 1), [0, 1, 2, 0, 0, 0, 0, 0]),
    ((0, 3, 2), [0, 1, 2, 0, 1, 2, 0, 1]),
    ((4, 4), [0, 1, 0, 1, 0, 1, 0, 1]),
]


@pytest.mark.slow(fast=("plain-3,3,2-0,1,2,0,1,2,0,1",))
@pytest.mark.parametrize("sections, axes", SECTIONS)
@pytest.mark.parametrize("kind", [Rope(theta=100.0, fraction=0.5), YARN[2]], ids=["plain", "yarn"])
def test_sections_assign_pairs_to_position_dimensions(kind, sections, axes):
    rope = dataclasses.replace(kind, sections=sections)
    x, positions = (
        normal(2, 3, 2, 32 if kind.fraction < 1 else 16),
        np.arange(18).reshape(2, 3, 3)[..., : len(sections)] - 1,
    )
    want = np.array(x, np.float64)
    frequencies = kind.frequencies(16)
    for b, t, h, pair in np.ndindex(2, 3, 2, 8):
        angle = max(positions[b, t, axes[pair]], 0) * frequencies[pair]
        one, other = x[b, t, h, pair], x[b, t, h, pair + 8]
        want[b, t, h, pair] = rope.magnitude * (one * math.cos(angle) - other * math.sin(angle))
        want[b, t, h, pair + 8] = rope.magnitude * (other * math.cos(angle) + one * math.sin(angle))
    assert_close(rotate(jnp.asarray(x), jnp.asarray(positions), rope), want, units=128)


@pytest.mark.slow
def test_long_rope_without_long_divisors_depends_on_no_length():
    """Phi-3.5-MoE: only the magnitude of long texts differs, and its files have equal values."""
    rope = LongRope(
        short_factors=(1.0, 1.5), long_factors=(3.0, 4.0), original_length=6, keeps_short=True, attention_factor=1.25,
    )  # fmt: skip
    x, positions = jnp.asarray(normal(1, 9, 2, 4)), jnp.arange(9)[None]
    assert rope.fixed_length is None
    short = rotate(x[:, :4], positions[:, :4], rope)
    assert_close(rotate(x, positions, rope)[:, :4], short)
    longer = dataclasses.replace(rope, long_attention_factor=1.5)
    assert longer.fixed_length == 6
    assert_close(rotate(x[:, :4], positions[:, :4], longer), short)
    assert_close(rotate(x, positions, longer)[:, :4], np.asarray(short) * 1.5 / 1.25)


def test_equal_dimensions_match_one_dimension():
    x, positions = jnp.asarray(normal(2, 3, 2, 16)), jnp.asarray([[0, 1, 7], [-1, 30, 5]])
    rope = Rope(sections=(3, 3, 2))
    plain = rotate(x, positions, dataclasses.replace(rope, sections=()))
    assert_array_equal(rotate(x, positions, rope), plain)
    assert_array_equal(rotate(x, jnp.stack([positions] * 3, axis=-1), rope), plain)


def test_positions_must_have_the_dimensions_of_the_sections():
    x, positions = jnp.zeros((1, 2, 1, 8)), jnp.zeros((1, 2, 3), jnp.int32)
    for sections in ((), (2, 2)):
        with refused(ed.ConfigError, f"Rope.sections={sections}"):
            rotate(x, positions, Rope(sections=sections))


@pytest.mark.slow(fast=("LongRope False",))
@pytest.mark.parametrize(
    "rope",
    [
        DynamicRope(factor=2.0, original_length=6),
        LongRope(short_factors=(1.0, 1.5), long_factors=(3.0, 4.0), original_length=6),
        LongRope(
            short_factors=(1.0, 1.5),
            long_factors=(3.0, 4.0),
            original_length=6,
            keeps_short=True,
            attention_factor=1.1,
            long_attention_factor=1.4,
        ),
    ],
    ids=lambda rope: f"{type(rope).__name__} {getattr(rope, 'keeps_short', '')}",
)
def test_documents_of_a_packed_sequence_have_separate_lengths(rope):
    """A long document does not change the rotation of a short one, in any order, with padding in between."""
    short, long = jnp.arange(4)[None], jnp.arange(9)[None]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 16, 2, 4)), jnp.float32)
    alone = rotate(x[:, :4], short, rope), rotate(x[:, 5:14], long, rope)
    positions = jnp.concatenate([short, jnp.full((1, 1), -1), long, jnp.full((1, 2), -1)], 1)
    segments = jnp.asarray([[1] * 4 + [0] + [2] * 9 + [0] * 2])
    together = rotate(x, positions, rope, segments)
    assert_close((together[:, :4], together[:, 5:14]), alone)
    apart = rotate(x, positions, rope)
    assert np.abs(apart[:, :4] - alone[0]).max() > 1e-2
    assert rope.fixed_length == 6 and Rope().fixed_length is None
