"""Engram: hashes equal MaxText's, and the layer matches its formula in NumPy."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.families.qwen.gated_streams import GatedStreams
from eqx_decoders.layers.cache.recurrent_state import last_inputs
from eqx_decoders.layers.embedding.engram import EngramConfig, TokenClasses, ngram_rows
from eqx_decoders.layers.mlp import LinearConfig
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.layers.common import apply
from tests.models import filled
from tests.oracles import sigmoid, wide


EMBED, VOCAB, LENGTH = 6, 40, 11
SMALL = EngramConfig(
    embed_dim=EMBED, vocab_size=VOCAB, layers=(0, 2), layer=2, streams=2, num_heads=2, head_dim=4,
    vocab_bases=(11, 17), taps=3, pad_token=3, token_classes=TokenClasses.of(np.arange(VOCAB) // 2),
)  # fmt: skip
TOKENS = np.random.default_rng(4).integers(0, VOCAB, (2, LENGTH)).astype(np.int32)
X = np.random.default_rng(1).normal(size=(2, LENGTH, 2, EMBED)).astype(np.float32)


def context(tokens, positions=None, segment_ids=None, **options):
    counted = np.broadcast_to(np.arange(np.shape(tokens)[1], dtype=np.int32), np.shape(tokens))
    positions = jnp.asarray(counted if positions is None else positions)
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids)
    return ed.ForwardContext(positions=positions, segment_ids=segment_ids, tokens=jnp.asarray(tokens), **options)


@pytest.fixture(scope="module")
def layer():
    """Return a layer with random arrays: a new convolution would be zero."""
    layer = SMALL.build(EMBED, key=jax.random.key(0))
    generator = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(generator.normal(0.3, 0.6, leaf.shape), leaf.dtype), layer)


# --- hashes ---


@pytest.mark.parametrize(
    ("layer", "multipliers", "sizes"),
    [
        (1, (3221, 17_679, 13_313), (226_241, 226_267, 226_283, 226_307)),
        (4, (21_221, 18_979, 8171), (226_313, 226_337, 226_357, 226_367)),
    ],
)
def test_multipliers_and_sizes_match_maxtext(layer, multipliers, sizes):
    config = EngramConfig(embed_dim=1, vocab_size=100_000, layers=(1, 4), layer=layer, num_heads=2)
    assert config.multipliers == multipliers
    assert config.table_sizes == sizes


def row_by_hand(config, window):
    """Return the rows for the classes of a token and of the previous tokens, the last one first."""
    rows, offset, sizes = [], 0, list(config.table_sizes)
    for order in range(2, config.max_ngram + 1):
        mixed = 0
        for token, multiplier in zip(window[:order], config.multipliers, strict=False):
            mixed ^= int(token) * multiplier
        for _ in range(config.num_heads):
            size = sizes.pop(0)
            rows.append(offset + mixed % size)
            offset += size
    return rows


WIDE = dataclasses.replace(
    SMALL, hash_bits=63, token_classes=None, pad_token=5, end_token=5, bias=False, row_multiple=10, table_parts=5,
    norm_offset=1.0,
)  # fmt: skip


@pytest.mark.slow
def test_n_grams_of_63_bit_hashes_start_after_an_end_token():
    """Tokens before the last end token count as end tokens. The multipliers depend on the layer index."""
    tokens = np.where(TOKENS % 3 == 0, 5, TOKENS).astype(np.int32)
    rows = ngram_rows(WIDE, jnp.asarray(tokens), jnp.full((2, 2), -1, jnp.int32), context(tokens).positions)
    for row, place in np.ndindex(tokens.shape):
        begin = max((p + 1 for p in range(place) if tokens[row, p] == 5), default=0)
        window = [tokens[row, place - j] if place - j >= begin else 5 for j in range(3)]
        assert rows[row, place].tolist() == row_by_hand(WIDE, window)
    assert WIDE.multipliers != dataclasses.replace(WIDE, layers=(2,)).multipliers
    built = WIDE.build(EMBED, key=jax.random.key(0))
    assert WIDE.rows == -(-sum(WIDE.table_sizes) // 10) * 10 and built.table.shape == (5, WIDE.rows // 5, 4)
    assert built.key_bias is built.value_bias is None and not np.any(built.key_scale)


@pytest.mark.slow(fast=("2-False", "4-False"))
@pytest.mark.parametrize("classes", [True, False])
@pytest.mark.parametrize("max_ngram", [2, 4])
def test_rows_equal_hashes_by_hand(max_ngram, classes):
    table = SMALL.token_classes if classes else None
    config = dataclasses.replace(SMALL, vocab_bases=(11,) * (max_ngram - 1), token_classes=table)
    known = np.arange(VOCAB) // (2 if classes else 1)
    tail = jnp.full((2, max_ngram - 1), -1, jnp.int32)
    rows = ngram_rows(config, jnp.asarray(TOKENS), tail, context(TOKENS).positions)
    for row, place in np.ndindex(TOKENS.shape):
        before = [TOKENS[row, place - j] if place >= j else config.pad_token for j in range(max_ngram)]
        assert rows[row, place].tolist() == row_by_hand(config, known[before])


def test_no_product_overflows():
    """With the largest vocabulary and the largest id, hashes equal those of integers of arbitrary size."""
    config = EngramConfig(embed_dim=1, vocab_size=262_144, layers=(0,), layer=0, num_heads=1)
    tokens = np.full((1, 3), 262_143, np.int32)
    rows = ngram_rows(config, jnp.asarray(tokens), jnp.full((1, 2), -1, jnp.int32), context(tokens).positions)
    assert rows[0, 2].tolist() == row_by_hand(config, tokens[0])


def test_tables_of_all_layers_differ():
    configs = [dataclasses.replace(SMALL, layer=layer) for layer in SMALL.layers]
    sizes = [size for config in configs for size in config.table_sizes]
    assert len(set(sizes)) == len(sizes) == 8
    assert configs[0].multipliers != configs[1].multipliers


def test_classes_round_trip_through_json():
    classes = np.random.default_rng(0).integers(0, 1000, 5000)
    table = TokenClasses.of(classes)
    assert_array_equal(table.ids, classes)
    assert table.count == classes.max() + 1


# --- the layer ---


def normed(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * wide(scale)


def layer_by_hand(layer, x, rows):
    """Compute one document: `x` is [length, streams, embed]."""
    config, length = layer.config, len(x)
    vectors = wide(layer.table)[rows].reshape(length, -1)
    key = normed(np.einsum("lf,fse->lse", vectors, wide(layer.key)) + wide(layer.key_bias), layer.key_scale)
    value = vectors @ wide(layer.value) + wide(layer.value_bias)
    score = np.sum(normed(x, layer.query_scale) * key, axis=-1) / np.sqrt(EMBED)
    gate = sigmoid(np.sign(score) * np.sqrt(np.abs(score)))
    values = gate[..., None] * value[:, None]
    inputs = normed(values, layer.value_scale).reshape(length, -1)
    smooth = np.zeros_like(inputs)
    for place in range(length):
        for tap in range(config.taps):
            source = place - (config.taps - 1 - tap) * config.max_ngram
            if source >= 0:
                smooth[place] += wide(layer.convolution)[:, tap] * inputs[source]
    return values + (smooth * sigmoid(smooth)).reshape(values.shape)


def test_layer_matches_its_formula(layer):
    ctx = context(TOKENS)
    rows = np.asarray(ngram_rows(SMALL, ctx.tokens, jnp.full((2, 2), -1, jnp.int32), ctx.positions))
    want = np.stack([layer_by_hand(layer, x, row) for x, row in zip(wide(X), rows, strict=True)])
    assert_close(apply(layer, jnp.asarray(X), ctx)[0], want.astype(np.float32))


@pytest.mark.slow
def test_model_without_streams_equals_one_stream():
    config = dataclasses.replace(SMALL, streams=1)
    layer = config.build(EMBED, key=jax.random.key(1))
    plain, _ = apply(layer, jnp.asarray(X[:, :, 0]), context(TOKENS))
    assert plain.shape == (2, LENGTH, EMBED)
    assert_close(apply(layer, jnp.asarray(X[:, :, :1]), context(TOKENS))[0][:, :, 0], plain)


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [(1,) * LENGTH, (4, 1, 6)])
@pytest.mark.parametrize("accept_all", [True, False])
def test_pieces_equal_one_call(layer, pieces, accept_all):
    whole, _ = apply(layer, jnp.asarray(X), context(TOKENS))
    shapes, begin, outs = SMALL.cache_shape(LENGTH), 0, []
    memory = {name: shape.build(1, 2, jnp.float32) for name, shape in shapes.items()}
    for piece in pieces:
        here = slice(begin, begin + piece)
        positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), TOKENS.shape)[:, here]
        ctx = context(TOKENS[:, here], positions, accept_all=accept_all)
        out, entries = apply(layer, jnp.asarray(X[:, here]), ctx, {name: each.tail[0] for name, each in memory.items()})
        stacked = jax.tree.map(lambda leaf: leaf[None], entries)
        memory = {name: each.commit(stacked[name], ctx.positions) for name, each in memory.items()}
        outs.append(out)
        begin += piece
    assert_close(jnp.concatenate(outs, axis=1), whole)


@pytest.mark.slow
def test_packed_documents_equal_separate_documents(layer):
    """A row with two documents and padding."""
    segment_ids = np.array([[1] * 5 + [2] * 4 + [0] * 2] * 2, np.int32)
    positions = np.array([[*range(5), *range(4), -1, -1]] * 2, np.int32)
    packed, _ = apply(layer, jnp.asarray(X), context(TOKENS, positions, segment_ids))
    for here in (slice(0, 5), slice(5, 9)):
        alone, _ = apply(layer, jnp.asarray(X[:, here]), context(TOKENS[:, here]))
        assert_close(packed[:, here], alone)


@pytest.mark.slow
@pytest.mark.parametrize("places", [(2, 3, 4), (0, 1, 10), (0, 4, 9)])
def test_padding_has_no_effect(layer, places):
    """Padding within a row, before it and after it."""
    real = np.ones(LENGTH, bool)
    real[list(places)] = False
    positions = np.broadcast_to(np.where(real, np.cumsum(real) - 1, -1).astype(np.int32), TOKENS.shape)
    out, entries = apply(layer, jnp.asarray(X), context(TOKENS, positions))
    alone, short = apply(layer, jnp.asarray(X[:, real]), context(TOKENS[:, real]))
    assert_close(out[:, real], alone)
    for name, taps in (("tokens", 2), ("values", 6)):
        tail = jnp.zeros((2, taps, entries[name].inputs.shape[-1]), entries[name].inputs.dtype)
        want = last_inputs(tail, short[name].inputs, context(TOKENS[:, real]).positions)
        assert_close(last_inputs(tail, entries[name].inputs, jnp.asarray(positions)), want)


@pytest.mark.slow
def test_cached_tokens_on_a_mesh():
    """The cache shards the features of a sum over sharded weights."""
    config = dataclasses.replace(SMALL, embed_dim=16, head_dim=8)
    block = ed.BlockConfig(
        mlp=LinearConfig(),
        mixer=None,
        pre_layers=(ed.ExtraLayerConfig(layer=config),),
        residual=GatedStreams(streams=2, rank=4),
    )
    model = filled(ed.DecoderConfig(vocab_size=VOCAB, embed_dim=16, blocks=(block,), final_norm=None))
    many = model.place(ed.Layout.create(data=2, fsdp=2, tensor=2))
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, VOCAB, (8, 3)), jnp.int32)
    cache = ed.init_cache(model.config, 8, 3, dtype=jnp.float32, layout=many.execution.layout)
    want = model(tokens).logits
    for at in range(3):
        out = eqx.filter_jit(many)(tokens[:, at : at + 1], cache=cache)
        cache = out.cache
        assert_close(out.logits, want[:, at : at + 1])


@pytest.mark.slow
def test_every_weight_has_a_gradient(layer):
    @eqx.filter_jit
    @eqx.filter_grad
    def gradients(layer, x):
        return jnp.sum(jnp.square(layer(x, context(TOKENS))[0]))

    for leaf in jax.tree.leaves(gradients(layer, jnp.asarray(X))):
        assert np.all(np.isfinite(leaf)) and np.any(leaf != 0)


# --- errors ---


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"layer": 1}, ["layer=1", "layers=(0, 2)"]),
        ({"layers": (2, 2)}, ["layers=(2, 2)"]),
        ({"vocab_bases": ()}, ["vocab_bases=()"]),
        ({"vocab_bases": (11, 1)}, ["vocab_bases[1]=1"]),
        ({"pad_token": 40}, ["pad_token=40", "vocab_size=40"]),
        ({"vocab_size": 41}, ["token_classes", "40", "vocab_size=41"]),
        ({"table_parts": 7}, ["table_parts=7", str(SMALL.rows), "row_multiple"]),
        ({"taps": 1}, ["taps=1"]),
        ({"eps": 0.0}, ["eps=0.0"]),
    ],
    ids=["layer", "layers", "no bases", "base", "pad_token", "vocab_size", "table_parts", "taps", "eps"],
)
def test_wrong_configurations_are_refused(changes, names):
    with refused(ed.ConfigError, "EngramConfig.", *names):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize(
    "packed", ["no base64!", "AAAA", TokenClasses.of([0, 1]).packed[:-8]], ids=["no base64", "short", "cut off"]
)
def test_malformed_classes_are_refused(packed):
    with refused(ed.ConfigError, "TokenClasses.packed", "TokenClasses.of"):
        TokenClasses(packed)


def test_negative_classes_are_refused():
    with refused(ed.ConfigError, "TokenClasses"):
        TokenClasses.of([0, -1])


def test_another_input_size_is_refused():
    with refused(ed.ConfigError, "EngramConfig.embed_dim=6", "7"):
        SMALL.build(7, key=jax.random.key(0))


def test_input_without_tokens_is_refused(layer):
    with refused(ed.ConfigError, "Engram", "tokens"):
        layer(jnp.asarray(X), ed.ForwardContext(positions=jnp.zeros((2, LENGTH), jnp.int32)))
