"""Models of MaxText: its default block, two without a residual stream, and variants of Qwen3 and of DeepSeek-V3.

Sizes are those of its base configuration. The final norm and the output head are as in every other decoder.
"""

import dataclasses
from typing import Any

from eqx_decoders.blocks.block import BlockConfig, ExtraLayerConfig
from eqx_decoders.blocks.residual.hyper_connections import HyperConnections
from eqx_decoders.blocks.residual.residual import Chained, NoResidual, Parallel
from eqx_decoders.families.common import DecoderSizes, attentions
from eqx_decoders.families.deepseek.blocks import deepseek, latent_attention, v3_router, with_indexer
from eqx_decoders.families.qwen.text import qwen3_moe
from eqx_decoders.layers.attention.indexer import IndexerConfig
from eqx_decoders.layers.embedding.engram import EngramConfig
from eqx_decoders.layers.mlp import LinearConfig, MLPConfig
from eqx_decoders.layers.rope import Rope, YarnRope
from eqx_decoders.model.decoder_config import DecoderConfig


BASE = DecoderSizes(
    vocab_size=32_000, embed_dim=2048, num_layers=16, num_heads=16, num_kv_heads=16, head_dim=128, mlp_dim=7168,
    eps=1e-5,
)  # fmt: skip


def default(shape: DecoderSizes = BASE, *, rope: Rope = Rope(), dropout: float = 0.0) -> DecoderConfig:
    """Return `x + dropout(attention(n) + mlp(n))`, `n = RMSNorm(x)`: parallel branches behind one norm, like PaLM's."""
    block = BlockConfig(
        mixer=shape.attention(rope=rope),
        mlp=shape.mlp(dropout=dropout),
        pre_mixer_norm=shape.norm,
        residual=Parallel(),
        dropout=dropout,
    )
    return shape.decoder(block, dropout=dropout)


def simple(shape: DecoderSizes = BASE) -> DecoderConfig:
    """Return `W x`: one matrix a layer, without norm or residual connection."""
    return shape.decoder(BlockConfig(mixer=None, mlp=LinearConfig(), residual=NoResidual()))


def simple_mlp(shape: DecoderSizes = BASE) -> DecoderConfig:
    """Return `W2 (W1 x)`: an MLP without activation, norm or residual connection."""
    mlp = MLPConfig(mlp_dim=shape.mlp_dim, activation="identity", gated=False)
    return shape.decoder(BlockConfig(mixer=None, mlp=mlp, residual=NoResidual()))


def qwen3_custom_moe(shape: DecoderSizes, *, latent_dim: int, **options: Any) -> DecoderConfig:
    """Return Qwen3 with experts, whose router and experts read the `latent_dim` features of attention.

    `x += up(experts(norm(attention(norm(x)))))`: one residual connection around both layers. It has no Hugging Face
    form; `options` are those of `qwen3_moe`.
    """
    plain = qwen3_moe(shape, **options)
    mixer = dataclasses.replace(attentions(plain)[0], out_dim=latent_dim)
    return shape.decoder(dataclasses.replace(plain.blocks[0], mixer=mixer, residual=Chained()))


def deepseek_custom(
    plain: DecoderConfig, *, streams: int, engram_layers: tuple[int, ...], **engram: Any
) -> DecoderConfig:
    """Return a DeepSeek decoder with hyper-connections, and an Engram first in `engram_layers` (from 0).

    `engram` are fields of `EngramConfig`. MaxText hashes classes of tokens, which depend on the tokenizer: without
    `token_classes` each id is a class.
    """
    sizes = dict(embed_dim=plain.embed_dim, vocab_size=plain.vocab_size, streams=streams, layers=engram_layers)

    def block(index: int, block: BlockConfig) -> BlockConfig:
        engram_config = EngramConfig(layer=index, **{**sizes, **engram}) if index in engram_layers else None
        extra = () if engram_config is None else (ExtraLayerConfig(layer=engram_config, pre_norm=block.pre_mixer_norm),)
        return dataclasses.replace(block, residual=HyperConnections(streams=streams), pre_layers=extra)

    return dataclasses.replace(plain, blocks=tuple(block(*each) for each in enumerate(plain.blocks)))


def _deepseek() -> DecoderConfig:
    """Return a small DeepSeek-V3.2: latent attention to the keys that an indexer chooses, and experts."""
    shape = DecoderSizes(
        vocab_size=129_280, embed_dim=1024, num_layers=6, num_heads=16, num_kv_heads=16, head_dim=48, mlp_dim=2048
    )
    rope = YarnRope(factor=1.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0, pairing="interleaved")
    router = v3_router(groups=1, groups_per_token=1, scaling_factor=2.5)
    experts: dict[str, Any] = dict(num_experts=16, num_experts_per_token=2, num_shared=1, expert_dim=512)
    mixer = latent_attention(shape, rope=rope, q_rank=384, kv_rank=128, nope_dim=32, value_dim=128)
    plain = deepseek(shape, mixer, router=router, dense_layers=range(1), **experts)
    return with_indexer(plain, IndexerConfig(num_heads=16, head_dim=64, top_k=256))


_QWEN3 = DecoderSizes(
    vocab_size=151_936, embed_dim=2048, num_layers=48, num_heads=16, num_kv_heads=2, head_dim=256, mlp_dim=2048
)

MODELS = {
    "maxtext-default": default,
    "maxtext-simple": simple,
    "maxtext-simple-mlp": simple_mlp,
    "qwen3-custom-30b-a3b": lambda: qwen3_custom_moe(_QWEN3, expert_dim=2048, latent_dim=768, rope=Rope(theta=1e7)),
    "deepseek-custom": lambda: deepseek_custom(_deepseek(), streams=4, engram_layers=(1, 4), head_dim=512),
}
