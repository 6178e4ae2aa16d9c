"""A decoder block: a token mixer, a channel mixer and extra layers with their norms, and a residual connection."""

import dataclasses
from typing import Any, cast

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqx_decoders.blocks.residual.base import BlockLayer, ReadWriteResidual, Residual
from eqx_decoders.blocks.residual.residual import RESIDUALS, ResidualName, Sequential
from eqx_decoders.blocks.stats import ActivationStats, BlockStats
from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields, PositiveFloat, Rate, check, check_option
from eqx_decoders.layers.base import (
    BranchInputs,
    BranchLayer,
    BranchResult,
    ChannelConfig,
    ExtraConfig,
    LayerConfig,
    MixerConfig,
)
from eqx_decoders.layers.dropout import dropout
from eqx_decoders.layers.norm import LayerScale, LayerScaleConfig, Norm, NormConfig
from eqx_decoders.remat import save


# Suffix of the names of those entries of a block that are shared with later layers and not written to a cache.
SHARED_SUFFIX = ".shared"
BlockResult = tuple[Array, dict[str, Any], BlockStats]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtraLayerConfig(CheckedFields):
    """Configuration of an extra layer of a block, `scale * post_norm(layer(pre_norm(x)))`.

    **Arguments:**

    - `layer`: configuration of the layer.
    - `pre_norm`, `post_norm`: norms of the layer's input and output; None for no norm.
    - `scale`: factor of the output (0.5 in Conformers; Gulati et al. 2020).
    """

    layer: ExtraConfig
    pre_norm: NormConfig | None = None
    post_norm: NormConfig | None = None
    scale: PositiveFloat = 1.0

    def __post_init__(self):
        super().__post_init__()
        check(
            isinstance(self.layer, ExtraConfig),
            f"ExtraLayerConfig.layer={self.layer!r} must be derived from layers.base.ExtraConfig, as MLPConfig is. "
            "Experts are allowed only as BlockConfig.mlp, because a block reports the statistics of one router.",
        )

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
    """Configuration of a block: a token mixer and a channel mixer, each with norms, and a residual connection.

    **Arguments:**

    - `mixer`: the token mixer (attention or a recurrent layer); None for no mixer.
    - `mlp`: the channel mixer (an MLP or experts); None for no channel mixer.
    - `pre_mixer_norm`, `post_mixer_norm`, `pre_mlp_norm`, `post_mlp_norm`: norms of the inputs and outputs of mixer and
        MLP; None for no norm. The norms of outputs may also be a `LayerScaleConfig`. In a parallel block without
        `pre_mlp_norm` the MLP reads the mixer's normalized input.
    - `residual`: one of `eqx_decoders.blocks.residual`, or one of the names `"sequential"`, `"parallel"`, `"none"`
        and `"chained"`, which are replaced by configurations.
    - `dropout`: dropout rate. It applies to the sum of the branches in a parallel block, and to the complete output of
        any other block (as in MaxText).
    - `pre_layers`, `post_layers`: extra layers before the mixer and after the MLP.
    - `shares_kv_as`: name under which later layers can reuse this mixer's keys and values (their `kv_shared_from`);
        None: keys and values are not shared.
    - `shortcut_from`: name of earlier experts (their `ExpertsConfig.shortcut`) whose output is added to the output of
        this block (shortcut-connected experts, Cai et al. 2024); None for no shortcut.
    """

    mixer: MixerConfig | None
    mlp: ChannelConfig | None
    pre_mixer_norm: NormConfig | None = None
    post_mixer_norm: NormConfig | LayerScaleConfig | None = None
    pre_mlp_norm: NormConfig | None = None
    post_mlp_norm: NormConfig | LayerScaleConfig | None = None
    residual: Residual | ResidualName = Sequential()
    dropout: Rate = 0.0
    pre_layers: tuple[ExtraLayerConfig, ...] = ()
    post_layers: tuple[ExtraLayerConfig, ...] = ()
    shares_kv_as: str | None = None
    shortcut_from: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.residual, str):
            object.__setattr__(
                self, "residual", RESIDUALS[check_option("BlockConfig.residual", self.residual, RESIDUALS)]
            )
        check(
            isinstance(self.residual, Residual),
            f"BlockConfig.residual={self.residual!r} must be one of eqx_decoders.blocks.residual, or one of the names "
            f"{', '.join(RESIDUALS)}.",
        )
        for part in ("mixer", "mlp"):
            norms = [name for name in (f"pre_{part}_norm", f"post_{part}_norm") if getattr(self, name)]
            check(
                getattr(self, part) is not None or not norms,
                f"BlockConfig.{part}=None leaves {' and '.join(norms)} without a layer. Set {part} or leave them out.",
            )
        check(
            self.residual_config.streams == 1 or self.shortcut_from is None,
            f"BlockConfig.shortcut_from={self.shortcut_from!r} needs a residual connection with one stream, "
            f"not {self.residual}.",
        )
        only_mixer_and_mlp = (
            self.mixer is not None and self.mlp is not None and not self.pre_layers and not self.post_layers
        )
        check(
            only_mixer_and_mlp or not self.residual_config.chains,
            "BlockConfig.residual='chained' needs a mixer and an mlp, and no pre_layers or post_layers.",
        )
        out_dim = None if self.mixer is None else self.mixer.out_dim
        check(
            out_dim is None or self.residual_config.chains,
            f"AttentionConfig.out_dim={out_dim} needs BlockConfig.residual='chained': other residual connections add "
            "the mixer's output to the stream, so it must have the stream's features.",
        )

    @property
    def residual_config(self) -> Residual:
        """The residual connection. It is `residual`, whose type also has the names that the constructor replaces."""
        return cast(Residual, self.residual)

    def branches(self) -> dict[str, LayerConfig]:
        """Return the layers' configurations by name, in order: `pre_layers.0`, `mixer`, `mlp`, `post_layers.0`."""
        layers = {f"pre_layers.{index}": extra.layer for index, extra in enumerate(self.pre_layers)}
        layers |= {"mixer": self.mixer, "mlp": self.mlp}
        layers |= {f"post_layers.{index}": extra.layer for index, extra in enumerate(self.post_layers)}
        return {name: layer for name, layer in layers.items() if layer is not None}

    @property
    def shared_names(self) -> tuple[str, ...]:
        """Names under which the block shares values with later layers."""
        return tuple(self._shared_entries)

    @property
    def _shared_entries(self) -> dict[str, str]:
        """For each name in `shared_names`, the key of the shared value in the block's entries.

        The key is empty for keys and values: these are in the cache as well as in the entries.
        """
        entry_keys = {
            self.shares_kv_as: "",
            None if self.mixer is None else self.mixer.shares_as: "mixer" + SHARED_SUFFIX,
            None if self.mlp is None else self.mlp.shares_as: "mlp" + SHARED_SUFFIX,
        }
        return {name: entry_key for name, entry_key in entry_keys.items() if name is not None}

    @property
    def shared_from(self) -> str | None:
        """Name of the value shared by an earlier layer that the mixer uses; None if it uses no shared value."""
        return None if self.mixer is None else self.mixer.shared_from

    def shared_values(self, past: Any, entries: dict[str, Any]) -> dict[str, Any]:
        """Return the values that later layers may use, by their shared name.

        A value is a pair of cached and new keys and values, or the keys that an indexer selected, or the output of
        experts.
        """
        return {
            name: entries[entry_key] if entry_key else (past, entries)
            for name, entry_key in self._shared_entries.items()
        }

    def mixers(self) -> tuple[MixerConfig, ...]:
        """Return the configurations of all mixers in the block; there are several if `mixer` combines mixers."""
        return () if self.mixer is None else self.mixer.inner_mixers()

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the shapes of the layers' caches, by layer name (see `branches`)."""
        shapes = {name: layer.cache_shape(max_length) for name, layer in self.branches().items()}
        return {name: shape for name, shape in shapes.items() if shape is not None}

    def build(self, embed_dim: int, *, key: PRNGKeyArray, layer: int | Int[Array, ""] = 0) -> "Block":
        """Return a new block. `layer` is its index in the decoder; some mixers use it for initialization."""
        layer_index = {"layer": layer} if self.mixer is not None and self.mixer.built_by_layer else {}
        mixer_key, mlp_key = jax.random.split(key)
        inner_dim = embed_dim if self.mixer is None or self.mixer.out_dim is None else self.mixer.out_dim
        residual_key, pre_key, post_key = (jax.random.fold_in(key, index) for index in (2, 3, 4))

        def norm(config: Any, size: int = inner_dim) -> Any:
            return None if config is None else config.build(size)

        def extra_layers(configs: tuple[ExtraLayerConfig, ...], key: PRNGKeyArray) -> tuple[ExtraLayer, ...]:
            return tuple(
                config.build(embed_dim, key=jax.random.fold_in(key, index)) for index, config in enumerate(configs)
            )

        branches = sum(not layer.reads_streams for layer in self.branches().values())
        return Block(
            pre_layers=extra_layers(self.pre_layers, pre_key),
            mixer=None if self.mixer is None else self.mixer.build(embed_dim, key=mixer_key, **layer_index),
            mlp=None if self.mlp is None else self.mlp.build(inner_dim, key=mlp_key),
            post_layers=extra_layers(self.post_layers, post_key),
            pre_mixer_norm=norm(self.pre_mixer_norm, embed_dim),
            post_mixer_norm=norm(self.post_mixer_norm),
            pre_mlp_norm=norm(self.pre_mlp_norm),
            post_mlp_norm=norm(self.post_mlp_norm),
            residual=self.residual_config.build(embed_dim, branches=branches, inner_dim=inner_dim, key=residual_key),
            config=self,
        )


class Block(eqx.Module):
    """A decoder block: layers with their norms, and a residual connection."""

    pre_layers: tuple[ExtraLayer, ...]
    mixer: BranchLayer | None
    mlp: BranchLayer | None
    post_layers: tuple[ExtraLayer, ...]
    pre_mixer_norm: Norm | None
    post_mixer_norm: Norm | LayerScale | None
    pre_mlp_norm: Norm | None
    post_mlp_norm: Norm | LayerScale | None
    residual: ReadWriteResidual
    config: BlockConfig = eqx.field(static=True)

    def __call__(
        self,
        x: Float[Array, "batch length *streams embed"],
        ctx: ForwardContext,
        past: dict[str, Any] | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> BlockResult:
        """Return the block's output, the new cache entries of its layers by name, and statistics."""
        run = BlockRun(self.config, ctx, past, key)
        state = self.residual.begin(run.enter(x))
        for layer in self.layers():
            y, coefficients = self.residual.read(state, layer, ctx)
            state = self.residual.write(state, run(layer, y), coefficients)
        return run.leave(self.residual.end(state, run.dropout, ctx))

    def layers(self) -> list[BlockLayer]:
        """Return the layers with their norms, in order."""
        shared_norm = self.pre_mixer_norm if self.config.residual_config.shares_norm else None
        pre_mlp_norm = shared_norm if self.pre_mlp_norm is None else self.pre_mlp_norm
        layers = [
            *_extra_layers("pre_layers", self.pre_layers),
            BlockLayer("mixer", self.mixer, self.pre_mixer_norm, self.post_mixer_norm),
            BlockLayer("mlp", self.mlp, pre_mlp_norm, self.post_mlp_norm),
            *_extra_layers("post_layers", self.post_layers),
        ]
        configs = self.config.branches()
        placed: list[BlockLayer] = []
        position = 0
        for layer in layers:
            if layer.name not in configs:
                continue
            reads_streams = configs[layer.name].reads_streams
            layer = layer._replace(reads_streams=reads_streams, position=position)
            if self.config.residual_config.keeps_normed and not reads_streams:
                layer = layer._replace(pre_norm=None, stream_norm=layer.pre_norm)
            placed.append(layer)
            position += not reads_streams
        return placed


def _extra_layers(name: str, extras: tuple[ExtraLayer, ...]) -> list[BlockLayer]:
    return [
        BlockLayer(f"{name}.{index}", extra.layer, extra.pre_norm, extra.post_norm, extra.config.scale)
        for index, extra in enumerate(extras)
    ]


class BlockRun:
    """One forward pass of a block: the arguments of its layers except the stream, and their collected results.

    `entries` has the new cache entries of the layers that have run, by name, and `stats` their statistics.
    """

    def __init__(self, config: BlockConfig, ctx: ForwardContext, past: dict[str, Any] | None, key: PRNGKeyArray | None):
        self.ctx = ctx
        self.past = past
        self.dropout_rate = config.dropout
        self.shortcut = config.shortcut_from
        self.layer_key, self.out_key = (None, None) if key is None else jax.random.split(key)
        self.entries: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}

    def enter(self, x: Array) -> Array:
        """Constrain the sharding of the block's input, and name it for the remat policy."""
        return save(self.ctx.constrain(x, _axis_names(x)), "decoder_layer_input")

    def __call__(self, layer: BlockLayer, y: Array) -> Array:
        """Run a layer with its norms on the input `y`."""
        return self.output(layer, layer.layer.branch(*self.inputs(layer, y)))

    def inputs(self, layer: BlockLayer, y: Array) -> BranchInputs:
        """Return the arguments of a layer whose input before its norm is `y`."""
        key = self.layer_key
        if layer.name != "mlp" and key is not None:
            key = jax.random.fold_in(key, len(self.entries) + 1)
        past = None if self.past is None else self.past.get(layer.name)
        return BranchInputs(y if layer.pre_norm is None else layer.pre_norm(y), self.ctx, past, key)

    def output(self, layer: BlockLayer, result: BranchResult) -> Array:
        """Return the layer's output after its norm and scale, and record its cache entries and statistics."""
        self.entries[layer.name] = result.entries
        if result.shared is not None:
            self.entries[layer.name + SHARED_SUFFIX] = result.shared
        self.stats.update(result.stats)
        out = result.out if layer.post_norm is None else layer.post_norm(result.out)
        return out if layer.scale == 1.0 else out * layer.scale

    def dropout(self, y: Array) -> Array:
        """Apply the block's dropout."""
        return dropout(y, self.dropout_rate, self.out_key)

    def leave(self, x: Array) -> BlockResult:
        """Return the result of the block; `x` is the output of its residual connection."""
        if self.shortcut is not None:
            x = x + self.ctx.shared[self.shortcut]
        x = self.ctx.constrain(x, _axis_names(x))
        if self.ctx.execution.layer_stats:
            self.stats["activations"] = ActivationStats.of(x)
        if self.ctx.execution.layer_streams:
            self.stats["streams"] = x
        entries = {name: entry for name, entry in self.entries.items() if entry is not None}
        return x, entries, BlockStats(**self.stats)


def _axis_names(x: Array) -> str:
    return "batch length embed" if x.ndim == 3 else "batch length streams embed"
