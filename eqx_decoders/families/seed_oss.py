"""Seed-OSS (ByteDance Seed 2025): Llama blocks with biases of queries, keys and values."""

from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Flag
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def seed_oss(
    shape: DecoderSizes, *, rope: Rope = Rope(theta=1e7), out_bias: bool = False, mlp_bias: bool = False
) -> DecoderConfig:
    """Return a decoder of Seed-OSS blocks; `shape.attention_bias` adds biases only to queries, keys and values."""
    return shape.decoder(shape.block(shape.attention(rope=rope, out_bias=out_bias), shape.mlp(bias=mlp_bias)))


FAMILY = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=8, head_dim=128, attention_bias=True),
        Flag("attention_out_bias", "attention.out_bias", False, name="out_bias"),
        Flag("mlp_bias", "mlp.bias", False, name="mlp_bias"),
        rope_settings(),
    ),
    build=seed_oss,
    weights=llama_weights(),
    ignored_keys={"residual_dropout": "dropout is used in training only"},
)


MODELS = {
    "seed-oss-36b": dict(
        model_type="seed_oss", vocab_size=155_136, hidden_size=5120, num_hidden_layers=64, num_attention_heads=80,
        intermediate_size=27_648, rope_theta=10_000_000.0,
    ),
}  # fmt: skip
