"""Encoding of texts with spans, in which the text before a span has the same tokens as a prompt at inference.

At inference a model gets `encode(prompt)`. `encode(prompt + completion)` may start with different tokens, because a
token can span the end of the prompt (`A: ` and `Paris` become `A`, `:`, ` Paris`). Such a text is split where the span
starts, and the second part is encoded as a continuation: without the space that some tokenizers put before a text.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.io.text.tokenizer import JsonTokenizer, Span, token_mask


# A continuation is encoded after one of these texts: the first text that does not merge with the continuation.
CONTEXTS = ("\n", "a", "0", ".", ")", "é", "|")


class EncodedSpans(NamedTuple):
    """Tokens of a text.

    - `mask`: True for tokens that have characters in a span.
    - `split`: whether the text was split where a span starts.
    - `joined`: whether a token crosses the start of a span, because the parts of a split text would not decode to the
        same text.
    """

    ids: np.ndarray
    mask: np.ndarray
    split: bool = False
    joined: bool = False


def encode_spans(
    tokenizer: JsonTokenizer,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
    literal: Sequence[Sequence[Span]] | None = None,
) -> list[EncodedSpans]:
    """Encode each text with `special=True`, such that the tokens before a span equal the tokens of the text before it.

    **Arguments:**

    - `spans`: spans of each text.
    - `literal`: spans of each text in which names of special tokens remain ordinary text.
    """
    plain_spans = [()] * len(texts) if literal is None else literal
    encodings = tokenizer.encodings(texts, plain_spans)
    segments: list[tuple[int, int, int, int]] = []  # number of the text, first token, first and last character
    for number, (encoding, starts) in enumerate(zip(encodings, spans, strict=True)):
        for start in dict.fromkeys(span[0] for span in starts if span[0] < span[1] and span[0] > 0):
            token, character = _last_special(tokenizer, encoding, start)
            segments.append((number, token, character, start))
    found = tokenizer.encodings(
        [texts[number][first:last] for number, _, first, last in segments],
        [_within(plain_spans[number], first, last) for number, _, first, last in segments],
    )
    cuts: dict[int, list[int]] = {}
    first_tokens: dict[tuple[int, int], int] = {}  # by the number of the text and the start of a span
    for (number, token, _, start), segment in zip(segments, found, strict=True):
        first_tokens[number, start] = token + len(segment.ids)
        if encodings[number].ids[token : token + len(segment.ids)] != segment.ids:
            cuts.setdefault(number, []).append(start)
    results = []
    for number, (encoding, text_spans) in enumerate(zip(encodings, spans, strict=True)):
        mask = np.zeros(len(encoding.ids), bool)
        for span in text_spans:
            inside = _span_mask(encoding, span, len(texts[number]))
            if number not in cuts:  # a special token may include the whitespace at the start of the span
                inside[: first_tokens.get((number, span[0]), 0)] = False
            mask |= inside
        unsplit = EncodedSpans(np.asarray(encoding.ids, np.int32), mask)
        if number in cuts:
            text = texts[number]
            parts = _encode_parts(tokenizer, text, text_spans, plain_spans[number], cuts[number], unsplit.ids)
            results.append(unsplit._replace(joined=True) if parts is None else parts)
        else:
            results.append(unsplit)
    return results


def _span_mask(encoding: Any, span: Span, length: int) -> np.ndarray:
    """Return which tokens are in a span of a text, including tokens without characters at the end of the text."""
    mask = token_mask(encoding, [span])
    if span[1] == length and mask.any():
        mask[int(np.argmax(mask)) :] = True
    return mask


def _last_special(tokenizer: JsonTokenizer, encoding: Any, stop: int) -> tuple[int, int]:
    """Return the index of the last special token before the character `stop`, and the index of its first character.

    Returns (0, 0) if there is none. The tokens after a special token do not depend on the text before it.
    """
    special = tokenizer.special_ids
    low, high = 0, len(encoding.ids)
    while low < high:  # binary search: tokens are in the order of their characters
        middle = (low + high) // 2
        if encoding.offsets[middle][1] <= stop:
            low = middle + 1
        else:
            high = middle
    ids = encoding.ids
    number = next((number for number in range(low - 1, -1, -1) if ids[number] in special), None)
    return (0, 0) if number is None else (number, encoding.offsets[number][0])


def _within(spans: Sequence[Span], first: int, last: int) -> list[Span]:
    """Return the spans between two characters, relative to the first character."""
    return [(start - first, stop - first) for start, stop in spans if first <= start and stop <= last]


def _encode_parts(
    tokenizer: JsonTokenizer,
    text: str,
    spans: Sequence[Span],
    literal: Sequence[Span],
    cuts: Sequence[int],
    unsplit_ids: np.ndarray,
) -> EncodedSpans | None:
    """Encode the parts of a text between cuts; None if their tokens do not decode to the same text."""
    edges = [0, *sorted(cuts), len(text)]
    expected = tokenizer.decode(unsplit_ids, special=True)
    ids: list[int] = []
    masks = []
    for first, last in itertools.pairwise(edges):
        parts = [(max(start, first) - first, min(stop, last) - first) for start, stop in spans]
        inside = [(start, stop) for start, stop in parts if start < stop]
        for context in ("",) if first == 0 else CONTEXTS:
            shift = len(context)
            context_ids = tokenizer.encodings([context], [()])[0].ids if context else []
            plain_spans = [(start + shift, stop + shift) for start, stop in _within(literal, first, last)]
            (encoding,) = tokenizer.encodings([context + text[first:last]], [plain_spans])
            new = encoding.ids[len(context_ids) :]
            decoded = tokenizer.decode([*ids, *new], special=True)
            texts = (expected, text)  # some decoders remove a space from the unsplit tokens
            is_end = last == len(text)
            is_same = decoded in texts if is_end else any(candidate.startswith(decoded) for candidate in texts)
            if is_same and encoding.ids[: len(context_ids)] == context_ids:
                mask = np.zeros(len(encoding.ids), bool)
                for start, stop in inside:
                    mask |= _span_mask(encoding, (start + shift, stop + shift), len(context) + last - first)
                masks.append(mask[len(context_ids) :])
                ids += new
                break
        else:
            return None
    return EncodedSpans(np.asarray(ids, np.int32), np.concatenate(masks), split=True)
