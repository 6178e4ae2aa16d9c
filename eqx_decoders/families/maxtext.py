"""Models of MaxText: its default block, two blocks without residual connections, and variants of Qwen3 and DeepSeek-V3.

Default sizes are the sizes of MaxText's base configuration. All models have a final norm and an output head.
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


def default(shape: DecoderSizes = BASE, *, dropout: float = 0.0) -> DecoderConfig:
    """Return a decoder of parallel blocks, like PaLM: `x + dropout(attention(n) + mlp(n))` with `n = RMSNorm(x)`.

    `dropout`: dropout rate of the embeddings, hidden features of MLPs, outputs of blocks, and the input of the head.
    """
    block = BlockConfig(
        mixer=shape.attention(rope=Rope()),
        mlp=shape.mlp(dropout=dropout),
        pre_mixer_norm=shape.norm,
        residual=Parallel(),
        dropout=dropout,
    )
    return shape.decoder(block, dropout=dropout)


def simple(shape: DecoderSizes = BASE) -> DecoderConfig:
    """Return a decoder of linear layers, `W x`, without norms and residual connections."""
    return shape.decoder(BlockConfig(mixer=None, mlp=LinearConfig(), residual=NoResidual()))


def simple_mlp(shape: DecoderSizes = BASE) -> DecoderConfig:
    """Return a decoder of MLPs without activations, `W2 (W1 x)`, without norms and residual connections."""
    mlp = MLPConfig(mlp_dim=shape.mlp_dim, activation="identity", gated=False)
    return shape.decoder(BlockConfig(mixer=None, mlp=mlp, residual=NoResidual()))


def qwen3_custom_moe(shape: DecoderSizes, *, latent_dim: int, **options: Any) -> DecoderConfig:
    """Return Qwen3 with experts that read the output of attention: `x + up(experts(norm(attention(norm(x)))))`.

    No family in Hugging Face's transformers has this architecture.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `latent_dim`: number of output features of attention, and of input features of the router and the experts.
    - `options`: arguments of `qwen3_moe`.
    """
    qwen3 = qwen3_moe(shape, **options)
    mixer = dataclasses.replace(attentions(qwen3)[0], out_dim=latent_dim)
    return shape.decoder(dataclasses.replace(qwen3.blocks[0], mixer=mixer, residual=Chained()))


def deepseek_custom(
    config: DecoderConfig, *, streams: int, engram_layers: tuple[int, ...], **engram_options: Any
) -> DecoderConfig:
    """Return a DeepSeek decoder with hyper-connections and Engram layers.

    **Arguments:**

    - `config`: the DeepSeek decoder.
    - `streams`: number of residual streams of the hyper-connections.
    - `engram_layers`: the layers that start with an Engram, from 0.
    - `engram_options`: other fields of `EngramConfig`. MaxText hashes classes of tokens, which depend on the tokenizer.
        Without `token_classes` each token id is a class.
    """

    def changed(index: int, block: BlockConfig) -> BlockConfig:
        block = dataclasses.replace(block, residual=HyperConnections(streams=streams))
        if index not in engram_layers:
            return block
        engram = EngramConfig(
            layer=index,
            layers=engram_layers,
            embed_dim=config.embed_dim,
            vocab_size=config.vocab_size,
            streams=streams,
            **engram_options,
        )
        pre_layers = (ExtraLayerConfig(layer=engram, pre_norm=block.pre_mixer_norm),)
        return dataclasses.replace(block, pre_layers=pre_layers)

    blocks = tuple(changed(index, block) for index, block in enumerate(config.blocks))
    return dataclasses.replace(config, blocks=blocks)


def _deepseek() -> DecoderConfig:
    """Return a small DeepSeek-V3.2: latent attention to the keys that an indexer selects, and experts."""
    shape = DecoderSizes(
        vocab_size=129_280, embed_dim=1024, num_layers=6, num_heads=16, num_kv_heads=16, head_dim=48, mlp_dim=2048
    )
    rope = YarnRope(factor=1.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0, pairing="interleaved")
    router = v3_router(groups=1, groups_per_token=1, scaling_factor=2.5)
    experts: dict[str, Any] = dict(num_experts=16, num_experts_per_token=2, num_shared=1, expert_dim=512)
    mixer = latent_attention(shape, rope=rope, q_rank=384, kv_rank=128, nope_dim=32, value_dim=128)
    config = deepseek(shape, mixer, router=router, dense_layers=range(1), **experts)
    return with_indexer(config, IndexerConfig(num_heads=16, head_dim=64, top_k=256))


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
