"""DeepSeek with hyper-connections and Engram: sizes, and dropout of several streams."""

import dataclasses

import jax
import pytest

import eqx_decoders as ed
from eqx_decoders.families._deepseek import deepseek, latent_attention, v3_router
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.maxtext import deepseek_custom
from eqx_decoders.layers.embedding.engram import TokenClasses
from eqx_decoders.layers.rope import Rope
from tests.models import filled, some_tokens


SHAPE = DecoderSizes(vocab_size=32, embed_dim=16, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=8, mlp_dim=24)
SMALL = deepseek_custom(
    deepseek(
        SHAPE, latent_attention(SHAPE, rope=Rope(), q_rank=8, kv_rank=8, nope_dim=4, value_dim=8),
        router=v3_router(groups=1, groups_per_token=1, scaling_factor=2.5), num_experts=4,
        num_experts_per_token=2, num_shared=1, expert_dim=8, dense_layers=range(1),
    ),
    streams=2, engram_layers=(1,), num_heads=2, head_dim=4, vocab_bases=(11, 17), taps=2,
    token_classes=TokenClasses.of([index // 2 for index in range(32)]),
)  # fmt: skip


def test_parameters_are_those_of_the_formula():
    vocab, embed, heads, streams = 129_280, 1024, 16, 4
    attention = embed * 384 + 384 + 384 * heads * 48 + embed * 144 + 128 + 128 * heads * 160 + heads * 128 * embed
    attention += 384 * 16 * 64 + embed * 64 + 2 * 64 + embed * 16  # its indexer
    experts = embed * 16 + 16 + 16 * 3 * embed * 512 + 3 * embed * 512
    connection = streams * embed * (1 + 2 * streams + streams**2) + 3 + 2 * streams + streams**2
    layers = 6 * (attention + 2 * embed + 2 * connection) + 3 * embed * 2048 + 5 * experts
    vectors = 2 * 8 * 512
    engram = vectors * embed * (streams + 1) + embed * (streams + 1) + streams * embed * (3 + 4) + embed
    config = ed.get_config("deepseek-custom")
    rows = sum(sum(config.blocks[layer].pre_layers[0].layer.table_sizes) for layer in (1, 4))
    assert rows > 2 * 16 * 226_240
    assert ed.count_parameters(config) == 2 * vocab * embed + embed + layers + 2 * engram + 512 * rows


def test_equal_layers_are_stacked():
    config = ed.get_config("deepseek-custom")
    cuts = [(len(unit), repeats) for unit, repeats in ed.segments(config.blocks)]
    assert cuts == [(2, 1), (1, 2), (2, 1)]
    assert [len(block.pre_layers) for block in config.blocks] == [0, 1, 0, 0, 1, 0]


def test_json_gives_the_same_configuration():
    text = SMALL.to_json()
    assert ed.DecoderConfig.from_json(text) == SMALL
    assert len(text) < 20_000


@pytest.mark.slow
def test_dropout_of_streams():
    blocks = tuple(dataclasses.replace(block, dropout=0.5) for block in SMALL.blocks[:2])
    model = filled(dataclasses.replace(SMALL, blocks=blocks))
    one, two = (model(some_tokens(2, 5), key=jax.random.key(seed)).hidden for seed in (0, 1))
    assert not (one == two).all()
