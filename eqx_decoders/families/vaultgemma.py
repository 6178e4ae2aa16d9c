"""VaultGemma (Google 2025), trained with differential privacy: Gemma 2 with norms before its layers only."""

import functools

from eqx_decoders.families._gemma import GEMMA2_SETTINGS, IGNORED_ACTIVATION_KEY, gemma2
from eqx_decoders.families.common import LAYER, DecoderSizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.weight_rows import norm_weights


_NORMS = norm_weights(LAYER, pre_mixer_norm="input_layernorm", pre_mlp_norm="pre_feedforward_layernorm")
FAMILY = Family(
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    settings=GEMMA2_SETTINGS,
    build=functools.partial(gemma2, norms="pre"),
    weights=llama_weights(norms=_NORMS),
    ignored_keys=IGNORED_ACTIVATION_KEY,
)

_1B = DecoderSizes(
    vocab_size=256_000, embed_dim=1152, num_layers=26, num_heads=4, num_kv_heads=4, head_dim=256, mlp_dim=6912,
    tied=True, activation="gelu_tanh",
)  # fmt: skip

MODELS = {"vaultgemma-1b": lambda: gemma2(_1B, masks=_1B.cycle_masks(512, 2), norms="pre")}
