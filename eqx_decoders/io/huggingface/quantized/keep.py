"""Weights that stay in few bits when a checkpoint is loaded, and the mappings of their parts to its tensors.

A family's table maps a tensor to a weight by an einops pattern; the parts of a quantized weight get mappings of their
own, derived from it: numbers have the same pattern, and in that of scales `groups` replace the weight's inputs. So
parts are read, placed and written like any weight. That is possible where the pattern leaves the inputs in one
dimension of the tensor, in order, and the outputs in another one. All other weights are expanded:

- those whose layers or experts in one stack are stored in different ways,
- those that share a tensor along their inputs, or whose blocks span two weights,
- those with permuted rows (GPTQ with `desc_act`), unless each whole column has one scale,
- those that are not multiplied by `einsum`: tables, routers, and those for decays or one number a head.
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


PARTS = {"values": "numbers", "scales": "scales", "zeros": "zeros"}
"""Arrays of a `QuantizedWeight`, and the corresponding ones of a `ScaledTensor`."""


def keep(
    target: Decoder, mappings: Mapping[str, WeightMapping], tensors: Mapping[str, StoredTensor]
) -> tuple[Decoder, dict[str, WeightMapping], dict[str, StoredTensor]]:
    """Return a model of shapes with quantized weights where possible, and the mappings and tensors of its arrays."""
    words, nodes = axes(target), {}
    parts_of, views = dict(mappings), dict(tensors)
    for path, mapping in mappings.items():
        stored = _alike([tensors[name] for name in mapping.names])
        side = _side(mapping, words[path]) if stored and _is_multiplied(path, words[path]) else None
        if side is None:
            continue
        numbers, block, counts = stored[0], stored[0].block, stored[0].scales.shape[-2:]
        parts = part_mappings(mapping, words[path], (block[side], block[1 - side]), counts[side])
        if parts is None:
            continue
        nodes[path] = _shapes(words[path], parts, numbers, (block[side], block[1 - side]))
        del parts_of[path]
        for part, field in PARTS.items():
            if getattr(numbers, field) is not None:
                parts_of[f"{path}.{part}"] = parts[part]
                views |= {part_name(each.name, part): storage_view(getattr(each, field)) for each in stored}
    target = replaced(target, nodes)
    shardings = named_leaves(target.execution.layout.shardings(target))
    leaves = {path: leaf for path, leaf in named_leaves(target).items() if path in shardings}
    placed = {path: leaf.update(sharding=shardings[path]) for path, leaf in leaves.items()}
    return replaced(target, placed), parts_of, views


def _alike(tensors: Sequence[StoredTensor]) -> list[ScaledTensor]:
    """Return the tensors of a weight if they can be parts of one `QuantizedWeight`, otherwise none."""
    scaled = [each for each in tensors if isinstance(each, ScaledTensor) and each.group_index is None]
    scaled = [each for each in scaled if each.numbers.dtype in STORAGE_DTYPES and each.numbers.dtype != "F32"]
    return scaled if len(scaled) == len(tensors) and len({each.form for each in scaled}) == 1 else []


def _is_multiplied(path: str, words: Axes) -> bool:
    """Return whether the weight is a matrix that `einsum` multiplies."""
    encoder = path.startswith(("vision.", "audio.")) and product_axes(words) is not None
    return fits(path, words) or path == "head.kernel" or (encoder and "layers" in words)


def _side(mapping: WeightMapping, words: Axes) -> int | None:
    """Return which of a tensor's last two dimensions holds the weight's inputs; None if they are in neither."""
    (inner, outer), (*lead, first, second) = matrix_axes(words), ((), (), *mapping.groups)
    counted = mapping.words[: len(mapping.words) - len(inner) - len(outer)]
    if [each for each in lead if each] != [(word,) for word in counted]:
        return None
    if (set(first), set(second)) == (set(inner), set(outer)):
        return 0
    return 1 if (set(second), set(first)) == (set(inner), set(outer)) else None


def part_name(name: str, part: str) -> str:
    """Return the name of a part of a tensor among the tensors of a checkpoint."""
    return f"{name}:{part}"


def part_mappings(
    mapping: WeightMapping, words: Axes, block: tuple[int, int], count: int
) -> dict[str, WeightMapping] | None:
    """Derive the mappings of a weight's parts from its own mapping; None where its scales can't follow it.

    **Arguments:**

    - `words`: of the weight.
    - `block`: rows and columns of a block, as in `QuantizedWeight`.
    - `count`: number of groups of rows.
    """
    side, (inner, outer) = _side(mapping, words), matrix_axes(words)
    groups, (_, columns), section = list(mapping.groups), block, mapping.section
    if side is None:
        return None
    contracted, produced = len(groups) - 2 + side, len(groups) - 1 - side
    ordered = (count == 1 or groups[contracted] == inner) and (columns == 1 or groups[produced] == outer)
    if not ordered or (section is not None and section.axis != produced):
        return None
    if columns > 1 and section is not None:
        section = _section_of_blocks(section, columns)
        if section is None:
            return None
    groups[contracted], groups[produced] = ("groups",), groups[produced] if columns == 1 else ("blocks",)
    lead = mapping.words[: len(mapping.words) - len(inner) - len(outer)]
    left = " ".join(each[0] if len(each) == 1 else f"({' '.join(each)})" for each in groups)
    right = " ".join((*lead, "groups", *(outer if columns == 1 else ("blocks",))))
    size = math.prod(mapping.sizes[word] for word in outer)
    sizes = {**mapping.sizes, "groups": count, "blocks": -(-size // columns)}
    of_scales = dataclasses.replace(mapping, pattern=f"{left} -> {right}", sizes=sizes, section=section)
    kinds = {part: mapping if part == "values" else of_scales for part in PARTS}
    return {
        part: dataclasses.replace(kind, names=tuple(part_name(name, part) for name in mapping.names))
        for part, kind in kinds.items()
    }


def _section_of_blocks(section: Section, columns: int) -> Section | None:
    """Return the section of a shared tensor's scales that is a weight's; None if a block spans two weights."""
    ends = section.begin + section.size == section.block_size
    if section.blocks > 1 or section.begin % columns or (section.size % columns and not ends):
        return None
    begin, size, total = (-(-each // columns) for each in (section.begin, section.size, section.block_size))
    return dataclasses.replace(section, begin=begin, size=size, block_size=total)


def _shapes(
    words: Axes, parts: Mapping[str, WeightMapping], stored: ScaledTensor, block: tuple[int, int]
) -> AbstractQuantizedWeight:
    """Return a quantized weight of shapes."""
    inner, outer = matrix_axes(words)

    def shape(part: str) -> jax.ShapeDtypeStruct | None:
        tensor, mapping = getattr(stored, PARTS[part]), parts[part]
        sizes = (*mapping.stack, *(mapping.sizes[word] for word in mapping.words))
        return None if tensor is None else jax.ShapeDtypeStruct(sizes, STORAGE_DTYPES[tensor.dtype])

    values, scales, zeros = (shape(part) for part in PARTS)
    assert values is not None and scales is not None
    kind = NF4Weight if stored.numbers.dtype == "NF4" else QuantizedWeight
    return kind(values, scales, zeros, block, len(inner), len(outer))
