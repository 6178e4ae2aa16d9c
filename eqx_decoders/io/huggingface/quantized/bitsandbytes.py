"""Checkpoints of bitsandbytes: NF4 and FP4 of four bits, and LLM.int8 (Dettmers et al. 2022, 2023).

    four bits    x[i] = level[q[i]] scale[i // block]       i counts through the rows of the matrix
    nested       scale[j] = map[s[j]] outer[j // block] + offset
    LLM.int8     x[i, j] = q[i, j] SCB[i] / 127

Two numbers share a byte, the first in its high half. NF4 with blocks within rows can be kept in its bits.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError, check
from eqx_decoders.io.huggingface.directory import StoredTensor, parse_json
from eqx_decoders.io.huggingface.quantized.companions import (
    Tensors,
    check_dtype,
    check_none_left,
    check_stored,
    matrix_shape,
    pop_companion,
    scaled,
)
from eqx_decoders.io.huggingface.quantized.unpack import DTYPE, Cuts, LevelsTensor, whole_cuts
from eqx_decoders.numerics.nf4_weight import LEVELS


_STATE = ".quant_state.bitsandbytes__"
_STATE_BYTES = 10_000
_ITEM_SIZES = {"I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


def read_bitsandbytes(fields: Fields) -> Any:
    """Read the settings of bitsandbytes: how many bits; the tensors say all else."""
    four = fields.flag("load_in_4bit", False) or fields.flag("_load_in_4bit", False)
    eight = fields.flag("load_in_8bit", False) or fields.flag("_load_in_8bit", False)
    if four == eight:
        raise fields.error("one of load_in_4bit and load_in_8bit must be true.")
    for key in ("bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage"):
        fields.take(key, None)
    for key in ("enable_fp32_cpu_offload", "has_fp16_weight", "skip_modules", "threshold"):  # how it was run
        fields.take(f"llm_int8_{key}", None)
    for key in ("_load_in_4bit", "_load_in_8bit"):
        fields.take(key, None)
    return _four_bits if four else _eight_bits


def _four_bits(tensors: Tensors) -> Tensors:
    decoded = dict(tensors)
    for state in [name for name in tensors if _STATE in name]:
        name = state.partition(_STATE)[0]
        packed = pop_companion(decoded, name, decoded.pop(state))
        decoded[name] = _matrix(name, packed, decoded, _read_state(tensors[state]))
    check_none_left(decoded, *_PARTS)
    return decoded


def _read_state(tensor: StoredTensor) -> Fields:
    """Read what bitsandbytes says of a matrix, JSON in the bytes of a tensor."""
    small = tensor.dtype == "U8" and len(tensor.shape) == 1 and tensor.shape[0] <= _STATE_BYTES
    where = f"{tensor.file}: {tensor.name}"
    check(small, f"{where} is {tensor.description}, but must be at most {_STATE_BYTES} bytes.", ConversionError)
    return Fields(parse_json(tensor.read_all().tobytes(), where), where)


def _matrix(name: str, packed: StoredTensor, tensors: Tensors, state: Fields) -> StoredTensor:
    """Return a matrix of four bits, and remove its other tensors."""
    block, shape = state.integer("blocksize"), tuple(state.integers("shape"))
    state.word("quant_type", {"nf4": True, "fp4": True})
    valid = len(shape) == 2 and min(shape) > 0 and math.prod(shape) < 2**40 and block % 2 == 0
    if not valid:
        raise state.error(f"shape={list(shape)[:4]} and blocksize={block} must be those of a matrix.")
    count = math.prod(shape)
    packed = _as_bytes(packed, -(-count // 2))
    levels = pop_companion(tensors, f"{name}.quant_map", packed)
    check_stored(levels, ("F32",), (16,))
    scales = _scales(name, pop_companion(tensors, f"{name}.absmax", packed), tensors, state, -(-count // block))
    numbers = tuple(map(float, levels.read_all()))
    place = packed.file, name, shape
    codes = _Codes(*place, "I8", packed.offset, packed)
    if shape[1] % block:
        return _Flat(*place, DTYPE, packed.offset, codes, scales, block, numbers)
    in_rows = _InRows(scales.file, scales.name, (shape[0], shape[1] // block), "F32", scales.offset, scales)
    kind = "NF4" if numbers == LEVELS else "F32"
    return scaled(name, LevelsTensor(*place, kind, packed.offset, codes, numbers), in_rows, (1, block))


def _as_bytes(packed: StoredTensor, count: int) -> StoredTensor:
    """Return the `[count, 1]` bytes of a packed matrix, which is stored as any dtype (`bnb_4bit_quant_storage`)."""
    size = _ITEM_SIZES.get(packed.dtype, 1)
    if packed.shape != (-(-count // size), 1):
        raise ConversionError(
            f"{packed.file}: {packed.name} is {packed.description}, but must have the shape "
            f"{(-(-count // size), 1)}, because it stores {count} bytes in this dtype. Download the file again."
        )
    if packed.dtype == "U8":
        return packed
    return _ByteColumn(packed.file, packed.name, (count, 1), "U8", packed.offset, packed, size)


@dataclasses.dataclass(frozen=True)
class _ByteColumn(StoredTensor):
    """View of a column of values as a column of bytes.

    **Arguments:**

    - `inner`: the stored column.
    - `item_size`: bytes per stored value.
    """

    inner: StoredTensor
    item_size: int

    def read(self, part: Cuts) -> np.ndarray:
        rows, columns = whole_cuts(part, self.shape)
        first, stop = rows.start // self.item_size, -(-rows.stop // self.item_size)
        values = np.ascontiguousarray(self.inner.read((slice(first, stop), slice(0, 1))))
        offset = first * self.item_size
        return values.view(np.uint8).reshape(-1, 1)[rows.start - offset : rows.stop - offset, columns]


def _scales(name: str, scales: StoredTensor, tensors: Tensors, state: Fields, count: int) -> StoredTensor:
    """Return the scales of all blocks: plain numbers, or bytes that encode them."""
    check_stored(scales, ("U8", "F32"), (count,))
    if scales.dtype == "F32":
        return scales
    block, offset = state.integer("nested_blocksize"), state.take("nested_offset")
    if not isinstance(offset, int | float) or not math.isfinite(offset):
        raise state.error("nested_offset must be a number.")
    outer, levels = (pop_companion(tensors, f"{name}.nested_{part}", scales) for part in ("absmax", "quant_map"))
    check_stored(outer, ("F32",), (-(-count // block),))
    check_stored(levels, ("F32",), (256,))
    return _Nested(
        scales.file, scales.name, (count,), "F32", scales.offset, scales, outer, levels, block, float(offset)
    )


@dataclasses.dataclass(frozen=True)
class _Nested(StoredTensor):
    """Scales that are bytes: numbers of a table, with scales of their own and an offset."""

    inner: StoredTensor
    outer: StoredTensor
    levels: StoredTensor
    block: int
    addend: float

    def read(self, part: Cuts) -> np.ndarray:
        (cut,) = whole_cuts(part, self.shape)
        first, last = cut.start // self.block, -(-cut.stop // self.block)
        outer = np.repeat(self.outer.read((slice(first, last),)), self.block)
        outer = outer[cut.start - first * self.block :][: cut.stop - cut.start]
        return self.levels.read_all()[self.inner.read((cut,))] * outer + np.float32(self.addend)


@dataclasses.dataclass(frozen=True)
class _InRows(StoredTensor):
    """View of a vector as a matrix."""

    inner: StoredTensor

    def read(self, part: Cuts) -> np.ndarray:
        rows, columns = whole_cuts(part, self.shape)
        width = self.shape[1]
        flat = self.inner.read((slice(rows.start * width, rows.stop * width),))
        return flat.reshape(-1, width)[:, columns]


@dataclasses.dataclass(frozen=True)
class _Codes(StoredTensor):
    """Numbers of levels, 0 to 15, of a matrix whose bytes count through its rows."""

    inner: StoredTensor

    def read(self, part: Cuts) -> np.ndarray:
        rows, columns = whole_cuts(part, self.shape)
        width = self.shape[1]
        first, last = rows.start * width, rows.stop * width
        octets = self.inner.read((slice(first // 2, -(-last // 2)), slice(0, 1)))[:, 0]
        codes = np.stack([octets >> 4, octets & 15], axis=-1).reshape(-1)[first % 2 :][: last - first]
        return codes.astype(np.int8).reshape(-1, width)[:, columns]


@dataclasses.dataclass(frozen=True)
class _Flat(StoredTensor):
    """Matrix whose blocks go on from one row to the next."""

    codes: StoredTensor
    scales: StoredTensor
    block: int
    levels: tuple[float, ...]

    def read(self, part: Cuts) -> np.ndarray:
        rows, columns = whole_cuts(part, self.shape)
        width = self.shape[1]
        first, last = rows.start * width, rows.stop * width
        begin = first // self.block
        scales = np.repeat(self.scales.read((slice(begin, -(-last // self.block)),)), self.block)
        scales = scales[first - begin * self.block :][: last - first].reshape(-1, width)
        x = np.asarray(self.levels, np.float32)[self.codes.read((rows, slice(0, width)))]
        return (x * scales)[:, columns]


def _eight_bits(tensors: Tensors) -> Tensors:
    """Decode LLM.int8: whole numbers, whose rows have the largest absolute value that they had."""
    decoded = {name: tensor for name, tensor in tensors.items() if not name.endswith(".weight_format")}
    for name in [name for name in decoded if name.endswith(".SCB")]:
        weight = name.removesuffix("SCB") + "weight"
        most = decoded.pop(name)
        numbers = pop_companion(decoded, weight, most)
        check_dtype(numbers, "I8")
        rows, columns = matrix_shape(numbers, 2)
        check_stored(most, ("F32", "F16"), (rows,))
        scales = _Largest(most.file, most.name, (rows, 1), "F32", most.offset, most)
        decoded[weight] = scaled(weight, numbers, scales, (1, columns))
    return decoded


@dataclasses.dataclass(frozen=True)
class _Largest(StoredTensor):
    """Scales of rows whose largest whole number is 127, from their largest values."""

    inner: StoredTensor

    def read(self, part: Cuts) -> np.ndarray:
        return (self.inner.read(part[:1]).astype(np.float32) / np.float32(127))[:, None][:, part[1]]
