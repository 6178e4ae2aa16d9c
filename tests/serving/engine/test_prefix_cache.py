"""The prefix cache: lookup by content, a memory limit, and eviction of the ends of prompts before their starts."""

import random

import numpy as np
import pytest

from eqx_decoders.serving.engine.prefix_cache import CachedBlock, PrefixCache
from eqx_decoders.serving.engine.programs import CacheSnapshot


def block(state=None):
    return CachedBlock(
        CacheSnapshot(entries=np.zeros(96, np.uint8), tokens=np.zeros((1, 1), np.int32)), state
    )  # 100 bytes


def fill_cache(cache, tokens, salt="", state=None):
    names = cache.hash_blocks(tokens, salt)
    for count in range(1, len(names) + 1):
        cache.add(names[:count], block(state))
    return names


def test_finds_complete_blocks_and_leaves_one_token():
    cache = PrefixCache(4, 10_000, needs_state=False)
    names = fill_cache(cache, range(13))
    assert len(names) == 3
    assert len(cache.find(cache.hash_blocks(range(13)), 13)) == 3
    assert len(cache.find(cache.hash_blocks(range(12)), 12)) == 2  # the logits of the last token must be computed
    assert len(cache.find(cache.hash_blocks([*range(8), 99, 99, 99, 99, 99]), 13)) == 2
    assert len(cache.find(cache.hash_blocks([99, *range(12)]), 13)) == 0


def test_different_salts_do_not_share_blocks():
    cache = PrefixCache(4, 10_000, needs_state=False)
    fill_cache(cache, range(12), salt="a")
    assert cache.find(cache.hash_blocks(range(12), "b"), 12) == []
    assert len(cache.find(cache.hash_blocks(range(12), "a"), 12)) == 2


def test_recurrent_models_resume_only_after_blocks_with_states():
    cache = PrefixCache(4, 10_000, needs_state=True)
    names = fill_cache(cache, range(16))
    assert cache.find(names, 16) == []
    assert (
        cache.count_cached(names) == 4 and cache.lacks(names[1], state=True) and not cache.lacks(names[1], state=False)
    )
    cache.add(names[:2], block(np.zeros(10, np.uint8)))
    assert len(cache.find(names, 16)) == 2 and cache.nbytes == 410


def test_evicts_least_recently_used_prompts_from_their_ends():
    cache = PrefixCache(4, 500, needs_state=False)
    first, second = fill_cache(cache, range(12)), fill_cache(cache, range(100, 108))
    assert len(cache) == 5
    cache.find(first, 13)
    fill_cache(cache, range(200, 204))
    assert (
        cache.count_cached(first) == 3 and cache.count_cached(second) == 1
    )  # the end of the prompt that was not looked up


def test_does_not_store_a_block_without_its_predecessor():
    cache = PrefixCache(4, 500, needs_state=False)
    names = cache.hash_blocks(range(8))
    cache.add(names, block())
    assert len(cache) == 0 and cache.nbytes == 0


@pytest.mark.slow(fast=("0",))
@pytest.mark.parametrize("seed", range(5))
def test_random_histories_keep_the_size_and_the_predecessors_of_blocks(seed):
    pick = random.Random(seed)
    cache = PrefixCache(2, 1500, needs_state=False)
    for _ in range(300):
        tokens = [pick.randrange(2) for _ in range(pick.randrange(1, 14))]
        names = cache.hash_blocks(tokens)
        if pick.random() < 0.3:
            found = cache.find(names, len(tokens))
            assert len(found) == min(cache.count_cached(names), (len(tokens) - 1) // 2)
        else:
            fill_cache(cache, tokens)
        assert cache.nbytes == 100 * len(cache) <= 1500
    reached = set()
    for number in range(2**12):  # all prompts of up to six blocks
        names = cache.hash_blocks([number >> place & 1 for place in range(12)])
        reached |= set(names[: cache.count_cached(names)])
    assert reached == set(cache._blocks)
    cache.clear()
    assert len(cache) == 0 and cache.nbytes == 0


def test_stores_nothing_with_capacity_zero():
    cache = PrefixCache(4, 0, needs_state=False)
    assert cache.hash_blocks(range(12)) == [] and cache.find([], 12) == []
