"""VaultGemma (Google 2025), trained with differential privacy: Gemma 2 with norms before its layers only."""

import functools

from eqx_decoders.families._gemma import GEMMA2_SETTINGS, IGNORED_ACTIVATION_KEY, gemma2
from eqx_decoders.families.common import LAYER, llama_weights
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


MODELS = {
    "vaultgemma-1b": dict(
        model_type="vaultgemma", vocab_size=256_000, hidden_size=1152, num_hidden_layers=26, num_attention_heads=4,
        intermediate_size=6912, sliding_window=512,
    ),
}  # fmt: skip
