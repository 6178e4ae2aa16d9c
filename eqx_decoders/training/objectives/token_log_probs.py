"""Log-probs of the tokens of a batch, and the signals of its targets."""

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
from eqx_decoders.training.step.loss import head_options, head_weights, model_inputs, next_tokens, shift_to_previous
from eqx_decoders.training.step.zigzag import in_context_order, row_order


class TargetHidden(NamedTuple):
    """Hidden states of the last block at each token of a batch, with the targets of these tokens.

    All arrays are in the order in which the model reads the tokens (see `in_context_order`).

    **Arguments:**

    - `targets`: id of the next token.
    - `real`: whether there is a target.
    - `signals`: signals of the target; weights and completion ids are 0 where there is no target.
    """

    hidden: Float[Array, "batch length embed"]
    targets: Int[Array, "batch length"]
    real: Bool[Array, "batch length"]
    signals: Signals


class TargetLogProbs(NamedTuple):
    """Log-probs of the targets of a batch, each at the position of the preceding token.

    **Arguments:**

    - `found`: log-probs, entropies and normalizers.
    - `real`: whether there is a target.
    - `signals`: signals of the target; weights and completion ids are 0 where there is no target.
    """

    found: LogProbs
    real: Bool[Array, "batch length"]
    signals: Signals


@run_with_auto_axes
def target_hidden(model: Decoder, batch: Batch) -> TargetHidden:
    """Compute the hidden states of the last block, aligned with the signals of the next tokens. There is no dropout.

    Tokens are routed to the experts in `Signals.experts`, if present.
    """
    targets, weights = next_tokens(batch)
    signals = Signals() if batch.signals is None else batch.signals
    experts, signals = signals.experts, jax.tree.map(shift_to_previous, dataclasses.replace(signals, experts=None))
    experts = None if experts is None else jnp.asarray(experts)  # of input tokens, not of targets
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
    """Compute the log-probs of all targets of a batch, in float32, at the sampling temperature. There is no dropout."""
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
    """Set weights and completion ids to 0 where there is no target, as for the first token of a document."""

    def of_targets(x: PyTree) -> PyTree:
        return None if x is None else jnp.where(real, x, jnp.zeros_like(x))

    names = ("policy", "nll", "divergence", "completion_ids")
    values = {name: getattr(signals, name) for name in Signals.__dataclass_fields__}
    return Signals(**values | {name: of_targets(values[name]) for name in names})


def token_log_probs(model: Decoder, batch: Batch, *, temperature: float = 1.0) -> Float32[Array, "batch length"]:
    """Compute the log-prob of each token given the tokens before it, at its own position; 0 if it is not a target.

    `Signals.old`, `reference` and `teacher` hold such log-probs. Outside of `jax.jit` the function is compiled.
    """
    return _token_log_probs(model, batch, temperature)


@jit_if_eager
@run_with_auto_axes
def _token_log_probs(model: Decoder, batch: Batch, temperature: float) -> Float32[Array, "batch length"]:
    found, real, _ = target_log_probs(model, batch, temperature=temperature)
    log_probs = jnp.where(real, found.log_probs, 0.0)
    return at_tokens(log_probs, model.execution)


def at_tokens(x: Shaped[Array, "batch length *rest"], execution: Execution) -> Shaped[Array, "batch length *rest"]:
    """Shift values of targets to the target tokens, and restore the order of the row; 0 at the first token."""
    x = in_row_order(x, execution)
    return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


def in_row_order(x: Shaped[Array, "batch length *rest"], execution: Execution) -> Shaped[Array, "batch length *rest"]:
    """Restore the order of the row from the order in which the model reads the tokens."""
    order = row_order(execution, x.shape[1])
    return x if order is None else x[:, jnp.argsort(jnp.asarray(order))]


def needed(signals: Signals, *names: str) -> tuple[Array, ...]:
    """Return signals that an objective needs. Raises ConfigError if one is missing."""
    missing = [name for name in names if getattr(signals, name) is None]
    check(not missing, f"Batch.signals needs {', '.join(missing)}: the objective reads {', '.join(names)}.")
    return tuple(jnp.asarray(getattr(signals, name)) for name in names)
