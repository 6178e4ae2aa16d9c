"""ERNIE 4.5, dense (Baidu 2025): Llama's block with RoPE of neighboring features, and one switch for all biases."""

from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_THETA = 500_000.0


def ernie4_5(shape: DecoderSizes, *, rope: Rope = Rope(theta=_THETA, pairing="interleaved")) -> DecoderConfig:
    """Return a decoder of ERNIE 4.5 blocks; `shape.attention_bias` is that of the MLP, too."""
    return shape.decoder(shape.block(shape.attention(rope=rope), shape.mlp(bias=shape.attention_bias)))


FAMILY = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=2, head_dim=128, eps=1e-5, tied=True, keys={"attention_bias": "use_bias"}),
        rope_settings(theta=_THETA, pairing="interleaved"),
    ),
    build=ernie4_5,
    weights=llama_weights(),
)


MODELS = {
    "ernie4.5-0.3b": dict(
        model_type="ernie4_5", vocab_size=103_424, hidden_size=1024, num_hidden_layers=18, num_attention_heads=16,
        intermediate_size=3072,
    ),
}  # fmt: skip
