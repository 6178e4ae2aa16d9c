"""Layers of decoder blocks. `SomethingConfig.build(embed_dim, key=key)` returns the Equinox module `Something`.

Attention mixers
    `AttentionConfig` (with `QKNorm`, `QueryTemperature`, `Alibi`, and `BlockSelection`, `BlockIndexerConfig` or
    `PooledIndexerConfig`), `LatentAttentionConfig` (with `IndexerConfig`), `CompressedAttentionConfig`,
    `HeadMixtureConfig`, `DifferentialAttentionConfig`, `DynamicMaskConfig`; `LearnedInitConfig`, attention initialized
    from a teacher.

Recurrent mixers
    `GatedDeltaNetConfig`, `KimiDeltaAttentionConfig`, `Mamba1Config`, `Mamba2Config`, `GatedConvolutionConfig`,
    `RGLRUConfig`, `TimeMixConfig`, `MLSTMConfig`, `LightningAttentionConfig`.

Several mixers in parallel
    `ParallelMixersConfig` of `NamedMixer`s; `AidedMixerConfig`, a mixer with a `SharedTransformerConfig`.

Mixers of audio encoders
    `LocalAttentionConfig`, `RelativeAttentionConfig`, `LightConvolutionConfig`.

Feed-forward layers and experts
    `MLPConfig`, `LinearConfig`, `ChannelMixConfig`, `ExpertsConfig` with a `RouterConfig` (`RoutingStats`,
    `load_balance_loss`, `router_z_loss`); `AddedFeaturesConfig`, which adds features of an encoder.

Norms
    `RMSNormConfig`, `LayerNormConfig`; `LayerScaleConfig`, only a scale.

Embeddings
    `LearnedPositions`, `SinusoidalPositions`, `EngramConfig` (with `TokenClasses`), `PerLayerEmbeddingConfig`,
    `PerLayerInputConfig`; `HeadTransformConfig` before the output head.

Masks and rotary embeddings
    `Causal`, `SlidingWindow`, `Chunked`, `Bidirectional`, `Spans` and `spans_of`; `Rope`, `LinearRope`, `NTKRope`,
    `Llama3Rope`, `YarnRope`, `LongRope`, `DynamicRope`, `ProportionalRope`, `AxialRope`.

Functions without weights
    `attend` with one of the `KERNELS`; `delta_rule`, `linear_recurrence`.
"""

from typing import TYPE_CHECKING

from eqx_decoders.core.lazy_imports import lazy


# Names are imported on first use, so that a model imports the layers that it has and no others.
if TYPE_CHECKING:
    from eqx_decoders.families.deepseek.compressed_attention import (
        CompressedAttention as CompressedAttention,
        CompressedAttentionConfig as CompressedAttentionConfig,
    )
    from eqx_decoders.families.diffllama import (
        DifferentialAttention as DifferentialAttention,
        DifferentialAttentionConfig as DifferentialAttentionConfig,
    )
    from eqx_decoders.families.doge import (
        DynamicMaskAttention as DynamicMaskAttention,
        DynamicMaskConfig as DynamicMaskConfig,
    )
    from eqx_decoders.families.gemma.rg_lru import RGLRU as RGLRU, RGLRUConfig as RGLRUConfig
    from eqx_decoders.families.jetmoe import (
        HeadMixture as HeadMixture,
        HeadMixtureConfig as HeadMixtureConfig,
    )
    from eqx_decoders.families.minimax.lightning import (
        LightningAttention as LightningAttention,
        LightningAttentionConfig as LightningAttentionConfig,
    )
    from eqx_decoders.families.rwkv import (
        ChannelMix as ChannelMix,
        ChannelMixConfig as ChannelMixConfig,
        TimeMix as TimeMix,
        TimeMixConfig as TimeMixConfig,
    )
    from eqx_decoders.families.xlstm import MLSTM as MLSTM, MLSTMConfig as MLSTMConfig
    from eqx_decoders.layers.attention.alibi import Alibi as Alibi
    from eqx_decoders.layers.attention.attention import (
        Attention as Attention,
        AttentionConfig as AttentionConfig,
        QKNorm as QKNorm,
        QueryTemperature as QueryTemperature,
    )
    from eqx_decoders.layers.attention.block_indexer import (
        BlockIndexer as BlockIndexer,
        BlockIndexerConfig as BlockIndexerConfig,
        PooledIndexer as PooledIndexer,
        PooledIndexerConfig as PooledIndexerConfig,
    )
    from eqx_decoders.layers.attention.indexer import Indexer as Indexer, IndexerConfig as IndexerConfig
    from eqx_decoders.layers.attention.kernels.registry import (
        KERNELS as KERNELS,
        Kernel as Kernel,
        attend as attend,
    )
    from eqx_decoders.layers.attention.learned_init import (
        LearnedInit as LearnedInit,
        LearnedInitConfig as LearnedInitConfig,
    )
    from eqx_decoders.layers.attention.local_attention import (
        LocalAttention as LocalAttention,
        LocalAttentionConfig as LocalAttentionConfig,
    )
    from eqx_decoders.layers.attention.mla import (
        LatentAttention as LatentAttention,
        LatentAttentionConfig as LatentAttentionConfig,
    )
    from eqx_decoders.layers.attention.moba import BlockSelection as BlockSelection
    from eqx_decoders.layers.attention.relative_attention import (
        RelativeAttention as RelativeAttention,
        RelativeAttentionConfig as RelativeAttentionConfig,
    )
    from eqx_decoders.layers.conformer_conv import (
        LightConvolution as LightConvolution,
        LightConvolutionConfig as LightConvolutionConfig,
    )
    from eqx_decoders.layers.deepstack import (
        AddedFeatures as AddedFeatures,
        AddedFeaturesConfig as AddedFeaturesConfig,
    )
    from eqx_decoders.layers.embedding.embedding import (
        LearnedPositions as LearnedPositions,
        SinusoidalPositions as SinusoidalPositions,
    )
    from eqx_decoders.layers.embedding.engram import (
        Engram as Engram,
        EngramConfig as EngramConfig,
        TokenClasses as TokenClasses,
    )
    from eqx_decoders.layers.embedding.head_transform import (
        HeadTransform as HeadTransform,
        HeadTransformConfig as HeadTransformConfig,
    )
    from eqx_decoders.layers.embedding.per_layer_embedding import (
        PerLayerEmbeddingConfig as PerLayerEmbeddingConfig,
        PerLayerInputConfig as PerLayerInputConfig,
    )
    from eqx_decoders.layers.mask import (
        Bidirectional as Bidirectional,
        Causal as Causal,
        Chunked as Chunked,
        SlidingWindow as SlidingWindow,
        Spans as Spans,
        spans_of as spans_of,
    )
    from eqx_decoders.layers.mlp import (
        MLP as MLP,
        Linear as Linear,
        LinearConfig as LinearConfig,
        MLPConfig as MLPConfig,
    )
    from eqx_decoders.layers.moe.experts import Experts as Experts, ExpertsConfig as ExpertsConfig
    from eqx_decoders.layers.moe.router import (
        Router as Router,
        RouterConfig as RouterConfig,
        RoutingStats as RoutingStats,
        load_balance_loss as load_balance_loss,
        router_z_loss as router_z_loss,
    )
    from eqx_decoders.layers.norm import (
        LayerNorm as LayerNorm,
        LayerNormConfig as LayerNormConfig,
        LayerScale as LayerScale,
        LayerScaleConfig as LayerScaleConfig,
        RMSNorm as RMSNorm,
        RMSNormConfig as RMSNormConfig,
    )
    from eqx_decoders.layers.parallel_mixers import (
        NamedMixer as NamedMixer,
        ParallelMixers as ParallelMixers,
        ParallelMixersConfig as ParallelMixersConfig,
    )
    from eqx_decoders.layers.recurrent.gated_conv import (
        GatedConvolution as GatedConvolution,
        GatedConvolutionConfig as GatedConvolutionConfig,
    )
    from eqx_decoders.layers.recurrent.gated_delta_net import (
        GatedDeltaNet as GatedDeltaNet,
        GatedDeltaNetConfig as GatedDeltaNetConfig,
    )
    from eqx_decoders.layers.recurrent.kimi_delta import (
        KimiDeltaAttention as KimiDeltaAttention,
        KimiDeltaAttentionConfig as KimiDeltaAttentionConfig,
    )
    from eqx_decoders.layers.recurrent.mamba1 import Mamba1 as Mamba1, Mamba1Config as Mamba1Config
    from eqx_decoders.layers.recurrent.mamba2 import Mamba2 as Mamba2, Mamba2Config as Mamba2Config
    from eqx_decoders.layers.recurrent.scans.recurrence import (
        delta_rule as delta_rule,
        linear_recurrence as linear_recurrence,
    )
    from eqx_decoders.layers.rope import (
        AxialRope as AxialRope,
        DynamicRope as DynamicRope,
        LinearRope as LinearRope,
        Llama3Rope as Llama3Rope,
        LongRope as LongRope,
        NTKRope as NTKRope,
        ProportionalRope as ProportionalRope,
        Rope as Rope,
        YarnRope as YarnRope,
    )
    from eqx_decoders.layers.shared_transformer import (
        AidedMixer as AidedMixer,
        AidedMixerConfig as AidedMixerConfig,
        SharedTransformerConfig as SharedTransformerConfig,
    )

__getattr__, __all__, __dir__ = lazy(
    __name__,
    {
        "layers.attention.alibi": "Alibi",
        "layers.attention.attention": "Attention AttentionConfig QKNorm QueryTemperature",
        "families.deepseek.compressed_attention": "CompressedAttention CompressedAttentionConfig",
        "layers.attention.local_attention": "LocalAttention LocalAttentionConfig",
        "layers.attention.block_indexer": "BlockIndexer BlockIndexerConfig PooledIndexer PooledIndexerConfig",
        "layers.attention.indexer": "Indexer IndexerConfig",
        "layers.attention.kernels.registry": "KERNELS Kernel attend",
        "layers.attention.mla": "LatentAttention LatentAttentionConfig",
        "layers.attention.moba": "BlockSelection",
        "layers.attention.relative_attention": "RelativeAttention RelativeAttentionConfig",
        "families.diffllama": "DifferentialAttention DifferentialAttentionConfig",
        "families.doge": "DynamicMaskAttention DynamicMaskConfig",
        "families.jetmoe": "HeadMixture HeadMixtureConfig",
        "layers.attention.learned_init": "LearnedInit LearnedInitConfig",
        "layers.conformer_conv": "LightConvolution LightConvolutionConfig",
        "layers.deepstack": "AddedFeatures AddedFeaturesConfig",
        "layers.embedding.embedding": "LearnedPositions SinusoidalPositions",
        "layers.embedding.engram": "Engram EngramConfig TokenClasses",
        "layers.embedding.head_transform": "HeadTransform HeadTransformConfig",
        "layers.embedding.per_layer_embedding": "PerLayerEmbeddingConfig PerLayerInputConfig",
        "layers.mask": "Bidirectional Causal Chunked SlidingWindow Spans spans_of",
        "layers.mlp": "MLP Linear LinearConfig MLPConfig",
        "layers.moe.experts": "Experts ExpertsConfig",
        "layers.moe.router": "Router RouterConfig RoutingStats load_balance_loss router_z_loss",
        "layers.norm": "LayerNorm LayerNormConfig LayerScale LayerScaleConfig RMSNorm RMSNormConfig",
        "layers.parallel_mixers": "NamedMixer ParallelMixers ParallelMixersConfig",
        "layers.recurrent.gated_conv": "GatedConvolution GatedConvolutionConfig",
        "layers.recurrent.gated_delta_net": "GatedDeltaNet GatedDeltaNetConfig",
        "layers.recurrent.kimi_delta": "KimiDeltaAttention KimiDeltaAttentionConfig",
        "families.minimax.lightning": "LightningAttention LightningAttentionConfig",
        "layers.recurrent.mamba1": "Mamba1 Mamba1Config",
        "layers.recurrent.mamba2": "Mamba2 Mamba2Config",
        "families.xlstm": "MLSTM MLSTMConfig",
        "families.gemma.rg_lru": "RGLRU RGLRUConfig",
        "families.rwkv": "ChannelMix ChannelMixConfig TimeMix TimeMixConfig",
        "layers.recurrent.scans.recurrence": "delta_rule linear_recurrence",
        "layers.rope": ("AxialRope DynamicRope LinearRope Llama3Rope LongRope NTKRope ProportionalRope Rope YarnRope"),
        "layers.shared_transformer": "AidedMixer AidedMixerConfig SharedTransformerConfig",
    },
)
