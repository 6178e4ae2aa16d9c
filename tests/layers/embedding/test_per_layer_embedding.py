"""Per-layer embeddings of tokens, and the layer that adds them, against their formulas in NumPy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.embedding.per_layer_embedding import INPUT, PerLayerEmbeddingConfig, PerLayerInputConfig
from eqx_decoders.layers.norm import RMSNormConfig
from tests.compare import assert_close
from tests.errors import refused
from tests.layers.common import context, drawn, normal
from tests.oracles import norm_by_hand, silu, wide


EMBED, LAYERS, FEATURES, VOCAB = 5, 3, 4, 7
TOKENS = np.asarray([[0, 6, 7, 99]])


@pytest.mark.slow(fast=("2",))
@pytest.mark.parametrize("unknown", [None, 2])
def test_embeddings_of_each_layer_equal_the_formula(unknown):
    config = PerLayerEmbeddingConfig(
        features=FEATURES, vocab_size=VOCAB, unknown_token=unknown, norm=RMSNormConfig(eps=0.1)
    )
    layer = drawn(lambda key: config.build(EMBED, LAYERS, key=key))
    x = normal(1, 4, EMBED)
    read = [0, 6, 6, 6] if unknown is None else [0, 6, unknown, unknown]
    table = wide(layer.table).reshape(VOCAB, LAYERS, FEATURES)[read]
    projected = np.einsum("ble,enf->blnf", wide(x), wide(layer.projection)) / np.sqrt(EMBED)
    normed = np.apply_along_axis(lambda vector: norm_by_hand(layer.norm, vector), -1, projected)
    want = (normed + np.sqrt(FEATURES) * table) / np.sqrt(2)
    assert_close(layer(jnp.asarray(TOKENS), jnp.asarray(x), context(np.zeros((1, 4)))), want.transpose(2, 0, 1, 3))


def test_input_embeddings_without_tokens_are_refused():
    layer = drawn(lambda key: PerLayerEmbeddingConfig(features=2, vocab_size=VOCAB).build(EMBED, LAYERS, key=key))
    with refused(ed.ConfigError, "tokens"):
        layer(None, jnp.asarray(normal(1, 4, EMBED)), context(np.zeros((1, 4))))


def test_gated_embedding_equals_the_formula():
    layer = drawn(lambda key: PerLayerInputConfig(features=FEATURES, activation="silu").build(EMBED, key=key))
    x, embedded, ctx = normal(1, 4, EMBED), normal(1, 4, FEATURES, seed=2), context(np.zeros((1, 4)))
    with refused(ed.ConfigError, "DecoderConfig.per_layer_embedding"):
        layer(jnp.asarray(x), ctx)
    want = (silu(wide(x) @ wide(layer.gate)) * wide(embedded)) @ wide(layer.out)
    ctx = dataclasses.replace(ctx, layer_inputs={INPUT: jnp.asarray(embedded)})
    assert_close(layer(jnp.asarray(x), ctx), want)
