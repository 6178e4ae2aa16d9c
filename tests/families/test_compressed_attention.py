"""Attention to compressed keys against a loop in NumPy, for packed documents and with a cache."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.families.deepseek.compressed_attention import CompressedAttentionConfig, CompressedIndexerConfig
from eqx_decoders.families.deepseek.compressed_keys import CompressedShape, NewWindows
from eqx_decoders.families.deepseek.compression import CompressionConfig
from eqx_decoders.layers.attention import topk
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from tests.compare import assert_array_equal, assert_close
from tests.errors import refused
from tests.laws import check_documents, check_execution, check_pieces, check_ragged_pieces, check_rejection
from tests.layers.common import context, drawn, normal
from tests.models import EMBED, VOCAB, filled
from tests.oracles import best, norm_by_hand, plain_frequencies, rotate_by_hand, wide


ROPE = Rope(theta=10.0, pairing="interleaved")
SIZES = dict(num_heads=4, head_dim=8, rope_dim=4, q_rank=8, out_groups=2, out_rank=3, window=4, rope=ROPE)
FORMS = {
    "window": {},
    "compressed": dict(compression=CompressionConfig(size=3)),
    "overlapping": dict(compression=CompressionConfig(size=2, overlaps=True)),
    "chosen": dict(
        compression=CompressionConfig(size=2, overlaps=True),
        indexer=CompressedIndexerConfig(num_heads=8, head_dim=6, top_k=2),
    ),
}
POSITIONS = np.stack([[*range(13), *range(7), -1], [-1, -1, *range(19)]]).astype(np.int32)
SEGMENTS = np.stack([[1] * 13 + [2] * 7 + [0], [1] * 21])
X = normal(2, 21, 5)


def rotated(vector, position, back=False):
    table = plain_frequencies(10.0, 4)
    last = rotate_by_hand(vector[-4:], -position if back else position, table, "interleaved")
    return np.concatenate([vector[:-4], last])


def windows_by_hand(compressor, x, positions):
    """Return the compressed keys of a document by the position of the last token of each window."""
    size, w = compressor.config.size, {name: wide(getattr(compressor, name)) for name in ("key", "gate", "bias")}
    keys = {}
    for begin in range(0, len(positions) - size + 1, size):
        sources = [(begin + i, i, -1) for i in range(size)]
        if compressor.config.overlaps and begin:
            sources += [(begin - size + i, i, 0) for i in range(size)]
        key, gate = (np.stack([x[t] @ w[name][:, s] for t, _, s in sources]) for name in ("key", "gate"))
        gate = np.exp(gate + np.stack([w["bias"][i, s] for _, i, s in sources]))
        mixed = norm_by_hand(compressor.norm, (gate / gate.sum(0) * key).sum(0))
        keys[begin + size - 1] = rotated(mixed, begin)
    return keys


def attention_by_hand(layer, x):
    """Compute one document, which starts at position 0."""
    out = np.zeros((len(x), x.shape[1]))
    down, up, groups = wide(layer.query_down), wide(layer.query_up), wide(layer.out_down)
    keys = [rotated(norm_by_hand(layer.key_norm, row @ wide(layer.key)), t) for t, row in enumerate(x)]
    windows = {} if layer.compressor is None else windows_by_hand(layer.compressor, x, range(len(x)))
    index = {} if layer.indexer is None else windows_by_hand(layer.indexer.compressor, x, range(len(x)))
    for t, row in enumerate(x):
        low = norm_by_hand(layer.query_norm, row @ down)
        seen = [end for end in windows if end <= t]
        if layer.indexer is not None:
            weight = row @ wide(layer.indexer.head_weight)
            each = [rotated(low @ wide(layer.indexer.query)[:, h], t) for h in range(8)]
            scores = [sum(weight[h] * max(each[h] @ index[end], 0) for h in range(8)) for end in seen]
            seen = [seen[i] for i in best(scores, 2)]
        values = [keys[s] for s in range(max(0, t - 3), t + 1)] + [windows[end] for end in seen]
        heads = []
        for h in range(4):
            query = low @ up[:, h]
            query = rotated(query / np.sqrt(np.mean(query**2) + 1e-6), t) * 8**-0.5
            shares = np.exp([query @ value for value in values])
            shares /= shares.sum() + np.exp(wide(layer.sink)[h])
            heads.append(rotated(sum(share * value for share, value in zip(shares, values, strict=True)), t, back=True))
        low = [sum(heads[2 * g + i] @ groups[g, i] for i in range(2)) for g in range(2)]
        out[t] = sum(low[g] @ wide(layer.out_up)[g] for g in range(2))
    return out


@pytest.mark.slow(fast=("window-16777216", "compressed-16777216", "chosen-100"))
@pytest.mark.parametrize(("form", "tile"), [*((form, topk.TILE) for form in FORMS), ("chosen", 100)])
def test_layer_matches_a_loop(form, tile, monkeypatch):
    """Packed documents and padding on both sides."""
    monkeypatch.setattr(topk, "TILE", tile)
    layer = drawn(lambda key: CompressedAttentionConfig(**SIZES, **FORMS[form]).build(5, key=key))
    run = eqx.filter_jit(lambda layer, x: layer.branch(x, context(POSITIONS, SEGMENTS), None, None).out)
    out = run(layer, jnp.asarray(X))
    for row, begin, end in ((0, 0, 13), (0, 13, 20), (1, 2, 21)):
        assert_close(out[row, begin:end], attention_by_hand(layer, wide(X[row, begin:end])), units=128)


def decoder(form: str) -> ed.DecoderConfig:
    norm = RMSNormConfig()
    mixer = CompressedAttentionConfig(**SIZES, **FORMS[form])
    block = ed.BlockConfig(mixer=mixer, mlp=None, pre_mixer_norm=norm)
    return ed.DecoderConfig(vocab_size=VOCAB, embed_dim=EMBED, blocks=(block,) * 2, final_norm=norm, tied=True)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_decoding_tokens_and_chunks_matches_one_call(form):
    check_ragged_pieces(filled(decoder(form)), ed.Layout.create(data=2, fsdp=2, tensor=2))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["compressed", "chosen"])
def test_layer_invariants(form):
    """Pieces of all lengths, packed documents, rejected tokens, scans, remat and meshes."""
    model = filled(decoder(form))
    check_pieces(model, (1,) * 9)
    check_pieces(model, (6, 1, 3))
    check_documents(model)
    check_rejection(model)
    check_execution(model, fsdp=2, tensor=2, data=2)
    check_execution(model, context=2, fsdp=4)


@pytest.mark.slow
def test_selection_has_no_gradient():
    layer = drawn(lambda key: CompressedAttentionConfig(**SIZES, **FORMS["chosen"]).build(5, key=key))

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(layer):
        return jnp.sum(layer.branch(jnp.asarray(X), context(POSITIONS, SEGMENTS), None, None).out ** 2)

    found = gradient(layer)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(found.indexer))
    assert all(np.all(np.isfinite(leaf)) and np.any(leaf) for leaf in jax.tree.leaves(found.compressor))


@pytest.mark.parametrize(
    "options, names",
    [
        (dict(num_heads=3), ["num_heads=3", "out_groups=2"]),
        (dict(rope_dim=3), ["rope_dim=3"]),
        (dict(indexer=CompressedIndexerConfig(head_dim=2)), ["rope_dim=4", "2"]),
        (dict(indexer=CompressedIndexerConfig()), ["CompressedAttentionConfig.indexer", "compression"]),
    ],
    ids=["num_heads", "rope_dim", "indexer.head_dim", "indexer"],
)
def test_configurations_that_do_not_fit_are_refused(options, names):
    with refused(ed.ConfigError, *names):
        CompressedAttentionConfig(**SIZES | options)


def test_compression_windows_need_several_tokens():
    with refused(ed.ConfigError, "CompressionConfig.size=1"):
        CompressionConfig(size=1)


def test_cache_has_the_keys_that_are_attended_to():
    """A compressed key belongs to a window. Pages, which contain single tokens, do not contain compressed keys."""
    assert {
        form: set(CompressedAttentionConfig(**SIZES, **options).cache_shape(8)) for form, options in FORMS.items()
    } == {
        "window": {"window"},
        "compressed": {"window", "compressed"},
        "overlapping": {"window", "compressed"},
        "chosen": {"window", "compressed", "index"},
    }
    assert not CompressedShape.by_token


def test_operations_are_counted():
    config = CompressedAttentionConfig(**SIZES, **FORMS["chosen"])
    assert config.token_products(20) == 4 * (4 + 2) * 16 + 8 * 6 * 10
    assert dataclasses.replace(config, indexer=None).token_products(20) == 4 * (4 + 10) * 16


@pytest.mark.slow
def test_sequences_of_another_cache_length_replace_sequences():
    """A shorter sequence leaves the remaining slots empty. Of a longer one, the windows that fit are copied."""

    def caches(windows, count):
        cache = CompressedShape(windows=windows, size=4, head_dim=8).build(1, 2, jnp.float32)
        last = jnp.broadcast_to(4 * jnp.arange(count) + 3, (1, 2, count))
        positions = jnp.broadcast_to(jnp.arange(4 * count), (2, 4 * count))
        return cache.commit(NewWindows(jnp.ones((1, 2, count, 1, 8)), last), positions)

    long = caches(8, 8).with_row(0, caches(3, 2).row(jnp.int32(1)))
    assert_array_equal(long.kv.positions, [[0, 1, *[-1] * 6], range(8)])
    some = long.past_of_rows(long.slices_of_rows()[0], jnp.asarray([1, 0]))
    assert_array_equal(some.whole().positions, long.kv.positions[::-1])
