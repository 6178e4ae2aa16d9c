"""Attention kernels: the chunked kernel equals the plain kernel in values and gradients, for all masks and shapes."""

import contextlib
import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.attention.alibi import Alibi
from eqx_decoders.layers.attention.kernels.call import group_arguments
from eqx_decoders.layers.attention.kernels.common import Scales
from eqx_decoders.layers.attention.kernels.quantized_kv import dequantize, quantize
from eqx_decoders.layers.attention.kernels.registry import (
    EMPTY,
    KERNELS,
    Kernel,
    attend,
    merge,
    run_max_scores,
    with_sink,
)
from eqx_decoders.layers.attention.kernels.selection import Selection, pack_groups, pack_lanes
from eqx_decoders.layers.mask import Bidirectional, Causal, Chunked, SlidingWindow, Spans, spans_of, visible
from tests.compare import assert_allclose, assert_array_equal, assert_close
from tests.errors import refused


MASKS = [Causal(), SlidingWindow(7), SlidingWindow(150), Chunked(9), Bidirectional(), Bidirectional(40)]
CAPS = [None, 2.0, None, 2.0, 2.0, None]


def make(length, kv_length=None, *, heads=4, kv_heads=2, dim=8, value_dim=8, dtype=jnp.float32, seed=0, batch=2):
    kv_length = length if kv_length is None else kv_length
    shapes = [(batch, length, heads, dim), (batch, kv_length, kv_heads, dim), (batch, kv_length, kv_heads, value_dim)]
    random = np.random.default_rng(seed)
    return tuple(jnp.asarray(random.normal(size=shape).astype(dtype)) for shape in shapes)


def packed(length, batch=2, padding=5):
    """Return segments of two documents and padding; the second row has another boundary."""
    cuts = [length // 3 + 11 * row for row in range(batch)]
    segments = np.stack([np.where(np.arange(length) < cut, 1, 2) for cut in cuts])
    positions = np.stack(
        [np.where(np.arange(length) < cut, np.arange(length), np.arange(length) - cut) for cut in cuts]
    )
    positions[:, length - padding :] = -1
    return jnp.asarray(positions, jnp.int32), jnp.asarray(segments, jnp.int32)


def packed_places(length, spans=False):
    positions, segments = packed(length)
    places = {"query_positions": positions, "key_positions": positions}
    places |= {"query_segments": segments, "key_segments": segments}
    if spans:  # a span in each quarter of a row, a span across the document boundary, and a span longer than a block
        ids = np.zeros((2, length), np.int32)
        for start, end in [
            (3, 9),
            (length // 3 - 4, length // 3 + 30),
            (length // 2, length - 40),
            (length - 9, length),
        ]:
            ids[:, start:end] = start
        places |= {"query_spans": spans_of(jnp.asarray(ids), positions)}
    return places


def plain(length, batch=2, start=0):
    return jnp.asarray(np.arange(start, start + length, dtype=np.int32)[None].repeat(batch, 0))


OPTIONS = ("mask", "soft_cap", "alibi", "aligned", "kernel", "platform")
attend_once = jax.jit(attend, static_argnames=OPTIONS)


@functools.partial(jax.jit, static_argnames=OPTIONS)
def all_of(qkv, weights, places, **options):
    """Return values, and the gradients of a loss that depends on both results."""

    def loss(qkv):
        out, lse = attend(*qkv, **places, **options)
        seen = lse > EMPTY / 2
        score = (out.astype(jnp.float32) * weights[0]).sum() + (jnp.where(seen, lse, 0.0) * weights[1]).sum()
        return score, (out, lse)

    (_, results), grads = jax.value_and_grad(loss, has_aux=True)(qkv)
    return results, grads


@pytest.mark.slow
@pytest.mark.parametrize(("length", "heads", "dtype"), [(1, 4, "float32"), (3, 6, "float32"), (1, 6, "bfloat16")])
def test_transposed_past_values_are_equal_on_cpu(length, heads, dtype):
    """Other platforms read values in the layout of the cache. Values and gradients are equal, for odd sizes."""
    qkv = make(length, 13, heads=heads, dim=7, value_dim=5, dtype=dtype)
    places = dict(query_positions=plain(length, start=9), key_positions=plain(13).at[1, 4:].set(-1))
    options = dict(mask=Causal(), soft_cap=None, aligned=False, kernel="dot")
    got, want = (all_of(qkv, weights_for(qkv), places, platform=name, **options) for name in ("cpu", "tpu"))
    assert_close(got, want, units=64 if dtype == "float32" else 2, dtype=dtype)


def weights_for(qkv):
    random, shape = np.random.default_rng(9), (*qkv[0].shape[:3], qkv[2].shape[3])
    return tuple(jnp.asarray(random.normal(size=size).astype(np.float32)) for size in (shape, shape[:3]))


def same(left, right, tolerance=3e-5):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(a).all() and np.isfinite(b).all()
        scale = max(1.0, np.abs(b[b > EMPTY / 2]).max(initial=0.0))
        assert_allclose(a, b, atol=tolerance * scale, rtol=0)


def both(qkv, places, **options):
    weights = weights_for(qkv)
    chunked = all_of(qkv, weights, places, kernel="chunked", **options)
    return chunked, all_of(qkv, weights, places, kernel="dot", **{**options, "aligned": False})


@pytest.mark.slow(fast=("Causal()-None",))
@pytest.mark.parametrize(
    ("mask", "soft_cap"),
    list(zip(MASKS, CAPS, strict=True)),
)
def test_packed_chunked_matches_dot(mask, soft_cap):
    """Three blocks with a remainder, in the form for short sequences; values narrower than keys."""
    positions, segments = packed(301)
    places = {"query_positions": positions, "key_positions": positions}
    places |= {"query_segments": segments, "key_segments": segments}
    alibi = Alibi(max_exponent=3.0) if soft_cap is None else None
    same(*both(make(301, value_dim=5), places, mask=mask, soft_cap=soft_cap, alibi=alibi, aligned=True))


@pytest.mark.slow(fast=("causal",))
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(150), Chunked(100)], ids=["causal", "window", "chunks"])
def test_chunked_loops_match_dot(mask):
    """Two and three blocks of queries and keys with a remainder, in the form for long sequences; wide values."""
    positions, segments = packed(561)
    places = {"query_positions": positions, "key_positions": positions}
    places |= {"query_segments": segments, "key_segments": segments}
    qkv = make(561, heads=2, kv_heads=1, value_dim=11)
    same(*both(qkv, places, mask=mask, soft_cap=None, alibi=Alibi(max_exponent=4.0), aligned=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kernel", ["dot", "chunked"])
def test_half_precision_is_close_to_float32(kernel, dtype):
    positions, segments = packed(270)
    places = {"query_positions": positions, "key_positions": positions}
    places |= {"query_segments": segments, "key_segments": segments}
    qkv, options = make(270), {"mask": Causal(), "soft_cap": 5.0, "aligned": True}
    low = tuple(x.astype(dtype) for x in qkv)
    exact = all_of(tuple(x.astype(jnp.float32) for x in low), weights_for(qkv), places, kernel="dot", **options)
    near = all_of(low, weights_for(qkv), places, kernel=kernel, **options)
    assert near[0][0].dtype == dtype and near[0][1].dtype == jnp.float32 and near[1][0].dtype == dtype
    as_f32 = jax.tree.map(lambda x: x.astype(jnp.float32), near)
    same(as_f32, exact, tolerance=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "platform"),
    [
        *(((1, 530), "cpu"), ((33, 70), "tpu"), ((530, 3), "tpu")),
        ((1, 1), "cpu"),
        ((140, 17), "cpu"),
    ],
)
def test_keys_may_differ_from_queries(lengths, platform):
    """Decoding and chunked prefill: keys in any order, empty slots, narrow values, three query heads per key head."""
    length, kv_length = lengths
    qkv = make(length, kv_length, heads=6, kv_heads=2, dim=8, value_dim=5)
    order = np.random.default_rng(0).permutation(kv_length)
    slots = np.where(order % 7 == 3, -1, order)[None].repeat(2, 0)
    places = {"query_positions": plain(length, start=kv_length // 2), "key_positions": jnp.asarray(slots, jnp.int32)}
    same(*both(qkv, places, mask=Causal(), soft_cap=3.0, alibi=Alibi(rounded=True), platform=platform))


@pytest.mark.slow(fast=("float32-dot",))
@pytest.mark.parametrize("kernel", ["dot", "chunked"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_queries_without_visible_keys(kernel, dtype):
    """Outputs are zero, lse is EMPTY, and gradients are finite, or zero for rows without visible keys."""
    qkv = make(20, dtype=dtype)
    positions = plain(20).at[0].set(-1).at[1, :5].set(-1)
    places = {"query_positions": positions, "key_positions": positions}
    weights = tuple(1e3 * weight for weight in weights_for(qkv))
    (out, lse), grads = all_of(qkv, weights, places, mask=Causal(), kernel=kernel)
    assert not out[0].any() and not out[1, :5].any() and out[1, 5:].any()
    assert (lse[0] == EMPTY).all() and (lse[1, :5] == EMPTY).all() and (lse[1, 5:] > -100).all()
    for grad in grads:
        assert np.isfinite(np.asarray(grad, np.float32)).all() and not grad[0].any() and not grad[1, :5].any()


def test_zero_keys():
    places = {"query_positions": plain(3), "key_positions": jnp.zeros((2, 0), jnp.int32)}
    for kernel in ("dot", "chunked"):
        out, lse = map(np.asarray, attend_once(*make(3, 0), **places, mask=Causal(), kernel=kernel))
        assert not out.any() and (lse == EMPTY).all()


@pytest.mark.slow(fast=("Causal()-dot",))
@pytest.mark.parametrize("kernel", ["dot", "chunked"])
@pytest.mark.parametrize("mask", [Causal(), Chunked(9)])
def test_documents_are_independent(kernel, mask):
    """Changing the first document does not change a bit of the results and gradients of the second one."""
    positions, segments = packed(150, padding=0)
    places = {"query_positions": positions, "key_positions": positions}
    places |= {"query_segments": segments, "key_segments": segments}
    second = (segments == 2)[:, :, None, None]
    ours, other = make(150), make(150, seed=1)
    mixed = tuple(jnp.where(second, a, 50 * b) for a, b in zip(ours, other, strict=True))
    weights = weights_for(ours)
    runs = [all_of(x, weights, places, mask=mask, kernel=kernel, aligned=True) for x in (ours, mixed)]
    for a, b in zip(jax.tree.leaves(runs[0]), jax.tree.leaves(runs[1]), strict=True):
        kept = np.asarray(segments == 2)
        assert_array_equal(np.asarray(a)[kept], np.asarray(b)[kept])
        assert (np.asarray(a)[~kept] != np.asarray(b)[~kept]).any()


@pytest.mark.parametrize("mask", [SlidingWindow(5), Chunked(6)])
def test_window_and_chunk_match_a_loop(mask):
    query, key, value = (np.asarray(x, np.float64) for x in make(23, heads=2, kv_heads=1))
    places = {"query_positions": plain(23), "key_positions": plain(23)}
    found = attend_once(*make(23, heads=2, kv_heads=1), **places, mask=mask, aligned=True, kernel="chunked")
    out, lse = map(np.asarray, found)
    for at in range(23):
        first = max(0, at - 4) if isinstance(mask, SlidingWindow) else at // 6 * 6
        scores = np.einsum("bhd,bkd->bhk", query[:, at], key[:, first : at + 1, 0])
        weights = np.exp(scores)
        expected = np.einsum("bhk,bkd->bhd", weights, value[:, first : at + 1, 0]) / weights.sum(-1)[..., None]
        assert_allclose(out[:, at], expected, atol=1e-5)
        assert_allclose(lse[:, at], np.log(weights.sum(-1)), atol=1e-5)


@jax.jit
def whole_and_merged(qkv, sink, weight):
    """Return the loss over all keys at once, and over three parts of the keys, of which the second is empty."""
    query, key, value = qkv
    positions = plain(key.shape[1])
    options = {"mask": Causal(), "query_positions": plain(query.shape[1], start=9)}

    def part(start, end, places):
        return attend(query, key[:, start:end], value[:, start:end], key_positions=places[:, start:end], **options)

    nothing = part(3, 8, jnp.full_like(positions, -1))
    whole = part(0, key.shape[1], positions)
    merged = merge([part(0, 11, positions), nothing, part(11, key.shape[1], positions)])
    losses = [(with_sink(*x, sink) * weight).sum() + x[1].sum() for x in (whole, merged)]
    return losses, whole, merged


@pytest.mark.slow
def test_merged_parts_match_one_call():
    qkv, sink = make(6, 15, value_dim=5), jnp.asarray([0.3, -1.0, 2.0, 0.0])
    weight = weights_for(qkv)[0]
    _, whole, merged = whole_and_merged(qkv, sink, weight)
    same(merged, whole)
    grads = [jax.grad(lambda x, i=i: whole_and_merged(*x, weight)[0][i])((qkv, sink)) for i in (0, 1)]
    same(*grads)


def test_empty_parts_stay_empty():
    out, lse = np.zeros((1, 2, 3, 4), np.float32), np.full((1, 2, 3), EMPTY, np.float32)

    def loss(out, lse, sink):
        merged = merge([(out, lse), (out, lse)])
        return with_sink(*merged, sink).sum() + merged[1].sum(), merged

    found = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(out, lse, np.zeros(3, np.float32))
    grads, merged = jax.tree.map(np.asarray, found)
    assert not merged[0].any() and (merged[1] <= EMPTY).all()
    assert all(np.isfinite(grad).all() for grad in grads)
    with refused(ConfigError, "parts=[]"):
        merge([])


def test_sink_is_an_additional_score():
    query, key, value = make(5, heads=2, kv_heads=2)
    sink = jnp.asarray([0.7, -2.0])
    places = {"query_positions": plain(5), "key_positions": plain(5)}
    scores = np.einsum("bthd,bshd->bhts", query, key)
    scores = np.where(np.tril(np.ones((5, 5), bool)), scores, -np.inf)
    column = np.broadcast_to(np.asarray(sink)[None, :, None, None], (2, 2, 5, 1))
    weights = np.exp(np.concatenate([scores, column], -1))
    wide = (weights / weights.sum(-1, keepdims=True))[..., :-1]
    expected = np.einsum("bhts,bshd->bthd", wide, value)
    assert_allclose(with_sink(*attend_once(query, key, value, **places, mask=Causal()), sink), expected, atol=1e-5)


def layers(remat):
    """Three layers in a scan."""

    def loss(qkv, positions):
        def layer(x, _):
            out, lse = attend(
                jnp.sin(x),
                *qkv[1:],
                mask=Causal(),
                query_positions=positions,
                key_positions=positions,
                aligned=True,
                kernel="chunked",
            )
            return jnp.sin(out) + lse[..., None], None

        return jax.lax.scan(remat(layer), qkv[0], None, length=3)[0].sum()

    return loss


@pytest.mark.slow
def test_context_saves_the_recomputation():
    """With saved "context", remat does not repeat the two products of the forward pass."""
    qkv, positions = make(24), plain(24)
    policies = {
        "context": jax.checkpoint_policies.save_only_these_names("context"),
        "nothing": jax.checkpoint_policies.nothing_saveable,
    }
    remats = {"plain": lambda f: f}
    remats |= {k: functools.partial(jax.checkpoint, policy=v, prevent_cse=False) for k, v in policies.items()}
    products, grads = {}, {}
    for name, remat in remats.items():
        grad = jax.grad(layers(remat))
        products[name] = str(jax.make_jaxpr(grad)(qkv, positions)).count("dot_general[")
        grads[name] = jax.jit(grad)(qkv, positions)
    assert products == {"plain": 7, "context": 7, "nothing": 9}
    same(grads["context"], grads["plain"])
    same(grads["nothing"], grads["plain"])


@pytest.mark.slow(fast=("40",))
@pytest.mark.parametrize("length", [40, 550])
def test_sharded_attention_matches_one_device(length):
    """Batch over `data`, heads over `tensor`: equal results without collectives."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    qkv = make(length, batch=4, dim=4, value_dim=4)
    weights, positions = weights_for(qkv), plain(length, batch=4)
    place = {"query_positions": positions, "key_positions": positions}
    options = {"mask": Causal(), "aligned": True, "kernel": "chunked"}
    heads, rows = NamedSharding(mesh, P("data", None, "tensor")), NamedSharding(mesh, P("data"))
    args = jax.device_put((qkv, weights), heads), jax.device_put(place, rows)
    program = all_of.lower(*args[0], args[1], **options).compile()
    for word in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert f" {word}(" not in program.as_text() and f" {word}-start(" not in program.as_text()
    same(program(*args[0], args[1]), all_of(qkv, weights, place, **options))


@pytest.mark.slow
def test_memory_grows_linearly_with_the_length():
    def bytes_at(length):
        shape = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        places = jax.ShapeDtypeStruct((1, length), jnp.int32)
        grad = jax.grad(
            lambda q, k, v, p: attend(q, k, v, query_positions=p, key_positions=p, mask=Causal(), aligned=True)[
                0
            ].sum(),
            (0, 1, 2),
        )
        return jax.jit(grad).lower(shape, shape, shape, places).compile().memory_analysis().temp_size_in_bytes

    short, long = bytes_at(2048), bytes_at(16384)
    assert long < 9 * short and long < 16384 * 2 * 8 * 4 * 20


def test_auto_selects_by_platform_and_shapes(monkeypatch):
    chosen = []
    spy = {
        name: dataclasses.replace(k, function=lambda *a, n=name, **o: chosen.append(n)) for name, k in KERNELS.items()
    }
    monkeypatch.setattr("eqx_decoders.layers.attention.kernels.registry.KERNELS", spy)
    for platform, length, kv_length in [("cpu", 512, 512), ("cpu", 1, 512), ("tpu", 1, 4096), ("tpu", 4096, 4096)]:
        q, k, v = (jnp.zeros((1, n, 1, 2)) for n in (length, kv_length, kv_length))
        places = {"query_positions": plain(length, 1), "key_positions": plain(kv_length, 1)}
        with contextlib.suppress(Exception):  # the spy does not compute
            attend(q, k, v, **places, mask=Causal(), platform=platform)
    assert chosen == ["chunked", "dot", "dot", "chunked"]


def test_platform_defaults_to_default_device(monkeypatch):
    places = {"query_positions": plain(3), "key_positions": plain(3)}
    with refused(ConfigError, "the platform 'cpu'"):
        attend(*make(3), **places, mask=Causal(), kernel="triton")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu", compute_capability="8.0")])
    with refused(ConfigError, "compute capability (8, 0)"):
        attend(*make(3), **places, mask=Causal(), kernel="triton")


def max_scores(query, key, **keywords):
    return run_max_scores(*group_arguments(query, key, key, **keywords))


def test_max_scores_of_quantized_keys():
    query, key, _ = make(6)
    options = dict(mask=Causal(), query_positions=plain(6), key_positions=plain(6))
    stored, scale = quantize(key, jnp.int8, 2)
    found = max_scores(query, stored, scales=Scales(scale, scale), **options)
    assert_allclose(found, max_scores(query, dequantize(stored, scale, jnp.float32), **options))


def test_refusals(monkeypatch):
    limited = Kernel(
        name="limited",
        function=KERNELS["dot"].function,
        gradients=KERNELS["dot"].gradients,
        masks=(Causal,),
        soft_cap=False,
        platforms=("cpu",),
        spans=False,
        selection=False,
    )
    monkeypatch.setitem(KERNELS, "limited", limited)
    places = {"query_positions": plain(3), "key_positions": plain(3)}

    def call(qkv=None, **options):
        return attend(*(qkv or make(3)), **{"mask": Causal(), **places, **options})

    call(kernel="limited")
    limits = {
        "SlidingWindow(size=2)": {"mask": SlidingWindow(2)},
        "soft cap": {"soft_cap": 3.0},
        "spans": {"query_spans": Spans(plain(3))},
        "selection": {"selected": jnp.ones((2, 1, 3, 3), bool)},
        "'tpu'": {"platform": "tpu"},
    }
    for name, options in limits.items():
        with refused(ConfigError, "kernel='limited'", name, "dot", "chunked"):
            call(kernel="limited", **options)
    unequal = {"qkv": make(3, 4), "key_positions": plain(4), "aligned": True}
    for names, options in [
        (["selected", "2 heads", "heads=4"], {"selected": jnp.ones((2, 2, 3, 3), bool)}),
        (["'chunk'", "'chunked'"], {"kernel": "chunk"}),
        (["soft_cap=0.0"], {"soft_cap": 0.0}),
        (["query_segments", "key_segments"], {"query_segments": plain(3)}),
        (["heads=3", "kv_heads=2"], {"qkv": make(3, heads=3)}),
        (["aligned=True", "3", "4"], unequal),
    ]:
        with refused(ConfigError, *names):
            call(**{"kernel": "limited", **options})


@pytest.mark.slow
@pytest.mark.parametrize("mask", [SlidingWindow(50), Chunked(64)])
def test_padding_within_a_document_does_not_hide_keys(mask):
    positions = np.full((1, 600), -1, np.int32)
    positions[0, :40], positions[0, 560:] = np.arange(40), np.arange(40, 80)
    draws = np.random.default_rng(0)
    query, key, value = draws.normal(size=(3, 1, 600, 2, 8)).astype(np.float32)
    places = dict(mask=mask, query_positions=jnp.asarray(positions), key_positions=jnp.asarray(positions))
    dot, chunked = (attend_once(query, key, value, aligned=True, kernel=k, **places)[0] for k in ("dot", "chunked"))
    assert_allclose(chunked, dot, atol=1e-5)


def oracle(qkv, seen, soft_cap=None):
    """Compute softmax attention over the visible keys in NumPy; seen: [batch, heads or 1, length, kv_length]."""
    query, key, value = (np.asarray(x, np.float64) for x in qkv)
    key, value = (np.repeat(x, query.shape[2] // key.shape[2], 2) for x in (key, value))
    scores = np.einsum("bthd,bshd->bhts", query, key)
    scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
    weights = np.where(seen, np.exp(scores), 0.0)
    total = weights.sum(-1)
    out = np.einsum("bhts,bshv->bthv", weights / np.where(total > 0, total, 1.0)[..., None], value)
    lse = np.where(total > 0, np.log(np.where(total > 0, total, 1.0)), EMPTY)
    return out, lse.transpose(0, 2, 1), np.where(seen, scores, EMPTY).max((2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(20), Chunked(100), Bidirectional()])
@pytest.mark.parametrize("length", [301, 561])
def test_spans(mask, length):
    """Tokens see later tokens of their span, and documents are separate; blocks with later tokens are not skipped."""
    qkv, places = make(length, heads=2, kv_heads=1), packed_places(length, spans=True)
    chunked, dot = both(qkv, places, mask=mask, soft_cap=None, aligned=True)
    same(chunked, dot)
    ids, place = np.asarray(places["query_spans"].last), np.asarray(places["query_positions"])
    together = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None] & (place[:, None] >= place[:, :, None])
    same_segment = np.asarray(places["query_segments"])[:, :, None] == np.asarray(places["query_segments"])[:, None, :]
    alone = np.asarray(visible(mask, *(places[name] for name in ("query_positions", "key_positions"))))
    expected = oracle(qkv, ((alone | together) & same_segment)[:, None])
    assert_allclose(chunked[0][0], expected[0], atol=1e-5)


@pytest.mark.slow
def test_spans_across_padding():
    """Padding within a span, as long as several blocks, hides no keys of the span."""
    positions, ids = np.full((2, 900), -1, np.int32), np.zeros((2, 900), np.int32)
    positions[:, :60], positions[:, 820:880] = np.arange(60), np.arange(60, 120)
    ids[:, 20:860] = 1
    places = dict.fromkeys(("query_positions", "key_positions"), jnp.asarray(positions))
    places["query_spans"] = spans_of(jnp.asarray(ids), places["query_positions"])
    chunked, dot = both(make(900, heads=1, kv_heads=1), places, mask=SlidingWindow(5), soft_cap=None, aligned=True)
    same(chunked, dot)
    qkv = make(900, heads=1, kv_heads=1)
    seen = np.asarray(visible(SlidingWindow(5), *(places[name] for name in ("query_positions", "key_positions"))))
    within = (positions >= 20) & (positions < 100)
    later = within[:, :, None] & within[:, None] & (positions[:, None] >= positions[:, :, None])
    assert_allclose(dot[0][0], oracle(qkv, (seen | later)[:, None])[0], atol=1e-5)


def selection(length, kv_length, heads, seed=3):
    chosen = np.random.default_rng(seed).random((2, heads, length, kv_length)) < 0.1
    chosen[0, :, 5], chosen[1, :, :, :40] = False, False
    return jnp.asarray(chosen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "heads", "length", "soft_cap"),
    [
        ("mask", 4, 301, 2.0),
        ("groups", 4, 561, None),
        ("keys", 1, 301, None),
    ],
)
def test_selected_keys(kind, heads, length, soft_cap):
    """Both kernels attend to keys that mask, segments and selection allow, per head or for all heads."""
    qkv, places, chosen = make(length, value_dim=5), packed_places(length), selection(length, length, heads)
    weights, options = weights_for(qkv), dict(mask=Causal(), soft_cap=soft_cap)
    places["selected"] = chosen if kind == "mask" else Selection(pack_lanes(chosen))
    if kind == "groups":  # the second half of the keys is grouped with the first half; some are in no group
        group = jnp.where(jnp.arange(length) < 40, jnp.arange(length), jnp.arange(length) % 250 + 40)
        group = jnp.stack([group, group]).at[0, 100:110].set(-1)
        chosen = jnp.take(chosen, group[1], axis=-1).at[0, ..., 100:110].set(False)
        places["selected"] = Selection(pack_groups(selection(length, length, heads)), group.astype(jnp.int32))
        assert_array_equal(places["selected"].mask(length), chosen)
    chunked = all_of(qkv, weights, places, kernel="chunked", aligned=True, **options)
    dot = all_of(qkv, weights, places, kernel="dot", **options)
    same(chunked, dot)
    names = ("query_positions", "key_positions", "query_segments", "key_segments")
    seen = np.asarray(visible(Causal(), *(places[name] for name in names)))[:, None] & np.asarray(chosen)
    expected = oracle(qkv, seen, soft_cap)
    for result in (chunked, dot):
        assert_allclose(result[0][0], expected[0], atol=1e-5)
        assert_allclose(result[0][1], expected[1], atol=1e-5)
        assert not result[0][0][0, 5].any() and result[1][1][1, 40:].any() and not result[1][1][1, :40].any()


def test_selections_of_parts_merge():
    """Merging past and present equals one call, also for rows that select nothing in one part or in both parts."""
    query, key, value = make(6, 40)
    places = {"mask": Causal(), "query_positions": plain(6, start=34)}
    chosen = selection(6, 40, 1).at[1, :, 2, :34].set(False).at[0, :, 1, 34:].set(False)

    def part(start, end, kernel):
        keys = {"key_positions": plain(end - start, start=start), "selected": chosen[..., start:end]}
        return attend(query, key[:, start:end], value[:, start:end], **places, **keys, kernel=kernel)

    same(*jax.jit(lambda: (merge([part(0, 34, "dot"), part(34, 40, "chunked")]), part(0, 40, "dot")))())


@pytest.mark.slow
@pytest.mark.parametrize("length", [40, 561])
@pytest.mark.parametrize("heads", [1, 4])
def test_max_scores(length, heads):
    """Maximum over visible keys, EMPTY without visible keys, no gradient."""
    query, key, _ = make(length)
    places = packed_places(length, spans=True) | {"selected": selection(length, length, heads)}
    options = dict(mask=SlidingWindow(30), soft_cap=3.0, aligned=True)
    names = ("query_positions", "key_positions", "query_segments", "key_segments", "query_spans")
    seen = np.asarray(visible(SlidingWindow(30), *(places[name] for name in names)))[:, None] & np.asarray(
        places["selected"]
    )
    found = max_scores(query, key, **places, **options)
    assert_allclose(found, oracle((query, key, key), seen, 3.0)[2], rtol=1e-5)
    places["selected"] = places["selected"].at[1].set(False)
    assert (max_scores(query, key, **places, **options)[1] == EMPTY).all()
    grads = jax.grad(lambda q, k: max_scores(q, k, **places, **options).sum(), (0, 1))(query, key)
    assert not any(grad.any() for grad in grads)


def reach_of(mask, block, kv_block, places):
    from eqx_decoders.layers.attention.kernels.chunked import _key_tile_ranges, _VisibleKeys
    from eqx_decoders.layers.mask import interval

    first, last = interval(mask, places["query_positions"], places.get("query_spans"))
    segments = places.get("query_segments"), places.get("key_segments")
    starts, ends = _key_tile_ranges(_VisibleKeys(first, last, places["key_positions"], *segments), block, kv_block)
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


@pytest.mark.slow
def test_blocks_of_other_documents_are_skipped():
    """Query blocks skip key blocks before the start of their documents."""
    positions, segments = (jnp.asarray(x, jnp.int32) for x in ([list(range(512)) * 2], [[1] * 512 + [2] * 512]))
    places = {"query_positions": positions, "key_positions": positions}
    places |= {"query_segments": segments, "key_segments": segments}
    ranges = [(0, 1), (0, 1), (0, 2), (0, 2), (2, 3), (2, 3), (2, 4), (2, 4)]
    assert reach_of(Causal(), 128, 256, places) == ranges
    assert reach_of(Bidirectional(), 128, 256, places) == [(0, 2)] * 4 + [(2, 4)] * 4
    # the fifth block has the end of one document and another document
    positions = jnp.asarray([[*range(576), *range(448)]], jnp.int32)
    places |= dict.fromkeys(("query_positions", "key_positions"), positions)
    places |= dict.fromkeys(("query_segments", "key_segments"), jnp.asarray([[1] * 576 + [2] * 448], jnp.int32))
    ranges = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7), (6, 8)]
    assert reach_of(SlidingWindow(50), 128, 128, places) == ranges


@pytest.mark.slow
def test_blocks_beyond_the_window_are_skipped_for_any_order():
    """Some of the queries, and keys in any order. Blocks of padding are skipped."""
    places = {"query_positions": plain(256, 1, start=512).at[0, 128:].add(128), "key_positions": plain(1024, 1)}
    assert reach_of(Causal(), 64, 128, places) == [(0, 5), (0, 5), (0, 7), (0, 7)]
    assert reach_of(SlidingWindow(50), 64, 128, places) == [(3, 5), (4, 5), (5, 7), (6, 7)]
    places["key_positions"] = jnp.flip(places["key_positions"], 1).at[0, :256].set(-1)
    assert reach_of(Causal(), 64, 128, places) == [(3, 8), (3, 8), (2, 8), (2, 8)]
    places["query_positions"] = places["query_positions"].at[0, 64:128].set(-1)
    assert [start < end for start, end in reach_of(Causal(), 64, 128, places)] == [True, False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("mask", [SlidingWindow(90), Causal(), Bidirectional()])
def test_some_of_the_queries_in_any_order(mask):
    """Half of the queries of a row, from both ends, attend to all keys in another order."""
    places = packed_places(1100, spans=mask != Causal())
    order = np.concatenate([np.arange(275), np.arange(825, 1100)])
    keys = np.roll(np.arange(1100), 300)
    query, key, value = map(np.asarray, make(1100, heads=2, kv_heads=1, dim=4))
    turns = {name: order if name.startswith("query") else keys for name in places}
    moved = {name: jax.tree.map(lambda x, turn=turns[name]: np.asarray(x)[:, turn], x) for name, x in places.items()}
    same(*both((query[:, order], key[:, keys], value[:, keys]), moved, mask=mask, soft_cap=None))
