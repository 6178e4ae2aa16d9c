"""The blocks that MaxText alone has: its default, and two without a residual stream that it uses for tests.

Sizes are those of its base configuration. The final norm and the output head are as in every other decoder.
"""

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.families.shape import Shape
from eqx_decoders.layers.mlp import LinearConfig, MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope


BASE = Shape(
    vocab_size=32_000,
    embed_dim=2048,
    num_layers=16,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    mlp_dim=7168,
    eps=1e-5,
)


def default(shape: Shape = BASE, *, rope: Rope = Rope(), dropout: float = 0.0) -> DecoderConfig:
    """`x + dropout(attention(n) + mlp(n))`, `n = RMSNorm(x)`: parallel branches behind one norm, like PaLM's."""
    norm = RMSNormConfig(eps=shape.eps)
    block = BlockConfig(
        mixer=shape.attention(rope=rope),
        mlp=shape.mlp(dropout=dropout),
        pre_mixer_norm=norm,
        wiring="parallel",
        dropout=dropout,
    )
    return shape.decoder(lambda _: block, norm, dropout=dropout)


def simple(
    *,
    vocab_size: int = BASE.vocab_size,
    embed_dim: int = BASE.embed_dim,
    num_layers: int = BASE.num_layers,
    eps: float = BASE.eps,
    tied: bool = False,
) -> DecoderConfig:
    """`W x`: one matrix a layer, without norm or residual connection."""
    block = BlockConfig(mixer=None, mlp=LinearConfig(), wiring="plain")
    return _repeated(block, vocab_size, embed_dim, num_layers, eps, tied)


def simple_mlp(
    *,
    vocab_size: int = BASE.vocab_size,
    embed_dim: int = BASE.embed_dim,
    num_layers: int = BASE.num_layers,
    mlp_dim: int = BASE.mlp_dim,
    eps: float = BASE.eps,
    tied: bool = False,
) -> DecoderConfig:
    """`W2 (W1 x)`: an MLP without activation, norm or residual connection."""
    mlp = MLPConfig(mlp_dim=mlp_dim, activation="identity", gated=False)
    block = BlockConfig(mixer=None, mlp=mlp, wiring="plain")
    return _repeated(block, vocab_size, embed_dim, num_layers, eps, tied)


def _repeated(
    block: BlockConfig, vocab_size: int, embed_dim: int, num_layers: int, eps: float, tied: bool
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        blocks=(block,) * num_layers,
        final_norm=RMSNormConfig(eps=eps),
        tied=tied,
    )


MODELS = {"maxtext-default": default, "maxtext-simple": simple, "maxtext-simple-mlp": simple_mlp}
