"""Helpers for copying between the tensors of checkpoints and weights."""

from collections.abc import Mapping

import numpy as np

from eqx_decoders.families.weight_rows import WeightMapping


_PIECE_BYTES = 256 * 1024  # fits into the second-level cache of a CPU


def copy_in_pieces(target: np.ndarray, source: np.ndarray) -> None:
    """Copy `target[...] = source` in pieces that fit into the CPU's cache, split along the source's largest stride.

    Without pieces, every element of a transposed copy is a cache miss, and the copy takes five times as long.
    """
    if source.ndim == 0:
        target[...] = source
        return
    axis = int(np.argmax(source.strides))
    step = max(1, _PIECE_BYTES // max(source.strides[axis], 1))
    for start in range(0, source.shape[axis], step):
        piece = (slice(None),) * axis + (slice(start, start + step),)
        target[piece] = source[piece]


def einops_sizes(mapping: WeightMapping, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes that `einops.rearrange` needs: of the axes that share a dimension of the tensor."""
    return {word: sizes[word] for group in mapping.groups if len(group) > 1 for word in group}
