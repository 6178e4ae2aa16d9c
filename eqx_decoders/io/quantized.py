"""Checkpoints in four or eight bits with a scale for each block, read as the numbers that they stand for.

A tensor is expanded where it is read, part by part, in float32, in which every product below is exact or correctly
rounded. No layer knows of it, and an export writes plain tensors.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from eqx_decoders.errors import ConversionError, check
from eqx_decoders.families.fields import Fields
from eqx_decoders.io.directory import Directory, StoredTensor, stored_tensors


# The numbers of FP4 (E2M1), by their four bits: one for the sign, two for the exponent, one for the mantissa.
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_SIGNED = np.concatenate([E2M1, -E2M1])
# twice both numbers of a byte, and half of 2^(s - 127): so no factor overflows where the product does not
_TWICE = np.stack([np.tile(2 * _SIGNED, 16), np.repeat(2 * _SIGNED, 16)], axis=-1).view(np.uint64)[:, 0]
_BYTES = np.arange(256, dtype=np.uint8)
_E4M3 = _BYTES.view(jnp.float8_e4m3fn).astype(np.float32)
_HALF_E8M0 = np.ldexp(np.float32(1), _BYTES.astype(np.int32) - 128)
_GROUP = 32  # numbers that share a scale of MXFP4
_DTYPE = "BF16"  # of such a model where the caller leaves the choice to the files

_Tensors = dict[str, StoredTensor]
Scheme = Callable[[_Tensors], _Tensors]


@dataclasses.dataclass(frozen=True)
class MXFP4Tensor(StoredTensor):
    """MXFP4: `x[.., 32 g + i, r] = E2M1(blocks[.., r, g, i]) 2^(scales[.., r, g] - 127)`, the low half of a byte first.

    The file has the rows of the transposed matrix, as OpenAI's GPT-OSS does (OCP Microscaling Formats, 2023).
    """

    blocks: StoredTensor
    scales: StoredTensor

    def read(self, part: tuple[slice, ...]) -> np.ndarray:
        """A part of the tensor in float32, one slice for each dimension."""
        *lead, inner, rows = (slice(*cut.indices(size)) for cut, size in zip(part, self.shape, strict=True))
        groups = slice(inner.start // _GROUP, -(-inner.stop // _GROUP))
        stored = (*lead, rows, groups)
        x = _TWICE[self.blocks.read((*stored, slice(0, _GROUP // 2)))].view(np.float32)
        with np.errstate(over="ignore"):
            x *= _HALF_E8M0[self.scales.read(stored)][..., None]
        x = x.reshape(*x.shape[:-2], -1)
        begin = inner.start - groups.start * _GROUP
        return x[..., begin : begin + inner.stop - inner.start].swapaxes(-1, -2)


@dataclasses.dataclass(frozen=True)
class BlockScaledTensor(StoredTensor):
    """FP8: `x[.., i, j] = E4M3(values[.., i, j]) scales[.., i // rows, j // columns]`; last blocks may be cut short."""

    values: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]

    def read(self, part: tuple[slice, ...]) -> np.ndarray:
        """A part of the tensor in float32, one slice for each dimension."""
        cuts = tuple(slice(*cut.indices(size)) for cut, size in zip(part, self.shape, strict=True))
        x = _E4M3[self.values.read(cuts).view(np.uint8)]
        scales = self.scales.read_all()
        scales = 2 * _HALF_E8M0[scales] if scales.dtype == np.uint8 else scales.astype(np.float32)
        rows, columns = (np.arange(cut.start, cut.stop) for cut in cuts[-2:])
        with np.errstate(invalid="ignore", over="ignore"):
            x *= scales[cuts[:-2]][..., rows[:, None] // self.block[0], columns // self.block[1]]
        return x


QUANTIZED = (MXFP4Tensor, BlockScaledTensor)


def checkpoint_tensors(directory: Directory) -> _Tensors:
    """The tensors of a checkpoint by name, those that are quantised as what they stand for."""
    return read_scheme(directory.json("config.json"))(stored_tensors(directory))


def read_scheme(content: Mapping[str, Any]) -> Scheme:
    """What `quantization_config` says of the tensors: a function of them. Raises ConversionError."""
    fields = Fields(content).table("quantization_config")
    if fields is None:
        return lambda tensors: tensors
    schemes = {"mxfp4": lambda _: _mxfp4_tensors, "fp8": _fp8}
    method = fields.take("quant_method", None)
    if not isinstance(method, str) or method not in schemes:
        known = f"Known: {', '.join(schemes)}. Load a checkpoint in bfloat16."
        raise fields.error(f"quant_method={str(method)[:60]} is not read. {known}")
    scheme = schemes[method](fields)
    fields.flag("dequantize", False)  # what transformers computes with; the numbers are the same
    for key in ("modules_to_not_convert", "ignored_layers", "modules_to_convert"):  # each tensor says it by its dtype
        names = fields.take(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise fields.error(f"{key} must be a list of names.")
    fields.finish()
    return scheme


def _mxfp4_tensors(tensors: _Tensors) -> _Tensors:
    found = dict(tensors)
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        blocks = found.pop(f"{name}_blocks")
        scales = _scales(found, f"{name}_scales", blocks)
        *lead, rows, groups, half = blocks.shape if len(blocks.shape) > 2 else (0, 0, 0)
        good = half == _GROUP // 2 and blocks.dtype == "U8"
        rule = f"blocks of MXFP4 are U8 with {_GROUP // 2} bytes each"
        check(good, f"{blocks.file}: {blocks.name} is {blocks.description}: {rule}.", ConversionError)
        _check_scales(scales, ("U8",), blocks.shape[:-1])
        shape = (*lead, groups * _GROUP, rows)
        found[name] = MXFP4Tensor(blocks.file, name, shape, _DTYPE, blocks.offset, blocks, scales)
    return found


def _fp8(fields: Fields) -> Scheme:
    fields.allow_only("activation_scheme", "dynamic")
    fields.allow_only("fmt", "e4m3")
    fields.allow_only("expert_dtype", "fp8")
    bytes_too = fields.word("scale_fmt", {"float": False, "ue8m0": True}, "float")
    block = fields.take("weight_block_size")
    whole = isinstance(block, list) and all(isinstance(size, int) and not isinstance(size, bool) for size in block)
    if not whole or len(block) != 2 or min(block) < 1:
        raise fields.error(f"weight_block_size={block!r} must be two integers of at least 1: rows and columns.")
    dtypes = ("F32", "BF16", "F16", "F8_E8M0", *["U8"] * bytes_too)
    return lambda tensors: _block_scaled_tensors(tensors, (block[0], block[1]), dtypes)


def _block_scaled_tensors(tensors: _Tensors, block: tuple[int, int], dtypes: tuple[str, ...]) -> _Tensors:
    found = dict(tensors)
    for name, values in tensors.items():
        if values.dtype != "F8_E4M3":
            continue
        scales = _scales(found, f"{name}_scale_inv", values)
        matrix = len(values.shape) > 1
        check(matrix, f"{values.file}: {name} is {values.description}: only matrices have blocks.", ConversionError)
        *lead, rows, columns = values.shape
        _check_scales(scales, dtypes, (*lead, -(-rows // block[0]), -(-columns // block[1])))
        stored = (values.file, name, values.shape, _DTYPE, values.offset)
        found[name] = BlockScaledTensor(*stored, values, scales, block)
    left = [name for name in found if name.endswith("_scale_inv")]
    rule = "the weights of these scales are not in F8_E4M3. Download the files again"
    check(not left, f"{', '.join(left[:5])}: {rule}.", ConversionError)
    return found


def _scales(tensors: _Tensors, name: str, values: StoredTensor) -> StoredTensor:
    rule = f"is quantised, but {name} is missing: the checkpoint is incomplete"
    check(name in tensors, f"{values.file}: {values.name} {rule}.", ConversionError)
    return tensors.pop(name)


def _check_scales(scales: StoredTensor, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    good, rule = scales.dtype in dtypes and scales.shape == shape, f"{' or '.join(dtypes)} of shape {shape}"
    where = f"{scales.file}: {scales.name} is {scales.description}"
    check(good, f"{where}, but must be {rule}. Check weight_block_size.", ConversionError)
