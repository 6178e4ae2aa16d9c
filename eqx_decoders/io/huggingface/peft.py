"""Adapter directories of PEFT, loaded and saved without PEFT: `adapter_config.json` and `adapter_model.safetensors`.

PEFT adds two matrices to a module's weight, `lora_A` [r, in] and `lora_B` [out, r], here called its low-rank pair, and
with DoRA `lora_magnitude_vector` [out]. The family's table of weights says which of our dimensions are folded into in
and out.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.typing import DTypeLike

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError, check
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.weight_rows import WeightMapping
from eqx_decoders.io.atomic_files import write_json
from eqx_decoders.io.huggingface.directory import Directory, StoredTensor, check_dtypes, check_tensors, stored_tensors
from eqx_decoders.io.huggingface.export_config import export_config
from eqx_decoders.io.huggingface.export_directory import copy_tokenizer, exported_directory
from eqx_decoders.io.huggingface.gather import on_first_host
from eqx_decoders.io.huggingface.peft_config import AdapterSettings, adapter_config, read_settings
from eqx_decoders.io.huggingface.safetensors_files import safetensors, save_tensors
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.pissa import taken_out
from eqx_decoders.numerics.low_rank import LowRank, low_rank_weights
from eqx_decoders.numerics.quantized_weight import plain_shapes, whole_weights
from eqx_decoders.sharding.axes import axes, named_leaves, product_axes, replaced
from eqx_decoders.sharding.layout import Layout, out_shardings, partitions


CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _WEIGHT = "base_model.model.", ".weight"


def load_peft(model: Decoder, directory: str | Path, *, dtype: DTypeLike | None = None) -> Decoder:
    """Add the low-rank pairs of a PEFT adapter to a model's weights, each created on its devices.

    **Arguments:**

    - `model`: the adapter's base, without pairs.
    - `directory`: with `adapter_config.json` and `adapter_model.safetensors`.
    - `dtype`: of the pairs; None for the model's parameter dtype.

    Magnitudes of DoRA become differences from the lengths at the start. For PiSSA (`init_lora_weights="pissa"`) the
    weights lose their largest singular values first, as PEFT does when it loads; adapters that PEFT has converted have
    the double rank and need no such thing. Layers of one stack may differ in rank: the smaller ones are filled with 0.

    Raises ConversionError where the adapter is of another model, is no LoRA, covers a stack of equal layers only in
    part, or has settings that are not understood.
    """
    folder, present = Directory(directory), low_rank_weights(model)
    check(not present, "load_peft: the model has low-rank pairs already. Call merge_lora first.", ConversionError)
    settings = read_settings(Fields(folder.json(CONFIG), CONFIG))
    family, _ = export_config(model)
    tensors = {_module_name(family, name): tensor for name, tensor in stored_tensors(folder, TENSORS).items()}
    check_dtypes(tensors)
    weights = _adaptable(model, settings.dora).items()
    weights = {path: weight for path, weight in weights if weight.tensors & tensors.keys()}
    check_tensors(
        folder.path,
        tensors,
        {name: shape for weight in weights.values() for name, shape in weight.shapes(settings).items()},
        rule="An adapter must hold both factors of a weight in all layers of a stack of equal ones, and nothing else",
        owner="matrix of the model's blocks",
        source=f"the model and {settings.described}",
    )
    check(bool(weights), f"{folder.path / TENSORS} holds no pair: there is nothing to load.", ConversionError)
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
            weight.check_equal(settings, folder.path / CONFIG)
    target = replaced(model, nodes)
    shardings = named_leaves(model.execution.layout.shardings(target))
    arrays = {name: leaf for name, leaf in named_leaves(target).items() if isinstance(leaf, np.ndarray)}
    adapted = replaced(target, {name: _placed(leaf, shardings[name]) for name, leaf in arrays.items()})
    if not (settings.pissa or settings.dora):
        return adapted
    layout = model.execution.layout
    return replaced(adapted, {path: _based(layout, node, settings) for path, node in low_rank_weights(adapted).items()})


def _based(layout: Layout, node: LowRank, settings: AdapterSettings) -> LowRank:
    """Return a loaded pair beside what remains of its weight (PiSSA), and its magnitudes as differences (DoRA)."""
    if settings.pissa:
        shaped = dataclasses.replace(node, start_a=node.lora_a, start_b=node.lora_b)
        split = taken_out(layout, shaped, node.lora_a.shape[-1])
        node = dataclasses.replace(node, base=split.base, start_a=split.start_a, start_b=split.start_b)
    if node.lora_magnitude is None:
        return node
    like = jax.tree.map(lambda leaf: leaf, node.lora_magnitude)
    run = layout.automatically(lambda node: node.lora_magnitude - node.lengths()[0], lambda _: partitions(like))
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
    PEFT converts them: `scale (a b - a_0 b_0)`.

    **Arguments:**

    - `model`: with pairs, of a family that Hugging Face knows.
    - `directory`: a new or empty one; it appears completely or not at all.
    - `base_model`: name or directory of the base, for PEFT's automatic classes.
    - `tokenizer`: a directory whose tokenizer, chat template and `generation_config.json` are copied; None: nothing is.

    Raises ConversionError where there is no pair, or one that PEFT has no name for. In a run of several processes all
    of them must call it; the first one writes.
    """
    nodes, weights = adapter_plan(model)
    with exported_directory(directory) as folder:
        tensors: dict[str, np.ndarray] = {}
        for path, node in nodes.items():
            for name, part in on_originals(model.execution.layout, node).items():
                whole = on_first_host(part)
                tensors |= {} if whole is None else weights[path].factors[name].stored(whole)
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
            write_json(folder / CONFIG, content, sort_keys=True)
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
    return nodes, weights


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
        """Return the shape of a tensor of this rank."""
        features = math.prod(self.sizes.values())
        return tuple(
            rank if part == "rank" else features for part in re.sub(r"\(.*\)", "features", self.theirs).split()
        )

    def load(
        self, tensors: Mapping[str, StoredTensor], rank: int, factors: Sequence[float], dtype: np.dtype
    ) -> np.ndarray:
        """Read the tensors times `factors`, filled with zeros up to this rank."""
        pattern, layers = f"{self.theirs} -> {self.ours}", []
        for name, factor in zip(self.names, factors, strict=True):
            layer = rearrange(tensors[name].read_all(), pattern, **self.sizes)
            layer = layer if factor == 1.0 else layer.astype(np.float32) * np.float32(factor)
            words = self.ours.split()
            layers.append(
                np.pad(
                    layer,
                    [(0, rank - size if word == "rank" else 0) for word, size in zip(words, layer.shape, strict=True)],
                ).astype(dtype)
            )
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

    def shapes(self, settings: AdapterSettings) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor."""
        ranks = [settings.rank_of(module) for module in self.modules]
        factors = self.factors.values()
        return {name: each.shape(rank) for each in factors for name, rank in zip(each.names, ranks, strict=True)}

    def load(
        self, tensors: Mapping[str, StoredTensor], settings: AdapterSettings, dtype: np.dtype
    ) -> tuple[dict[str, np.ndarray], float]:
        """Return the parts of the pair, and its scale: the first layer's, with those of others in their factors."""
        rank = max(map(settings.rank_of, self.modules))
        scale, *_ = scales = [settings.scale_of(module) for module in self.modules]
        factors = {"lora_b": [each / scale for each in scales]}
        dtypes, ones = {"lora_magnitude": np.promote_types(dtype, np.float32)}, [1.0] * len(scales)
        parts = self.factors.items()
        return {
            name: part.load(tensors, rank, factors.get(name, ones), dtypes.get(name, dtype)) for name, part in parts
        }, scale

    def check_equal(self, settings: AdapterSettings, file: Path) -> None:
        """Raise ConversionError where layers differ in rank or scale."""
        kinds = {(settings.rank_of(module), settings.scale_of(module)) for module in self.modules}
        rule = f"which the layers of a stack must share so that weights can be split: {self.modules[0]}"
        text = f"{file}: init_lora_weights='pissa' with several (rank, scale), {sorted(kinds)}, {rule}."
        check(len(kinds) == 1, text, ConversionError)


def _module_name(family: Family, name: str) -> str:
    """Return the name of an adapter's tensor in present transformers; older ones used the names in the files."""
    if not name.startswith(_PREFIX):
        return name
    return _PREFIX + family.module_name(family.stored_name(name.removeprefix(_PREFIX)))


def _adaptable(model: Decoder, magnitudes: bool) -> dict[str, _AdaptableWeight]:
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
        return _Factor(names, mapping.stacked, theirs, " ".join(ours), {word: mapping.sizes[word] for word in features})

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
