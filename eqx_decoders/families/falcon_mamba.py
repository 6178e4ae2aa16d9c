"""Falcon Mamba (TII 2024): Mamba whose keys, queries and steps are normalized, without scales."""

from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families._mamba import BACKBONE, backbone, mamba_decoder, mamba_sizes
from eqx_decoders.families._mamba1 import IGNORED, mamba1_settings, mamba1_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Only, Rule, Values, first_layer
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def _read_norm(fields: Fields, values: Values) -> RMSNormConfig:
    return RMSNormConfig(eps=fields.number("mixer_rms_eps", 1e-6), scale=False)


def _write_norm(config: DecoderConfig) -> dict[str, Any]:
    return {"mixer_rms_eps": first_layer(config, "mamba1").norm.eps}


FAMILY = Family(
    model_type="falcon_mamba",
    architecture="FalconMambaForCausalLM",
    settings=(
        mamba_sizes(50_280, 768, 32, True),
        Only("hidden_act", "silu", written=True),
        mamba1_settings(Rule("norm", _read_norm, _write_norm)),
    ),
    build=mamba_decoder,
    weights=backbone(mamba1_weights(BACKBONE + "mixer.")),
    ignored_keys=IGNORED,
)


MODELS = {
    "falcon-mamba-7b": dict(
        model_type="falcon_mamba", vocab_size=65_024, hidden_size=4096, num_hidden_layers=64, tie_word_embeddings=False,
    ),
}  # fmt: skip
