"""A decoder block: layers with their norms, around a residual stream."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqx_decoders.blocks.block_run import LENT, BlockLayer, BlockResult, BlockRun
from eqx_decoders.blocks.residual.base import ResidualModule
from eqx_decoders.blocks.residual.registry import RESIDUALS, ResidualOrName
from eqx_decoders.blocks.residual.residual import Sequential, SequentialResidual
from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields, PositiveFloat, Rate, check, check_word
from eqx_decoders.layers.attention.attention import Attention, AttentionConfig
from eqx_decoders.layers.attention.compressed_attention import CompressedAttention, CompressedAttentionConfig
from eqx_decoders.layers.attention.conformer import LocalAttention, LocalAttentionConfig
from eqx_decoders.layers.attention.mla import LatentAttention, LatentAttentionConfig
from eqx_decoders.layers.attention.relative_attention import RelativeAttention, RelativeAttentionConfig
from eqx_decoders.layers.attention.variants.differential import DifferentialAttention, DifferentialAttentionConfig
from eqx_decoders.layers.attention.variants.dynamic_mask import DynamicMaskAttention, DynamicMaskConfig
from eqx_decoders.layers.attention.variants.head_mixture import HeadMixture, HeadMixtureConfig
from eqx_decoders.layers.attention.variants.learned_init import LearnedInit, LearnedInitConfig
from eqx_decoders.layers.base import BranchLayer
from eqx_decoders.layers.conformer_conv import LightConvolutionConfig
from eqx_decoders.layers.deepstack import AddedFeaturesConfig
from eqx_decoders.layers.embedding.engram import EngramConfig
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerInputConfig
from eqx_decoders.layers.mlp import MLP, Linear, LinearConfig, MLPConfig
from eqx_decoders.layers.moe.experts import Experts, ExpertsConfig
from eqx_decoders.layers.norm import LayerScale, LayerScaleConfig, Norm, NormConfig
from eqx_decoders.layers.parallel_mixers import ParallelMixers, ParallelMixersConfig
from eqx_decoders.layers.recurrent.gated_conv import GatedConvolution, GatedConvolutionConfig
from eqx_decoders.layers.recurrent.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from eqx_decoders.layers.recurrent.kimi_delta import KimiDeltaAttention, KimiDeltaAttentionConfig
from eqx_decoders.layers.recurrent.lightning import LightningAttention, LightningAttentionConfig
from eqx_decoders.layers.recurrent.mamba1 import Mamba1, Mamba1Config
from eqx_decoders.layers.recurrent.mamba2 import Mamba2, Mamba2Config
from eqx_decoders.layers.recurrent.mlstm import MLSTM, MLSTMConfig
from eqx_decoders.layers.recurrent.rg_lru import RGLRU, RGLRUConfig
from eqx_decoders.layers.recurrent.rwkv import ChannelMix, ChannelMixConfig, TimeMix, TimeMixConfig
from eqx_decoders.layers.shared_transformer import AidedMixer, AidedMixerConfig


# The layers that may stand in each place of a block; a new layer is added here.

MixerConfig = (
    AttentionConfig
    | HeadMixtureConfig
    | DifferentialAttentionConfig
    | DynamicMaskConfig
    | LatentAttentionConfig
    | CompressedAttentionConfig
    | LearnedInitConfig
    | GatedDeltaNetConfig
    | Mamba1Config
    | Mamba2Config
    | KimiDeltaAttentionConfig
    | GatedConvolutionConfig
    | RGLRUConfig
    | LightningAttentionConfig
    | TimeMixConfig
    | MLSTMConfig
    | LocalAttentionConfig
    | RelativeAttentionConfig
    | ParallelMixersConfig
    | AidedMixerConfig
)
Mixer = (
    Attention
    | HeadMixture
    | DifferentialAttention
    | DynamicMaskAttention
    | LatentAttention
    | CompressedAttention
    | LearnedInit
    | GatedDeltaNet
    | Mamba1
    | Mamba2
    | KimiDeltaAttention
    | GatedConvolution
    | RGLRU
    | LightningAttention
    | TimeMix
    | MLSTM
    | LocalAttention
    | RelativeAttention
    | ParallelMixers
    | AidedMixer
)

ChannelConfig = MLPConfig | LinearConfig | ExpertsConfig | ChannelMixConfig
Channel = MLP | Linear | Experts | ChannelMix

# extra layers, before the mixer or after the MLP
ExtraLayerKind = (
    MLPConfig | LinearConfig | EngramConfig | PerLayerInputConfig | AddedFeaturesConfig | LightConvolutionConfig
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtraLayerConfig(CheckedFields):
    """An extra layer of a block, with a norm before it and one on its output: `scale * post(layer(pre(x)))`.

    **Arguments:**

    - `layer`: one of `blocks.block.ExtraLayerKind`.
    - `pre_norm`, `post_norm`: its norms; None for none.
    - `scale`: multiplies its output (a half in Conformers; Gulati et al. 2020).
    """

    layer: ExtraLayerKind
    pre_norm: NormConfig | None = None
    post_norm: NormConfig | None = None
    scale: PositiveFloat = 1.0

    def __post_init__(self):
        super().__post_init__()
        rule = "must be one of blocks.block.ExtraLayerKind: statistics of experts are those of the MLP alone"
        check(isinstance(self.layer, ExtraLayerKind), f"ExtraLayerConfig.layer={self.layer!r} {rule}.")

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "ExtraLayer":
        norms = (None if norm is None else norm.build(embed_dim) for norm in (self.pre_norm, self.post_norm))
        return ExtraLayer(self.layer.build(embed_dim, key=key), *norms, config=self)


class ExtraLayer(eqx.Module):
    layer: BranchLayer
    pre_norm: Norm | None
    post_norm: Norm | None
    config: ExtraLayerConfig = eqx.field(static=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig(CheckedFields):
    """A token mixer and a channel mixer, each `post(layer(pre(x)))`, and their residual connection.

    **Arguments:**

    - `mixer`: the token mixer; None for none.
    - `mlp`: the channel mixer; None for none.
    - `pre_mixer_norm`, `post_mixer_norm`, `pre_mlp_norm`, `post_mlp_norm`: norms before a layer and on its output,
        where a scale alone may stand.
        In a parallel block without `pre_mlp_norm` the MLP reads the mixer's normalized input.
    - `residual`: one of `eqx_decoders.blocks.residual`, or `"sequential"`, `"parallel"`, `"plain"`, `"chained"`.
    - `dropout`: rate; on the sum of a parallel block's branches, on the whole output of any other block (MaxText).
    - `pre_layers`, `post_layers`: extra layers before the mixer and after the MLP.
    - `shares_kv_as`: name by which later layers use this mixer's keys and values (`kv_shared_from`); None for none.
    - `shortcut_from`: adds to the block's output what the experts of an earlier block returned, those whose
        `ExpertsConfig.shortcut` is this name (shortcut-connected experts, Cai et al. 2024); None for none.
    """

    mixer: MixerConfig | None
    mlp: ChannelConfig | None
    pre_mixer_norm: NormConfig | None = None
    post_mixer_norm: NormConfig | LayerScaleConfig | None = None
    pre_mlp_norm: NormConfig | None = None
    post_mlp_norm: NormConfig | LayerScaleConfig | None = None
    residual: ResidualOrName = Sequential()
    dropout: Rate = 0.0
    pre_layers: tuple[ExtraLayerConfig, ...] = ()
    post_layers: tuple[ExtraLayerConfig, ...] = ()
    shares_kv_as: str | None = None
    shortcut_from: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.residual, str):
            object.__setattr__(
                self, "residual", RESIDUALS[check_word("BlockConfig.residual", self.residual, RESIDUALS)]
            )
        for part in ("mixer", "mlp"):
            idle = [name for name in (f"pre_{part}_norm", f"post_{part}_norm") if getattr(self, name)]
            check(
                getattr(self, part) is not None or not idle,
                f"BlockConfig.{part}=None leaves {' and '.join(idle)} without a layer. Set {part} or leave them out.",
            )
        one_stream = self.residual.streams == 1
        rule = f"needs one residual stream, not {self.residual}"
        check(one_stream or self.shortcut_from is None, f"BlockConfig.shortcut_from={self.shortcut_from!r} {rule}.")
        only_two = self.mixer is not None and self.mlp is not None and not self.pre_layers and not self.post_layers
        rule = "needs a mixer and an mlp, and nothing else: one feeds the other"
        check(only_two or not self.residual.chains, f"BlockConfig.residual='chained' {rule}.")
        out_dim = getattr(self.mixer, "out_dim", None)
        rule = f"AttentionConfig.out_dim={out_dim} needs BlockConfig.residual='chained': other blocks add the output to"
        check(out_dim is None or self.residual.chains, f"{rule} the stream.")

    def branches(self) -> dict[str, Any]:
        """Return its layers' configurations by name, in order: `pre_layers.0`, `mixer`, `mlp`, `post_layers.0`, …."""
        named = {f"pre_layers.{index}": branch.layer for index, branch in enumerate(self.pre_layers)}
        named |= {"mixer": self.mixer, "mlp": self.mlp}
        named |= {f"post_layers.{index}": branch.layer for index, branch in enumerate(self.post_layers)}
        return {name: layer for name, layer in named.items() if layer is not None}

    @property
    def lent_names(self) -> tuple[str, ...]:
        """Names by which later layers use what its layers compute."""
        return tuple(self._lenders)

    @property
    def _lenders(self) -> dict[str, str]:
        """Names by which later layers use what its layers lend, each with the place of it among the entries."""
        indexer = self.mixer.indexer if isinstance(self.mixer, LatentAttentionConfig) else None
        names = {
            self.shares_kv_as: "",
            None if indexer is None else indexer.shares_as: "mixer" + LENT,
            getattr(self.mlp, "shortcut", None): "mlp" + LENT,
        }
        return {name: place for name, place in names.items() if name is not None}

    @property
    def shared_name(self) -> str | None:
        """Name of what its mixer uses of an earlier layer; None for nothing."""
        indexer = self.mixer.indexer if isinstance(self.mixer, LatentAttentionConfig) else None
        return getattr(self.mixer, "kv_shared_from", None) if indexer is None else indexer.shared_from

    def lent(self, past: Any, entries: dict[str, Any]) -> dict[str, Any]:
        """Return what later layers may use, by name.

        These are past and new keys and values, what an indexer chose, or what experts returned.
        """
        return {name: entries[place] if place else (past, entries) for name, place in self._lenders.items()}

    def mixers(self) -> tuple[Any, ...]:
        """Return the configurations of its mixers: none, one, or those that are parallel."""
        if isinstance(self.mixer, ParallelMixersConfig):
            return tuple(each.mixer for each in self.mixer.mixers)
        if isinstance(self.mixer, AidedMixerConfig):
            return self.mixer.transformer.attention, self.mixer.mixer
        return () if self.mixer is None else (self.mixer,)

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the shapes of its layers' caches, by the names of `branches`."""
        layers = {name: layer for name, layer in self.branches().items() if hasattr(layer, "cache_shape")}
        shapes = {name: layer.cache_shape(max_length) for name, layer in layers.items()}
        return {name: shape for name, shape in shapes.items() if shape is not None}

    def build(self, embed_dim: int, *, key: PRNGKeyArray, layer: int | Int[Array, ""] = 0) -> "Block":
        """Return a new block; `layer` is its number in the decoder, of which the weights of some mixers depend."""
        numbered = {"layer": layer} if getattr(self.mixer, "built_by_layer", False) else {}
        mixer_key, mlp_key = jax.random.split(key)
        inner = getattr(self.mixer, "out_dim", None) or embed_dim
        residual_key, pre_key, post_key = (jax.random.fold_in(key, number) for number in (2, 3, 4))

        def norm(config, size=inner):
            return None if config is None else config.build(size)

        def extra(configs, key):
            return tuple(
                config.build(embed_dim, key=jax.random.fold_in(key, index)) for index, config in enumerate(configs)
            )

        single = sum(not _reads_streams(layer) for layer in self.branches().values())
        return Block(
            pre_layers=extra(self.pre_layers, pre_key),
            mixer=None if self.mixer is None else self.mixer.build(embed_dim, key=mixer_key, **numbered),
            mlp=None if self.mlp is None else self.mlp.build(inner, key=mlp_key),
            post_layers=extra(self.post_layers, post_key),
            pre_mixer_norm=norm(self.pre_mixer_norm, embed_dim),
            post_mixer_norm=norm(self.post_mixer_norm),
            pre_mlp_norm=norm(self.pre_mlp_norm),
            post_mlp_norm=norm(self.post_mlp_norm),
            residual=self.residual.build(embed_dim, branches=single, inner_dim=inner, key=residual_key),
            config=self,
        )


class Block(eqx.Module):
    """Layers with their norms, around a residual stream."""

    pre_layers: tuple[ExtraLayer, ...]
    mixer: Mixer | None
    mlp: Channel | None
    post_layers: tuple[ExtraLayer, ...]
    pre_mixer_norm: Norm | None
    post_mixer_norm: Norm | LayerScale | None
    pre_mlp_norm: Norm | None
    post_mlp_norm: Norm | LayerScale | None
    residual: ResidualModule
    config: BlockConfig = eqx.field(static=True)

    def __call__(
        self,
        x: Float[Array, "batch length *streams embed"],
        ctx: ForwardContext,
        past: dict[str, Any] | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> BlockResult:
        """Return the block's output, the entries that each layer proposes for its cache, and statistics."""
        run = BlockRun(self, ctx, past, key)
        x = run.enter(x)
        if type(self.residual) is SequentialResidual:  # what its call does, without the hops
            for layer in self.layers():
                x = self.residual.write(x, run(layer, x))
            x = self.residual.end(x, run.dropout, ctx)
        else:
            x = self.residual(x, [layer.function(run) for layer in self.layers()], run.dropout, ctx)
        return run.leave(x)

    def layers(self) -> list[BlockLayer]:
        """Return its layers with their norms, in order."""
        shared = self.pre_mixer_norm if self.config.residual.shares_norm else None
        pre_mlp_norm = shared if self.pre_mlp_norm is None else self.pre_mlp_norm
        layers = [
            *_extra_layers("pre_layers", self.pre_layers),
            BlockLayer("mixer", self.mixer, self.pre_mixer_norm, self.post_mixer_norm),
            BlockLayer("mlp", self.mlp, pre_mlp_norm, self.post_mlp_norm),
            *_extra_layers("post_layers", self.post_layers),
        ]
        configs = self.config.branches()
        layers = [
            each._replace(reads_streams=_reads_streams(configs[each.name])) for each in layers if each.name in configs
        ]
        if not self.config.residual.keeps_normed:
            return layers
        return [
            each if each.reads_streams else each._replace(pre_norm=None, stream_norm=each.pre_norm) for each in layers
        ]


def _extra_layers(name: str, extras: tuple[ExtraLayer, ...]) -> list[BlockLayer]:
    return [
        BlockLayer(f"{name}.{index}", extra.layer, extra.pre_norm, extra.post_norm, extra.config.scale)
        for index, extra in enumerate(extras)
    ]


def _reads_streams(layer: Any) -> bool:
    return getattr(layer, "reads_streams", False)
