"""Hugging Face directories, written: what `from_pretrained` of transformers opens, and `load_hf`."""

import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from eqx_decoders.axes import named_leaves
from eqx_decoders.create import count_parameters
from eqx_decoders.decoder import Decoder, DecoderConfig, Origin
from eqx_decoders.errors import ConversionError, check, check_integer, check_word, need_extra
from eqx_decoders.families import FAMILIES
from eqx_decoders.families.family import Bound, Family, for_inference
from eqx_decoders.io.directory import FLOATS, Directory, parse_json
from eqx_decoders.io.files import write_json
from eqx_decoders.io.hub import TOKENIZER_FILES
from eqx_decoders.io.huggingface import copy_in_pieces, given_sizes


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
    folder = Path(directory).absolute()
    free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    check(free, f"{folder} is not empty: give a new directory.", ConversionError)
    kind, config = export_config(model, family)
    bound = kind.bind(model)
    origin = model.origin or Origin(family=kind.model_type)
    # explicit nulls: the classes of transformers have token ids of their own as defaults
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = ids | json.loads(origin.settings) | config | dict(settings or {})
    stored = jnp.dtype(dtype) if dtype is not None else named_leaves(model)["embedding.table"].dtype
    check_word("save_hf: dtype", stored.name, FLOATS.values(), ConversionError)
    config |= {"dtype": stored.name, "torch_dtype": stored.name}
    _check_settings(kind, config, model.config)
    writes = jax.process_index() == 0
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent)) if writes else folder
    if writes:
        partial.chmod(0o755)
    copies = kind.copied(model.config)
    _write_tensors(partial, named_leaves(model), bound, copies, stored, shard_bytes, writes)
    if writes:
        write_json(partial / "config.json", config, sort_keys=True)
        copy_tokenizer(origin.directory if tokenizer is None else tokenizer, partial)
        if not (partial / "generation_config.json").exists():
            known = {key: config[key] for key in ids if config[key] is not None}
            write_json(partial / "generation_config.json", known, sort_keys=True)
        (partial / "README.md").write_text(_card(folder.name, model, kind, stored))
        if folder.exists():
            folder.rmdir()
        os.replace(partial, folder)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("save_hf")


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
            refusals.append(str(error))
    raise ConversionError("No family of Hugging Face has this model.\n  " + "\n  ".join(refusals))


def _write_tensors(
    folder: Path,
    leaves: Mapping[str, Any],
    bound: Mapping[str, Bound],
    copies: Mapping[str, str],
    dtype: np.dtype,
    shard_bytes: int,
    writes: bool,
) -> None:
    """Write all tensors, holding those of one file at a time."""
    tensors = exported(leaves, bound, dtype)
    tensors |= {copy: tensors[name] for copy, name in copies.items() if name in tensors}
    sizes = {name: math.prod(row.shape) * dtype.itemsize for row in bound.values() for name in row.names}
    sizes |= {copy: sizes[name] for copy, name in copies.items() if name in sizes}
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
        one = len(shards) == 1
        file = "model.safetensors" if one else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        made = {name: tensors[name]() for name in shard}
        index |= dict.fromkeys(made, file)
        if writes:
            _save_file(made, folder / file)
    if writes and len(shards) > 1:
        total = {"total_size": sum(sizes.values())}
        write_json(folder / "model.safetensors.index.json", {"metadata": total, "weight_map": index}, sort_keys=True)


def exported(
    leaves: Mapping[str, Any], bound: Mapping[str, Bound], dtype: np.dtype | None = None
) -> dict[str, Callable[[], np.ndarray]]:
    """For the name of every tensor of a checkpoint a function that makes it; None keeps the dtype of the weight."""
    holders: dict[str, dict[int, tuple[Bound, str, tuple[int, ...]]]] = {}
    for path, row in bound.items():
        for place in itertools.product(*map(range, row.stack)):
            holders.setdefault(row.name(place), {})[row.part or 0] = (row, path, place)

    def make(parts):
        return lambda: _tensor([(row, leaves[path], place) for _, (row, path, place) in sorted(parts.items())], dtype)

    return {name: make(parts) for name, parts in holders.items()}


def _tensor(parts: list[tuple[Bound, Any, tuple[int, ...]]], dtype: np.dtype | None) -> np.ndarray:
    """One tensor of a checkpoint, on the host, from the weights that share it."""
    row = parts[0][0]
    found = [_on_host(leaf[place] if place else leaf) for _, leaf, place in parts]
    x = found[0] if row.part is None else np.stack(found)
    x = rearrange(x, row.backwards, **given_sizes(row, row.sizes))
    tensor = np.empty(x.shape, x.dtype if dtype is None else dtype)
    copy_in_pieces(tensor, x)
    return tensor


def _on_host(x: Any) -> np.ndarray:
    whole = not isinstance(x, jax.Array) or x.is_fully_addressable
    return np.asarray(x if whole else multihost_utils.process_allgather(x, tiled=True))


def _save_file(tensors: dict[str, np.ndarray], path: Path) -> None:
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise need_extra("safetensors", "hf") from error
    save_file(tensors, path, metadata={"format": "pt"})  # transformers 4 asks for this word


def copy_tokenizer(source: str | Path | None, folder: Path) -> None:
    """Copy the files of a tokenizer and the generation settings; nothing where there are none."""
    if source is None or not Path(source).is_dir():
        return
    directory = Directory(source)
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if directory.has(name):
            shutil.copyfile(directory.file(name), folder / name)


def _card(name: str, model: Decoder, family: Family, dtype: np.dtype) -> str:
    config = model.config
    rows = {
        "architecture": family.architecture,
        "weights": f"{count_parameters(config):,}, {dtype.name}",
        "layers": len(config.blocks),
        "features": config.embed_dim,
        "vocabulary": config.vocab_size,
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- {family.model_type}
- eqx_decoders
---

# {name}

Exported by [eqx_decoders](https://pypi.org/project/eqx_decoders/).

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}")
```

```python
import eqx_decoders as ed

model = ed.load_hf("{name}")
```
"""
