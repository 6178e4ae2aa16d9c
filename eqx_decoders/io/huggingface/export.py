"""Hugging Face directories, written: what `from_pretrained` of transformers opens, and `load_hf`."""

import contextlib
import functools
import itertools
import json
import math
import os
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.typing import DTypeLike

from eqx_decoders.errors import ConversionError, check, check_integer, check_word, need_extra
from eqx_decoders.families import FAMILIES
from eqx_decoders.families.hf_table import Family, WeightMapping, for_inference
from eqx_decoders.io.atomic_files import expanded, write_json
from eqx_decoders.io.coordination import from_first, gather
from eqx_decoders.io.huggingface.directory import FLOATS, Directory, parse_json
from eqx_decoders.io.huggingface.gather import pieces
from eqx_decoders.io.huggingface.hub import TOKENIZER_FILES
from eqx_decoders.io.huggingface.load import copy_in_pieces, given_sizes
from eqx_decoders.io.huggingface.quantized.write import all_part_mappings, quantization_config, stored_parts
from eqx_decoders.model.decoder import Decoder, DecoderConfig
from eqx_decoders.numerics.quantized_weight import plain_shapes, quantized_weights, whole_weights
from eqx_decoders.sharding.axes import named_leaves


_FURTHER_DTYPES = {"float8_e4m3fn": "F8_E4M3", "uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64"}

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

    Weights in few bits (`quantize`) are written as compressed-tensors; those that came as GPT-OSS's MXFP4 as that.

    **Arguments:**

    - `model`: of a known family; merge adapters first.
    - `directory`: a new or empty one; it appears whole or not at all.
    - `dtype`: of the tensors; None for that of the weights.
    - `shard_bytes`: a larger model is cut into files of at most this size, with an index.
    - `family`: a `model_type`; None for that of the model's origin or, without one, the first that can express it.
    - `settings`: further keys of `config.json`, such as `eos_token_id` and `max_position_embeddings`.
    - `tokenizer`: a directory whose tokenizer is copied; None for that of the origin.

    Raises ConversionError where the family cannot express the model exactly. In a run of several processes all of them
    must call it; the first one writes.
    """
    check_integer("save_hf: shard_bytes", shard_bytes)
    own = None if model.origin is None else model.origin.directory
    kind, config, stored = export_plan(model, dtype=dtype, family=family, settings=settings)
    with exported_directory(directory) as partial:
        tensors = _tensors(model, kind, stored)
        for copy, name in kind.copied(model.config).items():
            tensors |= {copy: tensors[name]} if name in tensors else {}
        _write_tensors(partial, tensors, shard_bytes)
        if partial is None:
            return
        write_json(partial / "config.json", config, sort_keys=True)
        copy_tokenizer(own if tokenizer is None else tokenizer, partial)
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
    """The family as which `save_hf` writes a model (of arrays or shapes), its `config.json`, and the tensors' dtype.

    Raises all that can be known before anything is written: that no family has the model, that `settings` change it,
    and that the package that writes safetensors is missing.
    """
    safetensors()
    kind, config = export_config(model, family)
    # explicit nulls: the classes of transformers have token ids of their own as defaults
    kept = {} if model.origin is None else json.loads(model.origin.settings)
    config = dict.fromkeys(TOKEN_IDS) | dict(kind.default_settings) | merged(kept, config) | dict(settings or {})
    stored = named_leaves(model)["embedding.table"].dtype if dtype is None else jnp.dtype(dtype)
    check_word("save_hf: dtype", stored.name, FLOATS.values(), ConversionError)
    config |= {"dtype": stored.name, "torch_dtype": stored.name}
    mappings, nodes = kind.bind(plain_shapes(model)), quantized_weights(model)
    if nodes:
        all_part_mappings(nodes, whole_weights(model)[0], mappings)
        config |= {"quantization_config": quantization_config(kind, nodes, mappings)}
    _check_settings(kind, config, model.config)
    return kind, config, stored


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both objects' keys, those of the second where both have one; objects in them likewise."""

    def value(key: str) -> Any:
        first, second = one.get(key), other.get(key)
        if isinstance(first, dict) and isinstance(second, dict):
            return merged(first, second)
        return other.get(key, first)

    return {key: value(key) for key in dict(one) | dict(other)}


def check_new_directory(directory: str | Path) -> None:
    """Raise ConversionError where `exported_directory` could not make a directory, as the first process sees it."""
    folder = Path(expanded(directory)).absolute()
    refusal = from_first("export", _refusal(folder) if jax.process_index() == 0 else None)
    check(refusal is None, f"{folder} {refusal}.", ConversionError)


def _refusal(folder: Path) -> str | None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        return "is not empty: give a new directory"
    above = next(path for path in folder.parents if path.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        return f"cannot be made: {above} is not a directory that may be written to"
    return None


@contextlib.contextmanager
def exported_directory(directory: str | Path) -> Iterator[Path | None]:
    """A directory to be filled, which gets its name when all is written; None in all processes but the first.

    Raises ConversionError where `directory` is anything but an empty directory or a new name, or may not be written.
    All processes wait for each other at the end.
    """
    folder, partial = Path(expanded(directory)).absolute(), None
    check_new_directory(folder)
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            stack.callback(shutil.rmtree, partial, ignore_errors=True)  # what is left of it after an error
            partial.chmod(0o755)
        yield partial
        if partial is not None:
            if folder.exists():
                folder.rmdir()
            os.replace(partial, folder)
    gather("exported")


def _check_settings(kind: Family, settings: Mapping[str, Any], config: DecoderConfig) -> None:
    """What is about to be written must be JSON, and still describe the model."""
    try:
        again = parse_json(json.dumps(settings, allow_nan=False).encode(), "save_hf: settings")
    except (TypeError, ValueError) as error:
        raise ConversionError(f"save_hf: settings={settings!r} are no JSON: {error}.") from error
    same = kind.decode(again)[0] == for_inference(config)
    check(same, "save_hf: settings change what the model computes: give only keys that do not.", ConversionError)


def export_config(model: Decoder, family: str | None = None) -> tuple[Family, dict[str, Any]]:
    """The family as which a model is exported, and its settings in `config.json`."""
    adapted = [path for path in named_leaves(model) if path.endswith(".lora_a")]
    check(not adapted, f"{adapted[:1]} is an adapter: call merge_lora first, or save_peft.", ConversionError)
    if family is None and model.origin is not None:
        family = model.origin.family
    if family is not None:
        kind = FAMILIES[check_word("save_hf: family", family, FAMILIES, ConversionError)]
        return kind, kind.encode(model.config)
    refusals = []
    for kind in FAMILIES.values():
        try:
            return kind, kind.encode(model.config)
        except ConversionError as error:
            refusals.append(textwrap.shorten(str(error), 160, placeholder=" …"))
    raise ConversionError("No family of Hugging Face has this model.\n  " + "\n  ".join(refusals))


def _tensors(model: Decoder, kind: Family, dtype: np.dtype) -> dict[str, tuple[Callable[[], Any], int]]:
    """For the name of every tensor of an export a function that makes it, and about how many bytes it has."""
    leaves, nodes, mappings = named_leaves(model), quantized_weights(model), kind.bind(plain_shapes(model))
    plain = {path: mapping for path, mapping in mappings.items() if path not in nodes}
    sizes = {name: math.prod(row.shape) * dtype.itemsize for row in plain.values() for name in row.names}
    parts = exported(leaves, all_part_mappings(nodes, whole_weights(model)[0], mappings))
    found = {name: (make, sizes[name]) for name, make in exported(leaves, plain, dtype).items()}
    return found | stored_parts(nodes, mappings, parts)


def _write_tensors(folder: Path | None, tensors: Mapping[str, tuple[Callable[[], Any], int]], shard_bytes: int) -> None:
    """Write all tensors, holding those of one file at a time; None: only take part in gathering them."""
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
        made = {name: tensors[name][0]() for name in shard}
        if folder is not None:
            save_tensors({name: tensor for name, tensor in made.items() if tensor is not None}, folder / file)
        gather("written")  # what waits for a disk waits here: programs of several processes may not wait for long
    if folder is not None and len(shards) > 1:
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        write_json(folder / "model.safetensors.index.json", content, sort_keys=True)


def exported(
    leaves: Mapping[str, Any], mappings: Mapping[str, WeightMapping], dtype: np.dtype | None = None
) -> dict[str, Callable[[], np.ndarray | None]]:
    """For the name of every tensor of a checkpoint a function that makes it; None keeps the dtype of the weight.

    In a run of several processes all must call them, in one order; only the first gets the tensors.
    """
    holders: dict[str, dict[int, tuple[WeightMapping, Any, tuple[int, ...]]]] = {}
    for path, mapping in mappings.items():
        for place in itertools.product(*map(range, mapping.stack)):
            index = 0 if mapping.section is None else mapping.section.index
            holders.setdefault(mapping.name(place), {})[index] = (mapping, leaves[path], place)
    return {name: functools.partial(_tensor, parts, dtype) for name, parts in holders.items()}


def _tensor(
    parts: Mapping[int, tuple[WeightMapping, Any, tuple[int, ...]]], dtype: np.dtype | None
) -> np.ndarray | None:
    """One tensor of a checkpoint, filled with the weights that share it; None in all processes but the first."""
    mapping, leaf, _ = parts[0]
    tensor = np.empty(mapping.shape, leaf.dtype if dtype is None else dtype) if jax.process_index() == 0 else None
    for _, (mapping, leaf, place) in sorted(parts.items()):
        section = tensor if tensor is None or mapping.section is None else mapping.section.of(tensor)
        # The same memory in our order, where it can be: what is written into it needs no copy in between.
        own = None if section is None else section.reshape(mapping.own_shape)
        ours = None if own is None else rearrange(own, mapping.pattern, **given_sizes(mapping, mapping.sizes))
        for cut, piece in pieces(leaf, place):
            if ours is not None:
                copy_in_pieces(ours[(*cut, ...)], piece)
        if section is not None and own is not None and not np.may_share_memory(own, section):
            section[...] = own.reshape(section.shape)
    return tensor


def save_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write a safetensors file."""
    if any(x.dtype == jnp.float8_e4m3fn for x in tensors.values()):
        _save_with_fp8(tensors, path)
    else:
        safetensors().save_file(tensors, path, metadata={"format": "pt"})  # transformers 4 asks for this word


def _save_with_fp8(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """A safetensors file with FP8 in it, which the package does not write: a header in JSON, and the numbers' bytes."""
    words = {name: word for word, name in FLOATS.items()} | _FURTHER_DTYPES
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ordered, end = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)), 0
    for name in ordered:
        x, begin, end = tensors[name], end, end + tensors[name].nbytes
        header[name] = {"dtype": words[x.dtype.name], "shape": list(x.shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name in ordered:
            file.write(np.ascontiguousarray(tensors[name]).view(np.uint8).data)


def safetensors() -> Any:
    """The module that writes safetensors files. Raises MissingPackage where it is not installed."""
    try:
        import safetensors.numpy as module
    except ImportError as error:
        raise need_extra("safetensors", "hf") from error
    return module


def copy_tokenizer(source: str | Path | None, folder: Path) -> None:
    """Copy the files of a tokenizer and the generation settings; nothing where there are none."""
    if source is None or not Path(source).is_dir():
        return
    directory = Directory(source)
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if directory.has(name):
            shutil.copyfile(directory.file(name), folder / name)


def _card(name: str, model: Decoder, family: Family, dtype: np.dtype) -> str:
    config, count = model.config, sum(leaf.size for leaf in named_leaves(plain_shapes(model)).values())
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
