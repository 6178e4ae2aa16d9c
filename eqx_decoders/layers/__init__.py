"""The layers, each with its configuration; weightless maths (rope, mask, kernels) are functions."""

from eqx_decoders.layers.attention import Attention, AttentionConfig, QKNorm
from eqx_decoders.layers.embedding import LearnedPositions, SinusoidalPositions
from eqx_decoders.layers.experts import Experts, ExpertsConfig
from eqx_decoders.layers.kernel import KERNELS, Kernel, attend
from eqx_decoders.layers.latent import LatentAttention, LatentAttentionConfig
from eqx_decoders.layers.learned_init import LearnedInit, LearnedInitConfig
from eqx_decoders.layers.mask import Bidirectional, Causal, Chunked, SlidingWindow
from eqx_decoders.layers.mlp import MLP, Linear, LinearConfig, MLPConfig
from eqx_decoders.layers.norm import LayerNorm, LayerNormConfig, RMSNorm, RMSNormConfig
from eqx_decoders.layers.rope import LinearRope, Llama3Rope, Rope, YarnRope
from eqx_decoders.layers.router import Router, RouterConfig, RoutingStats, load_balance_loss, router_z_loss


__all__ = [
    "KERNELS",
    "MLP",
    "Attention",
    "AttentionConfig",
    "Bidirectional",
    "Causal",
    "Chunked",
    "Experts",
    "ExpertsConfig",
    "Kernel",
    "LatentAttention",
    "LatentAttentionConfig",
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
    "Router",
    "RouterConfig",
    "RoutingStats",
    "SinusoidalPositions",
    "SlidingWindow",
    "YarnRope",
    "attend",
    "load_balance_loss",
    "router_z_loss",
]
