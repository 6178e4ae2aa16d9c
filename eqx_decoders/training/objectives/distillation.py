"""Loss of a student that learns from a teacher's distributions, of the teacher itself or of its likeliest tokens."""

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
from eqx_decoders.training.head.head_tiles import HeadForm, cut, joined, tile_length
from eqx_decoders.training.head.log_probs import linear_log_probs
from eqx_decoders.training.head.vocab_parallel import HeadWeights
from eqx_decoders.training.objectives.hidden_states import HiddenProjection, HiddenStates
from eqx_decoders.training.objectives.token_log_probs import at_tokens, needed
from eqx_decoders.training.step.loss import Forward, head_options, head_weights, next_tokens, token_loss_sum
from eqx_decoders.training.step.loss_metrics import LossMetrics
from eqx_decoders.training.step.zigzag import in_context_order


class DistillObjective(eqx.Module):
    """Loss of a student, `mean over targets of alpha T^2 divergence + (1 - alpha) cross-entropy` (Hinton et al. 2015).

    Targets and their weights are those of the loss of next tokens: of a conversation what the assistant says, of a
    batch of answers that the student drew (`Batch.loss_mask`) these answers. Routers are balanced as there.

    **Arguments:**

    - `teacher`: a model with the student's vocabulary, whose distribution is computed in each step; of heads of two
        sizes the ids that both have count. None: `Signals.top_ids` and `top_log_probs` are a teacher's likeliest
        tokens, at the same temperature.
    - `divergence`: of the student from the teacher.
    - `temperature`: softens both distributions.
    - `alpha`: weight of the divergence.
    - `hidden`: distance of hidden states from those of `teacher`, which is added by its weight.
    - `projection`: of the student's hidden states; a `Trainer` makes and trains it where `hidden` has one.
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
        rule = "compares with all of a teacher's layers: give DistillObjective.teacher, too"
        check(self.teacher is not None or self.hidden.weight == 0, f"HiddenStates.weight={self.hidden.weight} {rule}.")

    def __call__(
        self, model: Decoder, batch: Batch, *, key: PRNGKeyArray | None, full_batch: Batch
    ) -> tuple[Float32[Array, ""], LossMetrics]:
        """Compute the sum over the targets."""
        model = model.replace(layer_streams=self.hidden.weight > 0)
        more = functools.partial(self._terms, model, key)
        return token_loss_sum(model, batch, key=key, full_batch=full_batch, nll_weight=1.0 - self.alpha, more=more)

    def new_weights(self, model: Decoder, *, key: PRNGKeyArray) -> HiddenProjection | None:
        """Make the projection of hidden states; None where there is none."""
        return self.hidden.new_projection(model, self.teacher, key=key)

    def with_weights(self, weights: HiddenProjection) -> "DistillObjective":
        """Return the loss with a projection of hidden states."""
        return dataclasses.replace(self, projection=weights)

    def figures(self, sums: dict[str, Float32[Array, ""]]) -> dict[str, Float32[Array, ""]]:
        """Return the means over the targets: of the divergence, and of the distance of hidden states."""
        tokens = jnp.maximum(sums["tokens"], 1.0)
        return {name: total / tokens for name, total in sums.items() if name != "tokens"}

    def _terms(
        self, model: Decoder, key: PRNGKeyArray | None, forward: Forward
    ) -> tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]:
        hidden, weights = model.head_input(forward.hidden, key=key), forward.weights

        def total(each: Array) -> Float32[Array, ""]:
            return jnp.sum(weights * jnp.where(weights != 0, each, 0.0))

        if self.teacher is None:
            sums = {"divergence": total(self._of_top(model, hidden, forward))}
        else:
            teacher = self.teacher.replace(layer_streams=self.hidden.weight > 0)
            theirs, streams = read_by(teacher, forward.batch)
            sums = {"divergence": total(self._of_teacher(teacher, model, hidden, theirs))}
            if streams is not None and forward.streams is not None:
                mine, other = (jnp.asarray(each) for each in zip(*self.hidden.pairs(model, teacher), strict=True))
                students = forward.streams[mine]
                if self.projection is not None:
                    students = self.projection(students, model.execution.layout)
                sums["hidden_distance"] = total(self.hidden.distances(students, streams[other]))
        loss = self.alpha * self.temperature**2 * sums["divergence"]
        loss = loss + self.hidden.weight * sums.get("hidden_distance", 0.0)
        return loss, jax.lax.stop_gradient(sums | {"tokens": jnp.sum(weights)})

    def _of_teacher(self, teacher: Decoder, model: Decoder, hidden: Array, theirs: Array) -> Array:
        heads = common_ids(model, teacher)
        forms = [HeadForm(**_form(each, self.temperature)) for each in (model, teacher)]
        form, teacher_form = forms
        return linear_divergence(
            hidden, heads[0], theirs, heads[1], form=form, teacher_form=teacher_form, divergence=self.divergence
        )

    def _of_top(self, model: Decoder, hidden: Array, forward: Forward) -> Array:
        ids, log_probs = needed(forward.signals, "top_ids", "top_log_probs")
        students = linear_log_probs(hidden, head_weights(model), ids, **_form(model, self.temperature))
        return top_divergence(students.log_probs, log_probs, self.divergence)


def read_by(teacher: Decoder, batch: Batch) -> tuple[Array, Array | None]:
    """Run a teacher on a batch, as the student reads it: its head's input, and the streams behind its layers."""
    in_context_order(teacher.config, teacher.execution, batch)  # refuses layers that go by the order of tokens
    hidden, stats = _stream_of(teacher, batch)
    return teacher.head_input(hidden), stats.streams


def _stream_of(model: Decoder, batch: Batch) -> tuple[Array, BlockStats]:
    """Run a model without dropout on a batch of text, in the order in which it is read."""
    positions, segments = (None if x is None else jnp.asarray(x) for x in (batch.positions, batch.segment_ids))
    promises = Promises(documents_are_contiguous=batch.contiguous)
    hidden, _, stats = model.run(jnp.asarray(batch.tokens), positions, segments, inputs=batch.inputs, promises=promises)
    return hidden, stats


def common_ids(model: Decoder, teacher: Decoder) -> tuple[HeadWeights, HeadWeights]:
    """Return both heads, of the ids that both have: rows behind the vocabulary may pad one of them."""
    size = min(model.config.vocab_size, teacher.config.vocab_size)
    return _cut_head(model, size), _cut_head(teacher, size)


def _cut_head(model: Decoder, size: int) -> HeadWeights:
    head = head_weights(model)
    if model.config.vocab_size == size:
        return head
    kernel = head.kernel[:size] if model.head is None else head.kernel[:, :size]
    return HeadWeights(kernel, None if head.bias is None else head.bias[:size])


def _form(model: Decoder, temperature: float) -> dict[str, Any]:
    """Return how a model's hidden states become logits."""
    return head_options(model) | dict(soft_cap=model.config.logit_soft_cap, temperature=temperature)


class TopTokens(NamedTuple):
    """A model's likeliest tokens in the place of each token, and their log-probs, likeliest first.

    What `Signals.top_ids` and `top_log_probs` hold: both stand at the token that is predicted, zeros at the first.
    """

    ids: Int[Array, "batch length top"]
    log_probs: Float32[Array, "batch length top"]


def top_tokens(teacher: Decoder, batch: Batch, *, top: int, temperature: float = 1.0) -> TopTokens:
    """Compute the `top` likeliest tokens in the place of each token of a batch, at a temperature, in float32.

    Outside of `jax.jit` it is compiled, too. Raises ConfigError unless `top` is below the teacher's vocabulary.
    """
    size = teacher.config.vocab_size
    check(0 < top < size, f"top_tokens: top={top} must be from 1 to {size - 1}, below the vocabulary of {size}.")
    return _top_tokens(teacher, batch, top, temperature)


@jit_if_eager
@run_with_auto_axes
def _top_tokens(teacher: Decoder, batch: Batch, top: int, temperature: float) -> TopTokens:
    _, weights = next_tokens(batch)
    length, layout = batch.tokens.shape[1], teacher.execution.layout
    batch, real = in_context_order(teacher.config, teacher.execution, batch, weights != 0)
    hidden, _ = _stream_of(teacher, batch)

    def of_tile(hidden: Array) -> tuple[Array, Array]:
        log_probs, ids = jax.lax.top_k(jax.nn.log_softmax(teacher.logits(hidden) / temperature), top)
        return log_probs, ids

    tile = tile_length(hidden.shape[0], length, teacher.config.vocab_size, None, layout.backend)
    log_probs, ids = (joined(x, length) for x in jax.lax.map(of_tile, cut(hidden, tile)))
    masked = (jnp.where(real[..., None], x, jnp.zeros_like(x)) for x in (ids, log_probs))
    return TopTokens(*(at_tokens(x, teacher.execution) for x in masked))
