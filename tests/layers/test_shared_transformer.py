"""A transformer block that layers share: its contribution to each layer, its caches, and gradients of its weights."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config
from eqx_decoders.layers.shared_transformer import AidedMixerConfig, SharedTransformerConfig, share
from eqx_decoders.training.flops import matmul_parameters
from tests.compare import assert_close
from tests.errors import refused
from tests.layers.common import context, drawn, normal
from tests.models import filled


SHARED = SharedTransformerConfig(
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, query_scale=0.7),
    mlp=MLPConfig(mlp_dim=5, activation="gelu", fused=True),
    count=2,
)
MAMBA = Mamba2Config(num_heads=2, value_dim=3, num_groups=1, key_dim=2)
CONFIG = AidedMixerConfig(mixer=MAMBA, transformer=SHARED, number=1, mlp_rank=2, attention_rank=3)


def block_of(weights, layer):
    """Return the layers of the block with the additions of the layer."""
    one = jax.tree.map(lambda leaf: leaf[1], weights)
    query, key, value = (
        getattr(one.attention, name) + jnp.einsum("er,rhd->ehd", pair.down, pair.up)
        for name, pair in (("query", layer.query_pair), ("key", layer.key_pair), ("value", layer.value_pair))
    )
    attention = dataclasses.replace(one.attention, query=query, key=key, value=value)
    both = one.mlp.gate_up + jnp.einsum("er,rim->eim", layer.mlp_pair.down, layer.mlp_pair.up)
    return one, attention, dataclasses.replace(one.mlp, gate_up=both)


def test_layer_matches_its_definition():
    layer, weights = drawn(lambda key: CONFIG.build(6, key=key)), drawn(lambda key: SHARED.build(6, key=key), 3)
    x, embeddings = jnp.asarray(normal(2, 5, 6)), jnp.asarray(normal(2, 5, 6, seed=4))
    ctx = context(np.tile(np.arange(5), (2, 1)))

    @eqx.filter_jit
    def by_hand(layer, weights):
        one, attention, mlp = block_of(weights, layer)
        attended, keys = attention(one.input_norm(jnp.concatenate([x, embeddings], -1)), ctx)
        aid = mlp(one.mlp_norm(attended), ctx) @ layer.linear
        return layer.mixer(layer.norm(x + aid), ctx)[0], keys.key

    got, entries = eqx.filter_jit(lambda layer, weights: layer(x, share(ctx, weights, embeddings)))(layer, weights)
    want, keys = by_hand(layer, weights)
    assert_close(got, want, units=256)
    assert_close(entries["attention"].key, keys, units=256)


def decoder(count: int = 2) -> ed.DecoderConfig:
    shared = dataclasses.replace(SHARED, count=count)
    mixers = (dataclasses.replace(CONFIG, transformer=shared, number=number) for number in (0, count - 1))
    blocks = [ed.BlockConfig(mixer=mixer, mlp=None) for mixer in mixers] * 2
    return ed.DecoderConfig(vocab_size=8, embed_dim=6, blocks=tuple(blocks), final_norm=None)


@pytest.mark.slow
def test_weights_are_stored_once_and_all_have_gradients():
    """A block has gradients from all layers that use it, and each layer has gradients of its additions."""
    model = ed.init(decoder(), key=jax.random.key(0))
    assert model.shared.mlp.down.shape == (2, 5, 6)
    pairs = jax.tree.map(lambda leaf: leaf + 0.1, model.scanned_layers)  # the additions of new layers are zero
    model = eqx.tree_at(lambda model: model.scanned_layers, model, pairs)
    tokens = jnp.arange(14).reshape(2, 7) % 8
    gradient = eqx.filter_grad(lambda model: jnp.square(model(tokens).logits).sum())(model)
    for leaf in jax.tree.leaves(gradient.shared.attention.query) + jax.tree.leaves(gradient.shared.mlp):
        assert (jnp.abs(leaf).max(axis=range(1, leaf.ndim)) > 0).all()
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient.scanned_layers[0].unit[0].mixer.mlp_pair))
    one, two = (matmul_parameters(decoder(count)) for count in (1, 2))
    assert one == two  # with one block or two blocks: the number per token is equal


@pytest.mark.slow
def test_scan_and_cache_do_not_change_the_result():
    """At once, with and without scan, and in pieces, of which the last ones are single tokens."""
    model, tokens = filled(decoder()), np.arange(14, dtype=np.int32).reshape(2, 7) % 8
    want = model.replace(scan=False, remat=None)(tokens).logits
    assert_close(model(tokens).logits, np.asarray(want), units=2048)
    cache, pieces = ed.init_cache(model.config, 2, 7, dtype="float32"), []
    for begin, end in ((0, 5), (5, 6), (6, 7)):
        out = model(tokens[:, begin:end], cache=cache)
        cache, pieces = out.cache, [*pieces, np.asarray(out.logits)]
    assert_close(np.concatenate(pieces, 1), np.asarray(want), units=2048)


def test_unsupported_configurations_are_refused():
    other = dataclasses.replace(CONFIG, transformer=dataclasses.replace(SHARED, count=3))
    blocks = (*decoder().blocks, ed.BlockConfig(mixer=other, mlp=None))
    with refused(ed.ConfigError, "AidedMixerConfig.transformer", "2"):
        dataclasses.replace(decoder(), blocks=blocks)
    model = filled(decoder(), batch_split=2)
    with refused(ed.ConfigError, "Execution.pipeline", "Execution.batch_split"):
        model(jnp.zeros((2, 3), jnp.int32))
