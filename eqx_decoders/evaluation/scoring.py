"""Log-probabilities of given tokens, scored by an engine: continuations of contexts, and whole texts by windows.

The last token of a continuation is forced by a bias, and reported with the log-probability that the model itself gives
it. So continuations of one token are answers to one prompt, which is computed once; of longer ones the blocks of the
context are computed once, and products with the vocabulary are those of the continuation alone.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from eqx_decoders.errors import ConfigError, check
from eqx_decoders.evaluation.engine_requests import EvaluationEngine, Progress, no_progress, run_requests
from eqx_decoders.serving.engine.request import Request, RequestOutput
from eqx_decoders.serving.engine.sampler import SamplingParams, TokenScore


FORCED = 1e9  # added to the logit of the token that must follow

Tokens = Sequence[int]


class Likelihood(NamedTuple):
    """Log-probability of a continuation, and whether each of its tokens is the most likely one."""

    logprob: float
    is_greedy: bool


def score_continuations(
    engine: EvaluationEngine, pairs: Sequence[tuple[Tokens, Tokens]], progress: Progress = no_progress
) -> list[Likelihood]:
    """Return `log p(continuation | context)` of each pair of token ids. Pairs with equal contexts should be adjacent.

    Contexts that are too long are cut at the start. Raises ConfigError for a continuation that is too long, and for a
    context or continuation without tokens. A sum over no tokens would be 0, the best possible score.
    """
    for number, (context, continuation) in enumerate(pairs):
        if len(context) == 0 or len(continuation) == 0:
            raise ConfigError(
                f"score_continuations: pair {number} has {len(context)} context tokens and {len(continuation)} "
                f"continuation tokens, but needs at least one of each. Start each context with the tokenizer's bos_id, "
                f"and remove empty continuations."
            )
    likelihoods: dict[int, Likelihood] = {}

    def take(number: int, output: RequestOutput) -> bool:
        likelihoods[number] = _likelihood(output, pairs[number][1])
        return True

    requests = (_request(context, continuation, engine.config.max_length) for context, continuation in pairs)
    run_requests(engine, requests, take, progress)
    return [likelihoods[number] for number in range(len(pairs))]


def _request(context: Tokens, continuation: Tokens, most: int) -> Request:
    count = len(continuation)
    rule = f"which leave no context in max_length={most}: raise it"
    check(count < most, f"a continuation has {count} tokens, {rule}.")
    tokens = (*context, *continuation)[-most:]
    return Request(
        prompt=tokens[:-1],
        max_new_tokens=1,
        sampling=SamplingParams(logit_bias=((int(tokens[-1]), FORCED),)),
        logprobs=1,
        prompt_logprobs=1 if count > 1 else None,
        prompt_logprobs_from=len(tokens) - count if count > 1 else 1,
    )


def _likelihood(output: RequestOutput, continuation: Tokens) -> Likelihood:
    scores: tuple[TokenScore, ...] = (*output.prompt_scores, *output.scores)
    if [score.token for score in scores] != list(continuation):
        raise RuntimeError("The engine scored other tokens than those of the continuation.")
    greedy = all(score.top[0][0] == score.token for score in scores)
    return Likelihood(math.fsum(score.logprob for score in scores), greedy)


def rolling_windows(count: int, window: int, context: int = 1) -> Iterator[tuple[int, int, int]]:
    """Yield `begin, first, stop` of windows that score tokens 1 to count - 1 of a text once each.

    A window holds the tokens [begin, stop), at most `window`, and scores those from `first` on, with as much before
    them as fits; each window but the first has at least `context` tokens before the first that it scores. These are
    the windows of lm-eval's `get_rolling_token_windows`.

    Raises ConfigError for a context that leaves nothing to score.
    """
    rule = f"must leave room in windows of {window} tokens: lower it, or raise max_length"
    check(1 <= context < window, f"a context of {context} tokens {rule}.")
    first = 1
    while first < count:
        stop = min(count, window if first == 1 else first + window - context)
        yield max(0, stop - window), first, stop
        first = stop


def score_texts(
    engine: EvaluationEngine, texts: Sequence[Tokens], context: int = 1, progress: Progress = no_progress
) -> list[float]:
    """Return the sum of the log-probs of each text's tokens without its first token (see `rolling_windows`).

    The result is 0 for a text of a single token, such as an empty document after bos. Raises ConfigError for a text
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
