"""JAX's splash attention kernel in interpret mode: values and gradients equal the plain kernel."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.attention.kernels import splash
from eqx_decoders.layers.attention.kernels.registry import KERNELS, attend
from eqx_decoders.layers.mask import AttentionPositions, Bidirectional, Causal, Chunked, SlidingWindow
from tests.compare import assert_array_equal
from tests.errors import refused
from tests.layers.attention.kernels.test_cudnn import results
from tests.layers.attention.kernels.test_registry import make, packed_places, plain, same
from tests.programs import tpu_devices


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setitem(KERNELS, "splash", dataclasses.replace(KERNELS["splash"], platforms=("cpu", "tpu")))
    monkeypatch.setattr(splash, "BLOCK", 128)


def layouts(length):
    """Yield packed rows with padding at the end, and interleaved documents with padding and large positions."""
    places = packed_places(length)
    yield places
    row = np.arange(length)
    segments, positions = np.stack([row % 3, row // 100]), np.stack([row // 3 * 5 + 2**30, row % 100])
    positions[:, 20:40] = -1
    pair = (jnp.asarray(x, jnp.int32) for x in (positions, segments))
    yield {
        f"{side}_{name}": x
        for name, x in zip(("positions", "segments"), pair, strict=True)
        for side in ("query", "key")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "soft_cap"),
    [
        (Chunked(70), 2.0),
        (Causal(), None),
        (Bidirectional(), None),
        (Bidirectional(60), None),
    ],
)
def test_splash_matches_dot(interpreted, mask, soft_cap):
    """An odd length, three query heads per key head, values narrower than keys."""
    qkv = make(150, heads=3, kv_heads=1, value_dim=5)
    for places in layouts(150):
        options = dict(mask=mask, soft_cap=soft_cap, aligned=True, needs_lse=False)
        same(results(qkv, places, kernel="splash", **options), results(qkv, places, kernel="dot", **options))


@pytest.mark.parametrize("mask", [SlidingWindow(70), pytest.param(Causal(), marks=pytest.mark.slow)])
def test_rows_of_dense_positions(interpreted, mask):
    qkv, places = make(300), dict.fromkeys(("query_positions", "key_positions"), plain(300))
    options = dict(mask=mask, aligned=True, dense_positions=True, needs_lse=False)
    same(results(qkv, places, kernel="splash", **options), results(qkv, places, kernel="dot", **options))


def test_chunk_ids():
    """Tokens have equal ids if their document and chunk are equal. Padding has separate ids."""
    for places in layouts(150):
        positions, segments = (np.asarray(places[f"query_{name}"]) for name in ("positions", "segments"))
        ids = np.asarray(splash._segment_ids(Chunked(7), AttentionPositions(**places)))
        keys = [np.where(positions < 0, -1, x) for x in (positions // 7, segments)]
        expected = np.logical_and(*(x[:, :, None] == x[:, None] for x in keys))
        assert_array_equal(ids[:, :, None] == ids[:, None], expected)


def test_refusals(interpreted):
    places = dict.fromkeys(("query_positions", "key_positions"), plain(6))

    def call(**options):
        attend(*make(6), **places, **dict(mask=Causal(), kernel="splash", aligned=True, needs_lse=False) | options)

    for name, options in {
        "log-sum-exp": dict(needs_lse=True),
        "'gpu'": dict(platform="gpu"),
        "queries": dict(aligned=False),
        "SlidingWindow(size=3)": dict(mask=SlidingWindow(3)),
        "selection": dict(selected=jnp.ones((2, 1, 6, 6), bool)),
        "spans": dict(query_spans=packed_places(100, spans=True)["query_spans"]),
    }.items():
        with refused(ConfigError, "kernel='splash'", name):
            call(**options)
    low, options = make(6, dtype=jnp.bfloat16), dict(mask=Causal(), kernel="splash", aligned=True, needs_lse=False)
    with refused(ConfigError, "kernel='splash'", "float16"):
        attend(*make(6, dtype=jnp.float16), **places, **options)
    with jax.default_matmul_precision("highest"), refused(ConfigError, "precision='highest'"):
        attend(*low, **places, **options)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(("dim", "value_dim", "kv_heads"), [(64, 64, 4), (192, 128, 16)])
def test_compiles_for_tpus(topology, dim, value_dim, kv_heads):
    """Values and gradients of packed rows."""
    devices = tpu_devices(topology)
    mesh = jax.sharding.Mesh(np.asarray(devices), ("data",))

    def bars(query, key, value, positions, segments, out_bar):
        def local(*qkv):
            places = dict.fromkeys(("query_positions", "key_positions"), positions)
            places |= dict.fromkeys(("query_segments", "key_segments"), segments)
            options = dict(kernel="splash", platform="tpu", local=True, aligned=True, needs_lse=False)
            return attend(*(x.swapaxes(1, 2) for x in qkv), mask=Causal(), **places, **options)[0].swapaxes(1, 2)

        out, pull = jax.vjp(local, query, key, value)
        return out, pull(out_bar)

    def shaped(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((len(devices), *dims), dtype, sharding=NamedSharding(mesh, P("data")))

    length, heads = 8192, 16
    qkv = [shaped(n, length, width) for n, width in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))]
    rows, out = [shaped(length, dtype=jnp.int32)] * 2, shaped(heads, length, value_dim)
    split = jax.shard_map(bars, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    with jax.default_matmul_precision("default"):
        program = jax.jit(split).lower(*qkv, *rows, out).compile()
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 3
    temporaries = program.memory_analysis().temp_size_in_bytes / 2**20
    print(f"{topology} {dim}/{value_dim}: {temporaries:.0f} MiB of temporaries")
