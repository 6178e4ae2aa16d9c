"""Gradients of weights added up in rings of devices: sums travel while their next terms are multiplied.

On a mesh that splits a weight `W` and the tokens along the same axes, the gradient of `x W` is a sum over devices of
which each keeps its own piece: a reduce-scatter. For n devices it has to send (n - 1) / n of the array. libtpu has no
such operation for these arrays: it sums all of them everywhere, or sends them round in rings of its own, which is twice
as many bytes. Here a device adds its term of a piece to the sum that has arrived and sends it on; after n - 1 steps
each device holds its piece. Two rings, one in each direction, have one half of every piece each (Wang et al., "Overlap
communication with dependent computation via decomposition", ASPLOS 2023).

Many devices are rings of rings: rows of devices add up terms that are wide enough to be multiplied at full speed, then
columns of devices the pieces of their sums, and planes those of very many. It is as many bytes, in fewer steps, and
rings that lie along the axes of a torus do not share its links. These sums have no product of their own: where they are
many, terms are cut in four, and the first two travel while the next two are multiplied.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from eqx_decoders.numerics.grouped_matmul import GroupedForm, columns_times_rows, grouped_arrays, in_groups
from eqx_decoders.numerics.product_plan import ProductPlan
from eqx_decoders.sharding.axes import AXES, names_of
from eqx_decoders.sharding.chips import LANES, chip_of
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.links import ring_load, ring_pairs, send


# Rows of a TPU's registers for numbers of 16 bits.
ROWS = 16

# Columns of a term where no more are needed, see `term_width`.
TERM_WIDTH = 512

# Additions to a sum. In 16 bits each rounds it: an error of 0.3 % for 7 of them and 0.7 % for 63 (RMS, terms drawn
# independently), where XLA's own sums on a CPU have 0.2 %.
MOST_ADDITIONS = 31

# Devices of a first level: no more than half of the additions.
MOST_TERMS = 16


class GradientRing(NamedTuple):
    """The ring of a product: how operands and gradient are split.

    - `axes`: the mesh axes of the ring.
    - `levels`: devices of a ring whose terms are products, of one of their sums, and so on.
    - `dimension`: the dimension of the weight of which each device keeps a piece.
    - `cut`: the dimension of the weight that is cut into `parts`, of which each direction has every other one.
    - `turned`: whether terms have `dimension` in front: their pieces are too narrow for the last one.
    - `others`: mesh axes that split the tokens, too.
    - `x`, `out`, `gathered`, `weight`: the partitions of the activation, of the result, of the weight in products and
        of its gradient.
    """

    axes: tuple[str, ...]
    levels: tuple[int, ...]
    dimension: int
    cut: int
    parts: int
    turned: bool
    others: tuple[str, ...]
    x: PartitionSpec
    out: PartitionSpec
    gathered: PartitionSpec
    weight: PartitionSpec


def gradient_ring(plan: ProductPlan, layout: Layout, x: Array, weight: Array) -> GradientRing | None:
    """Return the ring of a product's gradient; None where its devices have none, or a plain sum serves as well."""
    places = layout.gather_places(plan.right, weight.shape) if layout.backend.gradient_rings else None
    if places is None:
        return None
    whole, stored = (place.spec for place in places)
    ring = find_ring(plan, layout, whole, stored, x.shape, weight.shape)
    return ring if ring is not None and suits_ring(ring.levels, weight.shape[ring.dimension], ROWS) else None


class GroupRing(NamedTuple):
    """The ring of a grouped product `rows inner, groups inner outer -> rows outer`, inside of a `shard_map`.

    - `axes`, `levels`, `parts`: as in `GradientRing`.
    - `dimension`: 1 or 2, the dimension of the weight of which each device has a part.
    """

    axes: tuple[str, ...]
    levels: tuple[int, ...]
    dimension: int
    parts: int

    def gather(self, part: Array) -> Array:
        """Gather the parts of all devices."""
        return lax.all_gather(part, self.axes, axis=self.dimension, tiled=True)


def group_ring(layout: Layout, axes: tuple[str, ...], part: tuple[int, ...], dimension: int) -> GroupRing | None:
    """Return the ring of devices along mesh axes that have such parts of a weight; None if it has none."""
    columns, across = part[dimension] * math.prod(layout.sizes[name] for name in axes), part[3 - dimension]
    if not layout.backend.gradient_rings or "data" in axes or across % 2:
        return None
    levels, parts = levels_and_parts(layout, axes, columns, across, across)
    fits = suits_ring(levels, columns, LANES if dimension == 2 else ROWS)
    return GroupRing(axes, levels, dimension, parts) if fits else None


def most_terms(columns: int, across: int, layout: Layout) -> int:
    """Return of how many terms the first level of a ring is at most: they may be a quarter too narrow."""
    return min(4 * columns // (3 * term_width(layout.device.device_kind, across)), MOST_TERMS)


def term_width(device_kind: str, across: int) -> int:
    """Return the columns of a term, whose product with `across` others is not to wait for its operands.

    It does `2 n width across` operations with `2 n (width + across)` bytes: for each byte at least 0.9 of what the chip
    does (v5p: 166, v6e: 560), rounded up to whole registers; `TERM_WIDTH` if it would be more, or the chip isn't known.
    With all of it some matrices would have half as many terms for a register's width.
    """
    chip = chip_of(device_kind)
    ratio = math.inf if chip is None else 0.9 * chip.bf16 / chip.memory_bandwidth
    least = ratio * across / (across - ratio) if across > ratio else TERM_WIDTH
    return min(TERM_WIDTH, LANES * math.ceil(least / LANES))


def ring_levels(size: int, most: int, load: Callable[[int, int], int], products: bool = True) -> tuple[int, ...]:
    """Return devices of two levels of rings, or of three: the first one has `most` at most.

    They are the first by this order:

    - no more than `MOST_ADDITIONS`;
    - the least time that is waited for sums, in quarters of that of the whole array by a link of its own. The first
      level goes on beside `products`, if it has some, which take about as long as its sums take by links of their own.
      `load(devices, distance)` of its messages share a link; those of levels that travel together are not added.
    - with products the most devices in the first level, then the fewest levels, then additions;
    - without products the fewest levels, then additions, then the most devices in the first level.
    """

    def waiting(levels: tuple[int, ...]) -> float:
        distances = [math.prod(levels[index + 1 :]) for index in range(len(levels))]
        loads = map(load, levels, distances)
        shares = [(count - 1) * distance / size for count, distance in zip(levels, distances, strict=True)]
        total = sum(share * messages for share, messages in zip(shares, loads, strict=True))
        return total - shares[0] if products else total

    def order(levels: tuple[int, ...]) -> tuple[Any, ...]:
        count, narrow = additions(levels), -levels[0]
        rest = (narrow, len(levels), count) if products else (len(levels), count, narrow)
        return count > MOST_ADDITIONS, round(4 * waiting(levels)), *rest

    def cuts(number: int) -> list[int]:
        return [count for count in range(1, number + 1) if number % count == 0]

    pairs = [(first, size // first) for first in cuts(size) if first <= max(1, most)]
    triples = [(first, rest // last, last) for first, rest in pairs for last in cuts(rest) if 1 < last < rest]
    return min([*pairs, *triples], key=order)


def additions(levels: tuple[int, ...]) -> int:
    """Return of how many additions a sum is."""
    return sum(levels) - len(levels)


def levels_and_parts(
    layout: Layout, axes: tuple[str, ...], columns: int, across: int, cut: int
) -> tuple[tuple[int, ...], int]:
    """Return the levels of a ring along mesh axes, and the parts of its terms, which have `across` other columns.

    The first level has no more devices than terms are wide enough. There are 4 parts where the other levels have a
    tenth of the bytes or more and no more steps than the first, beside which they travel, and quarters of terms are
    wide enough, too; otherwise 2. `cut` is the size of the dimension that is cut into them.
    """
    size = math.prod(layout.sizes[name] for name in axes)
    first, *others = levels = ring_levels(size, most_terms(columns, across // 2, layout), _load_of(layout, axes))
    hidden = 1 < max(others) <= first and 10 * (size // first - 1) >= size - 1
    wide = across // 4 >= TERM_WIDTH and first <= most_terms(columns, across // 4, layout)
    return levels, 4 if hidden and wide and cut % 4 == 0 else 2


def _load_of(layout: Layout, axes: tuple[str, ...]) -> Callable[[int, int], int]:
    return partial(ring_load, layout.mesh, axes)


def suits_ring(levels: tuple[int, ...], size: int, least: int) -> bool:
    """Return whether a weight's gradient is added up in rings: its pieces have so many columns, and are not many."""
    return additions(levels) <= MOST_ADDITIONS and size >= least * math.prod(levels)


def find_ring(
    plan: ProductPlan,
    layout: Layout,
    whole: PartitionSpec,
    stored: PartitionSpec,
    x: tuple[int, ...],
    weight: tuple[int, ...],
) -> GradientRing | None:
    """Return the ring along the one dimension that is split in `stored` and not in `whole`; None if there is none."""
    left, right, out = plan.left, plan.right, plan.out
    if not all(word in AXES for word in (*left, *right, *out)):
        return None
    sizes = dict(zip((*right, *left), (*weight, *x), strict=True))
    kept, owned = ([names_of(group) for group in spec] for spec in (whole, stored))
    changed = [index for index, (one, other) in enumerate(zip(kept, owned, strict=True)) if one != other]
    tokens = [word for word in left if word not in right]
    split = dict(zip(right, kept, strict=True))
    here = [sizes[word] // math.prod(layout.sizes[name] for name in names) for word, names in split.items()]
    even = [index for index, size in enumerate(here) if index not in changed and size % 2 == 0]
    if len(changed) != 1 or kept[changed[0]] or set(left) & set(right) & set(out) or not even:
        return None

    def groups(words: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        spec = layout.activation_spec(words, [sizes[word] for word in words])
        return {word: names_of(group) for word, group in zip(words, spec, strict=True)}

    ins, outs = groups(left), groups(out)
    shared = {word: ins[word] for word in tokens if ins[word] == outs[word]}
    rows = tuple(name for names in shared.values() for name in names)
    same = all(split[word] == (ins | outs)[word] for word in right)
    axes = owned[changed[0]]
    # `data` may join slices by a slow network, for which a ring would wait at each step
    if not same or "data" in axes or not set(axes) <= set(rows) <= layout.axes_here:
        return None

    def spec(words: tuple[str, ...]) -> PartitionSpec:
        return PartitionSpec(*(split.get(word, shared.get(word)) or None for word in words))

    others = tuple(name for name in rows if name not in axes)
    (dimension,), cut = changed, even[0]
    columns, size = weight[dimension], math.prod(layout.sizes[name] for name in axes)
    levels, parts = levels_and_parts(layout, axes, columns, math.prod(here) // columns, here[cut])
    turned = dimension == len(right) - 1 and columns < LANES * size
    return GradientRing(axes, levels, dimension, cut, parts, turned, others, spec(left), spec(out), whole, stored)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def ring_product(
    plan: ProductPlan,
    dtype: np.dtype,
    layout: Layout,
    ring: GradientRing,
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
) -> Float[Array, "..."]:
    """Multiply an activation by a weight that is gathered; the weight's gradient is added up in a ring."""
    return jnp.einsum(plan.letters, x, _gathered(layout, ring, weight), preferred_element_type=dtype)


def _gathered(layout: Layout, ring: GradientRing, weight: Array) -> Array:
    return lax.with_sharding_constraint(weight, NamedSharding(layout.mesh_here, ring.gathered))


def _forward(plan, dtype, layout, ring, x, weight):
    weight = _gathered(layout, ring, weight)
    return jnp.einsum(plan.letters, x, weight, preferred_element_type=dtype), (x, weight)


def _backward(plan, dtype, layout, ring, saved, gradient):
    x, weight = saved
    pull = jax.linear_transpose(lambda x: jnp.einsum(plan.letters, x, weight, preferred_element_type=dtype), x)
    terms = partial(_scattered_gradient, plan, ring, weight.dtype)
    return *pull(gradient), layout.shard_map(terms, (ring.x, ring.out), ring.weight)(x, gradient)


ring_product.defvjp(_forward, _backward)


def _scattered_gradient(plan: ProductPlan, ring: GradientRing, dtype: np.dtype, x: Array, gradient: Array) -> Array:
    """Return this device's piece of the weight's gradient, from its tokens and those of all others."""
    letters, result = plan.letters.split("->")
    left, right = letters.split(",")
    word, cut_word = plan.right[ring.dimension], plan.right[ring.cut]
    front = [ring.dimension] if ring.turned else []
    order = [*front, *(index for index in range(len(right)) if index not in front)]
    product = f"{left},{result}->{''.join(right[index] for index in order)}"

    def take(array: Array, words: tuple[str, ...], word: str, parts: int, index: Array | int) -> Array:
        if word not in words:
            return array
        place = words.index(word)
        width = array.shape[place] // parts
        return lax.dynamic_slice_in_dim(array, index * width, width, place)

    def term(index: Array, part: int) -> Array:
        one, other = (
            take(take(array, words, cut_word, ring.parts, part), words, word, ring.levels[0], index)
            for array, words in ((x.astype(gradient.dtype), plan.left), (gradient, plan.out))
        )
        return separate(jnp.einsum(product, one, other, preferred_element_type=jnp.float32))

    sums = ring_scatter(term, ring.axes, ring.levels, dtype, order.index(ring.dimension), ring.parts)
    piece = jnp.moveaxis(jnp.concatenate(sums, order.index(ring.cut)), range(len(order)), order)
    return lax.psum(piece, ring.others) if ring.others else piece


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def ring_groups(
    rings: tuple[GroupRing, ...], form: GroupedForm, x: Array, parts: tuple[Array, ...], counts: Int[Array, "groups"]
) -> tuple[Array, ...]:
    """Multiply sorted rows by several weights of which each device has a part (`grouped_products`)."""
    return _groups_forward(rings, form, x, parts, counts)[0]


def _groups_forward(rings, form, x, parts, counts):
    whole = tuple(ring.gather(part) for ring, part in zip(rings, parts, strict=True))
    return grouped_arrays(x, whole, counts, form), (x, whole, counts)


def _groups_backward(rings, form, saved, gradients):
    x, whole, counts = saved
    _, pull = jax.vjp(lambda x: grouped_arrays(x, whole, counts, form), x)
    inside = in_groups(x, counts)
    x, *masked = (jnp.where(inside, each, jnp.zeros((), each.dtype)) for each in (x, *gradients))
    to_parts = (
        _scattered_groups(ring, form, weight.dtype, x, gradient, counts)
        for ring, weight, gradient in zip(rings, whole, masked, strict=True)
    )
    return *pull(gradients), tuple(to_parts), None


ring_groups.defvjp(_groups_forward, _groups_backward)


def _scattered_groups(
    ring: GroupRing, form: GroupedForm, dtype: np.dtype, x: Array, gradient: Array, counts: Array
) -> Array:
    """Return this device's part of the gradient of a weight, from its rows and those of all others."""
    outer = ring.dimension == 2  # the results' columns are split, not those of x
    split, other = (gradient, x) if outer else (x, gradient)
    width, others = split.shape[1] // ring.levels[0], jnp.split(other, ring.parts, 1)

    def term(index: Array, part: int) -> Array:
        one, two = lax.dynamic_slice_in_dim(split, index * width, width, 1), others[part]
        one, two = (two, one) if outer else (one, two)
        return separate(columns_times_rows(form, one, two, counts, x.dtype))

    sums = ring_scatter(term, ring.axes, ring.levels, dtype, ring.dimension, ring.parts)
    return jnp.concatenate(sums, 3 - ring.dimension)


def separate(product: Array) -> Array:
    """Keep XLA from adding the sum that arrives in the product itself, which would then wait for it."""
    return lax.optimization_barrier(product)


class _Level(NamedTuple):
    """Two sums of a ring of devices, one in each direction: `term(index, half)`, devices and their distance."""

    term: Callable[[Int[Array, ""], int], Array]
    size: int
    distance: int


def ring_scatter(
    term: Callable[[Int[Array, ""], int], Array],
    axes: tuple[str, ...],
    levels: tuple[int, ...],
    dtype: np.dtype,
    dimension: int,
    parts: int = 2,
) -> list[Array]:
    """Sum over devices; return this device's piece along a dimension, in parts, inside of a `shard_map`.

    `term(index, part)` makes this device's term of a part of a piece, of which there are as many as devices of the
    first level. The pieces are cut further on the next ones, while the terms of the next two parts are made. Sums
    travel in `dtype`, and are rounded to it after each addition.
    """
    sums: dict[int, tuple[Array, Array]] = {}  # of each two parts
    for step in range(parts // 2 + len(levels) - 1):
        running = {}
        for level, size in enumerate(levels):
            if 0 <= (pair := step - level) < parts // 2:
                product = partial(lambda pair, index, half: term(index, 2 * pair + half), pair)
                running[pair] = _Level(
                    _cutter(sums[pair], size, dimension) if level else product, size, math.prod(levels[level + 1 :])
                )
        sums |= zip(running, _run_rings(list(running.values()), axes, dtype), strict=True)
    return [half for pair in sums.values() for half in pair]


def _cutter(halves: tuple[Array, Array], parts: int, dimension: int) -> Callable[[Int[Array, ""], int], Array]:
    """Return the function from index and half to a piece of two halves."""
    width = halves[0].shape[dimension] // parts
    return lambda index, half: lax.dynamic_slice_in_dim(halves[half], index * width, width, dimension)


def _run_rings(levels: Sequence[_Level], axes: tuple[str, ...], dtype: np.dtype) -> list[tuple[Array, Array]]:
    """Run levels of `ring_scatter` beside each other."""
    count, here = lax.axis_size(axes), lax.axis_index(axes)

    def terms(level: _Level, step: Array | int) -> tuple[Array, Array]:
        place = here // level.distance % level.size
        return level.term((place - 1 - step) % level.size, 0), level.term((place + 1 + step) % level.size, 1)

    def add(level: _Level, step: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        rings = [ring_pairs(count, level.size, level.distance, way) for way in (1, -1)]
        arrived = [send(each, axes, pairs) for each, pairs in zip(sums, rings, strict=True)]
        one, other = (
            (each.astype(new.dtype) + new).astype(dtype) for each, new in zip(arrived, terms(level, step), strict=True)
        )
        return one, other

    def add_to_all(size: int, step: Array, sums: list[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
        return [
            add(level, step, each) if level.size >= size else each for level, each in zip(levels, sums, strict=True)
        ]

    def first_terms(level: _Level) -> tuple[Array, Array]:
        one, other = (each.astype(dtype) for each in terms(level, 0))
        return one, other

    sums, begin = list(map(first_terms, levels)), 1
    for size in sorted({level.size for level in levels} - {1}):
        sums, begin = lax.fori_loop(begin, size, partial(add_to_all, size), sums), size
    return sums


def ring_sum(layout: Layout, x: Array, axes: tuple[str, ...], dimension: int) -> Array:
    """Sum an array over devices; return this device's piece along a dimension, as `lax.psum_scatter` does.

    More than `MOST_ADDITIONS` are made in float32.
    """
    across, size = (dimension + 1) % x.ndim, lax.axis_size(axes)
    levels = ring_levels(size, size, _load_of(layout, axes), products=False)
    many = additions(levels) > MOST_ADDITIONS
    dtype = np.promote_types(x.dtype, np.float32) if many else x.dtype
    one, other = jnp.split(x, [x.shape[across] // 2], across)
    term = _cutter((one, other), levels[0], dimension)
    return jnp.concatenate(ring_scatter(term, axes, levels, dtype, dimension), across).astype(x.dtype)
