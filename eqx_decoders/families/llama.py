"""Llama 2, 3, 3.1, 3.2 and 3.3 (Touvron et al. 2023; Grattafiori et al. 2024), and `tiny`.

RMSNorm before attention and gated MLP, rotary embedding, grouped-query attention, no biases.
"""

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.layers.attention import AttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Llama3Rope, Rope


def llama(
    *,
    vocab_size: int,
    embed_dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    mlp_dim: int,
    rope: Rope = Rope(),
    eps: float = 1e-5,
    tied: bool = False,
) -> DecoderConfig:
    """A decoder of Llama blocks."""
    norm = RMSNormConfig(eps=eps)
    block = BlockConfig(
        mixer=AttentionConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rope=rope),
        mlp=MLPConfig(mlp_dim=mlp_dim),
        pre_mixer_norm=norm,
        pre_mlp_norm=norm,
    )
    return DecoderConfig(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        blocks=(block,) * num_layers,
        final_norm=norm,
        tied=tied,
    )


def _llama2(embed_dim: int, num_layers: int, num_heads: int, num_kv_heads: int, mlp_dim: int) -> DecoderConfig:
    return llama(
        vocab_size=32_000,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        mlp_dim=mlp_dim,
    )


def _llama3(
    embed_dim: int, num_layers: int, num_heads: int, mlp_dim: int, rope: Rope, head_dim: int = 128, tied: bool = False
) -> DecoderConfig:
    return llama(
        vocab_size=128_256,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        rope=rope,
        tied=tied,
    )


_ROPE3 = Rope(theta=500_000.0)
_ROPE31 = Llama3Rope(theta=500_000.0, factor=8.0)
_ROPE32 = Llama3Rope(theta=500_000.0, factor=32.0)

MODELS = {
    "tiny": lambda: llama(
        vocab_size=4096,
        embed_dim=256,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        mlp_dim=704,
        tied=True,
    ),
    "llama2-7b": lambda: _llama2(4096, 32, 32, 32, 11_008),
    "llama2-13b": lambda: _llama2(5120, 40, 40, 40, 13_824),
    "llama2-70b": lambda: _llama2(8192, 80, 64, 8, 28_672),
    "llama3-8b": lambda: _llama3(4096, 32, 32, 14_336, _ROPE3),
    "llama3-70b": lambda: _llama3(8192, 80, 64, 28_672, _ROPE3),
    "llama3.1-8b": lambda: _llama3(4096, 32, 32, 14_336, _ROPE31),
    "llama3.1-70b": lambda: _llama3(8192, 80, 64, 28_672, _ROPE31),
    "llama3.1-405b": lambda: _llama3(16_384, 126, 128, 53_248, _ROPE31),
    "llama3.2-1b": lambda: _llama3(2048, 16, 32, 8192, _ROPE32, head_dim=64, tied=True),
    "llama3.2-3b": lambda: _llama3(3072, 28, 24, 8192, _ROPE32, tied=True),
    "llama3.3-70b": lambda: _llama3(8192, 80, 64, 28_672, _ROPE31),
}
