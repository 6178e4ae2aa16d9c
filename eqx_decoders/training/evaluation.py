"""Held-out evaluation: the sums over a whole split, counted once."""

import collections
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from eqx_decoders.core.sampling import GenerationConfig
from eqx_decoders.data.batches import Batch
from eqx_decoders.data.host_rows import place
from eqx_decoders.data.store.corpus_stats import CorpusStats
from eqx_decoders.inference.generation import generate
from eqx_decoders.inference.text_model import prompt_ids
from eqx_decoders.io.coordination import AHEAD
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.step.loss import evaluation_sums


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


def describe_held_out(name: str, result: HeldOut, counts: Sequence[CorpusStats]) -> list[str]:
    """Lines about the loss of a set: per token and, where all of it was evaluated, per byte beside what gzip needs."""
    what = f"held-out loss{name and f' of {name}'}"
    whole = result.tokens == sum(one.targets for one in counts)
    lines = [f"{what}: {result.loss:.4f} nats per token, of {'all' if whole else 'the first'} {result.tokens:,} tokens"]
    sizes = [one.bytes or 0 for one in counts]
    if whole and all(sizes):
        size = sum(sizes)
        lines.append(f"{what}: {result.nats_per_byte(size):.4f} nats per byte, of {size:,} bytes")
        rates = [one.gzip_nats_per_byte for one in counts]
        if None not in rates:
            rate = sum(count * (rate or 0) for count, rate in zip(sizes, rates, strict=True)) / size
            parts = [one.gzip_bytes for one in counts]
            read = sum(size if part is None else part for size, part in zip(sizes, parts, strict=True))
            text = "the same text" if read == size else f"{read:,} bytes of the same text"
            lines.append(f"gzip -9 needs{name and f' of {name}'}: {rate:.4f} nats per byte, for {text}")
    return lines


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
    return evaluate_sets(model, {"": batches}, rows, stop=stop)[0]


def evaluate_sets(
    model: Decoder, sets: Mapping[str, Iterable[Batch]], rows: int, *, stop: Callable[[], bool] = lambda: False
) -> tuple[HeldOut, dict[str, HeldOut]]:
    """The loss on every target token of all sets together, and that of each by its name; see `evaluate`."""
    depths = 0 if model.config.mtp is None else model.config.mtp.num_depths
    layout = model.execution.layout
    totals = {name: np.zeros((2 + 2 * depths,), np.float64) for name in sets}
    # CPUs that talk to each other hang where two programs that don't need each other's results run at a time
    may_run_ahead = layout.platform != "cpu" or layout.mesh is None
    waiting: collections.deque[tuple[str, Any]] = collections.deque()

    def read(behind: int = 0) -> None:
        while len(waiting) > behind:
            name, sums = waiting.popleft()
            totals[name] += np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(sums))])

    for name, batch in ((name, batch) for name, batches in sets.items() for batch in batches):
        waiting.append((name, _sums(model, place(batch, layout, rows))))
        read(behind=AHEAD if may_run_ahead else 0)
        if stop():
            break
    read()
    whole = sum(totals.values(), np.zeros((2 + 2 * depths,), np.float64))
    return _held_out(whole, depths), {name: _held_out(total, depths) for name, total in totals.items()}


def _held_out(total: np.ndarray, depths: int) -> HeldOut:
    nats, tokens, *rest = total.tolist()
    rates = tuple(a / (p or 1.0) for a, p in zip(rest[:depths], rest[depths:], strict=True))
    return HeldOut(loss=nats / (tokens or 1.0), tokens=int(tokens), nats=nats, acceptance=rates)
