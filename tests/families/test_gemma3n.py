"""Gemma 3n: what differs from layer to layer, and tokens that have no embedding of their own in each layer."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.families import FAMILIES
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.gemma3n import gemma3n, per_layer_of, residual_of
from eqx_decoders.layers.mask import Causal, SlidingWindow
from tests.families.samples import decode, mixers, sample
from tests.models import filled


SHAPE = DecoderSizes(
    vocab_size=32, embed_dim=16, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=4, mlp_dim=24, tied=True,
    activation="gelu_tanh",
)  # fmt: skip
SMALL = gemma3n(
    SHAPE, masks=(SlidingWindow(4), Causal()) * 2, num_kv_shared_layers=2, sparsity=(0.5, 0.0, 0.5, 0.0),
    residual=residual_of(SHAPE, streams=3, rank=4), per_layer=per_layer_of(SHAPE, features=4, vocab_size=32),
)  # fmt: skip


@pytest.mark.parametrize("name, layers, own", [("gemma3n-e2b", 30, 20), ("gemma3n-e4b", 35, 20)])
def test_published_models(name, layers, own):
    config = ed.get_config(name)
    assert [mixer.kv_shared_from is None for mixer in mixers(config)] == [True] * own + [False] * (layers - own)
    assert [index for index, block in enumerate(config.blocks) if block.shares_kv_as] == [own - 2, own - 1]
    assert [mixer.mask == Causal() for mixer in mixers(config)] == [(i + 1) % 5 == 0 for i in range(layers)]
    assert [block.mlp.gate_sparsity for block in config.blocks] == [0.95] * 10 + [0.0] * (layers - 10)
    assert FAMILIES["gemma3n_text"].decode(FAMILIES["gemma3n_text"].encode(config))[0] == config


def test_sizes_of_layers_may_be_one_number():
    config = decode(sample("gemma3n_text", "activation_sparsity_pattern", intermediate_size=20))
    assert {(block.mlp.mlp_dim, block.mlp.gate_sparsity) for block in config.blocks} == {(20, 0.0)}
    dims = [20, 24, 28, 32, 36, 40][: len(config.blocks)]
    config = decode(sample("gemma3n_text", intermediate_size=dims))
    assert [block.mlp.mlp_dim for block in config.blocks] == dims
    written = FAMILIES["gemma3n_text"].encode(config)
    assert written["intermediate_size"] == dims


@pytest.mark.parametrize(
    "keys, sentence",
    [
        (dict(altup_active_idx=1), "altup_active_idx=1 is not supported"),
        (dict(intermediate_size=[20]), "intermediate_size must have a number for each layer"),
        (dict(intermediate_size=[]), "intermediate_size must have a number above 0 for each layer"),
        (dict(activation_sparsity_pattern=[1.0] * 4), "activation_sparsity_pattern must be a list of 4 numbers"),
        (dict(activation_sparsity_pattern=[0.5]), "activation_sparsity_pattern must be a list of 4 numbers"),
        (dict(num_kv_shared_layers=4), "num_kv_shared_layers=4 leaves no layer of each type"),
        (dict(altup_num_inputs=17), "altup_num_inputs=17 must be at most 16"),
    ],
    ids=str,
)
def test_other_settings_are_refused(keys, sentence):
    with pytest.raises(ed.ConversionError, match=sentence):
        decode(sample("gemma3n_text", **keys))


@pytest.mark.slow
def test_tokens_beyond_the_table_of_each_layer_count_as_the_first():
    model = filled(SMALL)
    ctx, x = ed.Context(positions=jnp.zeros((1, 3), jnp.int32)), jnp.zeros((1, 3, 16))
    found = np.asarray(model.per_layer_embedding(jnp.asarray([[0, 31, 32]]), x, ctx))
    assert np.array_equal(found[:, :, 2], found[:, :, 0]) and not np.allclose(found[:, :, 1], found[:, :, 0])
    config = dataclasses.replace(model.per_layer_embedding.config, unknown_token=None)
    last = dataclasses.replace(model.per_layer_embedding, config=config)
    assert np.array_equal(last(jnp.asarray([[31, 32]]), x[:, :2], ctx)[:, :, 1], found[:, :, 1])
