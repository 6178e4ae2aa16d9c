"""Held-out evaluation: the sums over a whole split, counted once."""

import collections
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from eqx_decoders.decoder import Decoder
from eqx_decoders.inference.generate import generate
from eqx_decoders.inference.text import prompt_ids
from eqx_decoders.io.processes import AHEAD
from eqx_decoders.io.tokenizer import Tokenizer
from eqx_decoders.sampling import GenerationConfig
from eqx_decoders.training.data import Batch
from eqx_decoders.training.loss import evaluation_sums
from eqx_decoders.training.processes import place


class HeldOut(NamedTuple):
    """Held-out loss: nats per target token, target tokens, and the sum of nats.

    `acceptance`: of each depth of multi-token prediction the share of its draft tokens that the head confirms.
    """

    loss: float
    tokens: int
    nats: float
    acceptance: tuple[float, ...] = ()

    @property
    def perplexity(self) -> float:
        """`exp(loss)`."""
        return math.exp(min(self.loss, 700.0))

    def nats_per_byte(self, count: int) -> float:
        """The same sum per byte of the text: comparable between tokenizers, and with compressors."""
        return self.nats / max(count, 1)


def sample_text(model: Decoder, tokenizer: Tokenizer, prompt: str, *, max_new_tokens: int, seed: int) -> str:
    """The prompt and its continuation by the model, drawn at temperature 0.7 from the likeliest 95 %."""
    stops = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    new = generate(
        model,
        prompt_ids(tokenizer, prompt)[None],
        max_new_tokens=max_new_tokens,
        sampler=GenerationConfig().sampler(),
        key=jax.random.key(seed),
        stop_ids=stops,
        pad_id=stops[0] if stops else 0,
    )
    return prompt + tokenizer.decode([token for token in np.asarray(new)[0].tolist() if token not in stops])


_sums = jax.jit(evaluation_sums)  # not eqx.filter_jit, which returns when all is computed


def evaluate(
    model: Decoder, batches: Iterable[Batch], rows: int, *, stop: Callable[[], bool] = lambda: False
) -> HeldOut:
    """The loss of `model` on every target token of `batches`, which have `rows` sequences over all processes.

    `stop` is asked after each batch and ends the evaluation early; it must say the same in all processes.
    """
    layout = model.execution.layout
    depths = 0 if model.config.mtp is None else model.config.mtp.num_depths
    total = np.zeros((2 + 2 * depths,), np.float64)
    # CPUs that talk to each other hang where two programs that don't need each other's results run at a time
    alone = layout.platform != "cpu" or layout.mesh is None
    waiting: collections.deque[Any] = collections.deque()

    def read(behind: int = 0) -> None:
        while len(waiting) > behind:
            sums = jax.device_get(waiting.popleft())
            total[:] += np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(sums)])

    for batch in batches:
        waiting.append(_sums(model, place(batch, layout, rows)))
        read(behind=AHEAD if alone else 0)
        if stop():
            break
    read()
    nats, tokens, *rest = total.tolist()
    rates = tuple(a / max(p, 1.0) for a, p in zip(rest[:depths], rest[depths:], strict=True))
    return HeldOut(loss=nats / max(tokens, 1.0), tokens=int(tokens), nats=nats, acceptance=rates)
