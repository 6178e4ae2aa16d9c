"""Arcee AFM (Arcee AI 2025): Llama's attention, and MLPs with ReLU² and without a gate."""

from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, llama_weights, plain_mlp
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Flag
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def arcee(shape: DecoderSizes, *, rope: Rope = Rope(), mlp_bias: bool = False) -> DecoderConfig:
    """Return a decoder of Arcee blocks."""
    return shape.decoder(shape.block(shape.attention(rope=rope), shape.mlp(gated=False, bias=mlp_bias)))


FAMILY = Family(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5, activation="relu2"),
        Flag("mlp_bias", "mlp.bias", False, name="mlp_bias"),
        rope_settings(),
    ),
    build=arcee,
    weights=llama_weights(mlp=plain_mlp(LAYER + "mlp.")),
)


MODELS = {
    "afm-4.5b": dict(
        model_type="arcee", vocab_size=128_005, hidden_size=2560, num_hidden_layers=36, num_attention_heads=20,
        num_key_value_heads=4, intermediate_size=18_432,
        rope_scaling=dict(factor=20.0, original_max_position_embeddings=4096, rope_type="yarn"),
    ),
}  # fmt: skip
