"""Gathering sharded arrays on the host: bit-equal for every sharding, with a limited buffer per device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import eqx_decoders as ed
from eqx_decoders.io.huggingface import gather as module
from eqx_decoders.io.huggingface.gather import on_first_host, pieces
from tests.compare import assert_array_equal
from tests.programs import tpu_devices


SPECS = [
    PartitionSpec(),
    PartitionSpec(None, None, "fsdp", "tensor"),
    PartitionSpec(None, "expert", "fsdp", "tensor"),
    PartitionSpec(None, ("expert", "fsdp"), None, "tensor"),
    PartitionSpec("expert", "tensor", ("fsdp",)),
    PartitionSpec("fsdp", "tensor", None, "expert"),
    PartitionSpec(None, "expert"),
]


@pytest.fixture(scope="module")
def mesh():
    return ed.Layout.create(expert=2, fsdp=2, tensor=2).mesh


def some_bits(shape) -> np.ndarray:
    """Return float32 values of all kinds, including NaNs with payloads, infinities and -0.0."""
    x = np.random.default_rng(0).integers(0, 2**32, shape, np.uint32)
    x.flat[:3] = 0x80000000, 0x7FC01234, 0xFF800000
    return x.view(np.float32)


def assemble(found, shape) -> np.ndarray:
    """Return the bits of the array that the pieces form."""
    out, seen = np.zeros(shape, np.uint32), np.zeros(shape, bool)
    for cut, piece in found:
        out[cut], seen[cut] = piece.view(np.uint32), True
    assert seen.all()
    return out


@pytest.mark.slow(fast=("700 bytes-P()",))
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", [700, 10, 10**9], ids="{} bytes".format)
def test_gathered_arrays_are_bit_equal(mesh, spec, size, monkeypatch):
    """With the program for several processes, and with one process that copies or shares its device buffers.

    Pieces have one row, several rows with a remainder, or all rows.
    """
    monkeypatch.setattr(module, "PIECE_BYTES", size)
    host = some_bits((2, 4, 6, 10))
    x = jax.device_put(host, NamedSharding(mesh, spec))
    for place in ((), (1,), (0, 3), (1, 0)):
        want = host[place].view(np.uint32)
        assert_array_equal(assemble(pieces(x, place), want.shape), want)
        assert_array_equal(assemble(module._from_all_devices(x, place), want.shape), want)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_HOST_PLATFORMS", ())
            assert_array_equal(assemble(pieces(x, place), want.shape), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_other_dtypes(mesh, dtype):
    host = np.arange(-60, 60).reshape(4, 5, 6).astype(jnp.dtype(dtype))
    x = jax.device_put(host, NamedSharding(mesh, PartitionSpec("expert", None, "fsdp")))
    assert_array_equal(on_first_host(x), host)
    ((_, *_),) = found = list(pieces(jnp.asarray(host), (2,)))
    assert_array_equal(found[0][1], host[2])
    for cut, piece in module._from_all_devices(x, (3,)):
        assert_array_equal(piece, host[3][cut])


def test_numpy_arrays(mesh):
    host = np.arange(6).reshape(2, 3)
    assert_array_equal(on_first_host(host), host)
    ((cut, piece),) = pieces(host, (1,))
    assert cut == () and piece.tolist() == [3, 4, 5]


# --- memory -----------------------------------------------------------------------------------------------------------


def buffer_sizes(leaf, lead: int):
    """Return the bytes of results and of temporaries that a device needs to gather a piece."""
    axis, step, _ = module.gathering_plan(leaf, lead)
    where = jax.ShapeDtypeStruct((lead + 1,), np.int32)
    memory = module.gathered_rows.lower(leaf, where, leaf.sharding, axis, step).compile().memory_analysis()
    return memory.output_size_in_bytes, memory.temp_size_in_bytes


@pytest.mark.slow(
    fast=(
        "0-P(None, None, 'fsdp', 'tensor')",
        "0-P(None, 'expert', 'fsdp', 'tensor')",
        "0-P(None, ('expert', 'fsdp'), None, 'tensor')",
    )
)
@pytest.mark.parametrize("spec", SPECS[1:])
@pytest.mark.parametrize("lead", [0, 1, 2])
def test_devices_need_memory_for_a_few_pieces(mesh, spec, lead, monkeypatch):
    """For every sharding, no device stores a complete layer, the experts of a layer, or a table."""
    monkeypatch.setattr(module, "PIECE_BYTES", 40_000)
    leaf = jax.ShapeDtypeStruct((4, 8, 64, 256), np.float32, sharding=NamedSharding(mesh, spec))
    one, temporary = buffer_sizes(leaf, lead)
    assert one <= 40_000 and temporary <= 3.1 * one  # the array has 2 MB


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [dict(fsdp=64), dict(fsdp=16, tensor=4), dict(fsdp=8, expert=8)])
def test_gathering_large_models_needs_little_memory(sizes):
    """Compiled for 64 TPUs: the largest weights of Llama 3 70B and of DeepSeek V3, whose expert layers have 15 GB."""
    layout = ed.Layout.create(**sizes, devices=tpu_devices("v5p:4x4x4"))
    model = ed.abstract(ed.get_config("deepseek3-671b" if "expert" in sizes else "llama3-70b"), layout=layout)
    mlp = model.scanned_layers[-1].unit[0].mlp
    leads = {"gate": 2, "down": 2} if "expert" in sizes else {"gate": 1, "down": 1}
    leaves = [(getattr(mlp, name), lead) for name, lead in leads.items()]
    for leaf, lead in [*leaves, (model.embedding.table, 0), (model.head.kernel, 0)]:
        one, temporary = buffer_sizes(leaf, lead)
        assert one + temporary < 0.6e9, (leaf.shape, lead)
        print(f"{leaf.shape} {leaf.sharding.spec}: {one / 1e6:.0f} MB, temporaries {temporary / 1e6:.0f} MB")
