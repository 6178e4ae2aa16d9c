"""Selection of key blocks by an indexer against a loop in NumPy, for packed documents and with a cache."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.attention.block_indexer import BlockIndexerConfig, PooledIndexerConfig
from eqx_decoders.layers.attention.moba import BlockSelection
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.layers.common import context, drawn, normal
from tests.models import EMBED, VOCAB, extend, filled
from tests.oracles import best, norm_by_hand, plain_frequencies, rotate_by_hand, wide


INDEXER = BlockIndexerConfig(size=3, top_k=3, local_blocks=2, num_heads=2, head_dim=6, norm=RMSNormConfig(offset=1.0))
CONFIG = AttentionConfig(
    num_heads=4, num_kv_heads=1, head_dim=8, rope=Rope(theta=10.0, fraction=0.5), selection=INDEXER
)
POSITIONS = np.stack([[*range(12), *range(8), -1], [-1, -1, *range(5, 24)]]).astype(np.int32)
SEGMENTS = np.stack([[1] * 12 + [2] * 8 + [0], [1] * 21])
X = normal(2, 21, 5)


def chosen_by_hand(layer, x):
    """Return `batch heads length length`: the keys that each query head attends to."""
    indexer, (batch, length, _) = layer.indexer, x.shape
    table = plain_frequencies(10.0, 4)

    def rotated(norm, vector, position):
        vector = norm_by_hand(norm, vector)
        return np.concatenate([rotate_by_hand(vector[:4], position, table, "half"), vector[4:]])

    seen = np.zeros((batch, 2, length, length), bool)
    for b, t in np.ndindex(batch, length):
        here = POSITIONS[b, t]
        past = [s for s in range(t + 1) if POSITIONS[b, s] >= 0 and SEGMENTS[b, s] == SEGMENTS[b, t]]
        if here < 0:
            continue
        own = here // 3
        for h in range(2):
            query = rotated(indexer.query_norm, x[b, t] @ wide(indexer.query)[:, h], here)
            keys = {s: rotated(indexer.key_norm, x[b, s] @ wide(indexer.key), POSITIONS[b, s]) for s in past}
            numbers = sorted({POSITIONS[b, s] // 3 for s in past})
            scores = [
                np.inf if own - n < 2 else max(query @ keys[s] for s in past if POSITIONS[b, s] // 3 == n)
                for n in numbers
            ]
            taken = {numbers[i] for i in best(scores, 3)}
            seen[b, h, t, [s for s in past if POSITIONS[b, s] // 3 in taken]] = True
    return np.repeat(seen, 2, axis=1)


def test_blocks_match_the_loop():
    layer = drawn(lambda key: CONFIG.build(5, key=key))
    ctx = context(POSITIONS, SEGMENTS)
    mask = eqx.filter_jit(lambda x: layer._select_keys(layer._run_indexer(x, ctx), None, ctx).new.mask(21))
    seen = np.asarray(mask(jnp.asarray(X))) & (POSITIONS[:, :, None] >= POSITIONS[:, None])[:, None]
    seen &= ((SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (POSITIONS >= 0)[:, None] & (POSITIONS >= 0)[..., None])[
        :, None
    ]
    want = chosen_by_hand(layer, wide(X))
    assert_array_equal(seen, want)
    dense = np.tril(np.ones((21, 21), bool))[None] & (SEGMENTS[:, :, None] == SEGMENTS[:, None])
    assert (want.sum() < 0.9 * 4 * dense.sum()) and np.any(want[:, 0] != want[:, 2])


POOLED = dataclasses.replace(
    CONFIG, selection=PooledIndexerConfig(size=3, top_k=2, num_heads=3, head_dim=6, norm=RMSNormConfig(offset=1.0))
)


def pooled_by_hand(layer, x, positions, local):
    """Return `batch length length`: the two complete blocks with the best means, and the incomplete block."""
    indexer, table = layer.indexer, plain_frequencies(10.0, 4)

    def rotated(norm, vector, position):
        vector = norm_by_hand(norm, vector)
        return np.concatenate([rotate_by_hand(vector[:4], position, table, "half"), vector[4:]])

    seen = np.zeros((*x.shape[:2], x.shape[1]), bool)
    for b, t in np.ndindex(*x.shape[:2]):
        here = positions[b, t]
        past = [s for s in range(t + 1) if positions[b, s] >= 0 and SEGMENTS[b, s] == SEGMENTS[b, t]]
        if here < 0:
            continue
        queries = [rotated(indexer.query_norm, x[b, t] @ wide(indexer.query)[:, h], here) for h in range(3)]
        blocks = [past[begin : begin + 3] for begin in range(0, len(past), 3)]
        tail = [] if len(blocks[-1]) == 3 else blocks.pop()
        scores = []
        for block in blocks:
            mean = sum(x[b, s] @ wide(indexer.key) for s in block) / 3
            key = rotated(indexer.key_norm, mean, positions[b, block[0]])
            back = here // 3 - positions[b, block[0]] // 3
            scores.append(np.inf if 0 < back < local else sum(max(0.0, query @ key) for query in queries))
        for place in tail + [s for i in best(scores, 2) for s in blocks[i]]:
            seen[b, t, place] = True
    return seen


@pytest.mark.slow(fast=("1",))
@pytest.mark.parametrize("local", [1, 2])
def test_blocks_selected_by_mean_keys_match_the_loop(local):
    """Also where the context does not say that positions are contiguous."""
    config = dataclasses.replace(POOLED, selection=dataclasses.replace(POOLED.selection, local_blocks=local))
    layer, positions = drawn(lambda key: config.build(5, key=key)), POSITIONS.copy()
    positions[1, 2:] -= 5  # documents start at position 0
    want = pooled_by_hand(layer, wide(X), positions, local)
    for contiguous in (False, True):
        ctx = dataclasses.replace(context(positions, SEGMENTS), documents_are_contiguous=contiguous)
        mask = eqx.filter_jit(lambda x, ctx=ctx: layer._select_keys(layer._run_indexer(x, ctx), None, ctx).new.mask(21))
        seen = np.asarray(mask(jnp.asarray(X))) & (positions[:, :, None] >= positions[:, None])[:, None]
        real = (positions >= 0)[:, None] & (positions >= 0)[..., None]
        seen &= ((SEGMENTS[:, :, None] == SEGMENTS[:, None]) & real)[:, None]
        assert seen.shape[1] == 4
        assert_array_equal(seen, np.repeat(want[:, None], 4, axis=1))


def decoder(**options) -> ed.DecoderConfig:
    norm = RMSNormConfig()
    mixer = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, selection=dataclasses.replace(INDEXER, head_dim=8))
    block = ed.BlockConfig(mixer=dataclasses.replace(mixer, **options), mlp=None, pre_mixer_norm=norm)
    return ed.DecoderConfig(vocab_size=VOCAB, embed_dim=EMBED, blocks=(block,) * 2, final_norm=norm, tied=True)


@pytest.mark.parametrize("local", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["products", "largest", "means"])
def test_blocks_without_keys_are_never_selected(kind, local):
    """Positions of the row start far above 0, and the cache has empty slots."""
    selection = {
        "products": BlockSelection(size=3, top_k=3, local_blocks=local),
        "largest": BlockIndexerConfig(size=3, top_k=3, local_blocks=local, num_heads=2, head_dim=4),
        "means": PooledIndexerConfig(size=3, top_k=3, local_blocks=local, num_heads=2, head_dim=4),
    }[kind]
    count, draws = 9, np.random.default_rng(0)
    occupied = np.isin(np.arange(count), [4, 5, 8])[None]  # blocks with keys
    heads = selection.num_selections(2)
    query, key = (draws.normal(size=(1, 2, 2, 4)).astype(np.float32) for _ in range(2))
    past_positions = jnp.asarray([[12, 14, 16, -1, -1, -1]], jnp.int32)
    positions = jnp.asarray([[25, 26]], jnp.int32)  # in block 8
    past = -np.abs(draws.normal(size=(1, 6, 1 if kind != "products" else 2, 4))).astype(np.float32)
    present = key if kind == "products" else key[:, :, :1]
    parts = [(past_positions // 3, jnp.asarray(past)), (positions // 3, jnp.asarray(present))]
    scores = selection._cached_scores(jnp.asarray(np.abs(query)), parts, count, lambda means, firsts: means)
    assert scores.shape == (1, heads, 2, count)
    assert_array_equal(np.asarray(scores) > -np.inf, np.broadcast_to(occupied[:, None, None], scores.shape))
    back = (positions // 3)[:, :, None] - jnp.arange(count, dtype=jnp.int32)[None, None]
    chosen = np.asarray(selection._select_blocks(scores, back >= 0, back, positions))
    assert not (chosen & ~occupied[:, None, None]).any() and chosen[..., 4:6].all() and chosen[..., 8].all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["products", "largest", "means"])
def test_a_row_may_start_at_any_position(kind):
    """Logits of two chunks with a cache equal the logits of one call without a cache."""
    sizes = dict(size=4, top_k=2)
    selection = {
        "products": BlockSelection(**sizes),
        "largest": BlockIndexerConfig(**sizes, num_heads=2, head_dim=8),
        "means": PooledIndexerConfig(**sizes, num_heads=1, head_dim=8),
    }[kind]
    model = filled(decoder(selection=selection))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 16)), jnp.int32)
    for begin in (0, 40):
        positions = jnp.tile(jnp.arange(begin, begin + 16, dtype=jnp.int32), (2, 1))
        whole = model(tokens, positions=positions).logits
        cache, parts = ed.init_cache(model.config, 2, 64, dtype="float32"), []
        for first in (0, 8):
            piece = slice(first, first + 8)
            logits, cache = extend(model, tokens[:, piece], cache, positions[:, piece])
            parts.append(logits)
        assert_close(jnp.concatenate(parts, axis=1), whole, units=256)


@pytest.mark.slow
def test_selection_has_no_gradient():
    layer = drawn(lambda key: CONFIG.build(5, key=key))
    loss = eqx.filter_grad(lambda layer: jnp.sum(layer(jnp.asarray(X), context(POSITIONS, SEGMENTS))[0] ** 2))
    gradient = eqx.filter_jit(loss)(layer)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient.indexer)) and np.any(gradient.query)


@pytest.mark.parametrize(
    "field, value, bound",
    [("num_heads", 3, "num_heads=4"), ("head_dim", 3, "4"), ("local_blocks", 4, "top_k=3")],
    ids=["num_heads", "head_dim", "local_blocks"],
)
def test_indexers_that_do_not_fit_are_refused(field, value, bound):
    with refused(ed.ConfigError, f".{field}={value}", bound):
        dataclasses.replace(CONFIG, selection=dataclasses.replace(INDEXER, **{field: value}))


def test_keys_of_an_indexer_cannot_be_shared():
    with refused(ed.ConfigError, "kv_shared_from='it'"):
        dataclasses.replace(CONFIG, kv_shared_from="it")
    config = decoder()
    with refused(ed.ConfigError, "shares_kv_as='it'"):
        dataclasses.replace(config, blocks=(dataclasses.replace(config.blocks[0], shares_kv_as="it"),))


def test_operations_are_counted():
    assert CONFIG.token_products(6) == 4 * 6 * 16 + 2 * 6 * 6
    assert CONFIG.token_products(100) == 4 * 9 * 16 + 2 * 6 * 100
    assert POOLED.token_products(100) == 4 * 6 * 16 + 3 * 6 * 100 // 3


def test_heads_of_a_pooled_indexer_need_not_divide_attention_heads():
    assert POOLED.num_heads % POOLED.selection.num_heads != 0
