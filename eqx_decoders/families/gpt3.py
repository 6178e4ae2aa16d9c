"""GPT-3 (Brown et al. 2020) as MaxText has it: GPT-2's block, whose norms store their scale minus one.

Unlike there, norms are computed in float32, the tied head is not rounded to bfloat16, and decoding has a cache.
"""

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.families.shape import Shape
from eqx_decoders.layers.embedding import LearnedPositions
from eqx_decoders.layers.norm import LayerNormConfig


def gpt3(shape: Shape, *, max_positions: int, dropout: float = 0.0) -> DecoderConfig:
    """A decoder of GPT-3 blocks: LayerNorm before attention and MLP, learned positions, biases everywhere.

    **Arguments:**

    - `shape`: its `num_kv_heads` must be `num_heads` to be GPT-3.
    - `max_positions`: rows of the table of positions.
    - `dropout`: rate of all dropouts.
    """
    norm = LayerNormConfig(eps=shape.eps, offset=1.0)
    block = BlockConfig(
        mixer=shape.attention(rope=None, qkv_bias=True, out_bias=True, fused_qkv=True),
        mlp=shape.mlp(gated=False, bias=True, dropout=dropout),
        pre_mixer_norm=norm,
        pre_mlp_norm=norm,
        dropout=dropout,
    )
    return shape.decoder(
        lambda _: block, norm, positions=LearnedPositions(max_positions=max_positions), dropout=dropout
    )


def _gpt3(
    num_layers: int, embed_dim: int, num_heads: int, head_dim: int, vocab_size: int = 32_768, positions: int = 16_384
) -> DecoderConfig:
    shape = Shape(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        mlp_dim=4 * embed_dim,
        eps=1e-5,
        tied=True,
        activation="gelu_tanh",
    )
    return gpt3(shape, max_positions=positions)


MODELS = {
    "gpt3-52k": lambda: _gpt3(1, 16, 2, 8, vocab_size=1024, positions=2048),
    "gpt3-6b": lambda: _gpt3(48, 3072, 12, 256),
    "gpt3-22b": lambda: _gpt3(48, 6144, 24, 256),
    "gpt3-175b": lambda: _gpt3(96, 12_288, 96, 128, vocab_size=50_304),
}
