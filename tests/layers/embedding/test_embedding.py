"""Embeddings and absolute positions against NumPy; the one-hot lookup equals the gather, also on a sharded table."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.embedding.embedding import (
    LearnedPositions,
    SinusoidalPositions,
    TokenEmbedding,
    document_positions,
)
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.layers.common import BF16, context, drawn, normal


@pytest.mark.parametrize("precision", [ed.Precision(), BF16])
def test_token_embedding(precision):
    table = normal(6, 5)
    tokens, ctx = jnp.asarray([[0, 5, 6, 99, -1, 3]]), context(np.zeros((1, 6)), precision=precision)
    out = TokenEmbedding(table=jnp.asarray(table), scale=2.5)(tokens, ctx)
    assert out.dtype == precision.compute
    want = 2.5 * table[[[0, 5, 5, 5, 0, 3]]]  # ids out of range are clipped
    assert_close(
        out.astype(jnp.float32), want, units=16 if precision.compute == np.float32 else 2, dtype=precision.compute
    )


def test_learned_positions():
    layer = drawn(lambda key: LearnedPositions(max_positions=4).build(5, key=key))
    x = normal(1, 5, 5)
    out = layer(jnp.asarray(x), context([[-1, 0, 3, 4, 100]]))
    assert_close(out, x + np.asarray(layer.table)[[[0, 0, 3, 3, 3]]], units=32)
    assert layer(jnp.asarray(x, jnp.bfloat16), context([[0] * 5])).dtype == jnp.bfloat16


@pytest.mark.slow(fast=("1",))
@pytest.mark.parametrize("embed", [1, 2, 3, 8, 9])
def test_sinusoids(embed):
    x, positions, count = normal(1, 4, embed), [0, 1, 50, -1], embed // 2
    want = np.array(x, np.float64)
    for t, position in enumerate(positions):
        for k in range(count):
            angle = max(position, 0) * 100.0 ** (-k / max(count - 1, 1))
            want[0, t, k] += math.sin(angle)
            want[0, t, count + k] += math.cos(angle)
    layer = SinusoidalPositions(max_timescale=100.0).build(embed, key=jax.random.key(0))
    assert_close(layer(jnp.asarray(x), context([positions])), want, units=128)


SEGMENTS = np.asarray([[1, 1, 2, 2, 2, 0], [0, 0, 3, 3, 1, 1], [5, 5, 5, 5, 5, 5], [0, 4, 0, 0, 4, 0]])


@pytest.mark.slow
def test_positions_count_from_the_start_of_a_document():
    assert document_positions(None, None, (2, 3))[0].tolist() == [[0, 1, 2]] * 2
    want = [[0, 1, 0, 1, 2, -1], [-1, -1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5], [-1, 0, -1, -1, 1, -1]]
    found, documents = document_positions(None, jnp.asarray(SEGMENTS), SEGMENTS.shape)
    assert found.tolist() == want
    assert documents.tolist() == [[1, 1, 2, 2, 2, 0], [0, 0, 1, 1, 2, 2], [1] * 6, [0, 1, 0, 0, 1, 0]]
    again = jnp.asarray([[7, 0, 7, 2, 0, 7]])  # after another document, it is a new document
    found, documents = document_positions(None, again, again.shape)
    assert found.tolist() == [[0, -1, 1, 0, -1, 0]] and documents.tolist() == [[1, 0, 1, 2, 0, 3]]
    given = jnp.full(SEGMENTS.shape, 9)
    assert (
        document_positions(given, jnp.asarray(SEGMENTS), given.shape)[0].tolist() == np.where(SEGMENTS, 9, -1).tolist()
    )


def test_positions_continue_from_a_cache():
    """Padding on either side does not count."""
    begin = jnp.asarray([3, 0, 7, 1])
    assert document_positions(None, None, (4, 2), begin)[0].tolist() == [[3, 4], [0, 1], [7, 8], [1, 2]]
    want = [[3, 4, 5, 6, 7, -1], [-1, -1, 0, 1, 2, 3], [7, 8, 9, 10, 11, 12], [-1, 1, -1, -1, 2, -1]]
    assert document_positions(None, jnp.asarray(SEGMENTS), SEGMENTS.shape, begin)[0].tolist() == want
    given = jnp.full(SEGMENTS.shape, 9)
    assert document_positions(given, None, given.shape, begin)[0].tolist() == given.tolist()


# --- lookups ---


VOCAB, EMBED = 16, 8
TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(VOCAB, EMBED)), jnp.float32)
TOKENS = jnp.asarray([[0, 3, 15, 3], [-1, -7, 16, 99]], jnp.int32)  # clipped: 0, 0, 15, 15
WEIGHTS = jnp.sin(jnp.arange(2 * 4 * EMBED, dtype=jnp.float32)).reshape(2, 4, EMBED)


@eqx.filter_jit
def lookup(table, lookup, layout=ed.Layout(), compute=jnp.float32):
    """Return the embeddings and the gradient of the table."""
    execution = ed.Execution(lookup=lookup, layout=layout, precision=ed.Precision(compute=compute))
    ctx = ed.ForwardContext(positions=jnp.zeros_like(TOKENS), execution=execution)

    def loss(table):
        out = TokenEmbedding(table=table, scale=3.0)(TOKENS, ctx)
        return jnp.sum(out.astype(jnp.float32) * WEIGHTS), out

    (_, out), gradient = jax.value_and_grad(loss, has_aux=True)(table)
    return out, gradient


def test_both_lookups_return_the_rows():
    ids = np.clip(np.asarray(TOKENS), 0, VOCAB - 1)
    want = np.zeros((VOCAB, EMBED))
    np.add.at(want, ids, 3.0 * np.asarray(WEIGHTS, np.float64))
    for how in ("gather", "one_hot"):
        out, gradient = lookup(TABLE, how)
        assert_array_equal(out, 3.0 * np.asarray(TABLE)[ids])
        assert_allclose(gradient, want, rtol=0, atol=1e-5)


@pytest.mark.slow(fast=("tensor=8",))
@pytest.mark.parametrize("mesh", [dict(tensor=8), dict(tensor=4, fsdp=2), dict(tensor_sequence=2, data=2, fsdp=2)])
def test_table_sharded_over_the_vocabulary_gives_equal_rows(mesh):
    layout = ed.Layout.create(**mesh)
    spec = jax.sharding.NamedSharding(layout.mesh, layout.weight_spec("vocab embed", TABLE.shape))
    assert spec.shard_shape(TABLE.shape)[0] < VOCAB
    want = lookup(TABLE, "gather")
    out, gradient = lookup(jax.device_put(TABLE, spec), "one_hot", layout)
    assert_array_equal(out, want[0])
    assert_allclose(gradient, want[1], rtol=0, atol=1e-5)


def test_bfloat16_rows_are_bit_equal():
    one, other = lookup(TABLE, "gather", compute=jnp.bfloat16), lookup(TABLE, "one_hot", compute=jnp.bfloat16)
    assert one[0].dtype == other[0].dtype == jnp.bfloat16
    assert one[1].dtype == other[1].dtype == jnp.float32
    assert_array_equal(one[0].astype(jnp.float32), other[0].astype(jnp.float32))


def test_one_hot_lookup_does_not_gather_the_table():
    """With a table that is sharded over the vocabulary, the only communication is the sum of the results."""
    layout = ed.Layout.create(tensor=8)
    spec = jax.sharding.NamedSharding(layout.mesh, layout.weight_spec("vocab embed", TABLE.shape))
    table = jax.ShapeDtypeStruct(TABLE.shape, TABLE.dtype, sharding=spec)
    ctx = ed.ForwardContext(positions=jnp.zeros_like(TOKENS), execution=ed.Execution(lookup="one_hot", layout=layout))
    traced = jax.jit(lambda table: TokenEmbedding(table=table)(TOKENS, ctx)).trace(table)
    compiled = traced.lower().compile().as_text()
    assert "all-reduce" in compiled and "all-gather" not in compiled and "all-to-all" not in compiled
    asked = [eqn.params["sharding"].spec for eqn in traced.jaxpr.eqns if eqn.primitive.name == "sharding_constraint"]
    assert len(asked) == 2, "the rows of zeros and ones are split as the table is, and then the result"
    assert asked[0] == layout.activation_sharding("batch length vocab", (2, 4, VOCAB)).spec
