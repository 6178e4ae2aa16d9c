"""StableLM and StableLM 2 (Bellagente et al. 2024): LayerNorm with biases, partial RoPE, QKV biases."""

from eqx_decoders.families.common import LAYER, NO_BIAS, DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Flag
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_ROPE = Rope(fraction=0.25)


def stablelm(
    shape: DecoderSizes, *, rope: Rope = _ROPE, qkv_bias: bool = False, parallel: bool = False, qk_norm: bool = False
) -> DecoderConfig:
    """Return a decoder of StableLM blocks.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `rope`: rotary embedding.
    - `qkv_bias`: whether queries, keys and values have biases.
    - `parallel`: whether attention and MLP are parallel and share a norm; else the MLP follows attention.
    - `qk_norm`: whether queries and keys are normalized, with a separate scale per head.
    """
    norm = LayerNormConfig(eps=shape.eps)
    head_norm = QKNorm(norm=LayerNormConfig(eps=shape.eps, bias=False), over="each_head") if qk_norm else None
    mixer = shape.attention(rope=rope, qkv_bias=qkv_bias, qk_norm=head_norm)
    return shape.decoder(shape.block(mixer, norm=norm, parallel_norms=int(parallel)), norm)


_ATTENTION = LAYER + "self_attn."
FAMILY = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=32, eps=1e-5, keys={"rms_norm_eps": "layer_norm_eps", "head_dim": None, **NO_BIAS}),
        Flag("use_qkv_bias", "attention.qkv_bias", False, name="qkv_bias"),
        Flag("use_parallel_residual", "blocks.0.residual.shares_norm", False, name="parallel"),
        Flag("qk_layernorm", "attention.qk_norm", False, name="qk_norm"),
        rope_settings(fraction=0.25),
    ),
    build=stablelm,
    weights=(
        *llama_weights(),
        Weight(_ATTENTION + "q_layernorm.norms.{head}.weight", "mixer.query_norm_scale", "head_dim -> head_dim"),
        Weight(_ATTENTION + "k_layernorm.norms.{kv_head}.weight", "mixer.key_norm_scale", "head_dim -> head_dim"),
    ),
)


_BASE = dict(model_type="stablelm", num_attention_heads=32)

MODELS = {
    "stablelm-3b": _BASE | dict(vocab_size=50_304, hidden_size=2560, num_hidden_layers=32, intermediate_size=6912),
    "stable-code-3b": _BASE | dict(
        vocab_size=50_304, hidden_size=2560, num_hidden_layers=32, intermediate_size=6912, rope_theta=1_000_000.0,
    ),
    "stablelm2-1.6b": _BASE | dict(
        vocab_size=100_352, hidden_size=2048, num_hidden_layers=24, intermediate_size=5632, use_qkv_bias=True,
    ),
    "stablelm2-12b": _BASE | dict(
        vocab_size=100_352, hidden_size=5120, num_hidden_layers=40, num_key_value_heads=8, intermediate_size=13_824,
        qk_layernorm=True, use_parallel_residual=True,
    ),
}  # fmt: skip
