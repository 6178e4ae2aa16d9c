"""Ring reduce-scatter of weight gradients, overlapped with the products that compute them.

On a mesh that splits a weight `W` and the tokens along the same axes (FSDP), the gradient of `x W` is summed over
devices, and each device keeps one shard: a reduce-scatter. With n devices it must send (n - 1) / n of the array. libtpu
does not use a reduce-scatter for these arrays: it runs an all-reduce, or other rings, which send twice as many bytes.
Here a device receives the partial sum of a shard, adds its own term, and sends the sum to the next device; after n - 1
steps each device has the sum of its shard. Terms are computed while sums are sent. Two rings in opposite directions
process one half of each shard each (Wang et al., "Overlap communication with dependent computation via decomposition",
ASPLOS 2023).

With many devices, a single ring would have too many steps, and terms too narrow for fast products. So rings are
hierarchical: devices of a first level sum terms that are wide enough, and rings of a second (and third) level sum the
pieces of their results. That sends as many bytes in fewer steps, and rings along different axes of a torus do not share
links. The further levels have no products to overlap with; if they take long, terms are cut into four parts, and the
sums of the first two are sent while the next two are multiplied.
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


# Rows of a TPU register tile of a 16-bit dtype.
ROWS = 16

# Maximum of the minimum number of columns of a term, see `term_width`.
TERM_WIDTH = 512

# Maximum number of additions in a sum. Each one rounds a 16-bit sum: the RMS error for independent terms is 0.3 % for 7
# additions and 0.7 % for 63; that of XLA's sums on a CPU is 0.2 %.
MAX_ADDITIONS = 31

# Maximum number of devices of a first level.
MAX_TERMS = 16


class GradientRing(NamedTuple):
    """Ring reduce-scatter for the weight gradient of a product: how operands and gradient are split.

    - `axes`: mesh axes of the ring.
    - `levels`: number of devices of a ring of each level; the first level sums products.
    - `dimension`: dimension of the weight that is sharded over the ring.
    - `cut`: dimension of the weight that is cut into `parts`, which alternate between the two directions.
    - `turned`: whether terms are computed with `dimension` first, because pieces are too narrow as last dimension.
    - `others`: further mesh axes that split the tokens.
    - `x`, `out`, `gathered`, `weight`: partitions of the activation, of the result, of the weight in the product, and
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
    """Return the ring for the weight gradient of a product; None if the default reduction is used."""
    places = layout.gather_shardings(plan.right, weight.shape) if layout.backend.gradient_rings else None
    if places is None:
        return None
    whole, stored = (place.spec for place in places)
    ring = find_ring(plan, layout, whole, stored, x.shape, weight.shape)
    return ring if ring is not None and suits_ring(ring.levels, weight.shape[ring.dimension], ROWS) else None


class GroupRing(NamedTuple):
    """Ring reduce-scatter for a grouped product `rows inner, groups inner outer -> rows outer` inside a `shard_map`.

    - `axes`, `levels`, `parts`: as in `GradientRing`.
    - `dimension`: dimension of the weight that is sharded over the ring, 1 or 2.
    """

    axes: tuple[str, ...]
    levels: tuple[int, ...]
    dimension: int
    parts: int

    def gather(self, part: Array) -> Array:
        """All-gather the shards of the weight."""
        return lax.all_gather(part, self.axes, axis=self.dimension, tiled=True)


def group_ring(layout: Layout, axes: tuple[str, ...], part: tuple[int, ...], dimension: int) -> GroupRing | None:
    """Return the ring along mesh axes for a weight with shards of shape `part`; None if a ring is not used."""
    columns, across = part[dimension] * math.prod(layout.sizes[name] for name in axes), part[3 - dimension]
    if not layout.backend.gradient_rings or "data" in axes or across % 2:
        return None
    levels, parts = levels_and_parts(layout, axes, columns, across, across)
    fits = suits_ring(levels, columns, LANES if dimension == 2 else ROWS)
    return GroupRing(axes, levels, dimension, parts) if fits else None


def max_terms(columns: int, across: int, layout: Layout) -> int:
    """Return the maximum number of devices of the first level; terms may be narrower than `term_width` by a quarter."""
    return min(4 * columns // (3 * term_width(layout.device.device_kind, across)), MAX_TERMS)


def term_width(device_kind: str, across: int) -> int:
    """Return the minimum number of columns of a term for which its product is not limited by memory bandwidth.

    A product of `width` and `across` columns has `2 n width across` operations and reads `2 n (width + across)` bytes.
    The required ratio is 0.9 of the chip's operations per byte (v5p: 166, v6e: 560); with 1.0 some matrices would have
    half as many terms for the width of one register. The width is rounded up to complete registers, and is at most
    `TERM_WIDTH`, also for unknown chips.
    """
    chip = chip_of(device_kind)
    ratio = math.inf if chip is None else 0.9 * chip.bf16 / chip.memory_bandwidth
    least = ratio * across / (across - ratio) if across > ratio else TERM_WIDTH
    return min(TERM_WIDTH, LANES * math.ceil(least / LANES))


def ring_levels(size: int, max_first: int, load: Callable[[int, int], int], products: bool = True) -> tuple[int, ...]:
    """Return the number of devices of each of two or three levels; their product is `size`.

    The first level has at most `max_first` devices. Levels are compared by these criteria, in this order:

    - at most `MAX_ADDITIONS` additions;
    - shortest communication time that is not overlapped, in steps of a quarter of the time for sending the array over
      one link. The first level overlaps with `products`, if there are any, which take about as long as its messages if
      these do not share links. `load(devices, distance)` is the number of messages of a level that share a link.
    - with products: most devices in the first level, then fewest levels, then fewest additions;
    - without products: fewest levels, then fewest additions, then most devices in the first level.
    """

    def exposed_time(levels: tuple[int, ...]) -> float:
        distances = [math.prod(levels[index + 1 :]) for index in range(len(levels))]
        loads = map(load, levels, distances)
        shares = [(count - 1) * distance / size for count, distance in zip(levels, distances, strict=True)]
        total = sum(share * messages for share, messages in zip(shares, loads, strict=True))
        return total - shares[0] if products else total

    def order(levels: tuple[int, ...]) -> tuple[Any, ...]:
        num_additions = additions(levels)
        criteria = num_additions > MAX_ADDITIONS, round(4 * exposed_time(levels))
        if products:
            return *criteria, -levels[0], len(levels), num_additions
        return *criteria, len(levels), num_additions, -levels[0]

    def divisors(number: int) -> list[int]:
        return [count for count in range(1, number + 1) if number % count == 0]

    pairs = [(first, size // first) for first in divisors(size) if first <= max(1, max_first)]
    triples = [
        (first, second // third, third) for first, second in pairs for third in divisors(second) if 1 < third < second
    ]
    return min([*pairs, *triples], key=order)


def additions(levels: tuple[int, ...]) -> int:
    """Return the number of additions in one sum."""
    return sum(levels) - len(levels)


def levels_and_parts(
    layout: Layout, axes: tuple[str, ...], columns: int, across: int, cut: int
) -> tuple[tuple[int, ...], int]:
    """Return the levels of a ring along mesh axes, and the number of parts of its terms.

    There are 4 parts if the messages of the further levels can overlap with the first level and are worth it (at least
    a tenth of the bytes, and not more steps than the first level), and if a quarter of a term is wide enough; otherwise
    2 parts.

    **Arguments:**

    - `columns`, `across`: size of the sharded dimension, and product of the other dimensions.
    - `cut`: size of the dimension that is cut into parts.
    """
    size = math.prod(layout.sizes[name] for name in axes)
    levels = ring_levels(size, max_terms(columns, across // 2, layout), _load_function(layout, axes))
    first, *others = levels
    overlaps = 1 < max(others) <= first and 10 * (size // first - 1) >= size - 1
    is_wide_enough = across // 4 >= TERM_WIDTH and first <= max_terms(columns, across // 4, layout)
    return levels, 4 if overlaps and is_wide_enough and cut % 4 == 0 else 2


def _load_function(layout: Layout, axes: tuple[str, ...]) -> Callable[[int, int], int]:
    return partial(ring_load, layout.mesh, axes)


def suits_ring(levels: tuple[int, ...], size: int, min_columns: int) -> bool:
    """Return whether to use a ring: at least `min_columns` per device, and at most `MAX_ADDITIONS` additions."""
    return additions(levels) <= MAX_ADDITIONS and size >= min_columns * math.prod(levels)


def find_ring(
    plan: ProductPlan,
    layout: Layout,
    whole: PartitionSpec,
    stored: PartitionSpec,
    x: tuple[int, ...],
    weight: tuple[int, ...],
) -> GradientRing | None:
    """Return the ring along the single dimension that is split in `stored` but not in `whole`; None if there is none.

    `whole` and `stored` are partitions of the weight, in the product and of the gradient; `x` and `weight` are shapes.
    """
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
    # `data` may connect slices by a slow network, for which a ring would wait in each step
    if not same or "data" in axes or not set(axes) <= set(rows) <= layout.unmapped_axes:
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
    """Multiply an activation by a gathered weight; the gradient of the weight is a ring reduce-scatter."""
    return jnp.einsum(plan.letters, x, _gathered(layout, ring, weight), preferred_element_type=dtype)


def _gathered(layout: Layout, ring: GradientRing, weight: Array) -> Array:
    return lax.with_sharding_constraint(weight, NamedSharding(layout.current_mesh, ring.gathered))


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
    """Return this device's shard of the weight gradient, summed over the tokens of all devices."""
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
    """Multiply sorted rows by several sharded weights, as `grouped_products`; `parts` are this device's shards."""
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
    """Return this device's shard of the gradient of a weight, summed over the rows of all devices."""
    outer = ring.dimension == 2  # the columns of the result are sharded, not those of x
    split, other = (gradient, x) if outer else (x, gradient)
    width, others = split.shape[1] // ring.levels[0], jnp.split(other, ring.parts, 1)

    def term(index: Array, part: int) -> Array:
        one, two = lax.dynamic_slice_in_dim(split, index * width, width, 1), others[part]
        one, two = (two, one) if outer else (one, two)
        return separate(columns_times_rows(form, one, two, counts, x.dtype))

    sums = ring_scatter(term, ring.axes, ring.levels, dtype, ring.dimension, ring.parts)
    return jnp.concatenate(sums, 3 - ring.dimension)


def separate(product: Array) -> Array:
    """Keep XLA from fusing the addition of the received sum into the product, which would then wait for that sum."""
    return lax.optimization_barrier(product)


class _Level(NamedTuple):
    """Two concurrent rings in opposite directions: their terms `term(index, half)`, number and distance of devices."""

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
    """Reduce-scatter inside a `shard_map`: return the parts of this device's shard along a dimension.

    `term(index, part)` computes this device's term for a part of piece `index`; the first level has one piece for each
    of its devices, and further levels cut these pieces. Further levels run while the first level computes the next two
    parts. Sums are sent in `dtype`, and rounded to it after each addition.
    """
    sums: dict[int, tuple[Array, Array]] = {}  # by pair of parts
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
    """Return the function `(index, half)` -> piece `index` of a half."""
    width = halves[0].shape[dimension] // parts
    return lambda index, half: lax.dynamic_slice_in_dim(halves[half], index * width, width, dimension)


def _run_rings(levels: Sequence[_Level], axes: tuple[str, ...], dtype: np.dtype) -> list[tuple[Array, Array]]:
    """Run several levels of `ring_scatter` concurrently."""
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
    """Sum an array over devices and return this device's shard along a dimension, like `lax.psum_scatter`.

    With more than `MAX_ADDITIONS` additions, sums are float32.
    """
    across, size = (dimension + 1) % x.ndim, lax.axis_size(axes)
    levels = ring_levels(size, size, _load_function(layout, axes), products=False)
    needs_float32 = additions(levels) > MAX_ADDITIONS
    dtype = np.promote_types(x.dtype, np.float32) if needs_float32 else x.dtype
    one, other = jnp.split(x, [x.shape[across] // 2], across)
    term = _cutter((one, other), levels[0], dimension)
    return jnp.concatenate(ring_scatter(term, axes, levels, dtype, dimension), across).astype(x.dtype)
