"""Checkpoints of bitsandbytes: NF4, FP4 and LLM.int8 (Dettmers et al. 2022, 2023).

    NF4, FP4        x[i] = codebook[q[i]] * scale[i // block]      i: index into the flattened matrix
    double quant    scale[j] = codebook[s[j]] * outer[j // block] + offset
    LLM.int8        x[i, j] = q[i, j] * SCB[i] / 127

Two 4-bit values share a byte, the first in the higher bits. NF4 matrices can stay quantized if no block spans two rows.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError
from eqx_decoders.io.huggingface.directory import StoredTensor, parse_json
from eqx_decoders.io.huggingface.quantized.companions import (
    Tensors,
    check_dtype,
    check_dtype_and_shape,
    check_none_left,
    matrix_shape,
    pop_companion,
    scaled_tensor,
)
from eqx_decoders.io.huggingface.quantized.unpack import DEQUANTIZED_DTYPE, CodebookTensor, Slices, explicit_slices
from eqx_decoders.numerics.nf4_weight import LEVELS


_STATE = ".quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 10_000
_ITEM_SIZES = {"I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


def read_bitsandbytes(fields: Fields) -> Any:
    """Read the settings of bitsandbytes: 4 or 8 bits. The tensors show everything else."""
    is_4bit = fields.flag("load_in_4bit", False) or fields.flag("_load_in_4bit", False)
    is_8bit = fields.flag("load_in_8bit", False) or fields.flag("_load_in_8bit", False)
    if is_4bit == is_8bit:
        raise fields.error("exactly one of load_in_4bit and load_in_8bit must be true.")
    for key in ("bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage"):
        fields.take(key, None)
    for key in ("enable_fp32_cpu_offload", "has_fp16_weight", "skip_modules", "threshold"):  # settings of the runtime
        fields.take(f"llm_int8_{key}", None)
    for key in ("_load_in_4bit", "_load_in_8bit"):
        fields.take(key, None)
    return _4bit_tensors if is_4bit else _8bit_tensors


def _4bit_tensors(tensors: Tensors) -> Tensors:
    decoded = dict(tensors)
    for state in [name for name in tensors if _STATE in name]:
        name = state.partition(_STATE)[0]
        packed = pop_companion(decoded, name, decoded.pop(state))
        decoded[name] = _4bit_matrix(name, packed, decoded, _read_state(tensors[state]))
    check_none_left(decoded, *_PARTS)
    return decoded


def _read_state(tensor: StoredTensor) -> Fields:
    """Read the quantization state of a matrix: JSON in the bytes of a tensor."""
    where = f"{tensor.file}: {tensor.name}"
    if tensor.dtype != "U8" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_STATE_BYTES:
        raise ConversionError(
            f"{where} is {tensor.description}, but must be at most {_MAX_STATE_BYTES} bytes of dtype U8. Download the "
            "file again."
        )
    return Fields(parse_json(tensor.read_all().tobytes(), where), where)


def _4bit_matrix(name: str, packed: StoredTensor, tensors: Tensors, state: Fields) -> StoredTensor:
    """Return a matrix of NF4 or FP4, and remove its other tensors from `tensors`."""
    block = state.integer("blocksize")
    shape = tuple(state.integers("shape"))
    state.word("quant_type", {"nf4": True, "fp4": True})
    if len(shape) != 2 or min(shape) < 1 or math.prod(shape) >= 2**40 or block % 2:
        raise state.error(
            f"shape={list(shape)[:4]} must be the shape of a matrix, and blocksize={block} must be even. Download the "
            "file again."
        )
    count = math.prod(shape)
    packed = _as_bytes(packed, -(-count // 2))
    quant_map = pop_companion(tensors, f"{name}.quant_map", packed)
    check_dtype_and_shape(quant_map, ("F32",), (16,))
    absmax = pop_companion(tensors, f"{name}.absmax", packed)
    scales = _scales(name, absmax, tensors, state, -(-count // block))
    codebook = tuple(map(float, quant_map.read_all()))
    place = packed.file, name, shape
    codes = _UnpackedCodes(*place, "I8", packed.offset, packed)
    if shape[1] % block:
        return _FlatBlocks(*place, DEQUANTIZED_DTYPE, packed.offset, codes, scales, block, codebook)
    scale_matrix = _AsMatrix(scales.file, scales.name, (shape[0], shape[1] // block), "F32", scales.offset, scales)
    dtype = "NF4" if codebook == LEVELS else "F32"
    return scaled_tensor(name, CodebookTensor(*place, dtype, packed.offset, codes, codebook), scale_matrix, (1, block))


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

    def read(self, part: Slices) -> np.ndarray:
        rows, columns = explicit_slices(part, self.shape)
        first, stop = rows.start // self.item_size, -(-rows.stop // self.item_size)
        values = np.ascontiguousarray(self.inner.read((slice(first, stop), slice(0, 1))))
        offset = first * self.item_size
        return values.view(np.uint8).reshape(-1, 1)[rows.start - offset : rows.stop - offset, columns]


def _scales(name: str, scales: StoredTensor, tensors: Tensors, state: Fields, count: int) -> StoredTensor:
    """Return the scales of all blocks, which are floats, or themselves quantized (`bnb_4bit_use_double_quant`)."""
    check_dtype_and_shape(scales, ("U8", "F32"), (count,))
    if scales.dtype == "F32":
        return scales
    block = state.integer("nested_blocksize")
    offset = state.take("nested_offset")
    if not isinstance(offset, int | float) or not math.isfinite(offset):
        raise state.error(f"nested_offset={str(offset)[:40]} must be a finite number. Download the file again.")
    outer = pop_companion(tensors, f"{name}.nested_absmax", scales)
    quant_map = pop_companion(tensors, f"{name}.nested_quant_map", scales)
    check_dtype_and_shape(outer, ("F32",), (-(-count // block),))
    check_dtype_and_shape(quant_map, ("F32",), (256,))
    return _DoubleQuantized(
        scales.file, scales.name, (count,), "F32", scales.offset, scales, outer, quant_map, block, float(offset)
    )


@dataclasses.dataclass(frozen=True)
class _DoubleQuantized(StoredTensor):
    """Quantized scales: `codebook[inner[j]] * outer[j // block] + addend`."""

    inner: StoredTensor
    outer: StoredTensor
    codebook: StoredTensor
    block: int
    addend: float

    def read(self, part: Slices) -> np.ndarray:
        (scales,) = explicit_slices(part, self.shape)
        first, last = scales.start // self.block, -(-scales.stop // self.block)
        outer = np.repeat(self.outer.read((slice(first, last),)), self.block)
        outer = outer[scales.start - first * self.block :][: scales.stop - scales.start]
        return self.codebook.read_all()[self.inner.read((scales,))] * outer + np.float32(self.addend)


@dataclasses.dataclass(frozen=True)
class _AsMatrix(StoredTensor):
    """View of a vector as a matrix, row by row."""

    inner: StoredTensor

    def read(self, part: Slices) -> np.ndarray:
        rows, columns = explicit_slices(part, self.shape)
        width = self.shape[1]
        flat = self.inner.read((slice(rows.start * width, rows.stop * width),))
        return flat.reshape(-1, width)[:, columns]


@dataclasses.dataclass(frozen=True)
class _UnpackedCodes(StoredTensor):
    """View of packed 4-bit codes as a matrix of the codes 0 to 15."""

    inner: StoredTensor

    def read(self, part: Slices) -> np.ndarray:
        rows, columns = explicit_slices(part, self.shape)
        width = self.shape[1]
        first, last = rows.start * width, rows.stop * width
        octets = self.inner.read((slice(first // 2, -(-last // 2)), slice(0, 1)))[:, 0]
        codes = np.stack([octets >> 4, octets & 15], axis=-1).reshape(-1)[first % 2 :][: last - first]
        return codes.astype(np.int8).reshape(-1, width)[:, columns]


@dataclasses.dataclass(frozen=True)
class _FlatBlocks(StoredTensor):
    """Matrix of 4-bit codes with blocks that continue in the next row."""

    codes: StoredTensor
    scales: StoredTensor
    block: int
    codebook: tuple[float, ...]

    def read(self, part: Slices) -> np.ndarray:
        rows, columns = explicit_slices(part, self.shape)
        width = self.shape[1]
        first, last = rows.start * width, rows.stop * width
        first_block = first // self.block
        scales = np.repeat(self.scales.read((slice(first_block, -(-last // self.block)),)), self.block)
        scales = scales[first - first_block * self.block :][: last - first].reshape(-1, width)
        x = np.asarray(self.codebook, np.float32)[self.codes.read((rows, slice(0, width)))]
        return (x * scales)[:, columns]


def _8bit_tensors(tensors: Tensors) -> Tensors:
    """Dequantize LLM.int8: 8-bit integers, and the largest absolute value of each row (`SCB`)."""
    decoded = {name: tensor for name, tensor in tensors.items() if not name.endswith(".weight_format")}
    for name in [name for name in decoded if name.endswith(".SCB")]:
        weight = name.removesuffix("SCB") + "weight"
        absmax = decoded.pop(name)
        values = pop_companion(decoded, weight, absmax)
        check_dtype(values, "I8")
        rows, columns = matrix_shape(values, 2)
        check_dtype_and_shape(absmax, ("F32", "F16"), (rows,))
        scales = _AbsmaxScales(absmax.file, absmax.name, (rows, 1), "F32", absmax.offset, absmax)
        decoded[weight] = scaled_tensor(weight, values, scales, (1, columns))
    return decoded


@dataclasses.dataclass(frozen=True)
class _AbsmaxScales(StoredTensor):
    """Scale of each row, from its largest absolute value, which 127 stands for."""

    inner: StoredTensor

    def read(self, part: Slices) -> np.ndarray:
        return (self.inner.read(part[:1]).astype(np.float32) / np.float32(127))[:, None][:, part[1]]
