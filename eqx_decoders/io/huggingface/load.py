"""Loading of Hugging Face directories: `config.json` and safetensors, without torch and without transformers.

Each device's part of each weight is filled by itself, tensor by tensor, so that the host never holds more than the
weights that live on it and a piece of one tensor.
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
from eqx_decoders.errors import ConversionError, check, check_option
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.multimodal import text_fields
from eqx_decoders.families.registry import find_family
from eqx_decoders.families.weight_rows import Section, WeightMapping
from eqx_decoders.io.huggingface.directory import FLOATS, Directory, StoredTensor, check_dtypes, check_tensors
from eqx_decoders.io.huggingface.generation_config import parse_token_ids, read_generation_config
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.quantized import checkpoint_tensors, keep, read_scheme, without_empty_biases
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

_READ = 64_000_000  # bytes in float32 of a tensor that are read at a time
_ALIGNMENT = 64  # bytes: JAX takes over a NumPy array that begins at a multiple of it without a copy


def read_config(directory: str | Path, *, text_only: bool = False) -> tuple[DecoderConfig, Provenance]:
    """Read the configuration in a directory's `config.json`, and the provenance that an export of the model needs."""
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
    target, _, _ = _target(resolve(source, revision), dtype, layout, dict(execution), text_only, quantized)
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
    """Load the model in a Hugging Face directory or a GGUF file, each weight created on its devices.

    **Arguments:**

    - `source`: a directory with `config.json` and safetensors files; a GGUF file of llama.cpp (extra "gguf"), the first
        one of several; or the name of a repository, `"org/name"`, which is downloaded (extra "hf").
    - `dtype`: of weights and activations; None for the files' dtype.
    - `layout`: where the weights live; None for one device.
    - `revision`: branch, tag or commit of a repository.
    - `text_only`: whether encoders of images and audio are left out; the model is then one of its text family.
    - `quantized`: form of matrices that the files have in few bits: `"expand"`, arrays of `dtype` as all other weights;
        `"keep"`, the stored bits (`QuantizedWeight`), where that is possible (`quantized.keep`).
    - `execution`: other fields of `Execution`, such as `remat="full"`; `precision` wins over `dtype`.

    Raises ConversionError, before any weight is loaded, where the directory is not a complete checkpoint of a known
    family, or has settings that are not understood.
    """
    target, mappings, tensors = _target(resolve(source, revision), dtype, layout, dict(execution), text_only, quantized)
    shapes, static = eqx.partition(target, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    leaves = stored_leaves(shapes)
    total = sum(len(_holders(leaf)) * device_bytes(leaf) for leaf in leaves.values())
    with StatusLine("loading weights", total=total) as status:
        arrays = {path: load_weight(leaf, mappings[path], tensors, status) for path, leaf in leaves.items()}
    return eqx.combine(replaced(shapes, arrays | computed_buffers(target)), static)


def stored_weights(directory: str | Path) -> tuple[dict[str, WeightMapping], dict[str, StoredTensor]]:
    """Return the mapping of each weight of a directory to tensors, and these tensors, under their full names."""
    _, mappings, tensors = _target(resolve(directory), jnp.float32, None, {})
    return mappings, {name: tensors[name] for mapping in mappings.values() for name in mapping.names}


def _target(
    directory: Directory,
    dtype: DTypeLike | None,
    layout: Layout | None,
    execution: dict[str, Any],
    text_only: bool = False,
    quantized: QuantizedName = "expand",
) -> tuple[Decoder, dict[str, WeightMapping], dict[str, StoredTensor]]:
    """Return the model of shapes, the mapping of each weight to tensors, and the tensors."""
    check_option("load_hf: quantized", quantized, get_args(QuantizedName))
    config, origin, family = _read_config(directory, text_only)
    tensors = _without_ignored(_stored(directory, text_only), family, config)
    tensors = _without_fixed(tensors, family.fixed_tensors(config))
    family = family.stored_as(tensors)
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
    wanted = {name: mapping.shape for mapping in mappings.values() for name in mapping.names}
    tensors = without_empty_biases(tensors, wanted)
    check_tensors(
        directory.path,
        tensors,
        wanted,
        rule="The tensors must be those that config.json describes",
        owner="weight",
        source="config.json",
    )
    return keep(target, mappings, tensors) if quantized == "keep" else (target, mappings, tensors)


def _stored(directory: Directory, text_only: bool) -> dict[str, StoredTensor]:
    """Return the tensors of a directory; with `text_only` the decoder's, under their names in its family."""
    tensors = checkpoint_tensors(directory)
    content = directory.json("config.json")
    family = find_family(str(content.get("model_type"))).described_by(content)
    if not text_only or family.text is None:
        return tensors
    named = {family.text_tensor(family.stored_name(name)): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in named.items() if name is not None}


def _read_config(directory: Directory, text_only: bool = False) -> tuple[DecoderConfig, Provenance, Family]:
    content = directory.json("config.json")
    config, settings, family = decode_config(content, f"{directory.path}/config.json", text_only=text_only)
    config = _with_stored_depths(config, directory, family, text_only)
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
    """Decode the content of a `config.json`: the configuration, its settings without effect here, and its family.

    text_only: of the decoder alone.
    """
    kind = content.get("model_type")
    check(isinstance(kind, str), f"{path}: model_type={kind!r} must name the family.", ConversionError)
    family = find_family(str(kind)).described_by(content)
    read_scheme(content)
    if text_only and family.text is not None:
        config, settings = family.text.decode_fields(text_fields(Fields(family.own_settings(content))))
        return config, settings, family.text
    config, settings = family.decode(content)
    return config, settings, family


def _with_stored_depths(
    config: DecoderConfig, directory: Directory, family: Family, text_only: bool = False
) -> DecoderConfig:
    """Add layers of multi-token prediction if they are stored, or remove them; without weights follow config.json.

    transformers leaves them out, and the setting as it is; some files have them, and no setting.
    """
    add, files = family.with_depths, ("model.safetensors", "model.safetensors.index.json")
    if (config.mtp is None and add is None) or not any(map(directory.has, files)):
        return config
    stored = _stored(directory, text_only)
    if add is not None:
        count = family.stored_depths(map(family.stored_name, stored))
        config = add(config, count) if count else dataclasses.replace(config, mtp=None)
    tensors = _without_ignored(stored, family, config)
    if config.mtp is None:
        return config
    weights = family.stored_as(tensors).bind(abstract(config))
    names = {name for path, mapping in weights.items() if path.startswith("mtp.") for name in mapping.names}
    return config if names & tensors.keys() else dataclasses.replace(config, mtp=None)


def _without_copies(tensors: dict[str, StoredTensor], copies: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Remove tensors that are copies of others. Raises ConversionError where they differ."""
    for copy, name in copies.items():
        if copy not in tensors or name not in tensors:
            continue
        first, second = tensors[copy], tensors[name]
        same = first.shape == second.shape and equal_tables(first, second)
        check(same, f"{copy} must hold the same numbers as {name}: both are one weight here.", ConversionError)
    return {name: stored for name, stored in tensors.items() if copies.get(name) not in tensors}


def _without_fixed(tensors: dict[str, StoredTensor], fixed: Mapping[str, np.ndarray]) -> dict[str, StoredTensor]:
    """Remove tensors that follow from the configuration. Raises ConversionError where they hold other numbers."""
    for name, wanted in fixed.items():
        same = name not in tensors or np.array_equal(tensors[name].read_all(), wanted)
        rule = f"{name} must hold the numbers that follow from config.json, {wanted.tolist()}"
        check(same, f"{rule}.", ConversionError)
    return {name: stored for name, stored in tensors.items() if name not in fixed}


def _without_ignored(
    tensors: dict[str, StoredTensor], family: Family, config: DecoderConfig
) -> dict[str, StoredTensor]:
    """Return tensors under the full names of the family's table, without tensors that hold no information."""
    tensors = {family.stored_name(name): stored for name, stored in tensors.items()}
    if not any(name.startswith(family.prefix) for name in tensors):  # saved from the base model
        head = family.head.removesuffix("weight")  # which may have a bias, too
        tensors = {n if n.startswith(head) else family.prefix + n: stored for n, stored in tensors.items()}
    return {name: stored for name, stored in tensors.items() if not family.is_ignored(name, config)}


def _untie(config: DecoderConfig, tensors: dict[str, StoredTensor], family: Family) -> DecoderConfig:
    """Untie the head from the table if the file has a head that differs; remove one tensor if both are equal."""
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
        del tensors[family.head]  # equal, or both of a wrong shape, which is reported once
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
    rows, step = first.shape[0], max(1, 4_000_000 // first.shape[1])
    parts = (slice(start, min(start + step, rows)) for start in range(0, rows, step))
    columns = slice(0, first.shape[1])
    return all(np.array_equal(first.read((part, columns)), second.read((part, columns))) for part in parts)


def load_weight(
    leaf: jax.ShapeDtypeStruct, mapping: WeightMapping, tensors: Mapping[str, StoredTensor], status: StatusLine
) -> jax.Array:
    """Load a weight onto its devices, one device's part after another."""
    parts: list[jax.Array] = []
    sharding: Any = leaf.sharding
    for index, devices in _holders(leaf).items():
        block = _block(index, leaf.dtype, mapping, tensors, status)
        if isinstance(sharding, SingleDeviceSharding):  # uncommitted, like those of `init`
            return jax.device_put(block)
        parts += [jax.device_put(block, device) for device in devices]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def _holders(leaf: jax.ShapeDtypeStruct) -> dict[tuple[range, ...], list[Any]]:
    """Return the different parts of a weight on devices of this process, and the devices that hold each."""
    holders: dict[tuple[range, ...], list[Any]] = {}
    sharding: Any = leaf.sharding
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        whole = tuple(range(*cut.indices(size)) for cut, size in zip(index, leaf.shape, strict=True))
        holders.setdefault(whole, []).append(device)
    return holders


def _block(
    index: tuple[range, ...],
    dtype: np.dtype,
    mapping: WeightMapping,
    tensors: Mapping[str, StoredTensor],
    status: StatusLine,
) -> np.ndarray:
    """Read the part `index` of a weight from the tensors that hold it."""
    block = _aligned(tuple(map(len, index)), dtype)
    lead, rest = index[: len(mapping.stack)], index[len(mapping.stack) :]
    for layer in itertools.product(*lead):
        local = tuple(number - cut.start for number, cut in zip(layer, lead, strict=True))
        for begin, piece in _pieces(mapping, rest):
            cut = tuple(slice(first, first + len(part)) for first, part in zip(begin, piece, strict=True))
            target = block[(*local, ...)][(*cut, ...)]  # a view, also of a single number
            copy_in_pieces(target, _part(tensors[mapping.name(layer)], mapping, piece))
            status.add(target.nbytes)
    return block


def _pieces(mapping: WeightMapping, index: tuple[range, ...]) -> Iterator[tuple[tuple[int, ...], tuple[range, ...]]]:
    """Cut the part `index` of a tensor into some rows of the file each: yield each piece and, before it, its begin."""
    if not index:  # a single number
        yield (), ()
        return
    word = mapping.groups[0][0]
    axis = mapping.words.index(word) if word in mapping.words else 0
    whole = index[axis]
    row_bytes = 4 * math.prod(map(len, index)) // max(1, len(whole))
    if (
        section := mapping.section
    ) is not None and section.blocks > 1:  # the rows of other weights between them are read, too
        row_bytes = row_bytes * section.block_size // section.size
    step = max(1, _READ // max(1, row_bytes))
    for begin in range(0, len(whole), step):
        first = tuple(begin if dimension == axis else 0 for dimension in range(len(index)))
        yield first, (*index[:axis], whole[begin : begin + step], *index[axis + 1 :])


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    return raw[begin : begin + size].view(dtype).reshape(shape)


def read_layer(tensor: StoredTensor, mapping: WeightMapping) -> np.ndarray:
    """Read one layer of a stacked weight from the tensor that holds it."""
    return _part(tensor, mapping, tuple(range(mapping.sizes[word]) for word in mapping.words))


def _part(tensor: StoredTensor, mapping: WeightMapping, index: tuple[range, ...]) -> np.ndarray:
    """Read the part `index` of one layer's weight, cut in the file where that is possible, otherwise afterwards."""
    wanted = dict(zip(mapping.words, index, strict=True))
    sizes, cuts = dict(mapping.sizes), []
    for first, *rest in mapping.groups:
        cut, inner = wanted.pop(first, range(mapping.sizes[first])), math.prod(mapping.sizes[word] for word in rest)
        cuts.append(slice(cut.start * inner, cut.stop * inner))
        sizes[first] = len(cut)
    x = _read(tensor, mapping.section, tuple(cuts))
    x = rearrange(x, mapping.pattern, **einops_sizes(mapping, sizes))
    rest = {word: slice(cut.start, cut.stop) for word, cut in wanted.items()}
    return x[(*(rest.get(word, slice(None)) for word in mapping.words), ...)]


def _read(tensor: StoredTensor, section: Section | None, cuts: tuple[slice, ...]) -> np.ndarray:
    """Read `cuts` of a tensor or, if there is one, of its section, as if that were all of the tensor."""
    if section is None:
        return tensor.read(cuts)
    before, rows, after = cuts[: section.axis], cuts[section.axis], cuts[section.axis + 1 :]
    first, last = rows.start // section.size, -(-rows.stop // section.size)
    if last - first <= 1:
        shift = first * (section.block_size - section.size) + section.begin
        return tensor.read((*before, slice(rows.start + shift, rows.stop + shift), *after))
    blocks = slice(first * section.block_size, last * section.block_size)
    x = section.of(tensor.read((*before, blocks, *after)))
    x = x.reshape(*x.shape[: section.axis], -1, *x.shape[section.axis + 2 :])
    begin = rows.start - first * section.size
    return x[(*[slice(None)] * section.axis, slice(begin, begin + rows.stop - rows.start))]
