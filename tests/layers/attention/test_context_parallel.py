"""Attention on a mesh equals attention on one device, in values and gradients, and transfers only keys and values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.context import Execution
from eqx_decoders.layers.attention.alibi import Alibi
from eqx_decoders.layers.attention.context_parallel import zigzag
from eqx_decoders.layers.attention.kernels.registry import EMPTY, attend
from eqx_decoders.layers.attention.kernels.selection import Selection, pack_groups, pack_lanes
from eqx_decoders.layers.mask import Bidirectional, Causal, Chunked, SlidingWindow
from eqx_decoders.sharding.rules import ACTIVATIONS
from tests.layers.attention.kernels.test_registry import make, packed_places, plain, same, weights_for
from tests.layers.common import run_attention


ALL = dict(data=2, context=2, tensor=2)
LONG = dict(context=4, fsdp=2)
SEQUENCE = dict(tensor_sequence=2, data=2, tensor=2)
CONTEXT = dict(context=8)
HEADS = dict(context=2, tensor=4)
ALIBI = Alibi(max_exponent=3.0)


@functools.partial(jax.jit, static_argnames=("function", "options"))
def results(function, options, qkv, weights, places):
    """Return values, and the gradients of a loss that depends on both results."""

    def loss(qkv):
        out, lse = function(*qkv, **places, **dict(options))
        seen = jnp.where(lse > EMPTY / 2, lse, 0.0)
        return (out.astype(jnp.float32) * weights[0]).sum() + (seen * weights[1]).sum(), (out, lse)

    (_, found), grads = jax.value_and_grad(loss, has_aux=True)(qkv)
    return found, grads


def check(
    sizes, qkv, places, *, kernel="chunked", order="plain", form="gather", aligned=True, key_axis="length",
    contiguous=False, **options
):  # fmt: skip
    """Compare `run_attention` with the plain kernel on one device."""
    layout = ed.Layout.create(**sizes)
    execution = Execution(layout=layout, attention=kernel, context_order=order, context_form=form)
    meshed = options | dict(execution=execution, aligned=aligned, key_axis=key_axis, contiguous=contiguous)
    weights = weights_for(qkv)
    many = results(run_attention, tuple(meshed.items()), qkv, weights, places)
    same(many, results(attend, tuple((options | dict(kernel="dot")).items()), qkv, weights, places))


def selection(heads, length, kv_length):
    """Return a selection of keys for all heads, or a selection of key groups for each head."""
    random = np.random.default_rng(3)
    if heads == 1:
        return Selection(pack_lanes(jnp.asarray(random.random((2, heads, length, kv_length)) < 0.2)))
    groups = random.integers(-1, 40, (2, kv_length)).astype(np.int32)
    return Selection(pack_groups(jnp.asarray(random.random((2, heads, length, 40)) < 0.2)), jnp.asarray(groups))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "kernel", "options"),
    [
        (ALL, "chunked", dict(mask=Causal())),
        (LONG, "dot", dict(mask=SlidingWindow(7), soft_cap=2.0, alibi=ALIBI)),
        (CONTEXT, "chunked", dict(mask=Bidirectional())),
        (SEQUENCE, "chunked", dict(mask=Chunked(9))),
        (HEADS, "dot", dict(mask=Causal())),
    ],
)
def test_packed_rows_with_spans(sizes, kernel, options):
    """Documents, padding, spans across shards, narrow values, and two query heads per key head."""
    check(sizes, make(64, value_dim=5), packed_places(64, spans=options["mask"] != Causal()), kernel=kernel, **options)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(200)])
@pytest.mark.parametrize("order", ["plain", "zigzag"])
def test_chunked_loops(mask, order):
    """Query blocks of one device against the blocks of all keys, compared by positions."""
    length = 1072
    qkv, places = make(length, heads=2, kv_heads=1, dim=4, value_dim=4), packed_places(length)
    if order == "zigzag":
        turn = zigzag(length, 4)
        qkv, places = jax.tree.map(lambda x: x[:, turn], (qkv, places))
    check(LONG, qkv, places, mask=mask, order=order, aligned=order == "plain")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "heads", "kv_heads"),
    [
        (ALL, 4, 1),
        (HEADS, 12, 3),
        (HEADS, 8, 2),
        (HEADS, 12, 6),
        (HEADS, 6, 3),
        (dict(tensor=4, tensor_sequence=2), 8, 2),
        (dict(tensor=2, tensor_sequence=2, context=2), 4, 2),
    ],
)
def test_fewer_key_heads_than_devices(sizes, heads, kv_heads):
    """Each device receives the key heads that its query heads use."""
    check(sizes, make(16, heads=heads, kv_heads=kv_heads), packed_places(16), mask=Causal(), kernel="dot")


@pytest.mark.slow(fast=("4-context=8",))
@pytest.mark.parametrize("sizes", [ALL, CONTEXT])
@pytest.mark.parametrize("heads", [1, 4])
def test_selected_keys(sizes, heads):
    places = packed_places(32) | {"selected": selection(heads, 32, 32)}
    check(sizes, make(32, value_dim=3), places, mask=Causal())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "batch", "length"),
    [(ALL, 3, 13), (LONG, 1, 16), (LONG, 4, 1)],
)
def test_dimensions_that_the_mesh_does_not_divide_are_replicated(sizes, batch, length):
    """Odd batches, odd lengths, a single token."""
    places = dict.fromkeys(("query_positions", "key_positions"), plain(length, batch))
    check(sizes, make(length, batch=batch), places, mask=Causal())


@pytest.mark.parametrize(
    ("length", "kv_heads", "options"),
    [
        (1, 2, dict(mask=SlidingWindow(9))),
        pytest.param(8, 1, dict(mask=Causal(), soft_cap=2.0, alibi=ALIBI), marks=pytest.mark.slow),
        pytest.param(8, 2, dict(mask=Causal(), split=False), marks=pytest.mark.slow),
        pytest.param(
            8, 4, dict(mask=Chunked(7), order="zigzag", form="all_to_all", alibi=ALIBI), marks=pytest.mark.slow
        ),
    ],
)
def test_sharded_cache_slots(length, kv_heads, options):
    """Keys in any order, with empty slots, also all slots of a device; sharded or replicated slots.

    Queries without visible keys give zeros.
    """
    order = np.random.default_rng(0).permutation(24)
    slots = jnp.asarray(
        np.where((order % 7 == 3) | (np.arange(24) < 12)[::-1], -1, order)[None].repeat(2, 0), jnp.int32
    )
    slots = slots.at[1].set(-1).at[1, 3].set(13)
    places = {"query_positions": plain(length, start=12), "key_positions": slots, "selected": selection(1, length, 24)}
    table = ACTIVATIONS | ({} if options.pop("split", True) else {"slots": ()})
    qkv = make(length, 24, kv_heads=kv_heads, value_dim=5)
    check(ALL | dict(activations=table), qkv, places, aligned=False, key_axis="slots", **options)


def test_cache_slots_are_not_gathered():
    """In a step with a cache on context=4, results of queries are summed, and the cache is not gathered."""
    layout = ed.Layout.create(**LONG)
    execution = Execution(layout=layout)

    def like(words, shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.activation_sharding(words, shape))

    query, places = like("batch length heads head_dim", (2, 8, 4, 4)), like("batch length", (2, 8), jnp.int32)
    key, slots = like("batch slots kv_heads head_dim", (2, 64, 2, 4)), like("batch slots", (2, 64), jnp.int32)

    def step(query, key, value, places, slots):
        past = dict(query_positions=places, key_positions=slots, key_axis="slots")
        return run_attention(query, key, value, execution=execution, mask=Causal(), **past)

    text = jax.jit(step).lower(query, key, key, places, slots).compile().as_text()
    gathers = lines(text, "all-gather")
    assert sum("f32[" in line for line in gathers) == 1 and any("f32[1,8,4,4]" in line for line in gathers), gathers
    assert not any("64" in line.split(" = ")[1].split("{")[0] for line in gathers), gathers
    assert len(lines(text, "all-reduce")) == 2
    assert not any(lines(text, other) for other in ("all-to-all", "reduce-scatter", "collective-permute"))


@pytest.mark.slow
@pytest.mark.parametrize("length", [16, 12])
def test_undeclared_token_order_gives_correct_results(length):
    """Positions decide. Twelve tokens cannot be in zigzag order on four devices."""
    check(LONG, make(length), packed_places(length), mask=Causal(), order="zigzag", aligned=False, kernel="dot")


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (12, 3)])
def test_axis_that_shards_heads_does_not_shard_the_length_of_keys(heads, kv_heads):
    """A mesh axis that shards the query heads cannot also shard the length of keys."""
    table = {name: row for name, row in ACTIVATIONS.items() if name != "kv_heads"}
    qkv = make(16, heads=heads, kv_heads=kv_heads)
    check(SEQUENCE | dict(activations=table), qkv, packed_places(16), mask=Causal())


@pytest.mark.slow(fast=("0-data=2 context=2 tensor=2-8-4-mask=Causal() soft_cap=2.0",))
@pytest.mark.parametrize(
    ("sizes", "heads", "kv_heads", "options"),
    [
        (ALL, 8, 4, dict(mask=Causal(), soft_cap=2.0)),
        (dict(context=2, tensor=4), 12, 3, dict(mask=SlidingWindow(9))),
        (dict(context=2, data=4), 4, 2, dict(mask=Bidirectional(), order="zigzag")),
        (ALL, 4, 1, dict(mask=Causal())),
        (CONTEXT, 8, 8, dict(mask=Chunked(9))),
    ],
)
@pytest.mark.parametrize("chosen", [0, 1])
def test_all_to_all_exchanges_heads_for_tokens(sizes, heads, kv_heads, options, chosen):
    """Each device attends to all tokens with some heads, or gathers if the heads cannot be divided."""
    places = packed_places(32, spans=True)
    places |= {"selected": selection(heads if options["mask"] == Causal() else 1, 32, 32)} if chosen else {}
    qkv = make(32, heads=heads, kv_heads=kv_heads, value_dim=5)
    check(sizes, qkv, places, form="all_to_all", aligned="order" not in options, **options)


def lines(text: str, operation: str) -> list[str]:
    return [line for line in text.splitlines() if f" {operation}(" in line or f" {operation}-start(" in line]


def step_text(heads: int, kv_heads: int, form: str) -> str:
    """Return the compiled program of a step on context=4."""
    layout = ed.Layout.create(**LONG)
    execution = Execution(layout=layout, attention="chunked", context_form=form)
    counts = {"heads": heads, "kv_heads": kv_heads}
    query, key = (
        jax.ShapeDtypeStruct(
            (2, 64, count, 4), jnp.float32, sharding=layout.activation_sharding(f"batch length {word} head_dim")
        )
        for word, count in counts.items()
    )
    places = jax.ShapeDtypeStruct((2, 64), jnp.int32, sharding=layout.activation_sharding("batch length"))

    def step(query, key, value, places):
        def loss(*qkv):
            own = dict(query_positions=places, key_positions=places, aligned=True)
            return run_attention(*qkv, execution=execution, mask=Causal(), **own)[0].sum()

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    shardings = tuple(x.sharding for x in (query, key, key))
    return jax.jit(step, out_shardings=shardings).lower(query, key, key, places).compile().as_text()


def test_all_to_all_does_not_gather():
    text = step_text(8, 4, "all_to_all")
    assert lines(text, "all-to-all") and not any("f32" in line for line in lines(text, "all-gather"))
    assert not any(lines(text, other) for other in ("all-reduce", "reduce-scatter", "collective-permute"))


def test_keys_and_values_are_gathered_and_queries_are_not():
    """A step on context=4 has two all-gathers and two reduce-scatters of one head each, and no other collective."""
    text = step_text(6, 1, "gather")
    gathers = lines(text, "all-gather")
    assert sum("f32" in line for line in gathers) == 2, gathers
    assert all("f32[1,64,1,4]" in line or "s32" in line for line in gathers), gathers
    sums = lines(text, "reduce-scatter")
    assert len(sums) == 2 and all("f32[1,16,1,4]" in line for line in sums), sums
    assert not any(lines(text, other) for other in ("all-reduce", "all-to-all", "collective-permute"))


def product_counts(execution: Execution) -> dict[str, int]:
    """Return the number of products in the gradient of two layers that save "context", or nothing."""
    positions = plain(32)

    def loss(policy):
        def layer(x, qkv):
            options = dict(execution=execution, mask=Causal(), query_positions=positions, key_positions=positions)
            return jnp.sin(run_attention(jnp.sin(x), *qkv, **options)[0])

        saved = jax.checkpoint(layer, policy=policy)
        return jax.grad(lambda query, *qkv: saved(saved(query, qkv), qkv).sum())

    policies = jax.checkpoint_policies
    saving = dict(context=policies.save_only_these_names("context"), nothing=policies.nothing_saveable)
    return {name: str(jax.make_jaxpr(loss(policy))(*make(32))).count("dot_general[") for name, policy in saving.items()}


@pytest.mark.slow
def test_context_saves_the_recomputation():
    """Checkpoint names are saved outside of shard_map: five products in the backward pass, not seven."""
    execution = Execution(layout=ed.Layout.create(**LONG), attention="chunked")
    assert product_counts(execution) == {"context": 14, "nothing": 18}
