"""Adapter directories of PEFT, loaded and saved without PEFT: `adapter_config.json` and `adapter_model.safetensors`.

PEFT adds two matrices to a module's weight, `lora_A` [r, in] and `lora_B` [out, r], here called its low-rank pair. The
family's table of weights says which of our dimensions are folded into in and out.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import numpy as np
from einops import rearrange
from jax.typing import DTypeLike

from eqx_decoders.errors import ConversionError, check
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.weight_rows import WeightMapping
from eqx_decoders.io.atomic_files import write_json
from eqx_decoders.io.huggingface.directory import Directory, StoredTensor, check_dtypes, check_tensors, stored_tensors
from eqx_decoders.io.huggingface.export_config import export_config
from eqx_decoders.io.huggingface.export_directory import exported_directory
from eqx_decoders.io.huggingface.gather import on_first_host
from eqx_decoders.io.huggingface.safetensors_files import safetensors, save_tensors
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.numerics.low_rank import LowRank, low_rank_weights
from eqx_decoders.numerics.quantized_weight import plain_shapes, whole_weights
from eqx_decoders.sharding.axes import axes, named_leaves, product_axes, replaced


CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _WEIGHT = "base_model.model.", ".weight"

# Keys that don't change what a loaded adapter computes, each with the reason.
IGNORED_PEFT_KEYS: dict[str, str] = {
    **dict.fromkeys(("base_model_name_or_path", "revision", "auto_mapping", "peft_version"), "where it came from"),
    **dict.fromkeys(("task_type", "inference_mode"), "how PEFT wraps the model"),
    **dict.fromkeys(("target_modules", "exclude_modules"), "the names of the tensors say which modules have a pair"),
    **dict.fromkeys(("lora_dropout", "eva_config"), "of training only"),
    **dict.fromkeys(("megatron_core", "qalora_group_size"), "a setting of what must be off"),
    "fan_in_fan_out": "how the frozen weight is stored; lora_A and lora_B never are",
    "runtime_config": "where PEFT keeps weights while it runs",
    "ensure_weight_tying": "about embeddings, which cannot have a pair here",
}

# Keys whose effect is not supported, with the values that switch them off (null always does).
UNSUPPORTED_KEYS: dict[str, tuple[Any, ...]] = {
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
    """Add the low-rank pairs of a PEFT adapter to a model's weights, each created on its devices.

    **Arguments:**

    - `model`: the adapter's base, without pairs.
    - `directory`: with `adapter_config.json` and `adapter_model.safetensors`.
    - `dtype`: of the pairs; None for the model's parameter dtype.

    Raises ConversionError where the adapter is of another model, is not plain LoRA, covers a stack of equal layers only
    in part, or has settings that are not understood.
    """
    folder, present = Directory(directory), low_rank_weights(model)
    check(not present, "load_peft: the model has low-rank pairs already. Call merge_lora first.", ConversionError)
    rank, scale = _read_config(Fields(folder.json(CONFIG), CONFIG))
    family, _ = export_config(model)
    tensors = {_module_name(family, name): tensor for name, tensor in stored_tensors(folder, TENSORS).items()}
    check_dtypes(tensors)
    weights = {path: weight for path, weight in _adaptable(model).items() if weight.tensors & tensors.keys()}
    factors = [factor for weight in weights.values() for factor in weight.factors.values()]
    check_tensors(
        folder.path,
        tensors,
        {name: factor.shape(rank) for factor in factors for name in factor.names},
        rule="An adapter must hold both factors of a weight in all layers of a stack of equal ones, and nothing else",
        owner="matrix of the model's blocks",
        source=f"the model and r={rank}",
    )
    check(bool(weights), f"{folder.path / TENSORS} holds no pair: there is nothing to load.", ConversionError)
    params = np.dtype(model.execution.precision.params if dtype is None else dtype)
    leaves, nodes = whole_weights(model)[1], {}
    for path, weight in weights.items():
        pair = {name: factor.load(tensors, params) for name, factor in weight.factors.items()}
        nodes[path] = LowRank(base=leaves[path], scale=scale, **pair)
    target = replaced(model, nodes)
    shardings = named_leaves(model.execution.layout.shardings(target))
    pairs = {name: leaf for name, leaf in named_leaves(target).items() if isinstance(leaf, np.ndarray)}
    return replaced(target, {name: _placed(leaf, shardings[name]) for name, leaf in pairs.items()})


def _placed(factor: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):  # uncommitted, like the arrays of `init`
        return jax.device_put(factor)
    return jax.make_array_from_callback(factor.shape, sharding, lambda index: factor[index])


def save_peft(model: Decoder, directory: str | Path, *, base_model: str = "") -> None:
    """Write the low-rank pairs of a model as a directory that `PeftModel.from_pretrained` and `load_peft` open.

    **Arguments:**

    - `model`: with pairs of one rank and one scale, of a family that Hugging Face knows.
    - `directory`: a new or empty one; it appears completely or not at all.
    - `base_model`: name or directory of the base, for PEFT's automatic classes.

    Raises ConversionError where there is no pair, or one that PEFT has no name for. In a run of several processes all
    of them must call it; the first one writes.
    """
    nodes, weights = adapter_plan(model)
    with exported_directory(directory) as folder:
        tensors: dict[str, np.ndarray] = {}
        for path, node in nodes.items():
            for name, factor in weights[path].factors.items():
                whole = on_first_host(getattr(node, name))
                tensors |= {} if whole is None else factor.stored(whole)
        if folder is not None:
            modules = _target_modules({module for path in nodes for module in weights[path].modules}, _modules(model))
            write_json(folder / CONFIG, _config(nodes, weights, modules, base_model), sort_keys=True)
            save_tensors(tensors, folder / TENSORS)


def adapter_plan(model: Decoder) -> tuple[dict[str, LowRank], dict[str, "_AdaptableWeight"]]:
    """Return the pairs of a model (of arrays or shapes), and the weights that PEFT can adapt, by their paths.

    Raises all errors that are known before `save_peft` writes anything.
    """
    safetensors()
    nodes = low_rank_weights(model)
    check(bool(nodes), "save_peft: the model has no low-rank pairs. Add them with add_lora.", ConversionError)
    kinds = {(node.lora_a.shape[-1], node.scale) for node in nodes.values()}
    check(len(kinds) == 1, f"save_peft: pairs of several (rank, scale): {sorted(kinds)}. Use one.", ConversionError)
    weights = _adaptable(replaced(model, {path: node.base for path, node in nodes.items()}))
    lost = sorted(nodes.keys() - weights.keys())
    check(not lost, f"save_peft: PEFT has no module for {', '.join(lost)}: merge or remove its pair.", ConversionError)
    return nodes, weights


@dataclasses.dataclass(frozen=True)
class _Factor:
    """Factor of a weight's pair in an adapter.

    **Arguments:**

    - `names`: its tensors, one for each layer of a stacked weight.
    - `stacked`: whether ours has a leading `layers` axis.
    - `theirs`, `ours`: einops patterns of a tensor there and of a layer here, with `rank` among the words.
    - `sizes`: of the words other than `rank`.
    """

    names: tuple[str, ...]
    stacked: bool
    theirs: str
    ours: str
    sizes: Mapping[str, int]

    def shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of each tensor."""
        features = math.prod(self.sizes.values())
        return (rank, features) if self.theirs.startswith("rank") else (features, rank)

    def load(self, tensors: Mapping[str, StoredTensor], dtype: np.dtype) -> np.ndarray:
        pattern = f"{self.theirs} -> {self.ours}"
        layers = [rearrange(tensors[name].read_all(), pattern, **self.sizes).astype(dtype) for name in self.names]
        return np.stack(layers) if self.stacked else layers[0]

    def stored(self, factor: np.ndarray) -> dict[str, np.ndarray]:
        layers = [
            np.ascontiguousarray(rearrange(layer, f"{self.ours} -> {self.theirs}", **self.sizes))
            for layer in (factor if self.stacked else [factor])
        ]
        return dict(zip(self.names, layers, strict=True))


@dataclasses.dataclass(frozen=True)
class _AdaptableWeight:
    """Weight that PEFT can adapt: its modules, its factors, and whether Hugging Face stores it as `[in, out]`."""

    modules: tuple[str, ...]
    inputs_first: bool
    factors: Mapping[str, _Factor]

    @property
    def tensors(self) -> set[str]:
        return {name for factor in self.factors.values() for name in factor.names}


def _module_name(family: Family, name: str) -> str:
    """Return the name of an adapter's tensor in present transformers; older ones used the names in the files."""
    if not name.startswith(_PREFIX):
        return name
    return _PREFIX + family.module_name(family.stored_name(name.removeprefix(_PREFIX)))


def _adaptable(model: Decoder) -> dict[str, _AdaptableWeight]:
    """Find the weights that PEFT can adapt, by their paths: matrices of blocks that are one module's weight."""
    model = plain_shapes(model)
    family, _ = export_config(model)
    words, weights = axes(model), {}
    for path, mapping in family.bind(model).items():
        split = product_axes(words[path])
        whole = (
            mapping.section is None
            and "experts" not in words[path]
            and all(name.endswith(_WEIGHT) for name in mapping.names)
        )
        if split is not None and whole:
            inputs, outputs = mapping.words[: len(split[0])], mapping.words[len(split[0]) :]
            if {frozenset(inputs), frozenset(outputs)} == set(map(frozenset, mapping.groups)):
                modules = tuple(family.module_name(name).removesuffix(_WEIGHT) for name in mapping.names)
                weights[path] = _adaptable_weight(mapping, modules, inputs, outputs)
    return weights


def _adaptable_weight(
    mapping: WeightMapping, modules: tuple[str, ...], inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> _AdaptableWeight:
    inputs_first = set(mapping.groups[0]) == set(inputs)
    first, second = (" ".join(group) for group in mapping.groups)
    their_inputs, their_outputs = (first, second) if inputs_first else (second, first)

    def factor(name: str, theirs: str, ours: tuple[str, ...], features: tuple[str, ...]) -> _Factor:
        names = tuple(f"{_PREFIX}{module}.{name}{_WEIGHT}" for module in modules)
        return _Factor(names, mapping.stacked, theirs, " ".join(ours), {word: mapping.sizes[word] for word in features})

    factors = {
        "lora_a": factor("lora_A", f"rank ({their_inputs})", (*inputs, "rank"), inputs),
        "lora_b": factor("lora_B", f"({their_outputs}) rank", ("rank", *outputs), outputs),
    }
    return _AdaptableWeight(modules, inputs_first, factors)


def _read_config(fields: Fields) -> tuple[int, float]:
    """Read the rank and the scale. Raises ConversionError for other settings unless they are off or without effect."""
    fields.word("peft_type", {"LORA": True})
    rank, alpha = fields.integer("r"), fields.number("lora_alpha")
    stabilized = fields.flag("use_rslora", False)
    for key, allowed in UNSUPPORTED_KEYS.items():
        fields.allow_only(key, *allowed)
    fields.finish(IGNORED_PEFT_KEYS)
    return rank, alpha / (math.sqrt(rank) if stabilized else rank)


def _config(
    nodes: Mapping[str, LowRank], weights: Mapping[str, _AdaptableWeight], modules: Sequence[str], base_model: str
) -> dict[str, Any]:
    """Return the content of `adapter_config.json`."""
    node = next(iter(nodes.values()))
    rank, scale = node.lora_a.shape[-1], node.scale
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
        "fan_in_fan_out": any(weights[path].inputs_first for path in nodes),
        "target_modules": modules,
        "inference_mode": True,
    }


def _alpha(rank: int, scale: float) -> tuple[int | float, bool]:
    """Return `lora_alpha` and `use_rslora` that give this scale: `lora_alpha` is a whole number if possible."""
    for root, stabilized in ((rank, False), (math.sqrt(rank), True)):
        if round(scale * root) / root == scale:
            return round(scale * root), stabilized
    return scale * rank, False


def _modules(model: Decoder) -> set[str]:
    """Return all modules that have a weight, also those that PEFT can't adapt."""
    base = plain_shapes(replaced(model, {path: node.base for path, node in low_rank_weights(model).items()}))
    family, _ = export_config(base)
    names = (family.module_name(name) for mapping in family.bind(base).values() for name in mapping.names)
    return {name.removesuffix(_WEIGHT) for name in names if name.endswith(_WEIGHT)}


def _target_modules(adapted: Set[str], every: Set[str]) -> list[str]:
    """Return the last parts of modules' names where all modules of that name have a pair, otherwise full names.

    A number is no such name: layers are numbered, too.
    """
    ambiguous = {module.rpartition(".")[2] for module in every - adapted}
    names = {module: module.rpartition(".")[2] for module in adapted}
    return sorted({module if last in ambiguous or last.isdecimal() else last for module, last in names.items()})
