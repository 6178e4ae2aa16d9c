"""Copies between tensors of files and weights."""

from collections.abc import Mapping

import numpy as np

from eqx_decoders.families.weight_rows import WeightMapping


_PIECE = 256 * 1024  # bytes of a tensor that are copied together


def copy_in_pieces(target: np.ndarray, source: np.ndarray) -> None:
    """Copy `target[...] = source` in pieces that fit a cache, cut along the axis of the source's largest stride.

    A transposed copy as a whole misses the cache with every element, and takes five times as long.
    """
    if source.ndim == 0:
        target[...] = source
        return
    axis = int(np.argmax(source.strides))
    step = max(1, _PIECE // max(source.strides[axis], 1))
    for begin in range(0, source.shape[axis], step):
        piece = (slice(None),) * axis + (slice(begin, begin + step),)
        target[piece] = source[piece]


def einops_sizes(mapping: WeightMapping, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes that einops needs, of the words that share a dimension."""
    return {word: sizes[word] for group in mapping.groups if len(group) > 1 for word in group}
