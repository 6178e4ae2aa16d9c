"""The blocks that MaxText alone has: its default, two without a residual stream, and a variant of Qwen3 with experts.

Sizes are those of its base configuration. The final norm and the output head are as in every other decoder.
"""

import dataclasses
from typing import Any

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.families.qwen3_moe import qwen3_moe
from eqx_decoders.families.shape import Shape, attentions
from eqx_decoders.layers.mlp import LinearConfig, MLPConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.wiring.residual import Chained, Parallel, Plain


BASE = Shape(
    vocab_size=32_000, embed_dim=2048, num_layers=16, num_heads=16, num_kv_heads=16, head_dim=128, mlp_dim=7168,
    eps=1e-5,
)  # fmt: skip


def default(shape: Shape = BASE, *, rope: Rope = Rope(), dropout: float = 0.0) -> DecoderConfig:
    """`x + dropout(attention(n) + mlp(n))`, `n = RMSNorm(x)`: parallel branches behind one norm, like PaLM's."""
    block = BlockConfig(
        mixer=shape.attention(rope=rope),
        mlp=shape.mlp(dropout=dropout),
        pre_mixer_norm=shape.norm,
        wiring=Parallel(),
        dropout=dropout,
    )
    return shape.decoder(block, dropout=dropout)


def simple(shape: Shape = BASE) -> DecoderConfig:
    """`W x`: one matrix a layer, without norm or residual connection."""
    return shape.decoder(BlockConfig(mixer=None, mlp=LinearConfig(), wiring=Plain()))


def simple_mlp(shape: Shape = BASE) -> DecoderConfig:
    """`W2 (W1 x)`: an MLP without activation, norm or residual connection."""
    mlp = MLPConfig(mlp_dim=shape.mlp_dim, activation="identity", gated=False)
    return shape.decoder(BlockConfig(mixer=None, mlp=mlp, wiring=Plain()))


def qwen3_custom_moe(shape: Shape, *, latent_dim: int, **options: Any) -> DecoderConfig:
    """Qwen3 with experts, whose attention writes `latent_dim` features, which alone experts and router see.

    `x += up(experts(norm(attention(norm(x)))))`: one residual connection around both layers. It has no Hugging Face
    form; `options` are those of `qwen3_moe`.
    """
    plain = qwen3_moe(shape, **options)
    mixer = dataclasses.replace(attentions(plain)[0], out_dim=latent_dim)
    return shape.decoder(dataclasses.replace(plain.blocks[0], mixer=mixer, wiring=Chained()))


_QWEN3 = Shape(
    vocab_size=151_936, embed_dim=2048, num_layers=48, num_heads=16, num_kv_heads=2, head_dim=256, mlp_dim=2048
)

MODELS = {
    "maxtext-default": default,
    "maxtext-simple": simple,
    "maxtext-simple-mlp": simple_mlp,
    "qwen3-custom-30b-a3b": lambda: qwen3_custom_moe(_QWEN3, expert_dim=2048, latent_dim=768, rope=Rope(theta=1e7)),
}
