"""Helpers: a small chat model with an engine, and log-probabilities of a direct forward pass."""

import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from eqx_decoders.evaluation.task_run import make_engine
from eqx_decoders.inference.text_model import TextModel, load_text_model
from eqx_decoders.serving.engine.config import EngineLimits
from eqx_decoders.serving.engine.engine import Engine


CHAT = Path(__file__).parents[1] / "fixtures" / "chat_llama"


@functools.cache
def chat_model() -> TextModel:
    """Return the model, its tokenizer and its chat template."""
    return load_text_model(CHAT, "float32")


@functools.cache
def small_engine() -> Engine:
    """Return an engine with few small slots and chunks much shorter than prompts."""
    return make_engine(chat_model(), EngineLimits(max_batch_size=3, max_length=64, prefill_chunk=16, token_budget=32))


def logprobs(tokens: Sequence[int]) -> np.ndarray:
    """Return the log-probabilities of the next token at each position."""
    padded = [*tokens, *[0] * (-len(tokens) % 32)]
    logits = chat_model().model(np.asarray([padded])).logits[0, : len(tokens)]
    return np.asarray(jax.nn.log_softmax(logits.astype("float32"), axis=-1), np.float64)


def most_likely(tokens: Sequence[int]) -> int:
    """Return the most likely next token."""
    return int(logprobs(tokens)[-1].argmax())


def forward(tokens: Sequence[int], first: int) -> tuple[float, bool]:
    """Return the log-probability of the tokens from `first`, and whether each token is the most likely token."""
    known = logprobs(tokens)
    own = [(known[at - 1, tokens[at]], known[at - 1].argmax() == tokens[at]) for at in range(first, len(tokens))]
    return sum(value for value, _ in own), all(greedy for _, greedy in own)
