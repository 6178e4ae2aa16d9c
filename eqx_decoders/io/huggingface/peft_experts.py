"""LoRA pairs of fused experts (PEFT's `target_parameters`), split into pairs of single experts.

Fused experts are one parameter, `[experts, out, in]` or `[experts, in, out]`. PEFT adapts it by two matrices,
`[experts * rank, features]` and `[features, rank * experts]`. If two parameters of a module have pairs, the pair of the
first is called `experts.base_layer.lora_A`, and the pair of the second `experts.lora_A`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eqx_decoders.errors import ConversionError
from eqx_decoders.families.family import Family, HasConfig
from eqx_decoders.families.weight_rows import WeightMapping
from eqx_decoders.io.huggingface.directory import StoredTensor
from eqx_decoders.sharding.axes import product_axes


_PARAMETERS = ("gate_up_proj", "down_proj")  # in the order in which PEFT adds pairs to them
_PAIR = re.compile(
    r"base_model\.model\.(?P<module>.*\.experts)(?P<levels>(\.base_layer)*)\.lora_(?P<factor>[AB])\.weight"
)


@dataclasses.dataclass(frozen=True)
class _ArrayTensor(StoredTensor):
    """Tensor that was computed from a stored tensor and is in memory."""

    array: Any = None

    def read(self, part: tuple[slice, ...]) -> np.ndarray:
        return self.array[part]


@dataclasses.dataclass(frozen=True)
class ExpertParameters:
    """Parameters `[experts, …, …]` that contain the experts of a model.

    **Arguments:**

    - `mappings`: mapping of each weight that is stored in such parameters, by path.
    - `modules`: names of the modules of single experts, in the order of the layers and experts, by path of the weight.
    """

    mappings: Mapping[str, WeightMapping]
    modules: Mapping[str, tuple[str, ...]]

    def split(
        self, stored: Mapping[str, StoredTensor], targets: Sequence[str], current_name: Callable[[str], str]
    ) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor], dict[str, str]]:
        """Return the other tensors, the factors of single experts by name, and the file's parameter of each module.

        Raises ConversionError if a pair does not have the shape of a parameter in `targets`.

        **Arguments:**

        - `stored`: tensors of the adapter.
        - `targets`: `target_parameters`.
        - `current_name`: function from a parameter's name in the file to its name in the current transformers.
        """
        tensors = dict(stored)
        pairs: dict[str, list[tuple[int, StoredTensor, StoredTensor]]] = {}
        for name, tensor in stored.items():
            match = _PAIR.fullmatch(name)
            if match is None or match["factor"] != "A":
                continue
            other = name.replace(".lora_A.", ".lora_B.")
            if other in stored:
                del tensors[name], tensors[other]
                pairs.setdefault(match["module"], []).append((match["levels"].count("."), tensor, stored[other]))
        parts: dict[str, StoredTensor] = {}
        parameters: dict[str, str] = {}
        for module, levels in pairs.items():
            adapted = [
                parameter
                for parameter in _PARAMETERS
                if any(f".{module}.{parameter}".endswith(f".{target}") for target in targets)
            ]
            levels.sort(key=lambda level: -level[0])
            if len(adapted) != len(levels):
                raise ConversionError(
                    f"{levels[0][1].file}: {module} has {len(levels)} LoRA pairs of parameters, but target_parameters="
                    f"{list(targets)} selects {len(adapted)} of its parameters. Save the adapter again with PEFT."
                )
            for parameter, (_, first, second) in zip(adapted, levels, strict=True):
                in_file = f"{module}.{parameter}"
                factors = self._factors(current_name(in_file), first, second)
                if not factors:
                    raise ConversionError(
                        f"{first.file}: {first.name} is a LoRA pair of {in_file}, but the model has no such parameter. "
                        f"Load the adapter into its base model."
                    )
                parts |= {f"{expert}.lora_{factor}.weight": part for (expert, factor), part in factors.items()}
                parameters |= {expert: in_file for expert, _ in factors}
        return tensors, parts, parameters

    def _factors(
        self, parameter: str, first: StoredTensor, second: StoredTensor
    ) -> dict[tuple[str, str], StoredTensor]:
        """Return both factors of each expert, by the expert's module and "A" or "B"."""
        found: dict[tuple[str, str], StoredTensor] = {}
        for path, mapping in self.mappings.items():
            split = product_axes(mapping.axes)
            if parameter not in mapping.names or split is None:
                continue
            layer = mapping.names.index(parameter)
            experts = mapping.shape[0]
            input_axis = mapping.groups.index(split[0])
            inputs, outputs = mapping.shape[input_axis], mapping.shape[3 - input_axis]
            if first.shape[0] % experts or first.shape[0] != second.shape[1]:
                raise self._error(parameter, mapping, first, second)
            a = first.read_all().reshape(experts, -1, first.shape[1])
            b = second.read_all().reshape(second.shape[0], -1, experts).transpose(2, 0, 1)
            if (first.shape[1], second.shape[0]) == (outputs, inputs) and inputs != outputs:
                a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)  # older versions of PEFT swap in and out
            elif (first.shape[1], second.shape[0]) != (inputs, outputs):
                raise self._error(parameter, mapping, first, second)
            if mapping.section is not None:
                section = dataclasses.replace(mapping.section, axis=1)
                b = section.of(b)
                b = b.reshape(experts, -1, b.shape[-1])
            modules = self.modules[path][layer * experts : (layer + 1) * experts]
            for module, a_part, b_part in zip(modules, a, b, strict=True):
                for factor, part, source in (("A", a_part, first), ("B", b_part, second)):
                    tensor = _ArrayTensor(source.file, source.name, part.shape, source.dtype, 0, part)
                    found[module, factor] = tensor
        return found

    @staticmethod
    def _error(parameter: str, mapping: WeightMapping, first: StoredTensor, second: StoredTensor) -> ConversionError:
        return ConversionError(
            f"{first.file}: {first.name} of shape {first.shape} and {second.name} of shape {second.shape} are not a "
            f"LoRA pair of {parameter}, which has the shape {mapping.shape}. Load the adapter into its base model."
        )


def with_fused_experts(family: Family) -> Family:
    """Return the family with the names and shapes of fused experts, as in the current version of transformers."""
    return dataclasses.replace(family, weights=family.weights + family.fused, fused=())


def renamed_modules(model: HasConfig, family: Family) -> dict[str, str]:
    """Return the modules that have another name in the current transformers: names in checkpoints, by current name.

    An example is the router of Mixtral, which is `block_sparse_moe.gate` in checkpoints and now `mlp.gate`.
    """
    stored, current = family.bind(model), with_fused_experts(family).bind(model)
    pairs = [
        (family.module_name(new).removesuffix(".weight"), family.module_name(old).removesuffix(".weight"))
        for path, mapping in stored.items()
        if len(mapping.names) == len(current[path].names)
        for old, new in zip(mapping.names, current[path].names, strict=True)
    ]
    return {new: old for new, old in pairs if new != old}


def expert_mappings(model: HasConfig, family: Family) -> dict[str, WeightMapping]:
    """Return the mappings of the weights that are fused experts, `[experts, …, …]`, by path.

    `family`: the result of `with_fused_experts`, if checkpoints store experts one by one.
    """
    return {
        path: dataclasses.replace(mapping, names=tuple(family.module_name(name) for name in mapping.names))
        for path, mapping in family.bind(model).items()
        if mapping.axes[:1] == ("experts",) and len(mapping.groups) == 3 and len(mapping.stack) == 1
    }


def single_expert(mapping: WeightMapping, module: str) -> WeightMapping:
    """Return the mapping of fused experts as if each expert had a separate matrix in a module of this name."""
    left, right = mapping.pattern.split("->")
    experts = mapping.shape[0]
    names = tuple(
        f"{name.rpartition('.')[0]}.{expert}.{module}.weight" for name in mapping.names for expert in range(experts)
    )
    pattern = f"{left.split(maxsplit=1)[1].strip()} -> {right.split(maxsplit=1)[1].strip()}"
    return WeightMapping(names, (*mapping.stack, experts), pattern, mapping.sizes)
