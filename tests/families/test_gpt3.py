"""GPT-3: parameters counted by hand, and the whole forward pass against NumPy in float64."""

import functools

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.gpt3 import gpt3
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.layers.norm import LayerNormConfig
from tests.compare import assert_close
from tests.models import filled, some_tokens
from tests.oracles import attention_by_hand, mlp_by_hand, norm_by_hand, wide


# layers, embed, mlp, heads, head_dim, vocab, positions
SIZES = {
    "gpt3-52k": (1, 16, 64, 2, 8, 1024, 2048),
    "gpt3-6b": (48, 3072, 12_288, 12, 256, 32_768, 16_384),
    "gpt3-22b": (48, 6144, 24_576, 24, 256, 32_768, 16_384),
    "gpt3-175b": (96, 12_288, 49_152, 96, 128, 50_304, 16_384),
}
# the smallest, added up with pencil and paper: tables of tokens and positions, final norm, block
PARAMETERS = {"gpt3-52k": 16_384 + 32_768 + 32 + 3280}
SMALL = DecoderSizes(
    vocab_size=32, embed_dim=8, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4, mlp_dim=12, eps=1e-5, tied=True,
    activation="gelu_tanh",
)  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_those_of_the_formula(name):
    layers, embed, mlp, heads, head_dim, vocab, positions = SIZES[name]
    wide = heads * head_dim
    norm = 2 * embed
    attention = (embed + 1) * 3 * wide + (wide + 1) * embed
    feed_forward = (embed + 1) * mlp + (mlp + 1) * embed
    count = (vocab + positions) * embed + layers * (2 * norm + attention + feed_forward) + norm
    assert ed.count_parameters(ed.get_config(name)) == count == PARAMETERS.get(name, count)


@pytest.mark.parametrize("name", SIZES)
def test_blocks_are_gpt3s(name):
    layers, embed, mlp, heads, head_dim, vocab, positions = SIZES[name]
    config = ed.get_config(name)
    assert (config.vocab_size, config.embed_dim, len(config.blocks), config.tied) == (vocab, embed, layers, True)
    assert config.positions == LearnedPositions(max_positions=positions)
    block = config.blocks[0]
    assert ed.segments(config.blocks) == (((block,), layers),)
    assert block.pre_mixer_norm == block.pre_mlp_norm == config.final_norm == LayerNormConfig(eps=1e-5, offset=1.0)
    assert block.post_mixer_norm is block.post_mlp_norm is block.mixer.rope is config.logit_soft_cap is None
    assert (block.mixer.num_heads, block.mixer.num_kv_heads, block.mixer.head_dim) == (heads, heads, head_dim)
    assert (block.mlp.mlp_dim, block.mlp.activation, block.mlp.gated) == (mlp, "gelu_tanh", False)
    assert config.embedding_scale == 1.0


def test_the_published_sizes_are_about_right():
    """The names say billions."""
    for name, billions in (("gpt3-6b", 6), ("gpt3-22b", 22), ("gpt3-175b", 175)):
        assert ed.count_parameters(ed.get_config(name)) / 1e9 == pytest.approx(billions, rel=0.07)


def test_new_norms_store_a_scale_of_zero():
    block = gpt3(SMALL, max_positions=4).blocks[0].pre_mixer_norm.build(8)
    assert not np.any(block.scale) and not np.any(block.bias)


def test_dropout_goes_everywhere():
    config = gpt3(SMALL, max_positions=16, dropout=0.1)
    assert (config.dropout, config.blocks[0].dropout, config.blocks[0].mlp.dropout) == (0.1,) * 3


def test_the_forward_pass_is_the_formula():
    model = filled(gpt3(SMALL, max_positions=16))
    tokens = some_tokens(2, 5)
    positions, same = np.tile(np.arange(5), (2, 1)), np.ones((2, 5), int)
    table = wide(model.embedding.table)

    def normed(norm, x):
        return np.apply_along_axis(functools.partial(norm_by_hand, norm), -1, x)

    x = table[np.asarray(tokens)] + wide(model.positions.table)[:5]
    for block in model.unstacked():
        x = x + attention_by_hand(block.mixer, normed(block.pre_mixer_norm, x), positions, same)
        x = x + mlp_by_hand(block.mlp, normed(block.pre_mlp_norm, x))
    want = normed(model.final_norm, x) @ table.T
    cache = ed.init_cache(model.config, 2, 8, dtype=jnp.float32)
    out = eqx.filter_jit(model)(tokens, cache=cache)
    assert_close(out.logits, want)
    assert out.cache.length.tolist() == [5, 5]
