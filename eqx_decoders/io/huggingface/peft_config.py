"""`adapter_config.json` of PEFT: reading it as `AdapterSettings`, and writing it."""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from eqx_decoders.core.config_reader import Fields


# Keys that don't change what a loaded adapter computes, each with the reason.
IGNORED_PEFT_KEYS: dict[str, str] = {
    **dict.fromkeys(("base_model_name_or_path", "revision", "auto_mapping", "peft_version"), "origin of the adapter"),
    **dict.fromkeys(("task_type", "inference_mode"), "how PEFT wraps the model"),
    **dict.fromkeys(
        ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        "the names of the tensors show which modules have a pair",
    ),
    **dict.fromkeys(("lora_dropout", "eva_config"), "used in training only"),
    **dict.fromkeys(("megatron_core", "qalora_group_size"), "part of a feature that must be off"),
    "fan_in_fan_out": "whether the base weight is stored as [in, out]; the layout of lora_A and lora_B is fixed",
    "runtime_config": "where PEFT stores weights at run time",
}

# Keys whose effect is not supported, with the values that are accepted because they turn it off. Null always does.
UNSUPPORTED_KEYS: dict[str, tuple[Any, ...]] = {
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "pissa"),  # others change the base weights
    **dict.fromkeys(("use_qalora", "use_bdlora", "lora_bias"), (False,)),
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens"), ([],)),
    "loftq_config": ({},),
    **dict.fromkeys(("megatron_config", "corda_config", "lora_ga_config"), ()),
    **dict.fromkeys(("arrow_config", "kasa_config", "monteclora_config", "velora_config"), ()),
}


@dataclasses.dataclass(frozen=True)
class AdapterSettings:
    """Settings of an adapter.

    **Arguments:**

    - `rank`, `alpha`: rank and alpha of modules that no pattern matches.
    - `ranks`, `alphas`: `rank_pattern` and `alpha_pattern`: values by regular expressions of the ends of module names.
    - `stabilized`: whether the scale of a pair is `alpha / sqrt(rank)` (rsLoRA) instead of `alpha / rank`.
    - `dora`: whether modules have DoRA magnitudes.
    - `pissa`: whether the largest singular values are subtracted from the base weights when the adapter is loaded.
    - `saved`: names of modules that are stored completely (`modules_to_save`).
    - `parameters`: ends of the names of parameters with pairs (`target_parameters`), such as experts in one parameter.
    - `token_ids`: ids of trained tokens, by the end of the name of the embedding or the output head.
    - `tied`: whether a saved embedding is also the output head.
    - `file_names`: names of modules in the adapter's file, by their names in the current version of transformers.
        `ranks` and `alphas` match the names in the file.
    """

    rank: int
    alpha: int | float
    ranks: Mapping[str, int]
    alphas: Mapping[str, int | float]
    stabilized: bool
    dora: bool
    pissa: bool
    saved: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    token_ids: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    tied: bool = False
    file_names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's pair."""
        return _first_match(self.file_names.get(module, module), self.ranks, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the scale of a module's pair."""
        rank = self.rank_of(module)
        alpha = _first_match(self.file_names.get(module, module), self.alphas, self.alpha)
        return alpha / _divisor(rank, self.stabilized)

    @property
    def described(self) -> str:
        """Description of the ranks for error messages."""
        return f"r={self.rank}" + (f" and rank_pattern={dict(self.ranks)}" if self.ranks else "")


def _first_match(module: str, patterns: Mapping[str, Any], default: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _divisor(rank: int, stabilized: bool) -> float:
    return math.sqrt(rank) if stabilized else float(rank)


def read_settings(fields: Fields) -> AdapterSettings:
    """Return the settings in `adapter_config.json`. Raises ConversionError for unknown and unsupported keys."""
    fields.word("peft_type", {"LORA": True})
    # The names of the tensors show which biases were trained.
    fields.word("bias", dict.fromkeys(("none", "all", "lora_only"), True), "none")
    settings = AdapterSettings(
        rank=fields.integer("r"),
        alpha=fields.number("lora_alpha"),
        ranks=_numbers_by_pattern(fields, "rank_pattern"),
        alphas=_numbers_by_pattern(fields, "alpha_pattern"),
        stabilized=fields.flag("use_rslora", False),
        dora=fields.flag("use_dora", False, null=False),
        pissa=fields.take("init_lora_weights", True) == "pissa",
        saved=_names(fields, "modules_to_save"),
        parameters=_names(fields, "target_parameters"),
        token_ids=_token_ids(fields),
        tied=fields.flag("ensure_weight_tying", False),
    )
    for key, allowed in UNSUPPORTED_KEYS.items():
        fields.allow_only(key, *allowed)
    fields.finish(IGNORED_PEFT_KEYS)
    return settings


def _names(fields: Fields, key: str) -> tuple[str, ...]:
    names = fields.take(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fields.error(f"{key}={str(names)[:60]} must be a list of names.")
    return tuple(names)


def _token_ids(fields: Fields) -> dict[str, list[int]]:
    """Read `trainable_token_indices`. A list contains ids of the input embedding, whose name is then empty."""
    value = fields.take("trainable_token_indices", {})
    table = {"": value} if isinstance(value, list) and value else value
    if table == []:
        return {}
    if not isinstance(table, dict) or not all(
        isinstance(ids, list) and all(type(index) is int and index >= 0 for index in ids) for ids in table.values()
    ):
        raise fields.error(
            f"trainable_token_indices={str(value)[:60]} must be a list of token ids, or an object with a list of token "
            f"ids for each embedding."
        )
    return table


def _numbers_by_pattern(fields: Fields, key: str) -> dict[str, Any]:
    """Read an object with numbers by regular expressions of module names."""
    if fields.take(key, None) is None:
        return {}
    table = fields.table(key)
    assert table is not None
    values: dict[str, Any] = {}
    for pattern in table.content:
        try:
            re.compile(pattern)
        except re.error as error:
            raise fields.error(f"{key}: {pattern[:60]!r} is not a valid regular expression: {error}.") from error
        values[pattern] = table.integer(pattern) if key == "rank_pattern" else table.number(pattern)
    return values


def adapter_config(
    ranks_and_scales: Mapping[str, tuple[int, float]],
    modules: Set[str],
    *,
    dora: bool,
    inputs_first: bool,
    base_model: str,
) -> dict[str, Any]:
    """Return the content of `adapter_config.json`.

    **Arguments:**

    - `ranks_and_scales`: rank and scale of the pair of each adapted module.
    - `modules`: names of all modules with a weight.
    - `dora`: whether the pairs have DoRA magnitudes.
    - `inputs_first`: whether transformers stores the weights as `[in, out]`.
    - `base_model`: name or directory of the base model; empty: unknown.
    """
    (rank, scale), _ = collections.Counter(ranks_and_scales.values()).most_common(1)[0]
    alpha, stabilized = _alpha(rank, scale)
    adapted = ranks_and_scales.keys()
    ranks = {module: module_rank for module, (module_rank, _) in ranks_and_scales.items()}
    alphas = {
        module: _integer_if_exact(module_scale, _divisor(module_rank, stabilized))
        for module, (module_rank, module_scale) in ranks_and_scales.items()
    }

    def pattern_table(default: int | float, values: Mapping[str, int | float]) -> dict[str, int | float]:
        """Return the values that differ from the default, by names of modules."""
        table: dict[str, int | float] = {}
        for value in dict.fromkeys(values.values()):
            if value != default:
                selected = {module for module in adapted if values[module] == value}
                table |= dict.fromkeys(short_names(selected, adapted), value)
        return table

    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": pattern_table(rank, ranks),
        "alpha_pattern": pattern_table(alpha, alphas),
        "use_rslora": stabilized,
        "use_dora": dora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": inputs_first,
        "target_modules": short_names(adapted, modules),
        "inference_mode": True,
    }


def _alpha(rank: int, scale: float) -> tuple[int | float, bool]:
    """Return values of `lora_alpha` and `use_rslora` that give this scale. `lora_alpha` is an integer if possible."""
    for stabilized in (False, True):
        alpha = _integer_if_exact(scale, _divisor(rank, stabilized))
        if isinstance(alpha, int):
            return alpha, stabilized
    return scale * rank, False


def _integer_if_exact(scale: float, divisor: float) -> int | float:
    """Return `scale * divisor`, as an integer if the integer gives exactly this scale."""
    alpha = round(scale * divisor)
    return alpha if alpha / divisor == scale else scale * divisor


def short_names(selected: Set[str], modules: Set[str]) -> list[str]:
    """Return names that PEFT matches with the `selected` modules, but with no other module of `modules`.

    PEFT compares the ends of names. The last part of a name suffices if all modules with this last part are selected.
    Names that end with a number are not shortened, because layers are numbered, too.
    """
    ambiguous = {module.rpartition(".")[2] for module in modules - selected}
    last_parts = {module: module.rpartition(".")[2] for module in selected}
    return sorted({module if last in ambiguous or last.isdecimal() else last for module, last in last_parts.items()})
