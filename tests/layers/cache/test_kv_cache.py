"""Layer caches: committed tokens, and resets and copies of single rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.cache.kv_cache import KVShape, NewKV
from eqx_decoders.layers.cache.recurrent_state import (
    ChannelShape,
    ChannelUpdate,
    ConvInputs,
    ConvShape,
    NewConvInputs,
    NewState,
    StateShape,
    StateUpdate,
)
from eqx_decoders.layers.mask import Causal, Chunked, SlidingWindow
from tests.compare import assert_array_equal, assert_close
from tests.layers.common import normal
from tests.models import extend, filled, rich_decoder, some_tokens


LAYERS, BATCH = 2, 3
ORDER = jnp.arange(7)[None]


@pytest.mark.parametrize(
    "mask, max_length, slots, rolling",
    [
        (Causal(), 9, 9, False),
        (SlidingWindow(4), 9, 4, True),
        (SlidingWindow(9), 9, 9, False),
        (Chunked(5), 3, 3, False),
    ],
)
def test_number_of_slots(mask, max_length, slots, rolling):
    config = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, mask=mask)
    shape = config.cache_shape(max_length)
    assert (shape.slots, shape.rolling, shape.kv_heads, shape.head_dim) == (slots, rolling, 2, 4)


@pytest.mark.slow(fast=("4-4", "4-11"))
@pytest.mark.parametrize("length", [1, 4, 11])
@pytest.mark.parametrize("decays", [1, 4])
def test_recurrent_state_contains_the_committed_tokens(length, decays):
    decay = -np.abs(normal(LAYERS, BATCH, length, 2, decays))
    key, value = normal(LAYERS, BATCH, length, 2, 4, seed=2), normal(LAYERS, BATCH, length, 2, 5, seed=3)
    positions = np.arange(length)[None] + np.asarray([[7], [0], [3]])
    positions = np.where(np.arange(length)[None] < np.asarray([[length], [0], [2]]), positions, -1)
    memory = StateShape(heads=2, key_dim=4, value_dim=5).build(LAYERS, BATCH, jnp.bfloat16)
    begin = jnp.asarray(normal(LAYERS, BATCH, 2, 4, 5, seed=4))
    memory = memory.commit(jax.vmap(NewState)(begin), jnp.zeros((BATCH, 1), int))
    want = np.array(memory.state)
    for row in range(BATCH):
        for token in np.flatnonzero(positions[row] >= 0):
            written = key[:, row, token, :, :, None] * value[:, row, token, :, None, :]
            want[:, row] = np.exp(decay[:, row, token])[..., None] * want[:, row] + written
    new = memory.commit(jax.vmap(StateUpdate)(*map(jnp.asarray, (decay, key, value))), jnp.asarray(positions))
    assert_close(new.state, want)
    assert_array_equal(new.state[:, 1], memory.state[:, 1])  # a row without tokens, bit by bit


@pytest.mark.slow(fast=("1",))
@pytest.mark.parametrize("length", [1, 4, 11])
def test_channel_state_contains_the_committed_tokens(length):
    steps, written = np.abs(normal(LAYERS, BATCH, length, 5)), normal(LAYERS, BATCH, length, 5, seed=2)
    key, rates = normal(LAYERS, BATCH, length, 4, seed=3), -np.abs(normal(LAYERS, 4, 5, seed=4))
    kept = np.arange(length)[None] < np.asarray([[length], [0], [2]])
    memory = ChannelShape(key_dim=4, channels=5).build(LAYERS, BATCH, jnp.bfloat16)
    begin = jnp.asarray(normal(LAYERS, BATCH, 4, 5, seed=5))
    memory = memory.commit(jax.vmap(NewState)(begin), jnp.zeros((BATCH, 1), int))
    want = np.array(memory.state)
    for row, token in zip(*np.nonzero(kept), strict=True):
        update = key[:, row, token, :, None] * written[:, row, token, None, :]
        want[:, row] = np.exp(rates * steps[:, row, token, None]) * want[:, row] + update
    entries = jax.vmap(ChannelUpdate)(*map(jnp.asarray, (steps, written, key, rates)))
    new = memory.commit(entries, jnp.where(kept, 3 + jnp.arange(length), -1))
    assert_close(new.state, want)
    assert_array_equal(new.state[:, 1], memory.state[:, 1])  # a row without tokens, bit by bit


@pytest.mark.slow(fast=("int32",))
@pytest.mark.parametrize("dtype", [None, "int32"])
def test_convolution_state_is_the_last_committed_inputs(dtype):
    memory = ConvShape(num_inputs=3, channels=2, dtype=dtype).build(LAYERS, BATCH, jnp.float32)
    kept = [np.asarray(row) for row in memory.tail.swapaxes(0, 1)]
    for seed, length in enumerate((1, 2, 5, 1)):
        inputs = np.round(10 * normal(LAYERS, BATCH, length, 2, seed=seed)).astype(memory.tail.dtype)
        real = np.random.default_rng(seed).random((BATCH, length)) < 0.6
        positions = jnp.asarray(np.where(real, seed, -1))
        memory = memory.commit(jax.vmap(ConvInputs)(jnp.asarray(inputs)), positions)
        kept = [np.concatenate([old, inputs[:, row, real[row]]], axis=1)[:, -3:] for row, old in enumerate(kept)]
        assert_array_equal(memory.tail, np.stack(kept, axis=1))
    given = jnp.zeros_like(memory.tail)
    assert_array_equal(memory.commit(jax.vmap(NewConvInputs)(given), positions).tail, given)


@pytest.mark.slow(fast=("rolling",))
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(KVShape(slots=4, kv_heads=1, head_dim=2, rolling=True), id="rolling"),
        KVShape(slots=4, kv_heads=1, head_dim=2, rolling=False, values=False, by_slot=True),
        StateShape(heads=1, key_dim=2, value_dim=2),
        ChannelShape(key_dim=3, channels=2),
        ConvShape(num_inputs=2, channels=2, dtype="int32"),
    ],
)
def test_reset_and_copy_change_only_one_row(shape):
    empty = shape.build(LAYERS, BATCH, jnp.float32)
    full = jax.tree.map(lambda leaf: leaf + 1 + jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape), empty)
    reset = full.empty_rows(jnp.asarray([1]))
    copied = full.with_row(2, full.row(jnp.int32(0)))
    for old, none, gone, new in zip(*map(jax.tree.leaves, (full, empty, reset, copied)), strict=True):
        rows = old.ndim > 2  # after the layer axis, which positions do not have
        old, none, gone, new = (np.moveaxis(np.asarray(leaf), int(rows), 0) for leaf in (old, none, gone, new))
        assert_array_equal(gone, [old[0], none[1], old[2]])
        assert_array_equal(new, [old[0], old[1], old[0]])


@pytest.mark.slow(fast=("12-False",))
@pytest.mark.parametrize("slots, rolling", [(3, True), (12, False), (5, True)])
def test_row_of_another_length_is_copied_to_the_right_slots(slots, rolling):
    by_slot = dict(kv_heads=2, head_dim=3, rolling=False, values=False, by_slot=True)
    single = KVShape(slots=8, **by_slot).build(LAYERS, 1, jnp.float32)
    single = single.commit(jax.vmap(lambda key: NewKV(key=key, value=None))(jnp.ones((LAYERS, 1, 7, 2, 3))), ORDER)
    assert KVShape(slots=12, **by_slot).build(LAYERS, 2, jnp.float32).with_row(1, single).key.sum() == LAYERS * 7 * 6
    source = KVShape(slots=8, kv_heads=2, head_dim=3, rolling=False).build(LAYERS, 1, jnp.float32)
    key, value = (jnp.asarray(normal(LAYERS, 1, 7, 2, 3, seed=seed)) for seed in (1, 2))
    source = source.commit(jax.vmap(NewKV)(key, value), jnp.arange(7)[None])
    target = (
        KVShape(slots=slots, kv_heads=2, head_dim=3, rolling=rolling).build(LAYERS, 2, jnp.float32).with_row(1, source)
    )
    assert set(target.positions[0].tolist()) == {-1}
    kept = range(7)[-slots:]
    assert set(target.positions[1].tolist()) - {-1} == set(kept)
    for position in kept:
        slot = position % slots
        assert_array_equal(target.key[:, 1, :, slot], key[:, 0, position])
        assert_array_equal(target.value[:, 1, :, slot], value[:, 0, position])


@pytest.mark.slow
def test_sequence_continues_in_a_row_of_another_cache():
    model, tokens = filled(rich_decoder()), some_tokens(2, 12)
    alone = ed.init_cache(model.config, 1, 8, dtype=jnp.float32)
    _, alone = extend(model, tokens[:1, :7], alone)
    many = ed.init_cache(model.config, 2, 12, dtype=jnp.float32)
    _, many = extend(model, tokens[:, :3], many)
    many = many.reset(jnp.asarray([True, False])).with_row(0, alone)
    assert many.length.tolist() == [7, 3]
    want = model(tokens).logits
    here = many.length
    logits, _ = extend(model, jnp.take_along_axis(tokens, here[:, None], axis=1), many)
    assert_close(logits[:, 0], jnp.take_along_axis(want, here[:, None, None], axis=1)[:, 0])
