"""Every published model by name, and every kind of checkpoint by its `model_type`."""

from collections.abc import Callable

from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.errors import check_word
from eqx_decoders.families import gemma, gemma2, gemma3, gpt2, gpt3, llama, maxtext, mistral, olmo3, qwen2, qwen3
from eqx_decoders.families.hf import Family


_PUBLISHED = (llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3, olmo3, gpt2)
_MODELS: dict[str, Callable[[], DecoderConfig]] = {
    name: make for module in (*_PUBLISHED, gpt3, maxtext) for name, make in module.MODELS.items()
}

# In the order in which they are tried for a model that does not say what it came from.
FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _PUBLISHED}


def list_models() -> tuple[str, ...]:
    """The names that `get_config` knows."""
    return tuple(sorted(_MODELS))


def get_config(name: str) -> DecoderConfig:
    """The configuration of a published model, or of `"tiny"`; edit it with `dataclasses.replace`."""
    return _MODELS[check_word("get_config: name", name, _MODELS)]()
