"""Every fast path equals the plain path, in values and gradients, for random decoders over all options."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import eqx_decoders as ed
from eqx_decoders.remat import POLICIES
from tests.programs import drop_compiled_programs
from tests.strategies import VOCAB, causal_masks, decoders, filled, packed, rich_decoder, some_tokens


# No shrinking: each try compiles for seconds, and the first failing decoder is small enough to read.
SETTINGS = dict(
    derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
few, many = settings(max_examples=4, **SETTINGS), settings(max_examples=60, **SETTINGS)
PLAIN = dict(scan=False, attention="dot")


def loss(model, tokens, segments, key):
    """A loss that weighs every logit differently, and the logits."""
    out = model(tokens, segment_ids=segments, key=key)
    weights = jnp.sin(jnp.arange(out.logits.size, dtype=jnp.float32)).reshape(out.logits.shape)
    return jnp.mean(weights * out.logits), out.logits


@eqx.filter_jit
def run(model, tokens, segments, key=None):
    (_, logits), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(model, tokens, segments, key)
    return logits, gradient


def close(got, want, tolerance=3e-5):
    """Equal up to rounding, relative to the largest value of each array."""
    got, want = jax.device_get((jax.tree.leaves(got), jax.tree.leaves(want)))
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert np.all(np.isfinite(one))
        bound = tolerance * max(1e-3, float(np.abs(other).max(initial=0.0)))
        np.testing.assert_allclose(one, other, rtol=0, atol=bound)


def check_paths(config, policy, mesh):
    drop_compiled_programs()
    tokens, segments = packed(8)
    model = filled(config, **PLAIN)
    want = run(model, tokens, segments)
    close(run(model.replace(scan=True, attention="chunked"), tokens, segments), want)
    close(run(model.replace(scan=True, remat=policy), tokens, segments), want)
    close(run(model.replace(scan=True).place(ed.Layout.create(**mesh)), tokens, segments), want)


MESHES = [
    dict(data=8),
    dict(fsdp=8),
    dict(data=2, fsdp=2, tensor=2),
    dict(fsdp=4, tensor=2),
    dict(fsdp_transpose=2, tensor=2, data=2),
    dict(tensor_sequence=2, fsdp=2, data=2),
    dict(expert=4, tensor=2),
    dict(context=2, fsdp=2, tensor=2),
]
some_policy = st.sampled_from(sorted(POLICIES))
some_mesh = st.sampled_from(MESHES)


@given(config=decoders(), policy=some_policy, mesh=some_mesh)
@few
def test_scan_chunked_remat_and_sharded_equal_plain(config, policy, mesh):
    check_paths(config, policy, mesh)


@pytest.mark.slow
@given(config=decoders(), policy=some_policy, mesh=some_mesh)
@many
def test_scan_chunked_remat_and_sharded_equal_plain_often(config, policy, mesh):
    check_paths(config, policy, mesh)


@pytest.mark.parametrize(("mesh", "tied"), [*((mesh, False) for mesh in MESHES), (MESHES[-1], True)], ids=str)
def test_every_mesh_equals_one_device(mesh, tied):
    tokens, segments = packed(8)
    model = filled(rich_decoder(tied=tied))
    close(run(model.place(ed.Layout.create(**mesh)), tokens, segments), run(model, tokens, segments))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("kernel", ["chunked"])
def test_every_remat_policy_equals_none(policy, kernel):
    tokens, segments = packed(2)
    model = filled(rich_decoder(3), attention=kernel)
    close(run(model.replace(remat=policy), tokens, segments), run(model, tokens, segments))


def test_dropout_is_the_same_scanned_and_looped():
    config = rich_decoder(4, dropout=0.2)
    blocks = tuple(
        dataclasses.replace(b, dropout=0.3, mlp=dataclasses.replace(b.mlp, dropout=0.1)) for b in config.blocks
    )
    tokens, segments = packed(2)
    model = filled(dataclasses.replace(config, blocks=blocks), **PLAIN)
    key = jax.random.key(5)
    want = run(model, tokens, segments, key)
    close(run(model.replace(scan=True, remat="full"), tokens, segments, key), want)
    assert not np.allclose(run(model, tokens, segments)[0], want[0])


@eqx.filter_jit
def extend(model, tokens, cache, positions=None):
    out = model(tokens, positions=positions, cache=cache)
    return out.logits, out.cache


def decoded(model, tokens, sizes, max_length=None):
    """Logits of a sequence that is fed in pieces through a cache."""
    cache = ed.init_cache(model.config, tokens.shape[0], max_length or tokens.shape[1], dtype=jnp.float32)
    pieces, begin = [], 0
    for size in sizes:
        logits, cache = extend(model, tokens[:, begin : begin + size], cache)
        pieces.append(logits)
        begin += size
    assert begin == tokens.shape[1]
    return jnp.concatenate(pieces, axis=1)


def check_decoding(config):
    """Token by token = odd chunks = at once; windows wrap, since the sequence is longer than all of them."""
    drop_compiled_programs()
    tokens = some_tokens(3, 13)
    model = filled(config)
    want = eqx.filter_jit(model)(tokens).logits
    close(decoded(model, tokens, [1] * 13), want)
    close(decoded(model, tokens, [5, 1, 7]), want)


@given(config=decoders(mask=causal_masks))
@few
def test_cached_equals_full(config):
    check_decoding(config)


@pytest.mark.slow
@given(config=decoders(mask=causal_masks))
@many
def test_cached_equals_full_often(config):
    check_decoding(config)


def test_ragged_rows_decode_as_if_alone():
    """Rows of different lengths, padded on the right in the prefill, then each at its own position."""
    tokens = some_tokens(3, 12)
    lengths = jnp.asarray([7, 1, 4])
    model = filled(rich_decoder())
    want = eqx.filter_jit(model)(tokens).logits
    index = jnp.arange(7)[None]
    prompt = jnp.where(index < lengths[:, None], tokens[:, :7], 0)
    cache = ed.init_cache(model.config, 3, 12, dtype=jnp.float32)
    logits, cache = extend(model, prompt, cache, jnp.where(index < lengths[:, None], index, -1))
    for row, length in enumerate([7, 1, 4]):
        close(logits[row, :length], want[row, :length])
    for step in range(5):
        here = lengths + step
        logits, cache = extend(model, jnp.take_along_axis(tokens, here[:, None], axis=1), cache)
        close(logits[:, 0], jnp.take_along_axis(want, here[:, None, None], axis=1)[:, 0])
    assert cache.length.tolist() == [12, 6, 9]


def test_left_padding_changes_nothing():
    tokens = some_tokens(1, 9)
    model = filled(rich_decoder())
    want = eqx.filter_jit(model)(tokens).logits
    padded = jnp.pad(tokens, ((0, 0), (4, 0)))
    positions = jnp.maximum(jnp.arange(13)[None] - 4, -1)
    close(model(padded, positions=positions).logits[:, 4:], want)


@pytest.mark.parametrize("kernel", ["dot", "chunked"])
@pytest.mark.parametrize("scan", [True, False])
def test_packing_isolates_documents_bit_by_bit(kernel, scan):
    model = filled(rich_decoder(), attention=kernel, scan=scan)
    tokens = some_tokens(2, 11)
    segments = jnp.asarray([[1] * 5 + [2] * 6, [1] * 2 + [2] * 8 + [0]])
    other = tokens.at[:, :2].set((tokens[:, :2] + 3) % VOCAB)
    one, two = run(model, tokens, segments)[0], run(model, other, segments)[0]
    second = np.asarray(segments) == 2
    np.testing.assert_array_equal(np.asarray(one)[second], np.asarray(two)[second])
    assert not np.array_equal(one, two)


def test_packed_documents_equal_documents_alone():
    model = filled(rich_decoder())
    tokens, segments = packed(4)
    logits = eqx.filter_jit(model)(tokens, segment_ids=segments).logits
    for begin, end in ((0, 5), (5, 6), (6, 10)):
        close(logits[:1, begin:end], model(tokens[:1, begin:end]).logits)


def test_bfloat16_stays_near_float32():
    tokens, segments = packed(2)
    model = filled(rich_decoder())
    half = model.replace(precision=ed.Precision(compute=jnp.bfloat16))
    (want, want_grad), (got, got_grad) = run(model, tokens, segments), run(half, tokens, segments)
    assert half(tokens).hidden.dtype == jnp.bfloat16
    assert got.dtype == jnp.float32
    close(got, want, 0.06)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(got_grad))
    close(got_grad, want_grad, 0.15)
