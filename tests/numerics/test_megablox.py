"""The Pallas kernel for grouped products, interpreted, against a loop in NumPy; and where it is taken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from eqx_decoders.numerics import grouped_matmul, megablox
from eqx_decoders.numerics.einsum import grouped_products
from tests.compare import assert_close
from tests.numerics import test_grouped_matmul
from tests.programs import tpu_devices


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(grouped_matmul, "has_kernel", lambda dtype: True)
    monkeypatch.setattr(grouped_matmul, "kernel_product", lambda _, *arrays: megablox.kernel_product(True, *arrays))


@pytest.mark.parametrize("counts", [(19, 0, 1, 12), (0, 0, 0, 0), pytest.param((0, 0, 7, 0), marks=pytest.mark.slow)])
def test_values_and_gradients_are_those_of_a_loop(interpreted, counts):
    test_grouped_matmul.test_values_and_gradients_are_those_of_a_loop(counts, None)


def test_half_precision_sums_in_single(interpreted):
    test_grouped_matmul.test_half_precision_sums_in_single_and_keeps_the_dtype_of_weights(None)


@pytest.mark.slow
def test_a_weight_in_parts(interpreted):
    test_grouped_matmul.test_a_weight_in_parts_is_that_of_its_merged_one(None)


def test_several_tiles_with_remainders(interpreted, monkeypatch):
    """Groups that begin within a tile of rows, and features of which the last tile has fewer."""
    monkeypatch.setattr(megablox, "_even", functools.partial(lambda even, size, most: even(size, 128), megablox._even))
    counts, rows = (100, 0, 1, 130), 300
    x, weight, g = (
        test_grouped_matmul.draws(*shape, seed=i) for i, shape in enumerate([(rows, 200), (4, 200, 136), (rows, 136)])
    )
    out, back = jax.vjp(
        lambda x, w: grouped_products(x, (w,), jnp.asarray(counts), block=None)[0], *map(jnp.asarray, (x, weight))
    )
    to_x, to_weight = back(jnp.asarray(g))
    inside = (np.arange(rows) < sum(counts))[:, None]
    assert_close(out, np.where(inside, test_grouped_matmul.loop(x, weight, counts), 0), units=256)
    assert_close(to_x, np.where(inside, test_grouped_matmul.loop(g, weight.transpose(0, 2, 1), counts), 0), units=256)
    ends = np.cumsum(counts)
    parts = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    assert_close(to_weight, np.stack([x[s].astype(np.float64).T @ g[s] for s in parts]), units=256)


@pytest.mark.parametrize(
    ("kind", "dtype", "wanted"),
    [("TPU v5", "bfloat16", False), ("TPU v6 lite", "bfloat16", True), ("TPU v5 lite", "float32", True),
     ("TPU7x", "float16", False), ("cpu", "float32", False)],
)  # fmt: skip
def test_who_wants_it(monkeypatch, kind, dtype, wanted):
    monkeypatch.setattr(megablox, "device_kind", lambda: kind)
    assert megablox.has_kernel(jnp.dtype(dtype)) == wanted


def test_tiles_hold_all_features():
    for size in (5, 128, 1000, 1024, 1408, 2048, 7168):
        tile = megablox._even(size, 1024)
        assert tile == size if size <= 1024 else tile % 128 == 0 and tile <= 1024
        assert -(-size // tile) == -(-size // 1024)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_no_row_is_multiplied_by_all_weights(topology, dtype):
    """Values and gradients on every generation: three products with as many operations as there are rows for."""
    devices = tpu_devices(topology)
    mesh = jax.sharding.Mesh(np.asarray(devices), ("data",))
    rows, groups, inner, outer = 8192, 16, 2048, 1408

    def bars(x, weight, counts, out_bar):
        out, pull = jax.vjp(lambda x, w: grouped_products(x[0], (w,), counts, block=None)[0], x, weight)
        return out[None], *pull(out_bar[0])

    def shaped(*dims, kind=dtype, spec=P("data")):
        return jax.ShapeDtypeStruct(dims, kind, sharding=NamedSharding(mesh, spec))

    count = len(devices)
    x, out_bar = shaped(count, rows, inner), shaped(count, rows, outer)
    weight, counts = shaped(groups, inner, outer, spec=P()), shaped(groups, kind=jnp.int32, spec=P())
    specs = P("data"), P(), P(), P("data")
    split = jax.shard_map(bars, mesh=mesh, in_specs=specs, out_specs=(P("data"), P("data"), P("data")), check_vma=False)
    program = jax.jit(split).lower(x, weight, counts, out_bar).compile()
    cost = program.cost_analysis()
    assert cost["flops"] < 1.1 * 3 * 2 * rows * inner * outer
    text = program.as_text()
    assert ("ragged-dot" in text) == (topology == "v5p:2x2x1") and text.count('"tpu_custom_call"') >= 3
    print(f"{topology} {dtype.__name__}: {program.memory_analysis().temp_size_in_bytes / 2**20:.0f} MiB, "
          f"{cost['bytes accessed'] / 1e9:.2f} GB")  # fmt: skip
