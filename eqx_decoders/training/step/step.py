"""The compiled training step: gradient accumulation, gradient clipping, optimizer, and a check for finite values."""

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
from eqx_decoders.training.optimizer.optimizer import (
    OptimizerConfig,
    in_float32,
    make_optimizer,
    make_schedule,
    widened,
)
from eqx_decoders.training.optimizer.state_layout import StateLayout
from eqx_decoders.training.step.balance import expert_configs
from eqx_decoders.training.step.loss import Loss, NextTokenLoss, nonzero_divisor
from eqx_decoders.training.step.loss_metrics import LossMetrics
from eqx_decoders.training.step.loss_weights import (
    loss_axes,
    loss_shapes,
    new_loss_weights,
    replace_loss_weights,
    with_loss_weights,
)
from eqx_decoders.training.step.microbatches import (
    join_microbatch,
    split_batch,
    with_activations,
    without_activations,
    zero_metrics,
)
from eqx_decoders.training.step.offloaded_step import check_offload, square_sum, update_by_layer
from eqx_decoders.training.step.qk_clip import clipped_weights, latent_attentions, qk_clip
from eqx_decoders.training.step.router_bias import update_router_bias
from eqx_decoders.training.step.step_config import StepConfig
from eqx_decoders.training.step.train_state import StepMetrics, TrainState


class Trainer(eqx.Module):
    """Training step: loss, optimizer and settings that are constant in a run.

    `trainer = Trainer.create(config, model, steps=1000)`, then `state = trainer.init(model, key=key)` and
    `state, metrics = trainer.step(state, batch)`.

    **Arguments:**

    - `name`: name of the optimizer.
    - `optimizer`, `schedule`: optax's optimizer and learning rate schedule.
    - `trainable`: paths of the trained weights of the model.
    - `max_grad_norm`, `ema_decay`, `shard_over_data`: see `OptimizerConfig`.
    - `config`: settings of a step.
    - `idle_steps`: number of first steps that do not change the weights.
    - `loss_arrays`, `loss_form`: the loss, divided into arrays (such as those of a teacher, which are arguments of the
        compiled step and not constants) and everything else.
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
    loss_arrays: PyTree
    loss_form: Any = eqx.field(static=True)

    @property
    def loss(self) -> Loss:
        """Loss that a step minimizes."""
        return eqx.combine(self.loss_arrays, self.loss_form)

    @classmethod
    def create(
        cls,
        optimizer: OptimizerConfig | optax.GradientTransformation,
        model: Decoder,
        *,
        steps: int,
        config: StepConfig = StepConfig(),
        loss: Loss | None = None,
        idle_steps: int = 0,
    ) -> "Trainer":
        """Create a trainer. Raises ConfigError for settings that the model does not support.

        Weights that their layer declares frozen are not trained, and buffers only if a pattern ends with their name.

        **Arguments:**

        - `optimizer`: settings of the optimizer, or an optimizer of optax. The latter updates a dictionary of all
            weights by path (such as `embedding.table`), in float32. It includes its schedule, weight decay and gradient
            clipping, and `StepMetrics.learning_rate` is NaN.
        - `model`: a decoder of arrays or of `jax.ShapeDtypeStruct`.
        - `steps`: number of steps of the run, for the schedule.
        - `config`: settings of a step.
        - `loss`: loss that a step minimizes. None: the cross-entropy of next tokens.
        - `idle_steps`: number of first steps that do not change the weights. The schedule starts after them.
        """
        settings = optimizer if isinstance(optimizer, OptimizerConfig) else OptimizerConfig(max_grad_norm=None)
        offload = model.execution.layout.offload
        check(
            settings is optimizer or offload == Offload(),
            f"Layout.offload={offload} needs an OptimizerConfig, not an optimizer of optax.",
        )
        check(
            config.qk_clip_threshold is None or any(True for _ in latent_attentions(model)),
            f"StepConfig.qk_clip_threshold={config.qk_clip_threshold} needs latent attention, which this model does "
            "not have.",
        )
        check_offload(offload, axes(model), settings)
        check(
            not offload.weights or config.qk_clip_threshold is None,
            f"Offload.weights={offload.weights} does not support StepConfig.qk_clip_threshold="
            f"{config.qk_clip_threshold}: remove one of them.",
        )
        check(
            not offload.weights or config.gradient_accumulation_steps == 1,
            f"Offload.weights={offload.weights} needs StepConfig.gradient_accumulation_steps=1: the gradients of "
            "offloaded weights are in host memory.",
        )
        frozen_paths = frozen(model)
        axis_names = {path: names for path, names in axes(model).items() if path not in frozen_paths}
        patterns = settings.trainable
        trainable = matching(axis_names, patterns, "OptimizerConfig.trainable") - buffers(model, patterns)
        if config.qk_clip_threshold is not None:
            untrained = sorted(set(clipped_weights(model)) - trainable)
            check(
                not untrained,
                f"StepConfig.qk_clip_threshold={config.qk_clip_threshold} would change {', '.join(untrained[:3])}, "
                "which OptimizerConfig.trainable does not match: train them, or remove the threshold.",
            )
        loss = NextTokenLoss(config.z_loss, config.fused_loss) if loss is None else loss
        trained = {path: names for path, names in axis_names.items() if path in trainable}
        trained |= loss_axes(loss_shapes(loss, model))
        loss_arrays, loss_form = eqx.partition(loss, eqx.is_array)
        training_steps = max(1, steps - idle_steps)
        if isinstance(optimizer, OptimizerConfig):
            name = optimizer.name
            transformation = make_optimizer(optimizer, trained, training_steps)
            schedule = make_schedule(optimizer, training_steps)
        else:
            name = "optax"
            transformation = in_float32(optimizer)
            schedule = optax.constant_schedule(float("nan"))
        return cls(
            name=name,
            optimizer=transformation,
            schedule=schedule,
            trainable=trainable,
            max_grad_norm=settings.max_grad_norm,
            ema_decay=settings.ema_decay,
            shard_over_data=settings.shard_over_data,
            config=config,
            idle_steps=idle_steps,
            loss_arrays=loss_arrays,
            loss_form=loss_form,
        )

    def init(self, model: Decoder, *, key: PRNGKeyArray | int) -> TrainState:
        """Return the state before the first step."""
        model = self._with_saved_modules(model)
        model = model.place(model.execution.layout)  # weights without a sharding would compile the step twice
        run_key: PRNGKeyArray = as_key(key)
        loss_weights = new_loss_weights(self.loss, model, run_key)
        optimizer = self.new_optimizer(model, loss_weights)
        # two arrays: a buffer cannot be donated twice
        step, skipped = (jax.make_array_from_callback((), _replicated(model), _zero) for _ in range(2))
        # device_put fails with many processes
        run_key = jax.jit(jax.random.clone, out_shardings=_replicated(model))(run_key)
        return self.with_ema(
            TrainState(
                model=model, loss_weights=loss_weights, optimizer=optimizer, step=step, skipped=skipped, key=run_key
            )
        )

    def new_optimizer(self, model: Decoder, loss_weights: PyTree = None) -> PyTree:
        """Return the initial state of the optimizer, sharded like its weights."""
        target = self.abstract(model, key=jax.random.key(0)).optimizer
        shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
        initialize = model.execution.layout.automatically(self.optimizer.init, lambda _: partitions(target))
        return jax.jit(initialize, out_shardings=shardings)(self._weights(model, loss_weights))

    def with_ema(self, state: TrainState) -> TrainState:
        """Return the state with exactly the moving averages that it needs. New averages are equal to the weights."""
        if self.ema_decay is None:
            return dataclasses.replace(state, ema=None)
        trained = self._weights(state.model, state.loss_weights)
        averages = {name: average for name, average in (state.ema or {}).items() if name in trained}
        weights = {name: leaf for name, leaf in trained.items() if name not in averages}
        if not weights:
            return dataclasses.replace(state, ema=averages)
        all_shardings = self.state_shardings(state.model)
        shardings = {name: all_shardings[name] for name in weights}
        # copies: a buffer cannot be donated twice
        copies = jax.jit(
            lambda weights: jax.tree.map(lambda leaf: jnp.copy(widened(leaf)), weights), out_shardings=shardings
        )
        return dataclasses.replace(state, ema=averages | copies(weights))

    def abstract(self, model: Decoder, *, key: PRNGKeyArray | int) -> TrainState:
        """Return the shapes, dtypes and shardings of `init(model, key=key)`, to restore a checkpoint."""
        model = self._with_saved_modules(model)
        replicated = _replicated(model)
        run_key: PRNGKeyArray = as_key(key)
        loss_weights = loss_shapes(self.loss, model)
        weights, state_layout = self._weights(model, loss_weights), self._state_layout(model)
        shardings = state_layout.shardings()

        def abstract_leaf(path, leaf):
            sharding = state_layout.place(path, leaf, shardings) or replicated
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        optimizer = jax.tree_util.tree_map_with_path(abstract_leaf, jax.eval_shape(self.optimizer.init, weights))
        scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
        abstract_key = jax.ShapeDtypeStruct(run_key.shape, run_key.dtype, sharding=replicated)
        ema = None
        if self.ema_decay is not None:
            ema = {
                name: jax.eval_shape(widened, leaf).update(sharding=shardings[name]) for name, leaf in weights.items()
            }
        return TrainState(
            model=model,
            optimizer=optimizer,
            step=scalar,
            skipped=scalar,
            key=abstract_key,
            ema=ema,
            loss_weights=loss_weights,
        )

    def _with_saved_modules(self, model: Decoder) -> Decoder:
        """Return the model with the paths of all weights that change, except adapters, in `saved_modules`.

        `save_peft` writes these weights completely.
        """
        adapters = tuple(f"{path}." for path in low_rank_weights(model))
        if not adapters:
            return model
        changing = {path for path in self.trainable if not path.startswith(adapters)}
        if self.loss.per_token and _has_bias_updates(model):
            changing |= {path for path in named_leaves(model) if path.endswith(".selection_bias")}
        return dataclasses.replace(model, saved_modules=tuple(sorted(changing | set(model.saved_modules))))

    def state_shardings(self, model: Decoder) -> dict[str, jax.sharding.Sharding]:
        """Return the sharding of the optimizer state and moving average of each trained weight."""
        return self._state_layout(model).shardings()

    def _state_layout(self, model: Decoder) -> StateLayout:
        return StateLayout(model, self.trainable, self.shard_over_data, loss_shapes(self.loss, model))

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Take one compiled step. The buffers of `state` are donated. Raises ConfigError.

        The call returns before the devices have computed the step, so several steps can be started before a metric is
        read.
        """
        rows, steps = batch.tokens.shape[0], self.config.gradient_accumulation_steps
        check(
            rows % steps == 0,
            f"Batch.tokens: the number of sequences, {rows}, must be a multiple of "
            f"StepConfig.gradient_accumulation_steps={steps}.",
        )
        return _program(_result_shardings(state))((self, batch), state)

    def compile(self, state: TrainState, batch: Batch) -> int | None:
        """Compile `step` for these shapes.

        Returns the memory that it needs per device, in bytes; None if the compiler does not report it.
        """
        sizes = _program(_result_shardings(state)).lower((self, batch), state).compile().memory_analysis()
        if sizes is None:
            return None
        arrays = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        return arrays + sizes.temp_size_in_bytes

    def trace(self, state: TrainState, batch: Batch) -> Any:
        """Trace `step`, as `jax.jit(...).trace` does. `state` and `batch` can be shapes."""
        shardings = _result_shardings(state)
        out = None if shardings is None else _unflattened(shardings)
        return jax.jit(self.advance, donate_argnums=0, out_shardings=out).trace(state, batch)

    def advance(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Take a step without `jax.jit`, for use in your own compiled function."""

        def specs(result: tuple[TrainState, StepMetrics]) -> PyTree:
            return jax.tree.map(spec_of, state), jax.tree.map(lambda _: PartitionSpec(), result[1])

        return state.model.execution.layout.automatically(Trainer._advance, specs)(self, state, batch)

    def _advance(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(state.key, state.step) if _uses_key(state.model) else None
        gradient, sums = self._gradient(state.model, batch, key, state.loss_weights)
        tokens = nonzero_divisor(sums.tokens)
        divisor = tokens if self.loss.per_token else jnp.ones_like(tokens)
        norm = jnp.sqrt(square_sum(gradient)) / divisor  # in float32: in 16 bits, the sum of squares would be inexact
        finite = jnp.isfinite(sums.loss) & jnp.isfinite(norm)
        is_update = finite & (state.step >= self.idle_steps) if self.idle_steps else finite
        scale = 1.0 / divisor
        if self.max_grad_norm is not None:
            scale = scale * jnp.minimum(1.0, self.max_grad_norm / jnp.maximum(norm, 1e-12))

        state_layout = self._state_layout(state.model)
        split_over_data = state_layout.split_over_data

        def update(weights, gradient, optimizer, ema):
            scaled = {
                name: (_as_float32(leaf) * scale).astype(widened(weights[name]).dtype)
                for name, leaf in gradient.items()
            }
            weights = split_over_data(weights)
            updates, optimizer = self.optimizer.update(scaled, optimizer, weights)
            with jax.numpy_dtype_promotion("standard"):  # updates are float32, weights can be bfloat16
                weights = split_over_data(optax.apply_updates(weights, updates))
            if self.ema_decay is not None:
                ema = split_over_data(optax.incremental_update(jax.tree.map(widened, weights), ema, 1 - self.ema_decay))
            return state_layout.gathered(weights), split_over_data(optimizer), ema

        # A branch: `jnp.where` for each leaf would need memory for old and new weights and states.
        old_weights, offloaded = self._weights(state.model, state.loss_weights), state_layout.offloaded_groups()
        on_device = tuple(name for name in old_weights if not any(name in names for names in offloaded.values()))
        weights, optimizer, ema = update_by_layer(
            update, offloaded, on_device, is_update, old_weights, gradient, state.optimizer, state.ema
        )
        model = self._with_weights(state.model, weights)
        # Other objectives compare a policy with its reference, so they do not change its routers' biases.
        model = _with_router_biases(model, sums.stats, is_update) if self.loss.per_token else model
        clipped = self._clipped(model, sums.stats, is_update)
        if ema is not None and clipped is not model:
            ema = split_over_data(self._with_clipped(ema, named_leaves(model), named_leaves(clipped)))
        new_state = dataclasses.replace(
            state,
            step=state.step + 1,
            skipped=state.skipped + jnp.where(is_update, 0, 1),
            model=clipped,
            optimizer=optimizer,
            ema=ema,
            loss_weights=replace_loss_weights(state.loss_weights, weights),
        )
        metrics = StepMetrics(
            loss=sums.loss / divisor,
            nll=sums.nll / tokens,
            accuracy=sums.correct / tokens,
            tokens=sums.tokens,
            grad_norm=norm,
            learning_rate=jnp.asarray(self.schedule(state.step - state.skipped), jnp.float32),
            skipped=~finite,
            mtp_nll=None if sums.mtp is None else sums.mtp.nll / nonzero_divisor(sums.mtp.tokens),
            stats=sums.stats,
            objective=None if sums.sums is None else self.loss.metrics(sums.sums),
        )
        return new_state, metrics

    def _gradient(
        self, model: Decoder, batch: Batch, key: PRNGKeyArray | None, loss_weights: PyTree = None
    ) -> tuple[PyTree, LossMetrics]:
        """Compute the gradient of the summed loss, and its metrics, summed over the microbatches."""
        config, state_layout = self.config, self._state_layout(model)
        trained_weights = self._weights(model, loss_weights)
        count = config.gradient_accumulation_steps

        def loss(weights, rows, key):
            trained = self._with_weights(model, weights)
            if self.shard_over_data:
                trained = trained.replace(layout=_gradients_over_data(trained))
            if config.qk_clip_threshold is not None:
                trained = trained.replace(attention_maxima=True)
            objective = with_loss_weights(self.loss, replace_loss_weights(loss_weights, weights))
            return objective(trained, rows, key=key, full_batch=batch)

        def microbatch_gradient(rows, key):
            (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(trained_weights, rows, key)
            return state_layout.split_over_data(gradient), metrics

        if count == 1:
            return microbatch_gradient(batch, key)
        layout = model.execution.layout
        keys = None if key is None else jax.random.split(key, count)
        microbatches = split_batch(batch, count)

        def summable(rows, key):
            gradient, metrics = microbatch_gradient(join_microbatch(rows, layout), key)
            return gradient, *without_activations(metrics)

        def add(total, microbatch):
            gradient, metrics, activations = summable(*microbatch)
            gradient = jax.tree.map(lambda sum, leaf: sum + _as_float32(leaf), total[0], gradient)
            return (gradient, total[1].add(metrics)), activations

        shapes = jax.eval_shape(summable, *jax.tree.map(lambda leaf: leaf[0], (microbatches, keys)))[:2]
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes)
        zeros = (state_layout.split_over_data(zeros[0]), zero_metrics(zeros[1]))
        total, activations = jax.lax.scan(add, zeros, (microbatches, keys))
        gradient, metrics = total
        return gradient, with_activations(metrics, activations)

    def _clipped(self, model: Decoder, stats: BlockStats | None, finite: Array) -> Decoder:
        """Apply QK-clip, if it is enabled and the step has changed the weights."""
        if self.config.qk_clip_threshold is None or stats is None or stats.max_scores is None:
            return model
        return qk_clip(model, jnp.where(finite, stats.max_scores, EMPTY), self.config.qk_clip_threshold)

    def _with_clipped(self, ema: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        """Update the moving averages of weights that QK-clip has changed."""
        share = 1 - (self.ema_decay or 0.0)

        def updated(name: str, mean: Any) -> Any:
            result = to_device(mean) + share * (widened(after[name]) - widened(before[name]))
            return to_memory_of(result, mean)

        return {name: mean if after[name] is before[name] else updated(name, mean) for name, mean in ema.items()}

    def _weights(self, model: Decoder, loss_weights: PyTree) -> dict[str, Any]:
        return StateLayout(model, self.trainable, self.shard_over_data, loss_weights).weights

    def _with_weights(self, model: Decoder, weights: dict[str, Any]) -> Decoder:
        return jax.tree_util.tree_map_with_path(lambda path, leaf: weights.get(path_name(path), leaf), model)


class _StateShardings(NamedTuple):
    """Shardings of a state and of the metrics. It is hashable."""

    leaves: tuple[jax.sharding.Sharding, ...]
    tree: Any
    metrics: jax.sharding.Sharding


def _result_shardings(state: TrainState) -> _StateShardings | None:
    """Return the shardings of the results of a step; None: XLA chooses them.

    They are necessary for offloaded arrays, because XLA may choose another memory.
    """
    if state.model.execution.layout.offload == Offload():
        return None
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda leaf: leaf.sharding, state))
    return _StateShardings(tuple(leaves), tree, _replicated(state.model))


def _unflattened(shardings: _StateShardings) -> tuple[TrainState, jax.sharding.Sharding]:
    return jax.tree.unflatten(shardings.tree, shardings.leaves), shardings.metrics


def _step(trainer_and_batch: tuple[Trainer, Batch], state: TrainState) -> tuple[TrainState, StepMetrics]:
    trainer, batch = trainer_and_batch
    return trainer.advance(state, batch)


_compiled_step = jax.jit(_step, donate_argnums=1)  # not eqx.filter_jit, which waits for the results


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
    """Return whether the model needs a key: for dropout, random routing or stochastic rounding."""
    config, rounding = model.config, model.execution.low_precision
    if rounding is not None and rounding.draws:
        return True
    blocks = config.blocks if config.mtp is None else (*config.blocks, config.mtp.block)
    rates = [config.dropout, *(rate for b in blocks for rate in (b.dropout, getattr(b.mlp, "dropout", 0.0)))]
    return max(rates) > 0 or any(layer.draws for layer in expert_configs(config))


def _with_router_biases(model: Decoder, stats: BlockStats | None, finite: Array) -> Decoder:
    """Update the selection biases of the routers with the loads of a finite step."""
    if not _has_bias_updates(model) or stats is None or stats.routing is None:
        return model
    return update_router_bias(model, jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0.0), stats.routing))


def _has_bias_updates(model: Decoder) -> bool:
    return any(layer.router.bias_update_rate > 0 for layer in expert_configs(model.config))


def _zero(index: Any) -> np.ndarray:
    return np.zeros((), np.int32)


def _replicated(model: Decoder) -> jax.sharding.Sharding:
    return model.execution.layout.replicated()
