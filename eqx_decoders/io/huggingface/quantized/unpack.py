"""Quantized tensors: views that read parts of packed files, and dequantize them to float32.

All products are exact or correctly rounded in float32. A `ScaledTensor` consists of views that are read like tensors of
a file: quantized values in the order of the matrix, scales and zero points.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from eqx_decoders.io.huggingface.directory import StoredTensor


# Positive values of FP4 (E2M1) by their lower three bits: two of the exponent, one of the mantissa.
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_SIGNED_E2M1 = np.concatenate([E2M1, -E2M1])
# The two values of a byte times 2, and half of the scale 2^(s - 127). Then a factor overflows only if the product does.
_TWICE_E2M1_PAIRS = np.stack([np.tile(2 * _SIGNED_E2M1, 16), np.repeat(2 * _SIGNED_E2M1, 16)], axis=-1)
_TWICE_E2M1_PAIRS = _TWICE_E2M1_PAIRS.view(np.uint64)[:, 0]
_BYTES = np.arange(256, dtype=np.uint8)
_E4M3 = _BYTES.view(jnp.float8_e4m3fn).astype(np.float32)
_HALF_E8M0 = np.ldexp(np.float32(1), _BYTES.astype(np.int32) - 128)
MX_GROUP_SIZE = 32  # values that share a scale in MXFP4 and MXFP8
DEQUANTIZED_DTYPE = "BF16"  # dtype of dequantized weights for `load_hf(dtype=None)`

# Dtypes of the arrays of a `QuantizedWeight`, by the dtypes of views and files. FP8 and FP4 are stored as bits.
STORAGE_DTYPES = {
    "U8": np.uint8,
    "I4": jnp.int4,
    "I8": np.int8,
    "I16": np.int16,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "F4_E2M1": jnp.uint4,
    "NF4": jnp.int4,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
}

Slices = tuple[slice, ...]


def explicit_slices(part: Slices, shape: tuple[int, ...]) -> Slices:
    """Return the slices with explicit starts and stops."""
    return tuple(slice(*dimension.indices(size)) for dimension, size in zip(part, shape, strict=True))


def as_float32(x: np.ndarray) -> np.ndarray:
    """Convert quantized values or scales of any dtype to float32. uint8 stands for E8M0."""
    if x.dtype == np.uint8:
        return 2 * _HALF_E8M0[x]
    if x.dtype == jnp.float8_e4m3fn:
        return _E4M3[x.view(np.uint8)]
    return x.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class TransposedTensor(StoredTensor):
    """View of a tensor with its last two dimensions swapped."""

    inner: StoredTensor

    def read(self, part: Slices) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        return self.inner.read((*part[:-2], part[-1], part[-2])).swapaxes(-1, -2)


def transposed(inner: StoredTensor) -> TransposedTensor:
    """Return the view of a tensor with its last two dimensions swapped."""
    shape = (*inner.shape[:-2], inner.shape[-1], inner.shape[-2])
    return TransposedTensor(inner.file, inner.name, shape, inner.dtype, inner.offset, inner)


@dataclasses.dataclass(frozen=True)
class BytesTensor(StoredTensor):
    """View of FP8 or FP4 values as bytes, or of bytes with the dtype of such values."""

    inner: StoredTensor

    def read(self, part: Slices) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        return np.ascontiguousarray(self.inner.read(part)).view(np.uint8)


@dataclasses.dataclass(frozen=True)
class CodebookTensor(StoredTensor):
    """Values that are stored as indices into a codebook, such as the 16 values of NF4.

    **Arguments:**

    - `codes`: the indices.
    - `codebook`: the values.
    """

    codes: StoredTensor
    codebook: tuple[float, ...]

    def read(self, part: Slices) -> np.ndarray:
        """Read a part in float32, one slice for each dimension."""
        return np.asarray(self.codebook, np.float32)[self.codes.read(part)]


@dataclasses.dataclass(frozen=True)
class _SignedCodes(StoredTensor):
    """Indices into a codebook minus 8, as `NF4Weight` stores them."""

    codes: StoredTensor

    def read(self, part: Slices) -> np.ndarray:
        return self.codes.read(part) - np.int8(8)


def storage_view(inner: StoredTensor) -> StoredTensor:
    """Return the view of quantized values or scales in the dtype of a `QuantizedWeight`."""
    if isinstance(inner, CodebookTensor):
        return _SignedCodes(inner.file, inner.name, inner.shape, inner.dtype, inner.offset, inner.codes)
    if inner.dtype not in ("F8_E4M3", "F8_E8M0", "F4_E2M1"):
        return inner
    return BytesTensor(inner.file, inner.name, inner.shape, inner.dtype, inner.offset, inner)


@dataclasses.dataclass(frozen=True)
class RepeatedTensor(StoredTensor):
    """View of one scale per matrix as one scale per row."""

    inner: StoredTensor

    def read(self, part: Slices) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        sizes = [rows.stop - rows.start for rows in explicit_slices(part, self.shape)]
        return np.broadcast_to(self.inner.read_all().reshape((1,) * len(sizes)), sizes)


@dataclasses.dataclass(frozen=True)
class _PerRowTensor(StoredTensor):
    """View of one value per row or per matrix as a column `[*lead, rows, 1]` with one value per row.

    **Arguments:**

    - `inner`: the stored values: leading dimensions of a stack of matrices, rows if `per_row`, dimensions of size 1.
    - `lead`: number of leading dimensions.
    - `per_row`: whether there is one value per row, or else one per matrix.
    """

    inner: StoredTensor
    lead: int
    per_row: bool

    def read(self, part: Slices) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        slices = explicit_slices(part, self.shape)
        stored_slices = slices[: self.lead + self.per_row]
        x = self.inner.read((*stored_slices, *[slice(0, 1)] * (len(self.inner.shape) - len(stored_slices))))
        sizes = [dimension.stop - dimension.start for dimension in slices]
        x = x.reshape(*sizes[: len(stored_slices)], *[1] * (len(sizes) - len(stored_slices)))
        return np.broadcast_to(x, sizes)


def per_row_view(inner: StoredTensor, shape: tuple[int, ...], lead: int, per_row: bool) -> StoredTensor:
    """Return a view of scales per matrix or row as a column of `shape`, with one scale per row."""
    return _PerRowTensor(inner.file, inner.name, shape, inner.dtype, inner.offset, inner, lead, per_row)


@dataclasses.dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """Unsigned integers of `bits` bits, packed without gaps into int32 along one dimension, the lowest bits first.

    **Arguments:**

    - `inner`: the stored int32 words.
    - `axis`: dimension along which values are packed.
    - `bits`: bits per value.
    - `subtract`: integer that is subtracted from each value.
    - `order`: position `order[i]` of value `i` among the eight 4-bit values of a word (AWQ). None: `i`.
    """

    inner: StoredTensor
    axis: int
    bits: int
    subtract: int
    order: tuple[int, ...] | None = None

    def read(self, part: Slices) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        slices = list(explicit_slices(part, self.shape))
        chunk = math.lcm(32, self.bits) // self.bits  # the smallest number of values that fills complete words
        chunk_words = chunk * self.bits // 32
        values = slices[self.axis]
        first_chunk = values.start // chunk
        last_chunk = -(-values.stop // chunk)
        last_word = min(last_chunk * chunk_words, self.inner.shape[self.axis])
        slices[self.axis] = slice(first_chunk * chunk_words, last_word)
        words = np.ascontiguousarray(np.moveaxis(self.inner.read(tuple(slices)), self.axis, -1))
        x = _unpacked(words, self.bits)
        if self.order is not None:
            x = x.reshape(*x.shape[:-1], -1, len(self.order))[..., list(self.order)].reshape(x.shape)
        start = values.start - first_chunk * chunk
        x = x[..., start : start + values.stop - values.start].astype(np.int16) - self.subtract
        return np.moveaxis(x.astype(STORAGE_DTYPES["I16" if self.dtype == "I16" else "I8"]), -1, self.axis)


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack all values of `bits` bits in the int32 words of the last dimension."""
    if 8 % bits == 0:
        octets = words.view(np.uint8)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return ((octets[..., None] >> shifts) & np.uint8(2**bits - 1)).reshape(*words.shape[:-1], -1)
    words64 = words.view(np.uint32).astype(np.uint64)
    next_words = np.concatenate([words64[..., 1:], np.zeros_like(words64[..., :1])], axis=-1)
    starts = np.arange(0, 32 * words.shape[-1] - bits + 1, bits)
    pairs = words64[..., starts // 32] | next_words[..., starts // 32] << np.uint64(32)
    return (pairs >> (starts % 32).astype(np.uint64) & np.uint64(2**bits - 1)).astype(np.uint8)


@dataclasses.dataclass(frozen=True)
class PackedFP4Tensor(StoredTensor):
    """FP4 (E2M1) values, two per byte along the last dimension of `inner`, the first in the lower four bits."""

    inner: StoredTensor

    def read(self, part: Slices) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        *leading, columns = explicit_slices(part, self.shape)
        octets = self.inner.read((*leading, slice(columns.start // 2, -(-columns.stop // 2))))
        values = np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)
        start = columns.start % 2
        return values[..., start : start + columns.stop - columns.start].view(jnp.float4_e2m1fn)


@dataclasses.dataclass(frozen=True)
class ScaledTensor(StoredTensor):
    """Quantized matrix: `x[..., i, j] = (values[..., i, j] - zeros[..., r, c]) * scales[..., r, c]`.

    `r = i // block[0]`, and `c = group_index[j]` or, without `group_index`, `c = j // block[1]`. The last block along a
    dimension may be smaller.

    **Arguments:**

    - `values`: quantized values, with the shape of this tensor.
    - `scales`, `zeros`: scale and zero point of each block; None: no zero points.
    - `block`: rows and columns of a block.
    - `group_index`: quantization group of each column (GPTQ's `g_idx`); None: groups are consecutive columns.
    """

    values: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None
    block: tuple[int, int]
    group_index: StoredTensor | None = None

    def read(self, part: Slices) -> np.ndarray:
        """Read a part in float32, one slice for each dimension."""
        slices = explicit_slices(part, self.shape)
        x = as_float32(self.values.read(slices))
        if x.size == 0:
            return x
        *leading, row_slice, column_slice = slices
        block_rows = np.arange(row_slice.start, row_slice.stop) // self.block[0]
        if self.group_index is None:
            block_columns = np.arange(column_slice.start, column_slice.stop) // self.block[1]
        else:
            block_columns = self.group_index.read((column_slice,)).astype(np.int64)
        first_block = int(block_rows[0])
        where = (*leading, slice(first_block, int(block_rows[-1]) + 1), slice(0, self.scales.shape[-1]))
        index = (..., (block_rows - first_block)[:, None], block_columns)
        with np.errstate(invalid="ignore", over="ignore"):
            if self.zeros is not None:
                x -= as_float32(self.zeros.read(where))[index]
            x *= as_float32(self.scales.read(where))[index]
        return x

    @property
    def format(self) -> tuple[object, ...]:
        """Properties that must be equal for tensors of layers that are stacked in one `QuantizedWeight`."""
        zeros_dtype = None if self.zeros is None else self.zeros.dtype
        return self.shape, self.values.dtype, self.scales.dtype, self.scales.shape, zeros_dtype, self.block


@dataclasses.dataclass(frozen=True)
class MXFP4Tensor(ScaledTensor):
    """MXFP4 of GPT-OSS: `x[..., 32 g + i, r] = E2M1(blocks[..., r, g, i]) * 2^(exponents[..., r, g] - 127)`.

    The file stores the transposed matrix, with two values per byte, the first in the lower four bits. MXFP4 is defined
    in OCP Microscaling Formats (2023).
    """

    blocks: StoredTensor = dataclasses.field(kw_only=True)
    exponents: StoredTensor = dataclasses.field(kw_only=True)

    def read(self, part: Slices) -> np.ndarray:
        """Read a part in float32, one slice for each dimension."""
        *leading, inputs, outputs = explicit_slices(part, self.shape)
        groups = slice(inputs.start // MX_GROUP_SIZE, -(-inputs.stop // MX_GROUP_SIZE))
        where = (*leading, outputs, groups)
        x = _TWICE_E2M1_PAIRS[self.blocks.read((*where, slice(0, MX_GROUP_SIZE // 2)))].view(np.float32)
        with np.errstate(over="ignore"):
            x *= _HALF_E8M0[self.exponents.read(where)][..., None]
        x = x.reshape(*x.shape[:-2], -1)
        start = inputs.start - groups.start * MX_GROUP_SIZE
        return x[..., start : start + inputs.stop - inputs.start].swapaxes(-1, -2)


@dataclasses.dataclass(frozen=True)
class _MergedTensor(StoredTensor):
    """View of a tensor that merges its last two dimensions: quantization groups, and bytes of a group."""

    inner: StoredTensor

    def read(self, part: Slices) -> np.ndarray:
        *leading, columns = explicit_slices(part, self.shape)
        group_bytes = self.inner.shape[-1]
        groups = slice(columns.start // group_bytes, -(-columns.stop // group_bytes))
        x = self.inner.read((*leading, groups, slice(0, group_bytes)))
        x = x.reshape(*x.shape[:-2], -1)
        start = columns.start - groups.start * group_bytes
        return x[..., start : start + columns.stop - columns.start]


def mxfp4_tensor(name: str, blocks: StoredTensor, scales: StoredTensor) -> MXFP4Tensor:
    """Return the tensor that the blocks and scales of GPT-OSS encode: `[..., 32 * groups, rows]`."""
    *leading, rows, groups, group_bytes = blocks.shape
    row_bytes = groups * group_bytes
    merged = _MergedTensor(blocks.file, blocks.name, (*leading, rows, row_bytes), "U8", blocks.offset, blocks)
    values = PackedFP4Tensor(blocks.file, name, (*leading, rows, 2 * row_bytes), "F4_E2M1", blocks.offset, merged)
    exponents = BytesTensor(scales.file, scales.name, scales.shape, "F8_E8M0", scales.offset, scales)
    return MXFP4Tensor(
        file=blocks.file,
        name=name,
        shape=(*leading, groups * MX_GROUP_SIZE, rows),
        dtype=DEQUANTIZED_DTYPE,
        offset=blocks.offset,
        values=transposed(values),
        scales=transposed(exponents),
        zeros=None,
        block=(MX_GROUP_SIZE, 1),
        blocks=blocks,
        exponents=scales,
    )


QUANTIZED = (ScaledTensor,)
