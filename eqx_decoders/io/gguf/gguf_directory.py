"""GGUF file that is read like a Hugging Face directory: settings as `config.json`, tensors by the names of a family."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.io.gguf import gguf_tensors as views
from eqx_decoders.io.gguf.gguf_architectures import find_architecture
from eqx_decoders.io.gguf.gguf_header import Description, GGUFFile, gguf_package, read_gguf, shortest_float
from eqx_decoders.io.gguf.gguf_table import FACTORS, Architecture, FileMetadata
from eqx_decoders.io.gguf.gguf_tokenizer import stop_ids, token_ids
from eqx_decoders.io.huggingface.directory import Directory, StoredTensor


_TABLE = "token_embd.weight"
_MAX_FACTORS = 4096
_MAX_EXPERTS = 4096
_LAYER = re.compile(r"blk\.(\d+)\.")


class GGUFDirectory(Directory):
    """GGUF file that is read like a directory: with a `config.json`, a `generation_config.json` and tensors."""

    def __init__(self, path: str | Path):
        self.header = read_gguf(path)
        self.path = self.header.path
        self.architecture, self.settings = _settings(self.header)

    def has(self, name: str) -> bool:
        """Return whether `json` returns content for this file name."""
        return name in ("config.json", "generation_config.json")

    def file(self, name: str) -> Path:
        """Return the path of the GGUF file, for any name."""
        return self.path

    def json(self, name: str, max_bytes: int = 0) -> dict[str, Any]:
        """Return the content that the file `name` of a Hugging Face directory would have."""
        if name == "config.json":
            return dict(self.settings) | token_ids(self.header.metadata)
        return {"eos_token_id": stop_ids(self.header.metadata)}

    def tensors(self) -> dict[str, StoredTensor]:
        """Return the tensors by the names of the family."""
        names = tensor_names(self.architecture)
        tensors = self._interleaved_tensors()
        parts = {part for pair in self.architecture.interleaved_tensors.values() for part in pair}
        for name, tensor in self.header.tensors.items():
            if name not in FACTORS and _LAYER.sub("blk.{layer}.", name) not in parts:
                tensors |= self._views(name, tensor, names)
        return tensors

    def _interleaved_tensors(self) -> dict[str, StoredTensor]:
        """Return the family's tensors that llama.cpp stores in two tensors."""
        tensors: dict[str, StoredTensor] = {}
        for template, (first_template, second_template) in self.architecture.interleaved_tensors.items():
            for layer in range(self.settings["num_hidden_layers"]):
                first_name = first_template.format(layer=layer)
                second_name = second_template.format(layer=layer)
                first = self.header.tensors.get(first_name)
                second = self.header.tensors.get(second_name)
                if (
                    first is None
                    or second is None
                    or (first.shape, first.ggml_type) != (second.shape, second.ggml_type)
                ):
                    raise ConversionError(
                        f"{self.path} must have {first_name} and {second_name}, with the same type and shape. Download "
                        "the file again."
                    )
                view = views.dequantized(views.interleaved(views.stored_view(first), views.stored_view(second), 1))
                if first_template.endswith(self.architecture.transposed):
                    view = views.transposed_blocks(view)
                name = template.format(layer=layer)
                tensors[name] = dataclasses.replace(view, name=name)
        return tensors

    def _views(self, name: str, tensor: Description, names: dict[str, str]) -> dict[str, StoredTensor]:
        """Return a tensor by the family's name, or the tensors of all experts of a layer."""
        architecture = self.architecture
        template = names.get(_LAYER.sub("blk.{layer}.", name))
        stored = views.stored_view(tensor)
        if template is None:
            return {name: views.dequantized(stored)}
        match = _LAYER.match(name)
        layer = "" if match is None else int(match[1])
        if "{expert}" in template and len(tensor.shape) == 3:
            num_experts = tensor.shape[0]
            if num_experts > _MAX_EXPERTS:
                raise ConversionError(
                    f"{self.path}: {name} has {num_experts:,} experts, but at most {_MAX_EXPERTS} are supported."
                )
            return {
                template.format(layer=layer, expert=expert): views.dequantized(views.indexed(stored, expert))
                for expert in range(num_experts)
            }
        head_keys = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        part = name.split(".")[-2]
        if architecture.interleaved_rope and part in head_keys:
            heads = self.settings.get(head_keys[part]) or self.settings["num_attention_heads"]
            if type(heads) is not int or heads < 1 or tensor.shape[0] % (2 * heads):
                raise ConversionError(
                    f"{self.path}: {name} has {tensor.shape[0]} rows, which {heads} heads of an even size do not "
                    "divide. Download the file again."
                )
            stored = views.head_halves(stored, heads)
        view = views.dequantized(stored)
        if architecture.norms_plus_one and name.endswith("norm.weight"):
            view = views.minus_one(view)
        if name.endswith(architecture.transposed) and len(view.shape) in (2, 3):
            view = views.transposed_blocks(view)
        axis = next((axis for ending, axis in architecture.extra_axes.items() if name.endswith(ending)), None)
        if axis is not None and len(view.shape) == axis + 1:
            view = views.with_axis(view, axis)
        family_name = template.format(layer=layer)
        return {family_name: dataclasses.replace(view, name=family_name)}


def tensor_names(architecture: Architecture) -> dict[str, str]:
    """Return the family's names of tensors by llama.cpp's names, both with `{layer}` for the index of a layer."""
    package = gguf_package()
    architecture_ids = {name: architecture_id for architecture_id, name in package.MODEL_ARCH_NAMES.items()}
    mapping = package.get_tensor_name_map(architecture_ids[architecture.name], 1)
    weights = FAMILIES[architecture.family].weights
    names: dict[str, str] = {}
    for name in dict.fromkeys(weight.name for weight in weights if not weight.is_mtp and not weight.owner):
        first_name = name.replace("{layer}", "0").replace(".{expert}", "")
        gguf_name = mapping.get_name(first_name, try_suffixes=(".weight", ".bias"))
        if gguf_name is not None:
            names.setdefault(_LAYER.sub("blk.{layer}.", gguf_name), name)
    return names | dict(architecture.names)


def _settings(file: GGUFFile) -> tuple[Architecture, dict[str, Any]]:
    """Return the architecture of a file, and the content of a `config.json`. Raises ConversionError."""
    where = f"{file.path}: {file.architecture[:40]}"
    prefix = f"{file.architecture}."
    fields = {name.removeprefix(prefix): value for name, value in file.metadata.items() if name.startswith(prefix)}
    metadata = FileMetadata(Fields(fields, where), file.tensors.keys(), _read_factors(file))
    architecture = find_architecture(file.architecture, metadata)
    table = file.tensors.get(_TABLE)
    if table is None or len(table.shape) != 2:
        raise ConversionError(f"{file.path} has no matrix {_TABLE}, the embedding. Download the file again.")
    return architecture, architecture.settings(metadata, table.shape[0])


def _read_factors(file: GGUFFile) -> dict[str, tuple[float, ...]]:
    """Read the tensors that are settings: factors of RoPE."""
    factors = {}
    for name in FACTORS:
        tensor = file.tensors.get(name)
        if tensor is None:
            continue
        if tensor.ggml_type != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_FACTORS:
            raise ConversionError(
                f"{file.path}: {name} is {tensor.ggml_type} of shape {tensor.shape}, but must be a vector of at most "
                f"{_MAX_FACTORS} F32 numbers. Download the file again."
            )
        values = views.stored_view(tensor).read_all()
        if not ((values > 0) & (values < 1e30)).all():
            raise ConversionError(f"{file.path}: {name} must contain numbers above 0. Download the file again.")
        factors[name] = tuple(map(shortest_float, values.tolist()))
    return factors
