"""Hierarchical rings: the number of devices of each level, and the number of parts of each term.

With many devices, a single ring would have too many steps, and terms too narrow for fast products. So rings are
hierarchical: devices of a first level sum terms that are wide enough, and rings of a second (and third) level sum the
pieces of their results. That sends as many bytes in fewer steps, and rings along different axes of a torus do not share
links. The further levels have no products to overlap with; if they take long, terms are cut into four parts, and the
sums of the first two are sent while the next two are multiplied.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from eqx_decoders.numerics.rings.links import ring_load
from eqx_decoders.sharding.chips import LANES, chip_of
from eqx_decoders.sharding.layout import Layout


# Rows of a TPU register tile of a 16-bit dtype.
ROWS = 16

# Maximum of the minimum number of columns of a term, see `term_width`.
TERM_WIDTH = 512

# Maximum number of additions in a sum. Each one rounds a 16-bit sum: the RMS error for independent terms is 0.3 % for 7
# additions and 0.7 % for 63; that of XLA's sums on a CPU is 0.2 %.
MAX_ADDITIONS = 31

# Maximum number of devices of a first level.
MAX_TERMS = 16


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
    min_width = ratio * across / (across - ratio) if across > ratio else TERM_WIDTH
    return min(TERM_WIDTH, LANES * math.ceil(min_width / LANES))


def ring_levels(size: int, max_first: int, load: Callable[[int, int], int], products: bool = True) -> tuple[int, ...]:
    """Return the number of devices of each of two or three levels; their product is `size`.

    The first level has at most `max_first` devices. A third level is for 512 devices: two levels would need 46
    additions. Levels are compared by these criteria, in this order:

    - at most `MAX_ADDITIONS` additions;
    - shortest communication time that is not overlapped, in steps of a quarter of the time for sending the array over
      one link. The first level overlaps with `products`, if there are any, which take about as long as its messages if
      these do not share links. `load(devices, distance)` is the number of messages of a level that share a link.
    - with products: most devices in the first level, then fewest levels, then fewest additions;
    - without products: fewest levels, then fewest additions, then most devices in the first level.
    """

    def exposed_time(levels: tuple[int, ...]) -> float:
        total = 0.0
        for index, count in enumerate(levels):
            distance = math.prod(levels[index + 1 :])
            total += (count - 1) * distance / size * load(count, distance)
        overlapped = (levels[0] - 1) * math.prod(levels[1:]) / size if products else 0.0
        return total - overlapped

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
    2 parts. In the step of `llama3-70b` compiled for 64 TPU v5p, 97 % of the bytes overlap with products.

    **Arguments:**

    - `columns`, `across`: size of the sharded dimension, and product of the other dimensions.
    - `cut`: size of the dimension that is cut into parts.
    """
    size = math.prod(layout.sizes[name] for name in axes)
    levels = ring_levels(size, max_terms(columns, across // 2, layout), load_function(layout, axes))
    first, *others = levels
    overlaps = 1 < max(others) <= first and 10 * (size // first - 1) >= size - 1
    is_wide_enough = across // 4 >= TERM_WIDTH and first <= max_terms(columns, across // 4, layout)
    return levels, 4 if overlaps and is_wide_enough and cut % 4 == 0 else 2


def load_function(layout: Layout, axes: tuple[str, ...]) -> Callable[[int, int], int]:
    """Return the function `(devices, distance)` -> number of messages that share a link, see `ring_load`."""
    return partial(ring_load, layout.mesh, axes)


def fits_ring(levels: tuple[int, ...], size: int, min_columns: int) -> bool:
    """Return whether to use a ring: at least `min_columns` per device, and at most `MAX_ADDITIONS` additions."""
    return additions(levels) <= MAX_ADDITIONS and size >= min_columns * math.prod(levels)
