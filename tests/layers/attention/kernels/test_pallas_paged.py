"""The kernel that reads pages, in interpret mode: equal to gathered pages, without reading pages of other rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.attention.kernels import pallas_paged, pallas_paged_gpu
from eqx_decoders.layers.attention.kernels.common import EMPTY
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.kv_cache import KVShape, NewKV
from eqx_decoders.layers.cache.paged import PageConfig, build_pages
from eqx_decoders.layers.mask import Causal, Chunked, SlidingWindow, Spans
from eqx_decoders.planning.gpus import GPU_OPTIONS, gpu_devices, gpus_of
from eqx_decoders.sharding.backend import backend_of
from eqx_decoders.sharding.layout import device_bytes
from tests.compare import assert_close
from tests.errors import refused
from tests.layers.cache.test_paged import check_paged
from tests.layers.common import attend_past, normal
from tests.programs import tpu_devices


@pytest.fixture(autouse=True)
def kernel(request, monkeypatch):
    """Run the kernel on CPU for all head dims, with few tokens per step."""
    name = getattr(request, "param", "interval")
    backend = dataclasses.replace(backend_of("cpu", single=False), paged_kernel=name)
    monkeypatch.setattr(ed.Layout, "backend", backend)
    monkeypatch.setattr(pallas_paged_gpu, "_TILE_TOKENS", 4)
    monkeypatch.setattr(pallas_paged_gpu, "_PART_TOKENS", 16)
    for module in (pallas_paged, pallas_paged_gpu):
        monkeypatch.setattr(module, "fits", lambda pages, dtype, heads, device: True)
    monkeypatch.setattr(pallas_paged, "_MIN_STEP_TOKENS", 8)
    monkeypatch.setattr(pallas_paged, "_MAX_STEP_TOKENS", 16)
    monkeypatch.setattr(pallas_paged, "_MAX_QUERY_ELEMENTS", 1024)


def paged(lengths, head_dim=8, kv_heads=2, values=True, dtype="float32", size=4, seed=0, window=None):
    """Return a past with rows of these lengths in mixed pages. Everything else is NaN."""
    rows, row_pages = len(lengths), -(-max(*lengths, size) // size) + 1
    shape = KVShape(slots=row_pages * size, kv_heads=kv_heads, head_dim=head_dim, rolling=False, values=values)
    pages = PageConfig(page_size=size, num_pages=rows * row_pages + 3)
    cache = build_pages(shape, 3, rows, row_pages * size, CacheFormat.of(dtype), pages)
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x, cache)
    table = np.random.default_rng(seed).permutation(pages.num_pages)[: rows * row_pages].reshape(rows, row_pages)
    table = np.where(np.arange(row_pages) * size < np.asarray(lengths)[:, None], table, -1)
    cache = cache.with_tables(jnp.asarray(table, jnp.int32))
    key, value = (jnp.asarray(normal(3, rows, row_pages * size, kv_heads, head_dim, seed=seed + i)) for i in (1, 2))
    places = np.arange(row_pages * size)[None]
    places = jnp.asarray(np.where(places < np.asarray(lengths)[:, None], places, -1), jnp.int32)
    cache = cache.commit(NewKV(key, value if values else None), places)
    if window is not None:  # pages before the window of every query are freed and overwritten
        behind = (np.arange(row_pages) + 1) * size <= np.asarray(lengths)[:, None] - window + 1
        cache = cache.with_tables(jnp.asarray(np.where(behind, -1, table), jnp.int32))
        lost = jnp.asarray(np.where(behind, table, pages.num_pages))
        if dtype == "float32":
            cache = dataclasses.replace(cache, key=cache.key.at[:, lost].set(jnp.nan))
    return cache.past(jnp.int32(1))


def both(past, positions, heads, dim=8, dtype=jnp.float32, **options):
    query = jnp.asarray(normal(*positions.shape, heads, dim, seed=9), dtype)
    options = dict(query_positions=positions, execution=ed.Execution(), **options)
    pasts = jax.jit(lambda query, past: [attend_past(query, one, **options) for one in (past, past.whole())])
    return *pasts(query, past), query


def next_tokens(lengths, count=1):
    """Return the positions of the next `count` tokens of each row; the last token of the last row is padding."""
    positions = np.asarray(lengths)[:, None] + np.arange(count)
    positions[-1, count - 1 :] = -1
    return jnp.asarray(positions, jnp.int32)


LENGTHS = (13, 0, 16, 1, 40)


@pytest.mark.slow(
    fast=(
        "triton-int8-6-2-True-SlidingWindow(size=9)-3.0",
        "interval-int8-6-2-True-SlidingWindow(size=9)-3.0",
    )
)
@pytest.mark.parametrize(
    "dtype, heads, kv_heads, values, mask, soft_cap",
    [
        ("int8", 6, 2, True, SlidingWindow(9), 3.0),
        ("float32", 4, 2, True, Causal(), None),
        ("int8", 4, 1, False, Causal(), None),
        ("float32", 4, 1, False, SlidingWindow(9), None),
        ("float8_e4m3fn", 4, 4, True, Chunked(16), 3.0),
        ("bfloat16", 18, 9, True, Causal(), None),
    ],
)
@pytest.mark.parametrize("kernel", ["interval", "triton"], indirect=True)
def test_kernel_matches_gathered_pages(kernel, dtype, heads, kv_heads, values, mask, soft_cap):
    """One or several tokens, odd lengths, rows without a past, page and step boundaries; NaN elsewhere."""
    window = getattr(mask, "size", None) if isinstance(mask, SlidingWindow) else None
    past = paged(LENGTHS, kv_heads=kv_heads, values=values, dtype=dtype, window=window)
    for count in (5,) if dtype == "int8" and values else (1, 5):
        (out, lse), want, _ = both(past, next_tokens(LENGTHS, count), heads, mask=mask, soft_cap=soft_cap)
        assert_close((out, lse), want)
        assert not out[1].any() and (lse[1] == EMPTY).all() and not out[-1, -1].any() and (lse[-1, -1] == EMPTY).all()


@pytest.mark.slow(fast=("int8-128-16-interval",))
@pytest.mark.parametrize("kernel", ["interval", "triton"], indirect=True)
@pytest.mark.parametrize("head_dim, size", [(64, 3), (80, 8), (128, 16), (256, 1)])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_heads_and_pages_of_any_size(kernel, head_dim, size, dtype):
    past = paged(LENGTHS, head_dim=head_dim, dtype=dtype, size=size)
    for count in (1, 70):  # several tiles of queries
        got, want, _ = both(past, next_tokens(LENGTHS, count), 4, head_dim, mask=SlidingWindow(30))
        assert_close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["interval", "triton"], indirect=True)
def test_shared_scales_spans_and_half_precision(kernel):
    past = paged(LENGTHS, dtype=CacheFormat(dtype="int8", scale_over="heads_and_head_dim"))
    positions = next_tokens(LENGTHS, 6)
    spans = Spans(jnp.where(positions % 3 == 0, positions + 2, -1))
    got, want, _ = both(past, positions, 4, mask=Causal(), query_spans=spans)
    assert_close(got, want)
    near, _, low = both(past, positions, 4, mask=Causal(), dtype=jnp.bfloat16)
    exact = attend_past(
        low.astype(jnp.float32), past.whole(), mask=Causal(), query_positions=positions, execution=ed.Execution()
    )
    assert_close(jax.tree.map(lambda x: x.astype(jnp.float32), near), exact, dtype=jnp.bfloat16, units=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, sizes, heads, kv_heads",
    [
        ("interval", dict(tensor=8), 16, 2),
        ("triton", dict(tensor=8), 16, 2),
        ("interval", dict(data=2, tensor=2, context=2), 8, 4),
        ("interval", dict(tensor=4, data=2), 4, 1),
    ],
    indirect=["kernel"],
)
def test_heads_are_sharded(kernel, sizes, heads, kv_heads):
    """Also if several devices share a key head, each with its own copy of the scales."""
    lengths, layout = (13, 0, 16, 20), ed.Layout.create(**sizes)
    past = paged(lengths, kv_heads=kv_heads, dtype="int8")
    positions = next_tokens(lengths, 2)
    query = jnp.asarray(normal(4, 2, heads, 8, seed=9))
    options = dict(query_positions=positions, mask=Causal())
    plain = jax.jit(lambda query, past: attend_past(query, past.whole(), execution=ed.Execution(), **options))
    split = jax.jit(lambda query, past: attend_past(query, past, execution=ed.Execution(layout=layout), **options))
    assert_close(split(query, past), plain(query, past))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["interval", "triton"], indirect=True)
@pytest.mark.parametrize("kind", ["keys", "chunks", "latents", "indexed", "blocks"])
def test_decoders_use_the_kernel(kernel, kind):
    check_paged(kind)
    check_paged(kind, "int8", bound=0.06)


def devices_of(topology, count):
    """Return `count` devices to compile for, and the compiler options."""
    gpus = gpus_of(topology)
    if gpus is None:
        return tpu_devices(topology)[:count], {}, {}
    devices = gpu_devices(gpus)
    if devices is None:
        pytest.skip("needs the compiler for GPUs (extra 'aot-gpu')")
    return devices[:count], GPU_OPTIONS, dict(lowering_platforms=("cuda",))


STEPS = [
    ("llama3-8b", "v5p:2x2x1", dict(tensor=4), "bfloat16", 64, 16),
    ("llama3-8b", "v6e:2x2x1", dict(data=2, tensor=2), "int8", 64, 16),
    ("gemma3-12b", "v5p:2x2x1", dict(tensor=4), "int8", 128, 16),
    ("llama3.2-1b", "v6e:2x2x1", dict(tensor=4), "float8_e4m3fn", 64, 16),
    ("qwen3-next-80b", "v5p:2x2x1", dict(tensor=2), "bfloat16", 64, 16),
    ("qwen3-next-80b", "v6e:2x4", dict(tensor=2, expert=4), "bfloat16", 64, 64),
    ("deepseek3-671b", "v5p:4x4x4", dict(tensor=8, expert=8), "bfloat16", 64, 16),
    ("deepseek3-671b", "v6e:8x8", dict(tensor=8, expert=8), "int8", 64, 16),
    ("llama3-8b", "v5p:2x2x1", dict(data=2, tensor=2), "int8", None, 16),
    ("gemma3-12b", "v5p:2x2x1", dict(data=2, tensor=2), "int4", None, 16),
    ("llama3-8b", "h100:1x4", dict(tensor=4), "bfloat16", 64, 16),
    ("gemma3-12b", "b200:1x4", dict(data=2, tensor=2), "int8", 64, 16),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("name, topology, sizes, dtype, page_size, rows", STEPS)
def test_decoding_step_does_not_copy_or_dequantize_pages(monkeypatch, name, topology, sizes, dtype, page_size, rows):
    """Compiled for TPUs and GPUs, whose kernels read the pages."""
    monkeypatch.undo()
    devices, compiler_options, lowering = devices_of(topology, int(np.prod(list(sizes.values()))))
    layout, config = ed.Layout.create(**sizes, devices=devices), ed.get_config(name)
    model = ed.abstract(config, layout=layout, precision=ed.Precision(params=jnp.bfloat16, compute=jnp.bfloat16))
    pages = None if page_size is None else PageConfig(page_size=page_size)
    cache = ed.abstract_cache(config, rows, 8192, dtype=dtype, layout=layout, pages=pages)
    split = layout.activation_sharding("batch length", (rows, 1))
    tokens = jax.ShapeDtypeStruct((rows, 1), jnp.int32, sharding=split)

    def step(model, cache, tokens, positions):
        out = model(tokens, positions=positions, cache=cache)
        return out.logits, out.cache

    lowered = jax.jit(step, donate_argnums=1).trace(model, cache, tokens, tokens).lower(**lowering)
    assert ("paged_attention" in lowered.as_text()) == (page_size is not None)
    memory = lowered.compile(compiler_options).memory_analysis()
    share = sum(device_bytes(leaf) for leaf in jax.tree.leaves(cache))
    print(f"{name} {sizes} {dtype} {page_size}: {share / 1e6:.1f} MB, {memory.temp_size_in_bytes / 1e6:.2f} MB beside")
    # if weights are sharded over `expert`, the embedding table is gathered, whose size does not depend on the cache
    assert memory.temp_size_in_bytes < (0.05 if "expert" in sizes else 0.03) * share


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5p:2x2x1", "v6e:2x2x1", "h100:1x2", "b200:1x2"])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, values, page_size, dtype, count",
    [
        (32, 8, 64, True, 16, "bfloat16", 1),
        (16, 8, 256, True, 64, "int8", 512),
        (32, 32, 128, True, 32, "float8_e4m3fn", 7),
        (128, 1, 640, False, 64, "int8", 64),
        (9, 3, 80, True, 8, "float32", 3),
        (8, 1, 128, True, 16, "float32", 512),
    ],
)
def test_kernel_compiles(monkeypatch, topology, heads, kv_heads, head_dim, values, page_size, dtype, count):
    """Latents are too wide for the GPU kernel, so their pages are gathered."""
    monkeypatch.undo()
    devices, compiler_options, lowering = devices_of(topology, 2)
    layout = ed.Layout.create(data=2, devices=devices)
    shape = KVShape(slots=4096, kv_heads=kv_heads, head_dim=head_dim, rolling=False, values=values)
    cache = jax.eval_shape(lambda: build_pages(shape, 2, 4, 4096, dtype, PageConfig(page_size=page_size)))
    wide = jnp.float32 if dtype == "float32" else jnp.bfloat16

    def like(words, shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.activation_sharding(words, shape))

    cache = jax.tree.map(
        lambda x, split: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split),
        cache,
        layout.activation_shardings(cache),
    )
    query = like("batch length heads head_dim", (4, count, heads, head_dim), wide)
    options = dict(execution=ed.Execution(layout=layout), mask=SlidingWindow(1000), soft_cap=30.0)

    def run(query, cache, positions):
        return attend_past(query, cache.past(jnp.int32(1)), query_positions=positions, **options)

    traced = jax.jit(run).trace(query, cache, like("batch length", (4, count), jnp.int32))
    in_place = layout.platform == "tpu" or head_dim <= 256
    assert ("name=paged_attention" in str(traced.jaxpr)) == in_place
    traced.lower(**lowering).compile(compiler_options)


def test_query_tiles_fit_into_vector_memory(monkeypatch):
    """The kernel may use 16 MiB of the vector memory of a TPU v4."""
    monkeypatch.undo()
    shape = KVShape(slots=256, kv_heads=3, head_dim=80, rolling=False, values=True)
    for dtype in ("float32", "bfloat16"):
        past = build_pages(shape, 1, 1, 256, dtype, PageConfig(page_size=64))
        plan = pallas_paged._make_plan(jnp.zeros((1, 512, 9, 80), dtype), past, 3, None, "tpu")
        item = jnp.dtype(dtype).itemsize
        held = plan.kv_heads * (4 * 128 * item + 4 * 128 + 4 * 4 * 128)  # queries and results, double buffered; sums
        pages = 4 * plan.kv_heads * plan.keys * 128 * item
        assert 8 * 2**20 < plan.rows * (held + 2 * 4 * plan.keys) + pages < 16 * 2**20


def test_tables_beyond_the_scalar_memory_are_refused(monkeypatch):
    monkeypatch.setattr(pallas_paged, "_MAX_SCHEDULE_BYTES", 256)
    with refused(ConfigError, "5 sequences", "11 pages", "PageConfig.page_size=4"):
        both(paged(LENGTHS), next_tokens(LENGTHS), 4, mask=Causal())
