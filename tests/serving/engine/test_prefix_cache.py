"""Blocks of prompts: found by content, no more than fit, ends before beginnings."""

import random

import numpy as np
import pytest

from eqx_decoders.serving.engine.prefix_cache import CachedBlock, PrefixCache
from eqx_decoders.serving.engine.programs import CacheSnapshot


def block(state=None):
    return CachedBlock(
        CacheSnapshot(entries=np.zeros(96, np.uint8), tokens=np.zeros((1, 1), np.int32)), state
    )  # 100 bytes


def filled(cache, tokens, salt="", state=None):
    names = cache.hash_blocks(tokens, salt)
    for count in range(1, len(names) + 1):
        cache.add(names[:count], block(state))
    return names


def test_whole_blocks_are_found_and_one_token_is_left():
    cache = PrefixCache(4, 10_000, needs_state=False)
    names = filled(cache, range(13))
    assert len(names) == 3
    assert len(cache.find(cache.hash_blocks(range(13)), 13)) == 3
    assert len(cache.find(cache.hash_blocks(range(12)), 12)) == 2  # the last token's logits are needed
    assert len(cache.find(cache.hash_blocks([*range(8), 99, 99, 99, 99, 99]), 13)) == 2
    assert len(cache.find(cache.hash_blocks([99, *range(12)]), 13)) == 0


def test_other_salts_share_nothing():
    cache = PrefixCache(4, 10_000, needs_state=False)
    filled(cache, range(12), salt="a")
    assert cache.find(cache.hash_blocks(range(12), "b"), 12) == []
    assert len(cache.find(cache.hash_blocks(range(12), "a"), 12)) == 2


def test_models_with_states_go_on_behind_blocks_that_have_them():
    cache = PrefixCache(4, 10_000, needs_state=True)
    names = filled(cache, range(16))
    assert cache.find(names, 16) == []
    assert (
        cache.count_cached(names) == 4 and cache.lacks(names[1], state=True) and not cache.lacks(names[1], state=False)
    )
    cache.add(names[:2], block(np.zeros(10, np.uint8)))
    assert len(cache.find(names, 16)) == 2 and cache.nbytes == 410


def test_what_was_used_longest_ago_goes_and_ends_before_beginnings():
    cache = PrefixCache(4, 500, needs_state=False)
    first, second = filled(cache, range(12)), filled(cache, range(100, 108))
    assert len(cache) == 5
    cache.find(first, 13)
    filled(cache, range(200, 204))
    assert (
        cache.count_cached(first) == 3 and cache.count_cached(second) == 1
    )  # the end of the one that wasn't asked for


def test_a_block_whose_beginning_is_gone_is_not_kept():
    cache = PrefixCache(4, 500, needs_state=False)
    names = cache.hash_blocks(range(8))
    cache.add(names, block())
    assert len(cache) == 0 and cache.nbytes == 0


@pytest.mark.slow(fast=("0",))
@pytest.mark.parametrize("seed", range(5))
def test_histories_keep_the_count_and_leave_no_block_without_its_beginning(seed):
    pick = random.Random(seed)
    cache = PrefixCache(2, 1500, needs_state=False)
    for _ in range(300):
        tokens = [pick.randrange(2) for _ in range(pick.randrange(1, 14))]
        names = cache.hash_blocks(tokens)
        if pick.random() < 0.3:
            found = cache.find(names, len(tokens))
            assert len(found) == min(cache.count_cached(names), (len(tokens) - 1) // 2)
        else:
            filled(cache, tokens)
        assert cache.nbytes == 100 * len(cache) <= 1500
    reached = set()
    for number in range(2**12):  # all texts of up to six blocks
        names = cache.hash_blocks([number >> place & 1 for place in range(12)])
        reached |= set(names[: cache.count_cached(names)])
    assert reached == set(cache._blocks)
    cache.clear()
    assert len(cache) == 0 and cache.nbytes == 0


def test_nothing_is_kept_without_room():
    cache = PrefixCache(4, 0, needs_state=False)
    assert cache.hash_blocks(range(12)) == [] and cache.find([], 12) == []
