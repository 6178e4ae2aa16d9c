"""Checkpoints of NVIDIA's ModelOpt; and NVFP4 and MXFP8, which compressed-tensors uses as well.

NVFP4   x = E2M1(q) * E4M3(scale) * global_scale   a scale for 16 values of a row, a global scale for the matrix
MXFP8   x = E4M3(q) * 2^(scale - 127)              a scale for 32 values of a row
FP8     x = E4M3(q) * scale                        a scale for the matrix, or for each row
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError
from eqx_decoders.io.huggingface.directory import StoredTensor
from eqx_decoders.io.huggingface.quantized.companions import (
    CACHE_SCALES,
    FLOATS,
    Tensors,
    check_dtype_and_shape,
    check_none_left,
    matrix_shape,
    pop_companion,
    scaled_tensor,
)
from eqx_decoders.io.huggingface.quantized.unpack import (
    MX_GROUP_SIZE,
    BytesTensor,
    PackedFP4Tensor,
    ScaledTensor,
    Slices,
    as_float32,
    per_row_view,
)


NVFP4_GROUP_SIZE = 16
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION")
_UNUSED = (".input_scale", ".k_bias", ".v_bias", *CACHE_SCALES)
HF_QUANT_CONFIG = "hf_quant_config.json"


@dataclasses.dataclass(frozen=True)
class GlobalScaleTensor(StoredTensor):
    """E4M3 scales, multiplied or divided by the global scale of their matrix.

    **Arguments:**

    - `inner`: the scales.
    - `global_scale`: tensor with one element.
    - `divides`: whether the scales are divided by `global_scale`.
    """

    inner: StoredTensor
    global_scale: StoredTensor
    divides: bool

    def read(self, part: Slices) -> np.ndarray:
        """Read a part in float32, one slice for each dimension."""
        scales = as_float32(self.inner.read(part))
        global_scale = as_float32(self.global_scale.read_all()).reshape(())
        with np.errstate(all="ignore"):
            return scales / global_scale if self.divides else scales * global_scale


def nvfp4_tensor(
    name: str, packed: StoredTensor, scales: StoredTensor, global_scale: StoredTensor, *, divides: bool
) -> ScaledTensor:
    """Return an NVFP4 matrix.

    **Arguments:**

    - `packed`: two values per byte.
    - `scales`, `global_scale`, `divides`: see `GlobalScaleTensor`.
    """
    rows, row_bytes = matrix_shape(packed, 2)
    check_dtype_and_shape(packed, ("U8",), (rows, row_bytes))
    check_dtype_and_shape(scales, ("F8_E4M3",), (rows, -(-2 * row_bytes // NVFP4_GROUP_SIZE)))
    if global_scale.dtype not in FLOATS or global_scale.shape not in ((), (1,)):
        raise ConversionError(
            f"{global_scale.file}: {global_scale.name} is {global_scale.description}, but must be one number, the "
            "common factor of the matrix. Download the file again."
        )
    values = PackedFP4Tensor(packed.file, name, (rows, 2 * row_bytes), "F4_E2M1", packed.offset, packed)
    place = scales.file, scales.name, scales.shape, "F32", scales.offset
    return scaled_tensor(name, values, GlobalScaleTensor(*place, scales, global_scale, divides), (1, NVFP4_GROUP_SIZE))


def mxfp8_tensor(name: str, values: StoredTensor, scales: StoredTensor) -> ScaledTensor:
    """Return an MXFP8 matrix: E4M3 values, and scales that are exponents of powers of two."""
    rows, columns = matrix_shape(values, 2)
    check_dtype_and_shape(scales, ("U8", "F8_E8M0"), (rows, -(-columns // MX_GROUP_SIZE)))
    exponents = BytesTensor(scales.file, scales.name, scales.shape, "F8_E8M0", scales.offset, scales)
    return scaled_tensor(name, values, exponents, (1, MX_GROUP_SIZE))


def with_hf_quant_config(content: Mapping[str, Any], hf_quant_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a `config.json` with `quantization_config`, from the content of `hf_quant_config.json`.

    Older versions of ModelOpt write these settings only to the separate file.
    """
    settings = hf_quant_config.get("quantization")
    settings = dict(settings) if isinstance(settings, Mapping) else {}
    return {**content, "quantization_config": {"quant_method": "modelopt", **settings}}


def read_modelopt(fields: Fields) -> Callable[[Tensors], Tensors]:
    """Read the settings of ModelOpt. The dtype of each tensor shows how it is quantized."""
    fields.word("quant_algo", dict.fromkeys(_ALGORITHMS, True))
    for key in ("config_groups", "ignore", "producer", "quantized_layers", "exclude_modules", "group_size"):
        fields.take(key, None)
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):  # quantization of the KV cache
        fields.take(key, None)
    fields.allow_only("has_zero_point", False, effect="weights have zero points")
    fields.allow_only("pre_quant_scale", False)
    return _modelopt_tensors


def _modelopt_tensors(tensors: Tensors) -> Tensors:
    decoded = {name: tensor for name, tensor in tensors.items() if not name.endswith(_UNUSED)}
    for name in [name for name in decoded if name.endswith(".weight")]:
        values = decoded[name]
        if values.dtype not in ("U8", "F8_E4M3"):
            continue
        scales = pop_companion(decoded, f"{name}_scale", values)
        if values.dtype == "U8":
            global_scale = pop_companion(decoded, f"{name}_scale_2", values)
            decoded[name] = nvfp4_tensor(name, values, scales, global_scale, divides=False)
        elif scales.dtype in ("U8", "F8_E8M0"):
            decoded[name] = mxfp8_tensor(name, values, scales)
        else:
            decoded[name] = _fp8_tensor(name, values, scales)
    check_none_left(decoded, ".weight_scale", ".weight_scale_2", ".pre_quant_scale")
    return decoded


def _fp8_tensor(name: str, values: StoredTensor, scales: StoredTensor) -> ScaledTensor:
    rows, columns = matrix_shape(values, 2)
    if scales.shape in ((), (1,), (rows,)):
        scales = per_row_view(scales, (rows, 1), lead=0, per_row=scales.shape == (rows,) and rows > 1)
    check_dtype_and_shape(scales, FLOATS, (rows, 1))
    return scaled_tensor(name, values, scales, (1, columns))
