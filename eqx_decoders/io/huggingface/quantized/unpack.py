"""Tensors of few bits and the numbers that they encode, read part by part in float32.

All products here are exact or correctly rounded in float32. A `ScaledTensor` is made of views, each of which is read
like a tensor of a file: its numbers in the order of the matrix, its scales, and its zeros.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from eqx_decoders.io.huggingface.directory import StoredTensor


# Numbers of FP4 (E2M1) by their four bits: one for the sign, two for the exponent, one for the mantissa.
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_SIGNED = np.concatenate([E2M1, -E2M1])
# twice both numbers of a byte, and half of 2^(s - 127): so no factor overflows where the product does not
_TWICE = np.stack([np.tile(2 * _SIGNED, 16), np.repeat(2 * _SIGNED, 16)], axis=-1).view(np.uint64)[:, 0]
_BYTES = np.arange(256, dtype=np.uint8)
_E4M3 = _BYTES.view(jnp.float8_e4m3fn).astype(np.float32)
_HALF_E8M0 = np.ldexp(np.float32(1), _BYTES.astype(np.int32) - 128)
GROUP = 32  # numbers that share a scale of MXFP4
DTYPE = "BF16"  # of a quantized model where the caller leaves the choice to the files

# Dtypes of the arrays of a `QuantizedWeight`, by the dtypes of views (and of files): short floats are stored as bits.
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

Cuts = tuple[slice, ...]


def whole_cuts(part: Cuts, shape: tuple[int, ...]) -> Cuts:
    """Return the slices with explicit begins and ends."""
    return tuple(slice(*cut.indices(size)) for cut, size in zip(part, shape, strict=True))


def as_float32(x: np.ndarray) -> np.ndarray:
    """Convert numbers or scales of any dtype to float32."""
    if x.dtype == np.uint8:
        return 2 * _HALF_E8M0[x]
    if x.dtype == jnp.float8_e4m3fn:
        return _E4M3[x.view(np.uint8)]
    return x.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class SwappedTensor(StoredTensor):
    """View of a tensor with its last two dimensions exchanged."""

    inner: StoredTensor

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        return self.inner.read((*part[:-2], part[-1], part[-2])).swapaxes(-1, -2)


def swapped(inner: StoredTensor) -> SwappedTensor:
    """Return the view of a tensor with its last two dimensions exchanged."""
    shape = (*inner.shape[:-2], inner.shape[-1], inner.shape[-2])
    return SwappedTensor(inner.file, inner.name, shape, inner.dtype, inner.offset, inner)


@dataclasses.dataclass(frozen=True)
class BytesTensor(StoredTensor):
    """View of short floats of eight or four bits as bytes, or of bytes under the dtype of such floats."""

    inner: StoredTensor

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        return np.ascontiguousarray(self.inner.read(part)).view(np.uint8)


@dataclasses.dataclass(frozen=True)
class LevelsTensor(StoredTensor):
    """Numbers of a few levels, by the number of each level, from 0 on. Those of dtype NF4 can be kept."""

    codes: StoredTensor
    levels: tuple[float, ...]

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part in float32, one slice for each dimension."""
        return np.asarray(self.levels, np.float32)[self.codes.read(part)]


@dataclasses.dataclass(frozen=True)
class _SignedCodes(StoredTensor):
    """Numbers of levels, counted from -8, as `NF4Weight` has them."""

    codes: StoredTensor

    def read(self, part: Cuts) -> np.ndarray:
        return self.codes.read(part) - np.int8(8)


def storage_view(inner: StoredTensor) -> StoredTensor:
    """Return the view of numbers or scales in the dtype of a `QuantizedWeight`."""
    if isinstance(inner, LevelsTensor):
        return _SignedCodes(inner.file, inner.name, inner.shape, inner.dtype, inner.offset, inner.codes)
    if inner.dtype not in ("F8_E4M3", "F8_E8M0", "F4_E2M1"):
        return inner
    return BytesTensor(inner.file, inner.name, inner.shape, inner.dtype, inner.offset, inner)


@dataclasses.dataclass(frozen=True)
class RepeatedTensor(StoredTensor):
    """View of one number for a whole matrix as one for each row."""

    inner: StoredTensor

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        sizes = [len(range(*cut.indices(size))) for cut, size in zip(part, self.shape, strict=True)]
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

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        cuts = whole_cuts(part, self.shape)
        stored_cuts = cuts[: self.lead + self.per_row]
        x = self.inner.read((*stored_cuts, *[slice(0, 1)] * (len(self.inner.shape) - len(stored_cuts))))
        sizes = [cut.stop - cut.start for cut in cuts]
        x = x.reshape(*sizes[: len(stored_cuts)], *[1] * (len(sizes) - len(stored_cuts)))
        return np.broadcast_to(x, sizes)


def per_row_view(inner: StoredTensor, shape: tuple[int, ...], lead: int, per_row: bool) -> StoredTensor:
    """Return a view of scales per matrix or row as a column of `shape`, with one scale per row."""
    return _PerRowTensor(inner.file, inner.name, shape, inner.dtype, inner.offset, inner, lead, per_row)


@dataclasses.dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """Whole numbers of few bits, packed densely along a dimension of int32: low bits first, all of them below 2^bits.

    `minus` is subtracted. Among eight numbers that share four bytes number i is at position `order[i]` (AWQ); None: i.
    """

    inner: StoredTensor
    axis: int
    bits: int
    minus: int
    order: tuple[int, ...] | None = None

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        cuts, each = list(whole_cuts(part, self.shape)), math.lcm(32, self.bits) // self.bits
        wanted = cuts[self.axis]
        first, last = wanted.start // each, -(-wanted.stop // each)
        words = each * self.bits // 32
        cuts[self.axis] = slice(first * words, min(last * words, self.inner.shape[self.axis]))
        stored = np.ascontiguousarray(np.moveaxis(self.inner.read(tuple(cuts)), self.axis, -1))
        x = _unpacked(stored, self.bits)
        if self.order is not None:
            x = x.reshape(*x.shape[:-1], -1, len(self.order))[..., list(self.order)].reshape(x.shape)
        x = x[..., wanted.start - first * each : wanted.stop - first * each].astype(np.int16) - self.minus
        return np.moveaxis(x.astype(STORAGE_DTYPES["I16" if self.dtype == "I16" else "I8"]), -1, self.axis)


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack all numbers of `bits` bits in the int32 of the last dimension."""
    if 8 % bits == 0:
        octets = words.view(np.uint8)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return ((octets[..., None] >> shifts) & np.uint8(2**bits - 1)).reshape(*words.shape[:-1], -1)
    wide = words.view(np.uint32).astype(np.uint64)
    after = np.concatenate([wide[..., 1:], np.zeros_like(wide[..., :1])], axis=-1)
    begins = np.arange(0, 32 * words.shape[-1] - bits + 1, bits)
    pairs = wide[..., begins // 32] | after[..., begins // 32] << np.uint64(32)
    return (pairs >> (begins % 32).astype(np.uint64) & np.uint64(2**bits - 1)).astype(np.uint8)


@dataclasses.dataclass(frozen=True)
class HalvesTensor(StoredTensor):
    """Numbers of E2M1, two in a byte, the low half first; along the last dimension of `inner`."""

    inner: StoredTensor

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part, one slice for each dimension."""
        *before, last = whole_cuts(part, self.shape)
        octets = self.inner.read((*before, slice(last.start // 2, -(-last.stop // 2))))
        halves = np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)
        begin = last.start - last.start // 2 * 2
        return halves[..., begin : begin + last.stop - last.start].view(jnp.float4_e2m1fn)


@dataclasses.dataclass(frozen=True)
class ScaledTensor(StoredTensor):
    """Scaled tensor: `x[.., i, j] = (numbers[.., i, j] - zeros[.., r, c]) scales[.., r, c]`.

    r = i // block[0], and c = j // block[1] or, where there is a `group_index`, `group_index[j]` (GPTQ's `g_idx`). The
    last blocks may be smaller.

    **Arguments:**

    - `numbers`: of this tensor's shape, in the dtype of a `QuantizedWeight`.
    - `scales`, `zeros`: one for each block; None for no zeros.
    - `block`: rows and columns of a block.
    - `group_index`: c for each column; None where columns are in order.
    """

    numbers: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None
    block: tuple[int, int]
    group_index: StoredTensor | None = None

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part in float32, one slice for each dimension."""
        cuts = whole_cuts(part, self.shape)
        x = as_float32(self.numbers.read(cuts))
        rows, columns = (np.arange(cut.start, cut.stop) for cut in cuts[-2:])
        rows, columns = rows // self.block[0], columns // self.block[1]
        if self.group_index is not None:
            columns = self.group_index.read((cuts[-1],)).astype(np.int64)
        if x.size == 0:
            return x
        lead, begin, end = cuts[:-2], int(rows[0]), int(rows[-1]) + 1
        where = (*lead, slice(begin, end), slice(0, self.scales.shape[-1]))
        rows = (rows - begin)[:, None]
        with np.errstate(invalid="ignore", over="ignore"):
            if self.zeros is not None:
                x -= as_float32(self.zeros.read(where))[..., rows, columns]
            x *= as_float32(self.scales.read(where))[..., rows, columns]
        return x

    @property
    def form(self) -> tuple[object, ...]:
        """Properties that tensors must share to be parts of one `QuantizedWeight`."""
        zeros = None if self.zeros is None else self.zeros.dtype
        return self.shape, self.numbers.dtype, self.scales.dtype, self.scales.shape, zeros, self.block


@dataclasses.dataclass(frozen=True)
class MXFP4Tensor(ScaledTensor):
    """MXFP4: `x[.., 32 g + i, r] = E2M1(blocks[.., r, g, i]) 2^(scales[.., r, g] - 127)`, the low half of a byte first.

    The file has the rows of the transposed matrix, as OpenAI's GPT-OSS does (OCP Microscaling Formats, 2023).
    """

    blocks: StoredTensor = dataclasses.field(kw_only=True)
    exponents: StoredTensor = dataclasses.field(kw_only=True)

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part in float32, one slice for each dimension."""
        *lead, inner, rows = whole_cuts(part, self.shape)
        groups = slice(inner.start // GROUP, -(-inner.stop // GROUP))
        stored = (*lead, rows, groups)
        x = _TWICE[self.blocks.read((*stored, slice(0, GROUP // 2)))].view(np.float32)
        with np.errstate(over="ignore"):
            x *= _HALF_E8M0[self.exponents.read(stored)][..., None]
        x = x.reshape(*x.shape[:-2], -1)
        begin = inner.start - groups.start * GROUP
        return x[..., begin : begin + inner.stop - inner.start].swapaxes(-1, -2)


@dataclasses.dataclass(frozen=True)
class _JoinedTensor(StoredTensor):
    """View of a tensor that joins its last two dimensions: groups, and bytes of a group."""

    inner: StoredTensor

    def read(self, part: Cuts) -> np.ndarray:
        *before, last = whole_cuts(part, self.shape)
        each = self.inner.shape[-1]
        first, end = last.start // each, -(-last.stop // each)
        x = self.inner.read((*before, slice(first, end), slice(0, each)))
        x = x.reshape(*x.shape[:-2], -1)
        return x[..., last.start - first * each : last.stop - first * each]


def mxfp4_tensor(name: str, blocks: StoredTensor, scales: StoredTensor) -> MXFP4Tensor:
    """Return the tensor that blocks and scales of GPT-OSS encode: `[.., 32 groups, rows]`."""
    *lead, rows, groups, half = blocks.shape
    shape = (*lead, groups * GROUP, rows)
    joined = _JoinedTensor(blocks.file, blocks.name, (*lead, rows, groups * half), "U8", blocks.offset, blocks)
    halves = HalvesTensor(blocks.file, name, (*lead, rows, 2 * groups * half), "F4_E2M1", blocks.offset, joined)
    powers = BytesTensor(scales.file, scales.name, scales.shape, "F8_E8M0", scales.offset, scales)
    return MXFP4Tensor(
        blocks.file, name, shape, DTYPE, blocks.offset, swapped(halves), swapped(powers), None, (GROUP, 1),
        blocks=blocks, exponents=scales,
    )  # fmt: skip


QUANTIZED = (ScaledTensor,)
