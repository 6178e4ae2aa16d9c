"""GGUF file in the place of a Hugging Face directory: its settings, and its tensors under a family's names."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError, check
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.io.gguf import gguf_tensors as views
from eqx_decoders.io.gguf.gguf_architectures import find_architecture
from eqx_decoders.io.gguf.gguf_header import Description, GGUFFile, exact, gguf_package, read_gguf
from eqx_decoders.io.gguf.gguf_table import FACTORS, Architecture, Found
from eqx_decoders.io.gguf.gguf_tokenizer import stop_ids, token_ids
from eqx_decoders.io.huggingface.directory import Directory, StoredTensor


_TABLE = "token_embd.weight"
_MOST_FACTORS = 4096
_MOST_EXPERTS = 4096
_LAYER = re.compile(r"blk\.(\d+)\.")


class GGUFDirectory(Directory):
    """GGUF file that is read like a directory: with a `config.json`, a `generation_config.json` and tensors."""

    def __init__(self, path: str | Path):
        self.header = read_gguf(path)
        self.path = self.header.path
        self.architecture, self.settings = _settings(self.header)

    def has(self, name: str) -> bool:
        """Return whether a file of this name stands for a part of the GGUF file."""
        return name in ("config.json", "generation_config.json")

    def file(self, name: str) -> Path:
        """Return the GGUF file: it has no others."""
        return self.path

    def json(self, name: str, limit: int = 0) -> dict[str, Any]:
        """Return what the file `name` would hold."""
        if name == "config.json":
            return dict(self.settings) | token_ids(self.header.metadata)
        return {"eos_token_id": stop_ids(self.header.metadata)}

    def tensors(self) -> dict[str, StoredTensor]:
        """Return the tensors under the names of the family."""
        names = tensor_names(self.architecture, self.settings)
        found = self._joined()
        parts = {part for pair in self.architecture.joined.values() for part in pair}
        for name, tensor in self.header.tensors.items():
            if name not in FACTORS and _LAYER.sub("blk.{layer}.", name) not in parts:
                found |= self._views(name, tensor, names)
        return found

    def _joined(self) -> dict[str, StoredTensor]:
        """Return the tensors that hold two of the file's."""
        found: dict[str, StoredTensor] = {}
        for name, (one, other) in self.architecture.joined.items():
            for layer in range(self.settings["num_hidden_layers"]):
                first, second = (self.header.tensors.get(each.format(layer=layer)) for each in (one, other))
                if first is None or second is None or (first.shape, first.kind) != (second.shape, second.kind):
                    names = f"{one.format(layer=layer)} and {other.format(layer=layer)}"
                    raise ConversionError(f"{self.path}: {names} must both be there, of one type and shape.")
                seen = views.decoded(views.in_turn(views.raw(first), views.raw(second), 1))
                seen = views.exchanged(seen) if one.endswith(self.architecture.transposed) else seen
                found[name.format(layer=layer)] = dataclasses.replace(seen, name=name.format(layer=layer))
        return found

    def _views(self, name: str, tensor: Description, names: dict[str, str]) -> dict[str, StoredTensor]:
        """Return a tensor under the family's name; that of all experts of a layer under one name each."""
        row, layer = self.architecture, _LAYER.match(name)
        template = names.get(_LAYER.sub("blk.{layer}.", name))
        stored = views.raw(tensor)
        if template is None:
            return {name: views.decoded(stored)}
        number = "" if layer is None else int(layer[1])
        if "{expert}" in template and len(tensor.shape) == 3:
            few = tensor.shape[0] <= _MOST_EXPERTS
            check(
                few, f"{self.path}: {name} has {tensor.shape[0]:,} experts: at most {_MOST_EXPERTS}.", ConversionError
            )
            experts = (views.decoded(views.item(stored, index)) for index in range(tensor.shape[0]))
            return {template.format(layer=number, expert=index): each for index, each in enumerate(experts)}
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        part = name.split(".")[-2]
        if row.in_pairs and part in heads:
            count = self.settings.get(heads[part]) or self.settings["num_attention_heads"]
            whole = type(count) is int and count > 0 and tensor.shape[0] % (2 * count) == 0
            check(whole, f"{self.path}: {name} has {tensor.shape[0]} rows: no {count} heads of pairs.", ConversionError)
            stored = views.rows_of_heads(stored, count)
        seen = views.decoded(stored)
        if row.plus_one and name.endswith("norm.weight"):
            seen = views.minus_one(seen)
        if name.endswith(row.transposed) and len(seen.shape) in (2, 3):
            seen = views.exchanged(seen)
        axis = next((axis for end, axis in row.added.items() if name.endswith(end)), None)
        if axis is not None and len(seen.shape) == axis + 1:
            seen = views.with_axis(seen, axis)
        return {template.format(layer=number): dataclasses.replace(seen, name=template.format(layer=number))}


def tensor_names(architecture: Architecture, settings: dict[str, Any]) -> dict[str, str]:
    """Return the family's names of llama.cpp's tensors, with `{layer}` in both where they have a layer."""
    package, family = gguf_package(), FAMILIES[architecture.family]
    kinds = {name: kind for kind, name in package.MODEL_ARCH_NAMES.items()}
    mapping = package.get_tensor_name_map(kinds[architecture.name], 1)
    names: dict[str, str] = {}
    for name in _family_names(family.weights):
        plain = name.replace("{layer}", "0").replace(".{expert}", "")
        theirs = mapping.get_name(plain, try_suffixes=(".weight", ".bias"))
        if theirs is not None:
            names.setdefault(_LAYER.sub("blk.{layer}.", theirs), name)
    return names | dict(architecture.names)


def _family_names(weights: Any) -> Iterator[str]:
    yield from dict.fromkeys(weight.name for weight in weights if not weight.is_mtp and not weight.owner)


def _settings(file: GGUFFile) -> tuple[Architecture, dict[str, Any]]:
    """Return the architecture of a file, and the content of a `config.json`. Raises ConversionError."""
    where = f"{file.path}: {file.architecture[:40]}"
    begin = f"{file.architecture}."
    own = {name.removeprefix(begin): value for name, value in file.metadata.items() if name.startswith(begin)}
    found = Found(Fields(own, where), file.tensors.keys(), _factors(file))
    row = find_architecture(file.architecture, found)
    table = file.tensors.get(_TABLE)
    if table is None or len(table.shape) != 2:
        raise ConversionError(f"{file.path}: the matrix {_TABLE} is missing.")
    return row, row.settings(found, table.shape[0])


def _factors(file: GGUFFile) -> dict[str, tuple[float, ...]]:
    """Read the tensors that stand for settings: rotary factors."""
    factors = {}
    for name in FACTORS:
        tensor = file.tensors.get(name)
        if tensor is None:
            continue
        valid = tensor.kind == "F32" and len(tensor.shape) == 1 and tensor.shape[0] <= _MOST_FACTORS
        rule = f"must be a vector of F32, at most {_MOST_FACTORS} numbers"
        check(valid, f"{file.path}: {name} is {tensor.kind} of shape {tensor.shape}, but {rule}.", ConversionError)
        numbers = views.raw(tensor).read_all()
        good = bool(((numbers > 0) & (numbers < 1e30)).all())
        check(good, f"{file.path}: {name} must hold numbers above 0.", ConversionError)
        factors[name] = tuple(map(exact, numbers.tolist()))
    return factors
