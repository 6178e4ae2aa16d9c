"""Weights of tokens in the loss of a batch: how its tokens, answers and prompts are averaged."""

from typing import Literal, get_args

import numpy as np
from jaxtyping import Float32, Shaped

from eqx_decoders.errors import check, check_integer, check_option


Aggregation = Literal["token", "row", "constant", "prompt", "row_sum"]


def token_weights(
    tokens: Shaped[np.ndarray, "answers"] | Shaped[np.ndarray, "answers length"],
    aggregation: Aggregation = "token",
    *,
    groups: Shaped[np.ndarray, "answers"] | None = None,
    limit: int | None = None,
) -> Float32[np.ndarray, "answers"] | Float32[np.ndarray, "answers length"]:
    """Compute `c` of `loss = sum over tokens of c * loss of the token`, for all answers of one optimizer step.

    | aggregation | c of a token of an answer with `T` tokens | source |
    |---|---|---|
    | `token` | `1 / N`, N tokens in all | DAPO, arXiv 2503.14476 |
    | `row` | `1 / (B T)`, B answers in all | GRPO, arXiv 2402.03300 |
    | `constant` | `1 / (B limit)` | Dr. GRPO, arXiv 2503.20783 |
    | `prompt` | `1 / (P S)`, P prompts in all, S tokens in the prompt's group of answers | |
    | `row_sum` | `1 / B` | LUSPO with the ratio of rows; DPO with one pair a row |

    Call it before a batch is cut into microbatches and dealt to devices: sums of their losses are then the loss, and
    nothing is divided later. Answers without tokens weigh 0, and neither they nor their prompts are counted.

    **Arguments:**

    - `tokens`: the number of tokens of each answer, or which tokens count: 0 or 1, [answers, length].
    - `groups`: which prompt each answer is of, numbers or words; read by `prompt` alone.
    - `limit`: a fixed number of tokens, such as the longest that an answer may be; read by `constant` alone.

    **Returns:** c in the shape of `tokens`: of each answer, or of each token, 0 where the mask is 0.
    """
    check_option("aggregation", aggregation, get_args(Aggregation))
    check((groups is not None) == (aggregation == "prompt"), f"aggregation={aggregation!r}: groups go with 'prompt'.")
    check((limit is not None) == (aggregation == "constant"), f"aggregation={aggregation!r}: a limit, with 'constant'.")
    mask = np.asarray(tokens, np.float64)
    lengths = mask if mask.ndim == 1 else mask.sum(axis=1)
    present = lengths > 0
    divisors = np.where(present, _divisors(lengths, aggregation, groups, limit), np.inf)
    weights = 1.0 / divisors
    return (weights if mask.ndim == 1 else weights[:, None] * mask).astype(np.float32)


def _divisors(lengths: np.ndarray, aggregation: str, groups: np.ndarray | None, limit: int | None) -> np.ndarray:
    """Return 1 / c of each answer; of those without tokens anything."""
    answers = np.full_like(lengths, np.count_nonzero(lengths))
    if aggregation == "token":
        return np.full_like(lengths, lengths.sum())
    if aggregation == "row":
        return answers * lengths
    if limit is not None:
        check_integer("limit", limit)
        return answers * limit
    if groups is not None:
        _, group = np.unique(groups, return_inverse=True)
        sizes = np.bincount(group, lengths)
        return np.count_nonzero(sizes) * sizes[group]
    return answers
