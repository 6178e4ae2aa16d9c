"""Mixture of block attention (MoBA) against a loop in NumPy, for packed documents and with a cache."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.attention import moba, topk
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.attention.moba import BlockSelection
from eqx_decoders.layers.mask import SlidingWindow
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.models import EMBED, VOCAB, extend, filled, some_tokens
from tests.oracles import best


def chosen_by_hand(config, query, key, positions, segments):
    """Return `batch heads length length`: the keys that each query attends to, computed token by token."""
    batch, length, heads, _ = query.shape
    groups, seen = heads // key.shape[2], np.zeros((batch, heads, length, length), bool)
    for b, t, h in np.ndindex(batch, length, heads):
        if positions[b, t] < 0:
            continue
        mine = [s for s in range(length) if positions[b, s] >= 0 and segments[b, s] == segments[b, t]]
        own = positions[b, t] // config.size
        numbers = sorted({positions[b, s] // config.size for s in mine if positions[b, s] // config.size < own})
        means = [
            np.mean([key[b, s, h // groups] for s in mine if positions[b, s] // config.size == n], 0) for n in numbers
        ]
        scores = [float(query[b, t, h] @ mean) for mean in means]
        taken = {numbers[i] for i in best(scores, config.top_k - 1)} | {own}
        for s in mine:
            seen[b, h, t, s] = positions[b, s] <= positions[b, t] and positions[b, s] // config.size in taken
    return seen


def drawn(length, batch=3, heads=4, kv_heads=2, dim=5):
    random = np.random.default_rng(0)
    return (random.normal(size=(batch, length, count, dim)).astype(np.float32) for count in (heads, kv_heads))


@pytest.mark.slow
@pytest.mark.parametrize("tile", [topk.TILE, 40], ids=["whole", "some at a time"])
def test_blocks_match_the_loop(tile, monkeypatch):
    """Packed rows, padding at both ends and in between, documents that start within a block."""
    monkeypatch.setattr(topk, "TILE", tile)
    query, key = drawn(17)
    positions = np.stack([
        [*range(9), *range(7), -1],
        [-1, -1, 0, 1, -1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
        [5, 6, 7, 8, 9, 10, 11, 12, 13, 2, 3, 4, 5, 6, 7, 8, 9],
    ])  # fmt: skip
    segments = np.stack([[1] * 9 + [2] * 7 + [0], [1] * 17, [1] * 9 + [4] * 8])
    for config in (BlockSelection(size=3, top_k=2), BlockSelection(size=2, top_k=3), BlockSelection(size=5, top_k=1)):
        arrays = [jnp.asarray(x) for x in (query, key, positions.astype(np.int32), segments.astype(np.int32))]
        found = np.asarray(jax.jit(config.select)(*arrays).mask(17))
        causal = (positions[:, :, None] >= positions[:, None]) & (positions >= 0)[:, None] & (positions >= 0)[..., None]
        seen = found & (causal & (segments[:, :, None] == segments[:, None]))[:, None]
        assert_array_equal(seen, chosen_by_hand(config, query, key, positions, segments))
    assert BlockSelection(size=3, top_k=7).select(*arrays, contiguous=True) is None
    assert BlockSelection(size=3, top_k=17).select(*arrays) is None


@pytest.mark.slow(fast=("-10",))
@pytest.mark.parametrize("documents", [-10, 4])
def test_blocks_of_contiguous_documents_are_numbered_per_document(documents, monkeypatch):
    """The same selection with fewer blocks. More documents than expected use the general comparison."""
    monkeypatch.setattr(moba, "EXTRA_BLOCKS", documents)
    query, key = (jnp.asarray(x) for x in drawn(80, batch=2))
    positions = np.stack([[*range(40), *range(40)], [*range(7, 47), *range(30), *[-1] * 10]]).astype(np.int32)
    segments = np.stack([[1] * 40 + [2] * 40, [1] * 40 + [3] * 40])
    config, seen = BlockSelection(size=2, top_k=3), (positions[:, :, None] >= positions[:, None])
    seen &= (segments[:, :, None] == segments[:, None]) & (positions >= 0)[:, None]
    arrays = query, key, jnp.asarray(positions), jnp.asarray(segments)
    few, many = (jax.jit(config.select, static_argnums=4)(*arrays, each) for each in (True, False))
    assert few.words.shape[3] == 2 and many.words.shape[3] == 3
    assert_array_equal(*(np.asarray(each.mask(80)) & seen[:, None] for each in (few, many)))


@pytest.mark.slow
def test_positions_with_gaps_are_in_more_blocks():
    """At most one block per token: a row of six tokens may have six blocks of three positions."""
    query, key = drawn(6)
    positions = np.stack([np.arange(6), [0, 1, 2, 15, 16, 30], [0, 3, 6, 9, 12, 15]])
    config, segments = BlockSelection(size=3, top_k=3), np.ones((3, 6), np.int32)
    found = config.select(*(jnp.asarray(x) for x in (query, key, positions.astype(np.int32), segments))).mask(6)
    seen = np.asarray(found) & (positions[:, :, None] >= positions[:, None])[:, None]
    assert_array_equal(seen, chosen_by_hand(config, query, key, positions, segments))
    assert not seen[2, :, -1].all()


def decoder(**options) -> ed.DecoderConfig:
    norm, blocks = RMSNormConfig(), BlockSelection(size=3, top_k=2)
    mixer = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, selection=blocks)
    block = ed.BlockConfig(
        mixer=dataclasses.replace(mixer, **options), mlp=MLPConfig(mlp_dim=8), pre_mixer_norm=norm, pre_mlp_norm=norm
    )
    return ed.DecoderConfig(vocab_size=VOCAB, embed_dim=EMBED, blocks=(block,) * 2, final_norm=norm, tied=True)


@pytest.mark.slow
def test_blocks_without_tokens_are_not_selected():
    """Positions skip blocks. With a cache, the result is that of one call."""
    tokens, places = some_tokens(2, 11), jnp.asarray([[0, 1, 2, 3, 4, 5, 15, 16, 17, 18, 19]] * 2)
    model = filled(decoder())
    want = eqx.filter_jit(model)(tokens, positions=places).logits
    cache = ed.init_cache(model.config, 2, 20, dtype=jnp.float32)
    for begin, end in ((0, 7), (7, 11)):
        logits, cache = extend(model, tokens[:, begin:end], cache, places[:, begin:end])
        assert_close(logits, want[:, begin:end], units=256)


@pytest.mark.slow
def test_selection_scores_are_not_rounded_to_16_bits():
    """With equal keys and queries in 16 bits and a cache, the same blocks are selected."""
    draws = np.random.default_rng(1)
    shapes = (2, 3, 4, 8), (2, 3, 2, 8), (2, 2, 9, 8)
    query, key, keys = (jnp.asarray(draws.normal(size=shape), jnp.bfloat16) for shape in shapes)
    past = jnp.broadcast_to(jnp.arange(9), (2, 9))
    positions = past[:, :3] + 9

    def chosen(dtype):
        mine, others = (query.astype(dtype), key.astype(dtype), positions), (keys.astype(dtype), past)
        return BlockSelection(size=3, top_k=2).select_cached(*mine, *others)

    for rounded, exact in zip(jax.jit(chosen, static_argnums=0)(jnp.bfloat16), chosen(jnp.float32), strict=True):
        assert_array_equal(rounded, exact)


def test_wrong_configurations_are_refused():
    for options in (dict(mask=SlidingWindow(3)), dict(spans=True)):
        with refused(ed.ConfigError, "mask=Causal()", "spans=False"):
            decoder(**options)
    with refused(ed.ConfigError, "BlockSelection.top_k=0"):
        BlockSelection(top_k=0)


def test_operations_are_counted():
    mixer = decoder().blocks[0].mixer
    assert (mixer.token_products(4), mixer.token_products(100)) == (4 * 4 * 16, 4 * 6 * 16)
