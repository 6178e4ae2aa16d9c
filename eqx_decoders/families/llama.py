"""Llama 2, 3, 3.1, 3.2 and 3.3 (Touvron et al. 2023; Grattafiori et al. 2024), `tiny`, and `tiny-moe` with experts.

RMSNorm before attention and gated MLP, rotary embedding, grouped-query attention, no biases.
"""

import dataclasses
from typing import Any

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.families.family import Family
from eqx_decoders.families.fields import Fields
from eqx_decoders.families.ropes import read_rope, write_ropes
from eqx_decoders.families.shape import LLAMA_WEIGHTS, Shape, attentions, read_shape, write_shape
from eqx_decoders.layers.experts import ExpertsConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Llama3Rope, Rope
from eqx_decoders.layers.router import RouterConfig


def llama(shape: Shape, *, rope: Rope = Rope(), attention_bias: bool = False, mlp_bias: bool = False) -> DecoderConfig:
    """A decoder of Llama blocks; `attention_bias` is that of all four projections."""
    norm = RMSNormConfig(eps=shape.eps)
    block = BlockConfig(
        mixer=shape.attention(rope=rope, qkv_bias=attention_bias, out_bias=attention_bias),
        mlp=shape.mlp(bias=mlp_bias),
        pre_mixer_norm=norm,
        pre_mlp_norm=norm,
    )
    return shape.decoder(lambda _: block, norm)


def _read(fields: Fields) -> DecoderConfig:
    return llama(
        read_shape(fields),
        rope=read_rope(fields),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixer, mlp = attentions(config)[0], config.blocks[0].mlp
    biases = {"attention_bias": mixer.qkv_bias, "mlp_bias": getattr(mlp, "bias", False)}
    return write_shape(config) | biases | write_ropes(mixer.rope)


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read=_read,
    write=_write,
    weights=LLAMA_WEIGHTS,
    harmless=dict.fromkeys(("use_sliding_window", "max_window_layers"), "nothing without sliding_window"),
)
_ROPE3 = Rope(theta=500_000.0)
_ROPE31 = Llama3Rope(theta=500_000.0, factor=8.0)
_ROPE32 = Llama3Rope(theta=500_000.0, factor=32.0)


def _tiny_moe() -> DecoderConfig:
    """`tiny` with experts: a shared one and two of four are together as large as the MLP that they replace.

    Selection biases balance the loads; they move three times as far in a step as DeepSeek-V3's, because a run of a few
    hundred steps has to turn the order of scores that differ by tenths. An expert sees half of the tokens, and its
    updates are noisier than those of the shared one: the weights of the two sum to 0.7.
    """
    router = RouterConfig(
        score="sigmoid", order="score_first", renormalize=True, selection_bias=True, bias_update_rate=0.003,
        scaling_factor=0.7, balance_loss=1e-4, balance_form="megatron",
    )  # fmt: skip
    shared = _TINY.mlp_dim // 2
    experts = ExpertsConfig(
        num_experts=4, num_experts_per_token=2, mlp_dim=shared // 2, router=router, shared=MLPConfig(mlp_dim=shared)
    )
    dense = llama(_TINY)
    return dataclasses.replace(dense, blocks=tuple(dataclasses.replace(block, mlp=experts) for block in dense.blocks))


def _llama2(embed_dim: int, num_layers: int, num_heads: int, num_kv_heads: int, mlp_dim: int) -> DecoderConfig:
    shape = Shape(
        vocab_size=32_000,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        mlp_dim=mlp_dim,
        eps=1e-5,
    )
    return llama(shape)


def _llama3(
    embed_dim: int, num_layers: int, num_heads: int, mlp_dim: int, rope: Rope, head_dim: int = 128, tied: bool = False
) -> DecoderConfig:
    shape = Shape(
        vocab_size=128_256,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        eps=1e-5,
        tied=tied,
    )
    return llama(shape, rope=rope)


_TINY = Shape(
    vocab_size=4096,
    embed_dim=256,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=704,
    eps=1e-5,
    tied=True,
)
_ROPE3 = Rope(theta=500_000.0)
_ROPE31 = Llama3Rope(theta=500_000.0, factor=8.0)
_ROPE32 = Llama3Rope(theta=500_000.0, factor=32.0)

MODELS = {
    "tiny": lambda: llama(_TINY),
    "tiny-moe": _tiny_moe,
    "llama2-7b": lambda: _llama2(4096, 32, 32, 32, 11_008),
    "llama2-13b": lambda: _llama2(5120, 40, 40, 40, 13_824),
    "llama2-70b": lambda: _llama2(8192, 80, 64, 8, 28_672),
    "llama3-8b": lambda: _llama3(4096, 32, 32, 14_336, _ROPE3),
    "llama3-70b": lambda: _llama3(8192, 80, 64, 28_672, _ROPE3),
    "llama3-405b": lambda: _llama3(16_384, 126, 128, 53_248, _ROPE3),
    "llama3.1-8b": lambda: _llama3(4096, 32, 32, 14_336, _ROPE31),
    "llama3.1-70b": lambda: _llama3(8192, 80, 64, 28_672, _ROPE31),
    "llama3.1-405b": lambda: _llama3(16_384, 126, 128, 53_248, _ROPE31),
    "llama3.2-1b": lambda: _llama3(2048, 16, 32, 8192, _ROPE32, head_dim=64, tied=True),
    "llama3.2-3b": lambda: _llama3(3072, 28, 24, 8192, _ROPE32, tied=True),
    "llama3.3-70b": lambda: _llama3(8192, 80, 64, 28_672, _ROPE31),
}
