"""Batches of preference data: pairs or labeled completions, packed into rows, with the `Signals` that losses read.

The examples are shuffled again in each epoch. A batch takes examples in this order and puts each example into the first
row with enough free space. The first example that fits into no row starts the next batch. So a batch is determined by
the number of examples before it, which is the complete state of the iterator, and each process makes only the rows of
its own devices.

Each completion is a separate segment that starts with its prompt. `Signals.completion_ids` has the number of the
completion at the tokens of the completion. Weights are normalized over the complete batch, so that the loss is their
sum over all microbatches and devices.

**Pairs.** Both completions are in the same row and have the numbers 2k - 1 (chosen) and 2k (rejected).
`Signals.policy` is 1 / (number of pairs). If some pairs have a margin, `Signals.baseline` contains the margins.

**Labeled completions (KTO).** `Signals.advantages` is 1 or -1, and `policy` is 1 / (number of completions). KTO's
reference point z needs log-probs of completions that belong to other prompts. So a batch has additional, mismatched
segments: the prompt of each example with the completion of the next example; the last prompt gets the completion of the
first example. Mismatched completions are numbered from `max_completions` / 2 + 1, with label 0 and policy weight 0.
`Signals.divergence` is 1 / (number of mismatched segments) at their completions:
`z = max(0, sum of divergence * (log p - log reference))`. There is no mismatched segment if both examples have the same
prompt, or if the segment would be longer than a row.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.packing_plans import check_same_data, permutation
from eqx_decoders.data.preferences import Completion, Example, Preferences
from eqx_decoders.data.signals import Signals
from eqx_decoders.errors import check_integer, check_option


Split = Literal["train", "held_out"]


class _Segment(NamedTuple):
    """A completion with its prompt, placed in a row of a batch.

    - `row`: index of the row in the batch.
    - `number`: number of the completion in the row (`Signals.completion_ids`).
    - `label`, `margin`: fields of the `Example`.
    - `mismatched`: whether prompt and completion are from different examples.
    """

    row: int
    number: int
    completion: Completion
    label: int
    margin: float
    mismatched: bool


class PreferenceBatches:
    """Iterator over `Batch`es of NumPy arrays of shape `[len(rows), preferences.seq_len]`, with `signals`.

    **Arguments:**

    - `rows`: indices, in a batch of `batch_size` rows, of the rows that this process makes (see `host_rows`).
    - `batch_size`: number of rows of the global batch.
    - `examples_per_row`: maximum number of pairs, or of labeled completions, in a row.
    - `split`: "train" never ends; "held_out" makes one pass, and the last batch is padded.
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
        self.preferences = preferences
        self.examples_per_row = examples_per_row
        self.complete: Callable[[Batch], Batch] = lambda batch: batch  # a training method adds its stored signals here
        self._rows = tuple(rows)
        self._batch_size = batch_size
        self._seed = seed
        self._split = check_option("split", split, get_args(Split))
        self._num_taken = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        segments, num_examples = self._plan()
        if num_examples == 0:
            raise StopIteration
        self._num_taken += num_examples
        return self.complete(self._batch(segments))

    def __enter__(self) -> "PreferenceBatches":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: this iterator has no background thread."""

    def rewind(self) -> "PreferenceBatches":
        """Go back to the first batch; `for batch in held_out.rewind(): …` makes one pass."""
        self._num_taken = 0
        return self

    @property
    def max_completions(self) -> int:
        """Maximum number of completions in a row, including mismatched completions."""
        return 2 * self.examples_per_row

    @property
    def epochs(self) -> float:
        """Number of passes over the examples so far."""
        return self._num_taken / len(self.preferences.examples)

    def steps_of_epochs(self, epochs: float) -> int:
        """Return the number of steps that pass over the examples `epochs` times; at least 1."""
        batches, steps = copy.copy(self), 0
        batches._num_taken = 0
        while steps == 0 or batches.epochs < epochs:
            batches._num_taken += batches._plan()[1]
            steps += 1
        return steps

    def source_epochs(self) -> Mapping[str, float]:
        """Return an empty mapping: mixtures of preference data are not supported."""
        return {}

    def describe(self, start: int, steps: int) -> str:
        """Return a summary of the examples; the arguments are ignored."""
        return self.preferences.describe()

    def get_state(self) -> dict[str, Any]:
        """Return the state as JSON values: the number of examples so far, the hash of the data, and the settings."""
        return {"example": self._num_taken, **self._identity()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume exactly where `get_state` was called.

        `batch_size` and the number of processes may differ. Raises DataError if the data or other settings differ.
        """
        check_same_data(state, self._identity())
        self._num_taken = int(state["example"])

    def _identity(self) -> dict[str, Any]:
        settings = {"seed": self._seed, "seq_len": self.preferences.seq_len}
        return {"split": self._split, "preferences": self.preferences.content_hash, **settings}

    # --- packing -----------------------------------------------------------------------------------------------------

    def _next_examples(self) -> Iterator[Example]:
        """Yield the examples from the current position on, epoch after epoch."""
        examples = self.preferences.examples
        epoch, position = divmod(self._num_taken, len(examples))
        while self._split == "train" or epoch == 0:
            order = _order(len(examples), f"{self._seed}/epoch {epoch}")
            yield from (examples[index] for index in order[position:])
            epoch, position = epoch + 1, 0

    def _plan(self) -> tuple[Sequence[_Segment], int]:
        """Return the segments of the next batch and the number of examples in the batch."""
        plan = _plan_pairs if self.preferences.paired else _plan_labeled
        rows = _Rows(self._batch_size, self.preferences.seq_len, self.examples_per_row)
        return plan(self._next_examples(), rows)

    # --- arrays -------------------------------------------------------------------------------------------------------

    def _batch(self, segments: Sequence[_Segment]) -> Batch:
        """Write the segments into the arrays of this process's rows."""
        shape = (len(self._rows), self.preferences.seq_len)
        local_rows = {row: index for index, row in enumerate(self._rows)}
        tokens, segment_ids, positions, completion_ids = (np.zeros(shape, np.int32) for _ in range(4))
        policy, advantages, divergence, margins = (np.zeros(shape, np.float32) for _ in range(4))
        num_mismatched = sum(segment.mismatched for segment in segments)
        num_examples = (len(segments) - num_mismatched) // (2 if self.preferences.paired else 1)
        used_tokens = [0] * self._batch_size  # by row
        num_segments = [0] * self._batch_size  # by row
        for segment in segments:
            row = segment.row
            length = len(segment.completion.tokens)
            targets = segment.completion.targets
            start = used_tokens[row]
            used_tokens[row] += length
            num_segments[row] += 1
            if row not in local_rows:
                continue
            span = local_rows[row], slice(start, start + length)
            tokens[span] = segment.completion.tokens
            segment_ids[span] = num_segments[row]
            positions[span] = np.arange(length)
            completion_ids[span] = targets * segment.number
            advantages[span] = targets * segment.label
            margins[span] = targets * segment.margin
            if segment.mismatched:
                divergence[span] = targets * (1 / num_mismatched)
            else:
                policy[span] = targets * (1 / num_examples)
        if self.preferences.paired:
            signals = {"policy": policy} | ({"baseline": margins} if self.preferences.has_margins else {})
        else:
            signals = {"policy": policy, "advantages": advantages, "divergence": divergence}
        return Batch(
            tokens=tokens,
            segment_ids=segment_ids,
            positions=positions,
            loss_mask=completion_ids > 0,
            signals=Signals(**signals, completion_ids=completion_ids, max_completions=self.max_completions),
            contiguous=True,
        )


@functools.lru_cache(2)
def _order(count: int, seed: str) -> np.ndarray:
    return permutation(count, seed)


class _Rows:
    """Rows of a batch that is being packed: the free space and the number of examples of each row."""

    def __init__(self, num_rows: int, seq_len: int, max_examples: int):
        self.seq_len = seq_len
        self._max_examples = max_examples
        self._free_tokens = [seq_len] * num_rows
        self._num_matched = [0] * num_rows
        self._num_mismatched = [0] * num_rows

    def copy(self) -> "_Rows":
        rows = _Rows(0, self.seq_len, self._max_examples)
        rows._free_tokens = [*self._free_tokens]
        rows._num_matched = [*self._num_matched]
        rows._num_mismatched = [*self._num_mismatched]
        return rows

    def put(self, example: Example, *, mismatched: bool = False) -> list[_Segment] | None:
        """Put all completions of an example into the first row with enough space.

        Returns the new segments, or None if no row has enough space.
        """
        counts = self._num_mismatched if mismatched else self._num_matched
        for row, (free_tokens, count) in enumerate(zip(self._free_tokens, counts, strict=True)):
            if free_tokens >= example.size and count < self._max_examples:
                first_number = 1 + count * len(example.completions) + (self._max_examples if mismatched else 0)
                self._free_tokens[row] -= example.size
                counts[row] += 1
                return [
                    _Segment(row, number, completion, example.label, example.margin, mismatched)
                    for number, completion in enumerate(example.completions, first_number)
                ]
        return None


def _plan_pairs(examples: Iterator[Example], rows: _Rows) -> tuple[Sequence[_Segment], int]:
    """Put pairs into rows until a pair fits into no row; return the segments and the number of pairs."""
    segments = list[_Segment]()
    num_pairs = 0
    for example in examples:
        new_segments = rows.put(example)
        if new_segments is None:
            break
        segments += new_segments
        num_pairs += 1
    return segments, num_pairs


def _plan_labeled(examples: Iterator[Example], rows: _Rows) -> tuple[Sequence[_Segment], int]:
    """Put labeled completions and mismatched segments into rows until one of the segments fits into no row.

    Returns the segments and the number of examples.
    """
    segments = list[_Segment]()
    last_segments = list[_Segment]()  # the last prompt with the first completion
    taken = list[Example]()
    for example in examples:
        new_rows = rows.copy()
        new_segments = new_rows.put(example)
        mismatched: list[_Segment] | None = []
        new_last_segments: list[_Segment] | None = []
        if taken:
            mismatched = _put_mismatched(new_rows, taken[-1], example)
            # Reserve no space for the last segment: it is placed in a copy, because another example may follow.
            new_last_segments = _put_mismatched(new_rows.copy(), example, taken[0])
        if new_segments is None or mismatched is None or new_last_segments is None:
            break
        rows = new_rows
        segments += new_segments + mismatched
        last_segments = new_last_segments
        taken.append(example)
    return segments + last_segments, len(taken)


def _put_mismatched(rows: _Rows, prompt_of: Example, completion_of: Example) -> list[_Segment] | None:
    """Put the prompt of an example with the completion of another example into a row.

    Returns None if no row has enough space. Returns an empty list if both examples have the same prompt, or if the
    segment would be longer than a row.
    """
    prompt = prompt_of.completions[0].prompt
    completion = completion_of.completions[0]
    tokens = np.concatenate([prompt, completion.tokens[completion.start :]])
    if len(tokens) > rows.seq_len or np.array_equal(prompt, completion.prompt):
        return []
    targets = np.concatenate([np.zeros(len(prompt), bool), completion.targets[completion.start :]])
    return rows.put(Example((Completion(tokens, targets),)), mismatched=True)
