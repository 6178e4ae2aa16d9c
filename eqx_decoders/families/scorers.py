"""Sequence classification models, such as reward models, in the format of transformers' `…ForSequenceClassification`.

Their decoder and settings are those of a text family. They have a tensor `score.weight` instead of the output head.
"""

from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError, check


SCORER = "ForSequenceClassification"
SCORER_CLASS = "AutoModelForSequenceClassification"
# Model types with such a class in transformers. The value is the first part of the name of the class. Empty: it is that
# of `…ForCausalLM`.
_CLASS_NAMES: dict[str, str] = {
    **dict.fromkeys(
        (
            "arcee", "bloom", "deepseek_v2", "deepseek_v3", "diffllama", "doge", "exaone4", "falcon", "gemma", "gemma2",
            "glm", "glm4", "gpt_bigcode", "gpt_oss", "gptj", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "jamba",
            "jetmoe", "llama", "minimax", "ministral", "ministral3", "mistral", "mixtral", "mpt", "nemotron", "olmo",
            "olmo2", "olmo3", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next",
            "seed_oss", "smollm3", "stablelm", "starcoder2",
        ),
        "",
    ),
    "gemma3_text": "Gemma3Text",
    "gpt2": "GPT2",
    "gpt_neox": "GPTNeoX",
    "qwen3_5_text": "Qwen3_5Text",
}  # fmt: skip


def scorer_name(model_type: str, architecture: str) -> str:
    """Return the name of transformers' sequence classification class for a model type.

    `architecture`: name of the language model class. Raises ConversionError if there is no sequence classification
    class.
    """
    check(
        model_type in _CLASS_NAMES,
        f"config.json: model_type={model_type!r} has no {SCORER} class in transformers, so its sequence classification "
        f"models are not supported. Supported: {', '.join(_CLASS_NAMES)}.",
        ConversionError,
    )
    return (_CLASS_NAMES[model_type] or architecture.removesuffix("ForCausalLM")) + SCORER


def number_of_scores(fields: Fields, values: Any) -> int:
    """Return the number of scores: `num_labels`, or else the length of `id2label`, or else transformers' default."""
    labels = fields.content.get("id2label")
    return fields.integer("num_labels", len(labels) if isinstance(labels, dict) and labels else 2)
