"""Mamba (Gu & Dao 2023): recurrences by channels alone, without attention and MLPs."""

from eqx_decoders.families._mamba import BACKBONE, backbone, mamba_decoder, mamba_sizes
from eqx_decoders.families._mamba1 import IGNORED, mamba1_settings, mamba1_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Only


FAMILY = Family(
    model_type="mamba",
    architecture="MambaForCausalLM",
    settings=(mamba_sizes(50_280, 768, 32, True), Only("hidden_act", "silu", written=True), mamba1_settings()),
    build=mamba_decoder,
    weights=backbone(mamba1_weights(BACKBONE + "mixer.")),
    ignored_keys=IGNORED,
)


_SETTINGS = dict(model_type="mamba", num_hidden_layers=48)

MODELS = {
    "mamba-130m": _SETTINGS | dict(num_hidden_layers=24),
    "mamba-370m": _SETTINGS | dict(hidden_size=1024),
    "mamba-790m": _SETTINGS | dict(hidden_size=1536),
    "mamba-1.4b": _SETTINGS | dict(hidden_size=2048),
    "mamba-2.8b": _SETTINGS | dict(hidden_size=2560, num_hidden_layers=64),
}  # fmt: skip
