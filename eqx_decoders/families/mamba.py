"""Mamba (Gu & Dao 2023): recurrences by channels alone, without attention and MLPs."""

import functools

from eqx_decoders.families._mamba import BACKBONE, MambaSizes, backbone, mamba_decoder, mamba_sizes
from eqx_decoders.families._mamba1 import IGNORED, mamba1_settings, mamba1_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Only
from eqx_decoders.layers.recurrent.mamba1 import Mamba1Config


FAMILY = Family(
    model_type="mamba",
    architecture="MambaForCausalLM",
    settings=(mamba_sizes(50_280, 768, 32, True), Only("hidden_act", "silu", written=True), mamba1_settings()),
    build=mamba_decoder,
    weights=backbone(mamba1_weights(BACKBONE + "mixer.")),
    ignored_keys=IGNORED,
)


def _model(embed_dim: int, num_layers: int):
    shape = MambaSizes(vocab_size=50_280, embed_dim=embed_dim, num_layers=num_layers, tied=True)
    return mamba_decoder(shape, mamba=Mamba1Config(channels=2 * embed_dim, key_dim=16, step_rank=embed_dim // 16))


MODELS = {
    "mamba-130m": functools.partial(_model, 768, 24),
    "mamba-370m": functools.partial(_model, 1024, 48),
    "mamba-790m": functools.partial(_model, 1536, 48),
    "mamba-1.4b": functools.partial(_model, 2048, 48),
    "mamba-2.8b": functools.partial(_model, 2560, 64),
}
