"""A row that is emptied for a new sequence gives the same results as a row of a new cache, whatever it contained."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.families.deepseek.compressed_attention import CompressedAttentionConfig, CompressedIndexerConfig
from eqx_decoders.families.deepseek.compression import CompressionConfig
from eqx_decoders.families.diffllama import DifferentialAttentionConfig
from eqx_decoders.families.doge import DynamicMaskConfig
from eqx_decoders.families.gemma.rg_lru import RGLRUConfig
from eqx_decoders.families.jetmoe import HeadMixtureConfig
from eqx_decoders.families.minimax.lightning import LightningAttentionConfig
from eqx_decoders.families.rwkv import ChannelMixConfig, TimeMixConfig
from eqx_decoders.families.xlstm import MLSTMConfig
from eqx_decoders.inference.draft_state import DraftState
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.attention.block_indexer import BlockIndexerConfig, PooledIndexerConfig
from eqx_decoders.layers.cache.base import is_layer_cache
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.kv_cache import CLEARED_SLOTS, KVCache, KVShape
from eqx_decoders.layers.cache.paged import PageConfig, PagedKVCache
from eqx_decoders.layers.cache.recurrent_state import ChannelState, ChannelUpdate, RecurrentState, StateUpdate
from eqx_decoders.layers.recurrent.gated_conv import GatedConvolutionConfig
from eqx_decoders.layers.recurrent.gated_delta_net import GatedDeltaNetConfig
from eqx_decoders.layers.recurrent.kimi_delta import KimiDeltaAttentionConfig
from eqx_decoders.layers.recurrent.mamba1 import Mamba1Config
from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config
from tests.compare import assert_array_equal
from tests.layers.cached_mixers import FULL, MIXERS
from tests.models import EMBED, VOCAB, filled, rich_decoder


ROWS, LENGTH, NAN_TOKEN = 3, 16, 5  # NAN_TOKEN: a token whose embedding is NaN
COMPRESSED = dict(num_heads=2, head_dim=8, rope_dim=4, q_rank=8, out_groups=2, out_rank=8, window=3)


def compressed(top_k: int | None) -> CompressedAttentionConfig:
    indexer = None if top_k is None else CompressedIndexerConfig(num_heads=2, head_dim=4, top_k=top_k)
    compression = CompressionConfig(size=2, overlaps=top_k is not None)
    return CompressedAttentionConfig(compression=compression, indexer=indexer, **COMPRESSED)


def selecting(selection) -> AttentionConfig:
    return dataclasses.replace(FULL, selection=selection)


# Layers by name: a mixer for each type of cache, and layers with states outside the mixer.
LAYERS = {
    **{name: BlockConfig(mixer=mixers[-1], mlp=None) for name, mixers in MIXERS.items()},
    "block indexer": selecting(BlockIndexerConfig(size=3, top_k=2, num_heads=2, head_dim=8)),
    "pooled indexer": selecting(PooledIndexerConfig(size=3, top_k=2, num_heads=1, head_dim=8)),
    "compressed": compressed(None),
    "compressed, chosen": compressed(2),
    "differential": DifferentialAttentionConfig(attention=FULL),
    "dynamic mask": DynamicMaskConfig(attention=FULL, top_k=2),
    "head mixture": HeadMixtureConfig(attention=FULL, num_experts=5),
    "delta": GatedDeltaNetConfig(num_key_heads=2, num_heads=2, key_dim=4, value_dim=4),
    "kimi": KimiDeltaAttentionConfig(num_heads=2, head_dim=4, gate_rank=2),
    "lightning": LightningAttentionConfig(num_heads=2, head_dim=4),
    "mamba1": Mamba1Config(channels=16, key_dim=4, step_rank=4),
    "mamba2": Mamba2Config(num_heads=2, value_dim=4, num_groups=1, key_dim=4),
    "mLSTM": MLSTMConfig(num_heads=2, key_dim=3, value_dim=4),
    "gated unit": RGLRUConfig(num_heads=2, value_dim=3),
    "gated convolution": GatedConvolutionConfig(channels=5, taps=3),
    "time mix": TimeMixConfig(embed_dim=EMBED, channels=5),
    "channel mix": BlockConfig(mixer=None, mlp=ChannelMixConfig(embed_dim=EMBED, mlp_dim=5)),
}
FORMATS = {
    "float8": CacheFormat(dtype="float8_e4m3fn"),
    "int8": CacheFormat(dtype="int8"),
    "int4": CacheFormat(dtype="int4"),
    "blocks of scales": CacheFormat(dtype="int8", scale_block=4),
    "bfloat16": CacheFormat(dtype="bfloat16"),
}
PAGED = {
    "pages": ("keys", CacheFormat(dtype="float32")),
    "pages of latents": ("latents", CacheFormat(dtype="float32")),
    "pages of int8": ("keys", CacheFormat(dtype="int8")),
}
CASES = {name: (name, CacheFormat(dtype="float32"), None) for name in LAYERS}
CASES |= {name: ("keys", cache_format, None) for name, cache_format in FORMATS.items()}
CASES |= {name: (*case, PageConfig(page_size=4)) for name, case in PAGED.items()}


def model_of(kind: str) -> ed.Decoder:
    layer = LAYERS[kind]
    block = layer if isinstance(layer, BlockConfig) else BlockConfig(mixer=layer, mlp=None)
    model = filled(rich_decoder(1, blocks=(block, block), tied=False))
    return eqx.tree_at(lambda m: m.embedding.table, model, model.embedding.table.at[NAN_TOKEN].set(jnp.nan))


def filled_with_nan(cache: ed.Cache) -> ed.Cache:
    """Return a cache whose slots are all in use, and whose floating-point values are all NaN."""

    def fill(leaf):
        return jnp.full_like(leaf, jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else 3)

    def mark_used(layer_cache, new):
        if isinstance(layer_cache, KVCache):
            positions = jnp.broadcast_to(jnp.arange(layer_cache.positions.shape[1]), layer_cache.positions.shape)
            return dataclasses.replace(new, positions=positions.astype(jnp.int32))
        if isinstance(layer_cache, PagedKVCache):
            return dataclasses.replace(new, table=layer_cache.table, lengths=jnp.full_like(new.lengths, LENGTH))
        return new

    filled_cache = jax.tree.map(fill, cache)
    caches = jax.tree.map(mark_used, cache.layer_caches, filled_cache.layer_caches, is_leaf=is_layer_cache)
    return dataclasses.replace(filled_cache, layer_caches=caches)


@eqx.filter_jit
def step(model, cache, tokens, positions, rows):
    """Return the logits of a call, and the cache after it."""
    hidden, proposal, _ = model.forward_uncommitted(tokens, positions, cache=cache.at_rows(rows))
    return model.logits(hidden), cache.commit_rows(rows, proposal.entries, proposal.positions, proposal.rope_offset)


def new_sequences(model, cache):
    """Return logits and cache after a padded prompt and two decoding steps in rows 0 and 2. Row 1 is idle."""
    prompts = np.random.default_rng(0).integers(6, VOCAB, (ROWS, 8)).astype(np.int32)
    lengths, order, rows = np.asarray([7, 0, 6]), np.arange(8, dtype=np.int32), jnp.arange(ROWS)
    positions = np.where(order < lengths[:, None], order, -1).astype(np.int32)
    found = []
    for begin, end in ((0, 4), (4, 8)):
        tokens = np.where(positions < 0, NAN_TOKEN, prompts)[:, begin:end]
        logits, cache = step(model, cache, tokens, positions[:, begin:end], rows)
        found.append(np.asarray(logits)[positions[:, begin:end] >= 0])
    for number in range(2):
        position = np.where(lengths > 0, lengths + number, -1).astype(np.int32)[:, None]
        tokens = np.where(position < 0, NAN_TOKEN, prompts[:, number : number + 1])
        logits, cache = step(model, cache, tokens, position, rows)
        found.append(np.asarray(logits)[position >= 0])
    return found, cache


def emptied(cache: ed.Cache) -> ed.Cache:
    """Empty all rows as an engine does: several rows per call, and an index beyond the last row as padding."""
    empty = jax.jit(lambda cache, rows: cache.empty_rows(rows))
    return empty(empty(cache, jnp.asarray([0, 2])), jnp.asarray([1, ROWS]))


@pytest.mark.slow(fast=("delta", "pages"))
@pytest.mark.parametrize("case", CASES)
def test_emptied_rows_give_the_results_of_a_new_cache(case):
    """Before emptying, all slots, scales and states are NaN. The idle row reads a token whose embedding is NaN."""
    kind, cache_format, pages = CASES[case]
    model = model_of(kind)
    new = ed.init_cache(model.config, ROWS, LENGTH, dtype=cache_format, pages=pages)
    want, _ = new_sequences(model, new)
    found, after = new_sequences(model, emptied(filled_with_nan(new)))
    assert all(np.isfinite(logits).all() for logits in want)
    for logits, expected in zip(found, want, strict=True):
        assert_array_equal(logits, expected)
    # the idle row does not change
    idle = jax.tree.map(lambda each: each.row(1), after.layer_caches, is_leaf=is_layer_cache)
    clean = jax.tree.map(lambda each: each.row(1), new.layer_caches, is_leaf=is_layer_cache)
    if pages is None:
        jax.tree.map(assert_array_equal, idle, clean)


@pytest.mark.parametrize("length", [1, 9])
def test_rejected_tokens_with_nan_do_not_change_states(length):
    """All tokens of the first row are rejected, and the last token of the second row."""
    positions = np.stack([np.full(length, -1), np.r_[range(length - 1), -1]]).astype(np.int32)
    draws = np.random.default_rng(0)

    def token(*dims):
        x = draws.normal(size=(2, length, *dims)).astype(np.float32)
        return jnp.where((positions >= 0).reshape(2, length, *(1,) * len(dims)), x, jnp.nan)

    state = RecurrentState(state=jnp.asarray(draws.normal(size=(1, 2, 2, 3, 4)), jnp.float32))
    update = StateUpdate(log_decay=token(2, 1), key=token(2, 3), value=token(2, 4))
    channels = ChannelState(state=jnp.asarray(draws.normal(size=(1, 2, 3, 4)), jnp.float32))
    by_channel = ChannelUpdate(steps=token(4), written=token(4), key=token(3), rates=jnp.full((3, 4), -0.5))
    for cache, proposed in ((state, update), (channels, by_channel)):
        entries = jax.tree.map(lambda x: x[None], proposed)
        after = cache.commit(entries, jnp.asarray(positions))
        without = cache.commit(jax.tree.map(jnp.nan_to_num, entries), jnp.asarray(positions))
        assert_array_equal(after.state, without.state)
        assert_array_equal(after.state[:, 0], cache.state[:, 0])


@pytest.mark.slow(fast=("False-int8", "True-int8"))
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("rolling", [False, True])
def test_all_used_slots_of_a_row_are_cleared(rolling, dtype):
    """The number of slots is not a multiple of CLEARED_SLOTS. Other rows do not change."""
    slots, used = 2 * CLEARED_SLOTS + 7, CLEARED_SLOTS + 1
    cache = KVShape(slots=slots, kv_heads=1, head_dim=2, rolling=rolling).build(1, 2, dtype)
    ones = jax.tree.map(jnp.ones_like, cache)
    for count in (used, slots):
        index = jnp.arange(slots, dtype=jnp.int32)
        full = dataclasses.replace(ones, positions=jnp.tile(jnp.where(index < count, index, -1), (2, 1)))
        left = full.empty_rows(jnp.asarray([1, 2]))
        assert (left.positions[1] == -1).all() and (left.positions[0] == full.positions[0]).all()
        for leaf in left.arrays:
            assert leaf is None or ((leaf[:, 0] == 1).all() and not leaf[:, 1, :, :count].any())


def test_emptied_rows_of_a_draft_state_are_zero():
    cache = KVShape(slots=4, kv_heads=1, head_dim=2, rolling=False).build(1, 2, "float32")
    state = DraftState((cache,), (jnp.full((2, 1, 3), jnp.nan),), jnp.ones((2, 2), jnp.int32))
    left = state.empty_rows(jnp.asarray([1]))
    assert (
        not left.last_hidden[0][1].any()
        and left.tokens.tolist() == [[1, 1], [0, 0]]
        and jnp.isnan(left.last_hidden[0][0]).all()
    )
