"""The compiled training step: microbatches, clipping, and a guard against losses that are not finite."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, PRNGKeyArray, PyTree

from eqx_decoders.blocks.stats import BlockStats
from eqx_decoders.core.input_checks import as_key
from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import check
from eqx_decoders.layers.attention.kernels.common import EMPTY
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.numerics.low_rank import low_rank_weights
from eqx_decoders.sharding.axes import axes, buffers, frozen, matching, named_leaves, path_name
from eqx_decoders.sharding.explicit import spec_of
from eqx_decoders.sharding.layout import Layout, partitions
from eqx_decoders.sharding.offload import Offload, to_device, to_memory_of
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig, make_optimizer, make_schedule, widened
from eqx_decoders.training.optimizer.state_layout import StateLayout
from eqx_decoders.training.step.balance import expert_configs
from eqx_decoders.training.step.loss import Loss, NextTokenLoss, or_one
from eqx_decoders.training.step.loss_metrics import LossMetrics
from eqx_decoders.training.step.loss_weights import (
    loss_axes,
    loss_shapes,
    moved_loss_weights,
    new_loss_weights,
    with_loss_weights,
)
from eqx_decoders.training.step.microbatches import (
    cut_batch,
    join_microbatch,
    with_activations,
    without_activations,
    zeros_to_add,
)
from eqx_decoders.training.step.offloaded_step import by_layer, check_offload, square_sum
from eqx_decoders.training.step.qk_clip import clipped_weights, latent_attentions, qk_clip
from eqx_decoders.training.step.router_bias import update_router_bias
from eqx_decoders.training.step.step_config import StepConfig
from eqx_decoders.training.step.train_state import StepMetrics, TrainState


class Trainer(eqx.Module):
    """Maker of `TrainState`s and of their steps; holds the optimizer and the settings that are fixed in a run.

    `Trainer.create(config, model, steps=1000)`, then `state = trainer.init(model, key=key)` and
    `state, metrics = trainer.step(state, batch)`.
    """

    name: str = eqx.field(static=True)
    optimizer: optax.GradientTransformation = eqx.field(static=True)
    schedule: Callable[[Any], Any] = eqx.field(static=True)
    trainable: frozenset[str] = eqx.field(static=True)
    max_grad_norm: float | None = eqx.field(static=True)
    ema_decay: float | None = eqx.field(static=True)
    shard_over_data: bool = eqx.field(static=True)
    config: StepConfig = eqx.field(static=True)
    idle_steps: int = eqx.field(static=True)
    loss_arrays: PyTree  # of a loss that holds any, such as a teacher: an argument of the program, and no constant
    loss_form: Any = eqx.field(static=True)

    @property
    def loss(self) -> Loss:
        """What a step minimizes."""
        return eqx.combine(self.loss_arrays, self.loss_form)

    @classmethod
    def create(
        cls,
        optimizer: OptimizerConfig,
        model: Decoder,
        *,
        steps: int,
        config: StepConfig = StepConfig(),
        loss: Loss | None = None,
        idle_steps: int = 0,
    ) -> "Trainer":
        """Make a trainer of models shaped like `model` (arrays or `ShapeDtypeStruct`s) for runs of `steps` steps.

        `loss` is what a step minimizes; None: the cross-entropy of next tokens. The first `idle_steps` change nothing,
        and the schedule is one of the others.

        Weights that their layer declares frozen are left out, whatever the patterns say, and buffers unless named.
        """
        clips = config.qk_clip_threshold is None or any(True for _ in latent_attentions(model))
        rule = f"StepConfig.qk_clip_threshold={config.qk_clip_threshold} needs latent attention: this model has none."
        check(clips, rule)
        check_offload(model.execution.layout.offload, axes(model), optimizer)
        fetched = not model.execution.layout.offload.weights
        rule = f"Offload.weights={model.execution.layout.offload.weights} needs"
        check(fetched or config.qk_clip_threshold is None, f"{rule} StepConfig.qk_clip_threshold=None: leave one out.")
        single = fetched or config.gradient_accumulation_steps == 1
        check(single, f"{rule} StepConfig.gradient_accumulation_steps=1: gradients of the host's weights lie there.")
        fixed = frozen(model)
        words = {name: axis_names for name, axis_names in axes(model).items() if name not in fixed}
        named = optimizer.trainable
        trainable = matching(words, named, "OptimizerConfig.trainable") - buffers(model, named)
        if config.qk_clip_threshold is not None:
            untrained = sorted(set(clipped_weights(model)) - trainable)
            rule = f"StepConfig.qk_clip_threshold={config.qk_clip_threshold} would change {', '.join(untrained[:3])}"
            check(not untrained, f"{rule}, which OptimizerConfig.trainable leaves out: train them, or leave it out.")
        loss = NextTokenLoss(config.z_loss, config.fused_loss) if loss is None else loss
        trained = {name: words[name] for name in words if name in trainable} | loss_axes(loss_shapes(loss, model))
        arrays, form = eqx.partition(loss, eqx.is_array)
        moving = max(1, steps - idle_steps)
        return cls(
            name=optimizer.name,
            optimizer=make_optimizer(optimizer, trained, moving),
            schedule=make_schedule(optimizer, moving),
            trainable=trainable,
            max_grad_norm=optimizer.max_grad_norm,
            ema_decay=optimizer.ema_decay,
            shard_over_data=optimizer.shard_over_data,
            config=config,
            idle_steps=idle_steps,
            loss_arrays=arrays,
            loss_form=form,
        )

    def init(self, model: Decoder, *, key: PRNGKeyArray) -> TrainState:
        """Make the state before the first step."""
        model = self._with_saved_modules(model)
        model = model.place(model.execution.layout)  # a no-op for `init`'s; weights without a place would compile twice
        key = as_key(key)
        loss_weights = new_loss_weights(self.loss, model, key)
        optimizer = self.new_optimizer(model, loss_weights)
        # counters of their own: a donated step must not be handed one buffer twice
        zero, none = (jax.make_array_from_callback((), _replicated(model), _no_steps) for _ in range(2))
        key = jax.jit(jax.random.clone, out_shardings=_replicated(model))(key)  # device_put can't, over processes
        weights: Any = dict(model=model, loss_weights=loss_weights)
        return self.with_ema(TrainState(**weights, optimizer=optimizer, step=zero, skipped=none, key=key))

    def new_optimizer(self, model: Decoder, loss_weights: PyTree = None) -> PyTree:
        """Make the optimizer's state before its first step, sharded like the weights it belongs to."""
        target = self.abstract(model, key=jax.random.key(0)).optimizer
        shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
        start = model.execution.layout.automatically(self.optimizer.init, lambda _: partitions(target))
        return jax.jit(start, out_shardings=shardings)(self._weights(model, loss_weights))

    def with_ema(self, state: TrainState) -> TrainState:
        """Add the running means that the state must have and has not, equal to the weights; drop all others."""
        if self.ema_decay is None:
            return dataclasses.replace(state, ema=None)
        trained = self._weights(state.model, state.loss_weights)
        means = {name: mean for name, mean in (state.ema or {}).items() if name in trained}
        weights = {name: leaf for name, leaf in trained.items() if name not in means}
        if not weights:
            return dataclasses.replace(state, ema=means)
        every = self.state_shardings(state.model)
        shardings = {name: every[name] for name in weights}
        # copies: a donated step must not be handed one buffer twice
        copies = jax.jit(
            lambda weights: jax.tree.map(lambda leaf: jnp.copy(widened(leaf)), weights), out_shardings=shardings
        )
        return dataclasses.replace(state, ema=means | copies(weights))

    def abstract(self, model: Decoder, *, key: PRNGKeyArray) -> TrainState:
        """Return `init` as a tree of `jax.ShapeDtypeStruct` with shardings, into which checkpoints are restored."""
        model = self._with_saved_modules(model)
        everywhere, key = _replicated(model), as_key(key)
        loss_weights = loss_shapes(self.loss, model)
        weights, state_layout = self._weights(model, loss_weights), self._state_layout(model)
        shardings = state_layout.shardings()

        def like(path, leaf):
            sharding = state_layout.place(path, leaf, shardings) or everywhere
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        optimizer = jax.tree_util.tree_map_with_path(like, jax.eval_shape(self.optimizer.init, weights))
        scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
        like_key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=everywhere)
        means = {name: jax.eval_shape(widened, leaf).update(sharding=shardings[name]) for name, leaf in weights.items()}
        ema = None if self.ema_decay is None else means
        more: Any = dict(step=scalar, skipped=scalar, key=like_key, ema=ema, loss_weights=loss_weights)
        return TrainState(model=model, optimizer=optimizer, **more)

    def _with_saved_modules(self, model: Decoder) -> Decoder:
        """Return the model with the weights that are trained beside its low-rank pairs in `saved_modules`.

        `save_peft` writes these weights completely.
        """
        pairs = tuple(f"{path}." for path in low_rank_weights(model))
        if not pairs:
            return model
        moved = {path for path in self.trainable if not path.startswith(pairs)}
        if self.loss.per_token and _moves_router_biases(model):
            moved |= {path for path in named_leaves(model) if path.endswith(".selection_bias")}
        return dataclasses.replace(model, saved_modules=tuple(sorted(moved | set(model.saved_modules))))

    def state_shardings(self, model: Decoder) -> dict[str, jax.sharding.Sharding]:
        """Return the shardings of the optimizer's state and running mean of each weight that is trained."""
        return self._state_layout(model).shardings()

    def _state_layout(self, model: Decoder) -> StateLayout:
        return StateLayout(model, self.trainable, self.shard_over_data, loss_shapes(self.loss, model))

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Take one compiled optimizer step; `state` is donated: its buffers are those of the new state.

        Returns as soon as the devices have it to do: several steps may be started before a metric is read.
        """
        rows, parts = batch.tokens.shape[0], self.config.gradient_accumulation_steps
        rule = f"A batch of {rows} sequences can't be cut into StepConfig.gradient_accumulation_steps={parts} parts."
        check(rows % parts == 0, rule)
        return _program(_result_shardings(state))((self, batch), state)

    def compile(self, state: TrainState, batch: Batch) -> int | None:
        """Compile `step` for these shapes; return the bytes that it needs of a device, where the compiler tells."""
        sizes = _program(_result_shardings(state)).lower((self, batch), state).compile().memory_analysis()
        if sizes is None:
            return None
        held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        return held + sizes.temp_size_in_bytes

    def trace(self, state: TrainState, batch: Batch) -> Any:
        """Trace `step` as `jax.jit(...).trace` does, for states and batches that may be shapes."""
        shardings = _result_shardings(state)
        out = None if shardings is None else _unflattened(shardings)
        return jax.jit(self.advance, donate_argnums=0, out_shardings=out).trace(state, batch)

    def advance(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Take a step as a plain function, for a program of one's own."""

        def specs(result: tuple[TrainState, StepMetrics]) -> PyTree:
            return jax.tree.map(spec_of, state), jax.tree.map(lambda _: PartitionSpec(), result[1])

        return state.model.execution.layout.automatically(Trainer._advance, specs)(self, state, batch)

    def _advance(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(state.key, state.step) if _uses_key(state.model) else None
        gradient, sums = self._gradient(state.model, batch, key, state.loss_weights)
        tokens = or_one(sums.tokens)
        divisor = tokens if self.loss.per_token else jnp.ones_like(tokens)
        # in f32, also for weights in half precision: there a sum of squares would lose most of its digits
        norm = jnp.sqrt(square_sum(gradient)) / divisor
        finite = jnp.isfinite(sums.loss) & jnp.isfinite(norm)
        moves = finite & (state.step >= self.idle_steps) if self.idle_steps else finite
        scale = 1.0 / divisor
        if self.max_grad_norm is not None:
            scale = scale * jnp.minimum(1.0, self.max_grad_norm / jnp.maximum(norm, 1e-12))

        state_layout = self._state_layout(state.model)
        in_parts = state_layout.in_parts

        def move(weights, gradient, optimizer, ema):
            scaled = {
                name: (_as_float32(leaf) * scale).astype(widened(weights[name]).dtype)
                for name, leaf in gradient.items()
            }
            weights = in_parts(weights)
            updates, optimizer = self.optimizer.update(scaled, optimizer, weights)
            with jax.numpy_dtype_promotion("standard"):  # updates are in f32, whatever the weights are in
                weights = in_parts(optax.apply_updates(weights, updates))
            if self.ema_decay is not None:
                ema = in_parts(optax.incremental_update(jax.tree.map(widened, weights), ema, 1 - self.ema_decay))
            return state_layout.gathered(weights), in_parts(optimizer), ema

        # a branch, not `where` on every leaf: that would hold old and new weights and states at the same time
        old, groups = self._weights(state.model, state.loss_weights), state_layout.streamed()
        names = tuple(name for name in old if not any(name in group for group in groups.values()))
        weights, optimizer, ema = by_layer(move, groups, names, moves, old, gradient, state.optimizer, state.ema)
        model = self._with_weights(state.model, weights)
        # of a policy they are what tells it from its reference: an objective leaves them alone
        model = _with_router_biases(model, sums.stats, moves) if self.loss.per_token else model
        clipped = self._clipped(model, sums.stats, moves)
        if ema is not None and clipped is not model:
            ema = in_parts(self._with_clipped(ema, named_leaves(model), named_leaves(clipped)))
        arrays: Any = dict(model=clipped, optimizer=optimizer, ema=ema)
        arrays |= dict(loss_weights=moved_loss_weights(state.loss_weights, weights))
        skipped = state.skipped + jnp.where(moves, 0, 1)
        new = dataclasses.replace(state, step=state.step + 1, skipped=skipped, **arrays)
        metrics = StepMetrics(
            loss=sums.loss / divisor,
            nll=sums.nll / tokens,
            accuracy=sums.correct / tokens,
            tokens=sums.tokens,
            grad_norm=norm,
            learning_rate=jnp.asarray(self.schedule(state.step - state.skipped), jnp.float32),
            skipped=~finite,
            mtp_nll=None if sums.mtp is None else sums.mtp.nll / or_one(sums.mtp.tokens),
            stats=sums.stats,
            objective=None if sums.sums is None else self.loss.figures(sums.sums),
        )
        return new, metrics

    def _gradient(
        self, model: Decoder, batch: Batch, key: PRNGKeyArray | None, loss_weights: PyTree = None
    ) -> tuple[PyTree, LossMetrics]:
        """Compute the gradient of the summed loss, and its metrics, added up over the microbatches."""
        config, state_layout = self.config, self._state_layout(model)
        trained_weights = self._weights(model, loss_weights)
        count = config.gradient_accumulation_steps

        def loss(weights, rows, key):
            trained = self._with_weights(model, weights)
            if self.shard_over_data:
                trained = trained.replace(layout=_gradients_over_data(trained))
            if config.qk_clip_threshold is not None:
                trained = trained.replace(attention_maxima=True)
            objective = with_loss_weights(self.loss, moved_loss_weights(loss_weights, weights))
            return objective(trained, rows, key=key, full_batch=batch)

        def part(rows, key):
            (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(trained_weights, rows, key)
            return state_layout.in_parts(gradient), metrics

        if count == 1:
            return part(batch, key)
        layout = model.execution.layout
        keys = None if key is None else jax.random.split(key, count)
        pieces = cut_batch(batch, count)

        def one(rows, key):
            gradient, metrics = part(join_microbatch(rows, layout), key)
            return gradient, *without_activations(metrics)

        def add(total, microbatch):
            gradient, metrics, activations = one(*microbatch)
            gradient = jax.tree.map(lambda sum, leaf: sum + _as_float32(leaf), total[0], gradient)
            return (gradient, total[1].add(metrics)), activations

        shapes = jax.eval_shape(one, *jax.tree.map(lambda leaf: leaf[0], (pieces, keys)))[:2]
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes)
        zeros = (state_layout.in_parts(zeros[0]), zeros_to_add(zeros[1]))
        total, activations = jax.lax.scan(add, zeros, (pieces, keys))
        gradient, metrics = total
        return gradient, with_activations(metrics, activations)

    def _clipped(self, model: Decoder, stats: BlockStats | None, finite: Array) -> Decoder:
        """Apply QK-clip, if the settings have it and the step changed anything."""
        if self.config.qk_clip_threshold is None or stats is None or stats.max_scores is None:
            return model
        return qk_clip(model, jnp.where(finite, stats.max_scores, EMPTY), self.config.qk_clip_threshold)

    def _with_clipped(self, ema: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        """Move the running means of weights that QK-clip has changed."""
        share = 1 - (self.ema_decay or 0.0)

        def one(name: str, mean: Any) -> Any:
            moved = to_device(mean) + share * (widened(after[name]) - widened(before[name]))
            return to_memory_of(moved, mean)

        return {name: mean if after[name] is before[name] else one(name, mean) for name, mean in ema.items()}

    def _weights(self, model: Decoder, loss_weights: PyTree) -> dict[str, Any]:
        return StateLayout(model, self.trainable, self.shard_over_data, loss_weights).weights

    def _with_weights(self, model: Decoder, weights: dict[str, Any]) -> Decoder:
        return jax.tree_util.tree_map_with_path(lambda path, leaf: weights.get(path_name(path), leaf), model)


class _StateShardings(NamedTuple):
    """Shardings of a state, and of metrics."""

    leaves: tuple[jax.sharding.Sharding, ...]
    tree: Any
    metrics: jax.sharding.Sharding


def _result_shardings(state: TrainState) -> _StateShardings | None:
    """Return the shardings of a step's results; None leaves them to XLA, which may mistake the host's memory."""
    if state.model.execution.layout.offload == Offload():
        return None
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda leaf: leaf.sharding, state))
    return _StateShardings(tuple(leaves), tree, _replicated(state.model))


def _unflattened(shardings: _StateShardings) -> tuple[TrainState, jax.sharding.Sharding]:
    return jax.tree.unflatten(shardings.tree, shardings.leaves), shardings.metrics


def _step(trainer_and_batch: tuple[Trainer, Batch], state: TrainState) -> tuple[TrainState, StepMetrics]:
    trainer, batch = trainer_and_batch
    return trainer.advance(state, batch)


_compiled_step = jax.jit(_step, donate_argnums=1)  # not eqx.filter_jit, which returns when all is computed


def _program(shardings: _StateShardings | None) -> Any:
    return _compiled_step if shardings is None else _placed_step(shardings)


@functools.lru_cache(maxsize=8)
def _placed_step(shardings: _StateShardings) -> Any:
    return jax.jit(_step, donate_argnums=1, out_shardings=_unflattened(shardings))


def _gradients_over_data(model: Decoder) -> Layout:
    return dataclasses.replace(model.execution.layout, gradients_over_data=True)


def _as_float32(x: Array) -> Array:
    return x.astype(jnp.float32)


def _uses_key(model: Decoder) -> bool:
    """Return whether the model has any dropout, random routing or stochastic rounding, and so needs a key."""
    config, rounding = model.config, model.execution.low_precision
    if rounding is not None and rounding.draws:
        return True
    blocks = config.blocks if config.mtp is None else (*config.blocks, config.mtp.block)
    rates = [config.dropout, *(rate for b in blocks for rate in (b.dropout, getattr(b.mlp, "dropout", 0.0)))]
    return max(rates) > 0 or any(layer.draws for layer in expert_configs(config))


def _with_router_biases(model: Decoder, stats: BlockStats | None, finite: Array) -> Decoder:
    """Move the selection biases by the loads of this step; by none if it was not finite."""
    if not _moves_router_biases(model) or stats is None or stats.routing is None:
        return model
    return update_router_bias(model, jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0.0), stats.routing))


def _moves_router_biases(model: Decoder) -> bool:
    return any(layer.router.bias_update_rate > 0 for layer in expert_configs(model.config))


def _no_steps(index: Any) -> np.ndarray:
    return np.zeros((), np.int32)


def _replicated(model: Decoder) -> jax.sharding.Sharding:
    return model.execution.layout.replicated()
