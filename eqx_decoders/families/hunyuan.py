"""Hunyuan, dense (Tencent 2025): queries and keys are normalized after they are rotated, by a base wider by alpha."""

from eqx_decoders.families._hunyuan import IGNORED_KEYS, NAMES, attention
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights, renamed
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def hunyuan(shape: DecoderSizes, *, rope: Rope) -> DecoderConfig:
    """Return a decoder of Hunyuan blocks."""
    return shape.decoder(shape.block(attention(shape, rope)))


FAMILY = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    settings=(decoder_sizes(eps=1e-5), rope_settings()),
    build=hunyuan,
    weights=renamed(llama_weights(), NAMES),
    ignored_keys=IGNORED_KEYS,
)


MODELS = {
    "hunyuan-7b": dict(
        model_type="hunyuan_v1_dense", vocab_size=128_167, hidden_size=4096, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, intermediate_size=14_336,
        rope_scaling=dict(alpha=1000.0, rope_type="dynamic"), tie_word_embeddings=True,
    ),
}  # fmt: skip
