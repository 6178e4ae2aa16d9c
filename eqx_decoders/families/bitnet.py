"""BitNet b1.58 (Ma et al. 2024, 2025) with bfloat16 weights: norms before output projections, gated MLPs with ReLU²."""

from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.weight_rows import norm
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_THETA = 500_000.0


def bitnet(shape: DecoderSizes, *, rope: Rope = Rope(theta=_THETA)) -> DecoderConfig:
    """Return a decoder of BitNet blocks."""
    mixer = shape.attention(rope=rope, inner_norm=shape.norm)
    return shape.decoder(shape.block(mixer, shape.mlp(inner_norm=shape.norm)))


FAMILY = Family(
    model_type="bitnet",
    architecture="BitNetForCausalLM",
    settings=(decoder_sizes(eps=1e-5, activation="relu2"), rope_settings(theta=_THETA)),
    build=bitnet,
    weights=llama_weights()
    + norm(LAYER + "self_attn.attn_sub_norm", "mixer.inner_norm")
    + norm(LAYER + "mlp.ffn_sub_norm", "mlp.inner_norm"),
)


MODELS = {
    "bitnet-b1.58-2b": dict(
        model_type="bitnet", vocab_size=128_256, hidden_size=2560, num_hidden_layers=30, num_attention_heads=20,
        num_key_value_heads=5, intermediate_size=6912, tie_word_embeddings=True,
    ),
}  # fmt: skip
