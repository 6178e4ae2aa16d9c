"""Adapter directories of PEFT, loaded and saved without PEFT: `adapter_config.json` and `adapter_model.safetensors`.

PEFT adds two matrices to a module's weight, `lora_A` [r, in] and `lora_B` [out, r], here called its LoRA pair, and with
DoRA `lora_magnitude_vector` [out]. The family's table of weights determines which axes of our weights form `in` and
`out`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.typing import DTypeLike

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.family import Family
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.families.weight_rows import WeightMapping
from eqx_decoders.io.atomic_files import write_json
from eqx_decoders.io.huggingface.directory import Directory, StoredTensor, check_dtypes, check_tensors, stored_tensors
from eqx_decoders.io.huggingface.export import export_config, import_safetensors, save_tensors, tensor_makers
from eqx_decoders.io.huggingface.export_directory import copy_tokenizer, exported_directory
from eqx_decoders.io.huggingface.gather import on_first_host
from eqx_decoders.io.huggingface.load import equal_tables, load_weight, read_layer
from eqx_decoders.io.huggingface.peft_config import AdapterSettings, adapter_config, read_settings
from eqx_decoders.io.huggingface.peft_experts import (
    ExpertParameters,
    expert_mappings,
    renamed_modules,
    single_expert,
    with_fused_experts,
)
from eqx_decoders.io.status import StatusLine
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.init import abstract
from eqx_decoders.model.pissa import init_pissa
from eqx_decoders.numerics.low_rank import LowRank, low_rank_weights
from eqx_decoders.numerics.quantized_weight import plain_shapes, whole_weights
from eqx_decoders.sharding.axes import axes, named_leaves, product_axes, replaced
from eqx_decoders.sharding.layout import Layout, device_bytes, out_shardings, partitions


CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _WEIGHT = "base_model.model.", ".weight"
_TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"
_ENDINGS = rf"({re.escape(_TOKEN_ROWS)}|\.(lora_[AB]\.weight|lora_magnitude_vector|weight|bias))$"


def load_peft(model: Decoder, directory: str | Path, *, dtype: DTypeLike | None = None) -> Decoder:
    """Return the model with the LoRA pairs of a PEFT adapter, each created on its devices.

    **Arguments:**

    - `model`: the adapter's base model, without LoRA pairs.
    - `directory`: directory with `adapter_config.json` and `adapter_model.safetensors`.
    - `dtype`: dtype of the pairs; None: the model's parameter dtype.

    Magnitudes of DoRA become differences from the column norms of the base weights. For PiSSA
    (`init_lora_weights="pissa"`) the largest singular values are first subtracted from the weights, as PEFT does when
    it loads. Adapters that PEFT has converted have twice the rank, and nothing is subtracted.

    Layers that are stacked in one weight may have different ranks: smaller pairs are padded with zeros. Layers and
    experts without a pair get a pair of zeros. Modules that the adapter stores completely (`modules_to_save`, trained
    biases) replace the modules of the model, and `save_peft` writes them again. A saved output head unties the
    embedding, unless the adapter also saves an equal embedding.

    Experts that transformers stores in one parameter may have a pair (`target_parameters`), and rows of the embedding
    and the output head may be trained (`trainable_token_indices`); such an embedding is then a saved module.

    Tensors may have the names in the checkpoint, or the names in any version of transformers. Names may start at the
    decoder, or at a vision-language or audio model that contains it.

    Raises ConversionError if the adapter belongs to another model, is not LoRA, lacks one tensor of a pair, or has
    unknown settings.
    """
    if low_rank_weights(model):
        raise ConversionError("load_peft: the model already has LoRA pairs. Merge them with merge_lora first.")
    folder = Directory(directory)
    settings = read_settings(Fields(folder.json(CONFIG), CONFIG))
    family, _ = export_config(model)
    shapes = plain_shapes(model)
    stored = stored_tensors(folder, TENSORS)
    expert_weights = expert_mappings(shapes, with_fused_experts(family))
    weights = _adaptable(model, settings.dora, experts=expert_weights)
    modules = _module_mappings(model, family.for_tensors(stored))
    module_shapes = {name: mapping.shape for mapping in modules.values() for name in mapping.names}
    parameters = ExpertParameters(expert_weights, {path: weights[path].modules for path in expert_weights})
    parameter_names = {name for mapping in expert_weights.values() for name in mapping.names}
    others, expert_tensors, file_parameters = parameters.split(
        stored,
        settings.parameters,
        lambda name: next((found for found in _current_names(family, name) if found in parameter_names), name),
    )
    known = {name for weight in weights.values() for name in weight.tensors} | module_shapes.keys()
    known |= {name.removesuffix(_WEIGHT) + _TOKEN_ROWS for name in module_shapes}
    tensors, file_names = _with_current_names(family, others, known, renamed_modules(shapes, family))
    tensors |= {_PREFIX + name: tensor for name, tensor in expert_tensors.items()}
    settings = dataclasses.replace(settings, file_names=file_names | file_parameters)
    _check_no_embedding_pairs(folder.path / TENSORS, tensors, modules)
    _check_vocabulary(tensors, modules)
    tensors, token_rows = _without_token_rows(tensors, modules)
    check_dtypes(tensors)
    weights = {path: weight for path, weight in weights.items() if weight.tensors & tensors.keys()}
    expected_shapes = {name: shape for name, shape in module_shapes.items() if name in tensors}
    for weight in weights.values():
        expected_shapes |= weight.shapes(settings, tensors)
    check_tensors(
        folder.path,
        tensors,
        expected_shapes,
        rule="An adapter must have both factors of each adapted weight and all tensors of saved modules, and no other "
        "tensors",
        unexpected="is not a LoRA pair or a saved module of this model",
        source=f"the model and {settings.described}",
    )
    if not expected_shapes and not token_rows:
        raise ConversionError(
            f"{folder.path / TENSORS} contains no LoRA pair and no saved module, so there is nothing to load. Save the "
            f"adapter again after training."
        )
    model = _with_saved_modules(model, modules, tensors, settings, folder.path / CONFIG)
    model = _with_token_rows(model, modules, token_rows, settings, folder.path / CONFIG)
    params = np.dtype(model.execution.precision.params if dtype is None else dtype)
    leaves = whole_weights(model)[1]
    nodes: dict[str, LowRank] = {}
    is_abstract = any(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves([leaves[path] for path in weights])
    )
    if is_abstract and (settings.dora or settings.pissa):
        raise ConversionError(
            f"{folder.path / CONFIG}: use_dora and init_lora_weights='pissa' need the values of the base weights, but "
            "this model is abstract. Load the model with load_hf."
        )
    for path, weight in weights.items():
        parts, scale = weight.load(tensors, settings, params)
        nodes[path] = LowRank(base=leaves[path], scale=scale, **parts)
        if settings.pissa:
            weight.check_same_rank(settings, folder.path / CONFIG, tensors)
    target = replaced(model, nodes)
    shardings = named_leaves(model.execution.layout.shardings(target))
    arrays = {name: leaf for name, leaf in named_leaves(target).items() if isinstance(leaf, np.ndarray)}
    adapted = replaced(target, {name: _on_devices(leaf, shardings[name]) for name, leaf in arrays.items()})
    if not (settings.pissa or settings.dora):
        return adapted
    layout = model.execution.layout
    nodes = low_rank_weights(adapted)
    has_pair = {path: weights[path].has_pair(tensors) for path in nodes}
    return replaced(
        adapted, {path: _relative_to_base(layout, node, settings, has_pair[path]) for path, node in nodes.items()}
    )


def _check_no_embedding_pairs(
    file: Path, tensors: Mapping[str, StoredTensor], modules: Mapping[str, WeightMapping]
) -> None:
    """Raise ConversionError if the embedding or the output head has a LoRA pair."""
    heads = {name.removesuffix(_WEIGHT) for name in modules["head.kernel"].names} if "head.kernel" in modules else set()
    for name in tensors:
        if ".lora_embedding_" in name:
            raise ConversionError(
                f"{file}: {name} is a LoRA pair of an embedding, which is not supported. Merge the adapter with PEFT's "
                f"merge_and_unload, or remove the embedding from target_modules and train again."
            )
        module = re.sub(_ENDINGS, "", name)
        if module in heads and re.search(r"\.lora_\w+(\.weight)?$", name):
            raise ConversionError(
                f"{file}: {name} is a LoRA pair of the output head, which is not supported. Merge the adapter with "
                f"PEFT's merge_and_unload, or remove {module.rpartition('.')[2]} from target_modules and train again."
            )


def _check_vocabulary(tensors: Mapping[str, StoredTensor], modules: Mapping[str, WeightMapping]) -> None:
    """Raise ConversionError if the adapter stores an embedding or output head with another number of tokens."""
    for path in modules.keys() & {"embedding.table", "head.kernel"}:
        shape = modules[path].shape
        tensor = tensors.get(modules[path].names[0])
        if tensor is not None and tensor.shape[1:] == shape[1:] and tensor.shape != shape:
            raise ConversionError(
                f"{tensor.file}: {tensor.name} has {tensor.shape[0]} tokens, but the model has {shape[0]}. Before the "
                f"adapter was trained, the vocabulary was resized: call resize_token_embeddings({tensor.shape[0]}) on "
                f"the base model with transformers, save it, and load the adapter into that model."
            )


def _without_token_rows(
    tensors: Mapping[str, StoredTensor], modules: Mapping[str, WeightMapping]
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Return the tensors without rows of trained tokens (`trainable_token_indices`), and these rows by path."""
    names = {
        path: modules[path].names[0].removesuffix(_WEIGHT) + _TOKEN_ROWS
        for path in ("embedding.table", "head.kernel")
        if path in modules
    }
    rows = {path: tensors[name] for path, name in names.items() if name in tensors}
    return {name: tensor for name, tensor in tensors.items() if name not in names.values()}, rows


def _with_token_rows(
    model: Decoder,
    modules: Mapping[str, WeightMapping],
    token_rows: Mapping[str, StoredTensor],
    settings: AdapterSettings,
    file: Path,
) -> Decoder:
    """Return the model with the trained rows of the embedding and the output head. Raises ConversionError.

    `file`: the adapter's `adapter_config.json`.
    """
    if model.config.tied and "head.kernel" in token_rows:
        raise ConversionError(
            f"{file}: trainable_token_indices={dict(settings.token_ids)} trains tokens of the output head apart from "
            f"the embedding, but the model ties them. This is not supported: merge the adapter with PEFT's "
            f"merge_and_unload, or train with ensure_weight_tying=True."
        )
    arrays: dict[str, Any] = {}
    leaves, axis_names = named_leaves(model), axes(model)
    for path, stored in token_rows.items():
        module = modules[path].names[0].removeprefix(_PREFIX).removesuffix(_WEIGHT)
        module = settings.file_names.get(module, module)
        ids = next(
            (ids for name, ids in settings.token_ids.items() if name and f".{module}".endswith(f".{name}")), None
        )
        ids = settings.token_ids.get("") if ids is None and path == "embedding.table" else ids
        leaf = leaves.get(path)
        vocab, features = modules[path].shape
        if leaf is None:
            raise ConversionError(f"{file}: trainable_token_indices needs a {path} that is not quantized.")
        if ids is None or stored.shape != (len(ids), features) or max(ids, default=0) >= vocab:
            raise ConversionError(
                f"{stored.file}: {stored.name} is {stored.description}, which does not fit trainable_token_indices="
                f"{dict(settings.token_ids)} and a vocabulary of {vocab} tokens. Load the adapter into its base model."
            )
        if isinstance(leaf, jax.ShapeDtypeStruct):
            arrays[path] = leaf
            continue
        axis = axis_names[path].index("vocab")

        def replace(leaf: jax.Array, rows: jax.Array, axis: int = axis, ids: Any = tuple(ids)) -> jax.Array:
            rows = rows.astype(leaf.dtype)
            index = jnp.asarray(ids)
            return leaf.at[index].set(rows) if axis == 0 else leaf.at[:, index].set(rows.T)

        run = model.execution.layout.automatically(replace, lambda _, leaf=leaf: partitions(leaf))
        arrays[path] = jax.jit(run, out_shardings=out_shardings(leaf))(leaf, stored.read_all())
    if not token_rows:
        return model
    saved = tuple(sorted({*model.saved_modules, *token_rows}))
    return dataclasses.replace(replaced(model, arrays), saved_modules=saved)


def _relative_to_base(layout: Layout, node: LowRank, settings: AdapterSettings, has_pair: np.ndarray) -> LowRank:
    """Subtract the largest singular values from the base weight (PiSSA), and the column norms from magnitudes (DoRA).

    `has_pair`: mask of the layers and experts that the adapter changes. Magnitude differences are 0 where it is false.
    """
    if settings.pissa:
        shaped = dataclasses.replace(node, start_a=node.lora_a, start_b=node.lora_b)
        split = init_pissa(layout, shaped, node.lora_a.shape[-1])
        node = dataclasses.replace(node, base=split.base, start_a=split.start_a, start_b=split.start_b)
    magnitude = node.lora_magnitude
    if magnitude is None:
        return node
    mask = has_pair.reshape(*has_pair.shape, *[1] * (magnitude.ndim - has_pair.ndim))
    run = layout.automatically(
        lambda node, magnitude: jnp.where(mask, magnitude - node.column_norms()[0], 0), lambda _: partitions(magnitude)
    )
    return dataclasses.replace(
        node, lora_magnitude=jax.jit(run, out_shardings=out_shardings(magnitude))(node, magnitude)
    )


def _on_devices(factor: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):  # uncommitted, like the arrays of `init`
        return jax.device_put(factor)
    return jax.make_array_from_callback(factor.shape, sharding, lambda index: factor[index])


def save_peft(
    model: Decoder, directory: str | Path, *, base_model: str = "", tokenizer: str | Path | None = None
) -> None:
    """Write the LoRA pairs of a model as a directory that `PeftModel.from_pretrained` and `load_peft` open.

    PiSSA pairs are written with twice the rank as a difference from the original weight, `scale (a b - a_0 b_0)`, as
    PEFT converts them. Weights in `model.saved_modules` are written completely and named in `modules_to_save` and
    `bias` of `adapter_config.json`: weights that `load_peft` read from an adapter, and weights that a `Trainer` trains
    in addition to the pairs. A custom training loop must add the paths of such weights to `saved_modules`, or save the
    model with `merge_lora` and `save_hf`.

    **Arguments:**

    - `model`: a model with LoRA pairs, of a family that Hugging Face knows.
    - `directory`: a new or empty directory; it is written completely or not at all.
    - `base_model`: name or directory of the base model, for PEFT's automatic classes.
    - `tokenizer`: directory from which the tokenizer, chat template and `generation_config.json` are copied. None:
        these files are not written.

    Raises ConversionError if the model has no pair, or if PEFT has no module for one. In a run of several processes,
    all processes must call it, and the first process writes.
    """
    nodes, weights = adapter_plan(model)
    adapted = {module for path in nodes for module in weights[path].modules}
    saved, saved_settings, copies = _saved_module_plan(model)
    with exported_directory(directory) as folder:
        tensors: dict[str, np.ndarray] = {}
        for path, node in nodes.items():
            for name, part in on_originals(model.execution.layout, node).items():
                gathered = on_first_host(part)
                if gathered is not None:
                    tensors |= weights[path].factors[name].stored(gathered)
        for name, make_tensor in tensor_makers(named_leaves(model), saved).items():
            tensor = make_tensor()
            module = name.removeprefix(_PREFIX).removesuffix(".bias")
            if name.endswith(".bias") and module in adapted:
                name = f"{_PREFIX}{module}.base_layer.bias"  # PEFT wraps adapted modules
            if tensor is not None:
                tensors[name] = tensor
        tensors |= {copy: tensors[name] for copy, name in copies.items() if name in tensors}
        if folder is not None:
            copy_tokenizer(tokenizer, folder)
            ranks_and_scales = {
                module: _written_rank_and_scale(node)
                for path, node in nodes.items()
                for module in weights[path].modules
            }
            content = adapter_config(
                ranks_and_scales,
                _modules(model),
                dora=any(node.lora_magnitude is not None for node in nodes.values()),
                inputs_first=any(weights[path].inputs_first for path in nodes),
                base_model=base_model,
            )
            write_json(folder / CONFIG, content | saved_settings, sort_keys=True)
            save_tensors(tensors, folder / TENSORS)


def adapter_plan(model: Decoder) -> tuple[dict[str, LowRank], dict[str, "_AdaptableWeight"]]:
    """Return the pairs of a model (of arrays or shapes), and the weights that PEFT can adapt, by their paths.

    Raises all errors of `save_peft` that can be detected before anything is written.
    """
    import_safetensors()
    nodes = low_rank_weights(model)
    if not nodes:
        raise ConversionError("save_peft: the model has no LoRA pairs. Add them with add_lora.")
    is_dora = {node.lora_magnitude is not None for node in nodes.values()}
    if len(is_dora) > 1:
        raise ConversionError(
            "save_peft: some LoRA pairs have DoRA magnitudes and some have none, but PEFT has one use_dora for an "
            "adapter. Use DoRA for all pairs or for no pair."
        )
    weights = _adaptable(_without_pairs(model), True in is_dora)
    unknown = sorted(nodes.keys() - weights.keys())
    if unknown:
        raise ConversionError(
            f"save_peft: PEFT has no module for the LoRA pairs of {', '.join(unknown)}. Merge these pairs with "
            "merge_lora, or train without them."
        )
    _saved_module_plan(model)
    return nodes, weights


def _saved_module_plan(model: Decoder) -> tuple[dict[str, WeightMapping], dict[str, Any], dict[str, str]]:
    """Return the mappings of the weights that `save_peft` stores completely, their settings for PEFT, and copies.

    The copies are names of tensors, each with the name of the tensor that it equals. PEFT stores a tied output head as
    a separate tensor.

    Raises ConversionError for paths in `model.saved_modules` that are not weights of the model.
    """
    if not model.saved_modules:
        return {}, {}, {}
    base = _without_pairs(model)
    family, _ = export_config(base)
    leaves = named_leaves(base)
    all_mappings = _module_mappings(base, family)
    mappings = {path: mapping for path, mapping in all_mappings.items() if path in leaves}
    missing = [path for path in model.saved_modules if path not in mappings]
    if missing:
        raise ConversionError(
            f"save_peft: saved_modules={list(model.saved_modules)}, but checkpoints of {family.model_type} have no "
            f"tensor for {missing[0]}. Merge the adapter with merge_lora and save the model with save_hf."
        )
    saved_names = {name for path in model.saved_modules for name in mappings[path].names}
    modules = {name.rpartition(".")[0] for name in saved_names if not name.endswith(".bias")}
    saved = {
        path: mapping
        for path, mapping in mappings.items()
        if any(name in saved_names or name.rpartition(".")[0] in modules for name in mapping.names)
    }
    names = [name for mapping in saved.values() for name in mapping.names]
    has_bias = any(name.endswith(".bias") and name.rpartition(".")[0] not in modules for name in names)
    # Complete names, because PEFT matches suffixes: "norm" would also select "input_layernorm".
    settings: dict[str, Any] = {"modules_to_save": sorted(module.removeprefix(_PREFIX) for module in modules) or None}
    settings["bias"] = "all" if has_bias else "none"
    copies: dict[str, str] = {}
    if model.config.tied and "embedding.table" in saved:
        head = all_mappings["head.kernel"].names[0]
        copies[head] = saved["embedding.table"].names[0]
        module = head.removeprefix(_PREFIX).removesuffix(_WEIGHT)
        settings["modules_to_save"] = sorted([*settings["modules_to_save"], module])
        settings["ensure_weight_tying"] = True
    return saved, settings, copies


def _without_pairs(model: Decoder) -> Decoder:
    """Return the model with the base weights of its low-rank pairs."""
    return replaced(model, {path: node.base for path, node in low_rank_weights(model).items()})


def on_originals(layout: Layout, node: LowRank) -> dict[str, jax.Array]:
    """Return the factors and magnitudes of a pair relative to the original weight, as PEFT stores them."""
    parts = {"lora_a": node.lora_a, "lora_b": node.lora_b, "lora_magnitude": node.lora_magnitude}
    parts = {name: part for name, part in parts.items() if part is not None}
    if node.start_a is None and node.lora_magnitude is None:
        return parts

    def run(node: LowRank) -> dict[str, jax.Array]:
        found: dict[str, Any] = {"lora_a": node.lora_a, "lora_b": node.lora_b}
        if node.start_a is not None and node.start_b is not None:
            found["lora_a"] = jnp.concatenate([node.lora_a, node.start_a], axis=-1)
            found["lora_b"] = jnp.concatenate([node.lora_b, -node.start_b], axis=node.rank_axis)
        if node.lora_magnitude is not None:
            found["lora_magnitude"] = node.column_norms()[0] + node.lora_magnitude
        return found

    specs = {name: part.sharding.spec for name, part in parts.items()}
    auto = layout.automatically(run, lambda _: specs)
    return jax.jit(auto, out_shardings=out_shardings(parts))(node)


def _written_rank_and_scale(node: LowRank) -> tuple[int, float]:
    """Return the rank and scale of a pair as `save_peft` writes it: PiSSA pairs have twice the rank."""
    return node.lora_a.shape[-1] * (1 if node.start_a is None else 2), node.scale


@dataclasses.dataclass(frozen=True)
class _Factor:
    """Factor of a weight's pair in an adapter.

    **Arguments:**

    - `names`: names of its tensors, one per layer, or one per layer and expert.
    - `stack`: sizes of the leading axes of the stacked weight, `layers` and `experts`; empty if it is not stacked.
    - `peft_pattern`, `pattern`: einops patterns of PEFT's tensor and of one layer of the stacked weight. `rank` is an
        axis.
    - `sizes`: sizes of all other axes.
    """

    names: tuple[str, ...]
    stack: tuple[int, ...]
    peft_pattern: str
    pattern: str
    sizes: Mapping[str, int]

    def shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of PEFT's tensor for this rank."""
        features = math.prod(self.sizes.values())
        axis_names = re.sub(r"\(.*\)", "features", self.peft_pattern).split()
        return tuple(rank if axis == "rank" else features for axis in axis_names)

    def load(
        self, tensors: Mapping[str, StoredTensor], rank: int, factors: Sequence[float], dtype: np.dtype
    ) -> np.ndarray:
        """Return the tensors times `factors`, padded with zeros to `rank`. Missing tensors are zeros."""
        axis_names = self.pattern.split()
        layers = []
        for name, factor in zip(self.names, factors, strict=True):
            if name not in tensors:
                shape = tuple(rank if axis == "rank" else self.sizes[axis] for axis in axis_names)
                layers.append(np.zeros(shape, dtype))
                continue
            layer = rearrange(tensors[name].read_all(), f"{self.peft_pattern} -> {self.pattern}", **self.sizes)
            layer = layer if factor == 1.0 else layer.astype(np.float32) * np.float32(factor)
            padding = [
                (0, rank - size if axis == "rank" else 0) for axis, size in zip(axis_names, layer.shape, strict=True)
            ]
            layers.append(np.pad(layer, padding).astype(dtype))
        return np.stack(layers).reshape(*self.stack, *layers[0].shape) if self.stack else layers[0]

    def stored(self, factor: np.ndarray) -> dict[str, np.ndarray]:
        """Return the tensors of PEFT, by name, of a stacked factor."""
        layers = [
            np.ascontiguousarray(rearrange(layer, f"{self.pattern} -> {self.peft_pattern}", **self.sizes))
            for layer in factor.reshape(-1, *factor.shape[len(self.stack) :])
        ]
        return dict(zip(self.names, layers, strict=True))


@dataclasses.dataclass(frozen=True)
class _AdaptableWeight:
    """Weight that PEFT can adapt.

    **Arguments:**

    - `modules`: names of its modules in transformers, one per layer, or one per layer and expert.
    - `inputs_first`: whether transformers stores it as `[in, out]`.
    - `factors`: its factors in an adapter, by the name of the field of `LowRank`.
    """

    modules: tuple[str, ...]
    inputs_first: bool
    factors: Mapping[str, _Factor]

    @property
    def tensors(self) -> set[str]:
        return {name for factor in self.factors.values() for name in factor.names}

    def has_pair(self, tensors: Mapping[str, StoredTensor]) -> np.ndarray:
        """Return a mask of the layers and experts for which the adapter has a pair, or one tensor of it."""
        factors = list(self.factors.values())
        mask = [any(factor.names[i] in tensors for factor in factors) for i in range(len(self.modules))]
        return np.asarray(mask).reshape(factors[0].stack)

    def shapes(self, settings: AdapterSettings, tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
        """Return the expected shapes of all tensors of the modules that have a pair."""
        return {
            factor.names[index]: factor.shape(settings.rank_of(self.modules[index]))
            for index in np.flatnonzero(self.has_pair(tensors))
            for factor in self.factors.values()
        }

    def load(
        self, tensors: Mapping[str, StoredTensor], settings: AdapterSettings, dtype: np.dtype
    ) -> tuple[dict[str, np.ndarray], float]:
        """Return the factors of the stacked pair, and its scale.

        The returned scale is the scale of the first layer. If another layer has a different scale, its `lora_b` is
        multiplied by the ratio of the two scales.
        """
        rank = max(settings.rank_of(self.modules[index]) for index in np.flatnonzero(self.has_pair(tensors)))
        scales = [settings.scale_of(module) for module in self.modules]
        loaded: dict[str, np.ndarray] = {}
        for name, factor in self.factors.items():
            multipliers = [scale / scales[0] if name == "lora_b" else 1.0 for scale in scales]
            factor_dtype = np.promote_types(dtype, np.float32) if name == "lora_magnitude" else dtype
            loaded[name] = factor.load(tensors, rank, multipliers, factor_dtype)
        return loaded, scales[0]

    def check_same_rank(self, settings: AdapterSettings, file: Path, tensors: Mapping[str, StoredTensor]) -> None:
        """Raise ConversionError if layers differ in rank or scale, or if a layer has no pair."""
        has_pair = self.has_pair(tensors)
        if not has_pair.all():
            missing = self.modules[np.flatnonzero(~has_pair)[0]]
            raise ConversionError(
                f"{file}: init_lora_weights='pissa' is supported only if all layers have a pair, but {missing} has "
                f"none. Convert the adapter with PEFT's save_pretrained(path_initial_model_for_weight_conversion=…)."
            )
        ranks_and_scales = {(settings.rank_of(module), settings.scale_of(module)) for module in self.modules}
        if len(ranks_and_scales) > 1:
            raise ConversionError(
                f"{file}: init_lora_weights='pissa' is supported only if all layers of {self.modules[0]} have the same "
                f"rank and scale, but they have {sorted(ranks_and_scales)}. Convert the adapter with PEFT's "
                "save_pretrained(path_initial_model_for_weight_conversion=…)."
            )


def _with_current_names(
    family: Family, stored: Mapping[str, StoredTensor], known: Set[str], renamed: Mapping[str, str] = {}
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return an adapter's tensors by their names in the current transformers, and its module names in the file.

    The second result maps the current name of each module to its name in the file. PEFT may also store the original
    weights of saved modules: these are left out. The names of PEFT's wrappers are removed: `base_layer`, which contains
    the bias of an adapted module, and `modules_to_save` with or without the name of the adapter.

    **Arguments:**

    - `known`: names of the tensors that an adapter of this model may contain.
    - `renamed`: names of modules in `known`, by different names of the same modules.
    """
    tensors: dict[str, StoredTensor] = {}
    file_names: dict[str, str] = {}
    for name, tensor in stored.items():
        if ".original_module." in name:
            continue
        current_name, file_name = name, name.removeprefix(_PREFIX)
        for unwrapped in _without_wrappers(file_name) if name.startswith(_PREFIX) else ():
            ending = re.search(_ENDINGS, unwrapped)
            start = len(unwrapped) if ending is None else ending.start()
            modules = [renamed.get(module, module) for module in _current_names(family, unwrapped[:start])]
            candidates = [_PREFIX + module + unwrapped[start:] for module in modules]
            found = next((candidate for candidate in candidates if candidate in known), None)
            if found is not None:
                current_name, file_name = found, unwrapped
                break
        if current_name in tensors:
            # after resize_token_embeddings, PEFT stores trained embeddings under two names
            trained = [same for same in (tensors[current_name], tensor) if ".modules_to_save." in same.name]
            if len(trained) != 1:
                raise ConversionError(
                    f"{tensor.file}: {name} and {tensors[current_name].name} are the same tensor. Remove one of them."
                )
            tensor = trained[0]
        tensors[current_name] = tensor
        file_names[re.sub(_ENDINGS, "", current_name).removeprefix(_PREFIX)] = re.sub(_ENDINGS, "", file_name)
    return tensors, file_names


def _without_wrappers(name: str) -> Iterator[str]:
    """Yield the possible names of a tensor after PEFT's wrappers are removed, the most likely name first."""
    name = re.sub(r"\.base_layer(?=\.)", "", name)
    for wrapper in (r"\.modules_to_save\.default(?=\.)", r"\.modules_to_save(?=\.)", r"\.modules_to_save\.[^.]+(?=\.)"):
        yield re.sub(wrapper, "", name)


def _current_names(family: Family, name: str) -> Iterator[str]:
    """Yield candidates for the name of an adapter's tensor in this model in the current version of transformers.

    `name` may be the name in another version of transformers, or start at another module: at the decoder, at a
    vision-language or audio model that contains it, or at a model without its output head.
    """
    yield family.module_name(family.stored_name(name))
    for text, inner in family.text_names.items():
        if name.startswith(text):
            yield family.module_name(family.stored_name(inner + name.removeprefix(text)))
    for inner, text in _decoder_prefixes():
        if name.startswith(inner):
            yield family.module_name(family.stored_name(text + name.removeprefix(inner)))
    for prefix in (family.prefix, *family.text_names.values(), "model."):
        yield family.module_name(family.stored_name(prefix + name))


@functools.cache
def _decoder_prefixes() -> tuple[tuple[str, str], ...]:
    """Return pairs of name prefixes: of a decoder in a model with encoders, and of the same decoder without encoders.

    The longest prefixes come first.
    """
    pairs = {
        (prefix, text)
        for family in FAMILIES.values()
        for text, inner in family.text_names.items()
        for prefix in (inner, family.module_name(inner))
        if prefix != text
    }
    return tuple(sorted(pairs, key=lambda pair: (-len(pair[0]), pair)))


def _module_mappings(model: Decoder, family: Family) -> dict[str, WeightMapping]:
    """Return the mappings from the model's weights, by path, to tensors that an adapter may store completely.

    They include the output head, also for a model with tied embeddings.
    """
    model = plain_shapes(model)
    if model.config.tied:
        model = abstract(dataclasses.replace(model.config, tied=False))
    return {
        path: dataclasses.replace(mapping, names=tuple(_PREFIX + family.module_name(name) for name in mapping.names))
        for path, mapping in family.bind(model).items()
    }


def _with_saved_modules(
    model: Decoder,
    modules: Mapping[str, WeightMapping],
    tensors: Mapping[str, StoredTensor],
    settings: AdapterSettings,
    file: Path,
) -> Decoder:
    """Return the model with the modules that an adapter stores completely. Raises ConversionError.

    `file`: the adapter's `adapter_config.json`.
    """
    saved = {path: mapping for path, mapping in modules.items() if set(mapping.names) & tensors.keys()}
    if not saved:
        return model
    embedding = saved.get("embedding.table")
    # PEFT also stores embeddings that it did not train (save_embedding_layers)
    is_trained = embedding is not None and embedding.names[0].split(".")[-2] in {
        name.rpartition(".")[2] for name in settings.saved
    }
    config, keeps_head = model.config, False
    if config.tied and "head.kernel" in saved:
        head = tensors[saved["head.kernel"].names[0]]
        table = None if embedding is None else tensors[embedding.names[0]]
        if table is not None and table.shape == head.shape and equal_tables(table, head):
            del saved["head.kernel"]
        else:
            config = dataclasses.replace(config, tied=False)
    elif config.tied and is_trained and not settings.tied:
        config, keeps_head = dataclasses.replace(config, tied=False), True
    target = abstract(config, layout=model.execution.layout, precision=model.execution.precision)
    leaves = named_leaves(target)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model)):
        arrays = {path: leaves[path] for path in saved}
    else:
        complete = {path: mapping for path, mapping in saved.items() if set(mapping.names) <= tensors.keys()}
        with StatusLine("loading modules", total=sum(device_bytes(leaves[path]) for path in complete)) as status:
            arrays = {path: load_weight(leaves[path], mapping, tensors, status) for path, mapping in complete.items()}
        for path in saved.keys() - complete.keys():
            arrays[path] = _with_saved_layers(model, path, saved[path], tensors)
    if keeps_head:  # PEFT without ensure_weight_tying: the original embedding is still the output head
        arrays["head.kernel"] = _head_of_table(model, leaves["head.kernel"])
    if config.tied != model.config.tied:
        model = dataclasses.replace(model, config=config, head=target.head)
    return dataclasses.replace(replaced(model, arrays), saved_modules=tuple(sorted(arrays)))


def _with_saved_layers(
    model: Decoder, path: str, mapping: WeightMapping, tensors: Mapping[str, StoredTensor]
) -> jax.Array:
    """Return a stacked weight of the model with the layers and experts that an adapter stores."""
    leaf = named_leaves(model).get(path)
    indices = [number for number, name in enumerate(mapping.names) if name in tensors]
    if leaf is None:
        raise ConversionError(
            f"{tensors[mapping.names[indices[0]]].file}: {mapping.names[indices[0]]} is saved for some layers only, "
            f"but {path} is quantized. Load the base model without quantized='keep'."
        )
    values = np.stack([read_layer(tensors[mapping.names[number]], mapping) for number in indices])
    index = np.unravel_index(indices, mapping.stack)
    run = model.execution.layout.automatically(
        lambda leaf, values: leaf.at[index].set(values.astype(leaf.dtype)), lambda _: partitions(leaf)
    )
    return jax.jit(run, out_shardings=out_shardings(leaf))(leaf, values)


def _head_of_table(model: Decoder, head: jax.ShapeDtypeStruct) -> Any:
    """Return the embedding of a model as the kernel of a separate output head."""
    table = named_leaves(model)["embedding.table"]
    if isinstance(table, jax.ShapeDtypeStruct):
        return head
    run = model.execution.layout.automatically(lambda table: table.T.astype(head.dtype), lambda _: partitions(head))
    return jax.jit(run, out_shardings=out_shardings(head))(table)


def _adaptable(
    model: Decoder, magnitudes: bool, experts: Mapping[str, WeightMapping] | None = None
) -> dict[str, _AdaptableWeight]:
    """Return the weights that PEFT can adapt, by path: matrices in blocks that correspond to a single module of the
    Hugging Face model.

    `experts`: mappings of experts in one parameter, which are then included as if each expert were a module. Routers
    are then included, too. Single experts and routers are modules that PEFT can adapt only in transformers 4.
    """
    model = plain_shapes(model)
    family, _ = export_config(model)
    axis_names = axes(model)
    weights: dict[str, _AdaptableWeight] = {}
    for path, mapping in family.bind(model).items():
        split = product_axes(axis_names[path])
        is_module = (
            mapping.section is None
            and mapping.axes[:1] != ("experts",)
            and (experts is not None or "experts" not in axis_names[path])
            and all(name.endswith(_WEIGHT) for name in mapping.names)
        )
        if split is not None and is_module:
            inputs, outputs = mapping.axes[: len(split[0])], mapping.axes[len(split[0]) :]
            if {frozenset(inputs), frozenset(outputs)} == set(map(frozenset, mapping.groups)):
                modules = tuple(family.module_name(name).removesuffix(_WEIGHT) for name in mapping.names)
                weights[path] = _adaptable_weight(mapping, modules, inputs, outputs, magnitudes)
    for path, mapping in {} if experts is None else experts.items():
        split = product_axes(mapping.axes)
        if path not in weights and split is not None:
            single = single_expert(mapping, path.rpartition(".")[2])
            modules = tuple(name.removesuffix(_WEIGHT) for name in single.names)
            weights[path] = _adaptable_weight(single, modules, *split, magnitudes)
    return weights


def _adaptable_weight(
    mapping: WeightMapping,
    modules: tuple[str, ...],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    magnitudes: bool,
) -> _AdaptableWeight:
    inputs_first = set(mapping.groups[0]) == set(inputs)
    first, second = (" ".join(group) for group in mapping.groups)
    stored_inputs, stored_outputs = (first, second) if inputs_first else (second, first)

    def factor(name: str, peft_pattern: str, axis_names: tuple[str, ...], features: tuple[str, ...]) -> _Factor:
        names = tuple(f"{_PREFIX}{module}.{name}" for module in modules)
        sizes = {axis: mapping.sizes[axis] for axis in features}
        return _Factor(names, mapping.stack, peft_pattern, " ".join(axis_names), sizes)

    factors = {
        "lora_a": factor(f"lora_A{_WEIGHT}", f"rank ({stored_inputs})", (*inputs, "rank"), inputs),
        "lora_b": factor(f"lora_B{_WEIGHT}", f"({stored_outputs}) rank", ("rank", *outputs), outputs),
    }
    if magnitudes:
        factors["lora_magnitude"] = factor("lora_magnitude_vector", f"({stored_outputs})", outputs, outputs)
    return _AdaptableWeight(modules, inputs_first, factors)


def _modules(model: Decoder) -> set[str]:
    """Return the names of all modules with a weight, including modules that PEFT cannot adapt."""
    base = plain_shapes(_without_pairs(model))
    family, _ = export_config(base)
    names = (family.module_name(name) for mapping in family.bind(base).values() for name in mapping.names)
    return {name.removesuffix(_WEIGHT) for name in names if name.endswith(_WEIGHT)}
