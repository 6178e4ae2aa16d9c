"""Youtu-LLM (Tencent Youtu Lab 2025): DeepSeek-V3's latent attention, and an MLP in every layer."""

from eqx_decoders.families._deepseek import LATENT, V3_ROPE, latent_attention, latent_mixer, latent_sizes
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.hf_table import Family
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def youtu(shape: DecoderSizes, mixer: LatentAttentionConfig) -> DecoderConfig:
    """Return a decoder of dense blocks with latent attention."""
    return shape.decoder(shape.block(mixer))


FAMILY = Family(
    model_type="youtu",
    architecture="YoutuForCausalLM",
    settings=(*latent_sizes(tied=True), V3_ROPE, latent_mixer(1536)),
    build=youtu,
    weights=LATENT,
    ignored_keys={"mlp_bias": "transformers' MLP has none", "embedding_initializer_range": "weights are loaded"},
)

_2B = DecoderSizes(
    vocab_size=128_256, embed_dim=2048, num_layers=32, num_heads=16, num_kv_heads=16, head_dim=192, mlp_dim=6144,
    tied=True,
)  # fmt: skip

MODELS = {
    "youtu-2b": lambda: youtu(_2B, latent_attention(_2B, rope=Rope(theta=1.6e6, pairing="interleaved"), q_rank=1536))
}
