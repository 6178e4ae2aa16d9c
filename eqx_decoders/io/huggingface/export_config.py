"""Settings in `config.json` of an exported model, and its family."""

import textwrap
from collections.abc import Mapping
from typing import Any

from eqx_decoders.errors import ConversionError, check, check_option
from eqx_decoders.families.family import Family
from eqx_decoders.families.registry import FAMILIES
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import named_leaves


def export_config(model: Decoder, family: str | None = None) -> tuple[Family, dict[str, Any]]:
    """Return the family as which a model is exported, and its settings in `config.json`.

    family: a `model_type`; None for the family of the model's origin or, without one, the first that can express it.
    Raises ConversionError if no family can.
    """
    adapted = [path for path in named_leaves(model) if path.endswith(".lora_a")]
    check(not adapted, f"{adapted[:1]} is an adapter: call merge_lora first, or save_peft.", ConversionError)
    if family is None and model.origin is not None:
        family = model.origin.family
    if family is not None:
        kind = FAMILIES[check_option("save_hf: family", family, FAMILIES, ConversionError)]
        return kind.expressing(model.config)
    refusals = []
    for kind in FAMILIES.values():
        try:
            return kind.expressing(model.config)
        except ConversionError as error:
            refusals.append(textwrap.shorten(str(error), 160, placeholder=" …"))
    raise ConversionError("No family of Hugging Face has this model.\n  " + "\n  ".join(refusals))


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two JSON objects, and objects inside of them; values of the second win."""

    def value(key: str) -> Any:
        x, y = first.get(key), second.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            return merged(x, y)
        return second.get(key, x)

    return {key: value(key) for key in dict(first) | dict(second)}
