"""Loading of quantized weights without dequantizing them (`load_hf(quantized="keep")`).

A family's table maps a tensor to a weight by an einops pattern. The arrays of a quantized weight get separate mappings,
which are derived from it: the values have the same pattern, and in the pattern of scales and zero points, `groups`
replaces the weight's input axes. So these arrays are read, sharded and written like other weights. This is possible if
the pattern leaves the input axes in one dimension of the tensor, in order, and the output axes in another one. All
other weights are dequantized:

- stacked weights whose layers or experts are quantized in different ways,
- weights that share a tensor along their inputs, and weights with blocks that span two weights,
- weights with permuted rows (GPTQ with `desc_act`), unless there is one scale per column,
- weights that `einsum` does not multiply: tables, routers, decays, and weights with one number per head.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax

from eqx_decoders.families.weight_rows import Section, WeightMapping
from eqx_decoders.io.huggingface.directory import StoredTensor
from eqx_decoders.io.huggingface.quantized.unpack import STORAGE_DTYPES, ScaledTensor, storage_view
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.numerics.affine_weight import QuantizedWeight
from eqx_decoders.numerics.low_precision import fits
from eqx_decoders.numerics.nf4_weight import NF4Weight
from eqx_decoders.numerics.quantized_weight import AbstractQuantizedWeight, matrix_axes
from eqx_decoders.sharding.axes import Axes, axes, named_leaves, product_axes, replaced


PARTS = ("values", "scales", "zeros")  # arrays of a `QuantizedWeight`, and views of a `ScaledTensor`


def keep(
    target: Decoder, mappings: Mapping[str, WeightMapping], tensors: Mapping[str, StoredTensor]
) -> tuple[Decoder, dict[str, WeightMapping], dict[str, StoredTensor]]:
    """Return an abstract model with quantized weights where possible, and the mappings and tensors of its arrays.

    `target`, `mappings` and `tensors` describe the same model with dequantized weights.
    """
    weight_axes = axes(target)
    weights: dict[str, AbstractQuantizedWeight] = {}
    kept_mappings = dict(mappings)
    kept_tensors = dict(tensors)
    for path, mapping in mappings.items():
        stored = _stackable([tensors[name] for name in mapping.names])
        if not stored or not _is_multiplied(path, weight_axes[path]):
            continue
        input_dimension = _input_dimension(mapping, weight_axes[path])
        if input_dimension is None:
            continue
        stored_block = stored[0].block
        block = stored_block[input_dimension], stored_block[1 - input_dimension]
        num_groups = stored[0].scales.shape[-2:][input_dimension]
        parts = part_mappings(mapping, weight_axes[path], block, num_groups)
        if parts is None:
            continue
        weights[path] = _abstract_weight(weight_axes[path], parts, stored[0], block)
        del kept_mappings[path]
        for part in PARTS:
            if getattr(stored[0], part) is not None:
                kept_mappings[f"{path}.{part}"] = parts[part]
                for tensor in stored:
                    kept_tensors[part_name(tensor.name, part)] = storage_view(getattr(tensor, part))
    target = replaced(target, weights)
    shardings = named_leaves(target.execution.layout.shardings(target))
    leaves = {path: leaf for path, leaf in named_leaves(target).items() if path in shardings}
    sharded = {path: leaf.update(sharding=shardings[path]) for path, leaf in leaves.items()}
    return replaced(target, sharded), kept_mappings, kept_tensors


def _stackable(tensors: Sequence[StoredTensor]) -> list[ScaledTensor]:
    """Return the tensors of a weight if they can be stacked in one `QuantizedWeight`, otherwise an empty list."""
    scaled = [tensor for tensor in tensors if isinstance(tensor, ScaledTensor) and tensor.group_index is None]
    scaled = [tensor for tensor in scaled if tensor.values.dtype in STORAGE_DTYPES and tensor.values.dtype != "F32"]
    return scaled if len(scaled) == len(tensors) and len({tensor.format for tensor in scaled}) == 1 else []


def _is_multiplied(path: str, weight_axes: Axes) -> bool:
    """Return whether the weight is a matrix that `einsum` multiplies."""
    in_encoder = path.startswith(("vision.", "audio.")) and product_axes(weight_axes) is not None
    return fits(path, weight_axes) or path == "head.kernel" or (in_encoder and "layers" in weight_axes)


def _input_dimension(mapping: WeightMapping, weight_axes: Axes) -> int | None:
    """Return which of the tensor's last two dimensions contains the weight's input axes: 0 or 1; None: neither."""
    inner, outer = matrix_axes(weight_axes)
    *leading, first, second = ((), (), *mapping.groups)
    leading_axes = mapping.axes[: len(mapping.axes) - len(inner) - len(outer)]
    if [group for group in leading if group] != [(axis,) for axis in leading_axes]:
        return None
    if (set(first), set(second)) == (set(inner), set(outer)):
        return 0
    return 1 if (set(second), set(first)) == (set(inner), set(outer)) else None


def part_name(name: str, part: str) -> str:
    """Return the name by which `keep` and `part_mappings` refer to a part of a quantized tensor."""
    return f"{name}:{part}"


def part_mappings(
    mapping: WeightMapping, weight_axes: Axes, block: tuple[int, int], num_groups: int
) -> dict[str, WeightMapping] | None:
    """Return the mappings of a weight's values, scales and zero points, or None if the weight cannot stay quantized.

    **Arguments:**

    - `mapping`, `weight_axes`: mapping and axes of the weight.
    - `block`: rows and columns of a block, as in `QuantizedWeight`.
    - `num_groups`: number of quantization groups along the inputs.
    """
    input_dimension = _input_dimension(mapping, weight_axes)
    if input_dimension is None:
        return None
    inner, outer = matrix_axes(weight_axes)
    groups = list(mapping.groups)
    inputs = len(groups) - 2 + input_dimension
    outputs = len(groups) - 1 - input_dimension
    block_columns = block[1]
    if (num_groups > 1 and groups[inputs] != inner) or (block_columns > 1 and groups[outputs] != outer):
        return None
    section = mapping.section
    if section is not None and section.axis != outputs:
        return None
    if block_columns > 1 and section is not None:
        section = _section_of_blocks(section, block_columns)
        if section is None:
            return None
    groups[inputs] = ("groups",)
    if block_columns > 1:
        groups[outputs] = ("blocks",)
    leading_axes = mapping.axes[: len(mapping.axes) - len(inner) - len(outer)]
    stored = " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in groups)
    loaded = " ".join((*leading_axes, "groups", *(outer if block_columns == 1 else ("blocks",))))
    num_outputs = math.prod(mapping.sizes[axis] for axis in outer)
    sizes = {**mapping.sizes, "groups": num_groups, "blocks": -(-num_outputs // block_columns)}
    scale_mapping = dataclasses.replace(mapping, pattern=f"{stored} -> {loaded}", sizes=sizes, section=section)
    return {
        part: dataclasses.replace(
            mapping if part == "values" else scale_mapping,
            names=tuple(part_name(name, part) for name in mapping.names),
        )
        for part in PARTS
    }


def _section_of_blocks(section: Section, block_columns: int) -> Section | None:
    """Return the section of the scales that belongs to a section of the values; None if a block spans two weights."""
    is_last = section.begin + section.size == section.block_size
    if section.blocks > 1 or section.begin % block_columns or (section.size % block_columns and not is_last):
        return None
    return dataclasses.replace(
        section,
        begin=section.begin // block_columns,
        size=-(-section.size // block_columns),
        block_size=-(-section.block_size // block_columns),
    )


def _abstract_weight(
    weight_axes: Axes, parts: Mapping[str, WeightMapping], stored: ScaledTensor, block: tuple[int, int]
) -> AbstractQuantizedWeight:
    """Return a quantized weight that consists of shapes."""
    inner, outer = matrix_axes(weight_axes)

    def shape(part: str) -> jax.ShapeDtypeStruct | None:
        tensor = getattr(stored, part)
        if tensor is None:
            return None
        mapping = parts[part]
        sizes = (*mapping.stack, *(mapping.sizes[axis] for axis in mapping.axes))
        return jax.ShapeDtypeStruct(sizes, STORAGE_DTYPES[tensor.dtype])

    values, scales, zeros = (shape(part) for part in PARTS)
    assert values is not None and scales is not None
    weight_class = NF4Weight if stored.values.dtype == "NF4" else QuantizedWeight
    return weight_class(values, scales, zeros, block, len(inner), len(outer))
