"""Llama 2, 3, 3.1, 3.2 and 3.3 (Touvron et al. 2023; Grattafiori et al. 2024), and the small models of this library.

Blocks have RMSNorm before attention and before a gated MLP, rotary embeddings, grouped-query attention and no biases.
`tiny` is a small Llama, and `tiny-moe` has mixture-of-experts layers in place of its MLPs.
"""

from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Flag
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def llama(shape: DecoderSizes, *, rope: Rope = Rope(), mlp_bias: bool = False) -> DecoderConfig:
    """Return the configuration of a decoder with Llama blocks. `mlp_bias` adds biases to the MLPs."""
    return shape.decoder(shape.block(shape.attention(rope=rope), shape.mlp(bias=mlp_bias)))


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    settings=(
        decoder_sizes(),
        Flag("mlp_bias", "mlp.bias", False, name="mlp_bias"),
        rope_settings(),
    ),
    build=llama,
    weights=llama_weights(),
    ignored_keys={"use_sliding_window max_window_layers": "no effect without sliding_window"},
)

_TINY = DecoderSizes(
    vocab_size=4096, embed_dim=256, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=64, mlp_dim=704, eps=1e-5,
    tied=True,
)  # fmt: skip


def _tiny_moe() -> DecoderConfig:
    """Return `tiny` with one shared expert and four routed experts, two per token, in place of each MLP.

    The active experts of a token have as many parameters as the MLP that they replace.
    """
    # Selection biases balance the load of the experts. bias_update_rate is three times the rate of DeepSeek-V3, because
    # in a run of a few hundred steps the biases must outweigh score differences of several tenths. A routed expert sees
    # half of the tokens, so its updates are noisier than the updates of the shared expert. scaling_factor=0.7, the sum
    # of the two routing weights of a token, reduces this noise.
    router = RouterConfig(
        score="sigmoid", order="score_first", renormalize=True, selection_bias=True, bias_update_rate=0.003,
        scaling_factor=0.7, balance_loss=1e-4, balance_form="megatron",
    )  # fmt: skip
    shared = MLPConfig(mlp_dim=_TINY.mlp_dim // 2)
    experts = ExpertsConfig(
        num_experts=4, num_experts_per_token=2, mlp_dim=shared.mlp_dim // 2, router=router, shared=shared
    )
    return _TINY.decoder(_TINY.block(_TINY.attention(), experts))


_LLAMA2 = dict(model_type="llama", vocab_size=32_000, rms_norm_eps=1e-5)
_LLAMA3 = dict(model_type="llama", vocab_size=128_256, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=500_000.0)
_8B = _LLAMA3 | dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=14_336)
_70B = _LLAMA3 | dict(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28_672)
_405B = _LLAMA3 | dict(hidden_size=16_384, num_hidden_layers=126, num_attention_heads=128, intermediate_size=53_248)
_SCALING = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
_ROPE31 = dict(rope_scaling=_SCALING | dict(factor=8.0))
_ROPE32 = dict(rope_scaling=_SCALING | dict(factor=32.0), tie_word_embeddings=True)

MODELS = {
    "tiny": dict(
        model_type="llama", vocab_size=4096, hidden_size=256, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=704, rms_norm_eps=1e-05, tie_word_embeddings=True,
    ),
    "tiny-moe": _tiny_moe,
    "llama2-7b": _LLAMA2
    | dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11_008),
    "llama2-13b": _LLAMA2
    | dict(hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, intermediate_size=13_824),
    "llama2-70b": _LLAMA2
    | dict(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
           intermediate_size=28_672),
    "llama3-8b": _8B,
    "llama3-70b": _70B,
    "llama3-405b": _405B,
    "llama3.1-8b": _8B | _ROPE31,
    "llama3.1-70b": _70B | _ROPE31,
    "llama3.1-405b": _405B | _ROPE31,
    "llama3.2-1b": _LLAMA3 | _ROPE32
    | dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, head_dim=64, intermediate_size=8192),
    "llama3.2-3b": _LLAMA3 | _ROPE32
    | dict(hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, head_dim=128, intermediate_size=8192),
    "llama3.3-70b": _70B | _ROPE31,
}  # fmt: skip
