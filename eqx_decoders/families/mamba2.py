"""Mamba-2 (Dao & Gu 2024): recurrences alone, without attention and MLPs."""

from eqx_decoders.families._mamba import (
    BACKBONE,
    backbone,
    mamba_decoder,
    mamba_settings,
    mamba_sizes,
    mamba_weights,
)
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Only


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


MODELS = {
    "mamba2-130m": dict(
        model_type="mamba2", vocab_size=50_288, hidden_size=768, num_hidden_layers=24, n_groups=1, num_heads=24,
        tie_word_embeddings=True,
    ),
    "mamba2-370m": dict(
        model_type="mamba2", vocab_size=50_288, hidden_size=1024, num_hidden_layers=48, n_groups=1, num_heads=32,
        tie_word_embeddings=True,
    ),
    "mamba2-780m": dict(
        model_type="mamba2", vocab_size=50_288, hidden_size=1536, num_hidden_layers=48, n_groups=1, num_heads=48,
        tie_word_embeddings=True,
    ),
    "mamba2-1.3b": dict(
        model_type="mamba2", vocab_size=50_288, hidden_size=2048, num_hidden_layers=48, n_groups=1, num_heads=64,
        tie_word_embeddings=True,
    ),
    "mamba2-2.7b": dict(
        model_type="mamba2", vocab_size=50_288, hidden_size=2560, n_groups=1, num_heads=80, tie_word_embeddings=True,
    ),
    "mamba-codestral-7b": dict(model_type="mamba2"),
}  # fmt: skip
