"""Loading of Hugging Face directories: `config.json` and safetensors, without torch and without transformers.

The shards of a weight are filled one after another, tensor by tensor. The memory of a host therefore never contains
more than the shards of its devices and a piece of one tensor.
"""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from eqx_decoders.context import PrecisionOptions
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError, check_option
from eqx_decoders.families.family import Family
from eqx_decoders.families.multimodal import text_fields
from eqx_decoders.families.registry import find_family
from eqx_decoders.families.weight_rows import Section, WeightMapping
from eqx_decoders.io.huggingface.directory import FLOATS, Directory, StoredTensor, check_dtypes, check_tensors
from eqx_decoders.io.huggingface.generation_config import parse_token_ids, read_generation_config
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.quantized import checkpoint_tensors, keep, read_scheme, without_zero_biases
from eqx_decoders.io.huggingface.tensor_copy import copy_in_pieces, einops_sizes
from eqx_decoders.io.status import StatusLine
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.init import abstract, computed_buffers
from eqx_decoders.model.provenance import Provenance
from eqx_decoders.numerics.precision import Precision
from eqx_decoders.sharding.axes import replaced, stored_leaves
from eqx_decoders.sharding.layout import Layout, device_bytes


QuantizedName = Literal["expand", "keep"]

_MAX_READ = 64_000_000  # bytes (in float32) of a tensor that are read at a time
_MAX_COMPARED = 4_000_000  # elements of a table that are compared at a time
_ALIGNMENT = 64  # bytes; JAX shares the memory of a NumPy array if its address is a multiple of this number


def read_config(directory: str | Path, *, text_only: bool = False) -> tuple[DecoderConfig, Provenance]:
    """Return the configuration in a directory's `config.json`, and the provenance that an export of the model needs.

    `text_only`: whether to leave out encoders of images and audio. Raises ConversionError for unknown families and
    unsupported settings.
    """
    config, origin, _ = _read_config(resolve(directory), text_only)
    return config, origin


def abstract_hf(
    source: str | Path,
    dtype: DTypeLike | None = jnp.float32,
    layout: Layout | None = None,
    *,
    revision: str | None = None,
    text_only: bool = False,
    quantized: QuantizedName = "expand",
    **execution: Unpack[PrecisionOptions],
) -> Decoder:
    """Return the model of `load_hf` as a tree of `jax.ShapeDtypeStruct` with shardings, without reading weights."""
    target, _, _ = _prepare(resolve(source, revision), dtype, layout, dict(execution), text_only, quantized)
    return target


def load_hf(
    source: str | Path,
    dtype: DTypeLike | None = jnp.float32,
    layout: Layout | None = None,
    *,
    revision: str | None = None,
    text_only: bool = False,
    quantized: QuantizedName = "expand",
    **execution: Unpack[PrecisionOptions],
) -> Decoder:
    """Load the model in a Hugging Face directory or a GGUF file. Each weight is created on its devices.

    Raises ConversionError, before any weight is loaded, if the directory is not a complete checkpoint of a known family
    or has unsupported settings.

    **Arguments:**

    - `source`: a directory with `config.json` and safetensors files; a GGUF file of llama.cpp (extra "gguf"), the first
        file if there are several; or the name of a repository, `"org/name"`, which is downloaded (extra "hf").
    - `dtype`: dtype of weights and activations; None: the dtype of the files.
    - `layout`: layout of the weights on devices; None: one device.
    - `revision`: branch, tag or commit of a repository.
    - `text_only`: whether to leave out encoders of images and audio. The model then belongs to its text family.
    - `quantized`: format of matrices that are quantized in the files. "expand": dequantize them to `dtype`. "keep":
        keep the quantized values (`QuantizedWeight`) where this is possible (`quantized.keep`).
    - `execution`: other fields of `Execution`, such as `remat="full"`. `precision` takes precedence over `dtype`.
    """
    directory = resolve(source, revision)
    target, mappings, tensors = _prepare(directory, dtype, layout, dict(execution), text_only, quantized)
    shapes, static = eqx.partition(target, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    leaves = stored_leaves(shapes)
    total = sum(len(_local_shards(leaf)) * device_bytes(leaf) for leaf in leaves.values())
    with StatusLine("loading weights", total=total) as status:
        arrays = {path: load_weight(leaf, mappings[path], tensors, status) for path, leaf in leaves.items()}
    return eqx.combine(replaced(shapes, arrays | computed_buffers(target)), static)


def stored_weights(directory: str | Path) -> tuple[dict[str, WeightMapping], dict[str, StoredTensor]]:
    """Return the mapping of each weight of a directory to tensors, by path, and these tensors, by their full names."""
    _, mappings, tensors = _prepare(resolve(directory), jnp.float32, None, {})
    return mappings, {name: tensors[name] for mapping in mappings.values() for name in mapping.names}


def _prepare(
    directory: Directory,
    dtype: DTypeLike | None,
    layout: Layout | None,
    execution: dict[str, Any],
    text_only: bool = False,
    quantized: QuantizedName = "expand",
) -> tuple[Decoder, dict[str, WeightMapping], dict[str, StoredTensor]]:
    """Read everything but the weights: return the model as a tree of shapes, the mapping of each weight to tensors, and
    the tensors.

    Raises ConversionError for all errors of `load_hf`.
    """
    check_option("load_hf: quantized", quantized, get_args(QuantizedName))
    config, origin, family = _read_config(directory, text_only)
    tensors = _without_ignored(_dequantized_tensors(directory, text_only), family, config)
    tensors = _without_fixed(tensors, family.fixed_tensors(config))
    family = family.for_tensors(tensors)
    check_dtypes(tensors, family.integer_tensors)
    if config.tied and family.head in tensors:
        config = _untie(config, tensors, family)
    elif config.scores is None and family.head not in tensors and _may_be_tied(directory.json("config.json")):
        config = dataclasses.replace(config, tied=True)
    if dtype is None:
        dtype = functools.reduce(jnp.promote_types, {FLOATS[x.dtype] for x in tensors.values() if x.dtype in FLOATS})
    precision = execution.pop("precision", None) or Precision(params=dtype, compute=dtype)
    target = abstract(config, layout=layout or Layout(), precision=precision, **execution)
    target = dataclasses.replace(target, origin=origin)
    mappings = family.bind(target)
    tensors = _without_copies(tensors, family.copied(config))
    expected = {name: mapping.shape for mapping in mappings.values() for name in mapping.names}
    tensors = without_zero_biases(tensors, expected)
    check_tensors(
        directory.path,
        tensors,
        expected,
        rule="The tensors must match the model that config.json describes",
        unexpected="belongs to no weight",
        source="config.json",
    )
    return keep(target, mappings, tensors) if quantized == "keep" else (target, mappings, tensors)


def _dequantized_tensors(directory: Directory, text_only: bool) -> dict[str, StoredTensor]:
    """Return the tensors of a directory by name; reading a quantized tensor dequantizes it.

    With `text_only`, returns the tensors of the decoder, by their names in its text family.
    """
    tensors = checkpoint_tensors(directory)
    content = directory.json("config.json")
    family = find_family(str(content.get("model_type"))).for_config(content)
    if not text_only or family.text is None:
        return tensors
    named = {family.text_tensor(family.stored_name(name)): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in named.items() if name is not None}


def _read_config(directory: Directory, text_only: bool = False) -> tuple[DecoderConfig, Provenance, Family]:
    content = directory.json("config.json")
    config, settings, family = decode_config(content, f"{directory.path}/config.json", text_only=text_only)
    config = _with_stored_mtp_layers(config, directory, family, text_only)
    generation = read_generation_config(directory)
    if not generation.stop_ids:
        stops = parse_token_ids("config.json: eos_token_id", content.get("eos_token_id"))
        generation = dataclasses.replace(generation, stop_ids=stops)
    origin = Provenance(
        family=family.model_type,
        settings=json.dumps(settings),
        directory=str(directory.path.absolute()),
        generation=generation,
    )
    return config, origin, family


def decode_config(
    content: Mapping[str, Any], path: str, *, text_only: bool = False
) -> tuple[DecoderConfig, dict[str, Any], Family]:
    """Return the configuration that a `config.json` describes, its settings without effect here, and its family.

    Raises ConversionError for unknown families and unsupported settings.

    **Arguments:**

    - `content`: content of the `config.json`.
    - `path`: its name in error messages.
    - `text_only`: whether to leave out encoders. The result is then the configuration of the decoder's text family.
    """
    model_type = content.get("model_type")
    if not isinstance(model_type, str):
        raise ConversionError(f"{path}: model_type={model_type!r} must be a string, the name of the model family.")
    family = find_family(model_type).for_config(content)
    read_scheme(content)
    if text_only and family.text is not None:
        config, settings = family.text.decode_fields(text_fields(Fields(family.own_settings(content))))
        return config, settings, family.text
    config, settings = family.decode(content)
    return config, settings, family


def _with_stored_mtp_layers(
    config: DecoderConfig, directory: Directory, family: Family, text_only: bool = False
) -> DecoderConfig:
    """Return the configuration with the layers of multi-token prediction (MTP) whose weights are stored.

    `config.json` is not reliable here: transformers drops the MTP weights but keeps the key; some published files have
    the weights but not the key. A directory without safetensors files is described by its `config.json`.
    """
    with_depths = family.with_depths
    has_weights = directory.has("model.safetensors") or directory.has("model.safetensors.index.json")
    if (config.mtp is None and with_depths is None) or not has_weights:
        return config
    stored = _dequantized_tensors(directory, text_only)
    if with_depths is not None:
        count = family.stored_depths(map(family.stored_name, stored))
        config = with_depths(config, count) if count else dataclasses.replace(config, mtp=None)
    tensors = _without_ignored(stored, family, config)
    if config.mtp is None:
        return config
    mappings = family.for_tensors(tensors).bind(abstract(config))
    mtp_tensors = {name for path, mapping in mappings.items() if path.startswith("mtp.") for name in mapping.names}
    return config if mtp_tensors & tensors.keys() else dataclasses.replace(config, mtp=None)


def _without_copies(tensors: dict[str, StoredTensor], copies: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Remove tensors that are copies of other tensors. Raises ConversionError if a copy differs.

    `copies`: the name of the original by the name of the copy.
    """
    for copy, original in copies.items():
        if copy not in tensors or original not in tensors:
            continue
        first = tensors[copy]
        second = tensors[original]
        if first.shape != second.shape or not equal_tables(first, second):
            raise ConversionError(
                f"tensor {copy} must be equal to {original}, because they are one shared weight here. Remove one of "
                "the tensors from the checkpoint."
            )
    return {name: stored for name, stored in tensors.items() if copies.get(name) not in tensors}


def _without_fixed(tensors: dict[str, StoredTensor], fixed: Mapping[str, np.ndarray]) -> dict[str, StoredTensor]:
    """Remove tensors that are computed from the configuration. Raises ConversionError if they have other values."""
    for name, expected in fixed.items():
        if name in tensors and not np.array_equal(tensors[name].read_all(), expected):
            raise ConversionError(
                f"tensor {name} must have the values that follow from config.json: {expected.tolist()}. Correct the "
                "checkpoint or its config.json."
            )
    return {name: stored for name, stored in tensors.items() if name not in fixed}


def _without_ignored(
    tensors: dict[str, StoredTensor], family: Family, config: DecoderConfig
) -> dict[str, StoredTensor]:
    """Return tensors by their full names in `family.weights`, without `family.ignored_tensors`."""
    tensors = {family.stored_name(name): stored for name, stored in tensors.items()}
    if not any(name.startswith(family.prefix) for name in tensors):  # saved from the base model
        head = family.head.removesuffix("weight")  # prefix of the head's weight and bias
        tensors = {name if name.startswith(head) else family.prefix + name: stored for name, stored in tensors.items()}
    return {name: stored for name, stored in tensors.items() if not family.is_ignored(name, config)}


def _untie(config: DecoderConfig, tensors: dict[str, StoredTensor], family: Family) -> DecoderConfig:
    """Return the configuration, untied if the checkpoint has a head that differs from the embedding table.

    Removes the head from `tensors` if both are equal. If only the head is stored, it becomes the table.
    """
    table = next(weight.name for weight in family.weights if weight.path == "embedding.table")
    if table not in tensors:
        tensors[table] = tensors.pop(family.head)
        return config
    embedding, head = tensors[table], tensors[family.head]
    if embedding.shape == head.shape == (config.vocab_size, config.table_features) and not equal_tables(
        embedding, head
    ):
        return dataclasses.replace(config, tied=False)
    if embedding.shape == head.shape:
        del tensors[family.head]  # equal; or both have a wrong shape, which is reported for the table only
    return config


def _may_be_tied(content: Mapping[str, Any]) -> bool:
    """Return whether transformers 4 wrote this `config.json` without `tie_word_embeddings`.

    transformers 4 leaves the key out if its value is true, the default of PretrainedConfig, even where the default of
    the model's own class is false.
    """
    objects = [content, content.get("text_config")]
    is_absent = all(item.get("tie_word_embeddings") is None for item in objects if isinstance(item, Mapping))
    return is_absent and str(content.get("transformers_version")).startswith("4.")


def equal_tables(first: StoredTensor, second: StoredTensor) -> bool:
    """Return whether two matrices of the same shape are equal.

    Reads a block of rows at a time and stops at the first difference. Compares all rows, because a head may differ from
    the embedding only in the rows of a few added tokens.
    """
    if (first.file, first.offset) == (second.file, second.offset):
        return True
    num_rows = first.shape[0]
    step = max(1, _MAX_COMPARED // first.shape[1])
    blocks = (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))
    columns = slice(0, first.shape[1])
    return all(np.array_equal(first.read((rows, columns)), second.read((rows, columns))) for rows in blocks)


def load_weight(
    leaf: jax.ShapeDtypeStruct, mapping: WeightMapping, tensors: Mapping[str, StoredTensor], status: StatusLine
) -> jax.Array:
    """Load a weight onto its devices, one shard after another.

    **Arguments:**

    - `leaf`: shape, dtype and sharding of the weight.
    - `mapping`: mapping of the weight to tensors.
    - `tensors`: stored tensors by name.
    - `status`: status line, which shows the number of loaded bytes.
    """
    shards: list[jax.Array] = []
    sharding: Any = leaf.sharding
    for index, devices in _local_shards(leaf).items():
        shard = _read_shard(index, leaf.dtype, mapping, tensors, status)
        if isinstance(sharding, SingleDeviceSharding):  # uncommitted, like the arrays of `init`
            return jax.device_put(shard)
        shards += [jax.device_put(shard, device) for device in devices]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def _local_shards(leaf: jax.ShapeDtypeStruct) -> dict[tuple[range, ...], list[Any]]:
    """Return the devices of this process by the index of the shard that they store."""
    devices_by_index: dict[tuple[range, ...], list[Any]] = {}
    sharding: Any = leaf.sharding
    for device, slices in sharding.addressable_devices_indices_map(leaf.shape).items():
        index = tuple(range(*part.indices(size)) for part, size in zip(slices, leaf.shape, strict=True))
        devices_by_index.setdefault(index, []).append(device)
    return devices_by_index


def _read_shard(
    index: tuple[range, ...],
    dtype: np.dtype,
    mapping: WeightMapping,
    tensors: Mapping[str, StoredTensor],
    status: StatusLine,
) -> np.ndarray:
    """Read the shard `index` of a weight from the tensors of its layers."""
    shard = _empty_aligned(tuple(map(len, index)), dtype)
    stack_index = index[: len(mapping.stack)]
    tensor_index = index[len(mapping.stack) :]
    for layer in itertools.product(*stack_index):
        shard_layer = tuple(number - part.start for number, part in zip(layer, stack_index, strict=True))
        for start, piece in _pieces(mapping, tensor_index):
            slices = tuple(slice(first, first + len(part)) for first, part in zip(start, piece, strict=True))
            target = shard[(*shard_layer, ...)][(*slices, ...)]  # a view, also for an array without dimensions
            copy_in_pieces(target, _read_part(tensors[mapping.name(layer)], mapping, piece))
            status.add(target.nbytes)
    return shard


def _pieces(mapping: WeightMapping, index: tuple[range, ...]) -> Iterator[tuple[tuple[int, ...], tuple[range, ...]]]:
    """Split the part `index` of a weight into pieces of at most `_MAX_READ` bytes along the stored tensor's rows.

    Yields the start of each piece within the part, and the index of the piece in the weight.
    """
    if not index:  # an array without dimensions
        yield (), ()
        return
    row_axis = mapping.groups[0][0]
    axis = mapping.axes.index(row_axis) if row_axis in mapping.axes else 0
    rows = index[axis]
    row_bytes = 4 * math.prod(map(len, index)) // max(1, len(rows))
    section = mapping.section
    if section is not None and section.blocks > 1:  # rows of other weights between the blocks are read, too
        row_bytes = row_bytes * section.block_size // section.size
    step = max(1, _MAX_READ // max(1, row_bytes))
    for start in range(0, len(rows), step):
        starts = tuple(start if dimension == axis else 0 for dimension in range(len(index)))
        yield starts, (*index[:axis], rows[start : start + step], *index[axis + 1 :])


def _empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialized array at an address that is a multiple of `_ALIGNMENT`."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)


def read_layer(tensor: StoredTensor, mapping: WeightMapping) -> np.ndarray:
    """Read one layer of a stacked weight from its tensor."""
    return _read_part(tensor, mapping, tuple(range(mapping.sizes[word]) for word in mapping.axes))


def _read_part(tensor: StoredTensor, mapping: WeightMapping, index: tuple[range, ...]) -> np.ndarray:
    """Read the part `index` of one layer's weight.

    Only the first axis of each group of axes can be sliced in the file. Other axes are sliced after reading.
    """
    remaining = dict(zip(mapping.axes, index, strict=True))
    sizes = dict(mapping.sizes)
    slices = []
    for first_axis, *other_axes in mapping.groups:
        part = remaining.pop(first_axis, range(mapping.sizes[first_axis]))
        stride = math.prod(mapping.sizes[axis] for axis in other_axes)
        slices.append(slice(part.start * stride, part.stop * stride))
        sizes[first_axis] = len(part)
    x = _read_slices(tensor, mapping.section, tuple(slices))
    x = rearrange(x, mapping.pattern, **einops_sizes(mapping, sizes))
    slices_after = {axis: slice(part.start, part.stop) for axis, part in remaining.items()}
    return x[(*(slices_after.get(axis, slice(None)) for axis in mapping.axes), ...)]


def _read_slices(tensor: StoredTensor, section: Section | None, slices: tuple[slice, ...]) -> np.ndarray:
    """Read slices of a tensor. If there is a section, they are slices of the section instead of the full tensor."""
    if section is None:
        return tensor.read(slices)
    before = slices[: section.axis]
    rows = slices[section.axis]
    after = slices[section.axis + 1 :]
    first_block = rows.start // section.size
    last_block = -(-rows.stop // section.size)
    if last_block - first_block <= 1:
        shift = first_block * (section.block_size - section.size) + section.begin
        return tensor.read((*before, slice(rows.start + shift, rows.stop + shift), *after))
    blocks = slice(first_block * section.block_size, last_block * section.block_size)
    x = section.of(tensor.read((*before, blocks, *after)))
    x = x.reshape(*x.shape[: section.axis], -1, *x.shape[section.axis + 2 :])
    start = rows.start - first_block * section.size
    return x[(*[slice(None)] * section.axis, slice(start, start + rows.stop - rows.start))]
