"""Ring attention equals attention on one device, and keys are sent no further than they are visible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.context import Execution
from eqx_decoders.layers.attention.context_parallel import zigzag
from eqx_decoders.layers.attention.kernels.call import group_arguments
from eqx_decoders.layers.attention.kernels.chunked import may_see
from eqx_decoders.layers.attention.kernels.common import make_cotangents
from eqx_decoders.layers.attention.kernels.registry import EMPTY, attend, attend_gradients, with_sink
from eqx_decoders.layers.mask import AttentionPositions, Bidirectional, Causal, Chunked, SlidingWindow, Spans, visible
from tests.layers.attention.kernels.test_pallas_flash import interpret
from tests.layers.attention.kernels.test_registry import make, packed_places, plain, same, weights_for
from tests.layers.attention.test_context_parallel import (
    ALIBI,
    check,
    lines,
    product_counts,
    results,
    selection,
)
from tests.layers.common import run_attention


TWO, FOUR, EIGHT = dict(context=2, data=2, tensor=2), dict(context=4, fsdp=2), dict(context=8)
SEQUENCE = dict(context=2, tensor_sequence=2, data=2)
slow = pytest.mark.slow


@pytest.fixture
def interpreted():
    """Run our kernels on CPU with small tiles."""
    patch = pytest.MonkeyPatch()
    interpret(patch)
    yield
    patch.undo()
    results.clear_cache()


def with_gap(places, length):
    """Insert padding longer than a shard into the second document of each row."""
    positions = np.array(places["query_positions"])
    begin, end = length // 2, length // 2 + 25
    positions[:, end:] = positions[:, begin : length - 25]
    positions[:, begin:end] = -1
    return places | dict.fromkeys(("query_positions", "key_positions"), jnp.asarray(positions))


def check_ring(
    sizes, length, mask, *, heads=(4, 2), order="plain", form="ring", dtype=jnp.float32, gap=False, **options
):
    """Check packed documents, padding and narrow values; with spans for the mask Chunked(9)."""
    qkv = make(length, heads=heads[0], kv_heads=heads[1], value_dim=5, dtype=dtype)
    places = packed_places(length, spans=order == "plain" and mask == Chunked(9))
    places = with_gap(places, length) if gap else places
    options |= dict(contiguous=not gap)
    if order == "zigzag":
        turn = zigzag(length, sizes["context"])
        qkv, places = jax.tree.map(lambda x: x[:, turn], (qkv, places))
    options = dict(soft_cap=2.0) | options
    check(sizes, qkv, places, mask=mask, order=order, form=form, aligned=order == "plain", **options)


@pytest.mark.parametrize(
    ("sizes", "mask", "options"),
    [
        pytest.param(FOUR, Causal(), dict(kernel="chunked"), marks=slow),
        (FOUR, SlidingWindow(7), dict(kernel="dot", form="ring_all_to_all", alibi=ALIBI)),
        pytest.param(FOUR, SlidingWindow(7), dict(kernel="dot", gap=True), marks=slow),
        pytest.param(TWO, SlidingWindow(7), dict(kernel="dot", form="ring_all_to_all", heads=(8, 4)), marks=slow),
        pytest.param(FOUR, Causal(), dict(kernel="chunked", form="ring_all_to_all", order="zigzag"), marks=slow),
        pytest.param(FOUR, Causal(), dict(kernel="chunked", order="zigzag", heads=(4, 1), alibi=ALIBI), marks=slow),
        pytest.param(EIGHT, Causal(), dict(kernel="chunked", form="ring_all_to_all"), marks=slow),
        pytest.param(
            EIGHT, Causal(), dict(kernel="dot", form="ring_all_to_all", heads=(8, 4), alibi=ALIBI), marks=slow
        ),
        pytest.param(EIGHT, SlidingWindow(20), dict(kernel="dot", form="ring_all_to_all"), marks=slow),
        pytest.param(EIGHT, SlidingWindow(20), dict(kernel="chunked"), marks=slow),
        pytest.param(EIGHT, SlidingWindow(7), dict(kernel="chunked", order="zigzag"), marks=slow),
        pytest.param(EIGHT, Chunked(9), dict(kernel="chunked", heads=(2, 1)), marks=slow),
        pytest.param(FOUR, Chunked(9), dict(kernel="dot", form="ring_all_to_all"), marks=slow),
        pytest.param(FOUR, Chunked(11), dict(kernel="dot"), marks=slow),
        pytest.param(FOUR, Bidirectional(), dict(kernel="chunked", soft_cap=None), marks=slow),
        pytest.param(TWO, Causal(), dict(kernel="chunked", heads=(4, 1), form="ring_all_to_all"), marks=slow),
        pytest.param(SEQUENCE, Causal(), dict(kernel="chunked"), marks=slow),
        pytest.param(SEQUENCE, Causal(), dict(kernel="chunked", form="ring_all_to_all"), marks=slow),
    ],
)
def test_packed_rows_in_a_ring(sizes, mask, options):
    check_ring(sizes, 64, mask, **options)


@slow
@pytest.mark.parametrize("form", ["ring", "ring_all_to_all"])
@pytest.mark.parametrize("order", ["plain", "zigzag"])
@pytest.mark.parametrize(
    ("kernel", "mask"),
    [
        ("interval", Causal()),
        ("interval", SlidingWindow(200)),
        ("interval", Chunked(300)),
        ("triton", SlidingWindow(200)),
    ],
)
def test_kernels_in_a_ring(interpreted, kernel, mask, order, form):
    """Our flash kernels, with several tiles per shard."""
    check_ring(FOUR, 1072, mask, order=order, form=form, kernel=kernel)


@slow
@pytest.mark.parametrize("order", ["plain", "zigzag"])
def test_chunked_loops_in_a_ring(order):
    check_ring(FOUR, 4096, SlidingWindow(900), order=order, kernel="chunked", heads=(2, 1))


@slow
@pytest.mark.parametrize("form", ["ring", "ring_all_to_all"])
@pytest.mark.parametrize("heads", [1, 4])
def test_selected_keys_in_a_ring(heads, form):
    places = packed_places(32) | {"selected": selection(heads, 32, 32)}
    check(FOUR, make(32, value_dim=3), places, mask=Causal(), form=form)


@slow
@pytest.mark.parametrize(("sizes", "length"), [(TWO, 13), (FOUR, 1)])
def test_dimensions_that_the_mesh_does_not_divide_are_replicated(sizes, length):
    places = dict.fromkeys(("query_positions", "key_positions"), plain(length, 2))
    check(sizes, make(length), places, mask=Causal(), form="ring")


@slow
def test_ring_in_bfloat16():
    """The error is as small as with gathered keys, and key gradients are summed in float32."""
    qkv, places = make(256, dtype=jnp.float32), packed_places(256)
    weights = weights_for(qkv)
    want = results(attend, (("mask", Causal()), ("kernel", "dot")), qkv, weights, places)
    low, found = tuple(x.astype(jnp.bfloat16) for x in qkv), {}
    for form in ("gather", "ring", "ring_all_to_all"):
        execution = Execution(layout=ed.Layout.create(**EIGHT), attention="chunked", context_form=form)
        found[form] = results(run_attention, (("mask", Causal()), ("execution", execution)), low, weights, places)

    def error(one):
        pairs = zip(jax.tree.leaves(one), jax.tree.leaves(want), strict=True)
        return max(float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b[b > EMPTY / 2]).max()) for a, b in pairs)

    errors = {form: error(one) for form, one in found.items()}
    assert all(each < 1.5 * errors["gather"] < 0.03 for each in errors.values()), errors


@pytest.mark.slow(fast=("triton",))
@pytest.mark.parametrize("kernel", ["chunked", "dot", "interval", "triton"])
def test_gradients_of_shards_add_up(kernel, interpreted):
    """With the lse of all keys, the sum over shards equals the gradients of one call, with a sink."""
    places, sink = packed_places(160), jnp.array([0.5, -1.0, 0.0, 2.0])
    options = dict(mask=SlidingWindow(70), soft_cap=2.0)

    def after(out, lse):
        return jnp.sin(with_sink(out, lse, sink)).sum()

    @jax.jit
    def whole(qkv):
        def loss(qkv):
            results = attend(*qkv, **places, **options, kernel="dot")
            return after(*results), results

        return jax.grad(loss, has_aux=True)(qkv)

    @jax.jit
    def in_parts(qkv, results):
        known, found = make_cotangents(results, jax.grad(lambda results: after(*results))(results)), []
        for part in (slice(0, 50), slice(50, 160)):
            there = {name: x[:, part] if "key" in name else x for name, x in places.items()}
            keys = (x[:, part] for x in qkv[1:])
            found.append(attend_gradients(*group_arguments(qkv[0], *keys, **there, **options), known, kernel))
        (query, *first), (more, *second) = found
        return query + more, *(jnp.concatenate(pair, 1) for pair in zip(first, second, strict=True))

    qkv = make(160, value_dim=5)
    want, results = whole(qkv)
    same(in_parts(qkv, results), want)


@pytest.mark.slow
def test_may_see_is_false_for_invisible_shards():
    """True if a query may see a key; False for shards that are too old, in the future, or of another document."""
    places = packed_places(64)
    positions, segments = places["query_positions"], places["query_segments"]
    for mask in (Causal(), SlidingWindow(7), Chunked(9), Bidirectional(), Bidirectional(11)):
        both = jax.jit(lambda here, mask=mask: (may_see(mask, here), visible(mask, *here).any()))
        for i, j in np.ndindex(4, 4):
            queries, keys = (np.s_[:, 16 * at : 16 * (at + 1)] for at in (i, j))
            here = AttentionPositions(positions[queries], positions[keys], segments[queries], segments[keys])
            found, wanted = both(here)
            assert found == wanted, (mask, i, j)
    alone = Spans(jnp.full((2, 16), -1))
    looks = Spans(alone.last.at[1, 3].set(20))
    row = plain(64)
    for spans, seen in ((alone, False), (looks, True)):
        here = AttentionPositions(row[:, :16], row[:, 16:32], None, None, spans)
        assert bool(may_see(Causal(), here)) == seen


def ring_text(form, mask, counts=(8, 4), **options):
    """Return the compiled program of a step on context=4, for keys with 4 features and values with 3."""
    layout = ed.Layout.create(**FOUR)
    execution = Execution(layout=layout, attention="chunked", context_form=form)
    qkv = tuple(
        jax.ShapeDtypeStruct(
            (2, 64, heads, dim), jnp.float32, sharding=layout.activation_sharding("batch length heads head_dim")
        )
        for heads, dim in zip((counts[0], counts[1], counts[1]), (4, 4, 3), strict=True)
    )
    places = jax.ShapeDtypeStruct((2, 64), jnp.int32, sharding=layout.activation_sharding("batch length"))

    def step(qkv, places):
        def loss(qkv):
            own = dict(query_positions=places, key_positions=places, aligned=True, contiguous=True)
            return run_attention(*qkv, execution=execution, mask=mask, **own, **options)[0].sum()

        return jax.grad(loss)(qkv)

    shardings = tuple(x.sharding for x in qkv)
    return jax.jit(step, out_shardings=shardings).lower(qkv, places).compile().as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "mask", "count"),
    [
        ("ring", SlidingWindow(17), 4),  # one previous device
        ("ring", SlidingWindow(18), 8),  # two previous devices
        ("ring", Causal(), 12),  # three previous devices
        ("ring_all_to_all", Causal(), 4),
    ],
)
def test_collectives_of_a_ring(form, mask, count):
    """Visible keys and values are sent, and their gradients are sent back. Nothing is gathered or reduced.

    The backward pass of a short ring reuses the received keys if it is in the same program.
    """
    text = ring_text(form, mask, counts=(8, 4) if form == "ring" else (4, 2))
    sent = lines(text, "collective-permute")
    assert len(sent) == count, sent
    assert not any("f32" in line for line in lines(text, "all-gather"))
    assert bool(lines(text, "all-to-all")) == (form != "ring")
    assert not any(lines(text, other) for other in ("all-reduce", "reduce-scatter"))


@pytest.mark.slow
def test_context_saves_the_ring():
    """With saved out and lse, the backward pass does not repeat the ring of the forward pass."""
    execution = Execution(layout=ed.Layout.create(**FOUR), attention="chunked", context_form="ring")
    assert product_counts(execution) == {"context": 38, "nothing": 46}
