"""A decoder block: layers with their norms, wired to the residual stream."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.blocks.batch_overlap import run_in_parts, run_in_turn
from eqx_decoders.blocks.branch import ExtraLayer, ExtraLayerConfig
from eqx_decoders.blocks.residual.base import BranchFunction, ResidualModule, SteppedResidual, Steps
from eqx_decoders.blocks.residual.registry import RESIDUALS, ResidualOrName
from eqx_decoders.blocks.residual.residual import Sequential
from eqx_decoders.blocks.stats import ActivationStats, BlockStats
from eqx_decoders.context import Context
from eqx_decoders.errors import check, check_number, check_word
from eqx_decoders.layers.base import BranchInputs, BranchLayer, BranchResult
from eqx_decoders.layers.dropout import dropout
from eqx_decoders.layers.norm import Norm, NormConfig
from eqx_decoders.layers.registry import Channel, ChannelConfig, Mixer, MixerConfig
from eqx_decoders.remat import get_remat, save
from eqx_decoders.sharding.offload import to_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """A token mixer and a channel mixer, each `post(layer(pre(x)))`, and how they are wired to the stream.

    **Arguments:**

    - `mixer`: the token mixer; None for none.
    - `mlp`: the channel mixer; None for none.
    - `pre_mixer_norm`, `post_mixer_norm`, `pre_mlp_norm`, `post_mlp_norm`: norms before a layer and on its output.
        In a parallel block without `pre_mlp_norm` the MLP reads the mixer's normalised input.
    - `residual`: one of `eqx_decoders.blocks.residual`, or `"sequential"`, `"parallel"`, `"plain"`, `"chained"`.
    - `dropout`: rate; on the sum of a parallel block's branches, on the whole output of any other block (MaxText).
    - `pre_layers`, `post_layers`: further branches before the mixer and after the MLP.
    - `shares_kv_as`: a name under which later layers find what this layer's mixer remembers; None for none.
    """

    mixer: MixerConfig | None
    mlp: ChannelConfig | None
    pre_mixer_norm: NormConfig | None = None
    post_mixer_norm: NormConfig | None = None
    pre_mlp_norm: NormConfig | None = None
    post_mlp_norm: NormConfig | None = None
    residual: ResidualOrName = Sequential()
    dropout: float = 0.0
    pre_layers: tuple[ExtraLayerConfig, ...] = ()
    post_layers: tuple[ExtraLayerConfig, ...] = ()
    shares_kv_as: str | None = None

    def __post_init__(self):
        if isinstance(self.residual, str):
            object.__setattr__(
                self, "residual", RESIDUALS[check_word("BlockConfig.residual", self.residual, RESIDUALS)]
            )
        for name in ("pre_layers", "post_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_number("BlockConfig.dropout", self.dropout, least=0)
        check(self.dropout < 1, f"BlockConfig.dropout={self.dropout} must be below 1.")
        for part in ("mixer", "mlp"):
            idle = [name for name in (f"pre_{part}_norm", f"post_{part}_norm") if getattr(self, name)]
            check(
                getattr(self, part) is not None or not idle,
                f"BlockConfig.{part}=None leaves {' and '.join(idle)} without a layer. Set {part} or leave them out.",
            )
        only_two = self.mixer is not None and self.mlp is not None and not self.pre_layers and not self.post_layers
        rule = "needs a mixer and an mlp, and nothing else: one feeds the other"
        check(only_two or not self.residual.chains, f"BlockConfig.residual='chained' {rule}.")
        out_dim = getattr(self.mixer, "out_dim", None)
        rule = f"AttentionConfig.out_dim={out_dim} needs BlockConfig.residual='chained': other blocks add the output to"
        check(out_dim is None or self.residual.chains, f"{rule} the stream.")

    def branches(self) -> dict[str, Any]:
        """The configurations of its layers by name, in order: `pre_layers.0`, …, `mixer`, `mlp`, `post_layers.0`, …."""
        named = {f"pre_layers.{index}": branch.layer for index, branch in enumerate(self.pre_layers)}
        named |= {"mixer": self.mixer, "mlp": self.mlp}
        named |= {f"post_layers.{index}": branch.layer for index, branch in enumerate(self.post_layers)}
        return {name: layer for name, layer in named.items() if layer is not None}

    def memory(self, max_length: int) -> dict[str, Any]:
        """The shapes of what its layers remember, by the names of `branches`."""
        asked = {name: getattr(layer, "memory", None) for name, layer in self.branches().items()}
        found = {name: shape(max_length) for name, shape in asked.items() if shape is not None}
        return {name: shapes for name, shapes in found.items() if shapes is not None}

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Block":
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
            mixer=None if self.mixer is None else self.mixer.build(embed_dim, key=mixer_key),
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
    """Layers with their norms, wired to the residual stream."""

    pre_layers: tuple[ExtraLayer, ...]
    mixer: Mixer | None
    mlp: Channel | None
    post_layers: tuple[ExtraLayer, ...]
    pre_mixer_norm: Norm | None
    post_mixer_norm: Norm | None
    pre_mlp_norm: Norm | None
    post_mlp_norm: Norm | None
    residual: ResidualModule
    config: BlockConfig = eqx.field(static=True)

    def __call__(
        self,
        x: Float[Array, "batch length *streams embed"],
        ctx: Context,
        past: dict[str, Any] | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "batch length *streams embed"], dict[str, Any], BlockStats]:
        """The new residual stream, what each layer proposes to its memory, and statistics."""
        passed = _Pass(self, ctx, past, key)
        return passed.leave(self.residual(passed.enter(x), passed.branches(), passed.drop, ctx))

    def in_parts(
        self,
        parts: Sequence[Float[Array, "rows length *streams embed"]],
        contexts: Sequence[Context],
        keys: Sequence[PRNGKeyArray | None],
    ) -> "list[BlockResult]":
        """`__call__` for each part of a batch, without memories: they meet in layers that send.

        With a wiring of one's own that runs its branches itself, parts have nothing to do with each other.
        """
        passes = [_Pass(self, ctx, None, key) for ctx, key in zip(contexts, keys, strict=True)]
        residual = self.residual
        if not isinstance(residual, SteppedResidual):
            return [self(x, each.ctx, key=each.key) for each, x in zip(passes, parts, strict=True)]

        def begin(passed: _Pass, x: Array) -> Steps:
            return residual.steps(passed.enter(x), passed.branches(), passed.drop, passed.ctx)

        begins = [partial(begin, each) for each in passes]
        streams = run_in_turn(begins, parts, contexts[0].execution.layout)
        return [each.leave(x) for each, x in zip(passes, streams, strict=True)]

    def _parts(self) -> list[tuple[str, Any, Norm | None, Norm | None, float]]:
        """The name, layer, norms and scale of each branch, in order."""
        shared = self.pre_mixer_norm if self.config.residual.shares_norm else None
        pre_mlp = shared if self.pre_mlp_norm is None else self.pre_mlp_norm

        def extra(where: str, branches: tuple[ExtraLayer, ...]) -> list[Any]:
            return [
                (f"{where}.{index}", each.layer, each.pre_norm, each.post_norm, each.config.scale)
                for index, each in enumerate(branches)
            ]

        named = extra("pre_layers", self.pre_layers)
        named += [("mixer", self.mixer, self.pre_mixer_norm, self.post_mixer_norm, 1.0)]
        named += [("mlp", self.mlp, pre_mlp, self.post_mlp_norm, 1.0)]
        named += extra("post_layers", self.post_layers)
        return [part for part in named if part[1] is not None]


BlockResult = tuple[Array, dict[str, Any], BlockStats]


class _Pass:
    """One pass of a block: what its layers get beside the stream, and what they give beside it."""

    def __init__(self, block: Block, ctx: Context, past: dict[str, Any] | None, key: PRNGKeyArray | None):
        self.block, self.ctx, self.past, self.key = block, ctx, past, key
        self.layer_key, self.out_key = (None, None) if key is None else jax.random.split(key)
        self.entries: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}

    def enter(self, x: Array) -> Array:
        """The stream, as its first layer finds it."""
        return save(self.ctx.constrain(x, self._words(x)), "decoder_layer_input")

    def branches(self) -> list[BranchFunction]:
        """Its layers in order, as functions from what they read to what they return."""
        configs = self.block.config.branches()
        return [
            BranchFunction(_LayerRun(self, *part), _reads_streams(configs[part[0]])) for part in self.block._parts()
        ]

    def drop(self, y: Array) -> Array:
        """The block's dropout."""
        return dropout(y, self.block.config.dropout, self.out_key)

    def leave(self, x: Array) -> BlockResult:
        """The stream after the block, what its layers propose to their memories, and statistics."""
        x = self.ctx.constrain(x, self._words(x))
        if self.ctx.execution.layer_stats:
            self.stats["activations"] = ActivationStats.of(x)
        entries = {name: entry for name, entry in self.entries.items() if entry is not None}
        return x, entries, BlockStats(**self.stats)

    def _words(self, x: Array) -> str:
        return "batch length embed" if x.ndim == 3 else "batch length streams embed"


class _LayerRun:
    """A layer of a block with its norms in one pass, from what it reads to what it returns."""

    def __init__(self, passed: _Pass, name: str, layer: BranchLayer, pre: Norm | None, post: Norm | None, scale: float):
        self.passed, self.name, self.layer, self.pre, self.post, self.scale = passed, name, layer, pre, post, scale

    def __call__(self, y: Array) -> Array:
        return self.after(self.layer.branch(*self.before(y)))

    def before(self, y: Array) -> BranchInputs:
        """What the layer is called with."""
        passed, key = self.passed, self.passed.layer_key
        own = key if self.name == "mlp" or key is None else jax.random.fold_in(key, len(passed.entries) + 1)
        here = None if passed.past is None else passed.past.get(self.name)
        return BranchInputs(y if self.pre is None else self.pre(y), passed.ctx, here, own)

    def after(self, result: BranchResult) -> Array:
        """What of its results goes to the stream; the rest is kept."""
        self.passed.entries[self.name] = result.entries
        self.passed.stats.update(result.stats)
        out = result.out if self.post is None else self.post(result.out)
        return out if self.scale == 1.0 else out * self.scale


def _reads_streams(layer: Any) -> bool:
    """Whether a layer reads and writes all residual streams, which else each wiring reads and writes for it."""
    return getattr(layer, "reads_streams", False)


def checkpointed(ctx: Context, *, prevent_cse: bool, split: bool = False, in_turn: bool = False) -> Any:
    """One block's call under the remat policy: what it does not name is computed again in the backward pass.

    With `split` it takes and returns the parts of a batch. With `in_turn` the backward pass hands on the gradient of
    `x` when those of the weights are there, added up over devices: for several blocks in the body of a loop.
    """

    def run(block, x, ctx, past, key):
        # here, so that the backward pass fetches the host's weights again instead of keeping all of them
        block = to_device(block)
        if in_turn:
            block, x = _in_turn(block, x)
        return run_in_parts(block, x, ctx, past, key) if split else block(x, ctx, past, key=key)

    remat = get_remat(ctx.execution.remat)
    if remat is None:
        return run
    # inside a scan nothing can be shared between the forward and the backward loop, so XLA need not be kept from it
    return eqx.filter_checkpoint(run, policy=remat.policy(), prevent_cse=prevent_cse)


def _in_turn(block: Any, x: Any) -> tuple[Any, Any]:
    """Both as they are; their gradients leave together.

    Nothing else needs those of weights before the loop goes on, and the compiler might leave them to its end: what they
    are made of is then kept for all blocks at once (gemma3-12b, six blocks a turn: 38 instead of 22 GB of temporaries).
    """
    weights, rest = eqx.partition(block, eqx.is_inexact_array)
    weights, x = _gradients_together((weights, x))
    return eqx.combine(weights, rest), x


@jax.custom_vjp
def _gradients_together(tree: Any) -> Any:
    return tree


_gradients_together.defvjp(lambda tree: (tree, None), lambda _, bars: (jax.lax.optimization_barrier(bars),))
