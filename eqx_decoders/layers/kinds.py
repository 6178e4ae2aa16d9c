"""Which layers can stand where in a block: a new layer is added here."""

from eqx_decoders.layers.added_features import AddedFeaturesConfig
from eqx_decoders.layers.attention import Attention, AttentionConfig
from eqx_decoders.layers.engram import EngramConfig
from eqx_decoders.layers.experts import Experts, ExpertsConfig
from eqx_decoders.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from eqx_decoders.layers.kimi_delta import KimiDeltaAttention, KimiDeltaAttentionConfig
from eqx_decoders.layers.latent import LatentAttention, LatentAttentionConfig
from eqx_decoders.layers.learned_init import LearnedInit, LearnedInitConfig
from eqx_decoders.layers.light_convolution import LightConvolutionConfig
from eqx_decoders.layers.local_attention import LocalAttention, LocalAttentionConfig
from eqx_decoders.layers.mamba2 import Mamba2, Mamba2Config
from eqx_decoders.layers.mlp import MLP, Linear, LinearConfig, MLPConfig
from eqx_decoders.layers.per_layer_embedding import PerLayerInputConfig


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

# further branches, before the mixer or after the MLP
FurtherConfig = (
    MLPConfig | LinearConfig | EngramConfig | PerLayerInputConfig | AddedFeaturesConfig | LightConvolutionConfig
)
