"""HyperCLOVA X SEED Think (NAVER 2025): Granite's multipliers, and post-norms before the residual multiplier."""

from typing import Any

from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.granite.text import STREAM_SCALES, granite
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Flag, Inverse, Number
from eqx_decoders.families.weight_rows import norm_weights
from eqx_decoders.model.decoder_config import DecoderConfig


def hyperclovax(
    shape: DecoderSizes, *, post_norms: bool = True, mlp_bias: bool = False, **options: Any
) -> DecoderConfig:
    """Return a decoder of HyperCLOVA X blocks.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `post_norms`: whether the outputs of attention and MLP are normalized, in addition to their inputs.
    - `mlp_bias`: whether MLPs have biases.
    - `options`: other arguments of `granite`.
    """
    norms = "sandwich" if post_norms else "pre"
    return granite(shape, shape.mlp(bias=mlp_bias), norms=norms, **options)


FAMILY = Family(
    model_type="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    settings=(
        decoder_sizes(),
        Flag("mlp_bias", "mlp.bias", False, name="mlp_bias"),
        Flag("use_post_norm", "blocks.0.post_mixer_norm", True, name="post_norms"),
        rope_settings(),
        Number("attention_multiplier", "attention.query_scale", lambda values: values["shape"].head_dim ** -0.5),
        Inverse("logits_scaling", "logit_divisor", 1.0),
        *STREAM_SCALES,
    ),
    build=hyperclovax,
    weights=llama_weights() + norm_weights(LAYER, post_mixer_norm="post_norm1", post_mlp_norm="post_norm2"),
)


MODELS = {
    "hyperclovax-seed-think-14b": dict(
        model_type="hyperclovax", vocab_size=110_592, hidden_size=6144, num_hidden_layers=38, num_attention_heads=48,
        num_key_value_heads=8, intermediate_size=14_336, attention_multiplier=0.0078125, embedding_multiplier=10.0,
        logits_scaling=0.125, rms_norm_eps=1e-05, rope_theta=100_000_000.0,
    ),
}  # fmt: skip
