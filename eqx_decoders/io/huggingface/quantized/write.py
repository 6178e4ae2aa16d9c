"""Writing of weights in few bits: compressed-tensors, which vLLM and transformers open, or MXFP4 of GPT-OSS.

Whole numbers are packed into int32 (`pack-quantized`: activations are not rounded), FP8 is stored plainly
(`float-quantized`), and scales in their own dtype. A matrix is a module's `weight`, `[out, in]`, and belongs to a group
of `config_groups` by its module's name.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from eqx_decoders.errors import ConversionError, check
from eqx_decoders.families.family import Family
from eqx_decoders.families.weight_rows import WeightMapping
from eqx_decoders.io.huggingface.quantized.keep import PARTS, part_mappings, part_name
from eqx_decoders.io.huggingface.quantized.unpack import GROUP
from eqx_decoders.numerics.quantized_weight import AbstractQuantizedWeight
from eqx_decoders.sharding.axes import Axes


_WEIGHT = ".weight"
_REMEDY = "call dequantize, or quantize the model without it"
_BITS = {"int8": 8, "int4": 4, "uint8": 8, "uint4": 4}  # whole numbers, and bits of E4M3 and E2M1

Maker = Callable[[], np.ndarray | None]


def all_part_mappings(
    nodes: Mapping[str, AbstractQuantizedWeight], words: Mapping[str, Axes], mappings: Mapping[str, WeightMapping]
) -> dict[str, WeightMapping]:
    """Return the mappings of the arrays of weights in few bits, by their paths. Raises ConversionError."""
    result: dict[str, WeightMapping] = {}
    plain = {name for path, mapping in mappings.items() if path not in nodes for name in mapping.names}
    for path, node in nodes.items():
        mapping = mappings[path]
        both = sorted(plain & set(mapping.names))
        rule = f"shares {both[:1]} with weights that are not in few bits: quantize all of them, or none"
        check(not both, f"{path} {rule}.", ConversionError)
        parts = part_mappings(mapping, words[path], node.block, node.scales.shape[node.lead])
        if parts is None:
            raise ConversionError(f"{path}: its scales have no place beside {mapping.names[0]}: {_REMEDY}.")
        result |= {f"{path}.{part}": parts[part] for part in PARTS if getattr(node, part) is not None}
    return result


def quantization_config(
    family: Family, nodes: Mapping[str, AbstractQuantizedWeight], mappings: Mapping[str, WeightMapping]
) -> dict[str, Any]:
    """Return the `quantization_config` of a model with weights in few bits. Raises ConversionError."""
    if all(_is_gpt_oss(node, mappings[path]) for path, node in nodes.items()):
        plain = _names(_modules(family, mappings, nodes, quantized=False), set())
        patterns = [name.removeprefix("re:").removesuffix("$") for name in plain]  # all names there are patterns
        return {"quant_method": "mxfp4", "modules_to_not_convert": patterns}
    groups: dict[str, set[str]] = {}
    for path, node in nodes.items():
        scheme = json.dumps(_scheme(path, node, mappings[path]))
        groups.setdefault(scheme, set()).update(_modules(family, {path: mappings[path]}, nodes, quantized=True))
    others = _modules(family, mappings, nodes, quantized=False)
    quantized = set().union(*groups.values())
    described = {
        f"group_{index}": json.loads(scheme) | {"targets": _names(modules, (quantized | others) - modules)}
        for index, (scheme, modules) in enumerate(groups.items())
    }
    formats = {group["format"] for group in described.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": described,
        "ignore": _names(others, quantized),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _is_gpt_oss(node: AbstractQuantizedWeight, mapping: WeightMapping) -> bool:
    """Return whether this is MXFP4 of all experts, which GPT-OSS stores in one tensor."""
    return node.format == "uint4" and len(mapping.groups) == 3 and _has_powers(node)


def _has_powers(node: AbstractQuantizedWeight) -> bool:
    return bool(node.scales.dtype == jnp.uint8) and node.block == (GROUP, 1) and node.rows % GROUP == 0


def _scheme(path: str, node: AbstractQuantizedWeight, mapping: WeightMapping) -> dict[str, Any]:
    """Describe a weight as in `config_groups` of compressed-tensors. Raises ConversionError."""
    name, dtype, (rows, columns) = mapping.names[0], node.format, node.block
    linear = (
        name.endswith(_WEIGHT) and len(mapping.groups) == 2 and set(mapping.groups[1]) == _contracted(node, mapping)
    )
    check(
        linear,
        f"{path}: compressed-tensors has no form for {name}, which is no linear module: {_REMEDY}.",
        ConversionError,
    )
    whole, real = node.scales.shape[node.lead] == 1 and columns == 1, dtype.startswith("uint")
    powers = (dtype == "uint4") == bool(node.scales.dtype == jnp.uint8) and (dtype != "uint4" or _has_powers(node))
    known = dtype in _BITS and powers and (columns == 1 or real) and (whole or columns > 1 or node.rows % rows == 0)
    rule = f"compressed-tensors has no form for {dtype} in blocks of {rows} x {columns}: {_REMEDY}"
    check(known and not (real and node.zeros is not None), f"{path}: {rule}.", ConversionError)
    whole_zeros = node.zeros is None or jnp.issubdtype(node.zeros.dtype, jnp.integer)
    check(
        whole_zeros, f"{path}: compressed-tensors has no zero points between whole numbers: {_REMEDY}.", ConversionError
    )
    weights = {
        "num_bits": _BITS[dtype],
        "type": "float" if real else "int",
        "symmetric": node.zeros is None,
        "strategy": "channel" if whole else "group" if columns == 1 else "block",
        "group_size": None if whole or columns > 1 else rows,
        "block_structure": [columns, rows] if columns > 1 else None,
        "dynamic": False,
    }
    form = "pack-quantized" if not real else "float-quantized" if _BITS[dtype] == 8 else "mxfp4-pack-quantized"
    return {"weights": weights, "input_activations": None, "output_activations": None, "format": form}


def _contracted(node: AbstractQuantizedWeight, mapping: WeightMapping) -> set[str]:
    lead = len(mapping.words) - node.inner - node.outer
    return set(mapping.words[lead : lead + node.inner])


def _modules(
    family: Family,
    mappings: Mapping[str, WeightMapping],
    nodes: Mapping[str, AbstractQuantizedWeight],
    *,
    quantized: bool,
) -> set[str]:
    """Return the modules with a matrix: either with weights in few bits, or all others but the table."""
    names = {
        name
        for path, mapping in mappings.items()
        if (path in nodes) == quantized and len(mapping.groups) == 2 and path != "embedding.table"
        for name in mapping.names
        if name.endswith(_WEIGHT)
    }
    return {family.module_name(name).removesuffix(_WEIGHT) for name in names}


def _names(modules: Iterable[str], others: set[str]) -> list[str]:
    """Return patterns of modules with any number of layer and expert; names where others differ only in numbers."""
    number = re.compile(r"(?<=\.)\d+(?=\.|$)")
    mixed = {number.sub("#", name) for name in others}
    patterns = {(key if key not in mixed else name) for name in modules for key in [number.sub("#", name)]}
    return sorted(
        f"re:{re.escape(name).replace(re.escape('#'), '[0-9]+')}$" if "#" in name else name for name in patterns
    )


def stored_parts(
    nodes: Mapping[str, AbstractQuantizedWeight], mappings: Mapping[str, WeightMapping], makers: Mapping[str, Maker]
) -> dict[str, tuple[Maker, int]]:
    """Return the tensors of a checkpoint for weights in few bits: by name a function that makes each, and its bytes.

    `makers` make the parts of tensors (`part_name`).
    """
    tensors: dict[str, tuple[Maker, int]] = {}
    for path, node in nodes.items():
        mapping = mappings[path]
        for name in mapping.names:
            parts = {part: makers[part_name(name, part)] for part in PARTS if getattr(node, part) is not None}
            tensors |= (
                _gpt_oss(name, parts, mapping) if _is_gpt_oss(node, mapping) else _linear(name, parts, node, mapping)
            )
    return tensors


def _linear(
    name: str, parts: Mapping[str, Maker], node: AbstractQuantizedWeight, mapping: WeightMapping
) -> dict[str, tuple[Maker, int]]:
    dtype, bits = node.format, _BITS[node.format]
    rows, columns = mapping.shape
    size = rows * columns * bits // 8
    scales = _then(parts["scales"], _plain), rows * max(1, columns // node.block[0]) * 4
    if dtype == "uint8":
        return {name: (_then(parts["values"], lambda x: x.view(jnp.float8_e4m3fn)), size), f"{name}_scale": scales}
    if dtype == "uint4":
        return {f"{name}_packed": (_then(parts["values"], _halves), size), f"{name}_scale": scales}
    tensors = {
        f"{name}_packed": (_then(parts["values"], lambda x: pack(x, bits)), size),
        f"{name}_scale": scales,
        f"{name}_shape": (_then(parts["values"], lambda x: np.array(x.shape, np.int64)), 16),
    }
    if node.zeros is not None:
        packed = _then(parts["zeros"], lambda x: np.ascontiguousarray(pack(x.T, bits).T))
        tensors[f"{name}_zero_point"] = packed, scales[1] * bits // 32
    return tensors


def _gpt_oss(name: str, parts: Mapping[str, Maker], mapping: WeightMapping) -> dict[str, tuple[Maker, int]]:
    size = math.prod(mapping.shape) // 2

    def blocks(x: np.ndarray) -> np.ndarray:
        octets = _halves(x.swapaxes(-1, -2))
        return octets.reshape(*octets.shape[:-1], -1, GROUP // 2)

    scales = _then(parts["scales"], lambda x: _plain(x.swapaxes(-1, -2)))
    return {f"{name}_blocks": (_then(parts["values"], blocks), size), f"{name}_scales": (scales, 2 * size // GROUP)}


def _then(make: Maker, change: Callable[[np.ndarray], np.ndarray]) -> Maker:
    """Return a function that applies `change` to the result of `make`, unless it is None."""

    def run() -> np.ndarray | None:
        result = make()
        return None if result is None else change(result)

    return run


def _plain(x: np.ndarray) -> np.ndarray:
    """Return scales as they are stored; powers of two are bytes."""
    return np.ascontiguousarray(x)


def _halves(x: np.ndarray) -> np.ndarray:
    """Pack numbers of four bits, two in a byte along the last dimension, the first in the low half."""
    bits = np.ascontiguousarray(x).astype(np.uint8)
    return bits[..., 0::2] | bits[..., 1::2] << 4


def pack(x: np.ndarray, bits: int) -> np.ndarray:
    """Pack signed numbers of 4 or 8 bits into int32 along the last dimension, the first in the lowest bits."""
    shifted = x.astype(np.int16) + 2 ** (bits - 1)
    inside = not x.size or bool(shifted.min() >= 0 and shifted.max() < 2**bits)
    rule = f"save_hf: zero points outside of {bits} bits have no form in compressed-tensors: {_REMEDY}"
    check(inside, f"{rule}.", ConversionError)
    octets = shifted.astype(np.uint8)
    missing = -octets.shape[-1] % (32 // bits)
    octets = np.pad(octets, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    octets = octets if bits == 8 else octets[..., 0::2] | octets[..., 1::2] << 4
    return np.ascontiguousarray(octets).view("<i4")
