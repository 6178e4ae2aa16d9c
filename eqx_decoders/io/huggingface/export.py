"""Export to Hugging Face directories, which `from_pretrained` of transformers and `load_hf` open."""

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

from eqx_decoders.errors import ConversionError, check_integer, check_option, missing_package
from eqx_decoders.families.family import Family, NotExpressedError, for_inference
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.families.weight_rows import WeightMapping
from eqx_decoders.io.atomic_files import expanded, write_json
from eqx_decoders.io.huggingface.directory import FLOATS, Directory, parse_json, stored_tensors
from eqx_decoders.io.huggingface.export_directory import check_tokenizer, copy_tokenizer, exported_directory
from eqx_decoders.io.huggingface.gather import pieces
from eqx_decoders.io.huggingface.quantized.write import all_part_mappings, quantization_config, quantized_tensor_makers
from eqx_decoders.io.huggingface.tensor_copy import copy_in_pieces, einops_sizes
from eqx_decoders.io.processes import all_gather_json, run_in_process_0
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.init import abstract, computed_buffers
from eqx_decoders.numerics.quantized_weight import plain_shapes, quantized_weights, whole_weights
from eqx_decoders.sharding.axes import named_leaves, stored_leaves


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Function that makes a tensor of a checkpoint. In a run of several processes, all processes must call the functions in
# the same order. They return the tensor in the first process, None in the others.
TensorMaker = Callable[[], np.ndarray | None]

_QUANTIZED_DTYPES = {"float8_e4m3fn": "F8_E4M3", "uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64"}


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
    """Write a model as a directory that `from_pretrained` of transformers and `load_hf` open.

    Quantized weights (`quantize`) are written in the format compressed-tensors; MXFP4 of GPT-OSS as in the published
    checkpoints.

    **Arguments:**

    - `model`: a model of a known family, without adapters: merge them first.
    - `directory`: a new or empty directory; it is written completely or not at all.
    - `dtype`: dtype of the tensors; None: the dtype of the weights.
    - `shard_bytes`: maximum size of a file. A larger model is split into several files with an index.
    - `family`: a `model_type`. None: the family from which the model was loaded or, for other models, the first family
        that can express the model.
    - `settings`: other keys of `config.json`, such as `eos_token_id` and `max_position_embeddings`.
    - `tokenizer`: directory or GGUF file whose tokenizer is copied; None: the tokenizer of the checkpoint from which
        the model was loaded.

    Raises ConversionError if the family cannot express the model exactly. In a run of several processes, all processes
    must call it, and the first process writes.
    """
    check_integer("save_hf: shard_bytes", shard_bytes)
    kind, config, stored_dtype = export_plan(model, dtype=dtype, family=family, settings=settings)
    source = None if model.origin is None else model.origin.directory
    if tokenizer is not None:
        source = tokenizer_path = Path(expanded(tokenizer))
        run_in_process_0("tokenizer", lambda: check_tokenizer(tokenizer_path))
    with exported_directory(directory) as partial:
        # The tokenizer comes first, so that an error in it is raised before the weights are gathered.
        run_in_process_0("tokenizer", lambda: None if partial is None else copy_tokenizer(source, partial))
        tensors = _learned_tensors(model, kind, stored_dtype)
        for copy, original in kind.copied(model.config).items():
            if original in tensors:
                tensors[copy] = tensors[original]
        fixed = kind.fixed_tensors(model.config)
        tensors |= {name: (functools.partial(np.copy, x), x.nbytes) for name, x in fixed.items()}
        zeros = _zero_tensors(model, kind, stored_dtype)
        _write_tensors(partial, tensors | zeros | _source_tensors(model, kind, tensors, zeros), shard_bytes)
        if partial is None:
            return
        write_json(partial / "config.json", config, sort_keys=True)
        if not (partial / "generation_config.json").exists():
            token_ids = {key: config[key] for key in TOKEN_IDS if config[key] is not None}
            write_json(partial / "generation_config.json", token_ids, sort_keys=True)
        (partial / "README.md").write_text(_card(Path(directory).absolute().name, model, kind, stored_dtype))


def export_plan(
    model: Decoder,
    *,
    dtype: DTypeLike | None = None,
    family: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[Family, dict[str, Any], np.dtype]:
    """Return the family as which `save_hf` writes a model (of arrays or shapes), its `config.json`, and the dtype.

    Raises all errors that can be detected before anything is written: ConversionError if no family can express the
    model or if `settings` change it, MissingPackage if safetensors is not installed.
    """
    import_safetensors()
    kind, config = export_config(model, family)
    published = {} if model.origin is None else json.loads(model.origin.settings)
    # A published list that contains only the exported value is written as a list again.
    lists = {key: value for key, value in published.items() if isinstance(value, list) and config.get(key) in value[:1]}
    # Token ids are null if they are unknown, because configuration classes of transformers have default ids.
    config = dict.fromkeys(TOKEN_IDS) | merge_settings(published, config) | lists | dict(settings or {})
    config |= {key: value for key, value in _default_settings(kind, model).items() if config.get(key) is None}
    stored_dtype = named_leaves(model)["embedding.table"].dtype if dtype is None else jnp.dtype(dtype)
    check_option("save_hf: dtype", stored_dtype.name, FLOATS.values(), ConversionError)
    config |= {"dtype": stored_dtype.name, "torch_dtype": stored_dtype.name}
    mappings = kind.bind(plain_shapes(model))
    quantized = quantized_weights(model)
    if quantized:
        all_part_mappings(quantized, whole_weights(model)[0], mappings)
        config |= {"quantization_config": quantization_config(kind, quantized, mappings)}
    _check_same_model(kind, config, model.config)
    _check_computed_buffers(model)
    return kind, config, stored_dtype


def export_config(model: Decoder, family: str | None = None) -> tuple[Family, dict[str, Any]]:
    """Return the family as which a model is exported, and its settings in `config.json`.

    `family`: a `model_type`. None: the family from which the model was loaded or, for other models, the first family
    that can express the model. Raises ConversionError if no family can express it.
    """
    adapters = [path for path in named_leaves(model) if path.endswith(".lora_a")]
    if adapters:
        raise ConversionError(
            f"{adapters[0]} belongs to a LoRA pair, which a checkpoint of the model cannot contain. Merge the pairs "
            "with merge_lora, or save the adapter with save_peft."
        )
    if family is None and model.origin is not None:
        family = model.origin.family
    if family is not None:
        kind = FAMILIES[check_option("save_hf: family", family, FAMILIES, ConversionError)]
        return kind.expressing(model.config)
    errors: list[NotExpressedError] = []
    for kind in FAMILIES.values():
        try:
            return kind.expressing(model.config)
        except NotExpressedError as error:
            errors.append(error)
        except ConversionError:  # transformers has no reward models of this family
            continue
    nearest = sorted(errors, key=lambda error: error.distance)[:3]
    raise ConversionError(
        "No model family of transformers can express this model. The nearest families:\n  "
        + "\n  ".join(map(str, nearest))
    )


def merge_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two JSON objects, including the objects in them. For a key in both, the value of `second` is used."""

    def merged_value(key: str) -> Any:
        x, y = first.get(key), second.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            return merge_settings(x, y)
        return second.get(key, x)

    return {key: merged_value(key) for key in dict(first) | dict(second)}


def _default_settings(kind: Family, model: Decoder) -> dict[str, Any]:
    """Return the family's `default_settings`, with token ids below the size of the vocabulary."""
    last_id = model.config.vocab_size - 1
    return {key: min(value, last_id) if key in TOKEN_IDS else value for key, value in kind.default_settings.items()}


def _check_same_model(kind: Family, settings: Mapping[str, Any], config: DecoderConfig) -> None:
    """Raise ConversionError unless the settings can be written as JSON and describe the model."""
    try:
        content = parse_json(json.dumps(settings, allow_nan=False).encode(), "save_hf: settings")
    except (TypeError, ValueError) as error:
        raise ConversionError(f"save_hf: settings={settings!r} cannot be written as JSON: {error}.") from error
    if kind.decode(content)[0] != for_inference(config):
        raise ConversionError(
            f"save_hf: settings={settings!r} describe another model. Give only keys that do not change what the model "
            "computes."
        )


def _check_computed_buffers(model: Decoder) -> None:
    """Raise ConversionError unless the model's buffers have the values that a loaded model computes for them."""
    leaves = named_leaves(model)
    for path, buffer in computed_buffers(abstract(model.config, **vars(model.execution))).items():
        if eqx.is_array(leaves[path]) and not jnp.array_equal(leaves[path], buffer):
            raise ConversionError(
                f"save_hf: {path} differs from the value that follows from the configuration. A checkpoint does not "
                "store it, so the exported model would differ. Restore the value."
            )


def _learned_tensors(model: Decoder, kind: Family, dtype: np.dtype) -> dict[str, tuple[TensorMaker, int]]:
    """Return the tensors that contain the model's weights: by name, a function that makes the tensor, and its
    approximate size in bytes.
    """
    leaves = named_leaves(model)
    quantized = quantized_weights(model)
    mappings = kind.bind(plain_shapes(model))
    plain = {path: mapping for path, mapping in mappings.items() if path not in quantized}
    sizes = {name: math.prod(mapping.shape) * dtype.itemsize for mapping in plain.values() for name in mapping.names}
    tensors = {name: (make, sizes[name]) for name, make in tensor_makers(leaves, plain, dtype).items()}
    parts = tensor_makers(leaves, all_part_mappings(quantized, whole_weights(model)[0], mappings))
    return tensors | quantized_tensor_makers(quantized, mappings, parts)


def _zero_tensors(model: Decoder, kind: Family, dtype: np.dtype) -> dict[str, tuple[TensorMaker, int]]:
    """Return the family's `zero_tensors`, filled with zeros, in the form of `_learned_tensors`."""
    shapes = kind.zero_tensors(model.config)
    return {
        name: (functools.partial(np.zeros, shape, dtype), math.prod(shape) * dtype.itemsize)
        for name, shape in shapes.items()
    }


def _source_tensors(
    model: Decoder, kind: Family, tensors: Mapping[str, Any], zeros: Mapping[str, Any]
) -> dict[str, tuple[TensorMaker, int]]:
    """Return the tensors that are copied from the checkpoint from which the model was loaded, as `_learned_tensors`.

    These are the tensors in `zeros`, and the family's `kept_tensors` in the modules of `tensors`.
    """
    origin = model.origin
    if not (zeros or kind.kept_tensors) or origin is None or origin.family != kind.model_type:
        return {}
    if origin.directory is None:
        return {}
    files = Path(origin.directory, "model.safetensors"), Path(origin.directory, "model.safetensors.index.json")
    if not any(file.exists() for file in files):
        return {}
    split_names = [name.split(".") for name in tensors]
    modules = {".".join(parts[:end]) for parts in split_names for end in range(len(parts))}

    def is_copied(name: str) -> bool:
        is_kept = re.fullmatch(kind.kept_tensors, name) is not None and name not in tensors
        return name in zeros or (is_kept and name.rpartition(".")[0] in modules)

    stored = stored_tensors(Directory(origin.directory))
    return {name: (tensor.read_all, math.prod(tensor.shape) * 4) for name, tensor in stored.items() if is_copied(name)}


def _write_tensors(folder: Path | None, tensors: Mapping[str, tuple[TensorMaker, int]], shard_bytes: int) -> None:
    """Write all tensors. The memory contains the tensors of one file at a time.

    `folder`: None: only take part in gathering the tensors, without writing.
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
        # The other processes wait here for the disk, because a collective operation would time out.
        all_gather_json("written")
    if folder is not None and len(shards) > 1:
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        write_json(folder / "model.safetensors.index.json", content, sort_keys=True)


def tensor_makers(
    leaves: Mapping[str, Any], mappings: Mapping[str, WeightMapping], dtype: np.dtype | None = None
) -> dict[str, TensorMaker]:
    """Return the functions that make the tensors of a checkpoint, by name.

    **Arguments:**

    - `leaves`: arrays by path.
    - `mappings`: mappings from these arrays to tensors, by path.
    - `dtype`: dtype of the tensors; None: the dtype of each array.
    """
    sources: dict[str, dict[int, tuple[WeightMapping, Any, tuple[int, ...]]]] = {}
    for path, mapping in mappings.items():
        for layer in itertools.product(*map(range, mapping.stack)):
            section_index = 0 if mapping.section is None else mapping.section.index
            sources.setdefault(mapping.name(layer), {})[section_index] = (mapping, leaves[path], layer)
    return {name: functools.partial(_make_tensor, sections, dtype) for name, sections in sources.items()}


def _make_tensor(
    sections: Mapping[int, tuple[WeightMapping, Any, tuple[int, ...]]], dtype: np.dtype | None
) -> np.ndarray | None:
    """Make a tensor of a checkpoint from the weights that share it; return None in all processes but the first."""
    mapping, leaf, _ = sections[0]
    if jnp.issubdtype(leaf.dtype, jnp.integer) and dtype is not None:
        dtype = np.dtype(np.int64)  # PyTorch's dtype of integers
    tensor = np.empty(mapping.shape, leaf.dtype if dtype is None else dtype) if jax.process_index() == 0 else None
    for _, (mapping, leaf, layer) in sorted(sections.items()):
        section = tensor if tensor is None or mapping.section is None else mapping.section.of(tensor)
        # If possible, these are views with our axes, so that pieces are written into the tensor directly.
        unfolded = None if section is None else section.reshape(mapping.own_shape)
        sizes = einops_sizes(mapping, mapping.sizes)
        target = None if unfolded is None else rearrange(unfolded, mapping.pattern, **sizes)
        for index, piece in pieces(leaf, layer):
            if target is not None:
                copy_in_pieces(target[(*index, ...)], piece)
        if section is not None and unfolded is not None and not np.may_share_memory(unfolded, section):
            section[...] = unfolded.reshape(section.shape)
    return tensor


def _card(name: str, model: Decoder, family: Family, dtype: np.dtype) -> str:
    config = model.config
    count = sum(leaf.size for leaf in stored_leaves(plain_shapes(model)).values())
    return f"""---
library_name: transformers
pipeline_tag: {"text-generation" if family.text is None else "image-text-to-text"}
tags: [{family.model_type}, eqx_decoders]
---

# {name}

{family.architecture}: {count:,} weights in {dtype.name}, {len(config.blocks)} layers of \
{config.embed_dim} features, {config.vocab_size} token ids. \
Exported by eqx_decoders.

```python
model = transformers.{family.auto_class}.from_pretrained("{name}")
model = eqx_decoders.load_hf("{name}")
```
"""


def save_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write a safetensors file."""
    if any(x.dtype == jnp.float8_e4m3fn for x in tensors.values()):
        _save_with_fp8(tensors, path)
        return
    path.touch()
    mode = path.stat().st_mode  # safetensors writes files that only their owner can read, against the umask
    import_safetensors().save_file(tensors, path, metadata={"format": "pt"})  # transformers 4 requires this value
    path.chmod(mode)


def _save_with_fp8(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Write a safetensors file with FP8 tensors, which the safetensors package does not write from NumPy arrays."""
    dtype_names = {name: dtype for dtype, name in FLOATS.items()} | _QUANTIZED_DTYPES
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    end = 0
    for name in names:
        x = tensors[name]
        start, end = end, end + x.nbytes
        header[name] = {"dtype": dtype_names[x.dtype.name], "shape": list(x.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            file.write(np.ascontiguousarray(tensors[name]).view(np.uint8).data)


def import_safetensors() -> Any:
    """Import the module that writes safetensors files. Raises MissingPackage."""
    try:
        import safetensors.numpy as module
    except ImportError as error:
        raise missing_package("safetensors", "hf") from error
    return module
