"""Layers by their place in a block: a new layer is added here."""

from eqx_decoders.layers.attention.attention import Attention, AttentionConfig
from eqx_decoders.layers.attention.conformer import LocalAttention, LocalAttentionConfig
from eqx_decoders.layers.attention.learned_init import LearnedInit, LearnedInitConfig
from eqx_decoders.layers.attention.mla import LatentAttention, LatentAttentionConfig
from eqx_decoders.layers.conformer_conv import LightConvolutionConfig
from eqx_decoders.layers.deepstack import AddedFeaturesConfig
from eqx_decoders.layers.embedding.engram import EngramConfig
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerInputConfig
from eqx_decoders.layers.mlp import MLP, Linear, LinearConfig, MLPConfig
from eqx_decoders.layers.moe.experts import Experts, ExpertsConfig
from eqx_decoders.layers.recurrent.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from eqx_decoders.layers.recurrent.kimi_delta import KimiDeltaAttention, KimiDeltaAttentionConfig
from eqx_decoders.layers.recurrent.mamba2 import Mamba2, Mamba2Config


MixerConfig = (
    AttentionConfig
    | LatentAttentionConfig
    | LearnedInitConfig
    | GatedDeltaNetConfig
    | Mamba2Config
    | KimiDeltaAttentionConfig
    | LocalAttentionConfig
)
Mixer = Attention | LatentAttention | LearnedInit | GatedDeltaNet | Mamba2 | KimiDeltaAttention | LocalAttention

ChannelConfig = MLPConfig | LinearConfig | ExpertsConfig
Channel = MLP | Linear | Experts

# extra layers, before the mixer or after the MLP
ExtraLayerKind = (
    MLPConfig | LinearConfig | EngramConfig | PerLayerInputConfig | AddedFeaturesConfig | LightConvolutionConfig
)
