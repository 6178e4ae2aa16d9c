"""InternLM 3 (Shanghai AI Laboratory 2025): Llama with two key heads and dynamic RoPE scaling."""

from eqx_decoders.families.common import decoder_sizes, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.llama import llama
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import AUTO_MAP, Check, Flag, Renamed


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
            "qkv_bias={shape.attention_bias} must be equal to bias={mlp_bias}: attention has biases in all projections "
            "or in no projection.",
        ),
        rope_settings(),
    ),
    build=llama,
    weights=llama_weights(),
    other_architectures=("InternLM3ForCausalLM",),
)


MODELS = {
    "internlm3-8b": dict(
        model_type="internlm3", vocab_size=128_512, hidden_size=4096, num_hidden_layers=48, num_attention_heads=32,
        intermediate_size=10_240, max_position_embeddings=32_768, rope_scaling=dict(factor=6.0, rope_type="dynamic"),
        rope_theta=50_000_000.0,
    ),
}  # fmt: skip
