"""VaultGemma (Google 2025), trained with differential privacy: Gemma 2 with norms before its layers only."""

import functools
from typing import Any

from eqx_decoders.families._gemma import IGNORED_ACTIVATION_KEY, gemma2_settings, gemma_decoder
from eqx_decoders.families.common import DecoderSizes, llama_weights, norm_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig
