"""The layers, each with its configuration; weightless maths (rope, mask, kernels) are functions."""

from eqx_decoders.layers.attention import Attention, AttentionConfig, QKNorm
from eqx_decoders.layers.embedding import LearnedPositions, SinusoidalPositions
from eqx_decoders.layers.kernel import KERNELS, Kernel, attend
from eqx_decoders.layers.learned_init import LearnedInit, LearnedInitConfig
from eqx_decoders.layers.mask import Bidirectional, Causal, Chunked, SlidingWindow
from eqx_decoders.layers.mlp import MLP, Linear, LinearConfig, MLPConfig
from eqx_decoders.layers.norm import LayerNorm, LayerNormConfig, RMSNorm, RMSNormConfig
from eqx_decoders.layers.rope import LinearRope, Llama3Rope, Rope, YarnRope


__all__ = [
    "KERNELS",
    "MLP",
    "Attention",
    "AttentionConfig",
    "Bidirectional",
    "Causal",
    "Chunked",
    "Kernel",
    "LayerNorm",
    "LayerNormConfig",
    "LearnedInit",
    "LearnedInitConfig",
    "LearnedPositions",
    "Linear",
    "LinearConfig",
    "LinearRope",
    "Llama3Rope",
    "MLPConfig",
    "QKNorm",
    "RMSNorm",
    "RMSNormConfig",
    "Rope",
    "SinusoidalPositions",
    "SlidingWindow",
    "YarnRope",
    "attend",
]
