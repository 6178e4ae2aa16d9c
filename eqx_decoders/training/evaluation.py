"""Held-out evaluation: sums over a whole split, counted once."""

import collections
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.host_rows import place_read_only
from eqx_decoders.inference.generation import generate
from eqx_decoders.io.processes import MAX_IN_FLIGHT_STEPS
from eqx_decoders.io.text.tokenizer import Tokenizer, prompt_ids
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.held_out import HeldOut
from eqx_decoders.training.step.loss import evaluation_sums


def sample_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    seed: int,
    stop_ids: Sequence[int] = (),
) -> str:
    """Return the prompt and a continuation, sampled with temperature 0.7 and top-p 0.95.

    `stop_ids`: ids that end the continuation, in addition to the tokenizer's eos.
    """
    eos = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    stops = tuple(dict.fromkeys((*eos, *stop_ids)))
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
    """Compute the loss of `model` on every target token of `batches`, which have `rows` sequences over all processes.

    `stop` is called after each batch and ends the evaluation early; it must say the same in all processes.
    """
    return evaluate_sets(model, {"": batches}, rows, stop=stop)[0]


def evaluate_sets(
    model: Decoder, sets: Mapping[str, Iterable[Batch]], rows: int, *, stop: Callable[[], bool] = lambda: False
) -> tuple[HeldOut, dict[str, HeldOut]]:
    """Compute the loss on every target token of all sets together, and of each set by its name; see `evaluate`."""
    depths = 0 if model.config.mtp is None else model.config.mtp.num_depths
    layout = model.execution.layout
    totals = {name: np.zeros((2 + 2 * depths,), np.float64) for name in sets}
    waiting: collections.deque[tuple[str, Any]] = collections.deque()

    def read(behind: int = 0) -> None:
        while len(waiting) > behind:
            name, sums = waiting.popleft()
            totals[name] += np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(sums))])

    for name, batch in ((name, batch) for name, batches in sets.items() for batch in batches):
        waiting.append((name, _sums(model, place_read_only(batch, layout, rows))))
        read(behind=MAX_IN_FLIGHT_STEPS if layout.backend.parallel_programs else 0)
        if stop():
            break
    read()
    whole = sum(totals.values(), np.zeros((2 + 2 * depths,), np.float64))
    return _held_out(whole, depths), {name: _held_out(total, depths) for name, total in totals.items()}


def _held_out(total: np.ndarray, depths: int) -> HeldOut:
    nats, tokens, *rest = total.tolist()
    rates = tuple(a / (p or 1.0) for a, p in zip(rest[:depths], rest[depths:], strict=True))
    loss = nats / tokens if tokens else math.nan  # 0 would be a perfect loss
    return HeldOut(loss=loss, tokens=int(tokens), nats=nats, acceptance=rates)
