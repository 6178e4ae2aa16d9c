"""Mamba-2 (Dao & Gu 2024): recurrences alone, without attention and MLPs."""

import functools

from eqx_decoders.families._mamba import (
    BACKBONE,
    MambaSizes,
    backbone,
    mamba_decoder,
    mamba_settings,
    mamba_sizes,
    mamba_weights,
)
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Only
from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config


_KEYS = {
    "mamba_n_heads": "num_heads", "mamba_d_head": "head_dim", "mamba_expand": "expand", "mamba_n_groups": "n_groups",
    "mamba_d_state": "state_size", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}  # fmt: skip
FAMILY = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    settings=(
        mamba_sizes(32_768, 4096, 64, False),
        Only("hidden_act", "silu", written=True),
        mamba_settings(num_groups=8, key_dim=128, value_dim=64, keys=_KEYS),
    ),
    build=mamba_decoder,
    weights=backbone(mamba_weights(BACKBONE + "mixer.")),
    ignored_keys={
        "rescale_prenorm_residual time_step_floor time_step_max time_step_min time_step_rank": "how it was begun",
        "chunk_size residual_in_fp32": "how it is run",
        "norm_before_gate rms_norm": "always: transformers does not read it",
    },
)


def _model(embed_dim: int, num_layers: int, vocab_size: int = 50_288, num_groups: int = 1, tied: bool = True):
    shape = MambaSizes(vocab_size=vocab_size, embed_dim=embed_dim, num_layers=num_layers, tied=tied)
    return mamba_decoder(
        shape, mamba=Mamba2Config(num_heads=embed_dim // 32, value_dim=64, num_groups=num_groups, key_dim=128)
    )


MODELS = {
    "mamba2-130m": functools.partial(_model, 768, 24),
    "mamba2-370m": functools.partial(_model, 1024, 48),
    "mamba2-780m": functools.partial(_model, 1536, 48),
    "mamba2-1.3b": functools.partial(_model, 2048, 48),
    "mamba2-2.7b": functools.partial(_model, 2560, 64),
    "mamba-codestral-7b": functools.partial(_model, 4096, 64, 32_768, 8, False),
}
