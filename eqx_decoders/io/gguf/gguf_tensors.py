"""Tensors of GGUF files: views that read parts of a file, and dequantize them.

A block of llama.cpp's quantized types contains 32 or 256 values of a row. The types below can stay quantized. The
package gguf dequantizes these and all other types.

    Q8_0, Q4_0, Q5_0   x = scale * q              a scale in float16 for 32 values
    Q6_K               x = scale * q              for 16 values, a product of float16 and int8
    Q4_1, Q5_1         x = scale * q + minimum    both in float16, for 32 values
    Q4_K, Q5_K         x = scale * q + minimum    for 32 values, products of float16 and 6-bit integers
    MXFP4              x = 2^scale * E2M1(q)      for 32 values
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from eqx_decoders.io.gguf.gguf_header import Description, gguf_package
from eqx_decoders.io.huggingface.directory import StoredTensor
from eqx_decoders.io.huggingface.quantized.unpack import (
    DEQUANTIZED_DTYPE,
    ScaledTensor,
    Slices,
    as_float32,
    explicit_slices,
    transposed,
)


UNQUANTIZED: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "F64": np.float64}


# --- unquantized tensors, and rows of bytes ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MappedTensor(StoredTensor):
    """Array of numbers or bytes in a file.

    `stored_dtype`: its NumPy dtype.
    """

    stored_dtype: Any

    def read(self, part: Slices) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        return np.memmap(self.file, self.stored_dtype, "r", self.offset, self.shape)[part]


@dataclasses.dataclass(frozen=True)
class IndexedTensor(StoredTensor):
    """View of the matrix at one index of a stack of matrices, such as the matrix of an expert."""

    inner: StoredTensor
    index: int

    def read(self, part: Slices) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        return self.inner.read((slice(self.index, self.index + 1), *part))[0]


@dataclasses.dataclass(frozen=True)
class HeadHalvesTensor(StoredTensor):
    """View of the rows of queries or keys, from the interleaved order of some architectures to the halves of a head.

    RoPE rotates pairs of rows. In `inner`, they are adjacent; in the view, they are in different halves of the head:
    row `(head, half, i)` of the view is row `(head, i, half)` of `inner`.
    """

    inner: StoredTensor
    heads: int

    def read(self, part: Slices) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        rows = np.arange(*part[0].indices(self.shape[0]))
        if not len(rows):
            return self.inner.read(part)
        head_dim = self.shape[0] // self.heads
        head = rows // head_dim
        half, i = np.divmod(rows % head_dim, head_dim // 2)
        stored_rows = head * head_dim + 2 * i + half
        start = int(stored_rows.min())
        return self.inner.read((slice(start, int(stored_rows.max()) + 1), *part[1:]))[stored_rows - start]


@dataclasses.dataclass(frozen=True)
class InterleavedTensor(StoredTensor):
    """View of two tensors as one that alternates between their rows, along dimension `axis`."""

    first: StoredTensor
    second: StoredTensor
    axis: int

    def read(self, part: Slices) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        axis = self.axis
        slices = list(explicit_slices(part, self.shape))
        rows = slices[axis]
        slices[axis] = slice(rows.start // 2, -(-rows.stop // 2))
        x = np.stack([tensor.read(tuple(slices)) for tensor in (self.first, self.second)], axis=axis + 1)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        start = rows.start % 2
        return x[(*(slice(None),) * axis, slice(start, start + rows.stop - rows.start))]


@dataclasses.dataclass(frozen=True)
class MinusOneTensor(StoredTensor):
    """View of the weight of a norm, which is stored plus one."""

    inner: StoredTensor

    def read(self, part: Slices) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        return as_float32(self.inner.read(part)) - np.float32(1)


@dataclasses.dataclass(frozen=True)
class ExpandedTensor(StoredTensor):
    """View of a tensor with an additional dimension of size 1 at `axis`."""

    inner: StoredTensor
    axis: int

    def read(self, part: Slices) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        x = self.inner.read((*part[: self.axis], *part[self.axis + 1 :]))
        return np.expand_dims(x, self.axis)[(*(slice(None),) * self.axis, part[self.axis])]


def stored_view(tensor: Description) -> StoredTensor:
    """Return the view of a tensor as it is stored: numbers, or the bytes of quantized rows."""
    if tensor.ggml_type in UNQUANTIZED:
        dtype = UNQUANTIZED[tensor.ggml_type]
        return MappedTensor(tensor.file, tensor.name, tensor.shape, tensor.ggml_type, tensor.offset, dtype)
    shape = (*tensor.shape[:-1], tensor.row_bytes)
    return MappedTensor(tensor.file, tensor.name, shape, tensor.ggml_type, tensor.offset, np.uint8)


# --- blocks -----------------------------------------------------------------------------------------------------------


class UnpackedBlocks(NamedTuple):
    """Quantized values, scales and minima of blocks: arrays `[..., blocks, values or scales of a block]`."""

    values: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None = None


class BlockType(NamedTuple):
    """Quantized type of llama.cpp.

    - `size`, `bytes`: number of values and bytes of a block.
    - `group_size`: number of values that share a scale.
    - `value_dtype`, `scale_dtype`: dtypes of values and scales in a `QuantizedWeight`.
    - `has_minimum`: whether each group has a minimum that is added.
    - `unpack`: function from the bytes of blocks to their values, scales and minima.
    """

    size: int
    bytes: int
    group_size: int
    value_dtype: str
    scale_dtype: str
    has_minimum: bool
    unpack: Callable[[np.ndarray], UnpackedBlocks]


def _float16(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view("<f2")


def _nibbles(x: np.ndarray) -> np.ndarray:
    """Return the lower four bits of all bytes of a block, then the higher four bits."""
    return np.concatenate([x & 15, x >> 4], axis=-1)


def _fifth_bits(x: np.ndarray) -> np.ndarray:
    """Return the fifth bits of 32 values, from four bytes."""
    return np.unpackbits(np.ascontiguousarray(x), axis=-1, bitorder="little") << 4


def _q8_0(x: np.ndarray) -> UnpackedBlocks:
    return UnpackedBlocks(np.ascontiguousarray(x[..., 2:]).view(np.int8), _float16(x[..., :2]))


def _q4_0(x: np.ndarray) -> UnpackedBlocks:
    return UnpackedBlocks(_nibbles(x[..., 2:]).astype(np.int8) - np.int8(8), _float16(x[..., :2]))


def _q4_1(x: np.ndarray) -> UnpackedBlocks:
    return UnpackedBlocks(_nibbles(x[..., 4:]).astype(np.int8), _float16(x[..., :2]), _float16(x[..., 2:4]))


def _q5_0(x: np.ndarray) -> UnpackedBlocks:
    values = _nibbles(x[..., 6:]) | _fifth_bits(x[..., 2:6])
    return UnpackedBlocks(values.astype(np.int8) - np.int8(16), _float16(x[..., :2]))


def _q5_1(x: np.ndarray) -> UnpackedBlocks:
    values = _nibbles(x[..., 8:]) | _fifth_bits(x[..., 4:8])
    return UnpackedBlocks(values.astype(np.int8), _float16(x[..., :2]), _float16(x[..., 2:4]))


def _k_scales(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales and minima of the eight groups of a block of Q4_K or Q5_K.

    They are 6-bit integers, packed into 12 bytes, times two float16 factors of the block.
    """
    scale_bytes, minimum_bytes, mixed_bytes = (x[..., 4 + 4 * part : 8 + 4 * part] for part in range(3))
    scales = np.concatenate([scale_bytes & 63, mixed_bytes & 15 | scale_bytes >> 2 & 48], axis=-1)
    minima = np.concatenate([minimum_bytes & 63, mixed_bytes >> 4 | minimum_bytes >> 2 & 48], axis=-1)
    scale_factor = _float16(x[..., 0:2]).astype(np.float32)
    minimum_factor = _float16(x[..., 2:4]).astype(np.float32)
    return scale_factor * scales, -(minimum_factor * minima)


def _group_nibbles(x: np.ndarray) -> np.ndarray:
    """Return 4-bit values in order. 32 bytes contain two groups: one in the lower, the other in the higher bits."""
    pairs = x.reshape(*x.shape[:-1], -1, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=-2).reshape(*x.shape[:-1], -1)


def _q4_k(x: np.ndarray) -> UnpackedBlocks:
    return UnpackedBlocks(_group_nibbles(x[..., 16:]).astype(np.int8), *_k_scales(x))


def _q5_k(x: np.ndarray) -> UnpackedBlocks:
    fifth = x[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    fifth = fifth.reshape(*x.shape[:-1], -1)
    return UnpackedBlocks((_group_nibbles(x[..., 48:]) | fifth << 4).astype(np.int8), *_k_scales(x))


def _q6_k(x: np.ndarray) -> UnpackedBlocks:
    low = x[..., :128].reshape(*x.shape[:-1], 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    high = x[..., 128:192].reshape(*x.shape[:-1], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    shape = (*x.shape[:-1], 256)
    values = (low.reshape(shape) | high.reshape(shape) << 4).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(x[..., 192:208]).view(np.int8)
    return UnpackedBlocks(values, _float16(x[..., 208:]).astype(np.float32) * scales)


def _mxfp4(x: np.ndarray) -> UnpackedBlocks:
    return UnpackedBlocks(_nibbles(x[..., 1:]), x[..., :1])


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
    """Values, scales or zero points of a `BlockTensor`."""

    inner: StoredTensor
    block_type: BlockType
    field: Literal["values", "scales", "zeros"]

    def read(self, part: Slices) -> np.ndarray:
        *leading, columns = explicit_slices(part, self.shape)
        block_type = self.block_type
        # columns of this view per block
        width = block_type.size if self.field == "values" else block_type.size // block_type.group_size
        first, last = columns.start // width, -(-columns.stop // width)
        stored = self.inner.read((*leading, slice(first * block_type.bytes, last * block_type.bytes)))
        blocks = block_type.unpack(stored.reshape(*stored.shape[:-1], -1, block_type.bytes))
        x = getattr(_with_zero_points(blocks, block_type), self.field)
        start = columns.start - first * width
        return x.reshape(*x.shape[:-2], -1)[..., start : start + columns.stop - columns.start]


class _ZeroPointBlocks(NamedTuple):
    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None


def _with_zero_points(blocks: UnpackedBlocks, block_type: BlockType) -> _ZeroPointBlocks:
    """Convert blocks to the form of `QuantizedWeight`: `(values - zeros) * scales` for `values * scales + minima`.

    Zero points are rounded to float32, as is the product in llama.cpp. A group with scale 0 consists of its minimum: it
    gets scale 1 and values 0.
    """
    if blocks.minima is None:
        float_dtypes = {"F8_E8M0": jnp.float8_e8m0fnu, "F4_E2M1": jnp.float4_e2m1fn}
        values, scales = blocks.values, blocks.scales
        if block_type.value_dtype in float_dtypes:
            values = values.view(float_dtypes[block_type.value_dtype])
        if block_type.scale_dtype in float_dtypes:
            scales = scales.view(float_dtypes[block_type.scale_dtype])
        return _ZeroPointBlocks(values, scales, None)
    is_constant = blocks.scales == 0
    scales = np.where(is_constant, np.ones_like(blocks.scales), blocks.scales)
    shift = 8 if block_type.value_dtype == "I4" else 0  # from 0...15 to -8...7
    zeros = -(blocks.minima.astype(np.float32) / scales.astype(np.float32))
    value_is_constant = np.repeat(is_constant, block_type.group_size, axis=-1)
    values = np.where(value_is_constant, np.int8(0), blocks.values - np.int8(shift))
    return _ZeroPointBlocks(values, scales, np.where(is_constant, zeros, zeros - np.float32(shift)))


@dataclasses.dataclass(frozen=True)
class BlockTensor(ScaledTensor):
    """Tensor of a type in `BLOCKS`, which can stay quantized.

    `inner` has its bytes, and `ggml_type` is the name of its type.
    """

    inner: StoredTensor = dataclasses.field(kw_only=True)
    ggml_type: str = dataclasses.field(kw_only=True)

    def read(self, part: Slices) -> np.ndarray:
        """Read a part in float32, one slice for each dimension."""
        return _dequantize(self.inner, self.ggml_type, explicit_slices(part, self.shape))


@dataclasses.dataclass(frozen=True)
class DequantizedTensor(StoredTensor):
    """Tensor of another quantized type, which is always dequantized."""

    inner: StoredTensor
    ggml_type: str

    def read(self, part: Slices) -> np.ndarray:
        """Read a part in float32, one slice for each dimension."""
        return _dequantize(self.inner, self.ggml_type, explicit_slices(part, self.shape))


def _dequantize(inner: StoredTensor, ggml_type: str, part: Slices) -> np.ndarray:
    """Read and dequantize a part of a tensor, whose bytes are `inner`."""
    package = gguf_package()
    size, block_bytes = package.constants.GGML_QUANT_SIZES[package.GGMLQuantizationType[ggml_type]]
    *leading, columns = part
    first, last = columns.start // size, -(-columns.stop // size)
    stored = np.ascontiguousarray(inner.read((*leading, slice(first * block_bytes, last * block_bytes))))
    if not stored.size:
        return np.zeros([dimension.stop - dimension.start for dimension in part], np.float32)
    with np.errstate(all="ignore"):
        x = package.quants.dequantize(stored, package.GGMLQuantizationType[ggml_type])
    start = columns.start - first * size
    return x[..., start : start + columns.stop - columns.start]


def dequantized(stored: StoredTensor) -> StoredTensor:
    """Return the view of the dequantized values of a tensor. `stored`: its view as it is stored (`stored_view`)."""
    ggml_type = stored.dtype
    if ggml_type in UNQUANTIZED:
        return stored
    package = gguf_package()
    size, block_bytes = package.constants.GGML_QUANT_SIZES[package.GGMLQuantizationType[ggml_type]]
    shape = (*stored.shape[:-1], stored.shape[-1] // block_bytes * size)
    place = stored.file, stored.name
    offset = stored.offset
    if ggml_type not in BLOCKS or len(shape) < 2:
        return DequantizedTensor(*place, shape, DEQUANTIZED_DTYPE, offset, stored, ggml_type)
    block_type = BLOCKS[ggml_type]
    scale_shape = (*shape[:-1], shape[-1] // block_type.group_size)
    values = _PartTensor(*place, shape, block_type.value_dtype, offset, stored, block_type, "values")
    scales = _PartTensor(*place, scale_shape, block_type.scale_dtype, offset, stored, block_type, "scales")
    zeros = None
    if block_type.has_minimum:
        zeros = _PartTensor(*place, scale_shape, "F32", offset, stored, block_type, "zeros")
    views = values, scales, zeros, (1, block_type.group_size)
    return BlockTensor(*place, shape, DEQUANTIZED_DTYPE, offset, *views, inner=stored, ggml_type=ggml_type)


def head_halves(stored: StoredTensor, heads: int) -> StoredTensor:
    """Return the view of stored queries or keys with interleaved RoPE; see `HeadHalvesTensor`."""
    return HeadHalvesTensor(stored.file, stored.name, stored.shape, stored.dtype, stored.offset, stored, heads)


def indexed(stored: StoredTensor, index: int) -> StoredTensor:
    """Return the view of one matrix in a stored stack of matrices."""
    return IndexedTensor(stored.file, stored.name, stored.shape[1:], stored.dtype, stored.offset, stored, index)


def interleaved(first: StoredTensor, second: StoredTensor, axis: int) -> StoredTensor:
    """Return the view of two stored tensors as one that alternates between their rows, along dimension `axis`."""
    shape = (*first.shape[:axis], 2 * first.shape[axis], *first.shape[axis + 1 :])
    return InterleavedTensor(first.file, first.name, shape, first.dtype, first.offset, first, second, axis)


def transposed_blocks(tensor: StoredTensor) -> StoredTensor:
    """Return the view of a tensor with its last two dimensions swapped. A `BlockTensor` can still stay quantized."""
    view = transposed(tensor)
    if not isinstance(tensor, BlockTensor):
        return view
    values, scales = transposed(tensor.values), transposed(tensor.scales)
    zeros = None if tensor.zeros is None else transposed(tensor.zeros)
    parts = values, scales, zeros, (tensor.block[1], tensor.block[0])
    return ScaledTensor(tensor.file, tensor.name, view.shape, DEQUANTIZED_DTYPE, tensor.offset, *parts)


def minus_one(tensor: StoredTensor) -> StoredTensor:
    """Return the view of the weight of a norm, which is stored plus one."""
    return MinusOneTensor(tensor.file, tensor.name, tensor.shape, "F32", tensor.offset, tensor)


def with_axis(tensor: StoredTensor, axis: int) -> StoredTensor:
    """Return the view of a tensor with an additional dimension of size 1 at `axis`."""
    shape = (*tensor.shape[:axis], 1, *tensor.shape[axis:])
    return ExpandedTensor(tensor.file, tensor.name, shape, tensor.dtype, tensor.offset, tensor, axis)
