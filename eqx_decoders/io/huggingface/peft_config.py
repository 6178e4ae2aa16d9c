"""`adapter_config.json` of PEFT: rank and scale of each module's pair, and what else an adapter is."""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from eqx_decoders.core.config_reader import Fields


# Keys that don't change what a loaded adapter computes, each with the reason.
IGNORED_PEFT_KEYS: dict[str, str] = {
    **dict.fromkeys(("base_model_name_or_path", "revision", "auto_mapping", "peft_version"), "where it came from"),
    **dict.fromkeys(("task_type", "inference_mode"), "how PEFT wraps the model"),
    **dict.fromkeys(
        ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        "the names of the tensors show which modules have a pair",
    ),
    **dict.fromkeys(("lora_dropout", "eva_config"), "of training only"),
    **dict.fromkeys(("megatron_core", "qalora_group_size"), "a setting of what must be off"),
    "fan_in_fan_out": "how the frozen weight is stored; lora_A and lora_B never are",
    "runtime_config": "where PEFT keeps weights while it runs",
}

# Keys whose effect is not supported, with the values that switch them off (null always does).
UNSUPPORTED_KEYS: dict[str, tuple[Any, ...]] = {
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "pissa"),  # others change the frozen weights
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

    - `rank`, `alpha`: of modules that no pattern matches.
    - `ranks`, `alphas`: those of others, by PEFT's patterns: regular expressions of the last parts of names.
    - `stabilized`: whether pairs are multiplied by `alpha / sqrt(rank)`.
    - `dora`: whether modules have magnitudes.
    - `pissa`: whether pairs stand beside what remains of weights without their largest singular values.
    - `saved`: names of modules that are stored completely.
    - `parameters`: ends of the names of parameters with pairs, such as experts that share one parameter.
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
        """Return the factor of a module's pair."""
        rank = self.rank_of(module)
        alpha = _first_match(self.file_names.get(module, module), self.alphas, self.alpha)
        return alpha / _divisor(rank, self.stabilized)

    @property
    def described(self) -> str:
        """The ranks, for error messages."""
        return f"r={self.rank}" + (f" and rank_pattern={dict(self.ranks)}" if self.ranks else "")


def _first_match(module: str, patterns: Mapping[str, Any], otherwise: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def _divisor(rank: int, stabilized: bool) -> float:
    return math.sqrt(rank) if stabilized else float(rank)


def read_settings(fields: Fields) -> AdapterSettings:
    """Read the settings. Raises ConversionError for unknown ones unless they are off or without effect."""
    fields.word("peft_type", {"LORA": True})
    rank, alpha = fields.integer("r"), fields.number("lora_alpha")
    stabilized, dora = fields.flag("use_rslora", False), fields.flag("use_dora", False, null=False)
    ranks, alphas = (_patterns(fields, key) for key in ("rank_pattern", "alpha_pattern"))
    pissa = fields.take("init_lora_weights", True) == "pissa"
    fields.word(
        "bias", dict.fromkeys(("none", "all", "lora_only"), True), "none"
    )  # the tensors show which biases were trained
    saved, parameters = _names(fields, "modules_to_save"), _names(fields, "target_parameters")
    token_ids = _token_ids(fields)
    tied = fields.flag("ensure_weight_tying", False)
    for key, allowed in UNSUPPORTED_KEYS.items():
        fields.allow_only(key, *allowed)
    fields.finish(IGNORED_PEFT_KEYS)
    return AdapterSettings(
        rank, alpha, ranks, alphas, stabilized, dora, pissa, saved, parameters, token_ids=token_ids, tied=tied
    )


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


def _patterns(fields: Fields, key: str) -> dict[str, Any]:
    """Read a table of numbers by patterns."""
    if fields.take(key, None) is None:
        return {}
    table = fields.table(key)
    assert table is not None
    values: dict[str, Any] = {}
    for pattern in table.content:
        try:
            re.compile(pattern)
        except re.error as error:
            raise fields.error(f"{key}: {pattern[:60]!r} is no regular expression: {error}.") from error
        values[pattern] = table.integer(pattern) if key == "rank_pattern" else table.number(pattern)
    return values


def adapter_config(
    kinds: Mapping[str, tuple[int, float]], every: Set[str], *, dora: bool, inputs_first: bool, base_model: str
) -> dict[str, Any]:
    """Return the content of `adapter_config.json`, given rank and scale of each module that is adapted."""
    (rank, scale), _ = collections.Counter(kinds.values()).most_common(1)[0]
    alpha, stabilized = _alpha(rank, scale)

    def others(main: int | float, values: Mapping[str, Any]) -> dict[str, Any]:
        names = {value: {module for module in kinds if values[module] == value} for value in values.values()}
        rows = [(short_names(some, kinds.keys()), value) for value, some in names.items() if value != main]
        return {name: value for short, value in rows for name in short}

    alphas = {module: _whole(scale, _divisor(rank, stabilized)) for module, (rank, scale) in kinds.items()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": others(rank, {module: rank for module, (rank, _) in kinds.items()}),
        "alpha_pattern": others(alpha, alphas),
        "use_rslora": stabilized,
        "use_dora": dora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": inputs_first,
        "target_modules": short_names(kinds.keys(), every),
        "inference_mode": True,
    }


def _alpha(rank: int, scale: float) -> tuple[int | float, bool]:
    """Return `lora_alpha` and `use_rslora` that give this scale: `lora_alpha` is a whole number if possible."""
    for stabilized in (False, True):
        alpha = _whole(scale, _divisor(rank, stabilized))
        if isinstance(alpha, int):
            return alpha, stabilized
    return scale * rank, False


def _whole(scale: float, divisor: float) -> int | float:
    """Return the alpha that gives a scale, as a whole number if one does."""
    alpha = round(scale * divisor)
    return alpha if alpha / divisor == scale else scale * divisor


def short_names(adapted: Set[str], every: Set[str]) -> list[str]:
    """Return the last parts of modules' names where `every` module of that name is adapted, otherwise full names.

    A number is no such name: layers are numbered, too.
    """
    ambiguous = {module.rpartition(".")[2] for module in every - adapted}
    names = {module: module.rpartition(".")[2] for module in adapted}
    return sorted({module if last in ambiguous or last.isdecimal() else last for module, last in names.items()})
