"""Helium 1 (Kyutai 2025): Llama blocks, and RoPE with interleaved pairs."""

from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Check, Flag
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def helium(
    shape: DecoderSizes, *, rope: Rope = Rope(theta=1e5, pairing="interleaved"), mlp_bias: bool = False
) -> DecoderConfig:
    """Return a decoder of Helium blocks; `shape.attention_bias` adds biases only to queries, keys and values."""
    return shape.decoder(shape.block(shape.attention(rope=rope, out_bias=False), shape.mlp(bias=mlp_bias)))


FAMILY = Family(
    model_type="helium",
    architecture="HeliumForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=20, head_dim=128, eps=1e-8),
        Check(
            lambda values: values["shape"].num_heads * values["shape"].head_dim == values["shape"].embed_dim,
            "num_attention_heads={shape.num_heads} x head_dim={shape.head_dim} must be hidden_size={shape.embed_dim}: "
            "the output projection of attention is square.",
        ),
        Flag("mlp_bias", "mlp.bias", False, name="mlp_bias"),
        rope_settings(theta=1e5, pairing="interleaved"),
    ),
    build=helium,
    weights=llama_weights(),
)


MODELS = {
    "helium1-2b-preview": dict(
        model_type="helium", vocab_size=48_000, hidden_size=2560, num_hidden_layers=24, num_attention_heads=20,
        intermediate_size=7040,
    ),
}  # fmt: skip
