"""Dropout: dropped features and the scale of the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.layers.dropout import dropout
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from tests.compare import assert_allclose, assert_array_equal
from tests.layers.common import context
from tests.models import filled


@pytest.mark.slow(fast=("float32",))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dropout(dtype):
    x = jnp.asarray(1 + np.arange(4 * 3 * 500).reshape(4, 3, 500) % 7, dtype)
    out = dropout(x, 0.25, jax.random.key(1))
    assert out.dtype == dtype
    kept = np.asarray(out != 0)
    assert np.all(kept == kept[:, :1])  # one mask for all positions of a row
    assert not np.all(kept[0] == kept[1])  # a different mask for each row
    expected = np.where(kept, np.asarray(x / 0.75, np.float32), 0)
    assert_array_equal(np.asarray(out, np.float32), expected)
    assert kept[:, 0].mean() == pytest.approx(0.75, abs=0.04)
    assert np.asarray(out, np.float32).mean() == pytest.approx(np.asarray(x, np.float32).mean(), rel=0.06)
    assert dropout(x, 0.25, None) is x
    assert dropout(x, 0.0, jax.random.key(1)) is x


@pytest.mark.slow
def test_decoder_applies_dropout_to_embeddings_branches_and_head_input():
    """Compared with NumPy, with a key per place: embeddings, MLP and output of each layer, and before the head."""
    mlp = MLPConfig(mlp_dim=6, dropout=0.3)
    blocks = tuple(BlockConfig(mixer=None, mlp=mlp, dropout=rate) for rate in (0.2, 0.4, 0.4))
    config = ed.DecoderConfig(vocab_size=9, embed_dim=5, blocks=blocks, final_norm=RMSNormConfig(), dropout=0.5)
    model = filled(config)
    tokens, key = jnp.asarray([[1, 2, 3], [4, 5, 6]]), jax.random.key(3)
    embed_key, block_key, head_key = jax.random.split(key, 3)
    x, ctx = dropout(model.embedding.table[tokens], 0.5, embed_key), context(np.zeros((2, 3)))
    for block, here in zip(model.unstacked(), jax.random.split(block_key, 3), strict=True):
        mlp_key, out_key = jax.random.split(here)
        x = dropout(x + block.mlp(x, ctx, key=mlp_key), block.config.dropout, out_key)
    out = model(tokens, key=key)
    assert_allclose(out.hidden, x, rtol=1e-5, atol=1e-6)
    logits = dropout(model.final_norm(x), 0.5, head_key) @ model.head.kernel
    assert_allclose(out.logits, logits, rtol=1e-5, atol=1e-6)
    assert not np.allclose(out.logits, model(tokens).logits)
