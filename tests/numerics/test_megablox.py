"""Where JAX's Pallas kernel for grouped products is taken, its tiles, and its programs for TPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from eqx_decoders.numerics import megablox
from eqx_decoders.numerics.einsum import grouped_products
from eqx_decoders.numerics.grouped_matmul import GroupedForm
from tests.programs import tpu_devices


@pytest.mark.parametrize(
    ("kind", "dtype", "wanted"),
    [("TPU v5", "bfloat16", False), ("TPU v6 lite", "bfloat16", True), ("TPU v5 lite", "float32", True),
     ("TPU7x", "float16", False), ("cpu", "float32", False)],
)  # fmt: skip
def test_devices_that_use_megablox(kind, dtype, wanted):
    assert megablox.fits(kind, jnp.dtype(dtype)) == wanted


def test_tiles_cover_all_features():
    for size in (5, 128, 1000, 1024, 1408, 2048, 7168):
        tile = megablox._tile_size(size, 1024)
        assert tile == size if size <= 1024 else tile % 128 == 0 and tile <= 1024
        assert -(-size // tile) == -(-size // 1024)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_no_row_is_multiplied_by_all_weights(topology, dtype):
    """Values and gradients on every generation: three products with as many operations as there are rows for."""
    devices = tpu_devices(topology)
    mesh = jax.sharding.Mesh(np.asarray(devices), ("data",))
    rows, groups, inner, outer = 8192, 16, 2048, 1408
    form = GroupedForm("ragged_dot" if topology == "v5p:2x2x1" else "megablox")

    def bars(x, weight, counts, out_bar):
        out, pull = jax.vjp(lambda x, w: grouped_products(x[0], (w,), counts, form=form)[0], x, weight)
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
