"""Models that score texts, as transformers' `…ForSequenceClassification` stores them: reward models, for example.

They have the decoder and its settings from their family, and `score.weight` in place of the output head.
"""

from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError, check


SCORER = "ForSequenceClassification"
SCORER_CLASS = "AutoModelForSequenceClassification"
# those of which transformers has such a class, with its name where it is not that of the others
_FAMILIES: dict[str, str] = {
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
    """Return transformers' name of the models of a family that score texts. Raises ConversionError."""
    rule = f"config.json: transformers has no {SCORER} of model_type={model_type!r}"
    check(model_type in _FAMILIES, f"{rule}: its models with scores are not implemented.", ConversionError)
    return (_FAMILIES[model_type] or architecture.removesuffix("ForCausalLM")) + SCORER


def number_of_scores(fields: Fields, values: Any) -> int:
    """Read the number of scores: of the labels, which stay as they are, or the default of transformers."""
    labels = fields.content.get("id2label")
    return fields.integer("num_labels", len(labels) if isinstance(labels, dict) and labels else 2)
