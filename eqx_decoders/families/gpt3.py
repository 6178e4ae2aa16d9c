"""GPT-3 (Brown et al. 2020) in MaxText's variant: GPT-2 blocks whose norms store their scale minus 1.

Unlike in MaxText, norms are computed in float32, the tied head is not rounded to bfloat16, and decoding uses a cache.
"""

import functools

from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def gpt3(shape: DecoderSizes, *, max_positions: int = 16_384, dropout: float = 0.0) -> DecoderConfig:
    """Return a decoder of GPT-3 blocks: pre-norm LayerNorm, learned positions, and biases in all projections.

    **Arguments:**

    - `shape`: sizes of the decoder; `num_kv_heads` is equal to `num_heads` in GPT-3.
    - `max_positions`: number of learned positions.
    - `dropout`: rate of all dropouts.
    """
    norm = LayerNormConfig(eps=shape.eps, offset=1.0)
    mixer = shape.attention(rope=None, fused_qkv=True, qkv_bias=True, out_bias=True)
    mlp = shape.mlp(gated=False, bias=True, dropout=dropout)
    block = shape.block(mixer, mlp, norm, dropout=dropout)
    positions = LearnedPositions(max_positions=max_positions)
    return shape.decoder(block, norm, positions=positions, dropout=dropout)


_shape = functools.partial(DecoderSizes, eps=1e-5, tied=True, activation="gelu_tanh")
_52K = _shape(vocab_size=1024, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=64)
_6B = _shape(
    vocab_size=32_768, embed_dim=3072, num_layers=48, num_heads=12, num_kv_heads=12, head_dim=256, mlp_dim=12_288
)
_22B = _shape(
    vocab_size=32_768, embed_dim=6144, num_layers=48, num_heads=24, num_kv_heads=24, head_dim=256, mlp_dim=24_576
)
_175B = _shape(
    vocab_size=50_304, embed_dim=12_288, num_layers=96, num_heads=96, num_kv_heads=96, head_dim=128, mlp_dim=49_152
)

MODELS = {
    "gpt3-52k": lambda: gpt3(_52K, max_positions=2048),
    "gpt3-6b": lambda: gpt3(_6B),
    "gpt3-22b": lambda: gpt3(_22B),
    "gpt3-175b": lambda: gpt3(_175B),
}
