"""Idefics 3 (Laurençon et al. 2024): Llama with a SigLIP encoder (Zhai et al. 2023).

Learned positions are found at the same fraction of an image's side; neighboring patches are joined to few tokens.
"""

from collections.abc import Callable

from eqx_decoders.families._idefics3 import idefics3_family
from eqx_decoders.model.decoder_config import DecoderConfig


FAMILY = idefics3_family("idefics3", "Idefics3ForConditionalGeneration")
MODELS: dict[str, Callable[[], DecoderConfig]] = {}
