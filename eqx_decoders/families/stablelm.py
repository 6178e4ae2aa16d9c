"""StableLM and StableLM 2 (Bellagente et al. 2024): LayerNorm with biases, a quarter of RoPE, biases of q, k and v."""

import functools

from eqx_decoders.families.common import LAYER, NO_BIAS, DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_ROPE = Rope(fraction=0.25)


def stablelm(
    shape: DecoderSizes, *, rope: Rope = _ROPE, qkv_bias: bool = False, parallel: bool = False, qk_norm: bool = False
) -> DecoderConfig:
    """Return a decoder of StableLM blocks; in `parallel` ones attention and MLP share a norm."""
    norm, each = LayerNormConfig(eps=shape.eps), LayerNormConfig(eps=shape.eps, bias=False)
    heads_norm = QKNorm(norm=each, over="each_head") if qk_norm else None
    mixer = shape.attention(rope=rope, qkv_bias=qkv_bias, qk_norm=heads_norm)
    return shape.decoder(shape.block(mixer, norm=norm, parallel=int(parallel)), norm)


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

_shape = functools.partial(DecoderSizes, num_heads=32, num_kv_heads=32, eps=1e-5)
_3B = _shape(vocab_size=50_304, embed_dim=2560, num_layers=32, head_dim=80, mlp_dim=6912)
_1B = _shape(vocab_size=100_352, embed_dim=2048, num_layers=24, head_dim=64, mlp_dim=5632)
_12B = _shape(vocab_size=100_352, embed_dim=5120, num_layers=40, num_kv_heads=8, head_dim=160, mlp_dim=13_824)

MODELS = {
    "stablelm-3b": lambda: stablelm(_3B),
    "stable-code-3b": lambda: stablelm(_3B, rope=Rope(theta=1e6, fraction=0.25)),
    "stablelm2-1.6b": lambda: stablelm(_1B, qkv_bias=True),
    "stablelm2-12b": lambda: stablelm(_12B, parallel=True, qk_norm=True),
}
