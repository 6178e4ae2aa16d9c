"""Kernels on a GPU that is here, against the plain forms: `make test-accelerator`. Elsewhere all of it is skipped."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.attention.kernels.call import AttentionCall, group_arguments
from eqx_decoders.layers.attention.kernels.registry import KERNELS, select_kernel
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.kv_cache import KVShape, NewKV
from eqx_decoders.layers.cache.paged import PageConfig, build_pages
from eqx_decoders.layers.mask import Bidirectional, Causal, Chunked, SlidingWindow
from eqx_decoders.layers.recurrent.scans.recurrence import delta_rule
from eqx_decoders.numerics.einsum import grouped_products
from eqx_decoders.numerics.grouped_matmul import GroupedForm, block_rows, choose_form
from eqx_decoders.sharding import backend
from eqx_decoders.sharding.chips import compute_capability
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig
from eqx_decoders.training.step.step import Trainer
from tests.compare import assert_allclose
from tests.layers.attention.kernels.test_registry import all_of, make, packed, packed_places, plain, weights_for
from tests.layers.common import attend_past, normal


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU that JAX sees"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
# relative errors in the norm: of products of TF32 and bfloat16, of sums over a thousand of these
MOST = {"float32": 2e-3, "bfloat16": 1.2e-2, "float16": 3e-3}


def device():
    return jax.devices()[0]


def near(got, want, most):
    """Trees are equal up to a share of each array's norm."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        there = np.abs(b) < 1e29
        assert np.isfinite(a).all() and (there == (np.abs(a) < 1e29)).all(), jax.tree_util.keystr(path)
        error = np.linalg.norm((a - b)[there]) / max(np.linalg.norm(b[there]), 1e-30)
        assert error < most, f"{jax.tree_util.keystr(path)}: relative error {error:.2e}"


# heads, key heads, head_dim, value_dim
DIMS = [(8, 2, 64, 64), (4, 2, 128, 128), (4, 4, 256, 256), (4, 4, 192, 128), (6, 2, 80, 80)]
MASKS = [Causal(), SlidingWindow(300), Chunked(256), Bidirectional()]
CASES = [(*DIMS[1], mask, 1024, None, "packed") for mask in MASKS]
CASES += [(*dims, Causal(), 1024, None, "whole") for dims in DIMS]
CASES += [(*DIMS[0], Causal(), 999, 30.0, "packed"), (*DIMS[1], SlidingWindow(100), 2050, None, "whole")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("heads, kv_heads, dim, value_dim, mask, length, soft_cap, rows", CASES)
def test_attention(heads, kv_heads, dim, value_dim, mask, length, soft_cap, rows, dtype):
    """Values, log-sum-exp and gradients by all kernels that can do it, and "auto" takes one."""
    sizes = dict(heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim)
    qkv = make(length, **sizes)
    qkv = tuple((x * s).astype(dtype) for x, s in zip(qkv, (dim**-0.5, 1, 1), strict=True))
    dense = rows == "whole"
    places = packed_places(length) if not dense else dict.fromkeys(("query_positions", "key_positions"), plain(length))
    promises = dict(mask=mask, soft_cap=soft_cap, aligned=True, dense_positions=dense, local=True, platform="gpu")
    promises |= dict(compute_capability=compute_capability(device()))
    call = AttentionCall.of(*group_arguments(*qkv, **places, **promises, needs_lse=False))
    names = [name for name in ("cudnn", "triton", "chunked") if KERNELS[name].lacks(call) is None]
    assert select_kernel(call) == names[0] and (names[0] != "chunked" or (dtype == "float32" and dim > 128))
    weights = weights_for(qkv)

    @functools.partial(jax.jit, static_argnames=("kernel", "lse"))
    def run(qkv, kernel, lse):
        return all_of.__wrapped__(qkv, weights if lse else (weights[0], 0 * weights[1]), places, kernel=kernel,
                                  needs_lse=lse, **promises)  # fmt: skip

    exact = tuple(x.astype(jnp.float32) for x in qkv)
    with jax.default_matmul_precision("highest"):
        want = {lse: run(exact, "dot", lse) for lse in (True, False)}
    for name in names:
        lse = KERNELS[name].lse
        (out, row), gradients = run(qkv, name, lse)
        (exact_out, exact_row), exact_gradients = want[lse]
        assert out.dtype == jnp.dtype(dtype)
        near((out, gradients), (exact_out, exact_gradients), MOST[dtype])
        if lse:
            near(row, exact_row, MOST[dtype])


@pytest.mark.parametrize("stored", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "heads, kv_heads, dim, size, count", [(8, 2, 128, 16, 1), (8, 8, 64, 8, 3), (16, 1, 256, 64, 1)]
)
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(700)])
def test_pages(stored, heads, kv_heads, dim, size, count, mask):
    """Attention to pages by the kernel is that to gathered ones: rows of many lengths, one of them empty."""
    lengths = (1300, 0, 16, 1, 555, 64)
    row_pages = -(-max(lengths) // size) + 1
    shape = KVShape(slots=row_pages * size, kv_heads=kv_heads, head_dim=dim, rolling=False, values=True)
    pages = PageConfig(page_size=size, num_pages=len(lengths) * row_pages + 3)
    cache = build_pages(shape, 2, len(lengths), row_pages * size, CacheFormat.of(stored), pages)
    table = np.random.default_rng(0).permutation(pages.num_pages)[: len(lengths) * row_pages].reshape(len(lengths), -1)
    table = np.where(np.arange(row_pages) * size < np.asarray(lengths)[:, None], table, -1)
    cache = cache.with_tables(jnp.asarray(table, jnp.int32))
    places = np.arange(row_pages * size)[None]
    places = jnp.asarray(np.where(places < np.asarray(lengths)[:, None], places, -1), jnp.int32)
    new = (jnp.asarray(normal(2, *places.shape, kv_heads, dim, seed=i), jnp.bfloat16) for i in (1, 2))
    cache = jax.jit(lambda cache, key, value: cache.commit(NewKV(key, value), places))(cache, *new)
    positions = np.asarray(lengths)[:, None] + np.arange(count)
    positions = jnp.asarray(positions, jnp.int32)
    query = jnp.asarray(normal(*positions.shape, heads, dim, seed=9) * dim**-0.5, jnp.bfloat16)
    layout = ed.Layout.create(devices=[device()])
    execution = ed.Execution(layout=layout)

    @jax.jit
    def results(query, cache):
        past = cache.past(jnp.int32(1))
        return [
            attend_past(query, one, query_positions=positions, mask=mask, execution=execution)
            for one in (past, past.whole())
        ]

    text = results.lower(query, cache).as_text()
    assert "paged_attention" in text
    kernel, general = results(query, cache)
    near(kernel, general, MOST["bfloat16"])


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows, groups, inner, outer", [(8192, 16, 512, 768), (64, 128, 256, 384), (1000, 7, 200, 136)])
def test_grouped_products(rows, groups, inner, outer, kind):
    """Values and gradients by the kernel are those of a loop over blocks, of groups of any size, some empty."""
    random = np.random.default_rng(0)
    counts = random.multinomial(rows - rows // 8, random.dirichlet(np.full(groups, 0.3))).astype(np.int32)
    own = ed.Layout.create(devices=[device()]).backend
    chosen = choose_form(own, device(), jnp.dtype(kind), rows=rows, groups=groups, largest=groups * inner * outer)
    assert chosen.kind == "triton"
    loop = GroupedForm("blocks", block_rows(rows, groups))
    x, weight = random.normal(size=(rows + loop.block, inner)), random.normal(size=(groups, inner, outer)) * inner**-0.5
    x, weight = (jnp.asarray(a, kind) for a in (x, weight))
    out_bar = jnp.asarray(random.normal(size=(rows + loop.block, outer)), kind)

    @functools.partial(jax.jit, static_argnames="form")
    def run(x, weight, out_bar, form):
        out, pull = jax.vjp(lambda x, w: grouped_products(x, (w,), jnp.asarray(counts), form=form)[0], x, weight)
        to_x, to_weight = pull(out_bar)
        total = int(counts.sum())
        return out[:total], to_x[:total], to_weight

    with jax.default_matmul_precision("highest"):
        want = run(*(a.astype(jnp.float32) for a in (x, weight, out_bar)), loop)
    near(run(x, weight, out_bar, chosen), want, MOST[kind])


def recurrence_inputs(length, key_heads, heads, key_dim, value_dim, by_channel, seed=0):
    random = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(random.normal(size=(2, length, *shape)), jnp.float32)

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    decay = -jnp.abs(draw(heads, key_dim if by_channel else 1)) * 0.3
    resets = jnp.asarray(random.random((2, length)) < 0.01)
    return (unit(draw(key_heads, key_dim)), unit(draw(key_heads, key_dim)), draw(heads, value_dim), decay,
            jax.nn.sigmoid(draw(heads))), resets  # fmt: skip


@pytest.mark.parametrize("kind", ["delta rule", "by channel", "linear"])
@pytest.mark.parametrize("length", [257, 1024])
def test_recurrences(kind, length):
    """Values and gradients of what runs on this device are those of float32 products in chunks, across documents."""
    inputs, resets = recurrence_inputs(length, 4 if kind == "by channel" else 2, 4, 128, 64, kind == "by channel")
    if kind == "linear":
        inputs = (*inputs[:4], None)
    start = jnp.asarray(np.random.default_rng(3).normal(size=(2, 4, 128, 64)), jnp.float32)

    @functools.partial(jax.jit, static_argnames="platform")
    def run(inputs, start, platform):
        own = dict(platform="gpu", compute_capability=compute_capability(device())) if platform == "gpu" else {}

        def function(inputs, start):
            return delta_rule(*inputs, start, resets, **own)

        results, pull = jax.vjp(function, inputs, start)
        return results, pull(jax.tree.map(jnp.cos, results))

    with jax.default_matmul_precision("highest"):
        want = run(inputs, start, "cpu")
    near(run(inputs, start, "gpu"), want, 5e-3)


MODELS = {
    "llama3.2-1b": slice(2),
    "gemma3-1b": slice(4, 6),
    "qwen3-30b-a3b": slice(1),
    "gpt-oss-20b": slice(2),
    "deepseek2-16b": slice(2),
    "qwen3-next-80b": slice(1),
    "kimi-linear-48b-a3b": slice(1),
    "nemotron3-nano-30b-a3b": slice(2),
}


def first_step(config, dtype):
    """Loss and norm of gradients of two packed rows."""
    layout = ed.Layout.create(devices=[device()])
    model = ed.init(config, key=jax.random.key(0), layout=layout, precision=ed.Precision(compute=jnp.dtype(dtype)))
    trainer = Trainer.create(OptimizerConfig(learning_rate=1e-3), model, steps=3)
    positions, segments = packed(640)
    tokens = np.random.default_rng(0).integers(0, 512, (2, 640)).astype(np.int32)
    batch = ed.Batch(tokens=tokens, segment_ids=np.asarray(segments), positions=np.asarray(positions))
    _, metrics = trainer.step(trainer.init(model, key=jax.random.key(1)), batch)
    return float(metrics.loss), float(metrics.grad_norm)


@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_without_kernels(name, monkeypatch):
    """The first layers of a model of its own widths, of few words: bfloat16 by the kernels, float32 by XLA alone."""
    config = ed.get_config(name)
    config = dataclasses.replace(config, blocks=config.blocks[MODELS[name]], mtp=None, vocab_size=512)
    fast = first_step(config, "bfloat16")
    plain = dict(attention_kernels=(), pallas_gpu=False, paged_kernel=None)
    monkeypatch.setitem(backend.BACKENDS, "gpu", dataclasses.replace(backend.BACKENDS["gpu"], **plain))
    backend.backend_of.cache_clear()
    with jax.default_matmul_precision("highest"):
        exact = first_step(config, "float32")
    monkeypatch.undo()
    backend.backend_of.cache_clear()
    assert_allclose(fast[0], exact[0], rtol=1e-2)
    assert_allclose(fast[1], exact[1], rtol=5e-2)
