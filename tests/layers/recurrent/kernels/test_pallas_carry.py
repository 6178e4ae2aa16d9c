"""The Pallas kernel that carries states on GPUs, in interpret mode, against a recurrence token by token."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

import eqx_decoders as ed
from eqx_decoders.context import Execution
from eqx_decoders.layers.recurrent.kernels.pallas_carry import carry, fits
from eqx_decoders.layers.recurrent.scans import chunked_scan, recurrence, sharded_scan
from eqx_decoders.layers.recurrent.scans.chunked_scan import run_chunks
from eqx_decoders.layers.recurrent.scans.recurrence import delta_rule
from eqx_decoders.layers.recurrent.scans.sharded_scan import recur_on_mesh
from eqx_decoders.planning.gpus import GPU_OPTIONS, gpu_devices, gpus_of, tracing_for
from eqx_decoders.sharding.backend import backend_of
from eqx_decoders.sharding.chips import compute_capability
from tests.layers.recurrent.kernels.test_pallas_scan import inputs
from tests.layers.recurrent.scans.test_recurrence import documents, same
from tests.layers.recurrent.scans.test_sharded_scan import results


slow = pytest.mark.slow


def carried(*args, chunk=16):
    return run_chunks(*args, chunk, functools.partial(carry, interpret=True))


@pytest.mark.parametrize(
    ("length", "kind", "options"),
    [
        (67, "head", dict(value_dim=48)),
        pytest.param(67, "channel", {}, marks=slow),
        pytest.param(67, "linear", dict(key_heads=1, value_dim=32), marks=slow),
        pytest.param(16, "head", dict(key_heads=4), marks=slow),
        pytest.param(70, "channel", dict(key_heads=4), marks=slow),
        pytest.param(33, "linear channel", {}, marks=slow),
        pytest.param(3, "linear", {}, marks=slow),
        pytest.param(97, "head", dict(key_heads=1, heads=3), marks=slow),
    ],
)
@pytest.mark.parametrize("resets", [True, pytest.param(False, marks=slow)])
def test_carried_states_match_tokens(length, kind, options, resets):
    """Outputs, the last state and all gradients; several column tiles, with remainders."""
    args, starts = inputs(length, kind, **options), documents(length) if resets else None
    want = results(delta_rule, args, (starts,), (("chunk", None),))
    same(results(carried, args, (starts,)), want)


@pytest.mark.slow
def test_number_of_chunks_computed_together_is_limited(monkeypatch):
    """Also with a remainder of chunks."""
    monkeypatch.setattr(chunked_scan, "TOKENS_PER_STEP", 6 * 2 * 16)
    args = inputs(130, "channel")
    same(results(carried, args, (None,)), results(delta_rule, args, (None,), (("chunk", None),)))


def test_supported_shapes():
    def fitting(key_dim=128, value_dim=128, capability=(9, 0), length=64):
        key, value = (jax.ShapeDtypeStruct((1, length, 2, dim), jnp.float32) for dim in (key_dim, value_dim))
        found = []
        jax.eval_shape(lambda key, value: found.append(fits(key, value, 64, capability)), key, value)
        return found[0]

    assert fitting() and fitting(64, 192) and fitting(16, 16) and fitting(capability=(10, 0))
    assert not (fitting(96) or fitting(512) or fitting(8) or fitting(value_dim=8) or fitting(capability=(8, 0)))
    assert not fitting(capability=None) and not fitting(length=2**22) and fitting(length=2**21)


@slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("topology", ["h100:1x1", "b200:1x1"])
@pytest.mark.parametrize(
    ("key_heads", "heads", "value_dim", "decay_dim"), [(4, 8, 128, 1), (4, 4, 128, 128), (2, 16, 64, 1), (2, 2, 80, 1)]
)
def test_compiles_for_gpus(topology, key_heads, heads, value_dim, decay_dim):
    """Values and gradients: one kernel per direction, and no loop over chunks."""
    devices = gpu_devices(gpus_of(topology))
    if devices is None:
        pytest.skip("needs the compiler for GPUs (extra 'aot-gpu')")
    device = dict(platform="gpu", compute_capability=compute_capability(devices[0]))

    def both(query, key, value, decay, beta):
        def run(*args):
            return delta_rule(*args, **device)[0]

        out, back = jax.vjp(run, query, key, value, -jnp.abs(decay), beta)
        return out, back(out)

    def like(*shape):
        return jax.ShapeDtypeStruct((1, 1024, *shape), jnp.float32, sharding=SingleDeviceSharding(devices[0]))

    keys = like(key_heads, 128)
    with tracing_for(devices):
        lowered = jax.jit(both).lower(keys, keys, like(heads, value_dim), like(heads, decay_dim), like(heads))
    text = lowered.compile(compiler_options=GPU_OPTIONS).as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 2 and "carry_states" in text


@pytest.mark.parametrize("length", [2, 127])
def test_kernel_gets_local_arrays_on_a_mesh(length, monkeypatch):
    """Also with few tokens. XLA cannot partition the kernel."""
    layout = ed.Layout.create(fsdp=2, devices=jax.devices()[:2])
    monkeypatch.setattr(ed.Layout, "backend", backend_of("gpu", single=False))
    monkeypatch.setattr(ed.Layout, "platform", "gpu")
    monkeypatch.setattr(sharded_scan, "compute_capability", lambda device: (9, 0))
    seen = []
    monkeypatch.setattr(recurrence.pallas_carry, "fits", lambda key, *others: seen.append(key.shape) or False)
    args = inputs(length, "head")
    jax.eval_shape(lambda *args: recur_on_mesh(*args, execution=Execution(layout=layout)), *args)
    assert seen == [(1, length, 2, 8)]
