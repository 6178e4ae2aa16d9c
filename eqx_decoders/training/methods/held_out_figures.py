"""Loss and figures of held-out batches under what a run minimizes."""

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax

from eqx_decoders.data.batch import Batch
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.step.loss import Loss
from eqx_decoders.training.step.loss_weights import moved_loss_weights, with_loss_weights
from eqx_decoders.training.step.train_state import TrainState


COUNTS = ("pairs", "answers")  # what figures are means over, where not over tokens


def held_out_figures(
    loss: Loss, state: TrainState, batches: Iterable[Batch], prepare: Callable[[Batch], Batch]
) -> dict[str, float]:
    """Average the loss and its figures over the pairs, answers or tokens of batches that `prepare` hands over.

    They are those of the means of weights, where there are any.
    """
    loss = with_loss_weights(loss, moved_loss_weights(state.loss_weights, state.ema or {}))
    model = state.averaged
    totals, count = dict[str, float](), 0.0
    for batch in batches:
        value, figures, tokens = jax.device_get(_evaluated(loss, model, prepare(batch)))
        examples = float(next((figures[name] for name in COUNTS if name in figures), tokens))
        count += examples
        totals["loss"] = totals.get("loss", 0.0) + float(value) * (1.0 if loss.per_token else examples)
        for name, mean in figures.items():
            totals[name] = totals.get(name, 0.0) + float(mean) * examples
    return {name: total / max(count, 1.0) for name, total in totals.items() if name not in COUNTS}


@eqx.filter_jit
def _evaluated(loss: Any, model: Decoder, batch: Batch) -> tuple[Any, dict[str, Any], Any]:
    value, metrics = loss(model, batch, key=None, full_batch=batch)
    return value, loss.figures(metrics.sums), metrics.tokens
