"""Quantization schemes in `quantization_config`.

`read_scheme` returns a function from the stored tensors to views that dequantize. To add a scheme, write a function
that reads its settings (`fields`) and returns such a function, and add it to the table in `read_scheme`.

Supported are MXFP4 of GPT-OSS, FP8 with scales per block, row or matrix, FBGEMM's FP8, compressed-tensors, GPTQ, AWQ,
AutoRound, and the schemes of `modelopt.py` and `bitsandbytes.py`. Activations are never quantized here: their settings
and static scales are ignored, which does not change the weights.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError
from eqx_decoders.io.huggingface.directory import Directory, StoredTensor
from eqx_decoders.io.huggingface.quantized.bitsandbytes import read_bitsandbytes
from eqx_decoders.io.huggingface.quantized.companions import (
    CACHE_SCALES,
    FLOATS,
    Tensors,
    check_dtype,
    check_dtype_and_shape,
    check_none_left,
    matrix_shape,
    pop_companion,
    scaled_tensor,
)
from eqx_decoders.io.huggingface.quantized.modelopt import (
    HF_QUANT_CONFIG,
    mxfp8_tensor,
    nvfp4_tensor,
    read_modelopt,
    with_hf_quant_config,
)
from eqx_decoders.io.huggingface.quantized.unpack import (
    MX_GROUP_SIZE,
    BytesTensor,
    PackedFP4Tensor,
    PackedTensor,
    RepeatedTensor,
    ScaledTensor,
    mxfp4_tensor,
    per_row_view,
    transposed,
)


Scheme = Callable[[Tensors], Tensors]
T = TypeVar("T")
_ScaleShapes = tuple[tuple[int, int], tuple[int, int]]  # shapes of the scales and of the zero points

_OTHER_FORMAT = "the weights are stored in another format"
# Scales of activations, which are not quantized here.
_ACTIVATION_SCALES = ".activation_scale", "_activation_scale", ".input_scale", "_input_scale", ".output_scale"

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position of each of eight values in a 32-bit word


def checkpoint_tensors(directory: Directory) -> Tensors:
    """Return the tensors of a checkpoint by name. Reading a quantized tensor dequantizes it."""
    content = directory.json("config.json")
    if content.get("quantization_config") is None and directory.has(HF_QUANT_CONFIG):
        content = with_hf_quant_config(content, directory.json(HF_QUANT_CONFIG))
    return read_scheme(content)(directory.tensors())


def read_scheme(content: Mapping[str, Any]) -> Scheme:
    """Read `quantization_config` of a `config.json`, and return a function from stored to dequantized tensors.

    Raises ConversionError for unknown schemes and unsupported settings.
    """
    fields = Fields(content).table("quantization_config")
    if fields is None:
        return lambda tensors: tensors
    schemes = {
        "mxfp4": lambda _: _mxfp4_tensors,
        "fp8": _fp8,
        "fbgemm_fp8": _fbgemm,
        "compressed-tensors": _compressed,
        "gptq": _gptq,
        "awq": _awq,
        "auto-round": _auto_round,
        "intel/auto-round": _auto_round,
        "modelopt": read_modelopt,
        "bitsandbytes": read_bitsandbytes,
    }
    method = fields.take("quant_method", None)
    if not isinstance(method, str) or method not in schemes:
        raise fields.error(
            f"quant_method={str(method)[:60]} is not supported. Supported: {', '.join(schemes)}. Load a checkpoint in "
            "bfloat16."
        )
    scheme = schemes[method](fields)
    fields.flag("dequantize", False)  # whether transformers dequantizes; the values are the same
    # The dtype of each tensor shows which modules are quantized.
    for key in ("modules_to_not_convert", "ignored_layers", "modules_to_convert"):
        names = fields.take(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise fields.error(f"{key} must be a list of names.")
    fields.finish()
    return scheme


# --- MXFP4 and FP8 ---


def _mxfp4_tensors(tensors: Tensors) -> Tensors:
    decoded = dict(tensors)
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        blocks = decoded.pop(f"{name}_blocks")
        scales = pop_companion(decoded, f"{name}_scales", blocks)
        group_bytes = MX_GROUP_SIZE // 2
        if blocks.dtype != "U8" or len(blocks.shape) < 3 or blocks.shape[-1] != group_bytes:
            raise ConversionError(
                f"{blocks.file}: {blocks.name} is {blocks.description}, but blocks of MXFP4 must be U8 of shape [..., "
                f"rows, groups, {group_bytes}]. Download the file again."
            )
        check_dtype_and_shape(scales, ("U8",), blocks.shape[:-1])
        decoded[name] = mxfp4_tensor(name, blocks, scales)
    return decoded


def _fp8(fields: Fields) -> Scheme:
    fields.word("activation_scheme", {"dynamic": False, "static": True}, "dynamic")  # activations are not quantized
    fields.allow_only("fmt", "e4m3", effect=_OTHER_FORMAT)
    fields.allow_only("expert_dtype", "fp8", effect=_OTHER_FORMAT)
    fields.take("kv_cache_scheme", None)  # quantizes the KV cache, not the weights
    has_e8m0_scales = fields.word("scale_fmt", {"float": False, "ue8m0": True}, "float")
    block = fields.take("weight_block_size", None)
    if block is not None and not _is_block_size(block):
        raise fields.error(
            f"weight_block_size={block!r} must be two integers of at least 1, rows and columns, or null for one scale "
            f"per matrix or row."
        )
    scale_dtypes = (*FLOATS, "F8_E8M0", "U8") if has_e8m0_scales else (*FLOATS, "F8_E8M0")
    return lambda tensors: _fp8_tensors(tensors, None if block is None else (block[0], block[1]), scale_dtypes)


def _is_block_size(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)


def _fp8_tensors(tensors: Tensors, block: tuple[int, int] | None, scale_dtypes: tuple[str, ...]) -> Tensors:
    """Dequantize FP8 with a scale per block, row, matrix or expert.

    The scales are named `{name}_scale_inv` in transformers and `{name}_scale` in AutoFP8.
    """
    decoded = {name: tensor for name, tensor in tensors.items() if not _is_activation_scale(name, tensors)}
    for name, values in list(decoded.items()):
        if values.dtype != "F8_E4M3":
            continue
        autofp8_name = f"{name}_scale"
        scales = pop_companion(decoded, autofp8_name if autofp8_name in decoded else f"{name}_scale_inv", values)
        *lead, rows, columns = matrix_shape(values)
        block_grid = None if block is None else (*lead, -(-rows // block[0]), -(-columns // block[1]))
        row_shapes = _row_scale_shapes(lead, rows)
        if block is not None and scales.shape == block_grid:
            check_dtype(scales, *scale_dtypes)
            decoded[name] = scaled_tensor(name, values, scales, block)
        elif scales.shape in row_shapes:
            check_dtype(scales, *scale_dtypes)
            per_row = len(scales.shape) > len(lead) and scales.shape[len(lead)] == rows
            view = per_row_view(scales, (*lead, rows, 1), len(lead), per_row)
            decoded[name] = scaled_tensor(name, values, view, (1, columns))
        else:
            per_block = (
                "" if block is None else f", or {block_grid} for one scale per block of weight_block_size={list(block)}"
            )
            raise ConversionError(
                f"{scales.file}: {scales.name} is {scales.description}, but {name} of shape {values.shape} needs "
                f"scales of shape {', '.join(map(str, row_shapes))} for one scale per matrix or row{per_block}. Check "
                f"weight_block_size in config.json."
            )
    check_none_left(decoded, "_scale_inv")
    return decoded


def _is_activation_scale(name: str, tensors: Tensors) -> bool:
    """Return whether a tensor is a scale of the KV cache, or of the inputs or outputs of an FP8 matrix."""
    if name.endswith(CACHE_SCALES):
        return True
    ending = next((ending for ending in _ACTIVATION_SCALES if name.endswith(ending)), None)
    if ending is None:
        return False
    module = name.removesuffix(ending)
    return any(weight in tensors and tensors[weight].dtype == "F8_E4M3" for weight in (module, f"{module}.weight"))


def _row_scale_shapes(lead: Sequence[int], rows: int) -> list[tuple[int, ...]]:
    """Return all shapes in which a stack of matrices `[*lead, rows, columns]` may have one scale per matrix or row."""
    ends = ((), (1,), (1, 1), (rows,), (rows, 1))
    return list(dict.fromkeys((*lead, *end) for end in ends))


def _fbgemm(fields: Fields) -> Scheme:
    fields.take("activation_scale_ub", None)  # upper bound of the scales of activations
    return _row_scaled_tensors


def _row_scaled_tensors(tensors: Tensors) -> Tensors:
    decoded = {name: tensor for name, tensor in tensors.items() if not name.endswith(".input_scale_ub")}
    for name, values in tensors.items():
        if values.dtype == "F8_E4M3":
            scales = pop_companion(decoded, f"{name}_scale", values)
            rows, columns = matrix_shape(values, 2)
            check_dtype_and_shape(scales, FLOATS, (rows, 1))
            decoded[name] = scaled_tensor(name, values, scales, (1, columns))
    check_none_left(decoded, "_scale")
    return decoded


# --- compressed-tensors ---


@dataclasses.dataclass(frozen=True)
class _GroupSizes:
    """Sizes that occur in `config_groups`. The shapes of the tensors show which of them belongs to a weight.

    **Arguments:**

    - `bits`: numbers of bits of integers.
    - `blocks`: rows and columns of blocks.
    - `group_sizes`: columns of quantization groups.
    """

    bits: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]
    group_sizes: tuple[int, ...]


_FORMATS = (
    "dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision",
    "mxfp4-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized",
)  # fmt: skip
# Parameters of quantized activations and caches, which do not change the weights.
_ACTIVATION_PARAMETERS = (
    ".input_scale",
    ".input_zero_point",
    ".output_scale",
    ".output_zero_point",
    *CACHE_SCALES,
    ".input_global_scale",
)


def _compressed(fields: Fields) -> Scheme:
    fields.word("format", dict.fromkeys(_FORMATS, True), "int-quantized")
    fields.take("quantization_status", None)
    fields.allow_only("quantization_status", "compressed", "frozen", effect="the weights are not quantized yet")
    for key in ("ignore", "kv_cache_scheme", "global_compression_ratio", "version"):  # without effect on the tensors
        fields.take(key, None)
    for key in ("sparsity_config", "transform_config"):
        value = fields.take(key, {})
        is_off = isinstance(value, Mapping) and value.get("format", "dense") == "dense"
        if not is_off or value.get("config_groups"):
            raise fields.error(f"{key}={str(value)[:80]} is not supported. Load a checkpoint without it.")
    groups = fields.take("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise fields.error("config_groups must be an object with at least one group.")
    bits: set[int] = set()
    blocks: set[tuple[int, int]] = set()
    group_sizes: set[int] = set()
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise fields.error(f"config_groups.{str(name)[:40]} must have the key weights, an object.")
        inner = Fields(weights, f"{fields.where}.config_groups.{str(name)[:40]}.weights")
        num_bits = inner.integer("num_bits", 8)
        number_type = inner.word("type", {"int": "int", "float": "float"}, "int")
        if not (num_bits <= 8 if number_type == "int" else num_bits in (4, 8)):
            raise inner.error(
                f"num_bits={num_bits} of type={number_type} is not supported. Supported: integers of at most 8 bits, "
                "floats of 4 or 8 bits."
            )
        if number_type == "int":
            bits.add(num_bits)
        group_size = inner.take("group_size", None)
        if type(group_size) is int and group_size > 0:
            group_sizes.add(group_size)
        block = inner.take("block_structure", None)
        if block is not None:
            if isinstance(block, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", block):  # older versions: "128x128"
                block = [int(size) for size in block.split("x")]
            if not _is_block_size(block):
                raise inner.error(f"block_structure={str(block)[:60]} must be two integers of at least 1.")
            blocks.add((int(block[0]), int(block[1])))
    sizes = _GroupSizes(tuple(sorted(bits)), tuple(sorted(blocks)), tuple(sorted(group_sizes)))
    return lambda tensors: _compressed_tensors(tensors, sizes)


def _compressed_tensors(tensors: Tensors, sizes: _GroupSizes) -> Tensors:
    decoded = {name: tensor for name, tensor in tensors.items() if not name.endswith(_ACTIVATION_PARAMETERS)}
    for name in [name for name in decoded if name.endswith(("weight_packed", ".weight"))]:
        if name.endswith("weight_packed"):
            _unpack(decoded, name.removesuffix("_packed"), sizes)
        elif decoded[name].dtype in ("I8", "F8_E4M3"):
            values = decoded[name]
            scales = pop_companion(decoded, f"{name}_scale", values)
            zeros = decoded.pop(f"{name}_zero_point", None)
            if values.dtype == "F8_E4M3" and scales.dtype in ("U8", "F8_E8M0"):
                decoded[name] = mxfp8_tensor(name, values, scales)
            else:
                decoded[name] = _with_scales(name, values, scales, zeros, sizes)
    check_none_left(
        decoded, ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx", ".weight_global_scale"
    )
    return decoded


def _unpack(tensors: Tensors, name: str, sizes: _GroupSizes) -> None:
    """Replace `{name}_packed` and its scales, zero points and indices by the tensor `name`."""
    packed = tensors.pop(f"{name}_packed")
    scales = pop_companion(tensors, f"{name}_scale", packed)
    rows, words = matrix_shape(packed, 2)
    global_scale = tensors.pop(f"{name}_global_scale", None)
    if global_scale is not None:
        tensors[name] = nvfp4_tensor(name, packed, scales, global_scale, divides=True)
        return
    if packed.dtype == "U8":
        check_dtype_and_shape(scales, ("U8", "F8_E8M0"), (rows, 2 * words // MX_GROUP_SIZE))
        values = PackedFP4Tensor(packed.file, name, (rows, 2 * words), "F4_E2M1", packed.offset, packed)
        if scales.dtype == "U8":
            scales = BytesTensor(scales.file, scales.name, scales.shape, "F8_E8M0", scales.offset, scales)
        tensors[name] = scaled_tensor(name, values, scales, (1, MX_GROUP_SIZE))
        return
    check_dtype(packed, "I32")
    shape = pop_companion(tensors, f"{name}_shape", packed)
    if shape.dtype not in ("I64", "I32") or shape.shape != (2,):
        raise ConversionError(
            f"{shape.file}: {shape.name} is {shape.description}, but must be two integers, the shape of the weight. "
            "Download the file again."
        )
    columns, bits = _columns_and_bits(packed, shape, sizes)
    half = 2 ** (bits - 1)
    value_dtype = "I4" if bits <= 4 else "I8"
    values = PackedTensor(packed.file, name, (rows, columns), value_dtype, packed.offset, packed, 1, bits, half)
    zeros = tensors.pop(f"{name}_zero_point", None)
    if zeros is not None:
        check_dtype_and_shape(zeros, ("I32",), (-(-rows * bits // 32), *scales.shape[1:]))
        zero_dtype = "I8" if bits < 8 else "I16"
        zeros = PackedTensor(zeros.file, zeros.name, scales.shape, zero_dtype, zeros.offset, zeros, 0, bits, half)
    group_index = tensors.pop(f"{name}_g_idx", None)
    tensors[name] = _with_scales(name, values, scales, zeros, sizes, group_index)


def _columns_and_bits(packed: StoredTensor, shape: StoredTensor, sizes: _GroupSizes) -> tuple[int, int]:
    """Return the number of columns of a packed matrix, and the bits of its values."""
    rows, words = packed.shape
    weight_shape = [int(size) for size in shape.read_all()]
    for bits in sizes.bits:
        if weight_shape[0] == rows and words == -(-weight_shape[1] * bits // 32):
            return weight_shape[1], bits
    raise ConversionError(
        f"{packed.file}: {packed.name} is {packed.description}, which does not fit weight_shape={weight_shape} and "
        f"num_bits={list(sizes.bits)}. Check config_groups in config.json."
    )


def _with_scales(
    name: str,
    values: StoredTensor,
    scales: StoredTensor,
    zeros: StoredTensor | None,
    sizes: _GroupSizes,
    group_index: StoredTensor | None = None,
) -> ScaledTensor:
    """Return a matrix with one scale, or one scale per row, per quantization group of a row, or per block."""
    rows, columns = matrix_shape(values, 2)
    check_dtype(scales, *FLOATS)
    is_one_block = scales.shape == (1, 1) and any(
        rows <= block_rows and columns <= block_columns for block_rows, block_columns in sizes.blocks
    )
    if scales.shape in ((), (1,), (1, 1)) and rows > 1 and not is_one_block:
        scales = RepeatedTensor(scales.file, scales.name, (rows, 1), scales.dtype, scales.offset, scales)
        if zeros is not None:
            raise ConversionError(
                f"{values.file}: zero points of {name} are not supported, because the matrix has one scale. Load a "
                "checkpoint with symmetric quantization."
            )
    blocks = [(1, columns), *((1, size) for size in sizes.group_sizes), *sizes.blocks]
    block = next((size for size in blocks if scales.shape == (-(-rows // size[0]), -(-columns // size[1]))), None)
    if block is None:
        raise ConversionError(
            f"{scales.file}: {scales.name} is {scales.description}, which fits no group_size={list(sizes.group_sizes)} "
            f"and no block_structure={list(sizes.blocks)} of config_groups. Check config.json."
        )
    if zeros is not None and not isinstance(zeros, PackedTensor):
        check_dtype_and_shape(zeros, ("I8",), scales.shape)
    if group_index is not None:
        group_index = _checked_group_index(group_index, columns, block[1], scales.shape[-1], unset=-1)
    return scaled_tensor(name, values, scales, block, zeros, group_index)


# --- GPTQ and AWQ ---


@dataclasses.dataclass(frozen=True)
class _ModulePacking:
    """Bits per weight, and rows per quantization group (0: one group for all rows)."""

    bits: int
    group_size: int


@dataclasses.dataclass(frozen=True)
class _PackingTable:
    """Packings of a model's modules.

    **Arguments:**

    - `default`: the packing of modules that no pattern matches.
    - `overrides`: regular expressions of module names with their packings, from GPTQModel's `dynamic`. Patterns with
        `-:` are left out: their modules are stored without quantization.
    """

    default: _ModulePacking
    overrides: tuple[tuple[str, _ModulePacking], ...]

    @property
    def packings(self) -> tuple[_ModulePacking, ...]:
        """All packings, the default first."""
        return tuple(dict.fromkeys((self.default, *(packing for _, packing in self.overrides))))

    def find(
        self,
        module: str,
        packed: StoredTensor,
        scales: StoredTensor,
        zeros: StoredTensor,
        expected_shapes: Callable[[_ModulePacking], _ScaleShapes],
    ) -> _ModulePacking:
        """Return the packing of a module. Raises ConversionError if no packing fits the module's tensors.

        The packing of the first pattern that matches the name comes first. All other packings are tried after it,
        because the module may have been renamed since the patterns were written.

        `expected_shapes` returns the shapes of the scales and zero points for a packing.
        """
        check_dtype(scales, *FLOATS)
        check_dtype(zeros, "I32")
        matching = [packing for pattern, packing in self.overrides if re.match(pattern, module)]
        for packing in (*matching[:1], *self.packings):
            if expected_shapes(packing) == (scales.shape, zeros.shape):
                return packing
        known = " or ".join(f"bits={packing.bits}, group_size={packing.group_size or -1}" for packing in self.packings)
        raise ConversionError(
            f"{packed.file}: {packed.name} is {packed.description}, with scales of shape {scales.shape} and zero "
            f"points of shape {zeros.shape}, which is not the packing of {known}. Check bits, group_size and dynamic "
            f"of quantization_config in config.json."
        )


# Settings of how a program quantizes, packs or runs the weights. The stored tensors do not depend on them.
_QUANTIZER_KEYS = (  # noqa: SIM905 - a list of words
    "damp_percent damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name "
    "model_seqlen block_name_to_quantize module_name_preceding_first_block batch_size pad_token_id use_exllama "
    "max_input_length exllama_config cache_block_outputs modules_in_block_to_quantize use_cuda_fp16 dataset tokenizer "
    "lm_head meta quantizer backend offload_to_disk offload_to_disk_path adapter hyb_act hyb_act_auto format_version "
    "act_group_aware mse mock_quantization pack_impl device parallel_packing buffered_fwd process rank "
    "v2 v2_alpha v2_memory_device gptaq gptaq_alpha gptaq_memory_device foem fallback failsafe hessian smooth smoother "
    "pre_filters preprocessors weight_only gc_mode wait_for_submodule_finalizers auto_forward_data_parallel "
    "vram_strategy moe compute_device_filter true_sequential_mode do_fuse fuse_max_seq_len modules_to_fuse"
).split()


def _read_packings(fields: Fields, method: str, known_bits: Sequence[int]) -> _PackingTable:
    """Read the settings that GPTQ and AWQ share, as AutoGPTQ, AutoAWQ, GPTQModel and transformers write them."""
    for old, new in (("w_bit", "bits"), ("q_group_size", "group_size")):
        fields.rename(old, new)
    fields.allow_only("method", method, effect="another quantization method was used")
    fields.allow_only("is_marlin_format", False, effect=_OTHER_FORMAT)
    default = _read_packing(fields, known_bits, None)
    return _PackingTable(default, tuple(_read_overrides(fields, known_bits, default)))


def _read_overrides(
    fields: Fields, known_bits: Sequence[int], default: _ModulePacking
) -> Iterator[tuple[str, _ModulePacking]]:
    """Yield the patterns of `dynamic` with their packings, without patterns of modules that are not quantized."""
    table = fields.table("dynamic")
    if table is None:
        return
    for pattern in table.content:
        inner = table.table(pattern)
        expression = pattern.removeprefix("+:")
        try:
            re.compile(expression.removeprefix("-:"))
        except re.error as error:
            raise fields.error(f"dynamic: {pattern[:60]!r} is not a regular expression: {error}.") from error
        if inner is None or pattern.startswith("-:"):
            continue
        packing = _read_packing(inner, known_bits, default)
        inner.finish()
        yield expression, packing


def _read_packing(fields: Fields, known_bits: Sequence[int], default: _ModulePacking | None) -> _ModulePacking:
    bits = fields.integer("bits") if default is None else fields.integer("bits", default.bits)
    size = fields.take("group_size", 128 if default is None else default.group_size or -1)
    if bits not in known_bits:
        raise fields.error(f"bits={bits} must be one of {', '.join(map(str, known_bits))}.")
    if type(size) is not int or (size < 1 and size != -1):
        raise fields.error(f"group_size={str(size)[:40]} must be an integer of at least 1, or -1 for whole columns.")
    fields.allow_only("pack_dtype", "int32", effect="weights are packed into another dtype")
    fields.allow_only("rotation", effect="activations are rotated")
    fields.flag("desc_act", False)  # the stored g_idx shows the quantization group of each row
    fields.flag("sym", True)  # zero points are stored for symmetric quantization, too
    for key in _QUANTIZER_KEYS:
        fields.take(key, None)
    return _ModulePacking(bits, max(size, 0))


def _read_format(fields: Fields, formats: Mapping[str, T], keys: Sequence[str], default: str) -> T:
    """Read the format of packed weights from one of `keys`: each program uses another key."""
    names = {key: str(fields.take(key)).lower() for key in keys if fields.take(key, None) is not None}
    for key, name in names.items():
        if name not in formats:
            raise fields.error(f"{key}={name[:40]} is not supported. Supported: {', '.join(formats)}.")
    if len({formats[name] for name in names.values()}) > 1:
        listed = " and ".join(f"{key}={name}" for key, name in names.items())
        raise fields.error(f"{listed} are the same setting: make them equal.")
    return formats[next(iter(names.values()), default)]


def _gptq(fields: Fields) -> Scheme:
    formats = {"gptq": False, "gptq_v2": True}
    is_v2 = _read_format(fields, formats, ("checkpoint_format", "format"), "gptq")
    packings = _read_packings(fields, "gptq", (2, 3, 4, 8))
    return lambda tensors: _gptq_tensors(tensors, packings, is_v2)


def _gptq_tensors(tensors: Tensors, packings: _PackingTable, is_v2: bool) -> Tensors:
    """Dequantize GPTQ (Frantar et al. 2022): weights are packed along the inputs, zero points along the outputs."""
    decoded = dict(tensors)
    for name in [name.removesuffix("qweight") for name in tensors if name.endswith(".qweight")]:
        packed = decoded.pop(f"{name}qweight")
        words, columns = matrix_shape(packed, 2)
        check_dtype(packed, "I32")
        scales, zeros = (pop_companion(decoded, name + end, packed) for end in ("scales", "qzeros"))
        expected_shapes = functools.partial(_gptq_shapes, words=words, columns=columns)
        packing = packings.find(name.removesuffix("."), packed, scales, zeros, expected_shapes)
        bits, half = packing.bits, 2 ** (packing.bits - 1)
        rows = words * 32 // bits
        group_size = packing.group_size or rows
        group_index = decoded.pop(f"{name}g_idx", None)
        if group_index is not None:
            group_index = _checked_group_index(group_index, rows, group_size, scales.shape[0])
        value_dtype, zero_dtype = ("I4", "I8") if bits <= 4 else ("I8", "I16")
        zero_offset = half if is_v2 else half - 1  # the first version stores each zero point minus one
        values = PackedTensor(packed.file, name, (rows, columns), value_dtype, packed.offset, packed, 0, bits, half)
        zeros = PackedTensor(zeros.file, name, scales.shape, zero_dtype, zeros.offset, zeros, 1, bits, zero_offset)
        decoded[f"{name}weight"] = scaled_tensor(
            f"{name}weight",
            transposed(values),
            transposed(scales),
            (1, group_size),
            transposed(zeros),
            group_index,
        )
    check_none_left(decoded, ".qzeros", ".g_idx")
    return decoded


def _gptq_shapes(packing: _ModulePacking, words: int, columns: int) -> _ScaleShapes:
    """Return the shapes of the scales and zero points of a matrix that is stored in `words` 32-bit words along its
    input dimension.
    """
    groups = 1 if packing.group_size == 0 else -(-(words * 32 // packing.bits) // packing.group_size)
    return (groups, columns), (groups, -(-columns * packing.bits // 32))


def _checked_group_index(
    group_index: StoredTensor, rows: int, group_size: int, num_groups: int, unset: int | None = None
) -> StoredTensor | None:
    """Return the index of each row's quantization group. None: groups are `group_size` consecutive rows.

    `unset`: value of an index that was never written, which means consecutive rows.

    Raises ConversionError for another shape, and for an index of a group that has no scales.
    """
    check_dtype_and_shape(group_index, ("I32", "I64"), (rows,))
    indices = group_index.read_all()
    if np.array_equal(indices, np.arange(rows) // group_size) or (unset is not None and unset in indices):
        return None
    if indices.min() < 0 or indices.max() >= num_groups:
        raise ConversionError(
            f"{group_index.file}: {group_index.name} has indices from {indices.min()} to {indices.max()}, but indices "
            f"must be between 0 and {num_groups - 1}, because there are scales of {num_groups} groups. Download the "
            f"file again."
        )
    return group_index


def _awq(fields: Fields) -> Scheme:
    _read_format(fields, {"gemm": True}, ("version", "format", "checkpoint_format"), "gemm")
    packings = _read_packings(fields, "awq", (4,))
    fields.flag("zero_point", True)
    return lambda tensors: _awq_tensors(tensors, packings)


def _awq_shapes(packing: _ModulePacking, rows: int, words: int) -> _ScaleShapes:
    """Return the shapes of the scales and zero points of a matrix that is stored in `words` 32-bit words along its
    output dimension.
    """
    groups = 1 if packing.group_size == 0 else -(-rows // packing.group_size)
    return (groups, 8 * words), (groups, words)


def _awq_tensors(tensors: Tensors, packings: _PackingTable) -> Tensors:
    """Dequantize AWQ (Lin et al. 2023): weights and zero points are packed along the outputs, eight interleaved."""
    decoded = dict(tensors)
    for name in [name.removesuffix("qweight") for name in tensors if name.endswith(".qweight")]:
        packed = decoded.pop(f"{name}qweight")
        check_dtype(packed, "I32")
        rows, words = matrix_shape(packed, 2)
        scales, zeros = (pop_companion(decoded, name + end, packed) for end in ("scales", "qzeros"))
        expected_shapes = functools.partial(_awq_shapes, rows=rows, words=words)
        packing = packings.find(name.removesuffix("."), packed, scales, zeros, expected_shapes)
        group_index = decoded.pop(f"{name}g_idx", None)
        group_size = packing.group_size or rows
        if group_index is not None and _checked_group_index(group_index, rows, group_size, scales.shape[0]) is not None:
            raise ConversionError(
                f"{group_index.file}: {group_index.name} assigns rows to quantization groups in another order, but AWQ "
                f"groups are {group_size} consecutive rows. Load a checkpoint that was quantized without act-order."
            )

        decoded[f"{name}weight"] = scaled_tensor(
            f"{name}weight",
            _unpacked_awq(packed, "I4"),
            transposed(scales),
            (1, group_size),
            _unpacked_awq(zeros, "I8"),
        )
    check_none_left(decoded, ".qzeros")
    return decoded


def _unpacked_awq(packed: StoredTensor, dtype: str) -> StoredTensor:
    """Return the view of packed weights or zero points as a matrix `[outputs, inputs]`."""
    shape = (packed.shape[0], 8 * packed.shape[1])
    unpacked = PackedTensor(packed.file, packed.name, shape, dtype, packed.offset, packed, 1, 4, 8, _AWQ_ORDER)
    return transposed(unpacked)


_AUTO_ROUND_KEYS = (  # settings of the quantization, which do not change how weights are stored
    "iters", "nsamples", "seqlen", "autoround_version", "model_free", "amp", "lr", "minmax_lr", "low_gpu_mem_usage",
    "gradient_accumulate_steps", "enable_quanted_input", "enable_minmax_tuning", "enable_norm_bias_tuning",
    "to_quant_block_names", "quant_block_list", "scale_dtype", "super_bits", "super_group_size", "super_sym",
    "train_bs", "low_cpu_mem_usage", "lr_scheduler", "not_use_best_mse", "dynamic_max_gap", "sampler",
    "enable_torch_compile", "enable_alg_ext", "quant_nontext_module", "supported_types", "static_kv_dtype",
    "static_attention_dtype", "act_bits", "act_group_size", "act_sym", "act_dynamic", "act_data_type",
)  # fmt: skip


def _auto_round(fields: Fields) -> Scheme:
    """Read the settings of AutoRound, which stores tensors as GPTQ or AWQ does."""
    formats = {f"auto_round:{prefix}{name}": name for name in ("gptq", "awq") for prefix in ("auto_", "")}
    # Without packing_format, the backend names the format, for example "auto_round:awq:gemm".
    default = "auto_round:auto_awq" if "awq" in str(fields.take("backend", "")) else "auto_round:auto_gptq"
    packing_format = _read_format(fields, formats, ("packing_format",), default)
    fields.allow_only("data_type", "int", effect=_OTHER_FORMAT)
    for key in _AUTO_ROUND_KEYS:
        fields.take(key, None)
    modules = fields.take("extra_config", {})
    if not isinstance(modules, Mapping) or not all(isinstance(entry, Mapping) for entry in modules.values()):
        raise fields.error("extra_config must map names of modules to objects with their settings.")
    dynamic = {}
    for name, settings in modules.items():
        overrides = {key: settings[key] for key in ("bits", "group_size") if settings.get(key) is not None}
        if overrides.get("bits", 0) in range(16):  # modules of 16 bits are stored without quantization
            dynamic[f"+:(.*[.])?{re.escape(name)}$"] = overrides
    fields.supply("dynamic", dynamic)
    return _gptq(fields) if packing_format == "gptq" else _awq(fields)


def without_zero_biases(tensors: Tensors, expected: Mapping[str, Any]) -> Tensors:
    """Remove biases that are zero and not expected: some programs write them for every quantized matrix.

    `expected`: the expected tensors by name.
    """

    def is_superfluous(name: str) -> bool:
        if not name.endswith(".bias") or name in expected:
            return False
        weight = tensors.get(name.removesuffix("bias") + "weight")
        return isinstance(weight, ScaledTensor) and not tensors[name].read_all().any()

    return {name: tensor for name, tensor in tensors.items() if not is_superfluous(name)}
