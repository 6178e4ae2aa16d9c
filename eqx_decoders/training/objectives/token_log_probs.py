"""Log-probs of a batch's tokens under a model, and the signals that belong to its targets."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, PyTree, Shaped

from eqx_decoders.context import Execution, Promises
from eqx_decoders.core.auto_jit import jit_if_eager
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.signals import Signals
from eqx_decoders.errors import check
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.expert_choices import with_choices
from eqx_decoders.sharding.explicit import run_with_auto_axes
from eqx_decoders.training.head.log_probs import LogProbs, linear_log_probs
from eqx_decoders.training.step.loss import head_options, head_weights, model_inputs, next_tokens, of_next
from eqx_decoders.training.step.zigzag import in_context_order, row_order


class TargetHidden(NamedTuple):
    """The stream behind the last block at each token of a batch, and what comes next there.

    **Arguments:**

    - `hidden`: in the order in which the model reads.
    - `targets`: the id of the next token.
    - `real`: whether there is a target.
    - `signals`: what belongs to the target; weights and answers are 0 where there is none.
    """

    hidden: Float[Array, "batch length embed"]
    targets: Int[Array, "batch length"]
    real: Bool[Array, "batch length"]
    signals: Signals


class TargetLogProbs(NamedTuple):
    """What a model says of the targets of a batch, each at the place of the token before it.

    **Arguments:**

    - `found`: log-probs, entropies and normalizers.
    - `real`: whether there is a target.
    - `signals`: what belongs to the target; weights and answers are 0 where there is none.
    """

    found: LogProbs
    real: Bool[Array, "batch length"]
    signals: Signals


@run_with_auto_axes
def target_hidden(model: Decoder, batch: Batch) -> TargetHidden:
    """Compute the stream behind the last block, and line up with it what belongs to the next tokens; no dropout.

    Tokens are sent to the experts of `Signals.experts`, where there are any.
    """
    targets, weights = next_tokens(batch)
    signals = Signals() if batch.signals is None else batch.signals
    experts, signals = signals.experts, jax.tree.map(of_next, dataclasses.replace(signals, experts=None))
    experts = None if experts is None else jnp.asarray(experts)  # of the tokens that are read, not of targets
    ordered = in_context_order(model.config, model.execution, batch, targets, weights != 0, signals, experts)
    batch, targets, real, signals, experts = ordered
    positions, segments = (None if x is None else jnp.asarray(x) for x in (batch.positions, batch.segment_ids))
    inputs, promises = model_inputs(model, batch), Promises(documents_are_contiguous=batch.contiguous)
    if experts is not None:
        inputs["inputs"] = with_choices(inputs["inputs"], experts)
    hidden, _, _ = model.run(jnp.asarray(batch.tokens), positions, segments, **inputs, promises=promises)
    return TargetHidden(hidden, targets, real, _of_targets(signals, real))


@run_with_auto_axes
def target_log_probs(model: Decoder, batch: Batch, *, temperature: float = 1.0) -> TargetLogProbs:
    """Compute the log-probs of all targets of a batch, in float32, at the temperature at which they were drawn.

    There is no dropout: of a policy, the weights that drew an answer and a reference all say what they would again.
    """
    hidden, targets, real, signals = target_hidden(model, batch)
    found = linear_log_probs(
        model.head_input(hidden),
        head_weights(model),
        targets,
        soft_cap=model.config.logit_soft_cap,
        temperature=temperature,
        **head_options(model),
    )
    return TargetLogProbs(found, real, signals)


def _of_targets(signals: Signals, real: Bool[Array, "batch length"]) -> Signals:
    """Set weights and answers to 0 where there is no target: what is about the first token of a document."""

    def of_targets(x: PyTree) -> PyTree:
        return None if x is None else jnp.where(real, x, jnp.zeros_like(x))

    names = ("policy", "nll", "divergence", "answers")
    values = {name: getattr(signals, name) for name in Signals.__dataclass_fields__}
    return Signals(**values | {name: of_targets(values[name]) for name in names})


def token_log_probs(model: Decoder, batch: Batch, *, temperature: float = 1.0) -> Float32[Array, "batch length"]:
    """Compute the log-prob of each token, given those before it, at its own place; 0 where it is no target.

    What `Signals.old`, `reference` and `teacher` hold. Outside of `jax.jit` it is compiled, too.
    """
    return _token_log_probs(model, batch, temperature)


@jit_if_eager
@run_with_auto_axes
def _token_log_probs(model: Decoder, batch: Batch, temperature: float) -> Float32[Array, "batch length"]:
    found, real, _ = target_log_probs(model, batch, temperature=temperature)
    log_probs = jnp.where(real, found.log_probs, 0.0)
    return at_tokens(log_probs, model.execution)


def at_tokens(x: Shaped[Array, "batch length *rest"], execution: Execution) -> Shaped[Array, "batch length *rest"]:
    """Put what stands before each token, in the order in which a model reads, at the token itself; 0 at the first."""
    x = in_row_order(x, execution)
    return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


def in_row_order(x: Shaped[Array, "batch length *rest"], execution: Execution) -> Shaped[Array, "batch length *rest"]:
    """Put what is in the order in which a model reads in that of the row."""
    order = row_order(execution, x.shape[1])
    return x if order is None else x[:, jnp.argsort(jnp.asarray(order))]


def needed(signals: Signals, *names: str) -> tuple[Array, ...]:
    """Return signals that an objective needs. Raises ConfigError for what is missing."""
    missing = [name for name in names if getattr(signals, name) is None]
    check(not missing, f"Batch.signals needs {', '.join(missing)}: the objective reads {', '.join(names)}.")
    return tuple(jnp.asarray(getattr(signals, name)) for name in names)
