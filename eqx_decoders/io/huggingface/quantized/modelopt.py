"""Checkpoints of NVIDIA's ModelOpt, and numbers of NVFP4 and MXFP8, which compressed-tensors has as well.

NVFP4   x = E2M1(q) (E4M3(scale) factor)      a scale for 16 numbers of a row, a factor for the matrix
MXFP8   x = E4M3(q) 2^(scale - 127)           a scale for 32 numbers of a row
FP8     x = E4M3(q) scale                     a scale for the matrix, or for each row
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError, check
from eqx_decoders.io.huggingface.directory import StoredTensor
from eqx_decoders.io.huggingface.quantized.companions import (
    CACHE_SCALES,
    FLOATS,
    Tensors,
    check_none_left,
    check_stored,
    matrix_shape,
    pop_companion,
    scaled,
)
from eqx_decoders.io.huggingface.quantized.unpack import (
    GROUP,
    BytesTensor,
    Cuts,
    HalvesTensor,
    RepeatedTensor,
    ScaledTensor,
    as_float32,
)


NVFP4_GROUP = 16
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION")
_UNUSED = (".input_scale", ".k_bias", ".v_bias", *CACHE_SCALES)
HF_QUANT_CONFIG = "hf_quant_config.json"


@dataclasses.dataclass(frozen=True)
class FactorTensor(StoredTensor):
    """Scales of E4M3 with the factor that all scales of a matrix have: multiplied by it, or divided."""

    inner: StoredTensor
    factor: StoredTensor
    divides: bool

    def read(self, part: Cuts) -> np.ndarray:
        """Read a part in float32, one slice for each dimension."""
        scales, factor = as_float32(self.inner.read(part)), as_float32(self.factor.read_all()).reshape(())
        with np.errstate(all="ignore"):
            return scales / factor if self.divides else scales * factor


def nvfp4_tensor(
    name: str, packed: StoredTensor, scales: StoredTensor, factor: StoredTensor, *, divides: bool
) -> ScaledTensor:
    """Return the tensor that bytes of two numbers, scales and the matrix's factor encode."""
    rows, words = matrix_shape(packed, 2)
    check_stored(packed, ("U8",), (rows, words))
    check_stored(scales, ("F8_E4M3",), (rows, -(-2 * words // NVFP4_GROUP)))
    one = factor.dtype in FLOATS and factor.shape in ((), (1,))
    rule = "but must be one number"
    check(one, f"{factor.file}: {factor.name} is {factor.description}, {rule}.", ConversionError)
    numbers = HalvesTensor(packed.file, name, (rows, 2 * words), "F4_E2M1", packed.offset, packed)
    whole = FactorTensor(scales.file, scales.name, scales.shape, "F32", scales.offset, scales, factor, divides)
    return scaled(name, numbers, whole, (1, NVFP4_GROUP))


def mxfp8_tensor(name: str, numbers: StoredTensor, scales: StoredTensor) -> ScaledTensor:
    """Return the tensor that numbers of E4M3 and exponents of powers of two encode."""
    rows, columns = matrix_shape(numbers, 2)
    check_stored(scales, ("U8", "F8_E8M0"), (rows, -(-columns // GROUP)))
    powers = BytesTensor(scales.file, scales.name, scales.shape, "F8_E8M0", scales.offset, scales)
    return scaled(name, numbers, powers, (1, GROUP))


def with_own_file(content: Mapping[str, Any], settings: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of a `config.json` with what older ModelOpt says in a file of its own."""
    if content.get("quantization_config") is not None:
        return dict(content)
    own = settings().get("quantization")
    own = dict(own) if isinstance(own, Mapping) else {}
    return {**content, "quantization_config": {"quant_method": "modelopt", **own}}


def read_modelopt(fields: Fields) -> Callable[[Tensors], Tensors]:
    """Read the settings of ModelOpt: each tensor's dtype says how it is stored."""
    fields.word("quant_algo", dict.fromkeys(_ALGORITHMS, True))
    for key in ("config_groups", "ignore", "kv_cache_scheme", "producer", "quantized_layers", "exclude_modules"):
        fields.take(key, None)
    for key in ("kv_cache_quant_algo", "group_size"):  # of caches; that of weights shows in their scales
        fields.take(key, None)
    fields.allow_only("has_zero_point", False, effect="weights have zero points")
    fields.allow_only("pre_quant_scale", False)
    return _modelopt_tensors


def _modelopt_tensors(tensors: Tensors) -> Tensors:
    decoded = {name: tensor for name, tensor in tensors.items() if not name.endswith(_UNUSED)}
    for name in [name for name in decoded if name.endswith(".weight")]:
        numbers = decoded[name]
        if numbers.dtype not in ("U8", "F8_E4M3"):
            continue
        scales = pop_companion(decoded, f"{name}_scale", numbers)
        if numbers.dtype == "U8":
            factor = pop_companion(decoded, f"{name}_scale_2", numbers)
            decoded[name] = nvfp4_tensor(name, numbers, scales, factor, divides=False)
        elif scales.dtype in ("U8", "F8_E8M0"):
            decoded[name] = mxfp8_tensor(name, numbers, scales)
        else:
            decoded[name] = _fp8_tensor(name, numbers, scales)
    check_none_left(decoded, ".weight_scale", ".weight_scale_2", ".pre_quant_scale")
    return decoded


def _fp8_tensor(name: str, numbers: StoredTensor, scales: StoredTensor) -> ScaledTensor:
    rows, columns = matrix_shape(numbers, 2)
    if scales.shape in ((), (1,)):
        scales = RepeatedTensor(scales.file, scales.name, (rows, 1), scales.dtype, scales.offset, scales)
    elif scales.shape == (rows,):
        scales = _Column(scales.file, scales.name, (rows, 1), scales.dtype, scales.offset, scales)
    check_stored(scales, FLOATS, (rows, 1))
    return scaled(name, numbers, scales, (1, columns))


@dataclasses.dataclass(frozen=True)
class _Column(StoredTensor):
    """View of a vector as a column."""

    inner: StoredTensor

    def read(self, part: Cuts) -> np.ndarray:
        return self.inner.read(part[:1])[:, None][:, part[1]]
