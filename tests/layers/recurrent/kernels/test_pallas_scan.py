"""The Pallas kernels of recurrences, in interpret mode, equal a token-by-token loop; they compile for every TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_decoders as ed
from eqx_decoders.context import Execution
from eqx_decoders.layers.recurrent.kernels import pallas_scan
from eqx_decoders.layers.recurrent.kernels.pallas_scan import fits, run_kernel
from eqx_decoders.layers.recurrent.scans import recurrence
from eqx_decoders.layers.recurrent.scans.recurrence import delta_rule
from eqx_decoders.layers.recurrent.scans.sharded_scan import recur_on_mesh
from tests.layers.recurrent.scans.test_recurrence import documents, make, same
from tests.layers.recurrent.scans.test_sharded_scan import results
from tests.programs import tpu_devices


INTERPRETED = (("chunk", 16), ("interpret", True))
slow = pytest.mark.slow


def inputs(length, kind, **options):
    """Return random inputs. The linear recurrence, also with decay by channel, has no beta."""
    *args, state = make(length, kind.removeprefix("linear "), **options)
    return (*args[:4], None if kind.startswith("linear") else args[4], state)


@pytest.mark.parametrize(
    ("length", "kind", "options"),
    [
        pytest.param(33, "head", {}, marks=slow),
        pytest.param(33, "linear", dict(key_heads=1), marks=slow),
        (33, "channel", {}),
        pytest.param(97, "channel", dict(key_heads=4), marks=slow),
        pytest.param(33, "linear channel", {}, marks=slow),
        (16, "head", dict(key_heads=4)),
        pytest.param(3, "linear", {}, marks=slow),
        pytest.param(97, "head", dict(key_heads=1, heads=3), marks=slow),
    ],
)
@pytest.mark.parametrize("resets", [True, pytest.param(False, marks=slow)])
def test_kernels_match_tokens(length, kind, options, resets):
    args, starts = inputs(length, kind, **options), documents(length) if resets else None
    want = results(delta_rule, args, (starts,), (("chunk", None),))
    same(results(run_kernel, args, (starts,), INTERPRETED), want)


@slow
@pytest.mark.parametrize("kind", ["head", "linear"])
def test_several_programs_share_a_key_head(kind, monkeypatch):
    """The gradients of queries and keys are summed."""
    monkeypatch.setattr(pallas_scan, "_MAX_VALUE_COLUMNS", 256)
    args = inputs(20, kind, batch=1, key_heads=2, heads=8, value_dim=128)
    assert pallas_scan._heads_per_program(4, 128) == 2
    same(results(run_kernel, args, (None,), INTERPRETED), results(delta_rule, args, (None,), (("chunk", None),)))


@slow
@pytest.mark.parametrize("kind", ["head", "channel"])
def test_equal_keys_and_strong_decays(kind):
    """Powers of the triangular matrix are large, and sums of decays are long."""
    query, key, value, decay, beta, state = inputs(64, kind)
    args = query, jnp.broadcast_to(key[:, :1], key.shape), value, decay * 0, beta * 0 + 0.99, state
    want = results(delta_rule, args, (None,), (("chunk", None),))
    same(results(run_kernel, args, (None,), (("chunk", 64), ("interpret", True))), want, tolerance=2e-5)
    steep = decay * jnp.where(jnp.arange(64) % 3 == 0, 1e4, 0.0)[None, :, None, None]
    args = query, key, value, steep, beta, None
    want = results(delta_rule, args, (None,), (("chunk", None),))
    same(results(run_kernel, args, (None,), INTERPRETED), want)


@pytest.mark.slow
def test_half_precision_inputs_are_not_upcast_in_memory():
    """Values, queries and keys in bfloat16: outputs and gradients keep the dtypes, and sums are in float32."""
    *args, _ = inputs(20, "head", batch=1)
    halves = [x.astype(jnp.bfloat16) for x in args[:3]]
    wide = [x.astype(jnp.float32) for x in halves]

    @jax.jit
    def run(halves):
        out, pull = jax.vjp(lambda *x: run_kernel(*x, *args[3:], None, None, 16, True)[0], *halves)
        return out, *pull(out)

    @jax.jit
    def run_wide(wide, gradient):
        out, pull = jax.vjp(lambda *x: delta_rule(*x, *args[3:], chunk=None)[0], *wide)
        return out, *pull(gradient)

    got = run(halves)
    assert {x.dtype for x in got} == {jnp.dtype(jnp.bfloat16)}
    got = tuple(x.astype(jnp.float32) for x in got)
    same(got, run_wide(wide, got[0]), tolerance=2**-7)


@slow
@pytest.mark.parametrize("kind", ["head", "linear", "channel"])
def test_chunks_of_the_size_on_tpus(kind):
    """Documents that start at a chunk or within one, without an initial state."""
    *args, _ = inputs(200, kind, batch=1)
    starts = jnp.isin(jnp.arange(200), jnp.array([0, 128, 150]))[None]
    want = results(delta_rule, (*args, None), (starts,), (("chunk", None),))
    same(results(run_kernel, (*args, None), (starts,), (("interpret", True),)), want)


@slow
@pytest.mark.parametrize("kind", ["head", "linear", "channel"])
@pytest.mark.parametrize("sizes", [dict(data=4, tensor=2), dict(data=2, tensor=4), dict(context=4, tensor=2)])
def test_kernels_get_local_arrays_on_a_mesh(sizes, kind, monkeypatch):
    """With `recur_on_mesh`: value heads on two devices share a key head, and rows are sharded."""
    calls, layout = [], ed.Layout.create(**sizes)

    def call(*args):
        calls.append(args[2].shape)
        return run_kernel(*args, *dict(INTERPRETED).values())

    args, starts = inputs(128, kind), documents(128)
    want = results(delta_rule, args, (starts,), (("chunk", None),))
    monkeypatch.setattr(recurrence.pallas_scan, "fits", lambda *_: True)
    monkeypatch.setattr(recurrence.pallas_scan, "run_kernel", call)
    monkeypatch.setattr(type(layout), "platform", property(lambda _: "tpu"))
    run = functools.partial(recur_on_mesh, execution=Execution(layout=layout))
    same(results(run, args, (starts,)), want, tolerance=1e-5)
    assert {shape[2] for shape in calls} == {4 // sizes["tensor"]}


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        (dict(), True),
        (dict(value_dim=64, key_heads=1), True),
        (dict(length=127), False),
        (dict(key_dim=64), False),
        (dict(value_dim=64, key_heads=4), False),
        (dict(kind="channel"), True),
        (dict(kind="channel", value_dim=64, key_heads=1), False),
    ],
)
def test_supported_sizes(shape, wanted):
    shape = dict(length=128, kind="head", key_dim=128, value_dim=128) | shape
    _, key, value, decay, *_ = make(**shape)
    assert fits(key, value, decay) == wanted


def test_heads_per_program():
    wanted = {(2, 128): 2, (48, 64): 8, (14, 80): None, (16, 80): 8, (32, 100): None, (3, 64): None, (4, 256): 2}
    assert {each: pallas_scan._heads_per_program(*each) for each in wanted} == wanted


@slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize(
    "shape",
    [
        dict(key_heads=4, heads=8),
        dict(kind="linear", key_heads=2, heads=32, value_dim=64),
        dict(kind="channel", key_heads=8, heads=8),
    ],
    ids=["Gated DeltaNet", "Mamba-2", "Kimi delta attention"],
)
def test_compiles_for_tpus(topology, shape):
    """Values and gradients on a mesh: kernels without collectives, and memory only for states and tokens."""
    layout = ed.Layout.create(data=2, tensor=2, devices=tpu_devices(topology)[:4])
    shape = dict(kind="head", batch=2, key_dim=128, value_dim=128) | shape
    args = jax.eval_shape(functools.partial(make, 2048, **shape))[:-1]
    places = NamedSharding(layout.mesh, P("data", None, "tensor"))
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places) for x in args]

    def bars(*args):
        *args, out_bar = args
        beta = args[4] if len(args) > 4 else None
        run = functools.partial(recur_on_mesh, execution=Execution(layout=layout))
        out, pull = jax.vjp(lambda *x: run(*x, beta)[0], *args[:4])
        return out, pull(out_bar)

    program = jax.jit(bars).lower(*args, args[2]).compile()
    text, memory = program.as_text(), program.memory_analysis()
    assert text.count('"tpu_custom_call"') >= 2
    assert not any(f"{kind}(" in text for kind in ("all-reduce", "all-gather", "all-to-all", "collective-permute"))
    tokens = sum(np.prod(x.sharding.shard_shape(x.shape)) * 4 for x in args[:3])
    print(f"{topology}: {memory.temp_size_in_bytes / 2**20:.0f} MiB beside {tokens / 2**20:.0f} of tokens")
    assert memory.temp_size_in_bytes < 8 * tokens
