"""Writing of quantized weights: compressed-tensors, which vLLM and transformers load, or MXFP4 of GPT-OSS.

Integers are packed into int32 (`pack-quantized`), FP8 is stored without packing (`float-quantized`), and scales in the
dtype of the weight. A matrix is a module's `weight`, `[out, in]`. The names of modules determine their groups in
`config_groups`.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from eqx_decoders.errors import ConversionError
from eqx_decoders.families.family import Family
from eqx_decoders.families.weight_rows import WeightMapping
from eqx_decoders.io.huggingface.quantized.keep import PARTS, part_mappings, part_name
from eqx_decoders.io.huggingface.quantized.unpack import MX_GROUP_SIZE
from eqx_decoders.numerics.quantized_weight import AbstractQuantizedWeight
from eqx_decoders.sharding.axes import Axes


_WEIGHT = ".weight"
_BITS = {"int8": 8, "int4": 4, "uint8": 8, "uint4": 4}  # uint8 and uint4 contain the bits of E4M3 and E2M1

TensorMaker = Callable[[], np.ndarray | None]  # see `io.huggingface.export`


def all_part_mappings(
    weights: Mapping[str, AbstractQuantizedWeight],
    weight_axes: Mapping[str, Axes],
    mappings: Mapping[str, WeightMapping],
) -> dict[str, WeightMapping]:
    """Return the mappings of the arrays of all quantized weights, by path.

    Raises ConversionError if a weight cannot be written without dequantizing it.

    **Arguments:**

    - `weights`: the quantized weights, by path.
    - `weight_axes`, `mappings`: axes and mappings of all weights, by path.
    """
    result: dict[str, WeightMapping] = {}
    unquantized = {name for path, mapping in mappings.items() if path not in weights for name in mapping.names}
    for path, weight in weights.items():
        mapping = mappings[path]
        shared = sorted(unquantized & set(mapping.names))
        if shared:
            raise ConversionError(
                f"{path} is quantized, but the checkpoint stores it in {shared[0]} with a weight that is not. Quantize "
                "all weights of this tensor, or none."
            )
        parts = part_mappings(mapping, weight_axes[path], weight.block, weight.scales.shape[weight.lead])
        if parts is None:
            raise ConversionError(
                f"{path} is quantized in blocks of {weight.block}, which do not fit the layout of {mapping.names[0]} "
                "in a checkpoint. Call dequantize, or quantize the model without this weight."
            )
        result |= {f"{path}.{part}": parts[part] for part in PARTS if getattr(weight, part) is not None}
    return result


def quantization_config(
    family: Family, weights: Mapping[str, AbstractQuantizedWeight], mappings: Mapping[str, WeightMapping]
) -> dict[str, Any]:
    """Return the `quantization_config` of a model. Raises ConversionError if compressed-tensors has no suitable format.

    `weights`: the quantized weights, by path. `mappings`: the mappings of all weights.
    """
    unquantized = _modules(family, mappings, weights, quantized=False)
    if all(_is_gpt_oss(weight, mappings[path]) for path, weight in weights.items()):
        # Here, transformers interprets all names as regular expressions, without a prefix.
        patterns = [name.removeprefix("re:").removesuffix("$") for name in _module_patterns(unquantized, set())]
        return {"quant_method": "mxfp4", "modules_to_not_convert": patterns}
    modules_by_scheme: dict[str, set[str]] = {}
    for path, weight in weights.items():
        scheme = json.dumps(_scheme(path, weight, mappings[path]))
        modules = _modules(family, {path: mappings[path]}, weights, quantized=True)
        modules_by_scheme.setdefault(scheme, set()).update(modules)
    quantized = set().union(*modules_by_scheme.values())
    groups = {
        f"group_{index}": json.loads(scheme)
        | {"targets": _module_patterns(modules, (quantized | unquantized) - modules)}
        for index, (scheme, modules) in enumerate(modules_by_scheme.items())
    }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _module_patterns(unquantized, quantized),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _is_gpt_oss(weight: AbstractQuantizedWeight, mapping: WeightMapping) -> bool:
    """Return whether the weight is MXFP4 of all experts, which GPT-OSS stores in one tensor."""
    return weight.format == "uint4" and len(mapping.groups) == 3 and _has_mx_scales(weight)


def _has_mx_scales(weight: AbstractQuantizedWeight) -> bool:
    """Return whether each quantization group of 32 rows has a scale in E8M0."""
    is_e8m0 = weight.scales.dtype == jnp.uint8
    return is_e8m0 and weight.block == (MX_GROUP_SIZE, 1) and weight.rows % MX_GROUP_SIZE == 0


def _scheme(path: str, weight: AbstractQuantizedWeight, mapping: WeightMapping) -> dict[str, Any]:
    """Return a weight's group in `config_groups` of compressed-tensors. Raises ConversionError."""
    name = mapping.names[0]
    leading = len(mapping.axes) - weight.inner - weight.outer
    inputs = set(mapping.axes[leading : leading + weight.inner])
    if not name.endswith(_WEIGHT) or len(mapping.groups) != 2 or set(mapping.groups[1]) != inputs:
        raise ConversionError(
            f"{path} is quantized, but compressed-tensors stores only linear modules, and {name} is none. Call "
            "dequantize, or quantize the model without this weight."
        )
    rows, columns = weight.block
    is_float = weight.format.startswith("uint")
    per_column = weight.scales.shape[weight.lead] == 1 and columns == 1
    has_e8m0_scales = weight.scales.dtype == jnp.uint8
    is_supported = (
        weight.format in _BITS
        and (_has_mx_scales(weight) if weight.format == "uint4" else not has_e8m0_scales)
        and (columns == 1 or is_float)
        and (per_column or columns > 1 or weight.rows % rows == 0)
        and not (is_float and weight.zeros is not None)
    )
    if not is_supported:
        raise ConversionError(
            f"{path}: compressed-tensors has no format for {weight.format} in blocks of {rows} x {columns}. Call "
            "dequantize, or quantize the model without this weight."
        )
    if weight.zeros is not None and not jnp.issubdtype(weight.zeros.dtype, jnp.integer):
        raise ConversionError(
            f"{path}: compressed-tensors stores zero points as integers, but this weight has zero points of dtype "
            f"{weight.zeros.dtype}. Call dequantize, or quantize the model without this weight."
        )
    num_bits = _BITS[weight.format]
    settings = {
        "num_bits": num_bits,
        "type": "float" if is_float else "int",
        "symmetric": weight.zeros is None,
        "strategy": "channel" if per_column else "group" if columns == 1 else "block",
        "group_size": None if per_column or columns > 1 else rows,
        "block_structure": [columns, rows] if columns > 1 else None,
        "dynamic": False,
    }
    float_format = "float-quantized" if num_bits == 8 else "mxfp4-pack-quantized"
    file_format = float_format if is_float else "pack-quantized"
    return {"weights": settings, "input_activations": None, "output_activations": None, "format": file_format}


def _modules(
    family: Family,
    mappings: Mapping[str, WeightMapping],
    weights: Mapping[str, AbstractQuantizedWeight],
    *,
    quantized: bool,
) -> set[str]:
    """Return the names of modules with a matrix: of quantized ones, or of all others except the embedding."""
    names = {
        name
        for path, mapping in mappings.items()
        if (path in weights) == quantized and len(mapping.groups) == 2 and path != "embedding.table"
        for name in mapping.names
        if name.endswith(_WEIGHT)
    }
    return {family.module_name(name).removesuffix(_WEIGHT) for name in names}


def _module_patterns(modules: Iterable[str], others: set[str]) -> list[str]:
    """Return patterns that match the names `modules`, but not `others`.

    Indices of layers and experts are replaced by `[0-9]+`, unless a name in `others` differs only in the indices.
    """
    index = re.compile(r"(?<=\.)\d+(?=\.|$)")
    patterns_of_others = {index.sub("#", name) for name in others}
    patterns = set()
    for name in modules:
        pattern = index.sub("#", name)
        patterns.add(name if pattern in patterns_of_others else pattern)
    return sorted(
        f"re:{re.escape(name).replace(re.escape('#'), '[0-9]+')}$" if "#" in name else name for name in patterns
    )


def quantized_tensor_makers(
    weights: Mapping[str, AbstractQuantizedWeight],
    mappings: Mapping[str, WeightMapping],
    makers: Mapping[str, TensorMaker],
) -> dict[str, tuple[TensorMaker, int]]:
    """Return the tensors of quantized weights: by name, a function that makes the tensor, and its size in bytes.

    `makers`: functions that make values, scales and zero points, by `part_name`.
    """
    tensors: dict[str, tuple[TensorMaker, int]] = {}
    for path, weight in weights.items():
        mapping = mappings[path]
        for name in mapping.names:
            parts = {part: makers[part_name(name, part)] for part in PARTS if getattr(weight, part) is not None}
            if _is_gpt_oss(weight, mapping):
                tensors |= _gpt_oss_tensors(name, parts, mapping)
            else:
                tensors |= _linear_tensors(name, parts, weight, mapping)
    return tensors


def _linear_tensors(
    name: str, parts: Mapping[str, TensorMaker], weight: AbstractQuantizedWeight, mapping: WeightMapping
) -> dict[str, tuple[TensorMaker, int]]:
    bits = _BITS[weight.format]
    rows, columns = mapping.shape
    size = rows * columns * bits // 8
    scale_bytes = rows * max(1, columns // weight.block[0]) * 4
    values = parts["values"]
    scales = {f"{name}_scale": (_mapped(parts["scales"], np.ascontiguousarray), scale_bytes)}
    if weight.format == "uint8":
        return {name: (_mapped(values, lambda x: x.view(jnp.float8_e4m3fn)), size)} | scales
    if weight.format == "uint4":
        return {f"{name}_packed": (_mapped(values, _pack_nibbles), size)} | scales
    tensors = {
        f"{name}_packed": (_mapped(values, lambda x: pack(x, bits)), size),
        f"{name}_shape": (_mapped(values, lambda x: np.array(x.shape, np.int64)), 16),
    }
    if weight.zeros is not None:
        packed_zeros = _mapped(parts["zeros"], lambda x: np.ascontiguousarray(pack(x.T, bits).T))
        tensors[f"{name}_zero_point"] = packed_zeros, scale_bytes * bits // 32
    return tensors | scales


def _gpt_oss_tensors(
    name: str, parts: Mapping[str, TensorMaker], mapping: WeightMapping
) -> dict[str, tuple[TensorMaker, int]]:
    size = math.prod(mapping.shape) // 2

    def blocks(x: np.ndarray) -> np.ndarray:
        octets = _pack_nibbles(x.swapaxes(-1, -2))
        return octets.reshape(*octets.shape[:-1], -1, MX_GROUP_SIZE // 2)

    scales = _mapped(parts["scales"], lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)))
    return {
        f"{name}_blocks": (_mapped(parts["values"], blocks), size),
        f"{name}_scales": (scales, 2 * size // MX_GROUP_SIZE),
    }


def _mapped(make: TensorMaker, function: Callable[[np.ndarray], np.ndarray]) -> TensorMaker:
    """Return a function that applies `function` to the result of `make`, unless it is None."""

    def run() -> np.ndarray | None:
        result = make()
        return None if result is None else function(result)

    return run


def _pack_nibbles(x: np.ndarray) -> np.ndarray:
    """Pack 4-bit values, two per byte along the last dimension, the first in the lower four bits."""
    bits = np.ascontiguousarray(x).astype(np.uint8)
    return bits[..., 0::2] | bits[..., 1::2] << 4


def pack(x: np.ndarray, bits: int) -> np.ndarray:
    """Pack signed integers of 4 or 8 bits into int32 along the last dimension, the first in the lowest bits."""
    shifted = x.astype(np.int16) + 2 ** (bits - 1)
    if x.size and (shifted.min() < 0 or shifted.max() >= 2**bits):
        raise ConversionError(
            f"save_hf: compressed-tensors stores zero points in {bits} bits, but the model has zero points from "
            f"{x.min()} to {x.max()}. Call dequantize, or quantize the model without these weights."
        )
    octets = shifted.astype(np.uint8)
    missing = -octets.shape[-1] % (32 // bits)
    octets = np.pad(octets, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    octets = octets if bits == 8 else octets[..., 0::2] | octets[..., 1::2] << 4
    return np.ascontiguousarray(octets).view("<i4")
