"""Export to Hugging Face directories, which `from_pretrained` of transformers opens, and `load_hf`."""

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.typing import DTypeLike

from eqx_decoders.errors import ConversionError, check, check_integer, check_option
from eqx_decoders.families.family import Family, for_inference
from eqx_decoders.families.weight_rows import WeightMapping
from eqx_decoders.io.atomic_files import expanded, write_json
from eqx_decoders.io.huggingface.directory import FLOATS, Directory, parse_json, stored_tensors
from eqx_decoders.io.huggingface.export_config import export_config, merged
from eqx_decoders.io.huggingface.export_directory import check_tokenizer, copy_tokenizer, exported_directory
from eqx_decoders.io.huggingface.gather import pieces
from eqx_decoders.io.huggingface.quantized.write import all_part_mappings, quantization_config, stored_parts
from eqx_decoders.io.huggingface.safetensors_files import safetensors, save_tensors
from eqx_decoders.io.huggingface.tensor_copy import copy_in_pieces, einops_sizes
from eqx_decoders.io.processes import all_gather_json, in_first
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.init import abstract, computed_buffers
from eqx_decoders.numerics.quantized_weight import plain_shapes, quantized_weights, whole_weights
from eqx_decoders.sharding.axes import named_leaves, stored_leaves


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_hf(
    model: Decoder,
    directory: str | Path,
    *,
    dtype: DTypeLike | None = None,
    shard_bytes: int = 5_000_000_000,
    family: str | None = None,
    settings: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """Write a directory that `from_pretrained` of transformers opens, and `load_hf`.

    Weights in few bits (`quantize`) are written as compressed-tensors; MXFP4 of GPT-OSS as such.

    **Arguments:**

    - `model`: of a known family; merge adapters first.
    - `directory`: a new or empty one; it appears completely or not at all.
    - `dtype`: of the tensors; None for the weights' dtype.
    - `shard_bytes`: a larger model is cut into files of at most this size, with an index.
    - `family`: a `model_type`; None for the origin's family or, without an origin, the first that can express it.
    - `settings`: other keys of `config.json`, such as `eos_token_id` and `max_position_embeddings`.
    - `tokenizer`: a directory or GGUF file whose tokenizer is copied; None for the origin's tokenizer.

    Raises ConversionError where the family cannot express the model exactly. In a run of several processes all of them
    must call it; the first one writes.
    """
    check_integer("save_hf: shard_bytes", shard_bytes)
    origin = None if model.origin is None else model.origin.directory
    kind, config, stored = export_plan(model, dtype=dtype, family=family, settings=settings)
    source = origin
    if tokenizer is not None:
        source = given = Path(expanded(tokenizer))
        in_first("tokenizer", lambda: check_tokenizer(given))
    with exported_directory(directory) as partial:
        # first: a tokenizer that cannot be made costs no weights
        in_first("tokenizer", lambda: None if partial is None else copy_tokenizer(source, partial))
        tensors = _tensors(model, kind, stored)
        for copy, name in kind.copied(model.config).items():
            tensors |= {copy: tensors[name]} if name in tensors else {}
        zeros = _zeros(model, kind, stored)
        fixed = kind.fixed_tensors(model.config)
        tensors |= {name: (functools.partial(np.copy, x), x.nbytes) for name, x in fixed.items()}
        _write_tensors(partial, tensors | zeros | _source_tensors(model, kind, tensors, zeros), shard_bytes)
        if partial is None:
            return
        write_json(partial / "config.json", config, sort_keys=True)
        if not (partial / "generation_config.json").exists():
            known = {key: config[key] for key in TOKEN_IDS if config[key] is not None}
            write_json(partial / "generation_config.json", known, sort_keys=True)
        (partial / "README.md").write_text(_card(Path(directory).absolute().name, model, kind, stored))


def export_plan(
    model: Decoder,
    *,
    dtype: DTypeLike | None = None,
    family: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[Family, dict[str, Any], np.dtype]:
    """Return the family as which `save_hf` writes a model (of arrays or shapes), its `config.json`, and the dtype.

    Raises all errors that are known before anything is written: ConversionError for a model that no family can express
    or that `settings` change, MissingPackage without the package that writes safetensors.
    """
    safetensors()
    kind, config = export_config(model, family)
    # explicit nulls: the classes of transformers have token ids of their own as defaults
    published = {} if model.origin is None else json.loads(model.origin.settings)
    lists = {key: value for key, value in published.items() if isinstance(value, list) and config.get(key) in value[:1]}
    config = dict.fromkeys(TOKEN_IDS) | merged(published, config) | lists | dict(settings or {})
    config |= {key: value for key, value in _defaults(kind, model).items() if config.get(key) is None}
    stored = named_leaves(model)["embedding.table"].dtype if dtype is None else jnp.dtype(dtype)
    check_option("save_hf: dtype", stored.name, FLOATS.values(), ConversionError)
    config |= {"dtype": stored.name, "torch_dtype": stored.name}
    mappings, nodes = kind.bind(plain_shapes(model)), quantized_weights(model)
    if nodes:
        all_part_mappings(nodes, whole_weights(model)[0], mappings)
        config |= {"quantization_config": quantization_config(kind, nodes, mappings)}
    _check_settings(kind, config, model.config)
    _check_computed(model)
    return kind, config, stored


def _defaults(kind: Family, model: Decoder) -> dict[str, Any]:
    """Return the family's `default_settings`; token ids are at most the last one, for they are rows of a table."""
    last = model.config.vocab_size - 1
    return {key: min(value, last) if key in TOKEN_IDS else value for key, value in kind.default_settings.items()}


def _check_settings(kind: Family, settings: Mapping[str, Any], config: DecoderConfig) -> None:
    """Raise ConversionError for settings that are no JSON, or do not describe the model any more."""
    try:
        content = parse_json(json.dumps(settings, allow_nan=False).encode(), "save_hf: settings")
    except (TypeError, ValueError) as error:
        raise ConversionError(f"save_hf: settings={settings!r} are no JSON: {error}.") from error
    same = kind.decode(content)[0] == for_inference(config)
    check(same, "save_hf: settings change what the model computes: give only keys that do not.", ConversionError)


def _check_computed(model: Decoder) -> None:
    """Raise ConversionError unless buffers that are computed are as a loaded model would have them."""
    found = named_leaves(model)
    for path, buffer in computed_buffers(abstract(model.config, **vars(model.execution))).items():
        same = not eqx.is_array(found[path]) or bool(jnp.array_equal(found[path], buffer))
        check(same, f"save_hf: {path} must be what follows from the configuration: no file holds it.", ConversionError)


def _tensors(model: Decoder, kind: Family, dtype: np.dtype) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return for the name of every tensor of an export a function that makes it, and its approximate size in bytes."""
    leaves, nodes, mappings = named_leaves(model), quantized_weights(model), kind.bind(plain_shapes(model))
    plain = {path: mapping for path, mapping in mappings.items() if path not in nodes}
    sizes = {name: math.prod(row.shape) * dtype.itemsize for row in plain.values() for name in row.names}
    parts = exported(leaves, all_part_mappings(nodes, whole_weights(model)[0], mappings))
    tensors = {name: (make, sizes[name]) for name, make in exported(leaves, plain, dtype).items()}
    return tensors | stored_parts(nodes, mappings, parts)


def _zeros(model: Decoder, kind: Family, dtype: np.dtype) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return the family's `zero_tensors` as zeros, as `_tensors` does."""
    shapes = kind.zero_tensors(model.config)
    return {
        name: (functools.partial(np.zeros, shape, dtype), math.prod(shape) * dtype.itemsize)
        for name, shape in shapes.items()
    }


def _source_tensors(
    model: Decoder, kind: Family, tensors: Mapping[str, Any], zeros: Mapping[str, Any]
) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return the tensors without a weight that the model's source has, as `_tensors` does: those of `zeros`, and the
    family's `kept_tensors` in modules that `tensors` have.
    """
    origin, wanted = model.origin, bool(zeros or kind.kept_tensors)
    if not wanted or origin is None or origin.family != kind.model_type or origin.directory is None:
        return {}
    weights = Path(origin.directory, "model.safetensors"), Path(origin.directory, "model.safetensors.index.json")
    modules = {".".join(parts[:end]) for parts in (name.split(".") for name in tensors) for end in range(len(parts))}
    stored = stored_tensors(Directory(origin.directory)) if any(file.exists() for file in weights) else {}

    def is_copied(name: str) -> bool:
        is_one = re.fullmatch(kind.kept_tensors, name) is not None and name not in tensors
        return name in zeros or (is_one and name.rpartition(".")[0] in modules)

    return {name: (each.read_all, math.prod(each.shape) * 4) for name, each in stored.items() if is_copied(name)}


def _write_tensors(folder: Path | None, tensors: Mapping[str, tuple[Callable[[], Any], int]], shard_bytes: int) -> None:
    """Write all tensors, holding the tensors of one file in memory at a time.

    folder: None only takes part in gathering them.
    """
    sizes = {name: size for name, (_, size) in tensors.items()}
    shards: list[list[str]] = [[]]
    filled = 0
    for name in tensors:
        if shards[-1] and filled + sizes[name] > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += sizes[name]
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        index |= dict.fromkeys(shard, file)
        gathered = {name: tensors[name][0]() for name in shard}
        if folder is not None:
            save_tensors({name: tensor for name, tensor in gathered.items() if tensor is not None}, folder / file)
        all_gather_json("written")  # a disk is waited for here: programs of several processes may not wait for long
    if folder is not None and len(shards) > 1:
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        write_json(folder / "model.safetensors.index.json", content, sort_keys=True)


def exported(
    leaves: Mapping[str, Any], mappings: Mapping[str, WeightMapping], dtype: np.dtype | None = None
) -> dict[str, Callable[[], np.ndarray | None]]:
    """Return for the name of every tensor of a checkpoint a function that makes it.

    dtype: of the tensors; None for each weight's dtype. In a run of several processes all must call the functions, in
    one order; only the first gets the tensors.
    """
    holders: dict[str, dict[int, tuple[WeightMapping, Any, tuple[int, ...]]]] = {}
    for path, mapping in mappings.items():
        for layer in itertools.product(*map(range, mapping.stack)):
            index = 0 if mapping.section is None else mapping.section.index
            holders.setdefault(mapping.name(layer), {})[index] = (mapping, leaves[path], layer)
    return {name: functools.partial(_tensor, parts, dtype) for name, parts in holders.items()}


def _tensor(
    parts: Mapping[int, tuple[WeightMapping, Any, tuple[int, ...]]], dtype: np.dtype | None
) -> np.ndarray | None:
    """Make a tensor of a checkpoint from the weights that share it; return None in all processes but the first."""
    mapping, leaf, _ = parts[0]
    if jnp.issubdtype(leaf.dtype, jnp.integer) and dtype is not None:
        dtype = np.dtype(np.int64)  # as torch has them
    tensor = np.empty(mapping.shape, leaf.dtype if dtype is None else dtype) if jax.process_index() == 0 else None
    for _, (mapping, leaf, layer) in sorted(parts.items()):
        section = tensor if tensor is None or mapping.section is None else mapping.section.of(tensor)
        # A view in our order of axes, where that is possible: pieces are then written into the tensor directly.
        unfolded = None if section is None else section.reshape(mapping.own_shape)
        sizes = einops_sizes(mapping, mapping.sizes)
        ours = None if unfolded is None else rearrange(unfolded, mapping.pattern, **sizes)
        for cut, piece in pieces(leaf, layer):
            if ours is not None:
                copy_in_pieces(ours[(*cut, ...)], piece)
        if section is not None and unfolded is not None and not np.may_share_memory(unfolded, section):
            section[...] = unfolded.reshape(section.shape)
    return tensor


def _card(name: str, model: Decoder, family: Family, dtype: np.dtype) -> str:
    config, count = model.config, sum(leaf.size for leaf in stored_leaves(plain_shapes(model)).values())
    return f"""---
library_name: transformers
pipeline_tag: {"text-generation" if family.text is None else "image-text-to-text"}
tags: [{family.model_type}, eqx_decoders]
---

# {name}

{family.architecture}: {count:,} weights in {dtype.name}, {len(config.blocks)} layers of \
{config.embed_dim} features, {config.vocab_size} token ids. \
Exported by [eqx_decoders](https://pypi.org/project/eqx_decoders/).

```python
model = transformers.{family.auto_class}.from_pretrained("{name}")
model = eqx_decoders.load_hf("{name}")
```
"""
