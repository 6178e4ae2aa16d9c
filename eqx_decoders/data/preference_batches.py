"""Batches of preference data: pairs or answers with labels, packed into rows, with the signals that losses read.

The order of the examples differs in each epoch. A batch takes examples in this order, each into the first row with
enough space, until an example fits into no row. That example starts the next batch. So a batch follows from the number
of examples before it, which is the complete state, and each process makes only the rows that its devices hold.

Each answer is a segment of its own, with its prompt before it. `Signals.completion_ids` numbers the answers of a row at
their tokens. Weights are those of the whole batch, so that sums over microbatches and devices are its loss.

**Pairs.** Both answers are in the same row, with the indices 2k - 1 (chosen) and 2k (rejected). `Signals.policy` is
1 / pairs. If some pairs have a margin, it is in `Signals.baseline`.

**Answers with labels.** `Signals.advantages` is 1 or -1, `policy` 1 / answers. KTO's z needs log-probs of answers to
other prompts: a batch has as further segments each prompt with the answer of the next example, the last one with that
of the first. They are numbered from `max_completions` / 2 + 1 on, have the label 0 and the weight 0, and in
`Signals.divergence` the weight 1 / their number: `z = max(0, sum of divergence * (log p - log reference))`. Where the
next example has the same prompt, or its answer does not fit behind this one, there is none.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.packing_plans import check_same_data, permutation
from eqx_decoders.data.preferences import Answer, Example, Preferences
from eqx_decoders.data.signals import Signals
from eqx_decoders.errors import check_integer, check_option


Split = Literal["train", "held_out"]


class _Segment(NamedTuple):
    """Answer in a row. `mismatched`: the prompt is from another example than the answer."""

    row: int
    number: int
    answer: Answer
    label: int
    margin: float
    mismatched: bool


class PreferenceBatches:
    """Iterator over `Batch`es of NumPy arrays, `[len(rows), preferences.seq_len]`, with `signals`.

    **Arguments:**

    - `rows`: indices of the rows to make of each batch of `batch_size` (see `host_rows`).
    - `examples_per_row`: maximum number of pairs, or answers with labels, in a row.
    - `split`: "train" never ends; "held_out" is one pass, and its last batch is padded.
    """

    def __init__(
        self,
        preferences: Preferences,
        *,
        rows: Sequence[int],
        batch_size: int,
        seed: int,
        examples_per_row: int = 16,
        split: Split = "train",
    ):
        check_integer("batch_size", batch_size)
        check_integer("examples_per_row", examples_per_row)
        self.preferences, self.examples_per_row = preferences, examples_per_row
        self.complete: Callable[[Batch], Batch] = lambda batch: batch  # adds signals that a training method stores
        self._rows, self._batch_size, self._seed = tuple(rows), batch_size, seed
        self._split, self._taken = check_option("split", split, get_args(Split)), 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        segments, count = self._plan()
        if count == 0:
            raise StopIteration
        self._taken += count
        return self.complete(self._batch(segments))

    def __enter__(self) -> "PreferenceBatches":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: no thread reads ahead."""

    def rewind(self) -> "PreferenceBatches":
        """Go back to the first batch: `for batch in held_out.rewind(): …` is one pass."""
        self._taken = 0
        return self

    @property
    def max_completions(self) -> int:
        """The largest number that an answer may have in its row."""
        return 2 * self.examples_per_row

    @property
    def epochs(self) -> float:
        """Number of passes over the examples so far."""
        return self._taken / len(self.preferences.examples)

    def steps_of_epochs(self, epochs: float) -> int:
        """Return the number of steps that pass over the examples `epochs` times; at least 1."""
        batches, steps = copy.copy(self), 0
        batches._taken = 0
        while steps == 0 or batches.epochs < epochs:
            batches._taken += batches._plan()[1]
            steps += 1
        return steps

    def source_epochs(self) -> Mapping[str, float]:
        """Return an empty mapping: preference data are not mixtures."""
        return {}

    def describe(self, start: int, steps: int) -> str:
        """Describe the examples and the records that were left out."""
        return self.preferences.describe()

    def get_state(self) -> dict[str, Any]:
        """Return the state as plain JSON: the number of examples so far, and everything that they depend on."""
        return {"example": self._taken, **self._identity()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume exactly where `get_state` was called. `batch_size` and the number of processes may differ.

        Raises DataError if the data or settings of `state` differ.
        """
        check_same_data(state, self._identity())
        self._taken = int(state["example"])

    def _identity(self) -> dict[str, Any]:
        settings = {"seed": self._seed, "seq_len": self.preferences.seq_len}
        return {"split": self._split, "preferences": self.preferences.content_hash, **settings}

    # --- packing -----------------------------------------------------------------------------------------------------

    def _stream(self) -> Iterator[Example]:
        """Yield the next examples in order."""
        examples = self.preferences.examples
        epoch, position = divmod(self._taken, len(examples))
        while self._split == "train" or epoch == 0:
            yield from (examples[index] for index in _order(len(examples), f"{self._seed}/epoch {epoch}")[position:])
            epoch, position = epoch + 1, 0

    def _plan(self) -> tuple[Sequence[_Segment], int]:
        """Return the segments of the next batch, and the number of its examples."""
        plan = _plan_pairs if self.preferences.paired else _plan_labelled
        return plan(self._stream(), _Rows(self._batch_size, self.preferences.seq_len, self.examples_per_row))

    # --- arrays -------------------------------------------------------------------------------------------------------

    def _batch(self, segments: Sequence[_Segment]) -> Batch:
        shape, local_rows = (
            (len(self._rows), self.preferences.seq_len),
            {row: index for index, row in enumerate(self._rows)},
        )
        arrays: dict[str, Any] = {name: np.zeros(shape, np.int32) for name in ("tokens", "segment_ids", "positions")}
        signals = {name: np.zeros(shape, np.float32) for name in ("policy", "advantages", "divergence")}
        answers, margins = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        mismatched = sum(segment.mismatched for segment in segments)
        examples = (len(segments) - mismatched) // (2 if self.preferences.paired else 1)
        weighted = ("policy", 1 / examples), ("divergence", 1 / max(1, mismatched))
        used, count = [0] * self._batch_size, [0] * self._batch_size
        for segment in segments:
            row, (tokens, targets) = segment.row, segment.answer
            start, used[row] = used[row], used[row] + len(tokens)
            count[row] += 1
            if row not in local_rows:
                continue
            span = local_rows[row], slice(start, used[row])
            arrays["tokens"][span], arrays["segment_ids"][span] = tokens, count[row]
            arrays["positions"][span] = np.arange(len(tokens))
            answers[span], signals["advantages"][span] = targets * segment.number, targets * segment.label
            margins[span] = targets * segment.margin
            name, weight = weighted[segment.mismatched]
            signals[name][span] = targets * weight
        if self.preferences.paired:
            signals = {"policy": signals["policy"]} | ({"baseline": margins} if self.preferences.has_margins else {})
        marks = Signals(**signals, completion_ids=answers, max_completions=self.max_completions)
        return Batch(**arrays, loss_mask=answers > 0, signals=marks, contiguous=True)


@functools.lru_cache(2)
def _order(count: int, seed: str) -> np.ndarray:
    return permutation(count, seed)


class _Rows:
    """Rows of a batch: the free space of each row, and its numbers of matching and of mismatched answers."""

    def __init__(self, rows: int, seq_len: int, max_examples: int):
        self.seq_len, self._max_examples = seq_len, max_examples
        self._room, self._counts = [seq_len] * rows, ([0] * rows, [0] * rows)

    def copy(self) -> "_Rows":
        """Return a copy."""
        rows = _Rows(0, self.seq_len, self._max_examples)
        rows._room, rows._counts = [*self._room], ([*self._counts[0]], [*self._counts[1]])
        return rows

    def put(self, example: Example, *, mismatched: bool = False) -> list[_Segment] | None:
        """Put all answers of an example into the first row with enough space; return None if there is no such row."""
        size, counts = example.size, self._counts[mismatched]
        for row, (room, count) in enumerate(zip(self._room, counts, strict=True)):
            if room >= size and count < self._max_examples:
                first = count * len(example.answers) + 1 + mismatched * self._max_examples
                self._room[row] -= size
                counts[row] += 1
                numbered = enumerate(example.answers, first)
                return [
                    _Segment(row, number, answer, example.label, example.margin, mismatched)
                    for number, answer in numbered
                ]
        return None


def _plan_pairs(examples: Iterator[Example], rows: _Rows) -> tuple[Sequence[_Segment], int]:
    """Put pairs into rows until a pair fits into no row; return their segments and their number."""
    segments, count = list[_Segment](), 0
    for example in examples:
        if (more := rows.put(example)) is None:
            break
        segments += more
        count += 1
    return segments, count


def _plan_labelled(examples: Iterator[Example], rows: _Rows) -> tuple[Sequence[_Segment], int]:
    """Put answers, and prompts with the answer of the next example, into rows until a segment fits into no row."""
    segments, closing, taken = list[_Segment](), list[_Segment](), list[Example]()
    for example in examples:
        trial, more = rows.copy(), list[_Segment | None]()
        more += trial.put(example) or [None]
        if taken:
            more += _put_mismatched(trial, taken[-1], example)
            last = _put_mismatched(trial.copy(), example, taken[0])  # if no other example follows
        else:
            last = []
        if None in more or None in last:
            break
        rows, closing = trial, [each for each in last if each is not None]
        segments += [each for each in more if each is not None]
        taken.append(example)
    return segments + closing, len(taken)


def _put_mismatched(rows: _Rows, one: Example, other: Example) -> list[_Segment | None]:
    """Put the prompt of one example with the answer of another into a row; return `[None]` if there is no space.

    Returns an empty list if both examples have the same prompt, or if prompt and answer are longer than a row.
    """
    prompt, (_, targets), start = one.answers[0].prompt, other.answers[0], other.answers[0].start
    tokens = np.concatenate([prompt, other.answers[0].tokens[start:]])
    if len(tokens) > rows.seq_len or np.array_equal(prompt, other.answers[0].prompt):
        return []
    answer = Answer(tokens, np.concatenate([np.zeros(len(prompt), bool), targets[start:]]))
    return [*(rows.put(Example((answer,)), mismatched=True) or [None])]
