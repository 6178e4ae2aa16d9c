"""Nemotron-4 and Minitron (NVIDIA 2024).

LayerNorms store their scale minus 1. MLPs have a squared ReLU and no gate. Half of each head is rotated.
"""

from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, llama_weights, plain_mlp
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Flag
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def nemotron(shape: DecoderSizes, *, rope: Rope, mlp_bias: bool) -> DecoderConfig:
    """Return a decoder of Nemotron blocks."""
    norm = LayerNormConfig(eps=shape.eps, offset=1.0)
    mlp = shape.mlp(gated=False, bias=mlp_bias)
    return shape.decoder(shape.block(shape.attention(rope=rope), mlp, norm), norm)


FAMILY = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5, activation="relu2", keys={"rms_norm_eps": "norm_eps"}),
        Flag("mlp_bias", "mlp.bias", False, name="mlp_bias"),
        rope_settings(fraction=0.5),
    ),
    build=nemotron,
    weights=llama_weights(mlp=plain_mlp(LAYER + "mlp.")),
)


_BASE = dict(
    model_type="nemotron",
    vocab_size=256_000,
    num_hidden_layers=32,
    num_key_value_heads=8,
    initializer_range=0.0134,
)

MODELS = {
    "minitron-4b": _BASE | dict(hidden_size=3072, num_attention_heads=24, intermediate_size=9216),
    "minitron-8b": _BASE | dict(hidden_size=4096, num_attention_heads=48, head_dim=128, intermediate_size=16_384),
}  # fmt: skip
