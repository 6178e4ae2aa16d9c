"""Adapter directories of PEFT, loaded and saved without PEFT: `adapter_config.json` and `adapter_model.safetensors`.

PEFT adds two matrices to a module's weight, `lora_A` [r, in] and `lora_B` [out, r], here called its low-rank pair, and
with DoRA `lora_magnitude_vector` [out]. The family's table of weights says which of our dimensions are folded into in
and out.
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
from eqx_decoders.errors import ConversionError, check
from eqx_decoders.families import FAMILIES
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.weight_rows import WeightMapping
from eqx_decoders.io.atomic_files import write_json
from eqx_decoders.io.huggingface.directory import Directory, StoredTensor, check_dtypes, check_tensors, stored_tensors
from eqx_decoders.io.huggingface.export import exported
from eqx_decoders.io.huggingface.export_config import export_config
from eqx_decoders.io.huggingface.export_directory import copy_tokenizer, exported_directory
from eqx_decoders.io.huggingface.gather import on_first_host
from eqx_decoders.io.huggingface.load import equal_tables, load_weight
from eqx_decoders.io.huggingface.peft_config import AdapterSettings, adapter_config, read_settings
from eqx_decoders.io.huggingface.safetensors_files import safetensors, save_tensors
from eqx_decoders.io.status import StatusLine
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.init import abstract
from eqx_decoders.model.pissa import taken_out
from eqx_decoders.numerics.low_rank import LowRank, low_rank_weights
from eqx_decoders.numerics.quantized_weight import plain_shapes, whole_weights
from eqx_decoders.sharding.axes import axes, named_leaves, product_axes, replaced
from eqx_decoders.sharding.layout import Layout, device_bytes, out_shardings, partitions


CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _WEIGHT = "base_model.model.", ".weight"
_ENDS = r"\.(lora_[AB]\.weight|lora_magnitude_vector|weight|bias)$"


def load_peft(model: Decoder, directory: str | Path, *, dtype: DTypeLike | None = None) -> Decoder:
    """Add the low-rank pairs of a PEFT adapter to a model's weights, each created on its devices.

    **Arguments:**

    - `model`: the adapter's base, without pairs.
    - `directory`: with `adapter_config.json` and `adapter_model.safetensors`.
    - `dtype`: of the pairs; None for the model's parameter dtype.

    Magnitudes of DoRA become differences from the lengths at the start. For PiSSA (`init_lora_weights="pissa"`) the
    weights lose their largest singular values first, as PEFT does when it loads; adapters that PEFT has converted have
    the double rank and need no such thing. Layers of one stack may differ in rank: the smaller ones are filled with 0,
    and so are layers and experts without a pair. Modules that are stored completely (`modules_to_save`, trained biases)
    replace those of the model, and `save_peft` writes them again. A saved output head that differs from a saved
    embedding unties the model.

    Names of tensors may be those of the files or of any version of transformers, and of the decoder alone or inside of
    a model with encoders.

    Raises ConversionError where the adapter is of another model, is no LoRA, lacks one tensor of a pair, or has
    settings that are not understood.
    """
    folder, present = Directory(directory), low_rank_weights(model)
    check(not present, "load_peft: the model has low-rank pairs already. Call merge_lora first.", ConversionError)
    settings = read_settings(Fields(folder.json(CONFIG), CONFIG))
    family, _ = export_config(model)
    weights, modules = _adaptable(model, settings.dora, experts=True), _whole_modules(model, family)
    shapes_of_modules = {name: mapping.shape for mapping in modules.values() for name in mapping.names}
    known = {name for weight in weights.values() for name in weight.tensors} | shapes_of_modules.keys()
    tensors, names = _with_current_names(family, stored_tensors(folder, TENSORS), known)
    settings = dataclasses.replace(settings, names=names)
    _check_no_pairs_of_tables(folder.path / TENSORS, tensors, modules)
    check_dtypes(tensors)
    weights = {path: weight for path, weight in weights.items() if weight.tensors & tensors.keys()}
    wanted = {name: shape for name, shape in shapes_of_modules.items() if name in tensors}
    for weight in weights.values():
        wanted |= weight.shapes(settings, tensors)
    check_tensors(
        folder.path,
        tensors,
        wanted,
        rule="An adapter must hold both factors of each adapted weight, all tensors of saved modules, and nothing else",
        verdict="is not a LoRA pair or a saved module of this model",
        source=f"the model and {settings.described}",
    )
    if not wanted:
        raise ConversionError(
            f"{folder.path / TENSORS} holds no pair and no saved module: there is nothing to load. Save the adapter "
            f"again after training."
        )
    model = _with_saved_modules(model, modules, tensors, settings, folder.path / CONFIG)
    params = np.dtype(model.execution.precision.params if dtype is None else dtype)
    leaves, nodes = whole_weights(model)[1], {}
    shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves([leaves[path] for path in weights]))
    text = f"{folder.path / CONFIG}: use_dora and init_lora_weights='pissa' are read beside the weights"
    free = not (shapes and (settings.dora or settings.pissa))
    check(free, f"{text}, and this model has shapes alone.", ConversionError)
    for path, weight in weights.items():
        parts, scale = weight.load(tensors, settings, params)
        nodes[path] = LowRank(base=leaves[path], scale=scale, **parts)
        if settings.pissa:
            weight.check_same_rank(settings, folder.path / CONFIG, tensors)
    target = replaced(model, nodes)
    shardings = named_leaves(model.execution.layout.shardings(target))
    arrays = {name: leaf for name, leaf in named_leaves(target).items() if isinstance(leaf, np.ndarray)}
    adapted = replaced(target, {name: _placed(leaf, shardings[name]) for name, leaf in arrays.items()})
    if not (settings.pissa or settings.dora):
        return adapted
    layout = model.execution.layout
    nodes = low_rank_weights(adapted)
    present = {path: weights[path].is_present(tensors) for path in nodes}
    return replaced(
        adapted, {path: _relative_to_base(layout, node, settings, present[path]) for path, node in nodes.items()}
    )


def _check_no_pairs_of_tables(
    file: Path, tensors: Mapping[str, StoredTensor], modules: Mapping[str, WeightMapping]
) -> None:
    """Raise ConversionError for LoRA pairs of the embedding or of the output head."""
    heads = {name.removesuffix(_WEIGHT) for name in modules["head.kernel"].names} if "head.kernel" in modules else set()
    for name in tensors:
        if ".lora_embedding_" in name:
            raise ConversionError(
                f"{file}: {name} is a LoRA pair of an embedding, which is not supported. Merge the adapter with PEFT's "
                f"merge_and_unload, or train without the embedding in target_modules."
            )
        module = re.sub(_ENDS, "", name)
        if module in heads and re.search(r"\.lora_\w+(\.weight)?$", name):
            raise ConversionError(
                f"{file}: {name} is a LoRA pair of the output head, which is not supported. Merge the adapter with "
                f"PEFT's merge_and_unload, or train without {module.rpartition('.')[2]} in target_modules."
            )


def _relative_to_base(layout: Layout, node: LowRank, settings: AdapterSettings, present: np.ndarray) -> LowRank:
    """Return a loaded pair beside what remains of its weight (PiSSA), and its magnitudes as differences (DoRA).

    Layers that are not `present` in the adapter keep their magnitudes.
    """
    if settings.pissa:
        shaped = dataclasses.replace(node, start_a=node.lora_a, start_b=node.lora_b)
        split = taken_out(layout, shaped, node.lora_a.shape[-1])
        node = dataclasses.replace(node, base=split.base, start_a=split.start_a, start_b=split.start_b)
    if node.lora_magnitude is None:
        return node
    like = jax.tree.map(lambda leaf: leaf, node.lora_magnitude)

    def difference(node: LowRank) -> jax.Array:
        assert node.lora_magnitude is not None
        mask = present.reshape(*present.shape, *[1] * (node.lora_magnitude.ndim - present.ndim))
        return jnp.where(mask, node.lora_magnitude - node.lengths()[0], 0)

    run = layout.automatically(difference, lambda _: partitions(like))
    return dataclasses.replace(node, lora_magnitude=jax.jit(run, out_shardings=out_shardings(like))(node))


def _placed(factor: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):  # uncommitted, like the arrays of `init`
        return jax.device_put(factor)
    return jax.make_array_from_callback(factor.shape, sharding, lambda index: factor[index])


def save_peft(
    model: Decoder, directory: str | Path, *, base_model: str = "", tokenizer: str | Path | None = None
) -> None:
    """Write the low-rank pairs of a model as a directory that `PeftModel.from_pretrained` and `load_peft` open.

    Pairs that were taken out of their weights (PiSSA) are written as what they add to these, of the double rank, as
    PEFT converts them: `scale (a b - a_0 b_0)`. Modules in `model.saved_modules`, which `load_peft` took from an
    adapter, are written completely, with `modules_to_save` and `bias` in `adapter_config.json`. Other weights that were
    trained besides the pairs are not written: use `merge_lora` and `save_hf` for them.

    **Arguments:**

    - `model`: with pairs, of a family that Hugging Face knows.
    - `directory`: a new or empty one; it appears completely or not at all.
    - `base_model`: name or directory of the base, for PEFT's automatic classes.
    - `tokenizer`: a directory whose tokenizer, chat template and `generation_config.json` are copied; None: nothing is.

    Raises ConversionError where there is no pair, or one that PEFT has no name for. In a run of several processes all
    of them must call it; the first one writes.
    """
    nodes, weights = adapter_plan(model)
    adapted = {module for path in nodes for module in weights[path].modules}
    saved, saved_settings = _saved_module_plan(model, adapted)
    with exported_directory(directory) as folder:
        tensors: dict[str, np.ndarray] = {}
        for path, node in nodes.items():
            for name, part in on_originals(model.execution.layout, node).items():
                whole = on_first_host(part)
                tensors |= {} if whole is None else weights[path].factors[name].stored(whole)
        for name, make in exported(named_leaves(model), saved).items():
            whole = make()
            module = name.removeprefix(_PREFIX).removesuffix(".bias")
            if name.endswith(".bias") and module in adapted:
                name = f"{_PREFIX}{module}.base_layer.bias"  # PEFT wraps adapted modules
            tensors |= {} if whole is None else {name: whole}
        if folder is not None:
            copy_tokenizer(tokenizer, folder)
            kinds = {module: _kind(node) for path, node in nodes.items() for module in weights[path].modules}
            content = adapter_config(
                kinds,
                _modules(model),
                dora=any(node.lora_magnitude is not None for node in nodes.values()),
                inputs_first=any(weights[path].inputs_first for path in nodes),
                base_model=base_model,
            )
            write_json(folder / CONFIG, content | saved_settings, sort_keys=True)
            save_tensors(tensors, folder / TENSORS)


def adapter_plan(model: Decoder) -> tuple[dict[str, LowRank], dict[str, "_AdaptableWeight"]]:
    """Return the pairs of a model (of arrays or shapes), and the weights that PEFT can adapt, by their paths.

    Raises all errors that are known before `save_peft` writes anything.
    """
    safetensors()
    nodes = low_rank_weights(model)
    check(bool(nodes), "save_peft: the model has no low-rank pairs. Add them with add_lora.", ConversionError)
    kinds = {node.lora_magnitude is not None for node in nodes.values()}
    check(len(kinds) == 1, "save_peft: some pairs have magnitudes and some have none. Use one kind.", ConversionError)
    weights = _adaptable(replaced(model, {path: node.base for path, node in nodes.items()}), True in kinds)
    lost = sorted(nodes.keys() - weights.keys())
    check(not lost, f"save_peft: PEFT has no module for {', '.join(lost)}: merge or remove its pair.", ConversionError)
    _saved_module_plan(model, set())
    return nodes, weights


def _saved_module_plan(model: Decoder, adapted: Set[str]) -> tuple[dict[str, WeightMapping], dict[str, Any]]:
    """Return the mappings of the weights that `save_peft` stores completely, and their settings.

    Raises ConversionError for paths in `model.saved_modules` that are not weights of the model.
    """
    if not model.saved_modules:
        return {}, {}
    base = replaced(model, {path: node.base for path, node in low_rank_weights(model).items()})
    family, _ = export_config(base)
    mappings = _whole_modules(base, family)
    missing = [path for path in model.saved_modules if path not in mappings or path not in named_leaves(base)]
    if missing:
        raise ConversionError(
            f"save_peft: saved_modules={list(model.saved_modules)}, but the model has no weight {missing[0]} that "
            f"{family.model_type} stores. Merge the adapter with merge_lora and save the model with save_hf."
        )
    recorded = {name for path in model.saved_modules for name in mappings[path].names}
    modules = {name.rpartition(".")[0] for name in recorded if not name.endswith(".bias")}
    saved = {
        path: mapping
        for path, mapping in mappings.items()
        if path in named_leaves(base)
        and any(name in recorded or name.rpartition(".")[0] in modules for name in mapping.names)
    }
    names = [name for mapping in saved.values() for name in mapping.names]
    has_bias = any(name.endswith(".bias") and name.rpartition(".")[0] not in modules for name in names)
    # complete names: PEFT compares the ends of names, and "norm" is the end of "input_layernorm", too
    settings: dict[str, Any] = {"modules_to_save": sorted(module.removeprefix(_PREFIX) for module in modules) or None}
    settings["bias"] = "all" if has_bias else "none"
    if model.config.tied and "embedding.table" in saved:
        settings["ensure_weight_tying"] = True
    return saved, settings


def on_originals(layout: Layout, node: LowRank) -> dict[str, jax.Array]:
    """Return the factors and magnitudes of an adapter of the original weight, as PEFT has them."""
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
            found["lora_magnitude"] = node.lengths()[0] + node.lora_magnitude
        return found

    places = {name: part.sharding for name, part in parts.items()}
    auto = layout.automatically(run, lambda _: {name: place.spec for name, place in places.items()})
    return jax.jit(auto, out_shardings=out_shardings(parts))(node)


def _kind(node: LowRank) -> tuple[int, float]:
    """Return rank and scale of a pair as it is written."""
    return node.lora_a.shape[-1] * (1 if node.start_a is None else 2), node.scale


@dataclasses.dataclass(frozen=True)
class _Factor:
    """Factor of a weight's pair in an adapter.

    **Arguments:**

    - `names`: its tensors, one for each layer, or each expert of each layer, of a stacked weight.
    - `stack`: sizes of our leading axes, `layers` and `experts`.
    - `theirs`, `ours`: einops patterns of a tensor there and of a layer here, with `rank` among the words.
    - `sizes`: of the words other than `rank`.
    """

    names: tuple[str, ...]
    stack: tuple[int, ...]
    theirs: str
    ours: str
    sizes: Mapping[str, int]

    def shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a tensor of this rank."""
        features = math.prod(self.sizes.values())
        return tuple(
            rank if part == "rank" else features for part in re.sub(r"\(.*\)", "features", self.theirs).split()
        )

    def load(
        self, tensors: Mapping[str, StoredTensor], rank: int, factors: Sequence[float], dtype: np.dtype
    ) -> np.ndarray:
        """Read the tensors times `factors`, filled with zeros up to this rank, and where there is no tensor."""
        pattern, layers = f"{self.theirs} -> {self.ours}", []
        for name, factor in zip(self.names, factors, strict=True):
            if name not in tensors:
                shape = (rank if word == "rank" else self.sizes[word] for word in self.ours.split())
                layers.append(np.zeros(tuple(shape), dtype))
                continue
            layer = rearrange(tensors[name].read_all(), pattern, **self.sizes)
            layer = layer if factor == 1.0 else layer.astype(np.float32) * np.float32(factor)
            words = self.ours.split()
            layers.append(
                np.pad(
                    layer,
                    [(0, rank - size if word == "rank" else 0) for word, size in zip(words, layer.shape, strict=True)],
                ).astype(dtype)
            )
        return np.stack(layers).reshape(*self.stack, *layers[0].shape) if self.stack else layers[0]

    def stored(self, factor: np.ndarray) -> dict[str, np.ndarray]:
        layers = [
            np.ascontiguousarray(rearrange(layer, f"{self.ours} -> {self.theirs}", **self.sizes))
            for layer in factor.reshape(-1, *factor.shape[len(self.stack) :])
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

    def is_present(self, tensors: Mapping[str, StoredTensor]) -> np.ndarray:
        """Return which layers and experts have a tensor of a pair."""
        factors = list(self.factors.values())
        present = [any(factor.names[i] in tensors for factor in factors) for i in range(len(self.modules))]
        return np.asarray(present).reshape(factors[0].stack)

    def shapes(self, settings: AdapterSettings, tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of the modules that have one."""
        return {
            factor.names[index]: factor.shape(settings.rank_of(self.modules[index]))
            for index in np.flatnonzero(self.is_present(tensors))
            for factor in self.factors.values()
        }

    def load(
        self, tensors: Mapping[str, StoredTensor], settings: AdapterSettings, dtype: np.dtype
    ) -> tuple[dict[str, np.ndarray], float]:
        """Return the parts of the pair, and its scale: the first layer's, with those of others in their factors."""
        there = [self.modules[index] for index in np.flatnonzero(self.is_present(tensors))]
        rank = max(map(settings.rank_of, there))
        scale, *_ = scales = [settings.scale_of(module) for module in self.modules]
        factors = {"lora_b": [each / scale for each in scales]}
        dtypes, ones = {"lora_magnitude": np.promote_types(dtype, np.float32)}, [1.0] * len(scales)
        parts = self.factors.items()
        return {
            name: part.load(tensors, rank, factors.get(name, ones), dtypes.get(name, dtype)) for name, part in parts
        }, scale

    def check_same_rank(self, settings: AdapterSettings, file: Path, tensors: Mapping[str, StoredTensor]) -> None:
        """Raise ConversionError where layers differ in rank or scale, or some have no pair."""
        if not self.is_present(tensors).all():
            raise ConversionError(
                f"{file}: init_lora_weights='pissa' for some layers of a stack that is split as a whole, "
                f"{self.modules[0]} and others: convert the adapter with PEFT's save_pretrained("
                f"path_initial_model_for_weight_conversion=…)."
            )
        kinds = {(settings.rank_of(module), settings.scale_of(module)) for module in self.modules}
        rule = f"which the layers of a stack must share so that weights can be split: {self.modules[0]}"
        text = f"{file}: init_lora_weights='pissa' with several (rank, scale), {sorted(kinds)}, {rule}."
        check(len(kinds) == 1, text, ConversionError)


def _with_current_names(
    family: Family, stored: Mapping[str, StoredTensor], known: Set[str]
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return an adapter's tensors under their names in present transformers, and the former names of renamed modules.

    PEFT's frozen copies of modules are left out, and so are its wrappers in names: `base_layer` of an adapted module
    (its bias, with `bias="all"`), and `modules_to_save` with or without the adapter's name.
    """
    tensors: dict[str, StoredTensor] = {}
    modules: dict[str, str] = {}
    for name, tensor in stored.items():
        if ".original_module." in name:
            continue
        here, inner = name, name.removeprefix(_PREFIX)
        for unwrapped in _without_wrappers(inner) if name.startswith(_PREFIX) else ():
            candidates = [_PREFIX + candidate for candidate in _present_names(family, unwrapped)]
            found = next((candidate for candidate in candidates if candidate in known), None)
            if found is not None:
                here, inner = found, unwrapped
                break
        if here in tensors:
            raise ConversionError(f"{tensor.file}: {name} and {tensors[here].name} are the same tensor: keep one.")
        tensors[here] = tensor
        modules[re.sub(_ENDS, "", here).removeprefix(_PREFIX)] = re.sub(_ENDS, "", inner)
    return tensors, modules


def _without_wrappers(name: str) -> Iterator[str]:
    """Yield the names that a tensor may have without PEFT's wrappers of its module."""
    name = re.sub(r"\.base_layer(?=\.)", "", name)
    for wrapper in (r"\.modules_to_save\.default(?=\.)", r"\.modules_to_save(?=\.)", r"\.modules_to_save\.[^.]+(?=\.)"):
        yield re.sub(wrapper, "", name)


def _present_names(family: Family, name: str) -> Iterator[str]:
    """Yield the names that a tensor of an adapter may have in this model, as transformers names it once it is loaded.

    It may have the name of another version of transformers, of the decoder inside of a model with encoders, of the
    decoder alone, or of the model without its head.
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
    """Return prefixes of decoders inside of models with encoders, longest first, each with that of a decoder alone."""
    pairs = {
        (prefix, text)
        for family in FAMILIES.values()
        for text, inner in family.text_names.items()
        for prefix in (inner, family.module_name(inner))
        if prefix != text
    }
    return tuple(sorted(pairs, key=lambda pair: (-len(pair[0]), pair)))


def _whole_modules(model: Decoder, family: Family) -> dict[str, WeightMapping]:
    """Return the mappings of the model's weights, by their paths, to tensors that an adapter may store completely.

    A tied model has an output head, too.
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
    """Return the model with the modules that an adapter stores completely. Raises ConversionError."""
    saved = {path: mapping for path, mapping in modules.items() if set(mapping.names) & tensors.keys()}
    for path, mapping in saved.items():
        lacking = [name for name in mapping.names if name not in tensors]
        if lacking:
            raise ConversionError(
                f"{file.with_name(TENSORS)} holds {len(mapping.names) - len(lacking)} of the {len(mapping.names)} "
                f"tensors of {path}. Layers are stacked: an adapter must save this module in every layer; {lacking[0]} "
                f"is missing."
            )
    if not saved:
        return model
    embedding = saved.get("embedding.table")
    trained = embedding is not None and embedding.names[0].split(".")[-2] in {
        name.rpartition(".")[2] for name in settings.saved
    }
    config = model.config
    if config.tied and "head.kernel" in saved:
        head = tensors[saved["head.kernel"].names[0]]
        table = None if embedding is None else tensors[embedding.names[0]]
        if table is not None and table.shape == head.shape and equal_tables(table, head):
            del saved["head.kernel"]
        else:
            config = dataclasses.replace(config, tied=False)
    elif config.tied and trained and not settings.tied:
        raise ConversionError(
            f"{file}: modules_to_save={list(settings.saved)} has the embedding of a model with a tied output head and "
            f"not the head, which keeps the original embedding in PEFT unless ensure_weight_tying is true. Save the "
            f"head, too, or train with ensure_weight_tying=True."
        )
    target = abstract(config, layout=model.execution.layout, precision=model.execution.precision)
    leaves = named_leaves(target)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model)):
        arrays = {path: leaves[path] for path in saved}
    else:
        with StatusLine("loading modules", total=sum(device_bytes(leaves[path]) for path in saved)) as status:
            arrays = {path: load_weight(leaves[path], mapping, tensors, status) for path, mapping in saved.items()}
    if config.tied != model.config.tied:
        model = dataclasses.replace(model, config=config, head=target.head)
    return dataclasses.replace(replaced(model, arrays), saved_modules=tuple(sorted(saved)))


def _adaptable(model: Decoder, magnitudes: bool, experts: bool = False) -> dict[str, _AdaptableWeight]:
    """Find the weights that PEFT can adapt, by their paths: matrices of blocks that are one module's weight.

    With `experts` also single experts, which are modules in transformers 4 and in no later version.
    """
    model = plain_shapes(model)
    family, _ = export_config(model)
    words, weights = axes(model), {}
    for path, mapping in family.bind(model).items():
        split = product_axes(words[path])
        whole = (
            mapping.section is None
            and "experts" not in mapping.words
            and (experts or "experts" not in words[path])
            and all(name.endswith(_WEIGHT) for name in mapping.names)
        )
        if split is not None and whole:
            inputs, outputs = mapping.words[: len(split[0])], mapping.words[len(split[0]) :]
            if {frozenset(inputs), frozenset(outputs)} == set(map(frozenset, mapping.groups)):
                modules = tuple(family.module_name(name).removesuffix(_WEIGHT) for name in mapping.names)
                weights[path] = _adaptable_weight(mapping, modules, inputs, outputs, magnitudes)
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
    their_inputs, their_outputs = (first, second) if inputs_first else (second, first)

    def factor(name: str, theirs: str, ours: tuple[str, ...], features: tuple[str, ...]) -> _Factor:
        names = tuple(f"{_PREFIX}{module}.{name}" for module in modules)
        return _Factor(names, mapping.stack, theirs, " ".join(ours), {word: mapping.sizes[word] for word in features})

    factors = {
        "lora_a": factor(f"lora_A{_WEIGHT}", f"rank ({their_inputs})", (*inputs, "rank"), inputs),
        "lora_b": factor(f"lora_B{_WEIGHT}", f"({their_outputs}) rank", ("rank", *outputs), outputs),
    }
    if magnitudes:
        factors["lora_magnitude"] = factor("lora_magnitude_vector", f"({their_outputs})", outputs, outputs)
    return _AdaptableWeight(modules, inputs_first, factors)


def _modules(model: Decoder) -> set[str]:
    """Return all modules that have a weight, also those that PEFT can't adapt."""
    base = plain_shapes(replaced(model, {path: node.base for path, node in low_rank_weights(model).items()}))
    family, _ = export_config(base)
    names = (family.module_name(name) for mapping in family.bind(base).values() for name in mapping.names)
    return {name.removesuffix(_WEIGHT) for name in names if name.endswith(_WEIGHT)}
