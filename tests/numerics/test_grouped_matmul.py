"""Products of sorted rows with a weight per group, against a loop in NumPy."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.numerics import grouped_matmul, megablox
from eqx_decoders.numerics.einsum import grouped_products
from eqx_decoders.numerics.grouped_matmul import GroupedForm, block_rows, choose_form
from eqx_decoders.numerics.grouped_matmul_gpu import GroupedPlan, grouped_rows
from eqx_decoders.numerics.low_rank import LowRank
from eqx_decoders.sharding.backend import backend_of
from tests.compare import assert_array_equal, assert_close


INNER, OUTER = 5, 3
RAGGED_DOT, TRITON = GroupedForm("ragged_dot"), GroupedForm("triton", interpret=True)
FORMS = (RAGGED_DOT, GroupedForm("blocks", 4), GroupedForm("megablox", interpret=True), TRITON)
# rows of each group: one block, several, none, all in one group, none at all, and fewer than there are rows
COUNTS = [(3, 1, 2, 2), (19, 0, 1, 12), (0, 0, 7, 0), (40, 0, 0, 0), (0, 0, 0, 0), (2, 3, 0, 4)]


def draws(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def loop(x, weight, counts):
    """In float64, with zeros beyond the groups."""
    out, begin = np.zeros((len(x), weight.shape[2])), 0
    for group, count in enumerate(counts):
        out[begin : begin + count] = x[begin : begin + count].astype(np.float64) @ weight[group]
        begin += count
    return out


@functools.partial(jax.jit, static_argnames="form")
def products_and_gradients(x, weights, counts, outward, form):
    """Compute the products of two weights and their gradients: one program for all counts."""
    outs, back = jax.vjp(lambda x, *weights: grouped_products(x, weights, counts, form=form), x, *weights)
    return outs, back(outward)


@pytest.mark.parametrize("form", [*FORMS, GroupedForm("blocks", 64)])
@pytest.mark.parametrize("counts", COUNTS)
def test_values_and_gradients_match_a_loop_over_groups(counts, form):
    """Of two weights at once; what stands beyond the groups, NaN too, reaches neither weights nor other rows."""
    total, rows = sum(counts), 40 + form.block
    x, first, second = draws(rows, INNER), draws(4, INNER, OUTER, seed=1), draws(4, INNER, 2 * OUTER, seed=2)
    x[total:] = 1e3 if form.kind == "blocks" else np.nan
    outward = tuple(draws(rows, size, seed=3) for size in (OUTER, 2 * OUTER))
    each = np.asarray(counts, np.int32)
    outs, (to_x, *to_weights) = products_and_gradients(x, (first, second), each, outward, form)
    want_x = np.zeros((total, INNER))
    for out, weight, g, to_weight in zip(outs, (first, second), outward, to_weights, strict=True):
        if total:
            assert_close(out[:total], loop(x, weight, counts)[:total], units=32)
        want_x += loop(g, weight.transpose(0, 2, 1), counts)[:total]
        ends = np.cumsum(counts)
        slices = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        assert_close(to_weight, np.stack([x[s].astype(np.float64).T @ g[s] for s in slices]), units=32)
    if total:
        assert_close(to_x[:total], want_x, units=32)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS[2:])
def test_several_tiles_with_remainders(form, monkeypatch):
    """Groups that begin within a tile of rows, and features of which the last tile has fewer."""
    tile_size = megablox._tile_size
    monkeypatch.setattr(megablox, "_tile_size", lambda size, max_size: tile_size(size, 128))
    counts, rows = (100, 0, 1, 130), 300
    x, weight, g = (draws(*shape, seed=i) for i, shape in enumerate([(rows, 200), (4, 200, 136), (rows, 136)]))
    x[231:] = np.nan
    out, back = jax.vjp(
        lambda x, w: grouped_products(x, (w,), jnp.asarray(counts), form=form)[0], *map(jnp.asarray, (x, weight))
    )
    to_x, to_weight = back(jnp.asarray(g))
    inside = (np.arange(rows) < sum(counts))[:, None]
    assert_close(out, np.where(inside, loop(x, weight, counts), 0), units=256)
    assert_close(to_x, np.where(inside, loop(g, weight.transpose(0, 2, 1), counts), 0), units=256)
    ends = np.cumsum(counts)
    parts = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    assert_close(to_weight, np.stack([x[s].astype(np.float64).T @ g[s] for s in parts]), units=256)


@pytest.mark.slow
def test_gpu_programs_can_run_in_any_order():
    """None writes what belongs to another, and those without rows write nothing."""
    counts, rows = jnp.asarray((9, 0, 25, 3)), 40
    x, weight = jnp.asarray(draws(rows, INNER)), jnp.asarray(draws(4, INNER, OUTER, seed=1))
    split = grouped_matmul._split_into_tiles(jnp.append(counts, rows - jnp.sum(counts)), 16, rows)
    tiles = jnp.stack([split.group, split.start, split.size], axis=1)
    plan = GroupedPlan(x.dtype, x.dtype, tile_rows=16, interpret=True)
    one, other = (grouped_rows(plan, ((x, weight),), order) for order in (tiles, tiles[::-1]))
    assert_array_equal(one, other)
    assert np.any(one[:37], axis=1).all() and not np.any(one[37:])


@pytest.mark.slow(fast=("triton,0,True",))
@pytest.mark.parametrize("form", FORMS)
def test_half_precision_sums_in_single_and_keeps_the_dtype_of_weights(form):
    counts = (19, 0, 1, 12)
    x = jnp.asarray(draws(40 + form.block, 512), jnp.bfloat16)
    weight = jnp.asarray(draws(4, 512, OUTER, seed=1))

    @jax.jit
    def run(weight):
        out, back = jax.vjp(lambda w: grouped_products(x, (w,), jnp.asarray(counts), form=form)[0], weight)
        return out, back(out)[0]

    out, gradient = run(weight)
    assert out.dtype == jnp.bfloat16 and gradient.dtype == jnp.float32
    rows, rounded = (np.asarray(a.astype(jnp.bfloat16), np.float32) for a in (x, weight))
    want = loop(rows, rounded, counts)
    assert_close(
        out[:32].astype(jnp.float32), want[:32], units=1, dtype="bfloat16"
    )  # one rounding of the result, none of the sum
    assert_close(gradient[0], rows[:19].T.astype(np.float64) @ want[:19], units=2, dtype="bfloat16")


@pytest.mark.slow(fast=("ragged_dot,0,False",))
@pytest.mark.parametrize("form", FORMS)
def test_low_rank_weight_equals_merged_weight(form):
    counts, x = jnp.asarray((3, 1, 2, 2)), jnp.asarray(draws(8 + form.block, INNER))
    pair = LowRank(
        base=jnp.asarray(draws(4, INNER, OUTER, seed=1)),
        lora_a=jnp.asarray(draws(4, INNER, 2, seed=2)),
        lora_b=jnp.asarray(draws(4, 2, OUTER, seed=3)),
        scale=0.5,
    )

    @jax.jit
    @jax.value_and_grad
    def run(weight):
        return jnp.sum(jnp.sin(grouped_products(x, (weight,), counts, form=form)[0][:8]))

    (loss, gradient), (want, whole) = run(pair), run(pair.array())
    assert float(loss) == pytest.approx(float(want), rel=1e-5)
    assert not np.any(gradient.base)
    assert_close(gradient.lora_a, 0.5 * np.einsum("gio,gro->gir", whole, pair.lora_b), units=32)


@pytest.mark.parametrize(
    ("platform", "kind", "capability", "dtype", "largest", "wanted"),
    [("cpu", "cpu", None, "float32", 1, GroupedForm("blocks", 160)),
     ("tpu", "TPU v5", None, "bfloat16", 1, RAGGED_DOT),
     ("tpu", "TPU v6 lite", None, "bfloat16", 1, GroupedForm("megablox")),
     ("gpu", "NVIDIA H100 80GB HBM3", "9.0", "bfloat16", 1, GroupedForm("triton")),
     ("gpu", "NVIDIA B200", "10.0", "float32", 2**31 - 1, GroupedForm("triton")),
     ("gpu", "NVIDIA B200", "10.0", "float32", 2**31, GroupedForm("blocks", 160)),
     ("gpu", "NVIDIA B200", "10.0", "float64", 1, GroupedForm("blocks", 160)),
     ("gpu", "NVIDIA A100-SXM4-80GB", "8.0", "bfloat16", 1, GroupedForm("blocks", 160)),
     ("gpu", "AMD Instinct MI300X", "gfx942", "bfloat16", 1, GroupedForm("blocks", 160))],
)  # fmt: skip
def test_chooses_implementation_by_device(platform, kind, capability, dtype, largest, wanted):
    """The kernel for GPUs counts places in 32 bits, and is for generations that it is compiled for."""
    device = types.SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)
    sizes = dict(rows=8192, groups=64, largest=largest)
    assert choose_form(backend_of(platform), device, jnp.dtype(dtype), **sizes) == wanted


def test_tile_rows_grow_with_the_mean_group_up_to_256():
    assert block_rows(8192, 64) == 160
    assert block_rows(4, 64) == 8
    assert block_rows(4096, 8) == 216  # three of them hold 512 rows and a quarter
    assert block_rows(100_000, 8) == 256


@pytest.mark.slow
def test_work_does_not_grow_with_the_number_of_groups():
    """XLA's own count: one block's product, whose repetitions are those of the rows."""

    def flops(groups):
        form = GroupedForm("blocks", block_rows(256, 8))
        shapes = [(256 + form.block, 64), (groups, 64, 64), (groups,)]
        x, weight, counts = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        run = lambda x, w, c: grouped_products(x, (w,), c.astype(jnp.int32), form=form)  # noqa: E731
        return jax.jit(run).lower(x, weight, counts).compile().cost_analysis()["flops"]

    assert flops(32) < 1.1 * flops(8)
