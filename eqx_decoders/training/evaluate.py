"""Held-out evaluation: the sums over a whole split, counted once."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np

from eqx_decoders.decoder import Decoder
from eqx_decoders.training.data import Batch
from eqx_decoders.training.loss import evaluation_loss
from eqx_decoders.training.step import place


class HeldOut(NamedTuple):
    """Held-out loss: nats per target token, target tokens, and the sum of nats."""

    loss: float
    tokens: int
    nats: float

    @property
    def perplexity(self) -> float:
        """`exp(loss)`."""
        return math.exp(min(self.loss, 700.0))

    def nats_per_byte(self, count: int) -> float:
        """The same sum per byte of the text: comparable between tokenizers, and with compressors."""
        return self.nats / max(count, 1)


_loss = eqx.filter_jit(evaluation_loss)


def evaluate(model: Decoder, batches: Iterable[Batch], *, stop: Callable[[], bool] = lambda: False) -> HeldOut:
    """The loss of `model` on every target token of `batches`. `stop` is asked between batches, and ends it early."""
    layout = model.execution.layout
    sums = []
    for batch in batches:
        sums.append(_loss(model, place(batch, layout)))
        if stop():
            break
    nats, tokens = np.sum(np.asarray(jax.device_get(sums), np.float64).reshape(-1, 2), axis=0).tolist()
    return HeldOut(loss=nats / max(tokens, 1.0), tokens=int(tokens), nats=nats)
