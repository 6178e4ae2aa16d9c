"""Adapter directories of PEFT, read and written: `adapter_config.json` and `adapter_model.safetensors`, without PEFT.

PEFT keeps a pair as two matrices beside a module's weight, `lora_A` [r, in] and `lora_B` [out, r]. Which dimensions
are in and out, and how ours are folded into them, follows from the family's table of weights.
"""

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from einops import rearrange
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from eqx_decoders.axes import axes, named_leaves, product_axes, replaced
from eqx_decoders.decoder import Decoder
from eqx_decoders.errors import ConversionError, check, need_extra
from eqx_decoders.families.family import Bound
from eqx_decoders.families.fields import Fields
from eqx_decoders.io.directory import Directory, StoredTensor, check_dtypes, stored_tensors
from eqx_decoders.io.export import export_config
from eqx_decoders.numerics import LowRank, low_rank_weights


CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _WEIGHT = "base_model.model.", ".weight"

# Keys that don't change what a loaded adapter computes, each with the reason.
HARMLESS: dict[str, str] = {
    **dict.fromkeys(("base_model_name_or_path", "revision", "auto_mapping", "peft_version"), "where it came from"),
    **dict.fromkeys(("task_type", "inference_mode"), "how PEFT wraps the model"),
    **dict.fromkeys(("target_modules", "exclude_modules"), "the names of the tensors say which modules have a pair"),
    **dict.fromkeys(("lora_dropout", "eva_config"), "of training only"),
    **dict.fromkeys(("megatron_core", "qalora_group_size"), "a setting of what must be off"),
    "fan_in_fan_out": "how the frozen weight is stored; lora_A and lora_B never are",
    "runtime_config": "where PEFT keeps weights while it runs",
    "ensure_weight_tying": "about embeddings, which cannot have a pair here",
}

# Keys whose effect does not exist here, with the values that switch them off (null always does).
OFF: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # the others change the frozen weights
    **dict.fromkeys(("use_dora", "use_qalora", "use_bdlora", "lora_bias"), (False,)),
    **dict.fromkeys(("modules_to_save", "layers_to_transform", "layers_pattern", "layer_replication"), ([],)),
    **dict.fromkeys(("trainable_token_indices", "target_parameters", "alora_invocation_tokens"), ([],)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "loftq_config"), ({},)),
    **dict.fromkeys(("megatron_config", "corda_config", "lora_ga_config"), ()),
    **dict.fromkeys(("arrow_config", "kasa_config", "monteclora_config", "velora_config"), ()),
}


def load_peft(model: Decoder, directory: str | Path, *, dtype: DTypeLike | None = None) -> Decoder:
    """The model with the pairs of a PEFT adapter beside its weights, each born on its devices.

    **Arguments:**

    - `model`: the adapter's base, without pairs.
    - `directory`: with `adapter_config.json` and `adapter_model.safetensors`.
    - `dtype`: of the pairs; None for that in which the model keeps its weights.

    Raises ConversionError where the adapter is of another model, is not plain LoRA, covers a stack of equal layers only
    in part, or says anything that is not understood.
    """
    folder, present = Directory(directory), low_rank_weights(model)
    check(not present, "load_peft: the model has low-rank pairs already. Call merge_lora first.", ConversionError)
    rank, scale = _read_config(Fields(folder.json(CONFIG), CONFIG))
    tensors = stored_tensors(folder, TENSORS)
    check_dtypes(tensors)
    places = {path: place for path, place in _places(model).items() if place.tensors & tensors.keys()}
    _compare(folder, tensors, places, rank)
    kept = np.dtype(model.execution.precision.params if dtype is None else dtype)
    leaves, nodes = named_leaves(model), {}
    for path, place in places.items():
        pair = {name: factor.load(tensors, kept) for name, factor in place.factors.items()}
        nodes[path] = LowRank(base=leaves[path], scale=scale, **pair)
    target = replaced(model, nodes)
    shardings = named_leaves(model.execution.layout.shardings(target))
    pairs = {name: leaf for name, leaf in named_leaves(target).items() if isinstance(leaf, np.ndarray)}
    return replaced(target, {name: _placed(leaf, shardings[name]) for name, leaf in pairs.items()})


def save_peft(model: Decoder, directory: str | Path, *, base_model: str = "") -> None:
    """Write the pairs of a model as a directory that `PeftModel.from_pretrained` opens, and `load_peft`.

    **Arguments:**

    - `model`: with pairs of one rank and one scale, of a family that Hugging Face knows.
    - `directory`: a new or empty one; it appears whole or not at all.
    - `base_model`: name or directory of the base, for PEFT's automatic classes.

    Raises ConversionError where there is no pair, or one that PEFT has no name for. In a run of several processes all
    of them must call it; the first one writes.
    """
    folder, nodes = Path(directory).absolute(), low_rank_weights(model)
    free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    check(free, f"{folder} is not empty: give a new directory.", ConversionError)
    check(bool(nodes), "save_peft: the model has no low-rank pairs. Add them with add_lora.", ConversionError)
    kinds = {(node.lora_a.shape[-1], node.scale) for node in nodes.values()}
    check(len(kinds) == 1, f"save_peft: pairs of several (rank, scale): {sorted(kinds)}. Use one.", ConversionError)
    everywhere = _places(replaced(model, {path: node.base for path, node in nodes.items()}))
    lost = sorted(nodes.keys() - everywhere.keys())
    check(not lost, f"save_peft: PEFT has no module for {', '.join(lost)}: merge or remove its pair.", ConversionError)
    tensors: dict[str, np.ndarray] = {}
    for path, node in nodes.items():
        for name, factor in everywhere[path].factors.items():
            tensors |= factor.stored(_gathered(getattr(node, name)))
    if jax.process_index() == 0:
        _write(folder, _config(*kinds.pop(), nodes, everywhere, base_model), tensors)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("save_peft")


@dataclasses.dataclass(frozen=True)
class _Factor:
    """Where one factor of a weight is in an adapter.

    **Arguments:**

    - `names`: the tensor of each layer of a stacked weight; one for another.
    - `stacked`: whether ours has a leading `layers` axis.
    - `theirs`, `ours`: the dimensions there and here, with `rank` among them.
    - `sizes`: of their words.
    """

    names: tuple[str, ...]
    stacked: bool
    theirs: tuple[str, str]
    ours: tuple[str, ...]
    sizes: Mapping[str, int]

    def shape(self, rank: int) -> tuple[int, ...]:
        """The shape of each tensor."""
        return tuple(rank if words == "rank" else math.prod(self.sizes.values()) for words in self.theirs)

    def load(self, tensors: Mapping[str, StoredTensor], dtype: np.dtype) -> np.ndarray:
        pattern, whole = f"{' '.join(self.theirs)} -> {' '.join(self.ours)}", (slice(None), slice(None))
        layers = [rearrange(tensors[name].read(whole), pattern, **self.sizes).astype(dtype) for name in self.names]
        return np.stack(layers) if self.stacked else layers[0]

    def stored(self, factor: np.ndarray) -> dict[str, np.ndarray]:
        pattern = f"{' '.join(self.ours)} -> {' '.join(self.theirs)}"
        layers = factor if self.stacked else [factor]
        return {
            name: np.ascontiguousarray(rearrange(layer, pattern, **self.sizes))
            for name, layer in zip(self.names, layers, strict=True)
        }


@dataclasses.dataclass(frozen=True)
class _Place:
    """The modules of one weight, and where both factors are; `inputs_first`: the weight is kept as `[in, out]`."""

    modules: tuple[str, ...]
    inputs_first: bool
    factors: Mapping[str, _Factor]

    @property
    def tensors(self) -> set[str]:
        return {name for factor in self.factors.values() for name in factor.names}


def _places(model: Decoder) -> dict[str, _Place]:
    """For the path of every weight that PEFT can adapt: a matrix of a block that is one module's weight."""
    family, _ = export_config(model)
    words, found = axes(model), {}
    for path, row in family.bind(model).items():
        split, names = product_axes(words[path]), row.names
        if split is not None and all(name.endswith(_WEIGHT) for name in names):
            inside, outside = row.words[: len(split[0])], row.words[len(split[0]) :]
            if {frozenset(inside), frozenset(outside)} == set(map(frozenset, row.groups)):
                found[path] = _place(row, inside, outside)
    return found


def _place(row: Bound, inside: tuple[str, ...], outside: tuple[str, ...]) -> _Place:
    first, second = row.groups
    inputs_first = set(first) == set(inside)
    into, out_of = (" ".join(group) for group in ((first, second) if inputs_first else (second, first)))
    modules = tuple(name.removesuffix(_WEIGHT) for name in row.names)

    def factor(name: str, theirs: tuple[str, str], ours: tuple[str, ...]) -> _Factor:
        names = tuple(f"{_PREFIX}{module}.{name}{_WEIGHT}" for module in modules)
        return _Factor(names, row.stacked, theirs, ours, {word: row.sizes[word] for word in ours if word != "rank"})

    factors = {
        "lora_a": factor("lora_A", ("rank", f"({into})"), (*inside, "rank")),
        "lora_b": factor("lora_B", (f"({out_of})", "rank"), ("rank", *outside)),
    }
    return _Place(modules, inputs_first, factors)


def _read_config(fields: Fields) -> tuple[int, float]:
    """The rank and the scale; everything else must be off or without effect."""
    fields.word("peft_type", {"LORA": True})
    rank, alpha = fields.integer("r"), fields.number("lora_alpha")
    stabilized = fields.flag("use_rslora", False)
    for key, allowed in OFF.items():
        fields.allow_only(key, *allowed)
    fields.finish(HARMLESS)
    return rank, alpha / (math.sqrt(rank) if stabilized else rank)


def _compare(folder: Directory, tensors: Mapping[str, StoredTensor], places: Mapping[str, _Place], rank: int) -> None:
    """Refuse an adapter whose tensors are not whole pairs of the model's weights, and list them."""
    factors = [factor for place in places.values() for factor in place.factors.values()]
    wanted = {name: factor.shape(rank) for factor in factors for name in factor.names}
    wrong = [f"{name} is missing" for name in sorted(wanted.keys() - tensors.keys())]
    wrong += [f"{name} belongs to no matrix of the model's blocks" for name in sorted(tensors.keys() - wanted.keys())]
    wrong += [
        f"{name} has the shape {tensors[name].shape}, but {shape} follows from the model and r={rank}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    rule = "An adapter must hold both factors of a weight in every layer of a stack of equal layers, and nothing else"
    told = f"{folder.path}: {len(wrong)} tensors are not as expected. {rule}:\n  " + "\n  ".join(wrong)
    check(not wrong, told, ConversionError)
    check(bool(wanted), f"{folder.path / TENSORS} holds no pair: there is nothing to load.", ConversionError)


def _placed(factor: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback(factor.shape, sharding, lambda index: factor[index])


def _gathered(factor: jax.Array) -> np.ndarray:
    return np.asarray(factor if factor.is_fully_addressable else multihost_utils.process_allgather(factor, tiled=True))


def _config(
    rank: int, scale: float, adapted: Iterable[str], everywhere: Mapping[str, _Place], base_model: str
) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    alpha, stabilized = _alpha(rank, scale)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": stabilized,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(everywhere[path].inputs_first for path in adapted),
        "target_modules": _target_modules(adapted, everywhere),
        "inference_mode": True,
    }


def _alpha(rank: int, scale: float) -> tuple[int | float, bool]:
    """A `lora_alpha`, and whether `use_rslora` is on, that give this scale: a whole number where there is one."""
    for root, stabilized in ((rank, False), (math.sqrt(rank), True)):
        if round(scale * root) / root == scale:
            return round(scale * root), stabilized
    return scale * rank, False


def _target_modules(adapted: Iterable[str], everywhere: Mapping[str, _Place]) -> list[str]:
    """The last part of a module's name if all modules of this name have a pair, else its full name."""
    wanted = {module for path in adapted for module in everywhere[path].modules}
    plain = {module for place in everywhere.values() for module in place.modules} - wanted
    lacking = {module.rpartition(".")[2] for module in plain}
    names = {module: module.rpartition(".")[2] for module in wanted}
    return sorted({module if last in lacking else last for module, last in names.items()})


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Write into a directory beside `folder`, which then takes its name."""
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise need_extra("safetensors", "hf") from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    partial.chmod(0o755)
    (partial / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(tensors, partial / TENSORS, metadata={"format": "pt"})
    if folder.exists():
        folder.rmdir()
    os.replace(partial, folder)
