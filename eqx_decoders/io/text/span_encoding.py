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
    """Encode each text with `special=True`. The tokens before a span are the tokens of the text up to the span.

    literal: spans of each text in which names of special tokens are plain text.
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
    for number, (encoding, each) in enumerate(zip(encodings, spans, strict=True)):
        mask = np.zeros(len(encoding.ids), bool)
        for span in each:
            inside = _span_mask(encoding, span, len(texts[number]))
            if number not in cuts:  # a special token may cover blanks after it, with which the span starts
                inside[: first_tokens.get((number, span[0]), 0)] = False
            mask |= inside
        whole = EncodedSpans(np.asarray(encoding.ids, np.int32), mask)
        if number in cuts:
            parts = _encode_parts(tokenizer, texts[number], each, plain_spans[number], cuts[number], whole.ids)
            results.append(whole._replace(joined=True) if parts is None else parts)
        else:
            results.append(whole)
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
    special, low, high = tokenizer.special_ids, 0, len(encoding.ids)
    while low < high:  # tokens are in the order of their characters
        middle = (low + high) // 2
        if encoding.offsets[middle][1] <= stop:
            low = middle + 1
        else:
            high = middle
    ids = encoding.ids
    number = next((number for number in range(low - 1, -1, -1) if ids[number] in special), None)
    return (0, 0) if number is None else (number, encoding.offsets[number][0])


def _within(spans: Sequence[Span], first: int, last: int) -> list[Span]:
    """Return the spans between two characters, counted from the first one."""
    return [(start - first, stop - first) for start, stop in spans if first <= start and stop <= last]


def _encode_parts(
    tokenizer: JsonTokenizer,
    text: str,
    spans: Sequence[Span],
    literal: Sequence[Span],
    cuts: Sequence[int],
    whole: np.ndarray,
) -> EncodedSpans | None:
    """Encode the parts of a text between cuts; None if their tokens do not decode to the same text."""
    edges, expected = [0, *sorted(cuts), len(text)], tokenizer.decode(whole, special=True)
    ids: list[int] = []
    masks = []
    for first, last in itertools.pairwise(edges):
        parts = [(max(start, first) - first, min(stop, last) - first) for start, stop in spans]
        inside = [(start, stop) for start, stop in parts if start < stop]
        for context in ("",) if first == 0 else CONTEXTS:
            shift, before = len(context), tokenizer.encodings([context], [()])[0].ids if context else []
            plain_spans = [(start + shift, stop + shift) for start, stop in _within(literal, first, last)]
            (encoding,) = tokenizer.encodings([context + text[first:last]], [plain_spans])
            new = encoding.ids[len(before) :]
            decoded = tokenizer.decode([*ids, *new], special=True)
            texts = (expected, text)  # some decoders drop a space of the joint tokens
            same = decoded in texts if last == len(text) else any(each.startswith(decoded) for each in texts)
            if same and encoding.ids[: len(before)] == before:
                mask = np.zeros(len(encoding.ids), bool)
                for start, stop in inside:
                    mask |= _span_mask(encoding, (start + shift, stop + shift), len(context) + last - first)
                masks.append(mask[len(before) :])
                ids += new
                break
        else:
            return None
    return EncodedSpans(np.asarray(ids, np.int32), np.concatenate(masks), split=True)
