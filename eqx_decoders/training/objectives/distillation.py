"""Distillation loss: divergence from a teacher's distributions, or from its stored most likely tokens."""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, PRNGKeyArray

from eqx_decoders.blocks.stats import BlockStats
from eqx_decoders.context import Promises
from eqx_decoders.core.auto_jit import jit_if_eager
from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import check, check_number
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.explicit import run_with_auto_axes
from eqx_decoders.training.head.divergence import Divergence, linear_divergence, top_divergence
from eqx_decoders.training.head.head_tiles import HeadForm, join_tiles, split_tiles, tile_length
from eqx_decoders.training.head.log_probs import linear_log_probs
from eqx_decoders.training.head.vocab_parallel import HeadWeights
from eqx_decoders.training.objectives.hidden_states import HiddenProjection, HiddenStates
from eqx_decoders.training.objectives.token_log_probs import at_tokens, needed
from eqx_decoders.training.step.loss import Forward, head_options, head_weights, next_tokens, token_loss_sum
from eqx_decoders.training.step.loss_metrics import LossMetrics
from eqx_decoders.training.step.zigzag import in_context_order


class DistillObjective(eqx.Module):
    """Distillation loss, `mean over targets of alpha T^2 divergence + (1 - alpha) cross-entropy` (Hinton et al. 2015).

    Targets and their weights are those of next-token prediction: the assistant's tokens of a conversation, or the
    sampled tokens of a batch of completions (`Batch.loss_mask`). Routers are balanced as in next-token prediction.

    **Arguments:**

    - `teacher`: a model with the student's vocabulary, whose distribution is computed in each step. If the output heads
        have different sizes, the ids of both are compared. None: `Signals.top_ids` and `top_log_probs` hold a teacher's
        most likely tokens at the same temperature.
    - `divergence`: divergence of the student from the teacher.
    - `temperature`: temperature of both distributions.
    - `alpha`: weight of the divergence.
    - `hidden`: distance from the hidden states of `teacher`, added with its weight.
    - `projection`: projection of the student's hidden states. A `Trainer` creates and trains it if `hidden` has one.
    """

    teacher: Decoder | None = None
    divergence: Divergence = eqx.field(static=True, default=Divergence())
    temperature: float = eqx.field(static=True, default=1.0)
    alpha: float = eqx.field(static=True, default=1.0)
    hidden: HiddenStates = eqx.field(static=True, default=HiddenStates())
    projection: HiddenProjection | None = None
    per_token: ClassVar[bool] = True

    def __check_init__(self):
        self.divergence.checked()
        check_number("DistillObjective.temperature", self.temperature, above=0.0)
        check_number("DistillObjective.alpha", self.alpha, minimum=0.0, maximum=1.0)
        check(
            self.teacher is not None or self.hidden.weight == 0,
            f"HiddenStates.weight={self.hidden.weight} needs DistillObjective.teacher, whose layers are compared.",
        )

    def __call__(
        self, model: Decoder, batch: Batch, *, key: PRNGKeyArray | None, full_batch: Batch
    ) -> tuple[Float32[Array, ""], LossMetrics]:
        """Compute the sum over the targets of a microbatch."""
        model = model.replace(layer_streams=self.hidden.weight > 0)
        more = functools.partial(self._terms, model, key)
        return token_loss_sum(model, batch, key=key, full_batch=full_batch, nll_weight=1.0 - self.alpha, more=more)

    def new_weights(self, model: Decoder, *, key: PRNGKeyArray) -> HiddenProjection | None:
        """Create the projection of hidden states; None without a projection."""
        return self.hidden.new_projection(model, self.teacher, key=key)

    def with_weights(self, weights: HiddenProjection) -> "DistillObjective":
        """Return the loss with these weights of the projection."""
        return dataclasses.replace(self, projection=weights)

    def metrics(self, sums: dict[str, Float32[Array, ""]]) -> dict[str, Float32[Array, ""]]:
        """Return means over the targets: `divergence` and `hidden_distance`."""
        tokens = jnp.maximum(sums["tokens"], 1.0)
        return {name: total / tokens for name, total in sums.items() if name != "tokens"}

    def _terms(
        self, model: Decoder, key: PRNGKeyArray | None, forward: Forward
    ) -> tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]:
        hidden, weights = model.head_input(forward.hidden, key=key), forward.weights

        def weighted_sum(values: Array) -> Float32[Array, ""]:
            return jnp.sum(weights * jnp.where(weights != 0, values, 0.0))

        if self.teacher is None:
            sums = {"divergence": weighted_sum(self._top_divergence(model, hidden, forward))}
        else:
            teacher = self.teacher.replace(layer_streams=self.hidden.weight > 0)
            teacher_hidden, teacher_streams = head_input_and_streams(teacher, forward.batch)
            sums = {"divergence": weighted_sum(self._teacher_divergence(teacher, model, hidden, teacher_hidden))}
            if teacher_streams is not None and forward.streams is not None:
                layers, teacher_layers = map(jnp.asarray, zip(*self.hidden.pairs(model, teacher), strict=True))
                streams = forward.streams[layers]
                if self.projection is not None:
                    streams = self.projection(streams, model.execution.layout)
                distances = self.hidden.distances(streams, teacher_streams[teacher_layers])
                sums["hidden_distance"] = weighted_sum(distances)
        loss = self.alpha * self.temperature**2 * sums["divergence"]
        loss = loss + self.hidden.weight * sums.get("hidden_distance", 0.0)
        return loss, jax.lax.stop_gradient(sums | {"tokens": jnp.sum(weights)})

    def _teacher_divergence(self, teacher: Decoder, model: Decoder, hidden: Array, teacher_hidden: Array) -> Array:
        head, teacher_head = common_ids(model, teacher)
        form, teacher_form = (HeadForm(**_head_form(m, self.temperature)) for m in (model, teacher))
        return linear_divergence(
            hidden, head, teacher_hidden, teacher_head, form=form, teacher_form=teacher_form, divergence=self.divergence
        )

    def _top_divergence(self, model: Decoder, hidden: Array, forward: Forward) -> Array:
        ids, log_probs = needed(forward.signals, "top_ids", "top_log_probs")
        found = linear_log_probs(hidden, head_weights(model), ids, **_head_form(model, self.temperature))
        return top_divergence(found.log_probs, log_probs, self.divergence)


def head_input_and_streams(teacher: Decoder, batch: Batch) -> tuple[Array, Array | None]:
    """Run a teacher on a batch as the student reads it. Returns the input of its head and the outputs of its layers."""
    in_context_order(teacher.config, teacher.execution, batch)  # refuses layers that depend on the order of tokens
    hidden, stats = _run(teacher, batch)
    return teacher.head_input(hidden), stats.streams


def _run(model: Decoder, batch: Batch) -> tuple[Array, BlockStats]:
    """Run a model without dropout on a batch of text, in the order in which it is read."""
    positions, segments = (None if x is None else jnp.asarray(x) for x in (batch.positions, batch.segment_ids))
    promises = Promises(documents_are_contiguous=batch.contiguous)
    hidden, _, stats = model.run(jnp.asarray(batch.tokens), positions, segments, inputs=batch.inputs, promises=promises)
    return hidden, stats


def common_ids(model: Decoder, teacher: Decoder) -> tuple[HeadWeights, HeadWeights]:
    """Return both heads with the ids that both have, because one of them may be padded beyond the vocabulary."""
    size = min(model.config.vocab_size, teacher.config.vocab_size)
    return _cut_head(model, size), _cut_head(teacher, size)


def _cut_head(model: Decoder, size: int) -> HeadWeights:
    head = head_weights(model)
    if model.config.vocab_size == size:
        return head
    kernel = head.kernel[:size] if model.head is None else head.kernel[:, :size]
    return HeadWeights(kernel, None if head.bias is None else head.bias[:size])


def _head_form(model: Decoder, temperature: float) -> dict[str, Any]:
    """Return the options with which hidden states become logits."""
    return head_options(model) | dict(soft_cap=model.config.logit_soft_cap, temperature=temperature)


class TopTokens(NamedTuple):
    """Most likely tokens at each position and their log-probs, in descending order.

    They are at the position of the token that is predicted, as in `Signals.top_ids` and `top_log_probs`; zeros at the
    first token.
    """

    ids: Int[Array, "batch length top"]
    log_probs: Float32[Array, "batch length top"]


def top_tokens(teacher: Decoder, batch: Batch, *, top: int, temperature: float = 1.0) -> TopTokens:
    """Compute the `top` most likely tokens at each position of a batch, in float32.

    Outside of `jax.jit` the function is compiled. Raises ConfigError unless `top` is less than the vocabulary size.
    """
    size = teacher.config.vocab_size
    check(0 < top < size, f"top_tokens: top={top} must be from 1 to {size - 1}, less than the vocabulary size {size}.")
    return _top_tokens(teacher, batch, top, temperature)


@jit_if_eager
@run_with_auto_axes
def _top_tokens(teacher: Decoder, batch: Batch, top: int, temperature: float) -> TopTokens:
    _, weights = next_tokens(batch)
    length, layout = batch.tokens.shape[1], teacher.execution.layout
    batch, real = in_context_order(teacher.config, teacher.execution, batch, weights != 0)
    hidden, _ = _run(teacher, batch)

    def of_tile(hidden: Array) -> tuple[Array, Array]:
        log_probs, ids = jax.lax.top_k(jax.nn.log_softmax(teacher.logits(hidden) / temperature), top)
        return log_probs, ids

    tile = tile_length(hidden.shape[0], length, teacher.config.vocab_size, None, layout.backend)
    log_probs, ids = (join_tiles(x, length) for x in jax.lax.map(of_tile, split_tiles(hidden, tile)))
    masked = (jnp.where(real[..., None], x, jnp.zeros_like(x)) for x in (ids, log_probs))
    return TopTokens(*(at_tokens(x, teacher.execution) for x in masked))
