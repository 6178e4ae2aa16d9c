"""Layers with memories: pieces of rows give what whole rows give, and rejected tokens leave no trace."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.stack import at_layer
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.attention.variants.differential import DifferentialAttentionConfig
from eqx_decoders.layers.attention.variants.dynamic_mask import DynamicMaskConfig
from eqx_decoders.layers.cache import base as cache_base
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.recurrent.gated_conv import GatedConvolutionConfig
from eqx_decoders.layers.recurrent.lightning import LightningAttentionConfig
from eqx_decoders.layers.recurrent.mamba1 import Mamba1Config
from eqx_decoders.layers.recurrent.mlstm import MLSTMConfig
from eqx_decoders.layers.recurrent.rg_lru import RGLRUConfig
from eqx_decoders.layers.recurrent.rwkv import ChannelMixConfig, TimeMixConfig
from eqx_decoders.model.caches import block_cache
from tests.compare import assert_close
from tests.layers.common import BF16, context, drawn, normal


EMBED, WRONG = 6, 7.0
_ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4)
LAYERS = {
    "mamba": Mamba1Config(channels=5, key_dim=3, step_rank=2),
    "gated convolution": GatedConvolutionConfig(channels=5, taps=3),
    "lightning": LightningAttentionConfig(num_heads=2, head_dim=4),
    "mLSTM": MLSTMConfig(num_heads=2, key_dim=3, value_dim=4),
    "gated unit": RGLRUConfig(num_heads=2, value_dim=3),
    "time mix": TimeMixConfig(embed_dim=EMBED, channels=5),
    "differential": DifferentialAttentionConfig(attention=_ATTENTION),
    "dynamic mask": DynamicMaskConfig(attention=_ATTENTION, top_k=2),
}
CONFIGS = {name: BlockConfig(mixer=mixer, mlp=None) for name, mixer in LAYERS.items()}
CONFIGS["channel mix"] = BlockConfig(mixer=None, mlp=ChannelMixConfig(embed_dim=EMBED, mlp_dim=5))
# of two rows, the second a token shorter: positions of a call, -1 being padding, and how many of its tokens are kept
CALLS = [([[0, 1, 2], [0, 1, -1]], 3), ([[3, 4], [2, 3]], 1), ([[4, 5], [3, 4]], 2)]


@eqx.filter_jit
def results(blocks, x):
    """What each layer makes of whole rows, and of pieces: the positions of each call and its output."""
    return {name: (block(x, context([range(6)] * 2))[0], list(in_pieces(block, x))) for name, block in blocks.items()}


def in_pieces(block, x):
    cache = block_cache(block.config, 1, 2, 6, CacheFormat(dtype="float32"))
    for number, (positions, kept) in enumerate(CALLS):
        positions = np.asarray(positions)
        some = jnp.take_along_axis(x, jnp.maximum(positions, 0)[..., None], axis=1)
        some = jnp.where(np.arange(positions.shape[1])[None, :, None] < kept, some, WRONG)
        past = cache_base.pasts(cache, at_layer(cache_base.slices(cache), 0)) if number else None
        out, entries, _ = block(some, context(positions), past)
        entries = jax.tree.map(lambda leaf: leaf[None], entries)
        kept_positions = jnp.where(np.arange(positions.shape[1])[None] < kept, positions, -1)
        cache = cache_base.commit(cache, entries, kept_positions)
        yield out[:, :kept]


@pytest.mark.slow
def test_pieces_with_rejected_tokens_are_the_whole():
    blocks = {name: drawn(lambda key, config=config: config.build(EMBED, key=key)) for name, config in CONFIGS.items()}
    found = results(blocks, jnp.asarray(normal(2, 6, EMBED)))
    for name, (whole, pieces) in found.items():
        for (positions, kept), piece in zip(CALLS, pieces, strict=True):
            for row, places in enumerate(np.asarray(positions)[:, :kept]):
                real = places >= 0
                assert_close({name: piece[row][real]}, {name: whole[row, places[real]]}, units=128)


@pytest.mark.parametrize("name", CONFIGS)
def test_streams_of_bfloat16_stay_so(name):
    """Whatever is computed in float32 in between: no two dtypes meet, which would be an error here."""
    block = eqx.filter_eval_shape(lambda key: CONFIGS[name].build(EMBED, key=key), jax.random.key(0))
    x, ctx = jnp.ones((2, 6, EMBED), jnp.bfloat16), context([range(6)] * 2, precision=BF16)
    assert eqx.filter_eval_shape(lambda block: block(x, ctx)[0], block).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("name", "count"),
    [("lightning", 2 * 2 * 4**2), ("time mix", 2 * 5), ("differential", 2 * 4 * 10 * 8), ("dynamic mask", 4 * 2 * 9)],
)
def test_multiplications_are_counted(name, count):
    """Of a token in a row of ten."""
    assert LAYERS[name].token_products(10) == count
