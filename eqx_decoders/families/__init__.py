"""Every published model by name: a family is a function that returns a `DecoderConfig`."""

from collections.abc import Callable

from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.errors import check_word
from eqx_decoders.families import llama


_MODELS: dict[str, Callable[[], DecoderConfig]] = {**llama.MODELS}


def list_models() -> tuple[str, ...]:
    """The names that `get_config` knows."""
    return tuple(sorted(_MODELS))


def get_config(name: str) -> DecoderConfig:
    """The configuration of a published model, or of `"tiny"`; edit it with `dataclasses.replace`."""
    return _MODELS[check_word("get_config: name", name, _MODELS)]()
