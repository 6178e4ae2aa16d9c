"""Nemotron-4 and Minitron (NVIDIA 2024): LayerNorm that stores w - 1, squared ReLU without a gate, half of RoPE."""

import functools

from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, llama_weights, plain_mlp
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def nemotron(shape: DecoderSizes, *, rope: Rope = Rope(fraction=0.5), mlp_bias: bool = False) -> DecoderConfig:
    """Return a decoder of Nemotron blocks."""
    norm, mlp = LayerNormConfig(eps=shape.eps, offset=1.0), shape.mlp(gated=False, bias=mlp_bias)
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

_shape = functools.partial(
    DecoderSizes, vocab_size=256_000, num_layers=32, num_kv_heads=8, head_dim=128, eps=1e-5, activation="relu2",
    init_std=0.0134,
)  # fmt: skip

MODELS = {
    "minitron-4b": lambda: nemotron(_shape(embed_dim=3072, num_heads=24, mlp_dim=9216)),
    "minitron-8b": lambda: nemotron(_shape(embed_dim=4096, num_heads=48, mlp_dim=16_384)),
}
