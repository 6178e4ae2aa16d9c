"""Falcon Mamba (TII 2024): Mamba whose keys, queries and steps are normalized, without scales."""

from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families._mamba import BACKBONE, MambaSizes, backbone, mamba_decoder, mamba_sizes
from eqx_decoders.families._mamba1 import IGNORED, mamba1_settings, mamba1_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Only, Rule, Values, first_layer
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.recurrent.mamba1 import Mamba1Config
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

_7B = MambaSizes(vocab_size=65_024, embed_dim=4096, num_layers=64)
_MAMBA = Mamba1Config(channels=8192, key_dim=16, step_rank=256, norm=RMSNormConfig(eps=1e-6, scale=False))

MODELS = {"falcon-mamba-7b": lambda: mamba_decoder(_7B, mamba=_MAMBA)}
