"""cuDNN attention: arguments of the calls, checked with XLA's version, and its selection by kernel="auto"."""

import dataclasses
import itertools
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.context import Execution, Promises
from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.attention.attend import run_attention
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.attention.kernels import cudnn
from eqx_decoders.layers.attention.kernels.call import AttentionCall, AttentionInputs, AttentionOptions
from eqx_decoders.layers.attention.kernels.registry import KERNELS, attend, select_kernel
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.mask import AttentionPositions, Bidirectional, Causal, Chunked, SlidingWindow
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.sharding.chips import compute_capability
from tests.errors import refused
from tests.layers.attention.kernels.test_registry import make, packed_places, plain, same, selection, weights_for
from tests.models import filled


MASKS = [Causal(), SlidingWindow(7), Chunked(9), Bidirectional(), Bidirectional(9)]
SPLIT = {"query_positions": plain(32, start=20), "key_positions": jnp.roll(plain(56).at[:, 3:6].set(-1), 5, 1)}
HOPPER: dict[str, Any] = dict(platform="gpu", compute_capability=(9, 0))
ORDERED = dict.fromkeys(("query_positions", "key_positions"), plain(40))


@pytest.fixture
def by_xla(monkeypatch):
    """Compute the same calls with XLA, also in float32."""
    table = dataclasses.replace(KERNELS["cudnn"], platforms=("cpu", "gpu"), unsupported=lambda call: None)
    monkeypatch.setitem(KERNELS, "cudnn", table)
    monkeypatch.setattr(cudnn, "IMPLEMENTATION", "xla")


def results(qkv, places, **options):
    def loss(qkv):
        out, _ = attend(*qkv, **places, **options)
        return (out * weights_for(qkv)[0]).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(qkv)
    return out, grads


@pytest.mark.slow(fast=("window",))
@pytest.mark.parametrize(
    ("mask", "places", "promises"),
    [
        (Causal(), ORDERED, ("aligned", "dense_positions")),
        (SlidingWindow(7), ORDERED, ("aligned", "dense_positions")),
        (Chunked(9), ORDERED, ("aligned", "dense_positions")),
        (Bidirectional(), ORDERED, ("aligned", "dense_positions")),
        (Causal(), packed_places(40), ("aligned",)),
        (SlidingWindow(7), packed_places(40, spans=True), ("aligned",)),
        (Bidirectional(9), packed_places(40), ("aligned",)),
        (Causal(), packed_places(40) | {"selected": selection(40, 40, 4)}, ()),
        (Causal(), SPLIT, ()),
    ],
    ids=[
        *("causal", "window", "chunked", "bidirectional"),
        *("packed", "packed spans", "packed bidirectional", "selected", "split"),
    ],
)
def test_arguments_describe_the_mask(by_xla, mask, places, promises):
    """Values and gradients equal those of `dot`, also for queries without visible keys."""
    qkv = make(places["query_positions"].shape[1], places["key_positions"].shape[1])
    found = results(qkv, places, mask=mask, kernel="cudnn", **dict.fromkeys(promises, True), needs_lse=False)
    same(found, results(qkv, places, mask=mask, kernel="dot"))


@pytest.mark.slow
def test_queries_without_visible_keys_give_zeros(by_xla):
    places = {"query_positions": plain(4), "key_positions": plain(6, start=4)}
    out, lse = attend(*make(4, 6), mask=Causal(), **places, kernel="cudnn", needs_lse=False)
    assert not out.any() and jnp.isnan(lse).all()


@pytest.mark.parametrize("places", [ORDERED, packed_places(40)], ids=["dense_positions", "packed"])
def test_arguments_of_the_cudnn_call(by_xla, monkeypatch, places):
    """A window if positions are the indices, otherwise a mask. In both cases, is_causal is set."""
    asked, product = [], jax.nn.dot_product_attention

    def record(*qkv, **options):
        asked.append(options)
        return product(*qkv, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    dense_positions = places is ORDERED
    options = dict(mask=SlidingWindow(7), kernel="cudnn", **HOPPER, aligned=True, needs_lse=False)
    attend(*make(40), **places, **options, dense_positions=dense_positions)
    (call,) = asked
    assert call["is_causal"] and call["scale"] == 1.0
    assert call["local_window_size"] == ((6, 0) if dense_positions else None)
    assert (call["mask"] is None) == dense_positions


# --- selection by "auto"
# ------------------------------------------------------------------------------------------------

USUAL = dict(
    mask=Causal(), **HOPPER, batch=1, length=4096, kv_length=4096, head_dim=128, value_dim=128,
    dtypes=(jnp.bfloat16,) * 3, aligned=True, local=True, needs_lse=False,
)  # fmt: skip


def exact_by_cudnn(call):
    """Return whether cuDNN computes a call exactly, according to its documentation.

    Lengths are even, and options that cuDNN does not have are unused. Masks beyond comparisons of indices are 16-bit
    arrays of at most 1 GiB.
    """
    if call.needs_lse or call.soft_cap or call.head_dim != call.value_dim or not call.local:
        return False
    if set(call.dtypes) not in ({jnp.bfloat16}, {jnp.float16}) or call.head_dim not in range(8, 257, 8):
        return False
    if not call.length % 2 == call.kv_length % 2 == 0:
        return False
    indices = call.dense_positions and not (call.segments or call.spans or call.selected_heads)
    if indices and (isinstance(call.mask, Causal | SlidingWindow) or call.mask == Bidirectional()):
        return True
    return call.batch * max(1, call.selected_heads) * call.length * call.kv_length * 2 <= 2**30


def supported_by_triton(call):
    """Return whether our Triton kernel supports a call: local, one dtype, no selection, at most 512 bytes per head."""
    wide = next(width for width in (64, 128, 256, 512) if width >= max(call.head_dim, call.value_dim))
    one = call.local and not call.selected_heads and len(set(call.dtypes)) == 1
    return one and wide * jnp.dtype(call.dtypes[0]).itemsize <= 512


VARIANTS = dict(
    mask=MASKS,
    positions=[
        dict(dense_positions=True), dict(), dict(segments=True), dict(dense_positions=True, segments=True),
        dict(spans=True),
        dict(aligned=False, kv_length=8192), dict(aligned=False, kv_length=4097), dict(aligned=False, length=1),
        dict(dense_positions=True, length=1023, kv_length=1023),
    ],
    sizes=[dict(), dict(head_dim=256, value_dim=256), dict(head_dim=264, value_dim=264), dict(value_dim=64),
           dict(head_dim=100, value_dim=100), dict(batch=33)],
    dtypes=[(jnp.bfloat16,) * 3, (jnp.float16,) * 3, (jnp.float32,) * 3, (jnp.bfloat16, jnp.bfloat16, jnp.float16)],
    rest=[dict(), dict(needs_lse=True), dict(soft_cap=2.0), dict(local=False), dict(selected_heads=1),
          dict(selected_heads=32)],
    platform=["gpu", "tpu", "cpu"],
)  # fmt: skip


@pytest.mark.slow
def test_auto_selects_an_exact_kernel_for_all_combinations():
    """The selected kernel supports the call. On GPU, it is cuDNN if cuDNN is exact, otherwise ours if supported."""
    taken = {}
    for mask, positions, sizes, dtypes, rest, platform in itertools.product(*VARIANTS.values()):
        call = AttentionCall(
            **{**USUAL, "mask": mask, "dtypes": dtypes, "platform": platform, **positions, **sizes, **rest}
        )
        name = select_kernel(call)
        assert KERNELS[name].lacks(call) is None, (name, call)
        taken.setdefault(platform, set()).add(name)
        short = min(call.length, call.kv_length) < (32 if platform == "cpu" else 512)
        assert (name == "dot") == short
        if platform == "gpu" and not short:
            other = "triton" if supported_by_triton(call) else "chunked"
            assert name == ("cudnn" if exact_by_cudnn(call) else other), call
    assert taken == {
        "gpu": {"dot", "cudnn", "triton", "chunked"},
        "tpu": {"dot", "interval", "chunked"},
        "cpu": {"dot", "chunked"},
    }


@pytest.mark.parametrize(
    ("device", "capability", "largest"),
    [("9.0", (9, 0), 256), ("12.0", (12, 0), 256), ("8.6", (8, 6), 128), ("gfx942", None, 0), (None, None, 0)],
)
def test_maximum_head_dim_depends_on_the_device(device, capability, largest):
    """The compute capability determines the maximum. Devices of other vendors do not use cuDNN."""
    kind = type("Device", (), {} if device is None else {"compute_capability": device})
    assert compute_capability(kind()) == capability
    for dim in (64, 128, 192, 256, 264):
        sizes = dict(dense_positions=True, head_dim=dim, value_dim=dim, compute_capability=capability)
        assert select_kernel(AttentionCall(**USUAL | sizes)) == ("cudnn" if dim <= largest else "chunked")


def test_platform_is_read_from_the_mesh(monkeypatch):
    """The devices of the mesh can differ from the devices of the process, for compilation."""
    calls = []
    layout = ed.Layout.create(data=2, devices=jax.devices()[:2])
    device = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(ed.Layout, "device", property(lambda layout: device))
    monkeypatch.setattr(
        "eqx_decoders.layers.attention.kernels.registry.select_kernel", lambda call: calls.append(call) or "dot"
    )
    shape, ids = (jax.ShapeDtypeStruct((2, 6, *more), dtype) for more, dtype in (((2, 8), "float32"), ((), "int32")))
    inputs = AttentionInputs(shape, shape, shape, AttentionPositions(ids, ids))
    options, execution = AttentionOptions(mask=Causal()), Execution(layout=layout)
    jax.eval_shape(lambda inputs: run_attention(inputs, options, execution), inputs)
    assert {(call.platform, call.compute_capability) for call in calls} == {("gpu", (9, 0))}


def test_refusals():
    def call(dtype=jnp.bfloat16, dim=8, length=6, **options):
        places = dict.fromkeys(("query_positions", "key_positions"), plain(length))
        kinds = dict(kernel="cudnn", needs_lse=False) | HOPPER | options
        return attend(*make(length, dim=dim, value_dim=dim, dtype=dtype), mask=Causal(), **places, **kinds)

    for name, options in {
        "log-sum-exp": dict(needs_lse=True),
        "soft cap": dict(soft_cap=2.0),
        "'cpu'": dict(platform="cpu"),
        "float16": dict(dtype=jnp.float32),
        "head_dim=12": dict(dim=12),
        "length": dict(length=5),
        "compute capability": dict(compute_capability=None),
        f"{4 * 16386**2} bytes": dict(length=16386),
    }.items():
        with refused(ConfigError, "kernel='cudnn'", name, "dot", "chunked"):
            call(**options)
    with refused(ConfigError, "dense_positions=True", "aligned=True"):
        call(dense_positions=True)


# --- calls of the layers --------------------------------------------------------------------------------------------


@pytest.mark.slow(fast=("sinks",))
@pytest.mark.parametrize("mixer", ["attention", "sinks", "latent"])
def test_layers_describe_their_attention_calls(monkeypatch, mixer):
    """Positions are dense if none are given. The log-sum-exp is needed with a past or a sink."""
    options: dict[str, Any] = dict(head_dim=8, num_kv_heads=1, num_heads=2)
    kinds = {"attention": AttentionConfig(**options), "sinks": AttentionConfig(**options, sinks=True)}
    kinds["latent"] = LatentAttentionConfig(num_heads=2, q_rank=None, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8)
    block = BlockConfig(mixer=kinds[mixer], mlp=None)
    config = DecoderConfig(vocab_size=16, embed_dim=16, blocks=(block,), final_norm=None)
    calls, tokens = [], jnp.zeros((2, 6), jnp.int32)
    monkeypatch.setattr(
        "eqx_decoders.layers.attention.kernels.registry.select_kernel", lambda call: calls.append(call) or "dot"
    )

    def said(order="plain", **given):
        model = filled(config, context_order=order)
        eqx.filter_eval_shape(lambda model: model.run(tokens, **given), model)
        found = [(call.dense_positions, call.aligned, call.needs_lse) for call in calls]
        calls.clear()
        return found

    reads = mixer == "sinks"
    assert said() == [(True, True, reads)]
    assert said(order="zigzag") == [(False, False, reads)]
    assert said(segment_ids=tokens) == said(positions=tokens) == [(False, True, reads)]
    cache = ed.init_cache(config, 2, 8)
    assert said(cache=cache, promises=Promises(cache_is_empty=True)) == [(False, True, reads)]
    assert said(cache=cache) == [(False, True, True), (False, False, True)]
