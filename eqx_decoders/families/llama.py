"""Llama 2, 3, 3.1, 3.2 and 3.3 (Touvron et al. 2023; Grattafiori et al. 2024), `tiny`, and `tiny-moe` with experts.

RMSNorm before attention and gated MLP, rotary embedding, grouped-query attention, no biases.
"""

import functools

from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Llama3Rope, Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def llama(shape: DecoderSizes, *, rope: Rope = Rope(), mlp_bias: bool = False) -> DecoderConfig:
    """Return a decoder of Llama blocks."""
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
    ignored_keys={"use_sliding_window max_window_layers": "nothing without sliding_window"},
)

_TINY = DecoderSizes(
    vocab_size=4096, embed_dim=256, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=64, mlp_dim=704, eps=1e-5,
    tied=True,
)  # fmt: skip


def _tiny_moe() -> DecoderConfig:
    """Return `tiny` with experts: a shared one and two of four are as large as the MLP that they replace.

    Selection biases balance the loads; they move three times as far in a step as DeepSeek-V3's, because a run of a few
    hundred steps has to turn the order of scores that differ by tenths. An expert sees half of the tokens, and its
    updates are noisier than those of the shared one: the weights of the two sum to 0.7.
    """
    router = RouterConfig(
        score="sigmoid", order="score_first", renormalize=True, selection_bias=True, bias_update_rate=0.003,
        scaling_factor=0.7, balance_loss=1e-4, balance_form="megatron",
    )  # fmt: skip
    shared = MLPConfig(mlp_dim=_TINY.mlp_dim // 2)
    experts = ExpertsConfig(
        num_experts=4, num_experts_per_token=2, mlp_dim=shared.mlp_dim // 2, router=router, shared=shared
    )
    return _TINY.decoder(_TINY.block(_TINY.attention(), experts))


_llama2 = functools.partial(DecoderSizes, vocab_size=32_000, head_dim=128, eps=1e-5)
_llama3 = functools.partial(DecoderSizes, vocab_size=128_256, num_kv_heads=8, eps=1e-5)
_8B = _llama3(embed_dim=4096, num_layers=32, num_heads=32, head_dim=128, mlp_dim=14_336)
_70B = _llama3(embed_dim=8192, num_layers=80, num_heads=64, head_dim=128, mlp_dim=28_672)
_405B = _llama3(embed_dim=16_384, num_layers=126, num_heads=128, head_dim=128, mlp_dim=53_248)
_1B = _llama3(embed_dim=2048, num_layers=16, num_heads=32, head_dim=64, mlp_dim=8192, tied=True)
_3B = _llama3(embed_dim=3072, num_layers=28, num_heads=24, head_dim=128, mlp_dim=8192, tied=True)
_ROPE3 = Rope(theta=500_000.0)
_ROPE31 = Llama3Rope(theta=500_000.0, factor=8.0)
_ROPE32 = Llama3Rope(theta=500_000.0, factor=32.0)

MODELS = {
    "tiny": lambda: llama(_TINY),
    "tiny-moe": _tiny_moe,
    "llama2-7b": lambda: llama(_llama2(embed_dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, mlp_dim=11_008)),
    "llama2-13b": lambda: llama(_llama2(embed_dim=5120, num_layers=40, num_heads=40, num_kv_heads=40, mlp_dim=13_824)),
    "llama2-70b": lambda: llama(_llama2(embed_dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, mlp_dim=28_672)),
    "llama3-8b": lambda: llama(_8B, rope=_ROPE3),
    "llama3-70b": lambda: llama(_70B, rope=_ROPE3),
    "llama3-405b": lambda: llama(_405B, rope=_ROPE3),
    "llama3.1-8b": lambda: llama(_8B, rope=_ROPE31),
    "llama3.1-70b": lambda: llama(_70B, rope=_ROPE31),
    "llama3.1-405b": lambda: llama(_405B, rope=_ROPE31),
    "llama3.2-1b": lambda: llama(_1B, rope=_ROPE32),
    "llama3.2-3b": lambda: llama(_3B, rope=_ROPE32),
    "llama3.3-70b": lambda: llama(_70B, rope=_ROPE31),
}
