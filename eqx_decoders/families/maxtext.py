"""The blocks that MaxText alone has: its default, and two without a residual stream that it uses for tests.

Sizes are those of its base configuration. The final norm and the output head are as in every other decoder.
"""

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.families.shape import Shape
from eqx_decoders.layers.mlp import LinearConfig, MLPConfig
from eqx_decoders.layers.rope import Rope


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
        wiring="parallel",
        dropout=dropout,
    )
    return shape.decoder(block, dropout=dropout)


def simple(shape: Shape = BASE) -> DecoderConfig:
    """`W x`: one matrix a layer, without norm or residual connection."""
    return shape.decoder(BlockConfig(mixer=None, mlp=LinearConfig(), wiring="plain"))


def simple_mlp(shape: Shape = BASE) -> DecoderConfig:
    """`W2 (W1 x)`: an MLP without activation, norm or residual connection."""
    mlp = MLPConfig(mlp_dim=shape.mlp_dim, activation="identity", gated=False)
    return shape.decoder(BlockConfig(mixer=None, mlp=mlp, wiring="plain"))


MODELS = {"maxtext-default": default, "maxtext-simple": simple, "maxtext-simple-mlp": simple_mlp}
