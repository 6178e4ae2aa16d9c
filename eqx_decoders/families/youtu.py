"""Youtu-LLM (Tencent Youtu Lab 2025): DeepSeek-V3's latent attention, and an MLP in every layer."""

from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.deepseek.blocks import LATENT, V3_ROPE, latent_mixer, latent_sizes
from eqx_decoders.families.family import Family
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def youtu(shape: DecoderSizes, mixer: LatentAttentionConfig) -> DecoderConfig:
    """Return a decoder of blocks with the latent attention `mixer` and an MLP."""
    return shape.decoder(shape.block(mixer))


FAMILY = Family(
    model_type="youtu",
    architecture="YoutuForCausalLM",
    settings=(*latent_sizes(tied=True), V3_ROPE, latent_mixer(1536)),
    build=youtu,
    weights=LATENT,
    ignored_keys={
        "mlp_bias": "MLPs never have biases in transformers",
        "embedding_initializer_range": "initialization only",
    },
)


MODELS = {
    "youtu-2b": dict(
        model_type="youtu", vocab_size=128_256, hidden_size=2048, num_hidden_layers=32, num_attention_heads=16,
        intermediate_size=6144, rope_theta=1_600_000.0,
    ),
}  # fmt: skip
