"""Which weights of a model stay in few bits when a checkpoint is read, and how their parts lie in its tensors.

A family's table maps a tensor to a weight by an einops pattern; the parts of a kept weight get mappings of their own,
derived from it: numbers have the same pattern, and in that of scales `groups` stand for what the weight contracts. So
parts are read, placed and written like any weight. That is possible where the pattern leaves what the weight contracts
in one dimension of the tensor, in its order, and what it makes in another one; all else is expanded:

- where layers or experts of one stack are stored in different ways,
- where weights share a tensor along what they contract, or blocks span two of them,
- where rows are permuted (GPTQ with `desc_act`), unless the scales are those of whole columns,
- what is multiplied in other ways than by `einsum`: tables, routers, what makes decays or one number a head.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax

from eqx_decoders.families.hf_table import Section, WeightMapping
from eqx_decoders.io.huggingface.directory import StoredTensor
from eqx_decoders.io.huggingface.quantized.unpack import KEPT, ScaledTensor, as_kept
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.numerics.int8_matmul import fits
from eqx_decoders.numerics.quantized_weight import QuantizedWeight, matrix_axes
from eqx_decoders.sharding.axes import Axes, axes, named_leaves, product_axes, replaced


PARTS = {"values": "numbers", "scales": "scales", "zeros": "zeros"}
"""The arrays of a `QuantizedWeight`, and those of a `ScaledTensor`."""


def keep(
    target: Decoder, mappings: Mapping[str, WeightMapping], tensors: Mapping[str, StoredTensor]
) -> tuple[Decoder, dict[str, WeightMapping], dict[str, StoredTensor]]:
    """A model of shapes with weights in few bits where that can be; and the mappings and tensors of all arrays now."""
    words, nodes = axes(target), {}
    found, views = dict(mappings), dict(tensors)
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
        del found[path]
        for part, field in PARTS.items():
            if getattr(numbers, field) is not None:
                found[f"{path}.{part}"] = parts[part]
                views |= {part_name(each.name, part): as_kept(getattr(each, field)) for each in stored}
    target = replaced(target, nodes)
    places = named_leaves(target.execution.layout.shardings(target))
    placed = {path: leaf.update(sharding=places[path]) for path, leaf in named_leaves(target).items() if path in places}
    return replaced(target, placed), found, views


def _alike(tensors: Sequence[StoredTensor]) -> list[ScaledTensor]:
    """The tensors of a weight, if they can be parts of one kept weight."""
    known = [each for each in tensors if isinstance(each, ScaledTensor) and each.places is None]
    return known if len(known) == len(tensors) and len({each.form for each in known}) == 1 else []


def _is_multiplied(path: str, words: Axes) -> bool:
    """Whether the weight is a matrix that `einsum` multiplies."""
    encoder = path.startswith(("vision.", "audio.")) and product_axes(words) is not None
    return fits(path, words) or path == "head.kernel" or (encoder and "layers" in words)


def _side(mapping: WeightMapping, words: Axes) -> int | None:
    """Which of a tensor's last two dimensions holds what the weight contracts; None if that is in none of them."""
    (inner, outer), (*lead, one, other) = matrix_axes(words), ((), (), *mapping.groups)
    counted = mapping.words[: len(mapping.words) - len(inner) - len(outer)]
    if [each for each in lead if each] != [(word,) for word in counted]:
        return None
    if (set(one), set(other)) == (set(inner), set(outer)):
        return 0
    return 1 if (set(other), set(one)) == (set(inner), set(outer)) else None


def part_name(name: str, part: str) -> str:
    """What a part of a tensor is called beside the tensors of a checkpoint."""
    return f"{name}:{part}"


def part_mappings(
    mapping: WeightMapping, words: Axes, block: tuple[int, int], count: int
) -> dict[str, WeightMapping] | None:
    """The mappings of a weight's parts, given that of the weight; None where its scales can't follow it.

    **Arguments:**

    - `words`: of the weight.
    - `block`: rows and columns of a block, as in `QuantizedWeight`.
    - `count`: how many groups of rows there are.
    """
    side, (inner, outer) = _side(mapping, words), matrix_axes(words)
    groups, (_, columns), section = list(mapping.groups), block, mapping.section
    if side is None:
        return None
    contracted, made = len(groups) - 2 + side, len(groups) - 1 - side
    ordered = (count == 1 or groups[contracted] == inner) and (columns == 1 or groups[made] == outer)
    if not ordered or (section is not None and section.axis != made):
        return None
    if columns > 1 and section is not None:
        section = _section_of_blocks(section, columns)
        if section is None:
            return None
    groups[contracted], groups[made] = ("groups",), groups[made] if columns == 1 else ("blocks",)
    lead = mapping.words[: len(mapping.words) - len(inner) - len(outer)]
    left = " ".join(each[0] if len(each) == 1 else f"({' '.join(each)})" for each in groups)
    right = " ".join((*lead, "groups", *(outer if columns == 1 else ("blocks",))))
    size = math.prod(mapping.sizes[word] for word in outer)
    sizes = {**mapping.sizes, "groups": count, "blocks": -(-size // columns)}
    beside = dataclasses.replace(mapping, pattern=f"{left} -> {right}", sizes=sizes, section=section)
    kinds = {part: mapping if part == "values" else beside for part in PARTS}
    return {
        part: dataclasses.replace(kind, names=tuple(part_name(name, part) for name in mapping.names))
        for part, kind in kinds.items()
    }


def _section_of_blocks(section: Section, columns: int) -> Section | None:
    """Where the scales of a weight's columns are among those of the tensor that it shares, if no block is of two."""
    ends = section.begin + section.size == section.block_size
    if section.blocks > 1 or section.begin % columns or (section.size % columns and not ends):
        return None
    begin, size, total = (-(-each // columns) for each in (section.begin, section.size, section.block_size))
    return dataclasses.replace(section, begin=begin, size=size, block_size=total)


def _shapes(
    words: Axes, parts: Mapping[str, WeightMapping], stored: ScaledTensor, block: tuple[int, int]
) -> QuantizedWeight:
    """A kept weight as shapes."""
    inner, outer = matrix_axes(words)

    def shape(part: str) -> jax.ShapeDtypeStruct | None:
        tensor, mapping = getattr(stored, PARTS[part]), parts[part]
        sizes = (*mapping.stack, *(mapping.sizes[word] for word in mapping.words))
        return None if tensor is None else jax.ShapeDtypeStruct(sizes, KEPT[tensor.dtype])

    values, scales, zeros = (shape(part) for part in PARTS)
    assert values is not None and scales is not None
    return QuantizedWeight(values, scales, zeros, block, len(inner), len(outer))
