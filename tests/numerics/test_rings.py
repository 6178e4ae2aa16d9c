"""Gradients added up in rings of devices are those of one device; where there is no ring, none is found."""

import dataclasses
import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import eqx_decoders as ed
from eqx_decoders.data.batch import Batch
from eqx_decoders.numerics.einsum import einsum
from eqx_decoders.numerics.grouped_matmul import GroupedForm, grouped_arrays
from eqx_decoders.numerics.product_plan import product_plan
from eqx_decoders.numerics.rings import dense_product, grouped_product, levels
from eqx_decoders.numerics.rings.dense_product import find_ring, gradient_ring, ring_product
from eqx_decoders.numerics.rings.grouped_product import GroupRing, group_ring, ring_groups
from eqx_decoders.numerics.rings.reduce_scatter import ring_sum
from eqx_decoders.sharding.chips import chip_of
from tests.compare import assert_array_equal, assert_close
from tests.models import draw


PRODUCTS = {
    "batch length embed, embed mlp -> batch length mlp": ((8, 6, 16), (16, 24)),
    "batch length mlp, mlp embed -> batch length embed": ((8, 6, 24), (24, 16)),
    "batch length heads head_dim, heads head_dim embed -> batch length embed": ((8, 6, 4, 2), (4, 2, 16)),
}
IN, OUT, HEADS = PRODUCTS
MESHES = (dict(fsdp=8), dict(fsdp=2, tensor=4), dict(data=2, fsdp=4), dict(fsdp=2, context=2, expert=2))
FORM = GroupedForm("ragged_dot")


def ring_of(pattern, layout, shapes=None):
    plan, (x, weight) = product_plan(pattern), shapes or PRODUCTS[pattern]
    whole, stored = (place.spec for place in layout.gather_shardings(plan.right, weight))
    return find_ring(plan, layout, whole, stored, x, weight)


def gradients(product, *argnums):
    """A function that returns the gradients of a loss over a product, and the product."""

    def loss(x, weight):
        y = product(x, weight)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    return jax.grad(loss, argnums=argnums, has_aux=True)


RINGS = {
    "2x4": (OUT, MESHES[0], dict(levels=(2, 4), parts=4, dimension_first=True)),
    "4x2": (OUT, MESHES[0], dict(levels=(4, 2), parts=4, dimension_first=True)),
    "2x2x2": (OUT, MESHES[0], dict(levels=(2, 2, 2), parts=4, dimension_first=True)),
    **{"-".join(sizes): (IN, sizes, {}) for sizes in MESHES},
    "not turned": (OUT, MESHES[0], dict(dimension_first=False)),
    "heads": (HEADS, MESHES[1], {}),
    "heads in 4": (HEADS, MESHES[0], dict(cut=0, parts=4)),
    "heads in 2": (HEADS, MESHES[0], dict(cut=1, parts=2)),
}


@pytest.mark.slow(fast=("2x4",))
@pytest.mark.parametrize("case", RINGS)
def test_a_ring_gives_the_gradients_of_one_device(monkeypatch, case):
    """Eight devices are two rings of four, whose terms are products, and four of two; the other way round; a cube."""
    pattern, sizes, changes = RINGS[case]
    monkeypatch.setattr(levels, "TERM_WIDTH", 4 if pattern == IN else 8)
    layout, (x, weight) = ed.Layout.create(**sizes), map(draw, (0, 1), PRODUCTS[pattern])
    plan, ring = product_plan(pattern), ring_of(pattern, layout)
    assert ring is not None and ring.dimension_first == (pattern != IN)
    assert sizes != MESHES[0] or (ring.levels, ring.parts) == (((4, 2), 4) if pattern == IN else ((2, 4), 2))
    ring = ring._replace(**changes)

    def product(x, weight):
        return ring_product(plan, np.dtype("float32"), layout, ring, x, weight)

    stored = layout.weight_sharding(plan.right, weight.shape)
    placed = jax.device_put(x, layout.activation_sharding(plan.left, x.shape)), jax.device_put(weight, stored)
    step = jax.jit(gradients(product, 0, 1)).lower(*placed).compile()
    got = step(*placed)
    assert_close(got, gradients(lambda *both: einsum(pattern, *both), 0, 1)(x, weight))
    assert got[0][1].sharding.is_equivalent_to(stored, weight.ndim)
    found = [
        pairs.count("{")
        for pairs in re.findall(r"collective-permute.*source_target_pairs=\{(.*?)\}\}", str(step.as_text()))
    ]
    assert found and all(each == layout.mesh.size for each in found)


def test_axes_of_a_ring_stand_in_any_order():
    """Of a mesh whose axes stand in another order than those that split the weight."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("expert", "fsdp"))
    layout, (x, weight) = ed.Layout(mesh), map(draw, (0, 1), PRODUCTS[IN])
    plan, ring = product_plan(IN), ring_of(IN, layout)
    assert ring is not None and ring.axes == ("fsdp", "expert")
    product = partial(ring_product, plan, np.dtype("float32"), layout, ring)
    placed = jax.device_put(x, layout.activation_sharding(plan.left, x.shape))
    got = jax.jit(gradients(product, 0, 1))(placed, weight)
    assert_close(got, gradients(lambda *both: einsum(IN, *both), 0, 1)(x, weight))


def test_sums_travel_in_the_dtype_of_the_weight():
    layout, pattern = ed.Layout.create(fsdp=8), IN
    x, weight = (draw(seed, shape, jnp.bfloat16) for seed, shape in enumerate(PRODUCTS[pattern]))
    ring = ring_of(pattern, layout)

    def product(x, weight):
        return ring_product(product_plan(pattern), np.dtype("float32"), layout, ring, x, weight)

    ((gradient,), _) = jax.jit(gradients(product, 1))(x, weight)
    wide = [each.astype(jnp.float32) for each in (x, weight)]
    ((expected,), _) = gradients(lambda *both: einsum(pattern, *both), 1)(*wide)
    assert gradient.dtype == jnp.bfloat16
    assert_close(gradient.astype(jnp.float32), expected, dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    "sizes, pattern, shapes",
    [
        (dict(fsdp=8), "... embed, embed mlp -> ... mlp", ((8, 6, 16), (16, 12))),
        (dict(fsdp=8), "batch length embed, embed mlp -> batch length mlp", ((6, 6, 16), (16, 12))),  # rows are whole
        (dict(fsdp=8), "batch length embed, embed mlp -> batch length mlp", ((8, 6, 16), (16, 11))),  # no two halves
        (dict(fsdp=2, fsdp_transpose=4), IN, None),  # two dimensions are split
        (
            dict(fsdp=4, tensor=2),
            "batch experts embed, experts embed mlp -> batch experts mlp",
            ((8, 2, 16), (2, 16, 12)),
        ),
    ],
)
def test_there_is_no_ring(sizes, pattern, shapes):
    assert ring_of(pattern, ed.Layout.create(**sizes), shapes) is None


def test_no_ring_joins_copies_of_the_weights():
    layout = dataclasses.replace(ed.Layout.create(data=2, fsdp=4), gradients_over_data=True)
    assert ring_of(IN, layout) is None


@pytest.mark.slow
def test_a_model_learns_the_same_by_rings(monkeypatch):
    """A loss and its gradients through scan, remat and head, with all matrices of attention and MLP in rings."""
    config = ed.get_config("tiny")
    config = dataclasses.replace(config, vocab_size=64, blocks=config.blocks[:2])
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (8, 128)))

    def gradients(layout):
        model = ed.init(config, key=jax.random.key(0), layout=layout, remat="full")
        arrays, static = eqx.partition(model, eqx.is_array)
        loss = lambda arrays: ed.next_token_loss(eqx.combine(arrays, static), Batch(tokens=tokens))[0]  # noqa: E731
        traced = jax.jit(jax.grad(loss)).trace(arrays)
        return traced.lower().compile()(arrays), str(traced.jaxpr)

    want, _ = gradients(ed.Layout())
    layout = ed.Layout.create(fsdp=4, tensor=2)
    backend = dataclasses.replace(layout.backend, gradient_rings=True)
    monkeypatch.setattr(ed.Layout, "backend", property(lambda self: backend))
    for module, name in ((dense_product, "LANES"), (dense_product, "ROWS"), (levels, "LANES"), (levels, "TERM_WIDTH")):
        monkeypatch.setattr(module, name, 1)
    got, program = gradients(layout)
    assert program.count("ppermute") >= 2 * 5  # both directions; programs of equal matrices are printed once
    assert_close(jax.device_get(got), jax.device_get(want), units=512)


def test_a_layout_chooses_rings_for_pieces_as_wide_as_registers(monkeypatch):
    """Columns of the last dimension, rows of another one, or of the last one in front."""
    layout, plan = ed.Layout.create(fsdp=8), product_plan(OUT)
    shapes = [jnp.zeros(shape) for shape in ((8, 6, 12), (12, 1024), (8, 6, 12), (12, 1016))]
    narrow = [jnp.zeros(shape) for shape in ((8, 6, 12), (12, 128), (8, 6, 12), (12, 120))]
    assert gradient_ring(plan, layout, *shapes[:2]) is None  # on a CPU
    backend = dataclasses.replace(layout.backend, gradient_rings=True)
    monkeypatch.setattr(ed.Layout, "backend", property(lambda self: backend))
    ring = gradient_ring(plan, layout, *shapes[:2])
    assert ring is not None and ring.axes == ("fsdp",) and not ring.dimension_first
    assert ring.levels == (2, 4)  # terms of 512 columns
    assert all(gradient_ring(plan, layout, *each).dimension_first for each in (shapes[2:], narrow[:2]))
    assert gradient_ring(plan, layout, *narrow[2:]) is None
    few = [jnp.zeros(shape) for shape in ((8, 6, 128), (128, 12), (8, 6, 120), (120, 12))]
    ring = gradient_ring(product_plan(IN), layout, *few[:2])
    assert ring is not None and ring.levels == (1, 8)
    assert gradient_ring(product_plan(IN), layout, *few[2:]) is None
    monkeypatch.setattr(levels, "MAX_ADDITIONS", 3)
    assert gradient_ring(plan, layout, *shapes[:2]).levels == (2, 2, 2)
    monkeypatch.setattr(levels, "MAX_ADDITIONS", 2)
    assert gradient_ring(plan, layout, *shapes[:2]) is None


@pytest.mark.parametrize(
    "kind, across, width",
    [
        ("TPU v5", 7168, 256),
        ("TPU v5", 320, 384),
        ("TPU v5", 140, 512),
        ("TPU v5 lite", 2048, 256),
        ("TPU v6 lite", 7168, 512),
        ("cpu", 7168, 512),
    ],
)
def test_terms_are_as_wide_as_their_products_need(kind, across, width):
    """In bfloat16 the operations for each byte of the operands are 0.9 of what the chip does while it reads one."""
    chip, got = chip_of(kind), levels.term_width(kind, across)
    assert got == width
    if "v5" in kind and across > 140:
        assert chip is not None and got * across / (got + across) > 0.9 * chip.bf16 / chip.memory_bandwidth


@pytest.mark.parametrize("pattern, across", [(IN, 3), (OUT, 3), (HEADS, 1)])
def test_terms_have_half_or_a_quarter_of_what_a_device_has_of_the_other_dimensions(monkeypatch, pattern, across):
    seen = []
    monkeypatch.setattr(levels, "term_width", lambda kind, across: seen.append(across) or 4)
    monkeypatch.setattr(levels, "TERM_WIDTH", 1)
    ring = ring_of(pattern, ed.Layout.create(fsdp=2, tensor=4))
    assert ring is not None and seen[0] == across and seen[1:] == ([1] if across == 3 else [])


def layout_of(monkeypatch, size):
    """A layout of so many devices that no message shares a link."""
    monkeypatch.setattr(ed.Layout, "sizes", property(lambda self: {"fsdp": size}))
    monkeypatch.setattr(levels, "ring_load", lambda *_: 1)
    return ed.Layout()


@pytest.mark.parametrize(
    "size, columns, across, want",
    [
        (16, 2048, 2048, ((4, 4), 4)),
        (16, 1536, 2048, ((4, 4), 4)),
        (16, 1535, 2048, ((2, 8), 2)),  # the second level has more steps
        (16, 4096, 2048, ((8, 2), 2)),  # it has a fifteenth of the bytes
        (16, 2048, 2047, ((4, 4), 2)),  # quarters are not as wide as a term
        (4, 2048, 2048, ((4, 1), 2)),  # there is one level
        (4, 512, 2048, ((1, 4), 2)),
        (64, 4096, 2048, ((8, 8), 4)),
        (512, 16384, 2048, ((16, 8, 4), 2)),  # two levels would be 46 additions
        (64, 256, 2048, ((1, 8, 8), 2)),
    ],
)
def test_terms_are_cut_in_four_where_that_hides_much(monkeypatch, size, columns, across, want):
    layout = layout_of(monkeypatch, size)
    assert levels.levels_and_parts(layout, ("fsdp",), columns, across, 4) == want


@pytest.mark.parametrize("across, parts", [(24, 4), (26, 2)])
def test_what_has_no_quarters_is_cut_in_halves(monkeypatch, across, parts):
    layout = ed.Layout.create(fsdp=8)
    backend = dataclasses.replace(layout.backend, gradient_rings=True)
    monkeypatch.setattr(ed.Layout, "backend", property(lambda self: backend))
    monkeypatch.setattr(levels, "TERM_WIDTH", 4)
    monkeypatch.setattr(grouped_product, "ROWS", 1)
    assert ring_of(IN, layout, ((8, 6, 16), (16, across))).parts == parts
    assert group_ring(layout, ("fsdp",), (3, 2, across), 1).parts == parts


def test_quarters_of_terms_do_not_wait_for_their_operands(monkeypatch):
    """They would need wider terms, of which there are not as many."""
    monkeypatch.setattr(levels, "term_width", lambda kind, across: 512 if across >= 1024 else 1024)
    layout = layout_of(monkeypatch, 16)
    assert levels.levels_and_parts(layout, ("fsdp",), 2048, 2048, 4) == ((4, 4), 2)
    assert levels.levels_and_parts(layout, ("fsdp",), 2048, 4096, 4) == ((4, 4), 4)


@pytest.mark.parametrize(
    "size, most, shared, want",
    [
        (64, 16, {}, (16, 4)),
        (64, 16, {(16, 4): 2}, (8, 8)),  # the first level has most bytes
        (64, 16, {(16, 4): 2, (8, 8): 9}, (4, 16)),
        (64, 4, {(16, 1): 2}, (4, 4, 4)),
        (512, 16, {(16, 32): 8}, (8, 8, 8)),
        (512, 16, {}, (16, 8, 4)),
        (64, 16, {(16, 4): 2, (8, 8): 2, (4, 16): 2, (2, 32): 2, (1, 64): 1}, (16, 4)),  # one level alone is too many
        (37, 16, {}, (1, 37)),
    ],
)
def test_levels_are_those_that_share_no_links(size, most, shared, want):
    assert levels.ring_levels(size, most, lambda count, distance: shared.get((count, distance), 1)) == want


@pytest.mark.parametrize(
    "size, shared, want",
    [
        (8, {}, (4, 2)),
        (16, {}, (4, 4)),  # the fewest additions of two levels
        (16, {(4, 4): 2, (4, 1): 2, (8, 2): 2, (2, 8): 2}, (16, 1)),
        (64, {(8, 8): 4}, (16, 4)),
        (512, {}, (8, 8, 8)),
    ],
)
def test_levels_of_sums_without_products_have_few_additions(size, shared, want):
    load = lambda count, distance: shared.get((count, distance), 1)  # noqa: E731
    assert levels.ring_levels(size, size, load, products=False) == want


def test_layouts_without_devices_have_rings(monkeypatch):
    """Of experts, of a dense product, and of sums: shapes are known before there is a machine."""
    layout = ed.Layout.create(fsdp=8, abstract=True)
    backend = dataclasses.replace(layout.backend, gradient_rings=True)
    monkeypatch.setattr(ed.Layout, "backend", property(lambda self: backend))
    assert ring_of(IN, layout) is not None
    assert group_ring(layout, ("fsdp",), (3, 256, 512), 1) is not None
    summed = layout.shard_map(lambda x: ring_sum(layout, x[0], ("fsdp",), 0), P("fsdp"), P("fsdp"))
    assert jax.eval_shape(summed, jnp.zeros((8, 16, 4))).shape == (16, 4)


def test_a_first_level_has_a_bound(monkeypatch):
    monkeypatch.setattr(levels, "term_width", lambda kind, across: 1)
    monkeypatch.setattr(levels, "MAX_TERMS", 3)
    assert ring_of(IN, ed.Layout.create(fsdp=8)).levels == (2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("dimension, shape", [(0, (16, 5)), (1, (1, 8)), (1, (3, 24))])
def test_a_ring_sums_as_a_reduce_scatter_does(dimension, shape):
    """Halves of odd sizes and of none, too. The numbers are whole, so that the order of the sums does not matter."""
    layout = ed.Layout.create(fsdp=8)
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (8, *shape)), jnp.float32)
    spec = P("fsdp") if dimension == 0 else P(None, "fsdp")

    def both(x):
        scattered = lax.psum_scatter(x[0], "fsdp", scatter_dimension=dimension, tiled=True)
        return scattered, ring_sum(layout, x[0], ("fsdp",), dimension)

    want, got = jax.jit(layout.shard_map(both, P("fsdp"), spec))(x)
    assert_array_equal(got, want)
    assert_array_equal(want, x.sum(0))


def test_rings_of_grouped_products_give_the_gradients_of_one_device():
    """Rows of experts as on a TPU, of which the last ones belong to none and hold anything."""
    layout, counts = ed.Layout.create(fsdp=8), jnp.asarray(np.random.default_rng(0).integers(0, 4, (8, 3), np.int32))
    kinds = GroupRing(("fsdp",), (4, 2), 1, 2), GroupRing(("fsdp",), (2, 4), 2, 4)
    x, weights = draw(1, (8, 12, 8)), (draw(2, (3, 8, 6)), draw(3, (3, 8, 16)))
    filled = jnp.arange(12)[None, :, None] < counts.sum(1)[:, None, None]

    def loss(product, x, weights, counts):
        outs = product(x, weights, counts)
        return sum(jnp.sum(jnp.sin(out)) for out in outs)

    def on_devices(x, weights, counts):
        return jax.grad(partial(loss, partial(ring_groups, kinds, FORM)), (0, 1))(x[0], weights, counts[0])

    parts = P(None, "fsdp"), P(None, None, "fsdp")
    mapped = layout.shard_map(on_devices, (P("fsdp"), parts, P("fsdp")), (P("fsdp"), parts))
    to_x, got = jax.jit(mapped)(jnp.where(filled, x, jnp.nan), weights, counts)
    one = jax.grad(
        lambda w: sum(loss(partial(grouped_arrays, form=FORM), *each) for each in zip(x, [w] * 8, counts, strict=True))
    )
    assert_close(got, jax.jit(one)(weights), units=64)
    assert bool(jnp.all(jnp.isfinite(to_x)))
