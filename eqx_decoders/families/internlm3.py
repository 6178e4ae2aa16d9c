"""InternLM 3 (Shanghai AI Laboratory 2025): Llama with two key heads, and RoPE for texts of a bounded length."""

from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import AUTO_MAP, Check, Flag, Renamed
from eqx_decoders.layers.rope import DynamicRope, Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def internlm3(shape: DecoderSizes, *, rope: Rope = Rope(), mlp_bias: bool = False) -> DecoderConfig:
    """Return a decoder of Llama's blocks."""
    return shape.decoder(shape.block(shape.attention(rope=rope), shape.mlp(bias=mlp_bias)))


FAMILY = Family(
    model_type="internlm3",
    architecture="LlamaForCausalLM",
    settings=(
        AUTO_MAP,
        Renamed({"qkv_bias": "attention_bias", "bias": "mlp_bias"}),
        decoder_sizes(num_kv_heads=2, head_dim=128, eps=1e-5),
        Flag("mlp_bias", "mlp.bias", False, name="mlp_bias"),
        Check(
            lambda values: values["mlp_bias"] == values["shape"].attention_bias,
            "qkv_bias and bias must be equal: with one of them transformers has no biases of attention's output.",
        ),
        rope_settings(),
    ),
    build=internlm3,
    weights=llama_weights(),
    other_architectures=("InternLM3ForCausalLM",),
)

_8B = DecoderSizes(
    vocab_size=128_512, embed_dim=4096, num_layers=48, num_heads=32, num_kv_heads=2, head_dim=128, mlp_dim=10_240,
    eps=1e-5,
)  # fmt: skip
_ROPE = DynamicRope(theta=5e7, factor=6.0, original_length=32_768)

MODELS = {"internlm3-8b": lambda: internlm3(_8B, rope=_ROPE)}
