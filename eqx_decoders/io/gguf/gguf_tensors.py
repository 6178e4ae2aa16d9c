"""Tensors of GGUF files, as views that are read part by part.

Blocks of llama.cpp's quantized types hold 32 numbers of a row, or 256. The types here are scaled whole numbers, so they
can be kept in few bits; the package gguf reads them and all others as the numbers that they encode.

    Q8_0, Q4_0, Q5_0   x = scale q                          a scale in float16 for 32 numbers
    Q6_K               x = scale q                          for 16 numbers, a product of float16 and int8
    Q4_1, Q5_1         x = scale q + least                  both in float16, for 32 numbers
    Q4_K, Q5_K         x = scale q + least                  for 32 numbers, products of float16 and 6 bits
    MXFP4              x = 2^scale q                        for 32 numbers of E2M1
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from eqx_decoders.io.gguf.gguf_header import Description, gguf_package
from eqx_decoders.io.huggingface.directory import StoredTensor
from eqx_decoders.io.huggingface.quantized.unpack import (
    DTYPE,
    Cuts,
    ScaledTensor,
    as_float32,
    swapped,
    whole_cuts,
)


PLAIN: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "F64": np.float64}


# --- plain tensors and rows of bytes ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MappedTensor(StoredTensor):
    """Array of numbers or of bytes in a file."""

    kind: Any

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        return np.memmap(self.file, self.kind, "r", self.offset, self.shape)[part]


@dataclasses.dataclass(frozen=True)
class ItemTensor(StoredTensor):
    """View of one matrix of several in a tensor, such as that of an expert."""

    inner: StoredTensor
    index: int

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        return self.inner.read((slice(self.index, self.index + 1), *part))[0]


@dataclasses.dataclass(frozen=True)
class HalvesOfHeads(StoredTensor):
    """View of rows in pairs, as llama.cpp rotates those of queries and keys, in halves of heads.

    Row `(head, half, i)` is row `(head, i, half)` of `inner`.
    """

    inner: StoredTensor
    heads: int

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        rows, size = np.arange(*part[0].indices(self.shape[0])), self.shape[0] // self.heads
        head, row = rows // size, rows % size
        rows = head * size + row % (size // 2) * 2 + row // (size // 2)
        if not len(rows):
            return self.inner.read(part)
        begin = int(rows.min())
        return self.inner.read((slice(begin, int(rows.max()) + 1), *part[1:]))[rows - begin]


@dataclasses.dataclass(frozen=True)
class InTurn(StoredTensor):
    """View of two tensors as one that has a row of each in turn, along a dimension."""

    first: StoredTensor
    second: StoredTensor
    axis: int

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        cuts, axis = list(whole_cuts(part, self.shape)), self.axis
        wanted = cuts[axis]
        cuts[axis] = slice(wanted.start // 2, -(-wanted.stop // 2))
        x = np.stack([each.read(tuple(cuts)) for each in (self.first, self.second)], axis=axis + 1)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        begin = wanted.start - 2 * cuts[axis].start
        return x[(*(slice(None),) * axis, slice(begin, begin + wanted.stop - wanted.start))]


@dataclasses.dataclass(frozen=True)
class MinusOne(StoredTensor):
    """View of the factors of a norm, which are stored plus one."""

    inner: StoredTensor

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        return as_float32(self.inner.read(part)) - np.float32(1)


@dataclasses.dataclass(frozen=True)
class WithAxis(StoredTensor):
    """View of a tensor with one more dimension, of size 1."""

    inner: StoredTensor
    axis: int

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        x = self.inner.read((*part[: self.axis], *part[self.axis + 1 :]))
        return np.expand_dims(x, self.axis)[(*(slice(None),) * self.axis, part[self.axis])]


def raw(tensor: Description) -> StoredTensor:
    """Return the view of a tensor as stored: plain numbers, or rows of bytes."""
    if tensor.kind in PLAIN:
        return MappedTensor(tensor.file, tensor.name, tensor.shape, tensor.kind, tensor.offset, PLAIN[tensor.kind])
    shape = (*tensor.shape[:-1], tensor.row_bytes)
    return MappedTensor(tensor.file, tensor.name, shape, tensor.kind, tensor.offset, np.uint8)


# --- blocks -----------------------------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """Whole numbers, scales and least numbers of some blocks; the last dimensions are blocks, and what each has."""

    values: np.ndarray
    scales: np.ndarray
    least: np.ndarray | None = None


class BlockType(NamedTuple):
    """Type of blocks.

    - `size`, `bytes`: numbers and bytes of a block.
    - `group`: numbers that share a scale.
    - `values`, `scales`: their dtypes in a `QuantizedWeight`.
    - `has_least`: whether numbers are counted from the least one of their group.
    - `unpack`: returns the parts of blocks from their bytes.
    """

    size: int
    bytes: int
    group: int
    values: str
    scales: str
    has_least: bool
    unpack: Callable[[np.ndarray], Parts]


def _half(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view("<f2")


def _nibbles(x: np.ndarray) -> np.ndarray:
    """Return the low halves of the bytes of a block, then the high ones."""
    return np.concatenate([x & 15, x >> 4], axis=-1)


def _fifth(x: np.ndarray) -> np.ndarray:
    """Return the fifth bits of 32 numbers, from four bytes."""
    return np.unpackbits(np.ascontiguousarray(x), axis=-1, bitorder="little") << 4


def _q8_0(x: np.ndarray) -> Parts:
    return Parts(np.ascontiguousarray(x[..., 2:]).view(np.int8), _half(x[..., :2]))


def _q4_0(x: np.ndarray) -> Parts:
    return Parts(_nibbles(x[..., 2:]).astype(np.int8) - np.int8(8), _half(x[..., :2]))


def _q4_1(x: np.ndarray) -> Parts:
    return Parts(_nibbles(x[..., 4:]).astype(np.int8), _half(x[..., :2]), _half(x[..., 2:4]))


def _q5_0(x: np.ndarray) -> Parts:
    values = _nibbles(x[..., 6:]) | _fifth(x[..., 2:6])
    return Parts(values.astype(np.int8) - np.int8(16), _half(x[..., :2]))


def _q5_1(x: np.ndarray) -> Parts:
    values = _nibbles(x[..., 8:]) | _fifth(x[..., 4:8])
    return Parts(values.astype(np.int8), _half(x[..., :2]), _half(x[..., 2:4]))


def _k_scales(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales of the eight groups of a block and their least numbers: two of float16, 12 bytes of 6 bits."""
    low, high, rest = (x[..., 4 + 4 * part : 8 + 4 * part] for part in range(3))
    scales = np.concatenate([low & 63, rest & 15 | low >> 2 & 48], axis=-1)
    least = np.concatenate([high & 63, rest >> 4 | high >> 2 & 48], axis=-1)
    steps = (_half(x[..., begin : begin + 2]).astype(np.float32) for begin in (0, 2))
    scale, step = steps
    return scale * scales, -(step * least)


def _in_groups(x: np.ndarray) -> np.ndarray:
    """Return the halves of each 32 bytes after each other: numbers of two groups share bytes."""
    parts = x.reshape(*x.shape[:-1], -1, 1, 32)
    return np.concatenate([parts & 15, parts >> 4], axis=-2).reshape(*x.shape[:-1], -1)


def _q4_k(x: np.ndarray) -> Parts:
    return Parts(_in_groups(x[..., 16:]).astype(np.int8), *_k_scales(x))


def _q5_k(x: np.ndarray) -> Parts:
    fifth = x[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    fifth = fifth.reshape(*x.shape[:-1], -1)
    return Parts((_in_groups(x[..., 48:]) | fifth << 4).astype(np.int8), *_k_scales(x))


def _q6_k(x: np.ndarray) -> Parts:
    low = x[..., :128].reshape(*x.shape[:-1], 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    high = x[..., 128:192].reshape(*x.shape[:-1], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    shape = (*x.shape[:-1], 256)
    values = (low.reshape(shape) | high.reshape(shape) << 4).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(x[..., 192:208]).view(np.int8)
    return Parts(values, _half(x[..., 208:]).astype(np.float32) * scales)


def _mxfp4(x: np.ndarray) -> Parts:
    return Parts(_nibbles(x[..., 1:]), x[..., :1])


BLOCKS = {
    "Q4_0": BlockType(32, 18, 32, "I4", "F16", False, _q4_0),
    "Q4_1": BlockType(32, 20, 32, "I4", "F16", True, _q4_1),
    "Q5_0": BlockType(32, 22, 32, "I8", "F16", False, _q5_0),
    "Q5_1": BlockType(32, 24, 32, "I8", "F16", True, _q5_1),
    "Q8_0": BlockType(32, 34, 32, "I8", "F16", False, _q8_0),
    "Q4_K": BlockType(256, 144, 32, "I4", "F32", True, _q4_k),
    "Q5_K": BlockType(256, 176, 32, "I8", "F32", True, _q5_k),
    "Q6_K": BlockType(256, 210, 16, "I8", "F32", False, _q6_k),
    "MXFP4": BlockType(32, 17, 32, "F4_E2M1", "F8_E8M0", False, _mxfp4),
}


@dataclasses.dataclass(frozen=True)
class _PartTensor(StoredTensor):
    """Whole numbers, scales or zeros of all blocks of a tensor."""

    inner: StoredTensor
    blocks: BlockType
    field: Literal["values", "scales", "zeros"]

    def read(self, part: Cuts) -> np.ndarray:
        cuts, blocks = whole_cuts(part, self.shape), self.blocks
        each = blocks.size if self.field == "values" else blocks.size // blocks.group
        first, last = cuts[-1].start // each, -(-cuts[-1].stop // each)
        stored = self.inner.read((*cuts[:-1], slice(first * blocks.bytes, last * blocks.bytes)))
        parts = blocks.unpack(stored.reshape(*stored.shape[:-1], -1, blocks.bytes))
        x = getattr(_for_products(parts, blocks), self.field)
        begin = cuts[-1].start - first * each
        return x.reshape(*x.shape[:-2], -1)[..., begin : begin + cuts[-1].stop - cuts[-1].start]


class _Stored(NamedTuple):
    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None


def _for_products(parts: Parts, blocks: BlockType) -> _Stored:
    """Return the arrays of a `QuantizedWeight`: `(values - zeros) scales`, in place of `values scales + least`.

    Zeros are rounded to float32, and so is the product in llama.cpp. A group that has no scale is its least number.
    """
    if parts.least is None:
        kinds = {"F8_E8M0": "float8_e8m0fnu", "F4_E2M1": "float4_e2m1fn"}
        values, scales = (
            x.view(getattr(jnp, kinds[kind])) if kind in kinds else x
            for x, kind in ((parts.values, blocks.values), (parts.scales, blocks.scales))
        )
        return _Stored(values, scales, None)
    none = parts.scales == 0
    scales = np.where(none, np.ones_like(parts.scales), parts.scales)
    shift = 8 if blocks.values == "I4" else 0
    zeros = -(parts.least.astype(np.float32) / scales.astype(np.float32))
    spread = np.repeat(none, blocks.group, axis=-1)
    values = np.where(spread, np.int8(0), parts.values - np.int8(shift))
    return _Stored(values, scales, np.where(none, zeros, zeros - np.float32(shift)))


@dataclasses.dataclass(frozen=True)
class BlocksTensor(ScaledTensor):
    """Tensor of blocks of whole numbers, that can be kept in few bits; `inner` has its bytes."""

    inner: StoredTensor = dataclasses.field(kw_only=True)
    kind: str = dataclasses.field(kw_only=True)

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part in float32, one slice for each dimension."""
        return _numbers(self.inner, self.kind, whole_cuts(part, self.shape))


@dataclasses.dataclass(frozen=True)
class OtherBlocks(StoredTensor):
    """Tensor of blocks of other types, which are expanded."""

    inner: StoredTensor
    kind: str

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part in float32, one slice for each dimension."""
        return _numbers(self.inner, self.kind, whole_cuts(part, self.shape))


def _numbers(inner: StoredTensor, kind: str, cuts: Cuts) -> np.ndarray:
    """Return the numbers that blocks encode."""
    package = gguf_package()
    each, size = package.constants.GGML_QUANT_SIZES[package.GGMLQuantizationType[kind]]
    first, last = cuts[-1].start // each, -(-cuts[-1].stop // each)
    stored = np.ascontiguousarray(inner.read((*cuts[:-1], slice(first * size, last * size))))
    if not stored.size:
        return np.zeros([cut.stop - cut.start for cut in cuts], np.float32)
    with np.errstate(all="ignore"):
        x = package.quants.dequantize(stored, package.GGMLQuantizationType[kind])
    begin = cuts[-1].start - first * each
    return x[..., begin : begin + cuts[-1].stop - cuts[-1].start]


def decoded(tensor: StoredTensor) -> StoredTensor:
    """Return the view of the numbers that a tensor encodes, given its rows as they are stored."""
    kind, inner = tensor.dtype, tensor
    if kind in PLAIN:
        return tensor
    package = gguf_package()
    each, size = package.constants.GGML_QUANT_SIZES[package.GGMLQuantizationType[kind]]
    shape = (*inner.shape[:-1], inner.shape[-1] // size * each)
    place = inner.file, inner.name
    if kind not in BLOCKS or len(shape) < 2:
        return OtherBlocks(*place, shape, DTYPE, inner.offset, inner, kind)
    blocks = BLOCKS[kind]
    of_scales = (*shape[:-1], shape[-1] // blocks.group)
    numbers = _PartTensor(*place, shape, blocks.values, inner.offset, inner, blocks, "values")
    scales = _PartTensor(*place, of_scales, blocks.scales, inner.offset, inner, blocks, "scales")
    zeros = _PartTensor(*place, of_scales, "F32", inner.offset, inner, blocks, "zeros") if blocks.has_least else None
    return BlocksTensor(
        *place, shape, DTYPE, inner.offset, numbers, scales, zeros, (1, blocks.group), inner=inner, kind=kind
    )


def rows_of_heads(tensor: StoredTensor, heads: int) -> StoredTensor:
    """Return the view of queries or keys, given as stored, whose heads are rotated in halves."""
    return HalvesOfHeads(tensor.file, tensor.name, tensor.shape, tensor.dtype, tensor.offset, tensor, heads)


def item(tensor: StoredTensor, index: int) -> StoredTensor:
    """Return the view of one matrix of a tensor, given as stored, that stacks several."""
    return ItemTensor(tensor.file, tensor.name, tensor.shape[1:], tensor.dtype, tensor.offset, tensor, index)


def in_turn(first: StoredTensor, second: StoredTensor, axis: int) -> StoredTensor:
    """Return the view of two tensors, given as stored, with a row of each in turn along a dimension."""
    shape = (*first.shape[:axis], 2 * first.shape[axis], *first.shape[axis + 1 :])
    return InTurn(first.file, first.name, shape, first.dtype, first.offset, first, second, axis)


def exchanged(tensor: StoredTensor) -> StoredTensor:
    """Return the view of a tensor with its last two dimensions exchanged, which stays in few bits."""
    view = swapped(tensor)
    if not isinstance(tensor, BlocksTensor):
        return view
    numbers, scales = swapped(tensor.numbers), swapped(tensor.scales)
    zeros = None if tensor.zeros is None else swapped(tensor.zeros)
    parts = numbers, scales, zeros, (tensor.block[1], tensor.block[0])
    return ScaledTensor(tensor.file, tensor.name, view.shape, DTYPE, tensor.offset, *parts)


def minus_one(tensor: StoredTensor) -> StoredTensor:
    """Return the view of a norm's factors that are stored plus one."""
    return MinusOne(tensor.file, tensor.name, tensor.shape, "F32", tensor.offset, tensor)


def with_axis(tensor: StoredTensor, axis: int) -> StoredTensor:
    """Return the view of a tensor with one more dimension, of size 1."""
    shape = (*tensor.shape[:axis], 1, *tensor.shape[axis:])
    return WithAxis(tensor.file, tensor.name, shape, tensor.dtype, tensor.offset, tensor, axis)
