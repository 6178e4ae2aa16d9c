"""How many slots a cache has."""

import pytest

from eqx_decoders.layers.attention import AttentionConfig
from eqx_decoders.layers.mask import Causal, Chunked, SlidingWindow


@pytest.mark.parametrize(
    "mask, max_length, slots, ring",
    [
        (Causal(), 9, 9, False),
        (SlidingWindow(4), 9, 4, True),
        (SlidingWindow(9), 9, 9, False),
        (Chunked(5), 3, 3, False),
    ],
)
def test_cache_shapes(mask, max_length, slots, ring):
    config = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, mask=mask)
    shape = config.memory(max_length)
    assert (shape.slots, shape.ring, shape.kv_heads, shape.head_dim) == (slots, ring, 2, 4)
