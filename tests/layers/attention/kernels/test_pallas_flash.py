"""The TPU kernel, interpreted: it is the plain one in values and gradients, and does no more than it has to."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.attention.kernels import pallas_flash, pallas_flash_tiles
from eqx_decoders.layers.attention.kernels.registry import EMPTY, KERNELS, attend
from eqx_decoders.layers.mask import AttentionPositions, Bidirectional, Causal, Chunked, SlidingWindow, Spans, visible
from eqx_decoders.layers.tpu import BLOCK_SIZES, SAFE, BlockSizes, block_sizes
from tests.layers.attention.kernels.test_registry import all_of, make, packed_places, plain, same, weights_for
from tests.programs import tpu_devices


DIMS = [(64, 64, 4), (128, 128, 4), (256, 256, 4), (192, 128, 16)]  # of keys, of values, and how many heads these have
NAMES = ("query_positions", "key_positions", "query_segments", "key_segments", "query_spans")


@pytest.fixture(autouse=True, scope="module")
def interpreted():
    """The kernel runs on CPU, in blocks of 128 and, where they are held, 256."""
    patch = pytest.MonkeyPatch()
    patch.setitem(KERNELS, "interval", dataclasses.replace(KERNELS["interval"], platforms=("cpu", "tpu")))
    patch.setattr(pallas_flash, "block_sizes", lambda: BlockSizes(held=256, streamed=128))
    yield
    patch.undo()
    all_of.clear_cache()


def both(qkv, places, **options):
    weights = weights_for(qkv)
    return tuple(all_of(qkv, weights, places, kernel=kernel, **options) for kernel in ("interval", "dot"))


def zigzag(places, order):
    return jax.tree.map(lambda x: x[:, order], places)


def layouts(length):
    """Packed rows with padding; the same out of order; in huge numbers; rows and whole blocks that see nothing."""
    places = packed_places(length)
    yield places
    halves = np.concatenate([np.arange(length // 4), np.arange(3 * length // 4, length)])
    yield zigzag(places, np.concatenate([halves, np.setdiff1d(np.arange(length), halves)]))
    far = {name: x + 2**30 if "segment" in name else jnp.where(x < 0, x, x + 2**30) for name, x in places.items()}
    yield far
    empty = {name: x.at[0].set(-1).at[1, 100:400].set(-1) if "position" in name else x for name, x in places.items()}
    yield empty


@pytest.mark.parametrize(
    ("mask", "soft_cap"),
    [
        (Causal(), None),
        (SlidingWindow(70), 2.0),
        pytest.param(Chunked(100), None, marks=pytest.mark.slow),
        pytest.param(Bidirectional(), 2.0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_interval_is_dot(mask, soft_cap):
    """An odd length, three query heads a key head, narrow values."""
    qkv = make(421, heads=3, kv_heads=1, value_dim=5)
    for places in layouts(421):
        same(*both(qkv, places, mask=mask, soft_cap=soft_cap))


@pytest.mark.parametrize("spans", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_keys_are_not_the_queries(spans):
    """A ring of slots in any order, some of them empty, without segments; spans that reach ahead."""
    qkv = make(140, 333, heads=4, kv_heads=2, value_dim=11)
    order = np.random.default_rng(0).permutation(333)
    slots = np.where(order % 7 == 3, -1, order)[None].repeat(2, 0)
    places = {"query_positions": plain(140, start=150), "key_positions": jnp.asarray(slots, jnp.int32)}
    if spans:
        first = jnp.where(plain(140) < 60, 190, jnp.where(plain(140) < 70, -1, 225))
        places["query_spans"] = Spans(jnp.where(first < 0, -1, first + 60))
    same(*both(qkv, places, mask=SlidingWindow(40)))


@pytest.mark.slow
def test_one_token():
    places = {"query_positions": plain(1, start=4), "key_positions": plain(9)}
    same(*both(make(1, 9), places, mask=Causal()))


@pytest.mark.slow
def test_bfloat16_stays_near():
    """Of one document, whose keys are filled up to whole blocks: what is filled in is not seen."""
    qkv, places = make(270), dict.fromkeys(NAMES[:2], plain(270))
    low, options = tuple(x.astype(jnp.bfloat16) for x in qkv), dict(mask=Causal(), soft_cap=5.0)
    near = all_of(low, weights_for(qkv), places, kernel="interval", **options)
    exact = all_of(tuple(x.astype(jnp.float32) for x in low), weights_for(qkv), places, kernel="dot", **options)
    assert near[0][0].dtype == jnp.bfloat16 and near[0][1].dtype == jnp.float32
    same(jax.tree.map(lambda x: x.astype(jnp.float32), near), exact, tolerance=2e-2)


NONE, START, NEXT, FAR = (np.full(256, -1), *(np.arange(256) + first for first in (0, 256, 1000)))
# Of each row the queries' positions and segments, and the keys', 256 of each at a time.
ROWS = {
    "padding at the end": ([START, NEXT, NONE], [0, 0, 0], [START, NEXT, NONE], [0, 0, 0]),
    "another document": ([START, NEXT, NONE], [2, 2, 2], [START, START, NEXT], [1, 2, 2]),
    "the future": ([START, NONE, NEXT], [0, 0, 0], [START, NEXT, FAR], [0, 0, 0]),
    "a hole": ([NEXT, START, NONE], [0, 0, 0], [START, FAR, NEXT], [0, 0, 0]),
    "nothing": ([FAR, START, NEXT], [1, 1, 1], [START, NEXT, FAR], [2, 2, 0]),
}


def test_blocks_that_nobody_sees_are_not_touched():
    """NaN in them changes no bit, whatever keeps them from being seen."""
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
    runs = [all_of(x, weights_for(qkv), places, mask=Causal(), kernel="interval") for x in (qkv, poisoned)]
    for a, b in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_array_equal(a, b)
    (out, lse), (query_bar, *bars) = runs[1]
    assert not out[asleep].any() and (lse[asleep] == EMPTY).all() and not query_bar[asleep].any()
    assert not any(bar[unseen].any() for bar in bars) and all(bar[~unseen].all() for bar in bars)


@functools.partial(jax.jit, static_argnames=("mask", "keys_held"))
def schedule(places, *, mask, keys_held):
    """Which tiles are read, which count, and which need no mask: [batch, blocks of queries, blocks of keys]."""
    plan = pallas_flash._FlashPlan(
        mask=mask,
        soft_cap=None,
        segments=True,
        interpret=True,
        query_blocks=BlockSizes(held=32, streamed=16),
        key_blocks=BlockSizes(held=32, streamed=16),
    )
    sizes = (16, 32) if keys_held else (32, 16)
    rows = pallas_flash._intervals_and_positions(plan, AttentionPositions(**places))
    (start, count), queries, keys = pallas_flash_tiles.make_schedule(plan.segments, *rows, *sizes, keys_held)
    tables = [x[:, :, None] for x in queries], [x[:, None, :] for x in keys]
    sees, sees_all = pallas_flash_tiles.may_see(*tables), pallas_flash_tiles.all_see(*tables)
    index = jnp.arange(sees.shape[1 if keys_held else 2])[None, None]
    read = (index >= start[:, :, None]) & (index < (start + count)[:, :, None])
    return read.swapaxes(1, 2) if keys_held else read, sees, sees_all


@pytest.mark.parametrize(
    "mask", [Causal(), SlidingWindow(40), Chunked(32), Bidirectional(), Bidirectional(48)], ids=str
)
def test_tiles_are_those_that_are_seen(mask):
    """Against a count in NumPy: none is missed, and those that all see are known, also past the numbers of `_code`."""
    for at, places in enumerate(layouts(416)):
        seen = np.asarray(visible(mask, *(places[name] for name in NAMES[:4])))
        for keys_held in (False, True):
            queries, keys = (16, 32) if keys_held else (32, 16)
            tiles = seen.reshape(2, 416 // queries, queries, 416 // keys, keys)
            some = tiles.any((2, 4))
            read, sees, sees_all = map(np.asarray, schedule(places, mask=mask, keys_held=keys_held))
            np.testing.assert_array_equal(sees_all, tiles.all((2, 4)))
            assert (read & sees)[some].all()
            if at == 0:  # packed rows in order: nothing is in vain
                np.testing.assert_array_equal(sees, some)
                np.testing.assert_array_equal(read, some)


def layers(remat):
    """Two layers in a scan."""

    def loss(qkv, places):
        def layer(x, _):
            out, lse = attend(jnp.sin(x), *qkv[1:], mask=Causal(), kernel="interval", **places)
            return jnp.sin(out) + lse[..., None], None

        return jax.lax.scan(remat(layer), qkv[0], None, length=2)[0].sum()

    return loss


def test_context_saves_the_forward_kernel():
    qkv, places = make(24), packed_places(24)
    policies = {
        "context": jax.checkpoint_policies.save_only_these_names("context"),
        "nothing": jax.checkpoint_policies.nothing_saveable,
    }
    remats = {"plain": lambda f: f}
    remats |= {k: functools.partial(jax.checkpoint, policy=v, prevent_cse=False) for k, v in policies.items()}
    calls = {
        name: str(jax.make_jaxpr(jax.grad(layers(remat)))(qkv, places)).count("pallas_call[")
        for name, remat in remats.items()
    }
    assert calls == {"plain": 3, "context": 3, "nothing": 4}


def test_auto_takes_it_where_it_can(monkeypatch):
    """On TPUs, for arrays of one device, that are long enough, without a selection or float16."""
    chosen = []

    def spy(name):
        return lambda inputs, call: chosen.append(name) or (inputs.query, inputs.query[..., 0].astype(jnp.float32))

    table = {name: dataclasses.replace(kernel, function=spy(name)) for name, kernel in KERNELS.items()}
    table["interval"] = dataclasses.replace(table["interval"], platforms=("tpu",))
    monkeypatch.setattr("eqx_decoders.layers.attention.kernels.registry.KERNELS", table)
    usual = dict(length=4096, kv_length=4096, dtype=jnp.bfloat16, local=True, platform="tpu")
    for change in ({}, dict(local=False), dict(platform="gpu"), dict(length=4), dict(kv_length=16),
                   dict(dtype=jnp.float16), dict(selected=True), dict(soft_cap=3.0, spans=True)):  # fmt: skip
        case = usual | change
        q, k = (jnp.zeros((1, case[n], 1, 2), case["dtype"]) for n in ("length", "kv_length"))
        places = {"query_positions": plain(q.shape[1], 1), "key_positions": plain(k.shape[1], 1)}
        if case.get("spans"):
            places["query_spans"] = Spans(plain(q.shape[1], 1))
        selected = jnp.zeros((1, 1, q.shape[1], k.shape[1]), bool) if case.get("selected") else None
        options = dict(local=case["local"], platform=case["platform"], soft_cap=case.get("soft_cap"), mask=Causal())
        attend(q, k, k, **places, **options, selected=selected)
    assert chosen == ["interval", "chunked", "chunked", "dot", "dot", "chunked", "chunked", "interval"]
    with pytest.raises(ConfigError, match=r"kernel='interval' cannot do a selection of keys.* These can: dot, chunked"):
        attend(*make(3), mask=Causal(), query_positions=plain(3), key_positions=plain(3), kernel="interval",
               platform="tpu", selected=jnp.ones((2, 1, 3, 3), bool))  # fmt: skip


@pytest.mark.parametrize("length", [0, 1, 128, 129, 511, 640, 1024, 1025, 8192, 8320, 100_000])
@pytest.mark.parametrize("sizes", [SAFE, *BLOCK_SIZES.values()], ids=str)
def test_blocks_fit_the_length(sizes, length):
    fit = sizes.fit(length)
    assert fit.streamed % 128 == 0 and fit.held % fit.streamed == 0 and fit.vmem_bytes == sizes.vmem_bytes
    assert fit.streamed <= sizes.streamed and fit.held <= sizes.held
    count = max(1, -(-length // fit.held))
    assert count == max(1, -(-length // sizes.held)) and fit.held * count - length < 128 * (
        fit.held // fit.streamed
    ) * (count + 1)


def test_block_sizes_of_what_is_not_known():
    assert block_sizes() == SAFE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "dim", "value_dim", "kv_heads"),
    [
        *((name, *dims) for name in ("v5e:2x2", "v5p:2x2x1", "v6e:2x2") for dims in DIMS),
        ("tpu7x:2x2x1", 128, 128, 4),
    ],
)
def test_it_compiles_for_tpus(monkeypatch, topology, dim, value_dim, kv_heads):
    """Values and gradients of packed rows, in blocks of this generation, which its vector memory holds."""
    devices, asked = tpu_devices(topology), []
    monkeypatch.setattr(pallas_flash, "block_sizes", lambda: asked.append(block_sizes()) or asked[-1])
    mesh = jax.sharding.Mesh(np.asarray(devices), ("data",))

    def bars(query, key, value, positions, segments, out_bar, lse_bar):
        def local(*qkv):
            places = dict.fromkeys(("query_positions", "key_positions"), positions)
            places |= dict.fromkeys(("query_segments", "key_segments"), segments)
            qkv = [x.swapaxes(1, 2) for x in qkv]  # as projections lay them out
            out, lse = attend(*qkv, mask=Causal(), **places, local=True, platform="tpu")
            return out.swapaxes(1, 2), lse

        results, pull = jax.vjp(local, query, key, value)
        return results, pull((out_bar, lse_bar))

    def shaped(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((len(devices), *dims), dtype, sharding=NamedSharding(mesh, P("data")))

    length, heads = 8192, 16
    rows = [shaped(length, dtype=jnp.int32)] * 2
    results = shaped(heads, length, value_dim), shaped(length, heads, dtype=jnp.float32)
    qkv = [shaped(n, length, width) for n, width in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))]
    split = jax.shard_map(bars, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    program = jax.jit(split).lower(*qkv, *rows, *results).compile()
    assert asked == [BLOCK_SIZES[devices[0].device_kind]]
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 3
    temporaries = program.memory_analysis().temp_size_in_bytes / 2**20
    kept = sum(np.prod(x.shape[1:]) * 2 for x in (*qkv, results[0])) / 2**20
    print(f"{topology} {dim}/{value_dim}: {temporaries:.0f} MiB of temporaries, {kept:.0f} MiB of q, k, v, out")
    assert temporaries < 4 * kept
