"""Our flash kernels in interpret mode: values and gradients equal the plain kernel, and invisible tiles are skipped."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.attention.kernels import (
    pallas_flash,
    pallas_flash_gpu,
    pallas_flash_schedule,
    pallas_flash_tiles,
    pallas_flash_tpu,
)
from eqx_decoders.layers.attention.kernels.call import AttentionCall, AttentionInputs
from eqx_decoders.layers.attention.kernels.registry import EMPTY, KERNELS, attend
from eqx_decoders.layers.attention.kernels.selection import Selection, as_mask, pack_groups
from eqx_decoders.layers.attention.kernels.tile_sizes import SAFE, TILE_SIZES, TileSizes, tile_sizes
from eqx_decoders.layers.mask import AttentionPositions, Bidirectional, Causal, Chunked, SlidingWindow, Spans, visible
from eqx_decoders.planning.gpus import GPU_OPTIONS, gpu_devices, gpus_of
from eqx_decoders.sharding.chips import compute_capability
from tests.compare import assert_array_equal
from tests.errors import assert_names, refused
from tests.layers.attention.kernels.test_registry import all_of, make, packed_places, plain, same, weights_for
from tests.programs import tpu_devices


# head_dim of keys, head_dim of values, and number of heads
DIMS = [(64, 64, 4), (128, 128, 4), (256, 256, 4), (192, 128, 16)]
NAMES = ("query_positions", "key_positions", "query_segments", "key_segments", "query_spans")


TILES_OF_GPUS = pallas_flash_gpu.tile_of
KERNEL = pytest.mark.parametrize("kernel", ["interval", "triton"])
slow = pytest.mark.slow


def interpret(patch):
    """Run the kernels on CPU with small tiles."""
    for name in ("interval", "triton"):
        patch.setitem(
            KERNELS,
            name,
            dataclasses.replace(KERNELS[name], platforms=("cpu", "gpu", "tpu"), unsupported=lambda call: None),
        )
    patch.setattr(pallas_flash_tpu, "tile_sizes", lambda: TileSizes(held=256, streamed=128))
    patch.setattr(pallas_flash_gpu, "_PADDED_TILE", TileSizes(held=64, streamed=64))
    small = {"forward": (64, 16), "queries": (32, 16), "keys": (32, 32)}
    patch.setattr(pallas_flash_gpu, "tile_of", lambda part, *_: pallas_flash_gpu.Tile(*small[part]))


@pytest.fixture(autouse=True, scope="module")
def interpreted():
    patch = pytest.MonkeyPatch()
    interpret(patch)
    yield
    patch.undo()
    all_of.clear_cache()


def kernel_and_dot(kernel, qkv, places, **options):
    weights = weights_for(qkv)
    return tuple(all_of(qkv, weights, places, kernel=name, **options) for name in (kernel, "dot"))


def zigzag(places, order):
    return jax.tree.map(lambda x: x[:, order], places)


def layouts(length):
    """Yield positions: packed rows with padding, another order, huge values, and rows without visible keys."""
    places = packed_places(length)
    yield places
    halves = np.concatenate([np.arange(length // 4), np.arange(3 * length // 4, length)])
    yield zigzag(places, np.concatenate([halves, np.setdiff1d(np.arange(length), halves)]))
    far = {name: x + 2**30 if "segment" in name else jnp.where(x < 0, x, x + 2**30) for name, x in places.items()}
    yield far
    empty = {name: x.at[0].set(-1).at[1, 100:400].set(-1) if "position" in name else x for name, x in places.items()}
    yield empty


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "mask", "soft_cap"),
    [
        ("interval", SlidingWindow(70), 2.0),
        ("triton", SlidingWindow(70), 2.0),
        *((kernel, Causal(), None) for kernel in ("interval", "triton")),
        *((kernel, Chunked(100), None) for kernel in ("interval", "triton")),
        *((kernel, Bidirectional(), 2.0) for kernel in ("interval", "triton")),
    ],
)
def test_flash_matches_dot(kernel, mask, soft_cap):
    """An odd length, three query heads per key head, values narrower than keys."""
    qkv = make(421, heads=3, kv_heads=1, value_dim=5)
    for places in layouts(421):
        same(*kernel_and_dot(kernel, qkv, places, mask=mask, soft_cap=soft_cap))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "spans"),
    [
        ("interval", True),
        ("interval", False),
        ("triton", True),
        ("triton", False),
    ],
)
def test_keys_of_a_rolling_cache(kernel, spans):
    """Slots in any order, some of them empty, without segments; spans that include later tokens."""
    qkv = make(140, 333, heads=4, kv_heads=2, value_dim=11)
    order = np.random.default_rng(0).permutation(333)
    slots = np.where(order % 7 == 3, -1, order)[None].repeat(2, 0)
    places = {"query_positions": plain(140, start=150), "key_positions": jnp.asarray(slots, jnp.int32)}
    if spans:
        first = jnp.where(plain(140) < 60, 190, jnp.where(plain(140) < 70, -1, 225))
        places["query_spans"] = Spans(jnp.where(first < 0, -1, first + 60))
    same(*kernel_and_dot(kernel, qkv, places, mask=SlidingWindow(40)))


def groups_of(length, count, seed=5):
    """Return the group of each key: groups are runs of tokens; some tokens belong to no group."""
    random = np.random.default_rng(seed)
    runs = np.sort(random.integers(0, length, (2, 3 * count - 1)), axis=1)
    numbers = random.permutation(3 * count) % count
    return numbers[(np.arange(length)[None, :, None] >= runs[:, None]).sum(2)] - (np.arange(length) % 50 == 7) * 100


def near_selection(kind, length, heads):
    """Select keys near half of the query's index and some first keys, or groups; half of the heads select few."""
    random = np.random.default_rng(3)
    if kind == "keys":
        here, there = np.arange(length)[:, None], np.arange(length)[None]
        near = np.abs(there - here // 2) < 30 + 2 * np.arange(heads)[:, None, None]
        return jnp.asarray((near | (there < 3)) & (random.random((2, heads, length, length)) < 0.5))
    chosen = random.random((2, heads, length, 40)) < 0.3
    chosen[:, ::2] &= np.arange(40)[None] == np.arange(length)[:, None] // 64
    chosen[0, :, 130:260] = False  # these queries select nothing
    groups = np.where(np.arange(length) < 256, groups_of(length, 40), -1)
    return Selection(pack_groups(jnp.asarray(chosen)), jnp.asarray(groups, jnp.int32))


@pytest.mark.slow(fast=("groups-1-True",))
@pytest.mark.parametrize(
    ("kind", "heads", "fits"),
    [
        ("groups", 6, False),
        ("keys", 1, True),
        ("keys", 6, False),
        ("groups", 1, True),
        ("groups", 6, True),
    ],
)
def test_selections(kind, heads, fits, monkeypatch):
    """Keys and groups of keys, for all heads together or per head, with three query heads per key head and a soft cap.

    Tables that are too large are processed row by row.
    """
    if not fits:
        monkeypatch.setattr(pallas_flash_tpu, "SCALAR_BYTES", 0)
    qkv, chosen = make(421, heads=6, value_dim=5), near_selection(kind, 421, heads)
    places = packed_places(421) | {"selected": chosen}
    weights, options = weights_for(qkv), dict(mask=Causal(), soft_cap=2.0)
    dot = all_of(qkv, weights, places, kernel="dot", **options)
    poisoned = (qkv[0], *(x.at[:, 256:].set(jnp.nan) for x in qkv[1:]))  # keys that are never selected
    same(all_of(poisoned, weights, places, kernel="interval", **options), dot)
    dense = all_of(qkv, weights, packed_places(421), kernel="dot", **options)
    assert all(
        np.abs(a - b).max() > 0.1 for a, b in zip(jax.tree.leaves(dense[1]), jax.tree.leaves(dot[1]), strict=True)
    )


@functools.partial(jax.jit, static_argnames=("keys_held",))
def listed(places, chosen, *, keys_held):
    """Return the listed tiles [batch, heads, queries, keys], the visible tiles, and whether all indices are valid."""
    sizes = TileSizes(held=256, streamed=128)
    plan = pallas_flash_tiles.FlashPlan(
        mask=Causal(),
        soft_cap=None,
        segments=True,
        interpret=True,
        query_tiles=sizes.fit(640),
        key_tiles=sizes.fit(640, whole_words=True),
        selected_heads=(bits := jax.tree.leaves(chosen)[0]).shape[1],
        group_words=bits.shape[3] if isinstance(chosen, Selection) else 0,
    )
    mask_inputs = pallas_flash._mask_inputs(plan, AttentionInputs(*[None] * 3, AttentionPositions(**places), chosen))
    rows = pallas_flash._mask_arrays(plan, mask_inputs)
    blocks = (128, 256) if keys_held else (256, 128)
    schedule = pallas_flash_schedule.make_schedule(plan.segments, *rows[:2], *blocks, keys_held)
    tiles = pallas_flash_schedule.selected_tiles(plan.by_lanes, rows[2], rows[1][:, -1], *blocks)
    lists, counts = pallas_flash_schedule.list_tiles(schedule, tiles, keys_held)
    numbers = jnp.stack([lists & 0xFFFF, lists >> 16], -1).reshape(*lists.shape[:3], -1)
    streamed = tiles.shape[2 if keys_held else 3]
    there = jnp.arange(numbers.shape[3])[None, None, None] < counts[..., None]
    found = jnp.where(there[..., None], jax.nn.one_hot(numbers, streamed, dtype=jnp.int32), 0).sum(3)
    seen = pallas_flash_schedule.may_see([x[:, :, None] for x in schedule.queries], [x[:, None] for x in schedule.keys])
    return found.swapaxes(2, 3) if keys_held else found, seen, jnp.max(numbers) < streamed


@pytest.mark.slow(fast=("keys-1-False",))
@pytest.mark.parametrize("keys_held", [False, True])
@pytest.mark.parametrize(("kind", "heads"), [("keys", 1), ("groups", 6)])
def test_lists_only_tiles_with_selected_pairs(kind, heads, keys_held):
    """Compared with NumPy: each visible and selected tile is listed exactly once."""
    chosen, places = near_selection(kind, 640, heads), packed_places(640)
    found, seen, inside = map(np.asarray, listed(places, chosen, keys_held=keys_held))
    queries, keys = (128, 256) if keys_held else (256, 128)
    mask = np.pad(as_mask(chosen, 640), [(0, 0)] * 2 + [(0, -640 % 256)] * 2)
    some = mask.reshape(2, heads, 768 // queries, queries, 768 // keys, keys).any((3, 5))
    assert_array_equal(found, some & seen[:, None])
    assert inside and found.sum() < 0.95 * heads * seen.sum() and found.sum((2, 3)).min() > 0


def test_tile_lists_beyond_the_scalar_memory_are_refused():
    """Very long rows with a selection for each of many heads."""
    shape = dict(batch=1, length=2**16, kv_length=2**16, head_dim=128, value_dim=128, dtypes=(jnp.bfloat16,) * 3)
    call = AttentionCall(mask=Causal(), **shape, selected_heads=1, platform="tpu", local=True)
    assert pallas_flash_tpu.unsupported(call) is None
    many = dataclasses.replace(call, selected_heads=128, group_words=4)
    assert_names(pallas_flash_tpu.unsupported(many) or "", "tiles", f"> {pallas_flash_tpu.SCALAR_BYTES} bytes")
    assert pallas_flash_tpu.unsupported(dataclasses.replace(call, group_words=512)) is None
    wide = dataclasses.replace(call, group_words=2**15)
    assert_names(pallas_flash_tpu.unsupported(wide) or "", "words", "bytes")


def test_runs_sequences_separately_if_tables_do_not_fit(monkeypatch):
    monkeypatch.setattr(pallas_flash_tpu, "SCALAR_BYTES", 0)
    same(*kernel_and_dot("interval", make(24), packed_places(24), mask=Causal()))


@slow
@KERNEL
def test_one_token(kernel):
    places = {"query_positions": plain(1, start=4), "key_positions": plain(9)}
    same(*kernel_and_dot(kernel, make(1, 9), places, mask=Causal()))


@slow
@pytest.mark.parametrize("dims", [(16, 16), (24, 16)])
def test_head_dims_of_triton(dims):
    """Powers of two, which need no padding, and the head dims of latent attention."""
    dim, value_dim = dims
    qkv = make(140, dim=dim, value_dim=value_dim)
    same(*kernel_and_dot("triton", qkv, packed_places(140), mask=Causal()))


@slow
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("interval", jnp.bfloat16), ("triton", jnp.bfloat16), ("triton", jnp.float16)]
)
def test_half_precision_is_close_to_float32(kernel, dtype):
    """One document whose keys are padded to full tiles. The padding is invisible."""
    qkv, places = make(270), dict.fromkeys(NAMES[:2], plain(270))
    places |= {"selected": near_selection("groups", 270, 4)} if kernel == "interval" else {}
    low, options = tuple(x.astype(dtype) for x in qkv), dict(mask=Causal(), soft_cap=5.0)
    near = all_of(low, weights_for(qkv), places, kernel=kernel, **options)
    exact = all_of(tuple(x.astype(jnp.float32) for x in low), weights_for(qkv), places, kernel="dot", **options)
    assert near[0][0].dtype == dtype and near[0][1].dtype == jnp.float32
    same(jax.tree.map(lambda x: x.astype(jnp.float32), near), exact, tolerance=2e-2)


NONE, START, NEXT, FAR = (np.full(256, -1), *(np.arange(256) + first for first in (0, 256, 1000)))
# For each row: positions and segments of queries and of keys, 256 tokens per entry.
ROWS = {
    "padding at the end": ([START, NEXT, NONE], [0, 0, 0], [START, NEXT, NONE], [0, 0, 0]),
    "another document": ([START, NEXT, NONE], [2, 2, 2], [START, START, NEXT], [1, 2, 2]),
    "the future": ([START, NONE, NEXT], [0, 0, 0], [START, NEXT, FAR], [0, 0, 0]),
    "a hole": ([NEXT, START, NONE], [0, 0, 0], [START, FAR, NEXT], [0, 0, 0]),
    "nothing": ([FAR, START, NEXT], [1, 1, 1], [START, NEXT, FAR], [2, 2, 0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["interval", "triton"])
def test_does_not_read_invisible_tiles(kernel):
    """NaN in invisible tiles changes no bit, for every reason that makes a tile invisible."""
    parts = zip(*ROWS.values(), strict=True)
    rows = [np.stack([np.concatenate([np.broadcast_to(x, 256) for x in row]) for row in part]) for part in parts]
    query_positions, query_segments, key_positions, key_segments = (jnp.asarray(x, jnp.int32) for x in rows)
    places = dict(zip(NAMES, (query_positions, key_positions, query_segments, key_segments), strict=False))
    seen = np.asarray(visible(Causal(), *places.values()))
    unseen, asleep = ~seen.any(1), ~seen.any(2)
    assert (unseen.sum(1) // 256).tolist() == [1, 1, 1, 1, 3] and (asleep.sum(1) // 256).tolist() == [1, 1, 1, 1, 3]
    qkv = make(768, heads=2, kv_heads=1, value_dim=5, batch=len(ROWS))
    poisons = zip(qkv, (asleep, unseen, unseen), strict=True)
    poisoned = tuple(jnp.where(rows[:, :, None, None], jnp.nan, x) for x, rows in poisons)
    runs = [all_of(x, weights_for(qkv), places, mask=Causal(), kernel=kernel) for x in (qkv, poisoned)]
    for a, b in zip(*map(jax.tree.leaves, runs), strict=True):
        assert_array_equal(a, b)
    (out, lse), (query_bar, *bars) = runs[1]
    assert not out[asleep].any() and (lse[asleep] == EMPTY).all() and not query_bar[asleep].any()
    assert not any(bar[unseen].any() for bar in bars) and all(bar[~unseen].all() for bar in bars)


@functools.partial(jax.jit, static_argnames=("mask", "keys_held"))
def schedule(places, *, mask, keys_held):
    """Return the tiles that are read, that are visible, that need no mask, and that are in the unmasked run."""
    plan = pallas_flash_tiles.FlashPlan(
        mask=mask,
        soft_cap=None,
        segments=True,
        interpret=True,
        query_tiles=TileSizes(held=32, streamed=16),
        key_tiles=TileSizes(held=32, streamed=16),
    )
    sizes = (16, 32) if keys_held else (32, 16)
    rows = pallas_flash.intervals_and_positions(plan, AttentionPositions(**places))
    tables = pallas_flash_schedule.make_schedule(plan.segments, *rows, *sizes, keys_held)
    (start, count), queries, keys = tables
    first, stop = pallas_flash_schedule.unmasked_run(tables, keys_held)
    tiles = [x[:, :, None] for x in queries], [x[:, None, :] for x in keys]
    sees, sees_all = pallas_flash_schedule.may_see(*tiles), pallas_flash_schedule.all_see(*tiles)

    def between(start, end):
        index = jnp.arange(sees.shape[1 if keys_held else 2])[None, None]
        tiles = (index >= start[:, :, None]) & (index < end[:, :, None])
        return tiles.swapaxes(1, 2) if keys_held else tiles

    ordered = (start <= first) & (first <= stop) & (stop <= start + count)
    return between(start, start + count), sees, sees_all, between(first, stop), ordered


def first_run(whole):
    """Return the first run of consecutive complete tiles of each row."""
    run = np.zeros_like(whole)
    for index in np.ndindex(*whole.shape[:2]):
        at = whole[index].argmax()
        while at < whole.shape[2] and whole[index][at]:
            run[index][at], at = True, at + 1
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        SlidingWindow(40),
        Chunked(32),
        Bidirectional(),
        Bidirectional(48),
    ],
)
def test_schedule_contains_the_visible_tiles(mask):
    """Compared with NumPy: no visible tile is missing, and fully visible tiles are recognized."""
    for at, places in enumerate(layouts(416)):
        seen = np.asarray(visible(mask, *(places[name] for name in NAMES[:4])))
        for keys_held in (False, True):
            queries, keys = (16, 32) if keys_held else (32, 16)
            tiles = seen.reshape(2, 416 // queries, queries, 416 // keys, keys)
            some = tiles.any((2, 4))
            read, sees, sees_all, run, ordered = map(np.asarray, schedule(places, mask=mask, keys_held=keys_held))
            assert_array_equal(sees_all, tiles.all((2, 4)))
            turn = (0, 2, 1) if keys_held else (0, 1, 2)
            assert_array_equal(run.transpose(turn), first_run(sees_all.transpose(turn)))
            assert ordered.all()
            assert (read & sees)[some].all()
            if at == 0:  # packed rows in order: only visible tiles are read
                assert_array_equal(sees, some)
                assert_array_equal(read, some)


def layers(remat, kernel):
    """Two layers in a scan."""

    def loss(qkv, places):
        def layer(x, _):
            out, lse = attend(jnp.sin(x), *qkv[1:], mask=Causal(), kernel=kernel, **places)
            return jnp.sin(out) + lse[..., None], None

        return jax.lax.scan(remat(layer), qkv[0], None, length=2)[0].sum()

    return loss


@pytest.mark.parametrize("kernel", ["interval", pytest.param("triton", marks=slow)])
def test_context_saves_the_forward_kernel(kernel):
    qkv, places = make(24), packed_places(24)
    policies = {
        "context": jax.checkpoint_policies.save_only_these_names("context"),
        "nothing": jax.checkpoint_policies.nothing_saveable,
    }
    remats = {"plain": lambda f: f}
    remats |= {k: functools.partial(jax.checkpoint, policy=v, prevent_cse=False) for k, v in policies.items()}
    calls = {
        name: str(jax.make_jaxpr(jax.grad(layers(remat, kernel)))(qkv, places)).count("pallas_call[")
        for name, remat in remats.items()
    }
    assert calls == {"plain": 3, "context": 3, "nothing": 4}


def test_auto_selects_flash_kernels_that_support_the_call(monkeypatch):
    """The call has local and long arrays; no float16 on TPU; no selection on GPU."""
    chosen = []

    def spy(name):
        return lambda inputs, call: chosen.append(name) or (inputs.query, inputs.query[..., 0].astype(jnp.float32))

    table = {name: dataclasses.replace(kernel, function=spy(name)) for name, kernel in KERNELS.items()}
    table["interval"] = dataclasses.replace(table["interval"], platforms=("tpu",))
    unsupported = pallas_flash_gpu.unsupported
    table["triton"] = dataclasses.replace(table["triton"], platforms=("gpu",), unsupported=unsupported)
    monkeypatch.setattr("eqx_decoders.layers.attention.kernels.registry.KERNELS", table)
    usual = dict(length=4096, kv_length=4096, dtype=jnp.bfloat16, local=True, platform="tpu")
    hopper, ampere, other = (dict(platform="gpu", compute_capability=each) for each in ((9, 0), (8, 0), (12, 0)))
    for change in ({}, dict(local=False), dict(platform="gpu"), dict(length=4), dict(kv_length=16),
                   dict(dtype=jnp.float16), dict(selected=True), dict(soft_cap=3.0, spans=True),
                   hopper, hopper | dict(dtype=jnp.float16, spans=True), hopper | dict(selected=True),
                   hopper | dict(local=False), hopper | dict(dtype=jnp.float32, dim=129), ampere, other):  # fmt: skip
        case = usual | change
        q, k = (jnp.zeros((1, case[n], 1, case.get("dim", 2)), case["dtype"]) for n in ("length", "kv_length"))
        places = {"query_positions": plain(q.shape[1], 1), "key_positions": plain(k.shape[1], 1)}
        if case.get("spans"):
            places["query_spans"] = Spans(plain(q.shape[1], 1))
        selected = jnp.zeros((1, 1, q.shape[1], k.shape[1]), bool) if case.get("selected") else None
        options = dict(local=case["local"], platform=case["platform"], soft_cap=case.get("soft_cap"), mask=Causal())
        options["compute_capability"] = case.get("compute_capability")
        attend(q, k, k, **places, **options, selected=selected)
    usual, other = chosen[:8], chosen[8:]
    assert usual == ["interval", "chunked", "chunked", "dot", "dot", "chunked", "interval", "interval"]
    assert other == ["triton", "triton", "chunked", "chunked", "chunked", "chunked", "chunked"]
    with refused(ConfigError, "kernel='splash'", "selection"):
        attend(*make(3), mask=Causal(), query_positions=plain(3), key_positions=plain(3), kernel="splash",
               platform="tpu", selected=jnp.ones((2, 1, 3, 3), bool))  # fmt: skip


@pytest.mark.parametrize("length", [0, 1, 128, 129, 511, 640, 1024, 1025, 8192, 8320, 100_000])
@pytest.mark.parametrize("sizes", [SAFE, *TILE_SIZES.values()])
def test_tile_sizes_fit_the_length(sizes, length):
    fit = sizes.fit(length)
    assert fit.streamed % 128 == 0 and fit.held % fit.streamed == 0 and fit.vmem_bytes == sizes.vmem_bytes
    assert fit.streamed <= sizes.streamed and fit.held <= sizes.held
    count = max(1, -(-length // fit.held))
    assert count == max(1, -(-length // sizes.held)) and fit.held * count - length < 128 * (
        fit.held // fit.streamed
    ) * (count + 1)


def test_tile_sizes_of_unknown_devices():
    assert tile_sizes() == SAFE


def values_and_gradients(devices, dim, value_dim, kv_heads, kind=None, dtype="bfloat16", **options):
    """Trace values and gradients of packed rows, one row per device.

    Returns also the bytes of q, k, v and out per device.
    """
    mesh = jax.sharding.Mesh(np.asarray(devices), ("data",))

    def bars(query, key, value, positions, segments, chosen, out_bar, lse_bar):
        def local(*qkv):
            places = dict.fromkeys(("query_positions", "key_positions"), positions)
            places |= dict.fromkeys(("query_segments", "key_segments"), segments) | {"selected": chosen}
            qkv = [x.swapaxes(1, 2) for x in qkv]  # memory layout as in projections
            out, lse = attend(*qkv, mask=Causal(), **places, local=True, **options)
            return out.swapaxes(1, 2), lse

        results, pull = jax.vjp(local, query, key, value)
        return results, pull((out_bar, lse_bar))

    def shaped(*dims, dtype=jnp.dtype(dtype)):
        return jax.ShapeDtypeStruct((len(devices), *dims), dtype, sharding=NamedSharding(mesh, P("data")))

    length, heads = 8192, 16
    rows = [shaped(length, dtype=jnp.int32)] * 2
    results = shaped(heads, length, value_dim), shaped(length, heads, dtype=jnp.float32)
    qkv = [shaped(n, length, width) for n, width in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))]
    split = jax.shard_map(bars, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    kept = sum(np.prod(x.shape[1:]) * x.dtype.itemsize for x in (*qkv, results[0]))
    chosen = {
        None: None,
        "keys": shaped(1, length, length, dtype=bool),
        "groups": Selection(shaped(heads, length, 2, dtype=jnp.uint32), rows[0]),
    }[kind]
    return jax.jit(split).trace(*qkv, *rows, chosen, *results), kept


def check_compiled(program, call, name, kept):
    """Check that there are three kernels and few temporaries."""
    assert program.as_text().count(f'custom_call_target="{call}"') == 3
    temporaries = program.memory_analysis().temp_size_in_bytes / 2**20
    print(f"{name}: {temporaries:.0f} MiB of temporaries, {kept / 2**20:.0f} MiB of q, k, v, out")
    assert temporaries < 4 * kept / 2**20


@slow
@pytest.mark.parametrize(
    ("topology", "dim", "value_dim", "kv_heads", "kind"),
    [
        *((name, *dims, None) for name in ("v5e:2x2", "v5p:2x2x1", "v6e:2x2") for dims in DIMS),
        *((name, 192, 128, 16, "keys") for name in ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")),
        *((name, 128, 128, 4, "groups") for name in ("v5p:2x2x1", "v6e:2x2")),
        ("tpu7x:2x2x1", 128, 128, 4, None),
    ],
)
def test_compiles_for_tpus(monkeypatch, topology, dim, value_dim, kv_heads, kind):
    """Values and gradients of packed rows, with the tile sizes of the TPU generation, which fit into vector memory."""
    devices, asked = tpu_devices(topology), []
    monkeypatch.setattr(pallas_flash_tpu, "tile_sizes", lambda: asked.append(tile_sizes()) or asked[-1])
    traced, kept = values_and_gradients(devices, dim, value_dim, kv_heads, kind, platform="tpu")
    check_compiled(traced.lower().compile(), "tpu_custom_call", f"{topology} {dim}/{value_dim} {kind}", kept)
    assert asked == [TILE_SIZES[devices[0].device_kind]]


@slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("topology", ["h100:1x1", "b200:1x1"])
@pytest.mark.parametrize(
    ("dim", "value_dim", "kv_heads", "soft_cap", "dtype"),
    [
        *((*dims, None, "bfloat16") for dims in DIMS),
        *((*dims, 30.0, "bfloat16") for dims in ((80, 80, 4), (16, 16, 4))),
        *((dim, dim, 4, None, "float32") for dim in (32, 64, 128)),
    ],
)
def test_compiles_for_gpus(monkeypatch, topology, dim, value_dim, kv_heads, soft_cap, dtype):
    """Values and gradients of packed rows, with tiles that fit into shared memory, also for padded head dims."""
    devices = gpu_devices(gpus_of(topology))
    if devices is None:
        pytest.skip("needs the compiler for GPUs (extra 'aot-gpu')")
    monkeypatch.setattr(pallas_flash_gpu, "_PADDED_TILE", TileSizes(held=128, streamed=128))
    monkeypatch.setattr(pallas_flash_gpu, "tile_of", TILES_OF_GPUS)
    device = dict(platform="gpu", compute_capability=compute_capability(devices[0]))
    options = dict(soft_cap=soft_cap, kernel="triton", **device)
    traced, kept = values_and_gradients(devices, dim, value_dim, kv_heads, dtype=dtype, **options)
    lowered = traced.lower(lowering_platforms=("cuda",))
    check_compiled(lowered.compile(GPU_OPTIONS), "__gpu$xla.gpu.triton", f"{topology} {dim}/{value_dim}", kept)
