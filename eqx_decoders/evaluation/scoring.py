"""Log-probabilities of given tokens, computed by an engine: continuations of contexts, and texts in windows.

A request for a continuation has all tokens except the last one as its prompt, and a logit bias that makes the last
token certain; its raw log-probability is returned. Continuations of one token therefore share one prompt, which is
prefilled once. Longer continuations share the cached blocks of their context, and logits are computed for the
continuation only.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from eqx_decoders.errors import ConfigError, check
from eqx_decoders.evaluation.engine_requests import EvaluationEngine, Progress, no_progress, run_requests
from eqx_decoders.serving.engine.request import Request, RequestOutput
from eqx_decoders.serving.engine.sampler import SamplingParams, TokenScore


FORCING_BIAS = 1e9  # logit bias of the last token of a continuation

Tokens = Sequence[int]


class Likelihood(NamedTuple):
    """Log-probability of a continuation, and whether greedy decoding would generate it."""

    logprob: float
    is_greedy: bool


def score_continuations(
    engine: EvaluationEngine, pairs: Sequence[tuple[Tokens, Tokens]], progress: Progress = no_progress
) -> list[Likelihood]:
    """Return `log p(continuation | context)` for pairs of token ids. Pairs with equal contexts should be adjacent.

    Contexts that are too long are truncated on the left. Raises ConfigError for a continuation that is too long, and
    for a context or continuation without tokens, because the sum over no tokens would be 0, the best possible score.
    """
    for number, (context, continuation) in enumerate(pairs):
        if len(context) == 0 or len(continuation) == 0:
            raise ConfigError(
                f"score_continuations: pair {number} has {len(context)} context tokens and {len(continuation)} "
                f"continuation tokens, but needs at least one of each. Start each context with the tokenizer's bos_id, "
                f"and remove empty continuations."
            )
    likelihoods: dict[int, Likelihood] = {}

    def on_output(number: int, output: RequestOutput) -> bool:
        likelihoods[number] = _likelihood(output, pairs[number][1])
        return True

    requests = (_request(context, continuation, engine.config.max_length) for context, continuation in pairs)
    run_requests(engine, requests, on_output, progress)
    return [likelihoods[number] for number in range(len(pairs))]


def _request(context: Tokens, continuation: Tokens, max_length: int) -> Request:
    count = len(continuation)
    check(
        count < max_length,
        f"a continuation has {count} tokens, which leaves no room for context in max_length={max_length}: increase it.",
    )
    tokens = (*context, *continuation)[-max_length:]
    return Request(
        prompt=tokens[:-1],
        max_new_tokens=1,
        sampling=SamplingParams(logit_bias=((int(tokens[-1]), FORCING_BIAS),)),
        logprobs=1,
        prompt_logprobs=1 if count > 1 else None,
        prompt_logprobs_from=len(tokens) - count if count > 1 else 1,
    )


def _likelihood(output: RequestOutput, continuation: Tokens) -> Likelihood:
    scores: tuple[TokenScore, ...] = (*output.prompt_scores, *output.scores)
    if [score.token for score in scores] != list(continuation):
        raise RuntimeError("The engine returned scores of tokens that are not in the continuation.")
    greedy = all(score.top[0][0] == score.token for score in scores)
    return Likelihood(math.fsum(score.logprob for score in scores), greedy)


def rolling_windows(count: int, window: int, context: int = 1) -> Iterator[tuple[int, int, int]]:
    """Yield windows `(begin, first, stop)` that together score each token of a text except the first one once.

    A window contains the tokens `begin:stop`, at most `window` tokens, and scores the tokens `first:stop`. Each window
    except the first has at least `context` tokens before the first scored token. The windows equal those of lm-eval's
    `get_rolling_token_windows`.

    Raises ConfigError if `context` leaves no room for scored tokens.
    """
    check(
        1 <= context < window,
        f"text_context={context} must be from 1 to {window - 1}, because windows have {window} tokens: decrease it, or "
        f"increase max_length.",
    )
    first = 1
    while first < count:
        stop = min(count, window if first == 1 else first + window - context)
        yield max(0, stop - window), first, stop
        first = stop


def score_texts(
    engine: EvaluationEngine, texts: Sequence[Tokens], context: int = 1, progress: Progress = no_progress
) -> list[float]:
    """Return the log-probability of each text, summed over all tokens except the first one (see `rolling_windows`).

    The result is 0 for a text of one token, such as an empty document with a BOS token. Raises ConfigError for a text
    without tokens.
    """
    pairs: list[tuple[Tokens, Tokens]] = []
    owners: list[int] = []
    for number, tokens in enumerate(texts):
        if len(tokens) == 0:
            raise ConfigError(
                f"score_texts: text {number} has 0 tokens, but needs at least 1, because the first token has no "
                f"probability: remove empty texts, or use a tokenizer with bos_id or eos_id."
            )
        for begin, first, stop in rolling_windows(len(tokens), engine.config.max_length, context):
            pairs.append((tokens[begin:first], tokens[first:stop]))
            owners.append(number)
    totals: list[list[float]] = [[] for _ in texts]
    for number, likelihood in zip(owners, score_continuations(engine, pairs, progress), strict=True):
        totals[number].append(likelihood.logprob)
    return [math.fsum(parts) for parts in totals]
